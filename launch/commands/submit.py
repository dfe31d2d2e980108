"""`cory submit -- train ...`: sends a command to a Ray cluster as a job, follows it, and ends as it ends."""

import argparse
import importlib
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cory_env.tasks.rows import HUB
from launch.cluster import room
from launch.cluster.client import STOP_SECONDS, STOP_WAIT, add_address, answers_told, connect, nodes
from launch.cluster.jobs import check_free, follow
from launch.cluster.upload import check_size, check_uploaded, uploaded_sizes
from launch.console.credentials import FILE, is_secret, secret_in
from launch.console.errors import CommandError
from launch.console.parser import INTERRUPTED, Parser, local_path, path_or_uri, run
from policies.settings.core_yaml import Value, as_word, read_yaml, scalar
from policies.settings.placement import Process

KEPT = {"train": "run", "tune": "search"}
"""Commands that keep what they do, and go on with it."""
FILES, FUNCTIONS = ("data", "eval_data", "model", "start_from"), ("reward", "credit", "task")
"""Settings that name files, and those that name functions, `module:function`."""
OPTIONS = ("--config", "--in", "--over")
"""Options of commands that may name files after `=`."""
ELSEWHERE = (
    "Write it into a file on the nodes and name that with --secrets FILE, or set it in the environment of the nodes."
)
"""Where a secret belongs."""
EPILOG = """examples:
  cory submit --storage /shared/runs --name first -- train imdb-tiny num_runners=2
  cory submit --address http://head:8265 --storage s3://bucket/runs --name big -- train mine.yaml
  cory submit --storage /shared/searches --name period -- tune imdb-tiny --over exchange_period=1,5,null --seeds 3
  cory submit -- validate custom data=questions.csv reward=my_rewards:names_it

The working directory is uploaded, without what .gitignore and .rayignore name. Given again with the same --name and
--storage, `train` goes on with the run and `tune` with the search. Ctrl-C leaves the job running; `cory jobs stop ID`
saves and ends it.

exit codes: the command's own, on the cluster; 2 a mistake that you can correct; 143 the job was stopped.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code of the job's driver; 0 with --no-wait; 2 after a user's mistake; 130 after Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    options, unknown = parser.parse_known_args(words[:cut])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. What the job runs stands after `--`")
    return run(lambda: _submit(options, words[cut + 1 :]), debug=options.debug)


def _parser() -> Parser:
    parser = Parser(
        prog="cory submit",
        usage="cory submit [options] -- COMMAND [arguments]",
        description="Send a command to a Ray cluster as a job, follow it, and end with its exit code.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_address(parser)
    where = "where `train` keeps its run, or `tune` (DIR only) its search: all nodes must reach it"
    parser.add_argument("--storage", type=path_or_uri, metavar="DIR|URI", help=where)
    parser.add_argument("--name", help="the run's or search's (default: NAME-TIME)")
    parser.add_argument(
        "--working-dir", type=local_path, default=Path(), metavar="DIR", help="what is uploaded (default: .)"
    )
    parser.add_argument("--num-cpus", type=float, default=0, help="CPUs that the driver takes (default: 0)")
    parser.add_argument("--num-gpus", type=float, default=0, help="GPUs that the driver takes (default: 0)")
    parser.add_argument("--resources", default="", metavar="NAME=N,...", help="custom resources that the driver takes")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the job; no secrets")
    parser.add_argument("--secrets", metavar="FILE", help="on the nodes, NAME=VALUE lines such as HF_TOKEN=…")
    parser.add_argument(
        "--unchecked", action="store_true", help="for clusters that grow: send what is too large now, and wait"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not follow the job")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _submit(options: argparse.Namespace, words: list[str]) -> int:
    words, name, place = _command(options, words)
    environment = _environment(options)
    own = Process("job", 1, options.num_cpus, options.num_gpus, _resources(options.resources))
    sizes = uploaded_sizes(options.working_dir)
    check_size(options.working_dir, sizes)
    check_uploaded(options.working_dir, sizes, named_files(words, options.working_dir))
    client = connect(options.address)
    if not options.unchecked:
        check_cluster(words, own, nodes(client.get_address()), options.working_dir)
    if place is not None:
        check_free(client, place)
    with answers_told(client):
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-m", "cory_rllib", *words]),
            runtime_env={"working_dir": str(options.working_dir.resolve()), "env_vars": environment},
            metadata={"job_name": name} | ({"run": place} if place else {}),
            entrypoint_num_cpus=own.cpus or None,
            entrypoint_num_gpus=own.gpus or None,
            entrypoint_resources=own.custom or None,
        )
    print(f"Job {job} ({name})" + (f", {KEPT[words[0]]} {place}" if place else ""), flush=True)
    if options.no_wait:
        print(f"Follow it with `cory jobs logs {job}`.")
        return 0
    try:
        return follow(client, job)
    except KeyboardInterrupt:
        print(
            f"\nThe job goes on. Follow it with `cory jobs logs {job}`, stop it with `cory jobs stop {job}`.",
            file=sys.stderr,
        )
        return INTERRUPTED


def _command(options: argparse.Namespace, words: list[str]) -> tuple[list[str], str, str | None]:
    """Returns the words to run, the job's name, and where the run or search is kept if it is one."""
    from launch.commands import COMMANDS

    if not words or words[0] not in COMMANDS or words[0] in ("submit", "jobs"):
        raise CommandError("Say what to run after `--`, as in `cory submit --storage /shared/runs -- train imdb-tiny`.")
    for word in words:
        if (held := secret_in(word)) is not None:
            raise CommandError(f"{held}, and all who may list the cluster's jobs read its command. {ELSEWHERE}")
    now = time.strftime("%Y%m%d-%H%M%S")
    if words[0] not in KEPT:
        return words, options.name or f"{words[0]}-{now}", None
    from launch.console.configuration import asked
    from launch.run_folder.storage import check_place, child, is_uri

    what, parse = KEPT[words[0]], importlib.import_module(f"launch.commands.{words[0]}").parse
    given = parse(words[1:])
    own = str(given.out or given.resume or "")
    if bool(own) == bool(options.storage):
        raise CommandError(f"Say once where the {what} is kept: --storage, or --out or --resume after `--`.")
    stem = asked(given.words, given.config, options.working_dir).name
    name = options.name or (Path(own).name if own else f"{'' if what == 'run' else 'tune-'}{stem}-{now}")
    place = own or child(options.storage, name)
    if is_uri(place) and words[0] == "tune":
        raise CommandError(f"{place} is a URI, and a search needs a folder: name a --storage that all nodes share.")
    check_place(place, what)
    if not is_uri(place) and not os.path.isabs(place):
        raise CommandError(
            f"{place} is relative, and the job's working directory goes when it ends. Name an absolute path that all "
            "nodes share, or for a run a URI such as s3://bucket/runs."
        )
    return (words if own else [*words, "--out", place, "--continue"]), name, place


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Returns the variables of the job, all of which the job list shows."""
    from launch.cluster.session import UNCHECKED

    given = _pairs(options.env, "--env")
    for name, value in given.items():
        held = f"{name} looks like a secret" if is_secret(name) else secret_in(f"{name}={value}")
        if held is not None:
            raise CommandError(f"{held}, and all who may list the cluster's jobs read --env. {ELSEWHERE}")
    if options.secrets:
        given[FILE] = options.secrets
    if options.unchecked:
        given[UNCHECKED] = "1"
    return {STOP_WAIT: STOP_SECONDS, **given}


def _resources(text: str) -> dict[str, float]:
    """Reads the custom resources that the driver takes."""
    from policies.settings.placement import named_resources

    try:
        return named_resources("--resources", text)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CommandError(f"{option} takes NAME=VALUE, not `{text}`.")
        pairs[name] = value
    return pairs


def named_files(words: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the paths that a command's words and its YAML files name, each after how it is named there.

    Data must be a file. Any other name counts if there is such a file or folder: a model may be the hub's, a module
    installed.

    Args:
        words: of the command.
        folder: that paths are relative to.
    """
    pairs = [word.partition("=") for word in words[1:]]
    given = {key for key, equals, _ in pairs if equals}
    for word, (key, equals, value) in zip(words[1:], pairs, strict=True):
        if equals and (key in (*FILES, *FUNCTIONS) or key in OPTIONS):
            yield from ((word, path) for path in _paths(key, scalar(value, lists=True), folder))
        elif not equals and not {"/", "."}.isdisjoint(word) and (folder / word).exists():
            yield word, word
            if Path(word).suffix in (".yaml", ".yml") and (folder / word).is_file():
                for name, entry in _entries(read_yaml((folder / word).read_text(encoding="utf-8"), word)):
                    if name not in given:  # else the word wins
                        yield from (
                            (f"{name}={as_word(entry)} in {word}", path) for path in _paths(name, entry, folder)
                        )


def _entries(values: object) -> Iterator[tuple[str, Value]]:
    """Yields the settings in a file: those of a study stand within those of its arms."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from _entries(value)
            elif key in (*FILES, *FUNCTIONS):
                yield str(key), value


def _paths(key: str, value: Value, folder: Path) -> Iterator[str]:
    """Yields the paths that a setting, or an option with `=`, names."""
    names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
    if key in FUNCTIONS:
        for name in re.findall(r"[\w.]+(?=:[a-zA-Z_])", " ".join(names)):
            module = Path(*name.split("."))
            yield from (str(path) for path in (module.with_suffix(".py"), module) if (folder / path).exists())
        return
    paths = [name.partition("?")[0].removeprefix(HUB) for name in names]
    if key in FILES and len(paths) == 1 and not (folder / paths[0]).exists():
        paths = paths[0].split(",")  # those of a search
    must = key in ("data", "eval_data") and not any(name.startswith(HUB) for name in names)
    yield from (path for path in paths if (folder / path).exists() or (must and "://" not in path))


def check_cluster(words: Sequence[str], job: Process, found: Sequence[room.Node], folder: Path = Path()) -> None:
    """Refuses what a cluster cannot place, whatever ends on it: Ray would wait for ever.

    Args:
        words: of the command.
        job: what the command's own process takes.
        found: the cluster's nodes.
        folder: where the command's files are, if their paths are relative.

    Raises:
        CommandError: something is missing, which the message names.
    """
    room.check([job], found)
    if words[0] not in KEPT:
        return
    asked_for = importlib.import_module(f"launch.commands.{words[0]}").parse(words[1:])
    if asked_for.resume:
        return  # its settings are in storage; the driver checks
    from policies.settings.gpus import run_elsewhere

    with run_elsewhere():
        if words[0] == "tune":
            _check_search(asked_for, job, found, folder)
        else:
            _check_run(asked_for, job, found, folder)


def _check_run(asked_for: argparse.Namespace, job: Process, nodes: Sequence[room.Node], folder: Path) -> None:
    from launch.cluster.session import check_driver
    from launch.console.configuration import asked
    from policies.settings.placement import processes

    settings = asked(asked_for.words, asked_for.config, folder).settings()
    check_driver(settings, job.gpus)
    driver, *others = processes(settings)  # the job's own process is the driver
    room.check([replace(job, gpus=max(job.gpus, driver.gpus)), *others], nodes)


def _check_search(asked_for: argparse.Namespace, job: Process, nodes: Sequence[room.Node], folder: Path) -> None:
    from launch.commands.tune import read_search
    from launch.experiments.search import check_room
    from launch.experiments.space import points

    search, _ = read_search(asked_for, folder)
    check_room(points(search.settings, search.axes), nodes, beside=[job])
