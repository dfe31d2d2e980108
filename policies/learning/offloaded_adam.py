"""AdamW whose moments rest in the machine's memory, and are on the weights' device a few millions at a time.

A GPU then holds weights and gradients alone, and computes the same numbers; each step moves 16 bytes per weight over
its link to the machine. Where the weights are in the machine's memory themselves, nothing is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from policies.learning.sharding import local

MOMENTS = ("exp_avg", "exp_avg_sq")
AT_ONCE = 2**24
"""Weights whose moments are on the device together: 128 MiB of it. A multiple of what a processor takes at once, as it
rounds a rest of that otherwise."""


class OffloadedAdamW(torch.optim.AdamW):
    """Steps as `torch.optim.AdamW(fused=True)` does, and has the same state."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state |= fresh(weight, offloaded=True)
                    _step(weight, weight.grad, state, group)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # else the moments might be read while they are on their way

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state; torch would leave its moments beside the weights."""
        super().load_state_dict(state_dict)
        for weight, state in self.state.items():
            for name in MOMENTS:
                moment = state[name]
                state[name] = _in_memory(weight).copy_(moment)


def fresh(weight: Tensor, *, offloaded: bool) -> dict[str, Tensor]:
    """Returns what AdamW knows of a weight before its first step."""
    moments = {name: _in_memory(weight) if offloaded else torch.zeros_like(weight) for name in MOMENTS}
    return {"step": torch.zeros((), device=weight.device), **moments}


def _in_memory(weight: Tensor) -> Tensor:
    """Returns zeros like a weight in the machine's memory, where a GPU reads and writes them by itself."""
    return torch.zeros_like(weight, device="cpu", pin_memory=weight.is_cuda)


def _step(weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Moves what this process has of a weight, a part at a time."""
    beta1, beta2 = group["betas"]
    held = [local(tensor).view(-1) for tensor in (weight, *(state[name] for name in MOMENTS))]
    parts = zip(local(gradient).reshape(-1).split(AT_ONCE), *(flat.split(AT_ONCE) for flat in held), strict=True)
    for slope, values, *moments in parts:
        here = [moment.to(values.device, non_blocking=True) for moment in moments]
        adamw(
            [values],
            [slope],
            [here[0]],
            [here[1]],
            [],
            [state["step"].clone()],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, there in zip(moments, here, strict=True):
            if there is not moment:
                moment.copy_(there, non_blocking=True)
    state["step"].add_(1)
