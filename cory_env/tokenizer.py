"""Loads the tokenizer of the model that plays; transformers is imported only then, torch not for the bundled one."""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from cory_env.home import expand_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TOKENIZER = Path(__file__).parent / "assets" / "imdb-gpt2-tiny"
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # the class of transformers ≥ 5, and its older name

_PROBE = "It isn't \tO'Hara's  naïve résumé:\n\n 12,345 + 67 = 'x_1'; 漢字 😀"
"""A text that tokenizers of other rules cut otherwise."""

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or used; the message says which, why, and what to do."""


def load_tokenizer(
    tokenizer: "str | os.PathLike[str] | PreTrainedTokenizerBase | None" = None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Returns a tokenizer from a folder or hub id; None means the bundled one, and an object is returned as it is.

    Args:
        tokenizer: Where it lies.
        trust_remote_code: Run Python code that comes with it.

    Raises:
        TokenizerError: The name leads to no tokenizer, here or on the hub.
    """
    if tokenizer is None:
        tokenizer = DEFAULT_TOKENIZER
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    name = expand_home(os.fspath(tokenizer))
    loaded: PreTrainedTokenizerBase
    try:
        if _names_generic_class(Path(name)):
            from transformers import PreTrainedTokenizerFast

            loaded = PreTrainedTokenizerFast.from_pretrained(name)
        else:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise TokenizerError(
            f"No tokenizer could be loaded from {name!r}: {reason}. "
            "Set the model to a folder that holds one or to a hub id."
        ) from error
    if not loaded("a", add_special_tokens=False)["input_ids"]:  # transformers makes one up where its file is missing
        raise TokenizerError(f"The tokenizer of {name!r} has no tokens. Put its tokenizer.json beside the model.")
    return loaded


def same_tokenizer(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase", chat: bool = False) -> bool:
    """Whether two tokenizers differ in nothing that matters to a response.

    Args:
        one: A tokenizer.
        other: Another.
        chat: Chat templates matter too.
    """
    return (
        one.get_vocab() == other.get_vocab()
        and all(getattr(one, name) == getattr(other, name) for name in _SPECIAL)
        and set(one.all_special_ids) == set(other.all_special_ids)
        and one(_PROBE)["input_ids"] == other(_PROBE)["input_ids"]
        and (not chat or one.chat_template == other.chat_template)
    )


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns a digest of the rules by which a tokenizer cuts text into tokens, and of its special tokens.

    It does not depend on where the tokenizer lies, nor on its chat template.
    """
    if tokenizer.is_fast:
        rules = tokenizer.backend_tokenizer.to_str()
        # What stands before them is the truncation and padding of the last call.
        rules = rules[max(rules.find('"added_tokens"'), 0) :]
    else:
        rules = repr((sorted(tokenizer.get_vocab().items()), tokenizer(_PROBE)["input_ids"]))
    special = [getattr(tokenizer, name) for name in _SPECIAL]
    return hashlib.sha256(
        repr((rules, special, sorted(set(tokenizer.all_special_ids)))).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]


@lru_cache(maxsize=8)
def tokens_holding(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Returns the tokens of a vocabulary in which a text occurs."""
    tokens = sorted(tokenizer.get_vocab().values())  # not all numbers up to the largest need be there
    texts = tokenizer.batch_decode([[token] for token in tokens])
    return [token for token, held in zip(tokens, texts, strict=True) if text in held]


def _names_generic_class(folder: Path) -> bool:
    """Whether a folder names the class for any `tokenizer.json`. `AutoTokenizer` would choose it, but imports torch."""
    config = folder / "tokenizer_config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_CLASSES
