"""Rewards for tests: one that fails, one that a small model learns within seconds."""


def boom(completions: list[str]) -> list[float]:
    raise KeyError("no such answer")


def vowels(completions: list[str]) -> list[float]:
    """Half a point for every `e`: each token counts, so the return is easy to trace to what earned it."""
    return [0.5 * completion.count("e") for completion in completions]
