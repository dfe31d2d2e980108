"""`OwnRandom`: a state of Python's and NumPy's global random generators for each of several environments."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np


class OwnRandom:
    """The state that the global generators have for one episode, so that what it draws depends on its seed alone."""

    def __init__(self, seed: int) -> None:
        """Seeds both generators' states without changing the generators."""
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Gives the global generators this state for as long as the context lasts."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
