"""The configuration of LoRA adapters; importing it loads no library."""

from typing import NamedTuple


class Lora(NamedTuple):
    """Configuration of the adapters of `weights=lora`."""

    rank: int  # r, the inner dimension
    alpha: float  # an adapter's output is scaled by alpha / rank
    targets: tuple[str, ...] = ()
    """Names of the adapted layers, such as `q_proj`; empty: every linear layer except the output head."""
    seed: int = 0  # seeds the random initialisation of A
