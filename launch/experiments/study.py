"""A study as its file describes it: arms that differ in what they say and in nothing else, each over several seeds.

about: one sentence
base: imdb-tiny-paper            # the preset that all arms build on
settings: {dtype: fp32, final_queries: 500}   # of all arms; these two are a must
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

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from cory_env.home import expand_home
from launch.console.configuration import read_preset, read_words
from launch.console.errors import CommandError
from launch.experiments.contrasts import Contrast, read_contrasts
from policies.settings.core_yaml import Value, as_word, read_yaml
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, SettingsError, changed_settings, make_settings

_FOLDER = files("launch.experiments") / "studies"
_KEYS = ("about", "base", "settings", "seeds", "arms", "contrasts")
_OF_ARM = ("label", "tier", "against", "also", "seeds", "needs")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_SHARED = ("seed", "eval_kl_coef")
"""Settings that no arm may differ in: a study deals the seeds, and has one goal."""


class Arm(NamedTuple):
    """One way to train, over several seeds."""

    name: str
    label: str
    tier: int
    against: str | None
    """The arm that it is compared with; None: it is the first one."""
    also: tuple[str, ...]
    """More arms that its figures are compared with."""
    changes: dict[str, Value]
    """The settings in which it differs from that one."""
    differs: dict[str, Value]
    """The settings in which it differs from the first one."""
    seeds: tuple[int, ...]
    needs: dict[str, str]
    """Paths that must exist, each with the command that makes it."""

    @property
    def missing(self) -> str | None:
        """What must be there and is not, with what to do, in one sentence."""
        for path, command in self.needs.items():
            if not Path(expand_home(path)).exists():
                return f"{self.name} needs {path}, which is not there. Make it: {command}"
        return None


class Study(NamedTuple):
    """All that is compared."""

    name: str
    about: str
    base: str
    shared: dict[str, Value]
    """Settings of all arms, over those of the preset; `eval_kl_coef` among them, so that no arm moves the goal."""
    arms: dict[str, Arm]
    contrasts: tuple[Contrast, ...]

    def settings(self, arm: Arm, seed: int) -> Settings:
        """Returns every setting of a run."""
        return _resolve(self.base, {**self.shared, **arm.differs, "seed": seed})

    def words(self, arm: Arm, seed: int) -> list[str]:
        """Returns the words after `cory train` that give `settings`."""
        return [self.base, *(word(*item) for item in {**self.shared, **arm.differs, "seed": seed}.items())]

    def place(self, arm: Arm) -> int:
        """Returns an arm's number, in the order of the file."""
        return list(self.arms).index(arm.name)


def studies() -> dict[str, str]:
    """Returns the names of the studies that are shipped, each with what it is about."""
    found = {
        file.name.removesuffix(".yaml"): str(read_yaml(file.read_text(encoding="utf-8"), file.name)["about"])
        for file in _FOLDER.iterdir()
        if file.name.endswith(".yaml")
    }
    return dict(sorted(found.items()))


def load(where: str, words: Sequence[str] = ()) -> Study:
    """Reads a study, and proves that its arms differ in what they say alone.

    Args:
        where: a name of `studies()`, or a YAML file.
        words: `key=value`, settings of all arms that win over the file's.

    Raises:
        CommandError: there is no such study, or it is not as the module's docstring says.
    """
    name, text = _read(where)
    entries = _mapping(read_yaml(text, where), where)
    _check_keys(entries, _KEYS, where)
    if not entries.get("arms"):
        raise CommandError(f"{where} has no arms.")
    base = str(entries.get("base", ""))
    shared = {**_mapping(entries.get("settings") or {}, f"settings in {where}"), **read_words(words)}
    if "seed" in shared:
        raise CommandError(f"{where} sets seed for all runs: say which seeds by `seeds`, or by --seeds.")
    resolved = _resolve(base, shared)
    if resolved.dtype == "auto":
        raise CommandError(
            f"{where} leaves dtype open: `auto` is bf16 on one machine and fp32 on another, and runs of both "
            "kinds cannot be compared. Say dtype=fp32 or dtype=bf16, in its `settings` or on the command line."
        )
    if resolved.final_queries is None:
        raise CommandError(
            f"{where} does not say final_queries: on how many held-out queries, such as final_queries=500, each policy "
            "is compared after training. Say it in its `settings` or on the command line."
        )
    shared["eval_kl_coef"] = resolved.report_kl_coef
    arms: dict[str, Arm] = {}
    for key, value in _mapping(entries["arms"], f"arms in {where}").items():
        arms[key] = _arm(key, _mapping(value or {}, f"{where}, arm {key}"), entries.get("seeds", 1), arms)
    labels = [arm.label for arm in arms.values()]
    if double := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        raise CommandError(f"{where} has several arms with the label {double[0]!r}, which plots could not tell apart.")
    contrasts = read_contrasts(entries.get("contrasts", []), list(arms), where)
    study = Study(name, str(entries.get("about", "")), base, shared, arms, contrasts)
    for arm in arms.values():
        try:
            settings = study.settings(arm, 0)
        except SettingsError as error:
            raise CommandError(f"{where}, arm {arm.name}: {error}") from error
        if arm.against is not None:
            check_differs(arm, settings, study.settings(arms[arm.against], 0))
    return study


def check_differs(arm: Arm, settings: Settings, against: Settings) -> None:
    """Refuses an arm whose settings differ from those it is held against in more, or in less, than it says.

    Raises:
        CommandError: names the settings.
    """
    found, said = set(changed_settings(against, settings)), set(arm.changes)
    if hidden := sorted(found - said):
        raise CommandError(f"Arm {arm.name} differs from {arm.against} in {', '.join(hidden)} without saying so.")
    if idle := sorted(said - found):
        raise CommandError(
            f"Arm {arm.name} says that it differs from {arm.against} in {', '.join(idle)}, but both have the same. "
            "Leave it out."
        )
    if not said:
        raise CommandError(f"Arm {arm.name} differs from {arm.against} in nothing.")


def word(key: str, value: Value) -> str:
    """Returns a setting as `key=value`, which `configuration.read_words` reads back."""
    return f"{key}={as_word(value)}"


def read_seeds(value: object, where: str) -> tuple[int, ...]:
    """Returns seeds: 0, 1, … for a count, or those of a list.

    Raises:
        CommandError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return tuple(range(value))
    if isinstance(value, list) and value and all(type(seed) is int and seed >= 0 for seed in value):
        return tuple(dict.fromkeys(value))
    raise CommandError(f"{where}: seeds are a count, such as 5, or a list, such as [0, 1, 2], not {value!r}.")


def _read(where: str) -> tuple[str, str]:
    """Returns a study's name and its file's text."""
    if where in studies():
        return where, (_FOLDER / f"{where}.yaml").read_text(encoding="utf-8")
    path = Path(expand_home(where))
    if path.suffix not in (".yaml", ".yml"):
        close = difflib.get_close_matches(where, studies(), n=1, cutoff=0.4)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise CommandError(f"There is no study `{where}`.{hint} There are: {', '.join(studies())}. Or name a .yaml.")
    if path.stem in studies():
        raise CommandError(
            f"{where} has the name of the shipped study {path.stem}, whose results it would be taken for. Rename it."
        )
    try:
        return path.stem, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"The study {path} cannot be read: {reason}.") from error


def _arm(name: str, entries: dict[str, Any], seeds: object, before: Mapping[str, Arm]) -> Arm:
    """Makes an arm of its entries; it may be held against the arms before it."""
    where = f"Arm {name}"
    if not _NAME.fullmatch(name):
        raise CommandError(f"{where}: names are of small letters, digits, `.`, `_` and `-`, as they name folders.")
    changes = {key: value for key, value in entries.items() if key not in _OF_ARM}
    for key in changes:
        if key in _SHARED:
            raise CommandError(f"{where} sets {key}, which all arms have in common.")
    tier = entries.get("tier", 1)
    if type(tier) is not int or tier < 1:
        raise CommandError(f"{where}: tier is 1, 2, …, not {tier!r}.")
    first = next(iter(before), None)
    against = entries.get("against", first)
    if first is None and (changes or against):
        raise CommandError(f"{where} is the first, which all others are held against: it changes nothing.")
    if against is not None and not _among(against, before):
        raise CommandError(f"{where} is held against {against}, which is no arm before it: {', '.join(before)}.")
    also = entries.get("also", [])
    if not isinstance(also, list) or not all(_among(name, before) and name != against for name in also):
        raise CommandError(f"{where}: also is a list of arms before it, other than {against}, not {also!r}.")
    of_tier = seeds.get(tier) if isinstance(seeds, Mapping) else seeds
    return Arm(
        name=name,
        label=str(entries.get("label", name)),
        tier=tier,
        against=against,
        also=tuple(also),
        changes=changes,
        differs={**before[against].differs, **changes} if against is not None else {},
        seeds=read_seeds(entries.get("seeds", of_tier), where),
        needs={str(path): str(command) for path, command in _mapping(entries.get("needs") or {}, where).items()},
    )


def _among(name: object, arms: Mapping[str, Arm]) -> bool:
    return isinstance(name, str) and name in arms


def _resolve(base: str, values: Mapping[str, Value]) -> Settings:
    return make_settings(apply_overrides(read_preset(base), values))


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise CommandError(f"{where} must hold `key: value`, but holds a {type(value).__name__}.")
    return {str(key): entry for key, entry in value.items()}


def _check_keys(found: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise CommandError(f"{where} has an unknown key `{key}`; there are {', '.join(known)}.")
