"""`cory submit -- train ...`: sends a command to a Ray cluster as a job, follows it, and ends as it ends."""

import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from cory_env.tasks.rows import HUB
from launch.cluster import placement
from launch.cluster.client import STOP_SECONDS, STOP_WAIT, cluster_errors, connect, nodes
from launch.cluster.jobs import check_free, follow
from launch.cluster.upload import check_size, check_uploaded, uploaded_sizes
from launch.console.cli import COMMANDS, INTERRUPTED, Address, Debug, local_path, parsed, path_or_uri
from launch.console.credentials import FILE, is_secret, secret_in
from launch.console.errors import CommandError
from policies.settings.processes import Process
from policies.settings.yaml12 import read_yaml, scalar

KEPT = {"train": "run", "tune": "search"}
"""Commands that keep what they do, and go on with it."""
NAMED = ("data", "eval_data", "model", "start_from")
"""Settings that name files or folders."""
ELSEWHERE = (
    "Write it into a file on the nodes and name that with --secrets FILE, or set it in the environment of the nodes."
)
"""Where a secret belongs."""


def submit(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What the job runs, after `--`.")],
    address: Address = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URI",
            parser=path_or_uri,
            help="Where `train` keeps its run, or `tune` (DIR only) its search: all nodes must reach it.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run or search. [default: NAME-TIME]")] = None,
    working_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", parser=local_path, help="What is uploaded. [default: .]")
    ] = None,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs that the driver takes.")] = 0,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs that the driver takes.")] = 0,
    resources: Annotated[
        str | None, typer.Option(metavar="NAME=N,...", help="Custom resources that the driver takes.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="For the job; no secrets.")] = None,
    secrets: Annotated[
        str | None, typer.Option(metavar="FILE", help="On the nodes, NAME=VALUE lines such as HF_TOKEN=….")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="For clusters that grow: send what is too large now, and wait.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not follow the job.")] = False,
    debug: Debug = False,
) -> int:
    """Send a command to a Ray cluster as a job, follow it, and end with its exit code.

    The working directory is uploaded, without what .gitignore and .rayignore name. Given again with the same --name and
    --storage, `train` continues the run and `tune` the search. Ctrl-C leaves the job running; `cory jobs stop ID` saves
    and ends it.

    Examples:
      cory submit --storage /shared/runs --name first -- train imdb-tiny num_runners=2
      cory submit --address http://head:8265 --storage s3://bucket/runs --name big -- train mine.yaml
      cory submit --storage /shared/searches --name period -- tune imdb-tiny --over exchange_period=1,5,null --seeds 3
      cory submit -- validate custom data=questions.csv reward=my_rewards:names_it

    Exit codes:
      The command's own, on the cluster; 2 a user error; 143 the job was stopped.
    """
    environment = job_environment(env or (), secrets, unchecked)
    process = Process("job", 1, num_cpus, num_gpus, _custom_resources(resources))
    folder = (working_dir or Path()).resolve()
    sizes = uploaded_sizes(folder)
    check_size(folder, sizes)
    with contextlib.chdir(folder):  # where the job's relative paths begin
        words, name, place = job_command(command, name, storage)
        check_uploaded(folder, sizes, named_files(words))
        client = connect(address)
        if not unchecked:
            check_cluster(words, process, nodes(client.get_address()))
    if place is not None:
        check_free(client, place)
    with cluster_errors(client):
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-m", "cory_rllib", *words]),
            runtime_env={"working_dir": str(folder), "env_vars": environment},
            metadata={"job_name": name} | ({"run": place} if place else {}),
            entrypoint_num_cpus=process.cpus or None,
            entrypoint_num_gpus=process.gpus or None,
            entrypoint_resources=process.custom or None,
        )
    print(f"Job {job} ({name})" + (f", {KEPT[words[0]]} {place}" if place else ""), flush=True)
    if no_wait:
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


def job_command(words: Sequence[str], name: str | None, storage: str | None) -> tuple[list[str], str, str | None]:
    """Returns the words that the job runs, its name, and the folder or URI of its run or search, if it has one.

    Args:
        words: of the command.
        name: of the run or search; None: after its settings and the time.
        storage: the folder or URI that it lies in.

    Raises:
        CommandError: there is no such command, a secret in it, or not one place that all nodes reach.
    """
    if words[0] not in COMMANDS or words[0] in ("submit", "jobs"):
        raise CommandError("Say what to run after `--`, as in `cory submit --storage /shared/runs -- train imdb-tiny`.")
    for word in words:
        if (secret := secret_in(word)) is not None:
            raise CommandError(f"{secret}, and all who may list the cluster's jobs read its command. {ELSEWHERE}")
    now = time.strftime("%Y%m%d-%H%M%S")
    if words[0] not in KEPT:
        return [*words], name or f"{words[0]}-{now}", None
    from launch.console.configuration import split_words
    from launch.run_folder.storage import check_location, child, is_uri

    kind, options = KEPT[words[0]], parsed(words[0], words[1:])
    own = str(options.out or options.resume or "")
    if bool(own) == bool(storage):
        raise CommandError(f"Say once where the {kind} is kept: --storage, or --out or --resume after `--`.")
    stem = split_words(options.words or (), options.config or ()).name
    name = name or (Path(own).name if own else f"{'' if kind == 'run' else 'tune-'}{stem}-{now}")
    place = own or child(str(storage), name)
    if is_uri(place) and words[0] == "tune":
        raise CommandError(f"{place} is a URI, and a search needs a folder: name a --storage that all nodes share.")
    check_location(place, kind)
    if not is_uri(place) and not os.path.isabs(place):
        raise CommandError(
            f"{place} is relative, and the job's working directory goes when it ends. Name an absolute path that all "
            "nodes share, or for a run a URI such as s3://bucket/runs."
        )
    return ([*words] if own else [*words, "--out", place, "--continue"]), name, place


def job_environment(pairs: Sequence[str], secrets: str | None, unchecked: bool) -> dict[str, str]:
    """Returns the variables of the job, all of which the job list shows.

    Args:
        pairs: NAME=VALUE.
        secrets: a file on the nodes.
        unchecked: what the job asks for may be more than there is.

    Raises:
        CommandError: one is no NAME=VALUE, or holds a secret.
    """
    from launch.cluster.session import UNCHECKED

    variables = {STOP_WAIT: STOP_SECONDS}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise CommandError(f"--env takes NAME=VALUE, not `{pair}`.")
        secret = f"{name} looks like a secret" if is_secret(name) else secret_in(pair)
        if secret is not None:
            raise CommandError(f"{secret}, and all who may list the cluster's jobs read --env. {ELSEWHERE}")
        variables[name] = value
    return variables | ({FILE: secrets} if secrets else {}) | ({UNCHECKED: "1"} if unchecked else {})


def _custom_resources(text: str | None) -> dict[str, float]:
    from policies.settings.processes import named_resources

    try:
        return named_resources("--resources", text)
    except ValueError as error:
        raise CommandError(str(error)) from error


def named_files(words: Sequence[str]) -> list[str]:
    """Returns the files and folders here that a command, or a YAML file that it names, seems to name.

    Args:
        words: of the command.

    Returns:
        What exists, and data that does not: a model may be the hub's, a module installed.
    """
    pairs = [(key if equals else "", value or key) for key, equals, value in (word.partition("=") for word in words)]
    keys = {key for key, _ in pairs if key}
    for _, value in [*pairs]:
        if value.endswith((".yaml", ".yml")) and os.path.isfile(value):
            settings = _settings_in(read_yaml(Path(value).read_text(encoding="utf-8"), value))
            pairs += [pair for pair in settings if pair[0] not in keys]  # else the word wins
    names, required = set[str](), set[str]()
    for key, value in pairs:
        if key in NAMED:
            paths = _paths(value)
            names |= {path.removeprefix(HUB) for path in paths}
            if key in ("data", "eval_data"):
                required |= {path for path in paths if not path.startswith((HUB, "~")) and "://" not in path}
        else:
            names |= {f"{module.replace('.', '/')}.py" for module in re.findall(r"([\w.]+):[a-zA-Z_]", value)}
            names |= {name for name in re.findall(r"[\w./-]+", value) if re.search(r"\w[./]\w", name)}
    return sorted({name for name in names if os.path.exists(name)} | required)


def _paths(text: str) -> list[str]:
    """Returns the paths in a setting's text: one, a list in brackets, or a search's with commas between them."""
    value = scalar(text, lists=True)
    if isinstance(value, str) and not os.path.exists(value.partition("?")[0]):
        value = [*value.split(",")]
    entries = value if isinstance(value, list) else [value]
    return [entry.partition("?")[0] for entry in entries if isinstance(entry, str)]


def _settings_in(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the settings in YAML that are text: those of a study stand within those of its arms."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _settings_in(entry, str(name))
    elif isinstance(value, list):
        for entry in value:
            yield from _settings_in(entry, key)
    elif isinstance(value, str):
        yield key, value


def check_cluster(words: Sequence[str], job: Process, cluster: Sequence[placement.Node]) -> None:
    """Refuses what a cluster cannot place, whatever ends on it: Ray would wait for ever.

    Args:
        words: of the command.
        job: what the command's own process takes.
        cluster: its nodes; none are known yet if it has just started, and then nothing is refused.

    Raises:
        CommandError: something is missing, which the message names.
    """
    if not cluster:
        return
    placement.check_placement([job], cluster)
    if words[0] not in KEPT:
        return
    options = parsed(words[0], words[1:])
    if options.resume:
        return  # its settings are in storage; the driver checks
    from policies.settings.gpus import run_elsewhere

    with run_elsewhere():
        (_check_search if words[0] == "tune" else _check_run)(options, job, cluster)


def _check_run(options: SimpleNamespace, job: Process, cluster: Sequence[placement.Node]) -> None:
    from launch.cluster.session import check_driver
    from launch.console.configuration import split_words
    from policies.settings.processes import processes

    settings = split_words(options.words or (), options.config or ()).settings()
    check_driver(settings, job.gpus)
    driver, *others = processes(settings)  # the job's own process is the driver
    placement.check_placement([replace(job, gpus=max(job.gpus, driver.gpus)), *others], cluster)


def _check_search(options: SimpleNamespace, job: Process, cluster: Sequence[placement.Node]) -> None:
    from launch.commands.tune import read_search
    from launch.experiments.search import check_room
    from launch.experiments.space import points

    search, _ = read_search(options)
    check_room(points(search.settings, search.axes), cluster, beside=[job])
