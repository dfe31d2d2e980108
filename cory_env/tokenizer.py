"""Loads tokenizers. Imports transformers only when needed, and torch not at all for the bundled tokenizer."""

import contextlib
import hashlib
import json
import os
import socket
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from cory_env.home import expand_home, upload_hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TOKENIZER = Path(__file__).parent / "assets" / "imdb-gpt2-tiny"
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # the class in transformers ≥ 5, and its old name

_PROBE = "It isn't \tO'Hara's  naïve résumé:\n\n 12,345 + 67 = 'x_1'; 漢字 😀"
"""A text that different tokenizers are likely to split differently."""

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


HUB_TIMEOUT = 3.0
"""Seconds within which the hub must answer."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or used."""


def load_tokenizer(
    tokenizer: "str | os.PathLike[str] | PreTrainedTokenizerBase | None" = None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Loads a tokenizer.

    Args:
        tokenizer: A folder or hub id, `ID@REVISION` for a revision of it; None for the bundled tokenizer. A tokenizer
            object is returned unchanged.
        trust_remote_code: Whether to run Python code that comes with the tokenizer.
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

            hub_id, revision = _split_revision(name)
            if not Path(name).exists():
                go_offline_if_unreachable()
            loaded = AutoTokenizer.from_pretrained(hub_id, **revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if (offline := offline_reason(name)) is not None:
            raise TokenizerError(
                f"The tokenizer of {name!r} cannot be loaded: {offline}.{upload_hint(name)}"
            ) from error
        reason = " ".join(str(error).split()).rstrip(".")
        raise TokenizerError(
            f"The tokenizer of {name!r} cannot be loaded: {reason}. Set the model to a folder with a tokenizer or to a "
            f"hub id.{upload_hint(name)}"
        ) from error
    if not loaded("a", add_special_tokens=False)["input_ids"]:  # transformers makes an empty one if its file is missing
        raise TokenizerError(
            f"The tokenizer of {name!r} has no tokens. Add tokenizer.json to the model's folder.{upload_hint(name)}"
        )
    return loaded


@lru_cache(maxsize=1)
def go_offline_if_unreachable() -> None:
    """Makes hub clients use only their cache if the hub does not answer. They would retry every file for half a minute.

    Proxies are not checked.
    """
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or getproxies().get(hub.scheme):
        return
    answers: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            port = hub.port or (80 if hub.scheme == "http" else 443)
            socket.create_connection((hub.hostname or "", port), timeout=HUB_TIMEOUT).close()
            answers.append(True)

    thread = threading.Thread(target=connect, daemon=True)  # looking up a name has no time limit
    thread.start()
    thread.join(HUB_TIMEOUT)
    if not answers:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes


def offline_reason(name: str) -> str | None:
    """Returns why a hub id cannot be loaded and what to do, if hub clients are offline; None otherwise."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE or Path(name).exists():
        return None
    return (
        f"the hub {constants.ENDPOINT} could not be reached (or HF_HUB_OFFLINE is set), and `{name}` is not in "
        "its cache. Connect to the network, or set model to a folder with a copy"
    )


def _split_revision(name: str) -> tuple[str, dict[str, str]]:
    """Splits `ID@REVISION`, as `policies.models.revision.split_revision` does for models."""
    hub_id, at, revision = name.partition("@")
    return (hub_id, {"revision": revision}) if at and not Path(name).exists() else (name, {})


def same_tokenizer(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase", chat: bool = False) -> bool:
    """Returns whether two tokenizers handle responses identically."""
    return (
        one.get_vocab() == other.get_vocab()
        and all(getattr(one, name) == getattr(other, name) for name in _SPECIAL)
        and set(one.all_special_ids) == set(other.all_special_ids)
        and one(_PROBE)["input_ids"] == other(_PROBE)["input_ids"]
        and (not chat or one.chat_template == other.chat_template)
    )


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns a digest of a tokenizer's rules and special tokens, independent of its location and chat template."""
    if tokenizer.is_fast:
        rules = tokenizer.backend_tokenizer.to_str()
        # The part before it is the truncation and padding of the last call.
        rules = rules[max(rules.find('"added_tokens"'), 0) :]
    else:
        rules = repr((sorted(tokenizer.get_vocab().items()), tokenizer(_PROBE)["input_ids"]))
    special = [getattr(tokenizer, name) for name in _SPECIAL]
    return hashlib.sha256(
        repr((rules, special, sorted(set(tokenizer.all_special_ids)))).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]


@lru_cache(maxsize=8)
def token_ids_containing(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Returns the ids of the tokens whose text contains `text`."""
    ids = sorted(tokenizer.get_vocab().values())  # ids may have gaps
    token_texts = tokenizer.batch_decode([[token] for token in ids])
    return [token for token, token_text in zip(ids, token_texts, strict=True) if text in token_text]


def _names_generic_class(folder: Path) -> bool:
    """Returns whether a folder's config names the generic class. `AutoTokenizer` would find it, but imports torch."""
    config = folder / "tokenizer_config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_CLASSES
