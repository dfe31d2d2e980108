"""Averaging the weights of policies."""

import pytest
import torch

from policies.learning.ranks import move_to_mean


def test_weights_move_by_tau_towards_their_mean_and_are_equal_with_tau_1() -> None:
    policies = [[torch.tensor([1.0, -2.0]), torch.tensor([[5.0]])], [torch.tensor([4.0, 2.0]), torch.tensor([[7.0]])]]
    move_to_mean(policies, 0.25)
    weights = [tensor.tolist() for policy in policies for tensor in policy]
    assert weights == [[1.375, -1.5], [[5.25]], [3.625, 1.5], [[6.75]]]
    move_to_mean(policies, 1.0)
    assert [tensor.tolist() for policy in policies for tensor in policy] == [[2.5, 0.0], [[6.0]]] * 2


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_moving_to_the_mean_does_not_change_the_mean(tau: float) -> None:
    policies = [[torch.randn(50, generator=torch.Generator().manual_seed(seed))] for seed in range(3)]
    mean = torch.stack([tensor for (tensor,) in policies]).mean(0)
    distance = (policies[0][0] - policies[2][0]).norm()
    move_to_mean(policies, tau)
    torch.testing.assert_close(torch.stack([tensor for (tensor,) in policies]).mean(0), mean)
    new_distance = (policies[0][0] - policies[2][0]).norm()
    torch.testing.assert_close(new_distance, (1 - tau) * distance, atol=1e-6, rtol=1e-4)
