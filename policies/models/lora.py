"""What the adapters of a policy are like; nothing is loaded to say it."""

from typing import NamedTuple


class Lora(NamedTuple):
    """What the adapters of `weights=lora` are like."""

    rank: int
    """r, the inner dimension."""
    alpha: float
    """An adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the adapted layers, such as `q_proj`; empty: every linear layer but the output head."""
    seed: int = 0
    """What the random half of a new adapter is drawn from."""
