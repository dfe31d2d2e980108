"""The progress output of a search, with Tune's trials but without its processes."""

import pickle
from typing import Any

import pytest
from ray.tune.experiment import Trial

from launch.experiments.callbacks import ProgressCallback
from tests.paper import paper_settings


def make_trial(lr: float) -> Trial:
    config = {"cory_settings": paper_settings(num_updates=2).model_dump() | {"lr": lr}}
    return Trial("Cory", stub=True, trial_id="a_00000", trial_name_creator=lambda trial: "trial_00000", config=config)


def result(update: int) -> dict[str, Any]:
    figures = {"task_reward": 0.1, "kl": 0.0, "combined_reward": 0.1}
    return {"updates": update, "combined_reward": 0.1, "cory": {"update": update, "evaluation": {"mean": figures}}}


def test_an_evaluation_is_printed_with_the_values_of_its_trial(capsys: pytest.CaptureFixture[str]) -> None:
    callback = ProgressCallback(["lr"])
    callback = pickle.loads(pickle.dumps(callback))  # as Tune does when a search resumes
    callback.setup(total_num_samples=1)
    callback.on_trial_result(1, [], make_trial(1e-4), result(1))
    callback.on_trial_result(2, [], make_trial(2e-4), result(2))
    callback.on_trial_result(2, [], make_trial(2e-4), {**result(2), "cory": {"update": 2}})  # not evaluated
    callback.on_trial_error(2, [], make_trial(2e-4))
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "trial_00000     1/2    task  +0.10  KL   0.00  combined  +0.10  lr=0.0001 seed=0"
    assert second.startswith("trial_00000     2/2 ") and second.endswith("lr=0.0002 seed=0")
    assert last == "trial_00000  failed  lr=0.0002 seed=0"
