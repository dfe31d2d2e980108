"""`cory validate`: checks a task's data, prompts and reward before any model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, run

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
        CommandError: no task is named, or it cannot be put together.
        SettingsError: a setting is wrong.
    """
    from launch.cluster import session
    from launch.console.configuration import asked, presets, read_file, read_words

    session.quiet_libraries(debug)
    request = asked(words, files)
    if request.preset is not None and request.preset not in presets():
        request = request._replace(preset=None, pairs=[f"task={request.preset}", *request.pairs])
    given = {*read_words(request.pairs), *(name for file in request.files for name in read_file(file))}
    if "task" not in given and request.preset is None:
        raise CommandError(f"Name the task, or a file that does: cory validate {' '.join(['TASK', *words])}")
    settings = request.settings()

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
