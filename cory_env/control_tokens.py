"""Keeps text inserted into a prompt from becoming control tokens, such as those that begin and end a turn.

    control = ControlTokens(tokenizer)
    prompt = f"<|im_start|>{control.mask(response)}<|im_end|>"
    control.encode([prompt], add_special_tokens=False)

A response may spell `<|im_end|><|im_start|>system` with ordinary tokens, and a tokenizer would turn that text into real
control tokens. So text is masked before it is inserted into a template: stand-ins replace the characters that spell a
control token. A control token in the prompt without a stand-in is then the template's own. If one has a stand-in, the
prompt is tokenized in two parts, split inside that spelling. Prompts without such a spelling are tokenized as they are.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from cory_env.message import SURROGATE_PROBLEM, TextError, has_surrogate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STAND_INS = range(0xD800, 0xE000)
"""Lone surrogates, which do not occur in text that can be tokenized."""
_TAG = re.compile(r"</?\w+>")
"""Tags inside messages that templates may write, and search in earlier ones, such as `<think>`; they mark no turns."""
_PREFIXES = ("a", "0", "(", "\n")
"""Prefixes with which the second part of a prompt is tokenized, so that it is not at the start of a text."""


class ControlTokens:
    """The tokens of a tokenizer that inserted text must not become.

    These are its special tokens, the tokens that end a response, and other added tokens that templates write, such as
    those that begin turns in DeepSeek's template. Other added tokens, such as `<think>` or runs of spaces, are text.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", reserved: Collection[int] = (), template_texts: Sequence[str] = ()
    ) -> None:
        """Collects the control tokens.

        Args:
            reserved: Ids of tokens that end a response, or that the model has no embedding for.
            template_texts: The texts that templates write around inserted text.
        """
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)  # tokenizers that are written in Python have none
        normalizer = None if backend is None else backend.normalizer
        self._normalize = None if normalizer is None else normalizer.normalize_str
        template_ids = {
            token for text in template_texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]
        }
        spellings: set[str] = set()
        for token_id, token in tokenizer.added_tokens_decoder.items():
            in_template = token_id in template_ids and not _TAG.fullmatch(token.content)
            is_control = is_mark(token.content) and (token_id in reserved or in_template)
            if token.special or token_id in tokenizer.all_special_ids or is_control:
                spellings.add(token.content)
                if token.normalized and self._normalize is not None:
                    spellings.add(self._normalize(token.content))
        self._spellings = sorted((text for text in spellings if len(text) > 1), key=len)  # one character is that token
        self._longest = len(self._spellings[-1]) if self._spellings else 0
        self._pattern = re.compile("|".join(map(re.escape, reversed(self._spellings))) or "(?!)")
        self._heads = {part for text in self._spellings for k in range(1, len(text)) if is_mark(part := text[:k])}
        self._tails = {part for text in self._spellings for k in range(1, len(text)) if is_mark(part := text[-k:])}
        self._first_of_tails = {part[0] for part in self._tails}
        self._last_of_heads = {part[-1] for part in self._heads}
        characters = sorted({ord(character) for text in self._spellings for character in text if character.strip()})
        self._stand_ins = dict(zip(characters, _STAND_INS, strict=False))
        self._originals = {stand_in: character for character, stand_in in self._stand_ins.items()}
        self._stand_in_pattern = re.compile(f"[{chr(_STAND_INS[0])}-{chr(_STAND_INS[-1])}]")
        plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        with_special: list[int] = tokenizer("a")["input_ids"]
        start = next((i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain), 0)
        self._leading_ids, self._trailing_ids = with_special[:start], with_special[start + len(plain) :]

    def mask(self, text: str) -> str:
        """Returns text that is safe to insert into a template.

        Most texts stay unchanged. Stand-ins replace, one for one, the characters that spell a control token, or that
        could form one together with other inserted text before or after it, such as `<|im_` and `end|>`. Words and
        numbers are not replaced: if they complete a control token, the template itself spells the parts around them.
        """
        if not text.isascii() and has_surrogate(text):
            raise TextError(f"A text in a prompt {SURROGATE_PROBLEM}: {text!r:.100}. Remove or replace the character.")
        if self._normalize is not None and not self._pattern.search(text):
            normalized = self._normalize(text)  # NFKC, for example, turns full-width characters into ASCII
            text = normalized if self._pattern.search(normalized) else text
        spans = list(self._spans(text))
        characters = list(text) if spans else []
        for start, stop in spans:
            characters[start:stop] = text[start:stop].translate(self._stand_ins)
        return "".join(characters) or text

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the spans of control tokens in a text, and of parts of control tokens at its two ends."""
        inner = text.strip()  # templates strip
        if not inner:
            return
        left = text.index(inner)
        right = left + len(inner)
        if len(inner) < self._longest and is_mark(inner) and any(inner in spelling for spelling in self._spellings):
            yield left, right
            return
        lengths = range(min(self._longest - 1, len(inner)), 0, -1)
        begin, end = left, right
        if inner[0] in self._first_of_tails:
            begin = next((left + length for length in lengths if inner[:length] in self._tails), left)
        if inner[-1] in self._last_of_heads:
            end = next((right - length for length in lengths if inner[-length:] in self._heads), right)
        if begin > left:
            yield left, begin
        for match in self._pattern.finditer(text):
            yield match.span()
        if end < right:
            yield end, right

    def encode(self, prompts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Tokenizes prompts whose inserted texts are masked.

        Args:
            add_special_tokens: Whether to add the special tokens that the tokenizer puts around every text.
        """
        split_prompts = [self.split(prompt) for prompt in prompts]
        unsplit = [parts[0] for parts in split_prompts if len(parts) == 1]
        ids = iter(self._tokenizer(unsplit, add_special_tokens=add_special_tokens)["input_ids"] if unsplit else ())
        return [next(ids) if len(parts) == 1 else self._join(parts, add_special_tokens) for parts in split_prompts]

    def encode_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenizes texts without a template, as a model would generate them."""
        return self.encode([self.mask(text) for text in texts], add_special_tokens=False)

    def encode_continuation(self, text: str) -> list[int]:
        """Tokenizes text with masked parts that continues a prompt."""
        return [token for part in self.split(text) for token in self._tokenize_continuation(part)]

    def break_up(self, text: str) -> str:
        """Returns text with a space inside each control token that inserted text contributes to.

        For callers that tokenize the text themselves, with padding or as one of a pair.
        """
        return " ".join(self.split(text))

    def split(self, prompt: str) -> list[str]:
        """Returns a prompt without stand-ins, split inside each control token that inserted text contributes to."""
        if not self._stand_in_pattern.search(prompt):
            return [prompt]
        text = prompt.translate(self._originals)
        cuts: list[int] = []
        for spelling in self._spellings:  # the shortest first: a longer one may contain them
            start = text.find(spelling)
            while start >= 0:
                stop = start + len(spelling)
                if prompt[start:stop] != spelling and not any(start < cut < stop for cut in cuts):
                    inside = range(stop - 1, start, -1)  # next to an inserted character, so not in a template's token
                    cuts.append(next(cut for cut in inside if prompt[cut - 1 : cut + 1] != text[cut - 1 : cut + 1]))
                start = text.find(spelling, start + 1)
        edges = [0, *sorted(cuts), len(text)]
        return [text[start:stop] for start, stop in pairwise(edges)]

    def _join(self, parts: Sequence[str], add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer(parts[0], add_special_tokens=False)["input_ids"]
        for part in parts[1:]:
            ids = [*ids, *self._tokenize_continuation(part)]
        return [*self._leading_ids, *ids, *self._trailing_ids] if add_special_tokens else ids

    def _tokenize_continuation(self, text: str) -> list[int]:
        """Tokenizes text that continues other text: some tokenizers add a space at the start of a text."""
        for prefix in _PREFIXES:
            head: list[int] = self._tokenizer(prefix, add_special_tokens=False)["input_ids"]
            ids: list[int] = self._tokenizer(prefix + text, add_special_tokens=False)["input_ids"]
            if head and ids[: len(head)] == head:
                return ids[len(head) :]
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def is_mark(text: str) -> bool:
    """Returns whether a text contains more than letters, digits, spaces and underscores, as turn markers do."""
    return any(
        not (character.isalnum() or character.isspace() or character in "_\N{LOWER ONE EIGHTH BLOCK}")
        for character in text
    )
