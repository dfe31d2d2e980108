"""reasoning-gym: puzzles made by programs, each with a verifier (extra `reasoning-gym`).

    data: reasoning_gym:chain_sum?size=2000&seed=1&min_terms=3     a data set with its settings; lists as in JSON
    data: reasoning_gym:chain_sum+leg_counting?size=2000&seed=1    a mixture in equal parts

`size` is 500 and `seed` 0 unless they are set. Every tenth row is held out, unless `eval_data` names another seed.
Seeds must be at least `size` apart: row i of seed s is usually row i - 1 of seed s + 1.
"""

from cory_env.rewards.reasoning_gym import ANSWER_FORMAT
from cory_env.tasks.definition import DataFormat, TaskDefinition
from cory_env.tasks.task import GradedTask, Query

INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>.\n"


class ReasoningGym(GradedTask):
    """The task."""

    def right_answer(self, query: Query) -> str | None:
        """Returns the right answer in its tags; None if the data set has none."""
        answer = query.columns.get("answer")
        return None if answer is None else ANSWER_FORMAT.format(answer)


REASONING_GYM = TaskDefinition(
    kind=ReasoningGym,
    prompt="{query}\n\n" + INSTRUCTION,
    observer_prompt="{query}\n\nAn answer that may be wrong:\n\n{reference}\n\n" + INSTRUCTION,
    feedback_prompt="{query}\n\nAn answer:\n\n{reference}\n\n{feedback}\n\n" + INSTRUCTION,
    feedback="cory_env.rewards.reasoning_gym:feedback",
    solved_feedback="This answer is right.",
    reference_separator="\n\nAnother one:\n\n",  # for three or more agents
    reward="cory_env.rewards.reasoning_gym:score",
    data_hint="reasoning_gym:NAME?size=2000&seed=1, such as reasoning_gym:chain_sum",
    formats=(DataFormat(required=("metadata", "dataset")),),
)
