"""Fixtures of the engines' tests."""

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest

from policies.generation.vllm_generator import VLLMGenerator


def close_all(generators: Sequence[VLLMGenerator]) -> None:
    """Closes engines, without vLLM's garbage collection at each close, which takes a second."""
    with patch("gc.collect"):
        for generator in generators:
            generator.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[VLLMGenerator]]:
    """The engines of this process. They share its distributed state, so they are closed together."""
    engines: list[VLLMGenerator] = []
    yield engines
    close_all(engines)
