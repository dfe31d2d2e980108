"""A user's modules with the names of our packages: training uses ours, rewards use the user's."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import make_model
from cory_env.functions import SpecError, load_function
from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.shadowing import shadowing_modules
from launch.run_folder.run import Run
from policies.cory import CoryConfig
from policies.settings.error import SettingsError
from tests.launch.conftest import CHECKOUT, ENVIRONMENT
from tests.policies.conftest import TINY, ray_session

__all__ = ["ray_session"]
REWARD = """
import launch
from launch.lengths import length
from policies import SCALE


def score(completions):
    return [launch.BASE + SCALE * length(text) for text in completions]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the working directory."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").write_text("BASE = 1000\n")
    (tmp_path / "launch" / "lengths.py").write_text("length = len\n")
    (tmp_path / "policies.py").write_text("SCALE = 10\n")
    (tmp_path / "cory_env.py").write_text("raise SystemExit('the user\\'s cory_env')\n")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_uses_our_packages_and_its_rewards_use_the_user_s(project: Path) -> None:
    settings = [
        "queries_per_update=4",
        "minibatch_size=4",
        "micro_batch_size=4",
        "num_epochs=1",
        "max_response_tokens=4",
        "eval_queries=2",
        "num_updates=1",
    ]
    processes = ["num_runners=1", "num_learners=1", "backend=transformers", "dtype=fp32", "check_weight_sync=false"]
    model = make_model("test", project)
    words = ["train", *settings, *processes, f"model={model}", "reward=my_rewards:score", "--out", "run"]
    code = "import sys; import cory_rllib; from launch.main import main; raise SystemExit(main(sys.argv[1:]))"
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{project}:{ENVIRONMENT['PYTHONPATH']}"}  # as in a job
    result = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    line = Run.open(project / "run").metrics[-1]
    rewards = [figures["task_reward"] or 0.0 for figures in line["policy"].values()]
    assert line["update"] == 1 and min(rewards) >= 1000


def test_a_reward_s_process_imports_the_user_s_modules_even_if_ours_come_first(project: Path) -> None:
    with RewardWorker("my_rewards:score", timeout=20) as worker:
        assert worker.rewards(["query"], ["four"], {}) == [1040.0]


@pytest.mark.parametrize("source", ["import cory_env", "def f(): from cory_env import mine", "import cory_env.mine"])
def test_a_reward_that_imports_a_shadowed_module_is_rejected(project: Path, source: str) -> None:
    (project / "bad.py").write_text(f"{source}\ndef score(completions): return [0.0] * len(completions)\n")
    with RewardWorker("bad:score", timeout=20) as worker, pytest.raises(RewardError, match=r"Rename that module\.$"):
        worker.start()


def test_a_reward_may_import_our_modules_despite_a_user_s_module_of_the_same_name(project: Path) -> None:
    (project / "good.py").write_text("from cory_env.rewards.number import *\ndef score(completions): return [1.0]\n")
    with RewardWorker("good:score", timeout=20) as worker:
        worker.start()


@pytest.mark.parametrize("source", ["import policies", "from policies import SCALE", "import launch.lengths"])
def test_a_task_that_imports_a_shadowed_module_is_rejected(project: Path, source: str) -> None:
    (project / "shadow_tasks.py").write_text(f"def make():\n    {source}\n")
    with pytest.raises(SpecError, match=r"imports (policies|launch), .* not .*Rename that module\.$"):
        load_function("shadow_tasks:make", "task")


def test_workers_of_a_ray_session_without_our_setup_are_rejected(ray_session: None, project: Path) -> None:
    config = CoryConfig().cory(**{**TINY, "num_runners": 1})
    with pytest.raises(SettingsError, match=r"Ray's workers would import .*cory_env\.py instead of CORY\'s package"):
        config.build_algo()


def test_a_shadowing_module_imported_before_ours_is_rejected(project: Path) -> None:
    code = "import policies, cory_rllib"
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert "ImportError: The module policies, imported from" in result.stderr.splitlines()[-1]


def test_folders_without_code_and_our_checkouts_shadow_nothing(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    assert not shadowing_modules([tmp_path])
    assert not shadowing_modules([CHECKOUT])


def test_launch_main_runs_beside_a_user_s_module(project: Path) -> None:
    shutil.rmtree(project / "launch")
    command = [sys.executable, "-m", "launch.main", "--version"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
