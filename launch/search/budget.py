"""What a search may take: updates of all its trials together, and time."""

import time
from dataclasses import dataclass


@dataclass
class Budget:
    """Counts what one process of a search takes; None: as much as there is to do."""

    updates: int | None = None
    minutes: float | None = None
    taken: int = 0
    """Updates so far."""
    began: float | None = None
    """When the first trial began, by a clock that only goes on."""

    def begin(self) -> None:
        """Starts the clock, once."""
        self.began = time.monotonic() if self.began is None else self.began

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        late = self.minutes is not None and self.began is not None and time.monotonic() - self.began > 60 * self.minutes
        return late or (self.updates is not None and self.taken >= self.updates)
