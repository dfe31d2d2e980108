"""The reward of a preference model, with small untrained models of both kinds: with a chat template, and for pairs."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from cory_env.rewarding.child import call_hook
from cory_env.rewards.preference import score
from cory_env.tasks import Message
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
PROMPTS = ["Name a fruit.", "Why is the sky blue? I have always wondered.", "Hi"]
RESPONSES = ["An apple.", "Because air scatters the blue of sunlight most.", ""]


def save_chat_model(folder: Path, outputs: int = 1) -> str:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    tokenizer.chat_template = TEMPLATE
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, num_labels=outputs)
    GPT2ForSequenceClassification(config).save_pretrained(folder)  # sets no padding token, like many models
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_prepared_model_is_used_for_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_chat_model(tmp_path)
    load, loaded_paths = AutoModelForSequenceClassification.from_pretrained, list[str]()

    def load_and_record(path: str) -> GPT2ForSequenceClassification:
        loaded_paths.append(path)
        return load(path)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", load_and_record)
    call_hook(partial(score, model=folder), "prepare")
    assert loaded_paths == [folder]
    score(PROMPTS, RESPONSES, model=folder)
    assert loaded_paths == [folder]


def test_a_model_with_a_chat_template_gets_the_rendered_conversation(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    values = score(PROMPTS, RESPONSES, model=folder, device="cpu")
    assert len(set(values)) == 3
    for prompt, response, value in zip(PROMPTS, RESPONSES, values, strict=True):
        inputs = tokenizer(f"<user> {prompt}\n<assistant> {response}\n", add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():  # a single text, so there is no padding
            assert value == pytest.approx(model(**inputs).logits[0, 0].item(), abs=1e-5)


def test_the_whole_conversation_is_scored(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    query = [Message(role="user", content="Name a fruit.")]
    longer = [Message(role="system", content="Be brief."), *query]
    response = [Message(role="assistant", content="An apple.")]
    text, same, other = score(["Name a fruit.", query, longer], ["An apple.", response, response], model=folder)
    assert text == pytest.approx(same, abs=1e-5)
    assert abs(other - same) > 1e-4


def test_a_model_without_a_chat_template_gets_query_and_response_as_a_pair(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    assert tokenizer.chat_template is None
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=16, hidden_dim=16, n_layers=1, n_heads=2, num_labels=1)
    model = DistilBertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    values = score(PROMPTS, RESPONSES, model=str(tmp_path))
    for prompt, response, value in zip(PROMPTS, RESPONSES, values, strict=True):
        with torch.no_grad():
            unbatched = model(**tokenizer(prompt, response, return_tensors="pt")).logits[0, 0].item()
        assert value == pytest.approx(unbatched, abs=1e-5)


def test_a_classifier_with_several_outputs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 outputs, but a preference model has one"):
        score(PROMPTS, RESPONSES, model=save_chat_model(tmp_path, outputs=2))
