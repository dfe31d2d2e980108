"""A small model and few queries, for tests in which neither matters: their runs take half the time."""

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import cory_env

QUERIES = Path(cory_env.__file__).parent / "assets" / "imdb-queries"


FOLDER = "CORY_TESTS_FOLDER"
"""Environment variable with the process that made the folder of both, and its path."""


@cache
def folder() -> Path:
    """The folder of both; processes that a test process starts, such as Ray's workers, have its folder."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = f"{os.getpid()}:{tempfile.mkdtemp(prefix='cory-tests-')}"
    return Path(os.environ[FOLDER].partition(":")[2])


@cache
def small_model() -> str:
    """Returns the folder of a random GPT-2, smaller than the bundled model, with its tokenizer and 64 unused tokens."""
    if (folder() / "small").exists():
        return str(folder() / "small")
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from cory_env.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer) + 64, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder() / "small")
    tokenizer.save_pretrained(folder() / "small")
    return str(folder() / "small")


@cache
def few_queries() -> dict[str, str]:
    """Returns the settings of data files with the first queries of the task `imdb`."""
    paths = {}
    for setting, name, count in (("data", "train.jsonl", 256), ("eval_data", "test.jsonl", 128)):
        paths[setting] = str(folder() / name)
        if not (folder() / name).exists():
            lines = (QUERIES / name).read_text(encoding="utf-8").splitlines(keepends=True)
            (folder() / name).write_text("".join(lines[:count]), encoding="utf-8")
    return paths


def remove() -> None:
    """Removes the folder if this process made it."""
    if os.environ.get(FOLDER, "").startswith(f"{os.getpid()}:"):
        shutil.rmtree(folder())
