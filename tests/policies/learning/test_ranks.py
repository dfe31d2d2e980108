"""The mean of LLMs."""

import pytest
import torch

from policies.learning.ranks import mean_tensor, move_to_mean


def test_all_move_a_share_of_the_way_and_with_all_of_it_are_equal() -> None:
    llms = [[torch.tensor([1.0, -2.0]), torch.tensor([[5.0]])], [torch.tensor([4.0, 2.0]), torch.tensor([[7.0]])]]
    move_to_mean(llms, 0.25)
    assert [tensor.tolist() for llm in llms for tensor in llm] == [[1.375, -1.5], [[5.25]], [3.625, 1.5], [[6.75]]]
    move_to_mean(llms, 1.0)
    assert [tensor.tolist() for llm in llms for tensor in llm] == [[2.5, 0.0], [[6.0]]] * 2


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_mean_stays_where_it_was_whatever_the_share(share: float) -> None:
    llms = [[torch.randn(50, generator=torch.Generator().manual_seed(seed))] for seed in range(3)]
    before = mean_tensor([tensor for (tensor,) in llms])
    apart = (llms[0][0] - llms[2][0]).norm()
    move_to_mean(llms, share)
    torch.testing.assert_close(mean_tensor([tensor for (tensor,) in llms]), before)
    torch.testing.assert_close((llms[0][0] - llms[2][0]).norm(), (1 - share) * apart, atol=1e-6, rtol=1e-4)
