"""The command line: parsing of arguments, help, and exit codes, shared by all commands.

A command is a function `launch.commands.NAME.NAME`. Its parameters are the arguments and options. In `--help`, the
first paragraph of its docstring appears above them, the others below. It returns the exit code, or None for 0.
"""

import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cory_env.home import HomeError, expand_home
from cory_env.message import has_surrogate
from launch.console.errors import check_working_folder, root_cause, user_message

COMMANDS = {
    "train": "Train a chain of language models; resume a run.",
    "tune": "Search over settings, such as the exchange period.",
    "study": "Compare training variants over seeds, with confidence intervals.",
    "evaluate": "Evaluate a run's policies, or a model, beside the base model.",
    "probe": "Measure, before training, whether a second answer pays.",
    "plan": "Show the placement of a run's processes, and whether they fit.",
    "runs": "List runs with their status and progress.",
    "plot": "Plot the curves of a run; compare runs.",
    "generate": "Generate responses of the trained chain to queries.",
    "serve": "Serve the trained policies, and their chain, with OpenAI's API.",
    "export": "Export a trained policy as a Hugging Face folder.",
    "validate": "Check a task's data, prompts and reward, without a model.",
}
INTERRUPTED = 128 + signal.SIGINT


class Command(TyperCommand):
    """A command with one-sentence errors, whose exit code is its function's return value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Rejects empty words and settings spelled as options; stores the arguments in `ctx.meta["words"]`."""
        ctx.meta["words"] = [*args]
        if any(not word or (word.startswith("--") and word.endswith("=")) for word in args):
            ctx.fail("An argument is empty. Is a shell variable unset?")
        if invalid := next(filter(has_surrogate, args), None):
            ctx.fail(f"The argument {invalid!r} is not text in UTF-8. Correct it, or rename the file that it names.")
        if any(parameter.name == "words" for parameter in self.params):
            options = {option for parameter in self.params for option in parameter.opts}
            for word, next_word in zip(args, [*args[1:], "VALUE"], strict=False):
                name, _, value = word.removeprefix("--").partition("=")
                if word.startswith("--") and word.partition("=")[0] not in options and _is_setting(name):
                    ctx.fail(f"Unknown option {word}. Write settings as {_setting(name)}={value or next_word}.")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command's function, and exits with its exit code."""
        raise typer.Exit(run(lambda: super(Command, self).invoke(ctx) or 0, debug=ctx.params.get("debug", False)))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Writes the first paragraph of the docstring."""
        summary, _, _ = (self.help or "").partition("\n\n")
        formatter.write(f"\n{summary}\n")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes the other paragraphs unchanged."""
        _, _, details = (self.help or "").partition("\n\n")
        if details:
            formatter.write(f"\n{details}\n")


class Commands(TyperGroup):
    """All commands, imported lazily so that `cory --help` is fast."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # `get_command` creates them

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command, or None if the name is unknown."""
        return command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


def command(name: str) -> Any:
    """Imports a command of `COMMANDS` and returns it as a Click command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=Command)(getattr(importlib.import_module(f"launch.commands.{name}"), name))
    return typer.main.get_command(app)


def parse_command(name: str, words: Sequence[str]) -> SimpleNamespace:
    """Parses a command's arguments to attributes, without running it. Invalid ones end the process as usual."""
    with command(name).make_context(f"cory {name}", [*words]) as context:
        return SimpleNamespace(**context.params)


def _is_setting(name: str) -> bool:
    from policies.settings.settings import Settings  # a slow import that is rarely needed

    return _setting(name) in Settings.model_fields


def _setting(name: str) -> str:
    return name.replace("-", "_")


def path_or_uri(word: str) -> str:
    """Parses a path or URI argument, with `~` expanded."""
    try:
        return expand_home(word)
    except HomeError as error:
        raise typer.BadParameter(str(error)) from error


def local_path(word: str) -> Path:
    """Parses a path argument, with `~` expanded."""
    if "://" in word:
        raise typer.BadParameter(f"{word} is a URI, but must be a path.")
    return Path(path_or_uri(word))


RunArgument = Annotated[str, typer.Argument(metavar="RUN", parser=path_or_uri, help="The run's folder.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL", parser=path_or_uri, help="A run's folder; or a model's folder, hub id or name."
    ),
]
SolvedAt = Annotated[
    float | None, typer.Option(metavar="X", help="Minimum task reward of a right answer. [default: the task's]")
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="PRESET|FILE|KEY=VALUE", help="A preset or YAML file, and settings."),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("-c", "--config", metavar="FILE", parser=local_path, help="YAML file of settings. Repeatable."),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(metavar="C", help="best, latest, or an update's number. [default: best if it exists, else latest]"),
]
Continue = Annotated[bool, typer.Option("--continue", help="Resume if --out exists already.")]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Resume even if data, model, tokenizer or templates have changed.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only the location of the results.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show logs of libraries, and tracebacks.")]


def run(command: Callable[[], int], *, debug: bool) -> int:
    """Runs a command, and prints user errors as one sentence on stderr.

    Returns:
        The command's exit code; 2 after a user error; after a signal the exit code in the KeyboardInterrupt (see
        `Interrupts`), or 130. Other exceptions are bugs and are not caught.
    """
    try:
        check_working_folder()
        return command()
    except KeyboardInterrupt as interrupt:
        print("Aborted.", file=sys.stderr)
        return interrupt.args[0] if interrupt.args else INTERRUPTED
    except Exception as error:
        message = user_message(root_cause(error))
        if message is None:
            raise
        if debug:
            traceback.print_exception(error)
        print("\n".join([f"Error: {message}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2
