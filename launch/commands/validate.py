"""`cory validate`: checks a task's data, prompts and reward before any model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, run

if TYPE_CHECKING:
    from policies.settings.core_yaml import Value

EPILOG = """It reads every query, shows each role's prompt, and calls the reward in its own process: on a few responses,
and on all gold answers of a task that has them. Without max_prompt, it says which one the task needs.

examples:
  cory validate imdb
  cory validate arithmetic digits=3 operations=sums
  cory validate gsm8k data=train.jsonl eval_data=test.jsonl max_response=256
  cory validate custom data=questions.jsonl reward=my_rewards:brevity model=./my-model
  cory validate code
  cory validate summarize data=texts.jsonl
  cory validate mine.yaml
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when the task is sound, 2 when it is not or cannot be read.
    """
    parser = Parser(
        prog="cory validate",
        usage="cory validate [TASK|PRESET|FILE] [-c FILE ...] [key=value ...] [options]",
        description="Check a task's data, prompts and reward, without a model (its tokenizer is needed).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TASK|PRESET|FILE, key=value",
        help="arithmetic, code, custom, drafts, gsm8k, imdb or math, or a preset, or a file that says it; and settings "
        "as for `cory train`, of which task=TASK names the task too",
    )
    parser.add_argument(
        "-c", "--config", action="append", default=[], type=local_path, metavar="FILE", help="YAML settings"
    )
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    options = parser.parse_intermixed_args(argv)
    return run(lambda: validate(options.words, options.config, options.debug), debug=options.debug)


def validate(words: Sequence[str], files: Sequence[Path], debug: bool) -> int:
    """Prints the report on a task.

    Args:
        words: a task, a preset or a file of settings, or none where a setting names the task; and `key=value`.
        files: YAML files of settings.
        debug: show libraries' logs.

    Raises:
        CommandError: the task cannot be put together.
        SettingsError: a setting is wrong.
    """
    from launch.cluster import session
    from launch.console.configuration import DEFAULT_PRESET, read_preset
    from policies.settings.overrides import apply_overrides
    from policies.settings.settings import make_settings

    session.quiet_libraries(debug)
    base, given = _given(words, files)
    settings = make_settings(apply_overrides(read_preset(base or DEFAULT_PRESET), given))

    from cory_env.validate import validate as examine
    from launch.training.preflight import load_task

    task, tokenizers = load_task(settings)
    families = settings.families()
    readers = {id(tokenizer): policy for policy, tokenizer in reversed(tokenizers.items())}
    sound = True
    for reader in reversed(readers.values()):
        try:
            report = examine(
                task,
                tokenizers[reader],
                **settings.chain_settings(tokenizers, reader)
                | {"max_prompt": settings.max_prompt if "max_prompt" in given else None},
                reward_timeout=settings.reward_timeout,
            )
        except ValueError as error:
            raise CommandError(str(error)) from error
        own = [family for name, family in families.items() if tokenizers[name] is tokenizers[reader]]
        report.facts += dict.fromkeys(f"model family {family}" for family in own)
        if "max_prompt" not in given and report.max_prompt > settings.max_prompt:
            report.warnings.append(
                f"max_prompt is {settings.max_prompt} unless it is set, too little for some prompts with full-length "
                f"references. Train with max_prompt={report.max_prompt}."
            )
        if len(readers) > 1:
            print(f"As {settings.models[reader]} reads it:\n")
        print(report)
        sound = sound and report.ok
    return 0 if sound else 2


def _given(words: Sequence[str], files: Sequence[Path]) -> tuple[str | None, dict[str, Value]]:
    """Returns the preset that the user names, if they do, and the settings that they give, a task's name included.

    Raises:
        CommandError: no task is named, or two; or a file cannot be read.
    """
    from cory_env.home import expand_home
    from cory_env.tasks import TASKS
    from launch.console.configuration import is_file, read_file, read_words
    from policies.settings.files import presets

    names = [expand_home(word) for word in words if "=" not in word]
    if len(names) > 1:
        raise CommandError(f"One task at a time: {' and '.join(names)} cannot be combined. Settings are key=value.")
    base = names[0] if names and names[0] in presets() else None
    given: dict[str, Value] = {}
    if names and base is None:
        given = read_file(Path(names[0])) if names[0] not in TASKS and is_file(names[0]) else {"task": names[0]}
    for file in files:
        given |= read_file(file)
    given |= read_words([word for word in words if "=" in word])
    if "task" not in given and base is None:
        raise CommandError(f"Name the task, or a file that does: cory validate {' '.join(['TASK', *words])}")
    return base, given
