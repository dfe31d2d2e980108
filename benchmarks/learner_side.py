"""A learner's updates without rollouts, in a separate process, and their peak memory; see `benchmarks.side`."""

from __future__ import annotations

from benchmarks.learner import build, learn, play
from benchmarks.processes import watched_memory
from benchmarks.side import Took, read_work
from policies.settings.settings import make_settings


def main() -> None:
    """Builds the learner, updates it and answers."""
    work, took = read_work(), Took()
    settings = make_settings(work["settings"])
    with watched_memory() as peak:
        learners = build(settings)
        for number in range(work["updates"]):
            learn(learners, play(settings)[0], settings, number)
    took.note_memory(peak)
    took.answer()


if __name__ == "__main__":
    main()
