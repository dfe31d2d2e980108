"""Curves of a report: of an arm's policies and roles, of several arms, and of what collapse would show in."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes

from launch.display.curves import EXCHANGED, HELD_OUT, PANELS, TRAINING
from launch.display.drawing import INK, colours_of, curve, exchanges, points, style
from launch.display.plot import Key, Panel, Plot
from launch.report.marks import band, bars, limit_to
from launch.report.runs import ArmRuns
from launch.report.series import (
    FEWEST,
    TOKEN_KL,
    Series,
    curve_over_seeds,
    exchanged,
    held_out,
    held_out_mean,
    is_evaluated,
    of_role,
    trained_mean,
    training,
)
from policies.models.model_names import AVERAGE

TOGETHER = 6
"""Arms in one plot of curves, at most."""
BANDS = 4
"""Lines that may have a band each."""
APART = 0.012
"""Share of a panel's width between the points of two lines at the same update."""
HEALTH = (
    ("repetition", "Repetition", "share of token pairs"),
    ("eos_rate", "Ended by itself", "share of responses"),
    (TOKEN_KL, "KL to the initial policy", "nats per token"),
    ("response_length", "Response length", "tokens"),
)
LIMITS = {"repetition": "max_repetition", TOKEN_KL: "max_token_kl"}
"""The settings that say from where on a figure is a sign of collapse, whatever it was before training."""
INTERVAL = "{}: 95 % interval of the mean over seeds (Student's t), from three seeds on. A panel's edge cuts wide ones."

Drawn = tuple[Series | None, Series | None]
"""What is drawn of one policy, role or arm: a line, and points."""
Member = Callable[[str], Drawn]
"""Gives what is drawn of a figure."""


def curves_of(arm: ArmRuns, name: str) -> list[Plot]:
    """Returns an arm's curves: of each policy, and of each role."""
    title, exchanged_after = f"{arm.label}: by policy", exchanged(arm)
    note = f"Lines: responses in training. Dots: each policy alone on {held_out_queries([arm])}, mean over seeds."
    members: dict[str, Member] = {module: partial(_of_policy, arm, module) for module in arm.settings.modules}
    if any(AVERAGE in found for run in arm.runs for found in run.held_out.values()):
        members[AVERAGE] = partial(_of_average, arm)
    plots = [_over_updates(f"{name}-policies", title, note, [arm], members, PANELS, exchanged_after)]
    if len(arm.settings.roles) > 1:
        title, note = f"{arm.label}: by role", "Responses in training, of whichever policy played the role."
        members = {role: partial(_of_role, arm, role) for role in arm.settings.roles}
        plots.append(_over_updates(f"{name}-roles", title, note, [arm], members, PANELS, exchanged_after))
    return plots


def _of_policy(arm: ArmRuns, module: str, key: str) -> Drawn:
    evaluated = curve_over_seeds([held_out(run, module, key) for run in arm.runs])
    return curve_over_seeds([training(run, module, key) for run in arm.runs]), evaluated if evaluated.x else None


def _of_average(arm: ArmRuns, key: str) -> Drawn:
    """Returns what is drawn of the mean of an arm's LLMs, which is evaluated and never trained."""
    return None, curve_over_seeds([held_out(run, AVERAGE, key) for run in arm.runs])


def _of_role(arm: ArmRuns, role: str, key: str) -> Drawn:
    return curve_over_seeds([of_role(run, role, key) for run in arm.runs]), None


def _trained(arm: ArmRuns, key: str) -> Drawn:
    return curve_over_seeds([trained_mean(run, key) for run in arm.runs]), None


def _held_out(arm: ArmRuns, key: str) -> Drawn:
    return None, held_out_mean(arm, key)


def comparisons(arms: Sequence[ArmRuns]) -> list[Plot]:
    """Returns the arms' curves in the same panels, some at a time: held out, or in training where none is evaluated."""
    evaluated = any(is_evaluated(arm) for arm in arms)
    arms = [arm for arm in arms if is_evaluated(arm) or not evaluated]
    note = "Mean of the policies, in training."
    if evaluated:
        note = f"Mean of the policies, each alone on {held_out_queries(arms)}; points of one update stand side by side."
    of_arm = _held_out if evaluated else _trained
    return _dealt_out("arms", "Arms over training", note, arms, of_arm, PANELS)


def health(arms: Sequence[ArmRuns]) -> list[Plot]:
    """Returns what collapse would show in, some arms at a time."""
    note = f"Mean of the policies, in training. Dashed: the limits {' and '.join(LIMITS.values())}."
    return _dealt_out("health", "Signs of collapse", note, arms, _trained, HEALTH)


def _dealt_out(
    name: str,
    title: str,
    note: str,
    arms: Sequence[ArmRuns],
    of_arm: Callable[[ArmRuns, str], Drawn],
    figures: Sequence[tuple[str, str, str]],
) -> list[Plot]:
    return [
        _over_updates(part, title, note, some, {arm.label: partial(of_arm, arm) for arm in some}, figures)
        for part, some in dealt_out(name, arms)
    ]


def dealt_out(name: str, arms: Sequence[ArmRuns]) -> list[tuple[str, Sequence[ArmRuns]]]:
    """Deals arms out to as few plots as can hold them, as many to each; returns each plot's name and arms."""
    plots = math.ceil(len(arms) / TOGETHER)
    ends = [math.ceil(len(arms) * part / plots) for part in range(plots + 1)]
    return [
        (f"{name}-{part}" if plots > 1 else name, arms[start:end])
        for part, (start, end) in enumerate(pairwise(ends), start=1)
    ]


def _over_updates(
    name: str,
    title: str,
    note: str,
    arms: Sequence[ArmRuns],
    members: Mapping[str, Member],
    figures: Sequence[tuple[str, str, str]],
    exchanged_after: Sequence[int] = (),
) -> Plot:
    """Returns curves over updates, a panel per figure.

    Args:
        name: of the plot.
        title: of the plot.
        note: what there is to say but for intervals.
        arms: that are drawn.
        members: what has a line, by its label.
        figures: each figure's key, heading and unit.
        exchanged_after: updates that are followed by an exchange of roles.
    """
    colours = dict(zip(members, colours_of(len(members)), strict=True))
    coefs = {arm.settings.report_kl_coef for arm in arms}
    coef = f"{coefs.pop():g}" if len(coefs) == 1 else "η"
    panels, kinds = [], set()
    for key, heading, unit in figures:
        lines = {label: drawn(key) for label, drawn in members.items()}
        limit = max(getattr(arm.settings, LIMITS[key]) for arm in arms) if key in LIMITS else None
        draw = partial(_lines, heading, unit.format(coef), exchanged_after, colours, lines, limit)
        panels.append(Panel(draw, f"{heading}. {_ends(lines)}"))
        kinds |= {(trained is not None, evaluated is not None) for trained, evaluated in lines.values()}
    legend = [Key(label, colour) for label, colour in colours.items()]
    if (True, True) in kinds:
        legend += [TRAINING, HELD_OUT]
    if exchanged_after:
        legend.append(EXCHANGED)
    banded = len(members) <= BANDS and any(trained for trained, _ in kinds)
    return Plot(
        name,
        title,
        with_interval(note, arms, bands=banded, bars=any(evaluated for _, evaluated in kinds)),
        panels,
        legend,
    )


def _lines(
    title: str,
    unit: str,
    exchanged_after: Sequence[int],
    colours: Mapping[str, str],
    lines: Mapping[str, Drawn],
    limit: float | None,
    panel: Axes,
) -> None:
    style(panel, title, unit)
    lines = _apart(lines)
    if limit is not None:
        panel.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for label, (trained, evaluated) in lines.items():
        if trained is not None:
            curve(panel, trained.x, trained.mean, colours[label], faintly=evaluated is not None)
        if evaluated is not None:
            points(panel, evaluated.x, evaluated.mean, colours[label])
    banded = len(lines) <= BANDS
    intervals = [pair if banded else pair[1:] for pair in lines.values()]
    limit_to(panel, [series for pair in intervals for series in pair if series is not None])
    exchanges(panel, exchanged_after)
    for label, (trained, evaluated) in lines.items():
        if banded and trained is not None:
            band(panel, trained, colours[label])
        if evaluated is not None:
            bars(panel, evaluated, colours[label])


def _apart(lines: Mapping[str, Drawn]) -> dict[str, Drawn]:
    """Moves the points of several lines a little to the side, so that their bars do not hide one another."""
    updates = [update for _, evaluated in lines.values() if evaluated is not None for update in evaluated.x]
    step = APART * (max(updates) - min(updates)) if updates else 0.0
    moved = {}
    for number, (label, (trained, evaluated)) in enumerate(lines.items()):
        if evaluated is not None:
            aside = step * (number - (len(lines) - 1) / 2)
            evaluated = evaluated._replace(x=[update + aside for update in evaluated.x])
        moved[label] = trained, evaluated
    return moved


def with_interval(note: str, arms: Sequence[ArmRuns], bands: bool = False, bars: bool = False) -> str:
    """Returns a plot's note, with what its intervals are if it has any.

    Args:
        note: what else there is to say.
        arms: in the plot.
        bands: intervals are drawn as bands.
        bars: they are drawn as bars.
    """
    drawn = " and ".join(name for name, are in (("bands", bands), ("bars", bars)) if are)
    several = any(len(arm.runs) >= FEWEST for arm in arms)
    return f"{note} {INTERVAL.format(drawn.capitalize())}" if drawn and several else note


def held_out_queries(arms: Sequence[ArmRuns]) -> str:
    """Returns how many queries the evaluations during training are of, in words; all, if there are fewer."""
    counts = {arm.settings.eval_queries for arm in arms}
    return f"up to {counts.pop()} held-out queries" if len(counts) == 1 else "held-out queries"


def _ends(lines: Mapping[str, Drawn]) -> str:
    """Says where lines end."""
    found = {label: evaluated or trained for label, (trained, evaluated) in lines.items()}
    return "; ".join(f"{label} ends at {series.mean[-1]:.2f}" for label, series in found.items() if series and series.x)
