"""Why vLLM could not start an engine or replace its weights, and what helps."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.generation.generator import GenerationError
from policies.models.model_check import ModelError

_LONGEST = 300  # characters of what vLLM says
_LISTS = re.compile(
    r"\.? *(Supported architectures|Model type should be one of|The available parameters|Failed core proc).*",
    re.DOTALL,
)
_MEMORY = re.compile(
    r"out of memory|allocate memory|enough memory|memory utilization|KV cache|free memory|unable to mmap"
    r"|Resource temporarily unavailable",
    re.IGNORECASE,
)
_ADVICE = (
    (r"root cause above", "The log of its own process, above, says why."),
    (r"max_model_len", "Lower max_prompt or max_response."),
    (r"does not support LoRA|lora_rank", "Set weights=full, or backend=transformers."),
    (r"quantization (method|config)", "Use the model without its quantization."),
    (r"divisible by tensor parallel", "Set tensor_parallel to a number that divides them."),
    (r"find any model weights|SafetensorError", "Copy or download the model again."),
    (
        r"Model architecture|does not dispatch through|configuration class|no module or parameter|expert parallel",
        "Use another model, or backend=transformers.",
    ),
)
"""By what an error says that is not of memory."""


@contextmanager
def explained(what: str, kind: type[Exception], memory_advice: str) -> Iterator[None]:
    """Raises what vLLM raises meanwhile, of its own kinds, pydantic's or torch's, as an error of one kind.

    Args:
        what: vLLM could not do then, as a clause.
        kind: of the error.
        memory_advice: what gives engines memory, as a clause.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (EngineDeadError, GenerationError, ModelError):
        raise
    except Exception as error:
        raise kind(f"vLLM could not {what}: {explain(error, memory_advice)}") from error


def explain(error: Exception, memory_advice: str) -> str:
    """Says in a sentence or two what an error is about, and which setting helps.

    Args:
        error: as vLLM raised it.
        memory_advice: what gives engines memory, as a clause; it is given only if they lack it.
    """
    cause = _LISTS.sub("", _message(error))
    cause = f"{cause[:_LONGEST]}…" if len(cause) > _LONGEST else cause.rstrip(". ")
    if isinstance(error, MemoryError) or _MEMORY.search(cause):
        return f"{cause}. Memory is short: {memory_advice}."
    fitting = (advice for pattern, advice in _ADVICE if re.search(pattern, cause))
    return f"{cause}. {next(fitting, 'If the model is right, use backend=transformers.')}"


def _message(error: Exception) -> str:
    """What an error says, in one line; of one that says nothing where it was raised."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return " ".join(str(error.errors()[0]["msg"]).removeprefix("Value error, ").split())
    text = " ".join(str(error).split())
    if not text:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"in {place.name} ({Path(place.filename).name}:{place.lineno}), vLLM gave no reason"
    return f"{type(error).__name__}: {text}"
