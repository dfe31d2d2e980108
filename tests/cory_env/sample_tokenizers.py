"""Small tokenizers of common kinds, trained on a few lines, each with a chat template."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer

CORPUS = [
    "This movie was the best of all that I have seen this year, and I did not like it at all.",
    "Review: <b>good</b> | bad > worse < [maybe] 12 + 30 = 42 «naïve» résumé, user end start im s system assistant",
    "def f(x):\n    return x[0] | 3\n\n\tprint('a_b')  # why?",
] * 20
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's format; its turn markers are special tokens."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
"""Mistral's format; its turn markers are plain text, except two special tokens."""
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
"""DeepSeek's format; its turn markers are added tokens that are not special."""


def byte_level() -> PreTrainedTokenizerBase:
    """The bundled tokenizer with the markers of `CHATML`, and a token that strips spaces around it."""
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    markers = ["<|im_start|>", AddedToken("<|tool|>", lstrip=True, rstrip=True, special=True)]
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": markers})
    tokenizer.chat_template = CHATML
    return tokenizer


def not_special() -> PreTrainedTokenizerBase:
    """The bundled tokenizer with the markers of `DEEPSEEK`, and other added tokens, which are text."""
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    markers = [AddedToken(text, rstrip=text.endswith("User｜>")) for text in ("<｜User｜>", "<｜Assistant｜>")]
    tokenizer.add_tokens([*markers, "<think>", "</think>", "    "])
    tokenizer.chat_template = DEEPSEEK
    return tokenizer


def metaspace(scheme: str = "first") -> PreTrainedTokenizerBase:
    """Llama's byte-pair encoding: texts begin with a space, and special tokens are in the vocabulary."""
    model = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if scheme == "legacy":
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
        model.pre_tokenizer = pre_tokenizer
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=[*"<>/[]|"])
    model.train_from_iterator(CORPUS, trainer)
    model.decoder = decoders.Metaspace()
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
    )
    return _wrap(model, LLAMA)


def unigram() -> PreTrainedTokenizerBase:
    """T5's kind: NFKC turns full-width characters into ASCII, and `<s>` and `</s>` are pieces of the model."""
    model = Tokenizer(models.Unigram())
    model.normalizer = normalizers.NFKC()
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    model.train_from_iterator(CORPUS, trainer)
    model.decoder = decoders.Metaspace()
    model.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", model.token_to_id("</s>"))]
    )
    return _wrap(model, LLAMA)


def word_piece() -> PreTrainedTokenizerBase:
    """BERT's kind: lower case, with special tokens at both ends."""
    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    model.train_from_iterator([*CORPUS, "[cls] [sep]"], trainer)
    model.decoder = decoders.WordPiece()
    ids = [(text, model.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    model.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return _wrap(model, LLAMA.replace("</s>", "[SEP]"), bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]")


def bytes_in_python() -> PreTrainedTokenizerBase:
    """ByT5's tokenizer, which is implemented in Python."""
    tokenizer: PreTrainedTokenizerBase = ByT5Tokenizer(extra_ids=3)
    tokenizer.chat_template = LLAMA.replace("{{ bos_token }}", "")
    return tokenizer


def _wrap(model: Tokenizer, template: str, **special: Any) -> PreTrainedTokenizerBase:
    special = special or {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template, **special)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte level": byte_level,
    "not special": not_special,
    "metaspace": metaspace,
    "metaspace always": lambda: metaspace("always"),
    "metaspace legacy": lambda: metaspace("legacy"),
    "unigram": unigram,
    "word piece": word_piece,
    "python": bytes_in_python,
}
