"""Scores texts by a Hugging Face sequence classifier, for rewards that are models."""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from cory_env.control_tokens import ControlTokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_SIZE = 64


def load(model: str, device: str = "") -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Loads a classifier once per process, in evaluation mode.

    Args:
        model: A folder or hub id.
        device: Where it runs, such as `cpu` or `cuda:0`; empty for a GPU if this process sees one, else the CPU.
    """
    return _load(model, device)  # the cache takes arguments by name for others than those by place


@lru_cache(maxsize=8)
def _load(model: str, device: str) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    # One thread unless the user says otherwise: the cores belong to the sampler and the learner.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    classifier = AutoModelForSequenceClassification.from_pretrained(model).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    positions = classifier.config.to_dict().get("max_position_embeddings", tokenizer.model_max_length)
    for name, part in classifier.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            positions = min(
                positions, part.num_embeddings - part.padding_idx - 1
            )  # RoBERTa and its kin count from there
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)  # many tokenizers do not know their limit
    return tokenizer, classifier


@lru_cache(maxsize=8)
def control_tokens(tokenizer: "PreTrainedTokenizerBase", written: str = "") -> ControlTokens:
    """Returns the tokens that judged text must not become.

    Args:
        tokenizer: The classifier's.
        written: What a chat template writes around messages, if one is in use.
    """
    return ControlTokens(tokenizer, written=[written])


def logits(
    tokenizer: "PreTrainedTokenizerBase",
    classifier: "PreTrainedModel",
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    special_tokens: bool = True,
) -> "Tensor":
    """Returns the logits of each text, or pair of texts, `[B, labels]`, fp32 on the CPU.

    A text that spells a special token, such as `[SEP]`, is read with a space inside of it.

    Args:
        tokenizer: The classifier's; texts beyond its limit are cut.
        classifier: As loaded.
        texts: What is judged.
        pairs: The second part of each, for classifiers that judge an answer to a question.
        special_tokens: Add the tokenizer's own; off for texts that a template has put them into.
    """
    import torch

    if special_tokens:
        control = control_tokens(tokenizer)
        texts = [control.break_up(control.mask(text)) for text in texts]
        pairs = pairs and [control.break_up(control.mask(text)) for text in pairs]
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]) + len(pairs[i] if pairs else ""))  # less padding
    out = torch.empty(len(texts), classifier.config.num_labels)
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH_SIZE):
            chosen = by_length[start : start + BATCH_SIZE]
            inputs = tokenizer(
                [texts[i] for i in chosen],
                [pairs[i] for i in chosen] if pairs else None,
                padding=True,
                truncation=True,
                add_special_tokens=special_tokens,
                return_tensors="pt",
            ).to(classifier.device)
            out[chosen] = classifier(**inputs).logits.float().cpu()
    return out
