"""`cory submit`: checks before anything is sent, and the submitted job."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient, JobType

from launch.cluster.jobs import check_no_active_job
from launch.cluster.upload import check_size, uploaded_sizes
from launch.commands.submit import check_cluster, job_command, job_environment
from launch.console.credentials import is_secret, load_secrets, worker_runtime_env
from launch.console.errors import CommandError
from launch.main import main
from policies.settings import gpus
from policies.settings.processes import Process
from tests.launch.cluster.test_placement import make_nodes
from tests.launch.conftest import ENVIRONMENT

TRAIN = ["train", "imdb-tiny", "backend=transformers", "num_runners=2", "num_learners=2"]


def job(cpus: float = 0.0, gpus: float = 0.0, **custom: float) -> Process:
    return Process("job", 1, cpus, gpus, custom)


def test_an_upload_over_50_mib_is_rejected_with_its_largest_files_not_counting_ignored_files(
    tmp_path: Path,
) -> None:
    for name in ("data/large.bin", "ignored/huge.bin", "secret.bin", ".git/pack"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 60 * 2**20)  # sparse
    (tmp_path / ".rayignore").write_text("ignored/\n")
    (tmp_path / ".gitignore").write_text("secret.bin\n")
    (tmp_path / "small.py").write_text("1")
    with pytest.raises(
        CommandError, match=r"60 MiB to upload, but the limit is 50 MiB: data/large\.bin \(60\.0 MiB\), "
    ):
        check_size(tmp_path, uploaded_sizes(tmp_path))
    (tmp_path / "data" / "large.bin").unlink()
    check_size(tmp_path, uploaded_sizes(tmp_path))
    checkout = Path(__file__).parents[3]
    check_size(checkout, uploaded_sizes(checkout))


@pytest.mark.parametrize(
    ("job_process", "nodes", "message"),
    [
        (
            job(),
            [{"CPU": 2.0}, {"CPU": 1.0}],
            r"1 of 2 learners with CPU=1 \(.*\), beside 2 runners\. Request fewer",
        ),
        (
            job(cpus=2.0),
            [{"CPU": 5.0}],
            r"1 of 2 learners .* beside 1 job and 2 runners\.",
        ),
        (
            job(cpus=4.0),
            [{"CPU": 3.0}, {"CPU": 3.0}],
            r"1 of 1 job with CPU=4 \(.*3 CPUs left\)\.",
        ),
        (job(1.0, 1.0), [{"CPU": 8.0}, {"GPU": 1.0}], r"job with CPU=1, GPU=1 \(.* has 0 GPUs .* has 0 CPUs left"),
        (
            job(tpu=1.0),
            [{"CPU": 8.0}],
            r"with tpu=1 \(.*1 has 0 tpu left\)\.",
        ),
    ],
)
def test_a_run_that_a_cluster_cannot_place_is_rejected_with_the_missing_resources(
    job_process: Process, nodes: list[dict[str, float]], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        check_cluster(TRAIN, job_process, make_nodes(*nodes))


def test_a_run_that_a_cluster_can_place_is_accepted() -> None:
    check_cluster(TRAIN, job(), make_nodes({"CPU": 2.0}, {"CPU": 2.0}))  # the driver requests no CPU
    check_cluster(TRAIN, job(), make_nodes({"CPU": 0.0}, {"CPU": 4.0}))
    check_cluster(TRAIN, job(cpus=2.0), make_nodes({"CPU": 6.0}))
    check_cluster(TRAIN, job(), [])  # a head that has just started
    check_cluster(["validate", "imdb"], job(tpu=1.0), make_nodes({"CPU": 1.0}, {"CPU": 1.0, "tpu": 4.0}))


@pytest.mark.parametrize(
    ("name", "words", "job_process", "cpus", "gpus"),
    [
        # a run's job is its driver: if the driver learns, the learner's GPU is the job's
        ("train", ["num_runners=1", "gpus_per_runner=1", "gpus_per_learner=1"], job(1.0, 1.0), 2, 2),
        ("train", ["num_runners=1", "gpus_per_runner=1", "gpus_per_learner=1"], job(2.0, 2.0), 3, 3),
        ("train", ["num_runners=1", "num_learners=1", "gpus_per_learner=1"], job(0.0, 1.0), 1, 2),
        # a search's job is not the driver of any trial; each trial's driver requests a CPU
        ("tune", ["num_runners=1", "gpus_per_learner=1", "--over", "lr=1e-5,1e-4"], job(1.0, 1.0), 3, 2),
        ("tune", ["num_runners=2", "--over", "lr=1e-5,1e-4"], job(), 3, 0),
    ],
)
def test_a_job_s_resources_count_for_its_run_and_in_addition_to_its_search(
    name: str, words: list[str], job_process: Process, cpus: int, gpus: int
) -> None:
    command = [name, "imdb-tiny", "backend=transformers", *words]
    check_cluster(command, job_process, make_nodes({"CPU": cpus, "GPU": gpus}))
    with pytest.raises(CommandError, match="has 0 CPUs left"):
        check_cluster(command, job_process, make_nodes({"CPU": cpus - 1, "GPU": gpus}))
    if gpus:
        with pytest.raises(CommandError, match=r"has [01] GPUs left"):
            check_cluster(command, job_process, make_nodes({"CPU": cpus, "GPU": gpus - 1}))


@pytest.mark.parametrize("words", [["train"], ["tune", "--over", "lr=1e-5,1e-4"]])
def test_a_local_gpu_does_not_affect_the_cluster_check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "has_gpu", lambda: gpus._other_machine_gpu.get() is not False)
    command = [words[0], "imdb-tiny", "backend=transformers", *words[1:]]
    check_cluster(command, job(), make_nodes({"CPU": 8.0}))


def test_settings_files_are_included_in_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("num_learners: 4\n")
    search = [*SEARCH[:-1], "lr=1e-5"]
    for command in (
        ["train", "backend=transformers", "-c", "mine.yaml"],
        ["train", "backend=transformers", "mine.yaml"],
        [*search, "-c", "mine.yaml"],
    ):
        with pytest.raises(CommandError, match=r"of [24] learners"):
            check_cluster(command, job(), make_nodes({"CPU": 2.0}))


@pytest.mark.parametrize("command", ["tpu=many", "tpu", "tpu=-1", "CPU=2"])
def test_invalid_resources_are_rejected(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--resources", command, "--", "validate", "imdb"]) == 2
    assert f"Error: --resources={command}: `{command}` is not a custom resource" in capsys.readouterr().err


SEARCH = ["tune", *TRAIN[1:], "--over", "num_learners=1,2"]


def test_a_search_that_a_cluster_cannot_place_is_rejected() -> None:
    check_cluster(SEARCH, job(), make_nodes({"CPU": 2.0}, {"CPU": 3.0}))
    with pytest.raises(CommandError, match=r"1 of 2 learners with CPU=1 .* beside 1 driver and 2 runners"):
        check_cluster(SEARCH, job(), make_nodes({"CPU": 4.0}))
    check_cluster([*SEARCH, "--concurrent", "2"], job(), make_nodes({"CPU": 6.0}))  # at most two trials at once
    check_cluster(["tune", "--resume", "/shared/period"], job(), make_nodes({"CPU": 1.0}))


def test_a_search_has_a_shared_folder_with_its_name_and_resumes_there() -> None:
    words, name, location = job_command(SEARCH, "period", "/shared")
    assert (words, name) == ([*SEARCH, "--out", "/shared/period", "--continue"], "period")
    assert location == "/shared/period"
    _, name, location = job_command(["tune", "--resume", "/shared/old"], None, None)
    assert (name, location) == ("old", "/shared/old")
    _, name, _ = job_command(SEARCH, None, "/shared")
    assert name.startswith("tune-imdb-tiny-")


def test_a_run_has_a_location_with_its_name_and_resumes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, name, location = job_command(TRAIN, "first", "s3://bucket/runs/")
    assert (words, name) == ([*TRAIN, "--out", "s3://bucket/runs/first", "--continue"], "first")
    assert location == "s3://bucket/runs/first"
    assert job_command(TRAIN, "first", "s3://bucket/runs?scheme=http")[2] == "s3://bucket/runs/first?scheme=http"
    words, name, location = job_command(["train", "--resume", "/shared/old", "num_updates=9"], None, None)
    assert (words[-1], name, location) == ("num_updates=9", "old", "/shared/old")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=r"mine\.yaml does not exist"):
        job_command(["train", "mine.yaml"], None, "/shared")
    (tmp_path / "mine.yaml").touch()
    assert job_command(["train", "mine.yaml"], None, "/shared")[1].startswith("mine-2")


@pytest.mark.parametrize(
    ("storage", "words", "message"),
    [
        (None, ["submit"], "Write a command after `--`"),
        (None, ["train"], "Set the location of the run once"),
        ("/shared", ["train", "imdb-tiny", "gsm8k"], "One preset or file: imdb-tiny and gsm8k cannot"),
        ("/shared", ["train", "--out", "/shared/one"], "Set the location of the run once"),
        ("runs", ["train"], "is relative, and the job's working directory is removed when"),
        ("s3://me:word@bucket", ["train"], "contains a password"),
        (None, ["tune"], "Set the location of the search once"),
        ("s3://bucket", SEARCH, "is a URI, but a search requires a folder"),
    ],
)
def test_a_command_without_a_valid_location_is_rejected(storage: str | None, words: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        job_command(words, None, storage)


def test_a_run_with_an_active_job_is_rejected_by_folder_and_uri() -> None:
    class Client(JobSubmissionClient):
        """Client of a cluster with one job."""

        def __init__(self) -> None:
            pass

        def list_jobs(self) -> list[JobDetails]:
            return [job]

    job = JobDetails(
        type=JobType.SUBMISSION,
        submission_id="raysubmit_1",
        status=JobStatus.RUNNING,
        entrypoint="python -m launch.main train",
        metadata={"run": "file:///shared/one"},
    )
    for location in ("file:///shared/one", "/shared/one", "/shared/one/"):
        with pytest.raises(CommandError, match=f"raysubmit_1 is already working on {location}"):
            check_no_active_job(Client(), location)
    check_no_active_job(Client(), "/shared/two")
    job.status = JobStatus.STOPPED
    check_no_active_job(Client(), "/shared/one")


NODE = """
import os, sys
from launch.console.credentials import worker_runtime_env

runtime_env = worker_runtime_env()
os.environ["HOME"] = sys.argv[1]  # of the new node
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=runtime_env)
print(ray.get(ray.remote(lambda: os.environ["HF_TOKEN"]).remote()))
"""


@pytest.mark.slow
def test_a_worker_loads_its_node_s_secrets_file_even_if_the_driver_has_none(tmp_path: Path) -> None:
    file = tmp_path / "node" / ".config" / "cory" / "secrets.env"
    file.parent.mkdir(parents=True)
    file.write_text("HF_TOKEN=hf_1\n")
    environment = {**ENVIRONMENT, "HOME": str(tmp_path)}
    environment.pop("CORY_SECRETS", None)
    command = [sys.executable, "-c", NODE, str(tmp_path / "node")]
    nodes = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert nodes.stdout == "hf_1\n", nodes.stderr


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "aws_access_key_id", "GITHUB_PAT"),
        *("AZURE_STORAGE_CONNECTION_STRING", "PGPASS", "API_KEYS", "OPENAI_API_KEY_1"),
    ],
)
def test_secrets_are_rejected_as_variables_of_a_job(name: str) -> None:
    with pytest.raises(CommandError, match=f"{name} looks like a secret.*--secrets FILE") as raised:
        job_environment([f"{name}=hunter2"], None, False)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "MLFLOW_TRACKING_URI=http://me:hunter2@host", "--", "train"], "MLFLOW_TRACKING_URI=http://…"),
        (["--env", "WHERE=https://host/a?sig=hunter2", "--", "train"], "WHERE=https://… contains sig"),
        (["--", "evaluate", "s3://KEY:hunter2@bucket/run"], "s3://… contains a password"),
        (["--", "train", "reward=mine:judge?scale=2&api_key=hunter2"], "reward=mine:judge?… contains api_key"),
        (["--", "validate", "custom", "data=https://host/a.csv?token=hunter2"], "data=https://… contains token"),
    ],
)
def test_secrets_in_values_and_commands_are_rejected_and_not_printed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--storage", "/shared", "--address", "http://127.0.0.1:1", *words]) == 2
    errors = capsys.readouterr().err
    assert (
        errors.startswith(f"Error: {message}")
        and "the cluster's jobs can read" in errors
        and "--secrets FILE" in errors
    )
    assert "hunter2" not in errors


def test_uris_and_options_without_a_secret_are_accepted() -> None:
    for value in ("DATABASE_URL=postgresql://me@host:5432/runs", "MLFLOW_TRACKING_URI=http://host:5000"):
        name, _, uri = value.partition("=")
        assert job_environment([value], None, False)[name] == uri
    words = ["evaluate", "abfs://runs@account.dfs.core.windows.net/one", "reward=m:f?scale=2"]
    words += ["prompt=What is {query}? key=A", "prompt=Is it so? Reply with token=yes or token=no"]
    assert job_command(words, None, None)[0] == words


def test_other_variables_are_passed_with_the_stop_timeout() -> None:
    for name in (
        "TOKENIZERS_PARALLELISM",
        "RAY_AUTH_TOKEN_PATH",
        "WANDB_MODE",
        "MONKEYS",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ):
        assert not is_secret(name)
    variables = job_environment(["WANDB_MODE=offline"], "/etc/cory/secrets.env", False)
    assert variables == {
        "RAY_JOB_STOP_WAIT_TIME_S": "3600",
        "WANDB_MODE": "offline",
        "CORY_SECRETS": "/etc/cory/secrets.env",
    }
    assert job_environment([], None, True)["CORY_UNCHECKED"] == "1"
    assert job_environment(["RAY_JOB_STOP_WAIT_TIME_S=9000"], None, False)["RAY_JOB_STOP_WAIT_TIME_S"] == "9000"


def test_a_secrets_file_does_not_override_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CORY_SECRETS", raising=False)
    load_secrets()
    assert worker_runtime_env() == {"worker_process_setup_hook": "cory_rllib.worker.set_up"}
    file = tmp_path / "secrets.env"
    file.write_text("# mine\n\nexport HF_TOKEN='hf_1'\nWANDB_API_KEY=a=b\n")
    file.chmod(stat.S_IRUSR)
    monkeypatch.setenv("CORY_SECRETS", str(file))
    monkeypatch.setenv("HF_TOKEN", "set before")
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that monkeypatch restores it
    monkeypatch.delenv("WANDB_API_KEY")
    load_secrets()
    assert (os.environ["HF_TOKEN"], os.environ["WANDB_API_KEY"]) == ("set before", "a=b")
    assert worker_runtime_env()["env_vars"] == {"CORY_SECRETS": str(file)}
    file.write_text(
        "WANDB_NOTES=abc'\nWANDB_NAME = \"a 'b' # c\"  # its name\nWANDB_TAGS='$HOME'\nexport WANDB_DIR=/a#b\n"
    )
    names = ("WANDB_NOTES", "WANDB_NAME", "WANDB_TAGS", "WANDB_DIR")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    load_secrets()
    assert [os.environ[name] for name in names] == ["abc'", "a 'b' # c", "$HOME", "/a#b"]
    file.unlink()
    with pytest.raises(CommandError, match=r"secrets\.env cannot be read: .*No such file"):
        load_secrets()
    for text, line in (("A=1\n\n# mine\n\nhunter2\n", 5), ("\nA='hunter2\nB=2\n", 2), ("A=1\nA B=hunter2\n", 2)):
        file.write_text(text)
        with pytest.raises(CommandError, match=rf"secrets\.env, line {line}: not NAME=VALUE, ") as raised:
            load_secrets()
        assert "hunter2" not in str(raised.value)


def test_submit_requires_no_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")  # nothing listens there
    assert main(["submit", "--", "validate", "imdb"]) == 2
    assert capsys.readouterr().err.startswith("Error: No Ray cluster answers at http://127.0.0.1:9. ")
