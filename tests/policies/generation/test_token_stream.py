"""Streaming detokenization: the pieces add up to the response, and emitted text never changes."""

import torch

from cory_env.tokenizer import load_tokenizer
from policies.generation.token_stream import Detokenizer, StepStreamer


def stream_pieces(tokens: list[int], *stops: str) -> list[str]:
    pieces: list[str] = []
    detokenizer = Detokenizer(load_tokenizer().decode, stops)
    stream = StepStreamer(lambda new: pieces.append(detokenizer.add(new)))
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()
    return [piece for piece in [*pieces, detokenizer.end()] if piece]


def test_the_pieces_add_up_to_the_response_without_the_prompt() -> None:
    tokens = load_tokenizer()(" a wonderful film, isn't it?")["input_ids"]
    pieces = stream_pieces(tokens)
    assert "".join(pieces) == " a wonderful film, isn't it?"
    assert len(pieces) == len(tokens)


def test_a_character_of_several_tokens_is_emitted_when_it_is_complete() -> None:
    tokens = load_tokenizer()("so 🙂 so")["input_ids"]
    pieces = stream_pieces(tokens)
    assert len(tokens) > len(pieces) and "🙂" in "".join(pieces)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_an_incomplete_character_is_emitted_at_the_end() -> None:
    tokens = load_tokenizer()("so 🙂")["input_ids"][:-1]
    assert stream_pieces(tokens)[-1].endswith("\N{REPLACEMENT CHARACTER}")


def test_nothing_is_emitted_after_a_stop_text_even_if_it_spans_tokens() -> None:
    for text, expected in ((" a good film", " a good "), ("so\nit\n\nQ: f", "so\nit")):
        assert "".join(stream_pieces(load_tokenizer()(text)["input_ids"], "f", "\n\n")) == expected
