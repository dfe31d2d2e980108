"""The rows of the progress table of a run, as text: a heading, and a row per update."""

from collections.abc import Mapping, Sequence

from rich.text import Text

from launch.display.tables import format_metric
from launch.run_folder.records import MetricValues, Update, mean_over_policies, with_shown_kl
from policies.models.model_names import AVERAGE_POLICY
from policies.rollout.role_mapping import make_mapping
from policies.settings.settings import Settings

ROW_COLUMNS = (("task_reward", "task", 7), ("kl", "KL", 7), ("combined_reward", "combined", 9))
"""Columns of each policy: metric, heading and width."""
POLICY_WIDTH = sum(width for *_, width in ROW_COLUMNS)
MIN_CHAIN_WIDTH = 12
MAX_POLICIES = 2
"""With more policies, rows would not fit into 80 characters: only the average of their metrics is shown."""


class RowFormatter:
    """Formats the rows of one run."""

    def __init__(self, settings: Settings, arrow: str) -> None:
        self._policy_ids = settings.policy_ids
        self._roles = settings.agents
        self._updates = settings.num_updates
        self._arrow = arrow
        self._digits = max(len(str(settings.num_updates)), 3)
        self.indent = 2 * self._digits + 2
        policy_ids = make_mapping(settings).as_dict()
        self._chain_width = max(len(self.chain(policy_ids)) + 1, MIN_CHAIN_WIDTH)

    def heading(self) -> list[Text]:
        """Returns the two lines above the rows."""
        names = self._policy_ids if len(self._policy_ids) <= MAX_POLICIES else ("average",)
        first_line = " " * (self.indent + self._chain_width) + "".join(f"{name:>{POLICY_WIDTH}}" for name in names)
        labels = "".join(f"{label:>{width}}" for _, label, width in ROW_COLUMNS) * len(names)
        return [
            Text(first_line, style="bold"),
            Text(f"{'update':<{self.indent}}{'chain':<{self._chain_width}}{labels}  tok/s     s", style="bold"),
        ]

    def update(self, line: Update) -> Text:
        """Returns the row of an update."""
        row = self._row(line, self.chain(line["roles"]), self._groups(line["policy"]))
        return row.append(f"{line['tokens_per_second']:>7.0f}{line['seconds']['total']:>6.1f}", style="dim")

    def evaluation(self, line: Update) -> list[Text]:
        """Returns the rows of an update's held-out evaluation: policies, the chain's last answer, the mean LLM."""
        rows = [self._row(line, "held-out", self._groups(line["evaluation"]), "bold")]
        if "last_response" in line:
            rows.append(self._row(line, "last answer", [with_shown_kl(line["last_response"])], "bold"))
        if AVERAGE_POLICY in line["evaluation"]:
            rows.append(self._row(line, AVERAGE_POLICY, [line["evaluation"][AVERAGE_POLICY]], "bold"))
        return rows

    def chain(self, roles: Mapping[str, str]) -> str:
        """Returns the policies of the chain in order: `llm_2→llm_1`; `3→1→2` for longer chains; `+3`: other teams."""
        policy_ids = [roles[role] for role in self._roles]
        if len(policy_ids) > 2:
            policy_ids = [policy_id.removeprefix("llm_") for policy_id in policy_ids]
        other_teams = max(len(self._policy_ids) // len(self._roles) - 1, 0)
        return self._arrow.join(policy_ids) + f" +{other_teams}" * (other_teams > 0)

    def _groups(self, figures: Mapping[str, MetricValues]) -> list[MetricValues]:
        groups = [with_shown_kl(figures[name]) for name in self._policy_ids]
        return groups if len(groups) <= MAX_POLICIES else [mean_over_policies(groups)]

    def _row(self, line: Update, label: str, groups: Sequence[MetricValues], style: str = "") -> Text:
        row = Text(f"{line['update']:>{self._digits}}/{self._updates:<{self._digits + 1}}", style=style)
        row.append(f"{label:<{self._chain_width}}", style="cyan")
        for group in groups:
            for key, _, width in ROW_COLUMNS:
                colour = "bold green" if key == "combined_reward" else ""
                row.append(f"{format_metric(key, group[key]):>{width}}", style=colour)
        return row
