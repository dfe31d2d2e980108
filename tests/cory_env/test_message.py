"""Texts that UTF-8 cannot write, in prompts and responses."""

from typing import Any, ClassVar

import pytest
from transformers import PreTrainedTokenizer

from cory_env.chain import Chain
from cory_env.message import TextError, has_surrogate, is_blank
from cory_env.tasks import Message, Query
from cory_env.tasks.rows import read_queries
from cory_env.tasks.turns import SeenResponse
from tests.cory_env.sample_tasks import chain, reviews, tokens_of

HALF, OTHER_HALF = "\ud83d", "\ude00"
WORDS = ["</s>", "a", "b", HALF, OTHER_HALF]


class SurrogateTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, such as those of characters, with the two halves of an emoji as tokens."""

    model_input_names: ClassVar = ["input_ids"]

    def __init__(self, **settings: Any) -> None:
        super().__init__(eos_token="</s>", **settings)

    @property
    def vocab_size(self) -> int:
        return len(WORDS)

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(WORDS)}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return WORDS.index(token) if token in WORDS else 2

    def _convert_id_to_token(self, index: int) -> str:
        return WORDS[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_a_response_is_text_in_utf8_even_if_tokens_are_halves_of_characters() -> None:
    words = SurrogateTokenizer()
    assert words.decode([1, 3]) == f"a{HALF}"
    half_chain = Chain(reviews(), words)
    assert half_chain.encoders[0].decode([1, 3, 2]) == "a\N{REPLACEMENT CHARACTER}b"
    assert half_chain.encoders[0].decode([1, 3, 4, 2]) == "a😀b"


@pytest.mark.parametrize(
    "query",
    [
        Query(0, f"half {HALF}"),
        Query(0, "whole", {"note": f"half {HALF}"}),
        Query(0, "whole", history=(Message(role="user", content=f"half {HALF}"),)),
        Query(0, "\ud800im_end|>"),  # the first stand-in of `ControlTokens`
    ],
)
def test_a_prompt_with_half_of_a_surrogate_pair_is_rejected(query: Query) -> None:
    seen = SeenResponse.decoded(chain().encoders[0].decode, tokens_of(" good"))
    for build in (
        lambda: chain().encoders[0].encode_prompts([query]),
        lambda: chain().encoders[0].build_prompt(query, [seen]),
        lambda: chain().encoders[0].control.encode_text([f"half {HALF}"]),
    ):
        with pytest.raises(TextError, match="A text in a prompt contains half of a surrogate pair"):
            build()


def test_surrogates_are_found_in_nested_values_and_keys() -> None:
    assert not has_surrogate({"a": ["😀", None, 1.5, ("b",)], "c": {"d": "é"}})
    for value in (HALF, [("a", HALF)], {"a": {"b": [HALF]}}, {HALF: 1}, f"{OTHER_HALF}{HALF}"):
        assert has_surrogate(value)


@pytest.mark.parametrize("text", ["", " \n\u3000", "\u200b", "\u200d\ufeff\u2060", "\u00ad", "\u202e", "\x00\x1b"])
def test_invisible_texts_are_blank(text: str) -> None:
    assert is_blank(text) and is_blank(f" {text} ") and not is_blank(f"{text}a{text}")


@pytest.mark.parametrize("text", ["0", ".", "😀", "👩\u200d🚀", "\U0001fae8", "ㄱ", "\N{REPLACEMENT CHARACTER}"])
def test_other_texts_are_not_blank(text: str) -> None:  # also those that are newer than Python's Unicode
    assert not is_blank(text)


def test_a_conversation_in_csv_with_half_of_a_surrogate_pair_is_rejected(tmp_path: Any) -> None:
    data = tmp_path / "rows.csv"
    data.write_text('query\n"[{""role"": ""user"", ""content"": ""half \\ud83d""}]"\n')
    with pytest.raises(ValueError, match=r"rows.csv line 2 contains half of a surrogate pair"):
        read_queries(data)
