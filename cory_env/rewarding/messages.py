"""What a reward's parent and child process say to each other. Imports nothing of the project."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Batch:
    """Samples to reward. All lists have one length. Prompts and completions are texts, or lists of chat messages."""

    prompts: Sequence[object]
    completions: Sequence[object]
    columns: dict[str, list[object]]

    def __len__(self) -> int:
        return len(self.completions)

    def pick(self, indices: Sequence[int]) -> "Batch":
        """Returns the samples at `indices` only."""
        return Batch(
            prompts=[self.prompts[i] for i in indices],
            completions=[self.completions[i] for i in indices],
            columns={name: [values[i] for i in indices] for name, values in self.columns.items()},
        )


Request = str | Batch | None
"""A reward's name, which is the first; samples, which are answered; None: load what can be loaded ahead."""


@dataclass(frozen=True)
class Reply:
    """What came of one call, or of the attempt to load the function.

    Attributes:
        values: One number per sample; without meaning where `faults` has an entry, empty with an `error`.
        faults: For each sample whose value is not a finite number: what came instead.
        error: Why the call as a whole gave no values; empty when it did.
        fatal: Whether no call can ever succeed, because the function cannot be loaded or called.
        killed: Whether the system ended the process by SIGKILL, as it does where memory runs out.
        parts: Of several functions: what each gave, by its short name; `values` are then their weighted sums.
        needs: Once the function is loaded: the arguments that it has no default for.
    """

    values: list[float] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    error: str = ""
    fatal: bool = False
    killed: bool = False
    parts: dict[str, list[float]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
