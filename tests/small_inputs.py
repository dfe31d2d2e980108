"""A small model and few queries, for tests in which neither matters: their runs take half the time."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import cory_env

QUERIES = Path(cory_env.__file__).parent / "assets" / "imdb-queries"


@cache
def folder() -> Path:
    """The folder of both, which `remove` removes at the end of the tests."""
    return Path(tempfile.mkdtemp(prefix="cory-tests-"))


@cache
def small_model() -> str:
    """Returns the folder of a random GPT-2, smaller than the bundled model, with its tokenizer and 64 unused tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from cory_env.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer) + 64, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder() / "small")
    tokenizer.save_pretrained(folder() / "small")
    return str(folder() / "small")


@cache
def few_queries() -> dict[str, str]:
    """Returns the settings of data files with the first queries of the task `imdb`."""
    paths = {}
    for setting, name, count in (("data", "train.jsonl", 256), ("eval_data", "test.jsonl", 128)):
        lines = (QUERIES / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder() / name).write_text("".join(lines[:count]), encoding="utf-8")
        paths[setting] = str(folder() / name)
    return paths


def remove() -> None:
    """Removes the folder."""
    if folder.cache_info().currsize:
        shutil.rmtree(folder())
