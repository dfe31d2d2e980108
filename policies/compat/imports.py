"""Faster imports of large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection while libraries are imported, and exempts their objects from later collections.

    PyTorch, transformers, RLlib and vLLM create a million objects, none of which is garbage. Collections take a fifth
    of the time of these imports, and engines request full collections while they start.
    """
    gc.collect()  # frozen garbage would never be freed
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
