"""AdamW with its moments offloaded to host memory; a step copies them to the weights' device chunk by chunk.

The GPU then holds only weights and gradients, and computes the same numbers. Each step transfers 16 bytes per weight
between host and GPU. If the weights are in host memory too, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from policies.learning.sharding import local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK_WEIGHTS = 2**24
"""Weights per chunk: 128 MiB of moments on the device. A multiple of the vector width of CPUs, whose remainder loop
rounds differently."""


class OffloadedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with offloaded moments: same steps, same state."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state |= init_adam_state(weight, offloaded=True)
                    _step(weight, weight.grad, state, group)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # else the moments might be read before they are copied back


def init_adam_state(weight: Tensor, *, offloaded: bool) -> dict[str, Tensor]:
    """Returns AdamW's state of a weight before its first step."""
    # Pinned, a GPU copies them asynchronously.
    memory: dict[str, Any] = {"device": "cpu", "pin_memory": weight.is_cuda} if offloaded else {}
    moments = {name: torch.zeros_like(weight, **memory) for name in MOMENTS}
    return {"step": torch.zeros((), device=weight.device), **moments}


def _step(weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Updates this process's shard of a weight, chunk by chunk."""
    beta1, beta2 = group["betas"]
    flats = [local_shard(tensor).view(-1) for tensor in (weight, *(state[name] for name in MOMENTS))]
    chunks = zip(
        local_shard(gradient).reshape(-1).split(CHUNK_WEIGHTS),
        *(flat.split(CHUNK_WEIGHTS) for flat in flats),
        strict=True,
    )
    for grads, params, *host_moments in chunks:
        moments = [moment.to(params.device, non_blocking=True) for moment in host_moments]
        adamw(
            [params],
            [grads],
            [moments[0]],
            [moments[1]],
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
        for host_moment, moment in zip(host_moments, moments, strict=True):
            if moment is not host_moment:
                host_moment.copy_(moment, non_blocking=True)
    state["step"].add_(1)
