"""Faster imports of large libraries."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED_BY_TRANSFORMERS = ("scipy",)
"""Optional packages that transformers would import: SciPy for the losses of object detection, 500 modules."""
UNUSED_BY_VLLM = ("scipy.signal",)
"""Optional modules that vLLM would import: SciPy's for audio."""
COMPILER = "torch._inductor.lowering"
"""A module of PyTorch's compiler, which vLLM would import to patch it, also if it compiles nothing."""


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


@contextmanager
def packages_hidden(*names: str) -> Iterator[None]:
    """Makes imports of optional modules fail, so that libraries which can do without them do not load them.

    Modules that are imported already stay visible. Afterwards, all can be imported.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises an ImportError
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
