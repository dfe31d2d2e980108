"""A study as its file describes it: arms that differ in what they say and in nothing else, each over several seeds.

about: one sentence
base: imdb-tiny-paper            # the preset that all arms build on
settings: {dtype: fp32, test_queries: 500}   # of all arms; these two are a must
seeds: {1: 5, 2: 3}              # by tier: a count, or a list; or one of them for all tiers
arms:
  cory: {label: CORY}            # the first arm is the base itself
  ppo: {label: PPO, num_agents: 1}
  ppo-high-lr: {against: ppo, tier: 2, lr: 1.0e-3}

contrasts:                       # the questions, written down before the runs (launch/experiments/contrasts.py)
  - {arm: cory, against: ppo}

An arm's keys are the settings in which it differs from the arm it is held `against` (else the first), and:

label     its name in tables and plots
also      other arms that its figures are compared with, in however many settings they differ; the names of a list
tier      1 is run first (default)
seeds     instead of the tier's
needs     what must be there, else the arm is left out: path → command that makes it
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError

from cory_env.home import expand_home
from launch.console.configuration import read_preset, read_words
from launch.console.errors import CommandError
from launch.experiments.contrasts import Contrast
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, SettingsError, changed_settings, make_settings
from policies.settings.yaml12 import Value, read_yaml, to_cli

_STUDIES_DIR = files("launch.experiments") / "studies"
_STUDY_WIDE_SETTINGS = ("seed", "eval_kl_coef")
"""Settings that no arm may differ in: a study sets the seeds, and has one goal."""


def _expand_seed_count(value: object) -> object:
    return list(range(value)) if type(value) is int else value


Seeds = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_expand_seed_count), Field(min_length=1)]
"""A count, for 0, 1, …; or a list."""


class Arm(BaseModel, extra="allow"):
    """One way to train, over several seeds."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    label: str
    seeds: Seeds
    tier: PositiveInt = 1
    against: str | None = None
    """The arm that it is compared with; None: it is the first one."""
    also: tuple[str, ...] = ()
    """More arms that its figures are compared with."""
    needs: dict[str, str] = {}
    """Paths that must exist, each with the command that makes it."""
    differs: dict[str, Any] = {}
    """The settings in which it differs from the first one."""

    @property
    def changes(self) -> dict[str, Any]:
        """The settings in which it differs from the one that it is compared with."""
        return self.model_extra or {}

    @property
    def missing(self) -> str | None:
        """What must be there and is not, with what to do, in one sentence."""
        for path, command in self.needs.items():
            if not Path(expand_home(path)).exists():
                return f"{self.name} needs {path}, which is not there. Make it: {command}"
        return None


class Study(BaseModel, extra="forbid"):
    """All that is compared."""

    name: str
    base: str
    arms: dict[str, Arm]
    about: str = ""
    shared: dict[str, Any] = {}
    """Settings of all arms, over those of the preset; `eval_kl_coef` among them, so that no arm moves the goal."""
    contrasts: tuple[Contrast, ...] = ()

    def settings(self, arm: Arm, seed: int) -> Settings:
        """Returns every setting of a run."""
        return _resolve(self.base, {**self.shared, **arm.differs, "seed": seed})

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Returns the words after `cory train` that give `settings`."""
        return [self.base, *(to_cli_setting(*item) for item in {**self.shared, **arm.differs, "seed": seed}.items())]

    def arm_index(self, arm: Arm) -> int:
        """Returns an arm's number, in the order of the file."""
        return list(self.arms).index(arm.name)


def studies() -> dict[str, str]:
    """Returns the names of the studies that are shipped, each with what it is about."""
    shipped = {Path(file.name).stem: file for file in _STUDIES_DIR.iterdir() if file.name.endswith(".yaml")}
    return {name: str(read_yaml(shipped[name].read_text("utf-8"), name)["about"]) for name in sorted(shipped)}


def load(where: str, words: Sequence[str] = ()) -> Study:
    """Reads a study, and proves that its arms differ in what they say alone.

    Args:
        where: a name of `studies()`, or a YAML file.
        words: `key=value`, settings of all arms that win over the file's.

    Raises:
        CommandError: there is no such study, or it is not as the module's docstring says.
    """
    where = where if where in studies() else expand_home(where)
    file = _STUDIES_DIR / f"{where}.yaml" if where in studies() else Path(where)
    if not file.is_file():
        raise CommandError(f"There is no study `{where}`. There are: {', '.join(studies())}. Or name a .yaml.")
    changes = read_words(words)
    try:
        entries = read_yaml(file.read_text("utf-8"), where)
    except UnicodeDecodeError as error:
        raise CommandError(f"{where} is not UTF-8 text: {error}.") from error
    try:
        shared = {**entries.pop("settings", {}), **changes}
        arms = _complete_arms(entries.pop("arms"), entries.pop("seeds", 1))
        study = Study(name=Path(file.name).stem, shared=shared, arms=arms, **entries)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))} {each['input']!r}: {each['msg']}" for each in error.errors()]
        raise CommandError(f"{where} is no study: {'; '.join(problems)}.") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CommandError(f"{where} is no study as {__name__} describes it: {error!r}.") from error
    resolved = _resolve(study.base, shared)
    if "seed" in shared:
        raise CommandError(f"{where} sets seed for all runs: say which seeds by `seeds`, or by --seeds.")
    if resolved.dtype == "auto" or resolved.test_queries is None:
        raise CommandError(
            f"{where} must say dtype and test_queries, in its `settings` or on the command line: dtype=auto differs "
            "between machines, and test_queries=500 is on how many held-out queries each policy is compared."
        )
    study.shared["eval_kl_coef"] = resolved.report_kl_coef
    for arm in study.arms.values():
        _check_arm(study, arm, where)
    labels = [arm.label for arm in study.arms.values()]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise CommandError(f"{where} has several arms with the label {', '.join(repeated)}. Give each its own.")
    compared = {arm for contrast in study.contrasts for arm in (contrast.arm, contrast.against)}
    if unknown := compared - study.arms.keys():
        raise CommandError(f"{where} has contrasts of {', '.join(sorted(unknown))}, which is none of its arms.")
    return study


def _complete_arms(entries: dict[str, Any], seeds: Any) -> dict[str, dict[str, Any]]:
    """Fills in what arms leave out: names, what they are held against, seeds, and how they differ from the first."""
    arms: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if reserved := {"name", "differs"} & set(entry or {}):
            raise CommandError(f"Arm {name} sets `{min(reserved)}`, which follows from the study. Leave it out.")
        arm = {"name": name, "label": name, "against": next(iter(arms), None), **(entry or {})}
        tier = arm.get("tier", 1)
        if "seeds" not in arm and isinstance(seeds, dict) and tier not in seeds:
            raise CommandError(f"Arm {name} is of tier {tier}, for which `seeds` has none. Add them.")
        arm.setdefault("seeds", seeds[tier] if isinstance(seeds, dict) else seeds)
        changes = {key: value for key, value in arm.items() if key not in Arm.model_fields}
        arms[name] = arm
        arm["differs"] = {**arms.get(arm["against"], {}).get("differs", {}), **changes}
    return arms


def _check_arm(study: Study, arm: Arm, where: str) -> None:
    """Refuses an arm that differs from the one it is held against in more, or in less, than it says.

    Raises:
        CommandError: names the settings.
    """
    before = list(study.arms)[: study.arm_index(arm)]
    try:
        settings = study.settings(arm, 0)
    except SettingsError as error:
        raise CommandError(f"{where}, arm {arm.name}: {error}") from error
    others = [name for name in (arm.against, *arm.also) if name is not None]
    if unknown := [name for name in others if name not in before]:
        raise CommandError(f"{where}, arm {arm.name}: {', '.join(unknown)} is no arm before it.")
    if shared := sorted({*_STUDY_WIDE_SETTINGS} & arm.changes.keys()):
        raise CommandError(f"{where}, arm {arm.name} sets {', '.join(shared)}, which all arms have in common.")
    against = study.settings(study.arms[arm.against], 0) if arm.against else _resolve(study.base, study.shared)
    changes, said = sorted(set(changed_settings(against, settings)) - {"seed"}), sorted(arm.changes)
    if changes != said or bool(changes) != bool(before):
        raise CommandError(
            f"{where}, arm {arm.name} says that it differs from {arm.against or 'the base'} in "
            f"{', '.join(said) or 'nothing'}, but it differs in {', '.join(changes) or 'nothing'}. The first arm, and "
            "no other, is the base itself."
        )


def to_cli_setting(key: str, value: Value) -> str:
    """Returns a setting as `key=value`, which `configuration.read_words` reads back."""
    return f"{key}={to_cli(value)}"


def _resolve(base: str, values: dict[str, Value]) -> Settings:
    return make_settings(apply_overrides(read_preset(base), values))
