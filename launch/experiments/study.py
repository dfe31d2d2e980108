"""The definition of a study: arms that differ only in the settings they list, each run with several seeds.

about: one sentence
base: imdb-tiny-paper            # the preset that all arms build on
settings: {dtype: fp32, test_queries: 500}   # of all arms; these two are required
seeds: {1: 5, 2: 3}              # by tier: a count or a list; or a single count or list for all tiers
arms:
  cory: {label: CORY}            # the first arm is the base itself
  ppo: {label: PPO, num_agents: 1}
  ppo-high-lr: {against: ppo, tier: 2, lr: 1.0e-3}

contrasts:                       # planned comparisons, written down before the runs (launch/experiments/contrasts.py)
  - {arm: cory, against: ppo}

An arm's keys are the settings in which it differs from its reference arm (`against`, by default the first), and:

label     name in tables and plots
tier      tier 1 runs first (default)
seeds     overrides the seeds of the tier
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError

from cory_env.home import expand_home, upload_hint
from launch.console.configuration import parse_overrides, read_preset
from launch.console.errors import CommandError
from launch.experiments.arm_differences import arm_differences, format_differences
from launch.experiments.contrasts import Contrast
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, SettingsError, changed_settings, make_settings
from policies.settings.yaml12 import Value, read_yaml, to_cli

_STUDIES_DIR = files("launch.experiments") / "studies"
_STUDY_WIDE_SETTINGS = ("seed", "eval_kl_coef")
"""Settings that arms must not change: the study sets the seeds, and all arms share one objective."""


def _expand_seed_count(value: object) -> object:
    return list(range(value)) if type(value) is int else value


Seeds = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_expand_seed_count), Field(min_length=1)]
"""A list of seeds, or a count n for seeds 0 to n - 1."""


class Arm(BaseModel, extra="allow"):
    """One configuration of a study, run with several seeds."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    label: str
    seeds: Seeds
    tier: PositiveInt = 1
    against: str | None = None
    """The reference arm; None for the first arm."""
    index: int = 0
    differs: dict[str, Any] = {}
    """Settings that differ from the first arm."""

    @property
    def changes(self) -> dict[str, Any]:
        """Settings that differ from the reference arm."""
        return self.model_extra or {}


class Study(BaseModel, extra="forbid"):
    """A set of arms to compare."""

    name: str
    base: str
    arms: dict[str, Arm]
    about: str = ""
    shared: dict[str, Any] = {}
    """Settings of all arms, which override the preset. They include `eval_kl_coef`, so that all arms share one
    objective."""
    contrasts: tuple[Contrast, ...] = ()

    def settings(self, arm: Arm, seed: int) -> Settings:
        """Returns the settings of a run."""
        return _resolve(self.base, {**self.shared, **arm.differs, "seed": seed})

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Returns the arguments of `cory train` that result in `settings`."""
        return [self.base, *(to_cli_setting(*item) for item in {**self.shared, **arm.differs, "seed": seed}.items())]

    def differences_text(self) -> str:
        """Returns the settings in which the arms of each contrast differ."""
        settings = {name: self.settings(arm, 0) for name, arm in self.arms.items()}
        return format_differences(
            (f"{c.arm} vs. {c.against}", arm_differences(settings[c.arm], settings[c.against], c.allow))
            for c in self.contrasts
        )


def bundled_studies() -> dict[str, str]:
    """Returns the names and descriptions of the bundled studies."""
    shipped = {Path(file.name).stem: file for file in _STUDIES_DIR.iterdir() if file.name.endswith(".yaml")}
    return {name: str(read_yaml(shipped[name].read_text("utf-8"), name)["about"]) for name in sorted(shipped)}


def load_study(name: str, words: Sequence[str] = ()) -> Study:
    """Loads a study and checks that its arms differ only in the settings they list.

    Args:
        name: a key of `bundled_studies()`, or a YAML file.
        words: `key=value`, settings of all arms that override those of the file.
    """
    file = _STUDIES_DIR / f"{name}.yaml"
    if not file.is_file():
        name = expand_home(name)
        file = Path(name)
    if not file.is_file():
        names = ", ".join(bundled_studies())
        raise CommandError(f"Unknown study `{name}`. Use one of {names}, or a YAML file.{upload_hint(name)}")
    changes = parse_overrides(words)
    try:
        entries = read_yaml(file.read_text("utf-8"), name)
    except UnicodeDecodeError as error:
        raise CommandError(f"{name} is not UTF-8 text: {error}.") from error
    try:
        shared = {**entries.pop("settings", {}), **changes}
        arms = _complete_arms(entries.pop("arms"), entries.pop("seeds", 1))
        study = Study(name=Path(file.name).stem, shared=shared, arms=arms, **entries)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))} {e['input']!r}: {e['msg']}" for e in error.errors()]
        raise CommandError(f"{name} is not a valid study: {'; '.join(problems)}.") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CommandError(f"{name} is not a valid study: {error!r}. See {__name__} for the format.") from error
    resolved = _resolve(study.base, shared)
    if "seed" in shared:
        raise CommandError(f"{name} sets seed for all runs. Set the seeds with `seeds`, or with --seeds.")
    if resolved.dtype == "auto" or resolved.test_queries is None:
        raise CommandError(
            f"{name} requires dtype and test_queries in its `settings` or on the command line: dtype=auto differs "
            "between machines, and test_queries (such as 500) is the number of held-out queries to compare on."
        )
    study.shared["eval_kl_coef"] = resolved.report_kl_coef
    for arm in study.arms.values():
        _check_arm(study, arm, name)
    labels = [arm.label for arm in study.arms.values()]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise CommandError(f"{name} has several arms with the label {', '.join(repeated)}. Labels must be unique.")
    compared = {arm for contrast in study.contrasts for arm in (contrast.arm, contrast.against)}
    if unknown := compared - study.arms.keys():
        raise CommandError(f"{name} has contrasts with unknown arms: {', '.join(sorted(unknown))}.")
    return study


def _complete_arms(entries: dict[str, Any], seeds: Any) -> dict[str, dict[str, Any]]:
    """Adds names, indices, reference arms, seeds, and differences from the first arm."""
    arms: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if reserved := {"name", "index", "differs"} & set(entry or {}):
            raise CommandError(f"Arm {name} sets `{min(reserved)}`, which is computed. Remove it.")
        arm = {"name": name, "index": len(arms), "label": name, "against": next(iter(arms), None), **(entry or {})}
        tier = arm.get("tier", 1)
        if "seeds" not in arm and isinstance(seeds, dict) and tier not in seeds:
            raise CommandError(f"Arm {name} has tier {tier}, which has no entry in `seeds`. Add one.")
        arm.setdefault("seeds", seeds[tier] if isinstance(seeds, dict) else seeds)
        changes = {key: value for key, value in arm.items() if key not in Arm.model_fields}
        arms[name] = arm
        arm["differs"] = {**arms.get(arm["against"], {}).get("differs", {}), **changes}
    return arms


def _check_arm(study: Study, arm: Arm, study_name: str) -> None:
    """Checks that an arm differs from its reference arm in exactly the settings it lists."""
    earlier_arms = list(study.arms)[: arm.index]
    try:
        settings = study.settings(arm, 0)
    except SettingsError as error:
        raise CommandError(f"{study_name}, arm {arm.name}: {error}") from error
    if arm.against is not None and arm.against not in earlier_arms:
        raise CommandError(f"{study_name}, arm {arm.name}: no earlier arm is called {arm.against}.")
    if shared := sorted({*_STUDY_WIDE_SETTINGS} & arm.changes.keys()):
        raise CommandError(f"{study_name}, arm {arm.name} sets {', '.join(shared)}, which must be equal in all arms.")
    reference = study.settings(study.arms[arm.against], 0) if arm.against else _resolve(study.base, study.shared)
    changes, listed = sorted(set(changed_settings(reference, settings)) - {"seed"}), sorted(arm.changes)
    if changes != listed or bool(changes) != bool(earlier_arms):
        raise CommandError(
            f"{study_name}, arm {arm.name} lists {', '.join(listed) or 'no settings'} as different from "
            f"{arm.against or 'the base'}, but it differs in {', '.join(changes) or 'nothing'}. The first arm must "
            "equal the base, and other arms must differ from their reference."
        )


def to_cli_setting(key: str, value: Value) -> str:
    """Formats a setting as `key=value`, which `configuration.parse_overrides` parses."""
    return f"{key}={to_cli(value)}"


def _resolve(base: str, values: dict[str, Value]) -> Settings:
    return make_settings(apply_overrides(read_preset(base), values))
