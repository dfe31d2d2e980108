"""Samples in the terminal."""

from launch.display.texts import chain_text
from launch.run_folder.records import Sample, ScoredResponse


def response(role: str, policy: str) -> ScoredResponse:
    return {"role": role, "policy": policy, "task_reward": 1.0, "text": "text", "reasoning": "hm", "feedback": "no"}


def test_columns_are_as_wide_as_the_longest_role_and_policy() -> None:
    wide: Sample = {"query": "q", "responses": [response("solver", "llm_1"), response("second_critic", "frozen_1")]}
    short: Sample = {"query": "q", "responses": wide["responses"][:1]}
    _, *lines = chain_text(wide, 2).plain.splitlines()
    assert lines[0] == "  solver        llm_1     +1.00  text" and lines[3] == "  second_critic frozen_1  +1.00  text"
    assert lines[1:3] == ["  thought       hm", "  feedback      no"]
    _, line, *_ = chain_text(short, 0).plain.splitlines()
    assert line == "solver     llm_1  +1.00  text"
