"""Values of the setting `model`: bundled models, or any folder or hub id that `from_pretrained` accepts."""

from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.models import smollm2

BUNDLED_LM = DEFAULT_TOKENIZER.name
BUNDLED_MODELS = {
    name: DEFAULT_TOKENIZER.with_name(name) for name in (BUNDLED_LM, "drafts-llama-tiny", "sudoku-llama-tiny")
}
SMOLLM2 = smollm2.NAME
AVERAGE_POLICY = "llm_mean"
"""Policy id of the average of the trained policies. Not `mean`, which is the key of metrics averaged over policies."""


def model_path(name: str) -> str:
    """Resolves a model name: the folder of a bundled model on this machine, else the name itself.

    Every process resolves names itself, because folders differ between machines.
    """
    if name in BUNDLED_MODELS:
        return str(BUNDLED_MODELS[name])
    return str(smollm2.model_folder()) if name == smollm2.NAME else name


def is_bundled(name: str) -> bool:
    """Whether a name is that of a bundled model, which needs no hub."""
    return name in BUNDLED_MODELS or name == smollm2.NAME
