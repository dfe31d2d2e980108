"""Garbage collection and optional packages during imports."""

import gc
import sys
import weakref
from importlib import import_module

import pytest

from policies.compat.imports import gc_paused, packages_hidden


class Node:
    """An object in a reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.cycle = self


def test_no_collection_runs_during_imports() -> None:
    generations: list[int] = []

    def record(phase: str, info: dict[str, int]) -> None:
        generations.append(info["generation"])

    with gc_paused():
        gc.callbacks.append(record)
        _ = [[] for _ in range(100_000)]
        gc.callbacks.remove(record)
        assert not gc.isenabled()
    assert generations == []
    assert gc.isenabled()
    gc.unfreeze()


def test_objects_of_imports_are_exempt_from_later_collections_and_garbage_from_before_is_freed() -> None:
    garbage = Node()
    before = weakref.ref(garbage)
    del garbage
    with gc_paused():
        assert before() is None
        imported: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() > len(imported)
    garbage = Node()
    after = weakref.ref(garbage)
    del garbage
    gc.collect()
    assert after() is None
    gc.unfreeze()


def test_collection_is_enabled_again_after_an_error_unless_it_was_disabled() -> None:
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_hidden_packages_cannot_be_imported_until_the_context_ends_unless_they_are_imported_already() -> None:
    sys.modules.pop("this", None)
    with packages_hidden("this", "json"):
        import json

        assert json is sys.modules["json"]
        with pytest.raises(ImportError):
            import_module("this")
    assert "this" not in sys.modules and "json" in sys.modules
