"""Advantages and rewards against numbers computed by other projects' own functions.

The numbers are not part of this repository; without them these tests are skipped.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.learning import advantages, token_ppo

GOLDEN = Path(os.environ.get("CORY_SHARED", Path(__file__).parents[4] / "shared")) / "golden" / "losses.json"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the golden numbers are not beside this checkout")


@cache
def golden(name: str) -> dict[str, Any]:
    numbers: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
    return numbers[name]


def column(section: str, name: str) -> Tensor:
    return torch.tensor(golden(section)[name], dtype=torch.float64)


def groups(section: str) -> Tensor:
    names = golden(section)["index"]
    return torch.tensor([sorted(set(names)).index(name) for name in names])


@pytest.mark.parametrize(("ours", "theirs"), [("rloo", "rloo"), ("dr_grpo", "no_std")])
def test_group_advantages_agree_and_are_exactly_zero_for_equal_rewards(ours: str, theirs: str) -> None:
    result = advantages.GROUP_ESTIMATORS[ours](column("groups", "scores"), groups("groups"))
    torch.testing.assert_close(result.double(), column("groups", theirs), rtol=0, atol=1e-7)
    assert result[3:6].tolist() == [0.0] * 3


def test_grpo_agrees_up_to_its_epsilon() -> None:
    scores, index = column("groups", "scores"), groups("groups")
    std = torch.stack([scores[index == group].std() for group in index])
    theirs = column("groups", "grpo") * (std + 1e-6) / (std + advantages.STD_EPSILON)
    result = advantages.grpo(scores, index)
    torch.testing.assert_close(result.double(), theirs, rtol=0, atol=1e-7)
    assert result[3:6].tolist() == [0.0] * 3


def test_the_overlong_penalty_agrees_at_every_length() -> None:
    numbers = golden("overlong_penalty")
    lengths = torch.tensor(numbers["lengths"])
    penalty = token_ppo.overlong_penalty(lengths, torch.full_like(lengths, numbers["limit"]), numbers["buffer"])
    torch.testing.assert_close(penalty.double(), column("overlong_penalty", "penalty"), rtol=0, atol=1e-7)


def test_gdpo_agrees() -> None:
    numbers = golden("gdpo")
    rewards = torch.stack([column("gdpo", "rewards_x"), column("gdpo", "rewards_y")], dim=1).float()
    mask = torch.ones(8, 8, dtype=torch.float64)  # the unbiased variance depends on the number of tokens
    result = advantages.gdpo(rewards, groups("gdpo"), numbers["weights"], mask, epsilon=1e-6)
    expected = column("gdpo", "advantages_equal_lengths").unsqueeze(1).expand(8, 8)
    # The reference computes in float32, and its own rounding is 1.4e-7. A missing `epsilon` changes the result by 6e-7.
    torch.testing.assert_close(result, expected, rtol=0, atol=2 * torch.finfo(torch.float32).eps)
    without_epsilon = advantages.gdpo(rewards, groups("gdpo"), numbers["weights"], mask, epsilon=0.0)
    assert (without_epsilon - expected).abs().max() > 4 * torch.finfo(torch.float32).eps
