"""Adapters on a CPU, computed side by side, compared with one product per row."""

from __future__ import annotations

import pytest
import torch

from policies.generation.installed import vllm_build

if vllm_build() != "cpu":
    pytest.skip("requires vLLM for CPUs", allow_module_level=True)

WIDTHS = (6, 2, 2)
RANK, INPUTS, SLOTS = 3, 5, 4


@pytest.mark.parametrize(
    "slots", [[2, 2, 2], [0, 3, 0, 2], [-1, 1, 3, -1], [-1, -1]], ids=["one", "several", "some", "none"]
)
def test_packed_layers_add_each_rows_own_adapter(slots: list[int]) -> None:
    from vllm.lora.layers import LoRAMapping  # not in every test process, as it takes seconds

    from policies.generation.vllm_cpu_lora import GroupedAdapters, discard_packed

    torch.manual_seed(0)
    a = tuple(torch.randn(SLOTS, 1, RANK, INPUTS) for _ in WIDTHS)
    b = tuple(torch.randn(SLOTS, 1, width, RANK) for width in WIDTHS)
    adapters = GroupedAdapters(64, 8, torch.device("cpu"))
    ids = tuple(slot + 1 for slot in slots)
    adapters.update_metadata(LoRAMapping(ids, ids), [1, 2, 3, 4], SLOTS, 100)
    x, y = torch.randn(len(slots), INPUTS), torch.randn(len(slots), sum(WIDTHS))

    def expected() -> torch.Tensor:
        rows = [
            torch.cat([0.5 * x[row] @ a[i][slot, 0].T @ b[i][slot, 0].T * (slot >= 0) for i in range(len(WIDTHS))])
            for row, slot in enumerate(slots)
        ]
        return y + torch.stack(rows)

    def computed() -> torch.Tensor:
        out = y.clone()
        adapters.add_lora_linear(out, x, a, b, 0.5, WIDTHS)
        return out

    torch.testing.assert_close(computed(), expected())
    b[1].mul_(-1)  # new weights in the same tensors, as vLLM replaces an adapter
    discard_packed()
    torch.testing.assert_close(computed(), expected())
