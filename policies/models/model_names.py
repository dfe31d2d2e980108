"""What the setting `model` may name: models that need no hub, or anything that `from_pretrained` takes."""

from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.models import smollm2

BUNDLED_LM = DEFAULT_TOKENIZER.name
BUNDLED = {BUNDLED_LM: DEFAULT_TOKENIZER, "drafts-llama-tiny": DEFAULT_TOKENIZER.with_name("drafts-llama-tiny")}
AVERAGE = "llm_mean"
"""The LLM whose weights are the mean of those that were trained. Not `mean`, which figures over the LLMs are called."""


def model_path(name: str) -> str:
    """Returns what `from_pretrained` is given for a name: a folder of this machine, or the name itself.

    Every process resolves names by itself, because folders lie elsewhere on another machine. A path stays what it is.

    Raises:
        SmolLM2Error: `smollm2` is named, but its package is not installed.
        CacheError: `smollm2` is named for the first time, and the cache cannot be written.
    """
    if name in BUNDLED:
        return str(BUNDLED[name])
    return str(smollm2.folder()) if name == smollm2.NAME else name


def is_bundled(name: str) -> bool:
    """Tells whether a name is that of a model that needs no hub, whatever folders there are."""
    return name in BUNDLED or name == smollm2.NAME
