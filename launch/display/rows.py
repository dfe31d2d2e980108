"""The table that grows while a run trains: a heading, and a row per update. Pure text, no terminal."""

import math
from collections.abc import Mapping

from rich.text import Text

from launch.display.tables import format_metric
from launch.run_folder.records import Figures, Update, mean_over_policies
from policies.models.model_names import AVERAGE
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

COLUMNS = (("task_reward", "task", 7), ("kl", "KL", 7), ("combined_reward", "combined", 9))
"""What is shown of each policy: figure, heading and width."""
POLICY_WIDTH = sum(width for *_, width in COLUMNS)
MIN_CHAIN_WIDTH = 12
"""Least width of the chain's column."""
SPEED_WIDTH = 13
"""Width of the last two columns."""


class Rows:
    """Formats the rows of one run."""

    def __init__(self, settings: Settings, arrow: str, width: int | None = None) -> None:
        """Chooses the columns.

        Args:
            settings: of the run.
            arrow: stands between the LLMs of a chain.
            width: that rows may take, at most; policies that do not fit are shown as their mean.
        """
        self._modules = settings.policy_ids
        self._roles = settings.roles
        self._updates = settings.num_updates
        self._arrow = arrow
        self._digits = max(len(str(settings.num_updates)), 3)
        self.indent = 2 * self._digits + 2
        policy_ids = RoleMapping(settings.roles, settings.policy_ids).as_dict()
        self._chain = max(len(self.chain(policy_ids)) + 1, MIN_CHAIN_WIDTH)
        room = math.inf if width is None else width - self.indent - self._chain - SPEED_WIDTH
        self._shown = self._modules if POLICY_WIDTH * len(self._modules) <= room else ()

    def heading(self) -> list[Text]:
        """Returns the two lines above the rows."""
        names = self._shown or ("mean",)
        above = " " * (self.indent + self._chain) + "".join(f"{name:>{POLICY_WIDTH}}" for name in names)
        labels = "".join(f"{label:>{width}}" for _, label, width in COLUMNS) * len(names)
        return [
            Text(above, style="bold"),
            Text(f"{'update':<{self.indent}}{'chain':<{self._chain}}{labels}  tok/s     s", style="bold"),
        ]

    def update(self, line: Update) -> Text:
        """Returns the row of an update."""
        row = Text(self._number(line)).append(f"{self.chain(line['roles']):<{self._chain}}", style="cyan")
        row.append_text(self._figures(line["policy"]))
        return row.append(f"{line['tokens_per_second']:>7.0f}{line['seconds']['total']:>6.1f}", style="dim")

    def evaluation(self, line: Update) -> list[Text]:
        """Returns the rows of an update's held-out evaluation: policies, the chain's last answer, the mean LLM."""
        rows = [Text(f"{self._number(line)}{'held-out':<{self._chain}}", style="bold")]
        rows[0].append_text(self._figures(line["evaluation"]))
        for label, figures in (("last answer", line.get("last_response")), (AVERAGE, line["evaluation"].get(AVERAGE))):
            if figures is not None:
                group = "".join(f"{format_metric(key, figures[key]):>{width}}" for key, _, width in COLUMNS)
                rows.append(Text(f"{self._number(line)}{label:<{self._chain}}{group}", style="bold"))
        return rows

    def chain(self, roles: Mapping[str, str]) -> str:
        """Returns who answers after whom: `llm_2→llm_1`, or `3→1→2` where that would be long; `+3` other teams."""
        modules = [roles[role] for role in self._roles]
        if len(modules) > 2:
            modules = [module.removeprefix("llm_") for module in modules]
        others = max(len(self._modules) // len(self._roles) - 1, 0)
        return self._arrow.join(modules) + f" +{others}" * (others > 0)

    def _number(self, line: Update) -> str:
        return f"{line['update']:>{self._digits}}/{self._updates:<{self._digits + 1}}"

    def _figures(self, figures: Mapping[str, Figures]) -> Text:
        groups = [figures[name] for name in self._modules]
        text = Text()
        for group in groups if self._shown else [mean_over_policies(groups)]:
            for key, _, width in COLUMNS:
                style = "bold green" if key == "combined_reward" else ""
                text.append(f"{format_metric(key, group[key]):>{width}}", style=style)
        return text
