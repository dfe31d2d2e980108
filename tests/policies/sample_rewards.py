"""Rewards for tests: one that fails, one that a small model learns within seconds."""


def boom(completions: list[str]) -> list[float]:
    raise KeyError("no such answer")


def commas(completions: list[str]) -> list[float]:
    """A point for every comma: one token to make likelier, wherever it stands."""
    return [float(completion.count(",")) for completion in completions]
