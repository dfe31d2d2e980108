"""What every command shares: how its words are read, how its help looks, and how it ends.

A command is a function `launch.commands.NAME.NAME`: its parameters are the arguments and options, the first paragraph
of its docstring stands above them in `--help`, the others below, and it returns the exit code, or None for 0.
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
from launch.console.errors import cause, user_message

COMMANDS = {
    "train": "Train a chain of language models; continue a run.",
    "tune": "Search over settings, such as the exchange period.",
    "study": "Compare trainings: arms over seeds, with intervals.",
    "evaluate": "Measure a run's policies, or a model, beside the untouched base.",
    "plan": "Show where a run's processes would go, and whether they fit.",
    "watch": "Follow a run from another terminal.",
    "runs": "List runs: how each stands, and how far it has come.",
    "compare": "Show what sets runs apart, how they ended, and what they took.",
    "plot": "Draw the curves of a run.",
    "report": "Write one HTML file about any number of runs.",
    "generate": "Let the trained chain answer queries.",
    "serve": "Serve the trained policies, and their chain, by OpenAI's API.",
    "export": "Write a trained policy as a Hugging Face folder.",
    "validate": "Check a task's data, prompts and reward, without a model.",
    "submit": "Send a command to a Ray cluster as a job.",
    "jobs": "List a Ray cluster's jobs, show their output, stop them.",
}
"""Every command, and what it does."""
INTERRUPTED = 128 + signal.SIGINT


class Command(TyperCommand):
    """A command whose errors are one sentence and whose exit code is what its function returns."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses settings that are spelled as options; `ctx.meta["words"]` keeps what was given."""
        ctx.meta["words"] = [*args]
        if any(not word or (word.startswith("--") and word.endswith("=")) for word in args):
            ctx.fail("An argument is empty. Is a shell variable not set?")
        if any(parameter.name == "words" for parameter in self.params):
            options = {option for parameter in self.params for option in parameter.opts}
            for word, following in zip(args, [*args[1:], "VALUE"], strict=False):
                name, _, value = word.removeprefix("--").partition("=")
                if word.startswith("--") and word.partition("=")[0] not in options and _is_setting(name):
                    ctx.fail(f"{word} is not an option. Write settings as {_setting(name)}={value or following}.")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the function.

        Raises:
            Exit: always, with its exit code.
        """
        raise typer.Exit(run(lambda: super(Command, self).invoke(ctx) or 0, debug=ctx.params.get("debug", False)))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Writes the first paragraph of the docstring."""
        above, _, _ = (self.help or "").partition("\n\n")
        formatter.write(f"\n{above}\n")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes the other paragraphs, as they are."""
        _, _, below = (self.help or "").partition("\n\n")
        if below:
            formatter.write(f"\n{below}\n")


class Commands(TyperGroup):
    """All commands; one is imported when it is run, so that `cory --help` answers at once."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # `get_command` makes them

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command, or None if there is no such command."""
        return command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes what each does, without importing it."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


def command(name: str) -> Any:
    """Returns a command of `COMMANDS` as an object of the command line library."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=Command)(getattr(importlib.import_module(f"launch.commands.{name}"), name))
    return typer.main.get_command(app)


def parsed(name: str, words: Sequence[str]) -> SimpleNamespace:
    """Returns the parameters that a command would be called with; wrong words end the process as if it were run."""
    with command(name).make_context(f"cory {name}", [*words]) as context:
        return SimpleNamespace(**context.params)


def _is_setting(name: str) -> bool:
    from policies.settings.settings import Settings  # takes its time, and is seldom needed

    return _setting(name) in Settings.model_fields


def _setting(name: str) -> str:
    return name.replace("-", "_")


def path_or_uri(word: str) -> str:
    """Returns the path or URI that a word is, with `~` expanded.

    Raises:
        BadParameter: there is no such home directory.
    """
    try:
        return expand_home(word)
    except HomeError as error:
        raise typer.BadParameter(str(error)) from error


def local_path(word: str) -> Path:
    """Returns the path that a word is, with `~` expanded.

    Raises:
        BadParameter: it is a URI, or there is no such home directory.
    """
    if "://" in word:
        raise typer.BadParameter(f"{word} is a URI, but a path is needed here.")
    return Path(path_or_uri(word))


RunArgument = Annotated[str, typer.Argument(metavar="RUN", parser=path_or_uri, help="The run's folder or URI.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="PRESET|FILE|KEY=VALUE", help="A preset or a YAML file; settings."),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("-c", "--config", metavar="FILE", parser=local_path, help="YAML file of settings; may be repeated."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="C", help="best, latest, or an update's number. [default: best if there is one, else latest]"),
]
Continue = Annotated[bool, typer.Option("--continue", help="If --out holds it already, continue it.")]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Continue although data, model, tokenizer or templates have changed.")
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="The cluster's dashboard. [default: RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only where the results are.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show libraries' logs and tracebacks.")]


def run(command: Callable[[], int], *, debug: bool) -> int:
    """Runs a command and turns what the user can put right into one sentence on stderr.

    Args:
        command: does the work, returns the exit code.
        debug: let the traceback be seen.

    Returns:
        The command's own exit code; 2 after a user's mistake; after a signal what `Interrupts` gives to the
        KeyboardInterrupt, else 130. Other exceptions are defects and pass.
    """
    try:
        from launch.console.credentials import load_secrets

        load_secrets()
        return command()
    except KeyboardInterrupt as interrupt:
        print("Aborted.", file=sys.stderr)
        return interrupt.args[0] if interrupt.args else INTERRUPTED
    except Exception as error:
        message = user_message(cause(error))
        if message is None:
            raise
        if debug:
            traceback.print_exception(error)
        print("\n".join([f"Error: {message}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2
