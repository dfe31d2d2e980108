"""The `cory` command, which `python -m cory_rllib` is, too.

A command's module is imported only when it is asked for, so that `cory --help` answers at once.
"""

if __name__ == "__main__":  # before imports that a user's own `policies.py` could take over
    import runpy

    runpy.run_module("cory_rllib", run_name="__main__")

import atexit
import difflib
import gc
import importlib
import sys
from importlib.metadata import version

from launch.commands import COMMANDS
from launch.console.parser import until_unread

HELP = """Reinforcement fine-tuning of language models by several cooperating copies of the model.

Usage: cory COMMAND [arguments]

{commands}

Try it:
  cory train                         two agents on film reviews, offline, a few minutes on two cores
  cory train imdb-tiny-ppo           one agent that learns by plain PPO, the baseline
  cory train lr=3e-5 updates=100     any setting, as key=value
  cory train --resume runs/NAME      go on where a run stopped
  cory runs                          what there is, and how it stands
  cory tune --over exchange_period=1,5,null   which setting is best
  cory study imdb --tier 1 --out runs/study   PPO against CORY, and ablations
  cory evaluate runs/NAME            its policies beside the untouched base
  cory generate runs/NAME            ask what it trained
  cory serve runs/NAME               let OpenAI's clients ask it
  cory submit --storage DIR -- train the same on a Ray cluster

`cory COMMAND --help` says more; `cory --version` prints the version.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The command's exit code; 2 when there is no such command; 141 where nobody reads on.
    """
    atexit.register(gc.freeze)  # else Python's end walks over all that torch and Ray hold, which takes seconds
    return until_unread(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())), end="")
        return 0
    name, *rest = arguments
    if name == "--version":
        print(version("cory-rllib"))
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        print(f"There is no command `{name}`.{hint} The commands are: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    exit_code: int = importlib.import_module(f"launch.commands.{name}").main(rest)
    return exit_code
