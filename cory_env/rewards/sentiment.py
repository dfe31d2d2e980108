"""The IMDB reward: how positive a sentiment classifier finds query + response (paper §4, [C])."""

from pathlib import Path
from typing import TYPE_CHECKING

from cory_env.rewards import classifier
from cory_env.rewards.prepared import prepare_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = Path(__file__).parents[1] / "assets" / "imdb-classifier-tiny"


def _load(model: str = "", device: str = "") -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    return classifier.load(model or str(BUNDLED), device)


@prepare_with(_load)
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

    Raises:
        ValueError: The classifier has no label called POSITIVE.
    """
    tokenizer, judge = _load(model, device)
    labels = {str(name).upper(): index for index, name in judge.config.id2label.items()}
    if "POSITIVE" not in labels:
        raise ValueError(
            f"The classifier {model} has the labels {', '.join(labels)}, but none is POSITIVE. Name another classifier."
        )
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    values: list[float] = classifier.logits(tokenizer, judge, texts)[:, labels["POSITIVE"]].tolist()
    return values
