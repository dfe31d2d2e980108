"""Computes logits of texts with a Hugging Face sequence classifier, for model-based rewards."""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from cory_env.control_tokens import ControlTokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_SIZE = 64


def load_classifier(model: str, device: str = "") -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Loads a classifier once per process, in evaluation mode.

    Args:
        model: A folder or hub id.
        device: Device, such as `cpu` or `cuda:0`; if empty, a GPU if this process sees one, else the CPU.
    """
    return _load(model, device)  # the cache distinguishes keyword arguments from positional ones


@lru_cache(maxsize=8)
def _load(model: str, device: str) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    # One thread by default, because the sampler and the learner need the cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    classifier = AutoModelForSequenceClassification.from_pretrained(model).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    positions = classifier.config.to_dict().get("max_position_embeddings", tokenizer.model_max_length)
    for name, part in classifier.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            # RoBERTa and similar models count positions from padding_idx + 1.
            positions = min(positions, part.num_embeddings - part.padding_idx - 1)
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)  # many tokenizers lack a limit
    return tokenizer, classifier


@lru_cache(maxsize=8)
def control_tokens(tokenizer: "PreTrainedTokenizerBase", template_text: str = "") -> ControlTokens:
    """Returns the control tokens that classified text must not become.

    Args:
        tokenizer: The classifier's.
        template_text: The text that a chat template writes around messages, if one is used.
    """
    return ControlTokens(tokenizer, template_texts=[template_text])


def logits(
    tokenizer: "PreTrainedTokenizerBase",
    classifier: "PreTrainedModel",
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    special_tokens: bool = True,
) -> "Tensor":
    """Returns the logits of each text, or pair of texts, `[B, labels]`, fp32 on the CPU.

    If a text spells a special token, such as `[SEP]`, a space is inserted into that spelling.

    Args:
        tokenizer: The classifier's tokenizer; texts beyond its maximum length are truncated.
        classifier: The classifier.
        texts: The texts to classify.
        pairs: Second texts, for classifiers that take pairs such as question and answer.
        special_tokens: Whether to add the tokenizer's special tokens; False if a template has added them already.
    """
    import torch

    if special_tokens:
        control = control_tokens(tokenizer)
        texts = [control.break_up(control.mask(text)) for text in texts]
        pairs = pairs and [control.break_up(control.mask(text)) for text in pairs]
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]) + len(pairs[i] if pairs else ""))  # less padding
    outputs = torch.empty(len(texts), classifier.config.num_labels)
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH_SIZE):
            indices = by_length[start : start + BATCH_SIZE]
            inputs = tokenizer(
                [texts[i] for i in indices],
                [pairs[i] for i in indices] if pairs else None,
                padding=True,
                truncation=True,
                add_special_tokens=special_tokens,
                return_tensors="pt",
            ).to(classifier.device)
            outputs[indices] = classifier(**inputs).logits.float().cpu()
    return outputs
