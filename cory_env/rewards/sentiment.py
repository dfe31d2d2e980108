"""The IMDB reward: how positive a sentiment classifier finds query + response (paper §4, [C])."""

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = Path(__file__).parents[1] / "assets" / "imdb-classifier-tiny"
BATCH_SIZE = 64


def positive_logit(prompts: list[str], completions: list[str], model: str = "", device: str = "") -> list[float]:
    """Returns the classifier's raw logit (no probability) of the label POSITIVE on prompt + completion.

    The two are joined as they are: a completion carries its own leading space.

    Args:
        prompts: The bare queries.
        completions: The decoded responses.
        model: A folder or hub id of a Hugging Face sequence classifier; empty for the small bundled one. The paper's is
            `lvwerra/distilbert-imdb`, in a configuration
            `cory_env.rewards.sentiment:positive_logit?model=lvwerra/distilbert-imdb`.
        device: Where it runs, such as `cpu` or `cuda:0`; empty for a GPU if this process sees one, else the CPU.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, classifier, label = _load(model or str(BUNDLED), device)
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))  # so that a batch holds little padding
    logits = torch.empty(len(texts))
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH_SIZE):
            indices = by_length[start : start + BATCH_SIZE]
            batch = [texts[index] for index in indices]
            inputs = tokenizer(batch, padding=True, truncation=True, return_tensors="pt").to(device)
            logits[indices] = classifier(**inputs).logits[:, label].float().cpu()  # (B, labels) -> (B,)
    values: list[float] = logits.tolist()
    return values


@lru_cache(maxsize=1)
def _load(model: str, device: str) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel", int]:
    """Loads the classifier once per process: tokenizer, model in evaluation mode, index of its positive label.

    Raises:
        ValueError: The classifier has no label called POSITIVE.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    # One thread unless the user says otherwise: the cores belong to the sampler and the learner.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    classifier = AutoModelForSequenceClassification.from_pretrained(model).to(device).eval()
    labels = {str(name).upper(): index for index, name in classifier.config.id2label.items()}
    if "POSITIVE" not in labels:
        raise ValueError(
            f"The classifier {model} has the labels {', '.join(labels)}, but none is POSITIVE. Name another classifier."
        )
    tokenizer = AutoTokenizer.from_pretrained(model)
    positions = classifier.config.to_dict().get("max_position_embeddings", tokenizer.model_max_length)
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)  # many tokenizers do not know their limit
    return tokenizer, classifier, labels["POSITIVE"]
