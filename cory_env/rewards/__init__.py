"""Rewards: plain functions `f(prompts, completions, **columns) -> list[float]`, run in a child process.

    def shortest(completions: list[str]) -> list[float]:
        return [-float(len(completion)) for completion in completions]

A function is named in a configuration as `module:function`. Of `prompts` (the bare queries), `completions` (the decoded
responses), `role` and the columns of the data, it receives those that it accepts, by keyword, as lists of one length.
"""

from cory_env.rewards.score import score_episodes
from cory_env.rewards.worker import RewardError, RewardWorker

__all__ = ["RewardError", "RewardWorker", "score_episodes"]
