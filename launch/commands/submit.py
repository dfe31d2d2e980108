"""`cory submit -- train ...`: submits a command to a Ray cluster as a job, and follows it to its end."""

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
from launch.cluster.client import STOP_SECONDS, STOP_WAIT, cluster_errors, connect, list_cluster_nodes
from launch.cluster.jobs import check_no_active_job, follow_job
from launch.cluster.upload import check_size, check_uploaded, uploaded_sizes
from launch.console.cli import COMMANDS, INTERRUPTED, Address, Debug, local_path, parse_command, path_or_uri
from launch.console.credentials import SECRETS_VARIABLE, find_secret, is_secret
from launch.console.errors import CommandError
from policies.settings.processes import Process
from policies.settings.yaml12 import parse_scalar, read_yaml

OUTPUT_KINDS = {"train": "run", "tune": "search"}
"""Commands that write to a location and can resume, with what they write."""
PATH_SETTINGS = ("data", "eval_data", "model", "start_from")
"""Settings that name files or folders."""
SECRET_ADVICE = "Write it into a file on the nodes and use --secrets FILE, or set it in the nodes' environment."


def submit(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command to run, after `--`.")],
    address: Address = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URI",
            parser=path_or_uri,
            help="Parent folder of the run (`train`) or search (`tune`, DIR only). All nodes must be able to reach it.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run or search. [default: NAME-TIME]")] = None,
    working_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", parser=local_path, help="Folder to upload. [default: .]")
    ] = None,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs reserved for the driver.")] = 0,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs reserved for the driver.")] = 0,
    resources: Annotated[
        str | None, typer.Option(metavar="NAME=N,...", help="Custom resources reserved for the driver.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment variable of the job; no secrets.")
    ] = None,
    secrets: Annotated[
        str | None, typer.Option(metavar="FILE", help="File on the nodes with NAME=VALUE lines such as HF_TOKEN=….")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="For autoscaling clusters: skip the placement check, and wait.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not follow the job.")] = False,
    debug: Debug = False,
) -> int:
    """Submit a command to a Ray cluster as a job, follow it, and exit with its exit code.

    The working directory is uploaded, except files in .gitignore and .rayignore. Submitting again with the same --name
    and --storage resumes the run of `train` or the search of `tune`. Ctrl-C leaves the job running; `cory jobs stop ID`
    saves and stops it.

    Examples:
      cory submit --storage /shared/runs --name first -- train imdb-tiny num_runners=2
      cory submit --address http://head:8265 --storage s3://bucket/runs --name big -- train mine.yaml
      cory submit --storage /shared/searches --name period -- tune imdb-tiny --over exchange_period=1,5,null --seeds 3
      cory submit -- validate custom data=questions.csv reward=my_rewards:names_it

    Exit codes:
      The command's own exit code; 2 user error; 143 the job was stopped.
    """
    environment = job_environment(env or (), secrets, unchecked)
    process = Process("job", 1, num_cpus, num_gpus, _custom_resources(resources))
    folder = (working_dir or Path()).resolve()
    sizes = uploaded_sizes(folder)
    check_size(folder, sizes)
    with contextlib.chdir(folder):  # the job's relative paths start there
        words, name, location = job_command(command, name, storage)
        check_uploaded(folder, sizes, find_named_files(words))
        client = connect(address)
        if not unchecked:
            check_cluster(words, process, list_cluster_nodes(client.get_address()))
    if location is not None:
        check_no_active_job(client, location)
    with cluster_errors(client):
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-m", "cory_rllib", *words]),
            runtime_env={"working_dir": str(folder), "env_vars": environment},
            metadata={"job_name": name} | ({"run": location} if location else {}),
            entrypoint_num_cpus=process.cpus or None,
            entrypoint_num_gpus=process.gpus or None,
            entrypoint_resources=process.custom or None,
        )
    print(f"Job {job} ({name})" + (f", {OUTPUT_KINDS[words[0]]} {location}" if location else ""), flush=True)
    if no_wait:
        print(f"Follow it with `cory jobs logs {job}`.")
        return 0
    try:
        return follow_job(client, job)
    except KeyboardInterrupt:
        print(
            f"\nThe job continues. Follow it with `cory jobs logs {job}`, stop it with `cory jobs stop {job}`.",
            file=sys.stderr,
        )
        return INTERRUPTED


def job_command(words: Sequence[str], name: str | None, storage: str | None) -> tuple[list[str], str, str | None]:
    """Builds a job's command line.

    Args:
        words: the command and its arguments.
        name: of the run or search; None: the name of its settings, and the time.
        storage: parent folder or URI of the run or search.

    Returns:
        The arguments that the job runs, its name, and the folder or URI of its run or search, if it has one.

    Raises:
        CommandError: the command is unknown or contains a secret, or there is not exactly one valid location.
    """
    if words[0] not in COMMANDS or words[0] in ("submit", "jobs"):
        raise CommandError("Write a command after `--`, as in `cory submit --storage /shared/runs -- train imdb-tiny`.")
    for word in words:
        if (secret := find_secret(word)) is not None:
            raise CommandError(f"{secret}, and everyone who can list the cluster's jobs can read it. {SECRET_ADVICE}")
    now = time.strftime("%Y%m%d-%H%M%S")
    if words[0] not in OUTPUT_KINDS:
        return [*words], name or f"{words[0]}-{now}", None
    from launch.console.configuration import split_arguments
    from launch.run_folder.storage import check_location, is_uri, join_location

    kind, options = OUTPUT_KINDS[words[0]], parse_command(words[0], words[1:])
    explicit = str(options.out or options.resume or "")
    if bool(explicit) == bool(storage):
        raise CommandError(f"Set the location of the {kind} once: --storage, or --out or --resume after `--`.")
    stem = split_arguments(options.words or (), options.config or ()).name
    name = name or (Path(explicit).name if explicit else f"{'' if kind == 'run' else 'tune-'}{stem}-{now}")
    location = explicit or join_location(str(storage), name)
    if is_uri(location) and words[0] == "tune":
        raise CommandError(
            f"{location} is a URI, but a search requires a folder. Use a --storage that all nodes share."
        )
    check_location(location, kind)
    if not is_uri(location) and not os.path.isabs(location):
        raise CommandError(
            f"{location} is relative, and the job's working directory is removed when the job ends. Use an absolute "
            "path that all nodes share, or for a run a URI such as s3://bucket/runs."
        )
    return ([*words] if explicit else [*words, "--out", location, "--continue"]), name, location


def job_environment(pairs: Sequence[str], secrets: str | None, unchecked: bool) -> dict[str, str]:
    """Returns a job's environment variables. The job list shows them all.

    Args:
        pairs: `NAME=VALUE` arguments.
        secrets: path of the secrets file on the nodes.
        unchecked: skip the placement check, and wait for nodes.

    Raises:
        CommandError: a pair is not `NAME=VALUE`, or contains a secret.
    """
    from launch.cluster.session import UNCHECKED

    variables = {STOP_WAIT: STOP_SECONDS}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise CommandError(f"--env requires NAME=VALUE, not `{pair}`.")
        secret = f"{name} looks like a secret" if is_secret(name) else find_secret(pair)
        if secret is not None:
            raise CommandError(
                f"{secret}, and everyone who can list the cluster's jobs can read --env. {SECRET_ADVICE}"
            )
        variables[name] = value
    return variables | ({SECRETS_VARIABLE: secrets} if secrets else {}) | ({UNCHECKED: "1"} if unchecked else {})


def _custom_resources(text: str | None) -> dict[str, float]:
    from policies.settings.processes import named_resources

    try:
        return named_resources("--resources", text)
    except ValueError as error:
        raise CommandError(str(error)) from error


def find_named_files(words: Sequence[str]) -> list[str]:
    """Finds the local files and folders that a command names, directly or in a YAML file.

    Args:
        words: the command and its arguments.

    Returns:
        Existing files and folders, and missing data. Other missing names may be models on the hub or installed modules.
    """
    pairs = [(key if equals else "", value or key) for key, equals, value in (word.partition("=") for word in words)]
    keys = {key for key, _ in pairs if key}
    for _, value in [*pairs]:
        if value.endswith((".yaml", ".yml")) and os.path.isfile(value):
            settings = _yaml_settings(read_yaml(Path(value).read_text(encoding="utf-8"), value))
            pairs += [pair for pair in settings if pair[0] not in keys]  # arguments take precedence
    names, required = set[str](), set[str]()
    for key, value in pairs:
        if key in PATH_SETTINGS:
            paths = _split_paths(value)
            names |= {path.removeprefix(HUB) for path in paths}
            if key in ("data", "eval_data"):
                required |= {path for path in paths if not path.startswith((HUB, "~")) and "://" not in path}
        else:
            names |= {f"{module.replace('.', '/')}.py" for module in re.findall(r"([\w.]+):[a-zA-Z_]", value)}
            names |= {name for name in re.findall(r"[\w./-]+", value) if re.search(r"\w[./]\w", name)}
    return sorted({name for name in names if os.path.exists(name)} | required)


def _split_paths(text: str) -> list[str]:
    """Returns the paths in a setting's value: a path, a YAML list, or the comma-separated values of a search."""
    value = parse_scalar(text, lists=True)
    if isinstance(value, str) and not os.path.exists(value.partition("?")[0]):
        value = [*value.split(",")]
    entries = value if isinstance(value, list) else [value]
    return [entry.partition("?")[0] for entry in entries if isinstance(entry, str)]


def _yaml_settings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the string settings in YAML, including nested ones as in the arms of a study."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _yaml_settings(entry, str(name))
    elif isinstance(value, list):
        for entry in value:
            yield from _yaml_settings(entry, key)
    elif isinstance(value, str):
        yield key, value


def check_cluster(words: Sequence[str], job: Process, cluster: Sequence[placement.Node]) -> None:
    """Checks that a command's processes fit on a cluster. Otherwise Ray would wait forever.

    Args:
        words: the command and its arguments.
        job: the command's own process.
        cluster: the cluster's nodes. If there are none, as on a cluster that has just started, nothing is checked.

    Raises:
        CommandError: processes do not fit; the message has the missing resources.
    """
    if not cluster:
        return
    placement.check_placement([job], cluster)
    if words[0] not in OUTPUT_KINDS:
        return
    options = parse_command(words[0], words[1:])
    if options.resume:
        return  # its settings are in storage, so the driver checks the placement
    from policies.settings.gpus import other_machine

    with other_machine(gpu=False):
        (_check_search if words[0] == "tune" else _check_run)(options, job, cluster)


def _check_run(options: SimpleNamespace, job: Process, cluster: Sequence[placement.Node]) -> None:
    from launch.cluster.session import check_driver
    from launch.console.configuration import split_arguments
    from policies.settings.processes import processes

    settings = split_arguments(options.words or (), options.config or ()).settings()
    check_driver(settings, job.gpus)
    driver, *others = processes(settings)  # the job's own process is the driver
    placement.check_placement([replace(job, gpus=max(job.gpus, driver.gpus)), *others], cluster)


def _check_search(options: SimpleNamespace, job: Process, cluster: Sequence[placement.Node]) -> None:
    from launch.commands.tune import read_search
    from launch.experiments.search import check_trial_placement
    from launch.experiments.space import grid_points

    search, _ = read_search(options)
    check_trial_placement(grid_points(search.settings, search.axes), cluster, beside=[job])
