"""The error of an update whose gradient is not finite."""

from __future__ import annotations

from policies.learning.rows import Rows


class NonFiniteUpdate(RuntimeError):
    """A gradient is NaN or infinite; the weights are as they were before this optimizer step.

    Attributes:
        name: the LLM's.
        update: the update, counted from 1.
        rows: all that the LLM was to learn from in this update, `[B]` and `[B, R]` columns by name, on the CPU.
    """

    def __init__(self, name: str, update: int, rows: Rows) -> None:
        """Keeps what a process on another machine needs to tell."""
        super().__init__(name, update, rows)
        self.name, self.update, self.rows = name, update, rows

    def __str__(self) -> str:
        broken = [name for name, column in self.rows.items() if not bool(column.isfinite().all())]
        where = f"so are {', '.join(broken)} in its batch" if broken else "its batch is finite"
        return (
            f"The gradient of {self.name} is not finite in update {self.update} ({where}). The step was refused: "
            "its weights are as they were before it. A smaller lr, a larger kl_coef or dtype=fp32 usually helps."
        )
