"""`cory validate TASK|PRESET`: checks a task's data, prompts and reward before any model is loaded."""

import argparse
from collections.abc import Sequence

from launch.command import CommandError, Parser, run

EPILOG = """It reads every query, shows each role's prompt, and calls the reward in its own process: on a few responses,
and on all gold answers of a task that has them. Without max_prompt, it says which one the task needs.

examples:
  cory validate imdb
  cory validate arithmetic digits=3 operations=sums
  cory validate gsm8k data=train.jsonl eval_data=test.jsonl max_response=256
  cory validate custom data=questions.jsonl reward=my_rewards:brevity model=./my-model
  cory validate summarize data=texts.jsonl
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when the task is sound, 2 when it is not or cannot be read.
    """
    parser = Parser(
        prog="cory validate",
        description="Check a task's data, prompts and reward, without a model (its tokenizer is needed).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", metavar="TASK", help="arithmetic, custom, gsm8k or imdb; or a preset")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings, as for `cory train`")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    options = parser.parse_intermixed_args(argv)
    return run(lambda: validate(options.task, options.words, options.debug), debug=options.debug)


def validate(name: str, words: Sequence[str], debug: bool) -> int:
    """Prints the report on a task.

    Raises:
        CommandError: the task cannot be put together.
    """
    from launch import session
    from launch.configuration import DEFAULT_PRESET, presets, read_preset, read_words
    from policies.settings import make_settings

    if "=" in name:
        raise CommandError(f"The task comes first, then settings: cory validate TASK {name}")
    session.quiet_libraries(debug)
    given = read_words(words)
    if name in presets():
        given = {**read_preset(name), **given}
    else:
        given["task"] = name
    settings = make_settings({**read_preset(DEFAULT_PRESET), **given})

    from cory_env.validate import validate as examine
    from launch.task import load_task

    task, tokenizer = load_task(settings)
    try:
        report = examine(
            task,
            tokenizer,
            num_agents=settings.num_agents,
            knowledge_transfer=settings.knowledge_transfer,
            observed=settings.observed,
            max_prompt=settings.max_prompt if "max_prompt" in given else None,
            max_response=settings.max_response,
            stop_token_ids=settings.stop_token_ids(tokenizer),
            chat=settings.chat,
            system=settings.system,
            reward_timeout=settings.reward_timeout,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    if "max_prompt" not in given and report.max_prompt > settings.max_prompt:
        report.warnings.append(
            f"max_prompt is {settings.max_prompt} unless it is set, too little for some prompts with full-length "
            f"references. Train with max_prompt={report.max_prompt}."
        )
    print(report)
    return 0 if report.ok else 2


if __name__ == "__main__":
    raise SystemExit(main())
