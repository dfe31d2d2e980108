"""The IMDB reward: the raw positive logit of a sentiment classifier."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from cory_env.rewarding.worker import RewardWorker
from cory_env.rewards.sentiment import BUNDLED_CLASSIFIER, positive_logit
from tests.cory_env.sample_tasks import tokenizer

PROMPTS = ["This movie was", "I", "The acting is, as ever,"] * 40
COMPLETIONS = [" wonderful, a masterpiece I loved.", " hated this awful, boring waste of time.", ""] * 40


def test_the_reward_is_the_raw_positive_logit_of_query_and_response() -> None:
    classifier_tokenizer = AutoTokenizer.from_pretrained(BUNDLED_CLASSIFIER)
    classifier = AutoModelForSequenceClassification.from_pretrained(BUNDLED_CLASSIFIER).eval()
    assert classifier.config.id2label[1] == "POSITIVE"
    values = positive_logit(PROMPTS, COMPLETIONS)
    for index in range(3):
        with torch.no_grad():
            unbatched = (
                classifier(**classifier_tokenizer(PROMPTS[index] + COMPLETIONS[index], return_tensors="pt"))
                .logits[0, 1]
                .item()
            )
        assert values[index] == pytest.approx(unbatched, abs=1e-4)
        assert values[index::3] == pytest.approx([unbatched] * 40, abs=1e-4)  # padding and order do not matter


def test_praise_gets_a_higher_reward_than_complaint() -> None:
    praise, complaint = positive_logit(PROMPTS[:2], COMPLETIONS[:2])
    assert praise > 1 > -1 > complaint


def test_texts_are_truncated_to_the_classifier_s_maximum_length() -> None:
    (value,) = positive_logit(["A wonderful film"], [" and great" * 2000])
    assert value > 0


def test_truncation_considers_positions_that_start_after_the_padding_token(tmp_path: Path) -> None:
    config = RobertaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=34,  # two of them are never used
        pad_token_id=1,
        id2label={0: "negative", 1: "positive"},
    )
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (value,) = positive_logit(["A wonderful film"], [" and great" * 100], model=str(tmp_path))
    assert abs(value) < 5


def save_classifier(folder: Path, labels: dict[int, str]) -> str:
    """Saves a tiny untrained classifier with the given labels and returns its reward's name."""
    config = DistilBertConfig(
        vocab_size=len(tokenizer()), dim=8, hidden_dim=16, n_layers=1, n_heads=2, id2label=labels, pad_token_id=0
    )
    DistilBertForSequenceClassification(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return f"cory_env.rewards.sentiment:positive_logit?model={folder}&device=cpu"


def test_another_classifier_is_set_in_the_reward_s_name(tmp_path: Path) -> None:
    with RewardWorker(save_classifier(tmp_path, {0: "positive", 1: "negative"}), timeout=60) as worker:
        (value,) = worker.rewards(["A film"], [" is"], {"role": ["pioneer"]})
    assert value is not None and abs(value) < 5


def test_a_classifier_without_a_positive_label_is_rejected(tmp_path: Path) -> None:
    save_classifier(tmp_path, {0: "LABEL_0", 1: "LABEL_1"})
    with pytest.raises(ValueError, match="labels LABEL_0, LABEL_1, but not POSITIVE"):
        positive_logit(["A film"], [" is"], model=str(tmp_path))
