"""A response told while it is written is the response, and no piece of it is taken back."""

import torch

from cory_env.tokenizer import load_tokenizer
from policies.generation.token_stream import Detokenizer, StepStreamer


def pieces(tokens: list[int], *stops: str) -> list[str]:
    told: list[str] = []
    detokenizer = Detokenizer(load_tokenizer().decode, stops)
    stream = StepStreamer(lambda new: told.append(detokenizer.add(new)))
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()
    return [piece for piece in [*told, detokenizer.end()] if piece]


def test_the_pieces_together_are_the_text_and_the_prompt_is_not_told() -> None:
    tokens = load_tokenizer()(" a wonderful film, isn't it?")["input_ids"]
    told = pieces(tokens)
    assert "".join(told) == " a wonderful film, isn't it?"
    assert len(told) == len(tokens)


def test_a_character_of_several_tokens_is_told_when_it_is_whole() -> None:
    tokens = load_tokenizer()("so 🙂 so")["input_ids"]
    told = pieces(tokens)
    assert len(tokens) > len(told) and "🙂" in "".join(told)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in told)


def test_what_never_becomes_whole_is_told_at_the_end() -> None:
    tokens = load_tokenizer()("so 🙂")["input_ids"][:-1]
    assert pieces(tokens)[-1].endswith("\N{REPLACEMENT CHARACTER}")


def test_nothing_is_told_from_a_stop_text_on_also_of_one_that_spans_tokens() -> None:
    for text, told in ((" a good film", " a good "), ("so\nit\n\nQ: f", "so\nit")):
        assert "".join(pieces(load_tokenizer()(text)["input_ids"], "f", "\n\n")) == told
