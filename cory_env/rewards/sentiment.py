"""The IMDB reward: a sentiment classifier's logit of POSITIVE on query + response (paper §4, [C])."""

from pathlib import Path
from typing import TYPE_CHECKING

from cory_env.rewards import classifier
from cory_env.rewards.prepared import prepare_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED_CLASSIFIER = Path(__file__).parents[1] / "assets" / "imdb-classifier-tiny"


def _load(model: str = "", device: str = "") -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    return classifier.load_classifier(model or str(BUNDLED_CLASSIFIER), device)


@prepare_with(_load)
def positive_logit(prompts: list[str], completions: list[str], model: str = "", device: str = "") -> list[float]:
    """Returns the classifier's raw logit (not a probability) of the label POSITIVE on prompt + completion.

    The two are concatenated without a separator, because completions have a leading space.

    Args:
        prompts: The queries.
        completions: The decoded responses.
        model: A folder or hub id of a Hugging Face sequence classifier; if empty, the small bundled one. The paper uses
            `lvwerra/distilbert-imdb`, in a configuration
            `cory_env.rewards.sentiment:positive_logit?model=lvwerra/distilbert-imdb`.
        device: Device, such as `cpu` or `cuda:0`; if empty, a GPU if this process sees one, else the CPU.

    Raises:
        ValueError: The classifier has no label called POSITIVE.
    """
    tokenizer, classifier_model = _load(model, device)
    labels = {str(name).upper(): index for index, name in classifier_model.config.id2label.items()}
    if "POSITIVE" not in labels:
        raise ValueError(
            f"The classifier {model} has the labels {', '.join(labels)}, but not POSITIVE. Use another classifier."
        )
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    rewards: list[float] = classifier.logits(tokenizer, classifier_model, texts)[:, labels["POSITIVE"]].tolist()
    return rewards
