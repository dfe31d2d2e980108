"""Tests of reading and writing YAML 1.2, and of error messages with file and line."""

import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from policies.settings.error import SettingsError
from policies.settings.files import read_file
from policies.settings.yaml12 import Value, parse_scalar, read_yaml, to_cli, to_yaml, write_yaml

AWKWARD_TEXTS = [
    "Q: {query}\nA:",
    "\n",
    "two\n\n\nbreaks \n",
    " around ",
    'it\'s "quoted"',
    "a: b # c",
    "#",
    "- a",
    "[a, b]",
    "{query}",
    "*a &b !c |d >e %f @g `h",
    "\t",
    "a\r\nb",
    "\x85 and \u2028 and \u2029",
    "\ufeffa",
    "\x00\x07\x7f",
    "a\xa0",
    "\u3000",
    "back\\slash\\n",
    "Ünï 漢字 😀",
    "---",
    "...",
    "~",
    "null",
    "yes",
    "Off",
    "0x10",
    "011",
    "1:30",
    "1_000",
    "1e-6",
    "1.5e5",
    ".inf",
    "=",
    "<<",
    "2024-01-01",
    "",
    "very long " * 500,
]


def random_texts() -> list[str]:
    letters = "ab 019.:-#'\"\\\n\t\r\x85\u2028\xa0\ufeff{}[]&*!|>%@`,?=<~e+_é😀\x01"
    rng = random.Random(0)
    return ["".join(rng.choices(letters, k=rng.randint(0, 9))) for _ in range(300)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        (".5", 0.5),
        ("-3", -3),
        ("011", 11),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("Off", "Off"),
        ("True", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'1e-6'", "1e-6"),
        ("!!bool maybe", "!!bool maybe"),
        ("!!timestamp xx", "!!timestamp xx"),
        ("!!int [1]", "!!int [1]"),
        ("!!map x", "!!map x"),
        ("[" * 3000, "[" * 3000),
        ("[" * 3000 + "]" * 3000, "[" * 3000 + "]" * 3000),
        ("9" * 10_000, "9" * 10_000),
    ],
)
def test_a_scalar_is_parsed_as_yaml_1_2_or_returned_as_text(text: str, value: Value) -> None:
    parsed = parse_scalar(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2\n", 'found duplicate key "lr" with value "2" (original value: "1") in line 2, column 1'),
        ("lr: 1\nseed: !!int many\n", "invalid literal for int()"),
        ("lr: 1\nseed: !!python/name:os.system x\n", "could not determine a constructor for the tag"),
        ("lr: 1\nseed: " + "9" * 10_000, "value has 10000 digits"),
        ("lr: 1\nseed: !!map x\n", "expected a mapping node, but found scalar in line 2"),
        ("prompt: " + "[" * 3000 + "]" * 3000, "nests lists or mappings too deeply"),
        ("- " * 3000 + "a", "nests lists or mappings too deeply"),
        ("lr: 1\nprompt: a\x00b\n", "unacceptable character #x0000"),
        ("lr: 1\nprompt: {query}\n", "`prompt` in FILE is a mapping, but this setting takes a single value."),
        ("data: [a.jsonl, b.jsonl]\n", "`data` in FILE is a list, but this setting takes a single value."),
    ],
)
def test_the_message_of_an_invalid_file_names_it_and_has_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as raised:
        read_file(file)
    error = str(raised.value)
    assert message.replace("FILE", str(file)) in error and str(file) in error and "\n" not in error


def test_a_small_file_of_nested_aliases_cannot_exhaust_memory(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("queries_per_update: &n 64\nminibatch_size: *n\n")
    assert read_file(file) == {"queries_per_update": 64, "minibatch_size": 64}
    lists = [f"&{name} [{', '.join([f'*{previous}'] * 99)}]" for previous, name in pairwise("abcdefgh")]
    file.write_text("reward: [&a [x], " + ", ".join(lists) + "]")
    start = time.monotonic()
    with pytest.raises(SettingsError, match=r"`reward` in .* is a list"):
        read_file(file)
    assert time.monotonic() - start < 10


def test_any_text_is_written_on_one_line_and_read_back_from_files_lists_and_words() -> None:
    for text in [*AWKWARD_TEXTS, *random_texts()]:
        line = to_yaml(text)
        assert len(f"{line}|".splitlines()) == 1
        for read in (lambda text: read_yaml(text, "it"), yaml.safe_load):  # other programs read YAML 1.1
            assert read(f"prompt: {line} # its meaning\nlr: 1\n") == {"prompt": text, "lr": 1}
            assert read(write_yaml({"over": [text], "lr": 1e-6})) == {"over": [text], "lr": 1e-6}
        assert parse_scalar(line) == text == parse_scalar(to_cli(text))


@pytest.mark.parametrize("value", [None, True, False, 0, -7, 10**30, 0.1, 1e-6, 1.41e-5, 1e30, 3.0])
def test_other_values_are_read_back_unchanged(value: Value) -> None:
    for text in (to_yaml(value), to_cli(value)):
        parsed = parse_scalar(text)
        assert parsed == value and type(parsed) is type(value)
    assert yaml.safe_load(to_yaml(value)) == value
