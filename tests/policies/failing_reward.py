"""A reward for tests of what its failure does to a run."""


def boom(completions: list[str]) -> list[float]:
    raise KeyError("no such answer")
