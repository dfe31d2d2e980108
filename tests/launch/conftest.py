"""Fixtures: the `cory` command, run folders recorded without training, and run folders with trained policies."""

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.numpy import load_file

from launch.main import main
from launch.run_folder.run import Run
from policies.models.model_names import BUNDLED_LM
from policies.rollout.role_mapping import make_mapping
from policies.settings.settings import Settings
from tests.forked import run_forked
from tests.paper import paper_settings
from tests.policies.conftest import ray_session

__all__ = ["ray_session"]

if TYPE_CHECKING:
    from policies.rllib.causal_lm_module import CausalLMModule

Cory = Callable[..., "subprocess.CompletedProcess[str]"]
CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def cory(tmp_path: Path) -> Cory:
    """Runs `cory ...` in a new process, in an empty folder."""

    def run(*words: str, stdin: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "cory_rllib", *words]
        env = {**ENVIRONMENT, **environment}
        return subprocess.run(command, cwd=tmp_path, env=env, input=stdin, capture_output=True, text=True, timeout=240)

    return run


@pytest.fixture
def cory_forked(tmp_path: Path) -> Cory:
    """Like `cory`, in a forked process with preloaded imports: for tests that do not depend on the start."""

    def run(*words: str, stdin: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
        return run_forked(main, [*words], folder=tmp_path, environment={**ENVIRONMENT, **environment}, stdin=stdin)

    return run


@pytest.fixture
def cory_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cory:
    """Like `cory`, in this process: for commands that start neither Ray nor an engine.

    Also not for commands that load weights: after a library has shown progress in this process, environment variables
    no longer silence it.
    """

    def run(*words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            try:
                code = main([*words])
            except SystemExit as system_exit:  # raised for invalid arguments
                code = int(system_exit.code or 0)
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


def start_cory(folder: Path, *words: str, code: str | None = None, **environment: str) -> "subprocess.Popen[str]":
    """Starts `cory ...`, or Python code, in a folder and a new process group, with pipes for all streams.

    Code can run several commands that import their libraries only once.
    """
    return subprocess.Popen(
        [sys.executable, *(("-m", "cory_rllib", *words) if code is None else ("-c", code))],
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="session")
def cluster(ray_session: None) -> dict[str, str]:
    """Environment of commands that join the tests' Ray session, for tests that do not need a local Ray."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount point of a 2 MB disk; skips the test if this process may not mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=2m", "none", str(path))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no permission to mount a disk")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def record_test_run(folder: Path, settings: Settings, updates: Sequence[int] = range(13)) -> Run:
    """Writes a run folder without training, with a role exchange every 5 updates and an evaluation every 6."""
    run = Run.create(folder)
    run.write_settings(settings, "cory train")
    for update in updates:
        policy_metrics: dict[str, dict[str, float | None]] = {}
        for path, policy_id in enumerate(settings.policy_ids):
            kl = 0.1 * update * (1 + 0.2 * path)
            task_reward = 2 * (1 - math.exp(-update / 6)) - 0.1 * path
            policy_metrics[policy_id] = {
                "task_reward": task_reward,
                "kl": kl,
                "combined_reward": task_reward - 0.1 * kl,
            }
            policy_metrics[policy_id] |= {"response_length": 15.0, "eos_rate": 0.1, "repetition": 0.0}
        line: dict[str, object] = {"update": update}
        if update:
            roles = make_mapping(settings, rotation=(update - 1) // 5).as_dict()
            trained = {policy_id: {**metrics, "value_loss": 0.25} for policy_id, metrics in policy_metrics.items()}
            line |= {"policy": trained, "roles": roles}
            line["role"] = {role: trained[policy] for role, policy in roles.items()}
            line |= {
                "exchanged": update % 5 == 0 and settings.num_agents > 1,
                "tokens": 3000,
                "tokens_per_second": 1000.0,
                "seconds": {"total": 2.0},
            }
        if update % 6 == 0:
            line["evaluation"] = {**policy_metrics, "mean": policy_metrics["llm_1"]}
        run.metrics_file.append(line)
    return run


RUN_SETTINGS = paper_settings(
    backend="transformers", num_runners=0, dtype="fp32", temperature=0.7, max_response_tokens=8, num_updates=6
)
"""Settings of `policies_run`."""


@pytest.fixture(scope="session")
def policies_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with checkpoints of updates 5 and 6, whose policies differ from the base model and from each other."""
    run = record_test_run(tmp_path_factory.mktemp("runs") / "run", RUN_SETTINGS, updates=range(7))
    for update in (5, 6):
        run.checkpoints.save(update, lambda folder, seed=update: write_policies(folder, RUN_SETTINGS, seed))  # type: ignore[misc]
    run.checkpoints.name_best(5)
    run.unlock()
    return run


@pytest.fixture(scope="session")
def two_models_run(tmp_path_factory: pytest.TempPathFactory, small_model: str) -> Run:
    """A run whose second policy has a smaller base model, saved after update 1."""
    settings = RUN_SETTINGS.model_copy(update={"model": [BUNDLED_LM, small_model]})
    run = record_test_run(tmp_path_factory.mktemp("runs") / "two_models", settings, updates=range(2))
    run.checkpoints.save(1, lambda path: write_policies(path, settings, seed=1))
    run.unlock()
    return run


@pytest.fixture(scope="session")
def adapters_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with `weights=lora`, saved after update 1."""
    return record_adapters(tmp_path_factory.mktemp("runs") / "adapters", temperature=1.0)


def record_adapters(folder: Path, **changes: object) -> Run:
    """Writes a run with `weights=lora`, whose adapters are nonzero and differ from each other."""
    lora = {"weights": "lora", "lora_rank": 4, "lora_alpha": 30.0}
    settings = RUN_SETTINGS.model_copy(update={**lora, **changes})
    run = record_test_run(folder, settings, updates=range(2))
    run.checkpoints.save(1, lambda path: write_policies(path, settings, seed=1))
    run.unlock()
    return run


def read_policy(folder: Path | None, settings: Settings, policy: str) -> "CausalLMModule":
    """Builds a policy's RLModule as a learner does, with the weights of a checkpoint."""
    assert folder is not None
    from policies.cory import CoryConfig

    config = CoryConfig().cory(**settings.model_dump())
    config.validate()
    spec = config.rl_module_spec.rl_module_specs[policy]
    policy_id: CausalLMModule = spec.module_class(model_config=spec.model_config)
    (file,) = (folder / "learner_group" / "learner" / "rl_module" / policy).iterdir()
    policy_id.policy.load(load_file(file))
    return policy_id


def write_policies(folder: Path, settings: Settings, seed: int) -> None:
    """Writes the policies of a checkpoint, as learners do."""
    import torch

    from policies.cory import CoryConfig
    from policies.learning import stored_policy
    from policies.sync_check import perturb

    config = CoryConfig().cory(**settings.model_dump())
    config.validate()
    for number, (policy, spec) in enumerate(sorted(config.rl_module_spec.rl_module_specs.items())):
        policy_id = spec.module_class(model_config=spec.model_config)
        weights = perturb(policy_id.policy.state(), seed=10 * seed + number)
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        stored_policy.save(tensors, str(folder / "learner_group" / "learner" / "rl_module" / policy), None)
