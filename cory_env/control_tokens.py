"""Keeps text that is put into a prompt from becoming control tokens, such as those that begin and end a turn.

    control = ControlTokens(tokenizer)
    prompt = f"<|im_start|>{control.mask(response)}<|im_end|>"
    control.encode([prompt], add_special_tokens=False)

A response may spell `<|im_end|><|im_start|>system` with ordinary tokens, and a tokenizer reads that as real ones. So
inserted text is masked before a template takes it in: stand-ins take the place of the characters that spell a control
token. After that, a control token in the prompt is the template's own if it has no stand-in. Where one has, the prompt
is tokenized in two parts, cut inside of that spelling. A prompt without such a spelling is tokenized as it is.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STAND_INS = range(0xD800, 0xE000)
"""Surrogates, which no text that can be tokenized has by themselves."""
_TAG = re.compile(r"</?\w+>")
"""Parts of a message that templates may write, and look for in earlier ones, such as `<think>`; they mark no turns."""
_BEFORE = ("a", "0", "(", "\n")
"""Texts that stand before the second part of a prompt while it is tokenized, so that it does not begin a text."""


class ControlTokens:
    """The tokens of a tokenizer that inserted text must not become.

    These are its special tokens, the tokens that end a response, and other added tokens that templates write, as the
    turns of DeepSeek's template begin. Any other added token is text, such as `<think>` or runs of spaces.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", ends: Collection[int] = (), written: Sequence[str] = ()
    ) -> None:
        """Finds them.

        Args:
            tokenizer: The tokenizer.
            ends: Tokens that end a response, or that the model has no embedding for.
            written: What templates write around inserted text.
        """
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)  # tokenizers that are written in Python have none
        normalizer = None if backend is None else backend.normalizer
        self._normalize = None if normalizer is None else normalizer.normalize_str
        in_templates = {token for text in written for token in tokenizer(text, add_special_tokens=False)["input_ids"]}
        spellings: set[str] = set()
        for number, token in tokenizer.added_tokens_decoder.items():
            in_template = number in in_templates and not _TAG.fullmatch(token.content)
            marks = is_mark(token.content) and (number in ends or in_template)
            if token.special or number in tokenizer.all_special_ids or marks:
                spellings.add(token.content)
                if token.normalized and self._normalize is not None:
                    spellings.add(self._normalize(token.content))
        self._spellings = sorted((text for text in spellings if len(text) > 1), key=len)  # one character is that token
        self._longest = len(self._spellings[-1]) if self._spellings else 0
        self._pattern = re.compile("|".join(map(re.escape, reversed(self._spellings))) or "(?!)")
        self._heads = {part for text in self._spellings for k in range(1, len(text)) if is_mark(part := text[:k])}
        self._tails = {part for text in self._spellings for k in range(1, len(text)) if is_mark(part := text[-k:])}
        characters = sorted({ord(character) for text in self._spellings for character in text if character.strip()})
        self._stand_ins = dict(zip(characters, _STAND_INS, strict=False))
        self._originals = {stand_in: character for character, stand_in in self._stand_ins.items()}
        self._masked = re.compile(f"[{chr(_STAND_INS[0])}-{chr(_STAND_INS[-1])}]")
        plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole: list[int] = tokenizer("a")["input_ids"]
        start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        self._first, self._last = whole[:start], whole[start + len(plain) :]

    def mask(self, text: str) -> str:
        """Returns text as it may be inserted into a template.

        Most texts come back as they are. Stand-ins, one for one, take the place of characters that spell a control
        token, or that may be a part of one together with other inserted text before or after it: `<|im_` and `end|>`.
        Words and numbers never are: what they complete is a token that the template itself spells around them.
        """
        if self._normalize is not None and not self._pattern.search(text):
            normalized = self._normalize(text)  # as in full-width characters, which NFKC makes ASCII
            text = normalized if self._pattern.search(normalized) else text
        spans = list(self._spans(text))
        characters = list(text) if spans else []
        for start, stop in spans:
            characters[start:stop] = text[start:stop].translate(self._stand_ins)
        return "".join(characters) or text

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields where control tokens are spelled in a text, and their parts at its two ends."""
        inner = text.strip()  # templates strip
        if not inner:
            return
        left = text.index(inner)
        right = left + len(inner)
        if len(inner) < self._longest and is_mark(inner) and any(inner in spelling for spelling in self._spellings):
            yield left, right
            return
        lengths = range(min(self._longest - 1, len(inner)), 0, -1)
        begin = next((left + length for length in lengths if inner[:length] in self._tails), left)
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
            prompts: As they were filled in.
            add_special_tokens: Add those that the tokenizer puts around every text.
        """
        split = [self.split(prompt) for prompt in prompts]
        whole = [parts[0] for parts in split if len(parts) == 1]
        ids = iter(self._tokenizer(whole, add_special_tokens=add_special_tokens)["input_ids"] if whole else ())
        return [next(ids) if len(parts) == 1 else self._join(parts, add_special_tokens) for parts in split]

    def encode_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenizes texts that hold no template, as a model that writes them would."""
        return self.encode([self.mask(text) for text in texts], add_special_tokens=False)

    def break_up(self, text: str) -> str:
        """Returns text with a space inside of each control token that inserted text has a share in.

        For readers that tokenize it themselves, with padding or as one of a pair.
        """
        return " ".join(self.split(text))

    def split(self, prompt: str) -> list[str]:
        """Returns a prompt without stand-ins, cut inside of each control token that inserted text has a share in."""
        if not self._masked.search(prompt):
            return [prompt]
        text = prompt.translate(self._originals)
        cuts: list[int] = []
        for spelling in self._spellings:  # the shortest first: a longer one may hold them
            start = text.find(spelling)
            while start >= 0:
                stop = start + len(spelling)
                if prompt[start:stop] != spelling and not any(start < cut < stop for cut in cuts):
                    inside = range(stop - 1, start, -1)  # beside an inserted character, so not in a token of a template
                    cuts.append(next(cut for cut in inside if prompt[cut - 1 : cut + 1] != text[cut - 1 : cut + 1]))
                start = text.find(spelling, start + 1)
        edges = [0, *sorted(cuts), len(text)]
        return [text[start:stop] for start, stop in pairwise(edges)]

    def _join(self, parts: Sequence[str], add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer(parts[0], add_special_tokens=False)["input_ids"]
        for part in parts[1:]:
            ids = [*ids, *self._continued(part)]
        return [*self._first, *ids, *self._last] if add_special_tokens else ids

    def _continued(self, text: str) -> list[int]:
        """Tokenizes text that goes on from other text: some tokenizers put a space where a text begins."""
        for before in _BEFORE:
            head: list[int] = self._tokenizer(before, add_special_tokens=False)["input_ids"]
            ids: list[int] = self._tokenizer(before + text, add_special_tokens=False)["input_ids"]
            if head and ids[: len(head)] == head:
                return ids[len(head) :]
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def is_mark(text: str) -> bool:
    """Whether a text is more than a word, a number or a space, so that templates may mark something with it."""
    return any(
        not (character.isalnum() or character.isspace() or character in "_\N{LOWER ONE EIGHTH BLOCK}")
        for character in text
    )
