"""Requirements of Tune's schedulers: search spaces as settings, flat results, and exact clones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune

from policies.cory import Cory, CoryConfig
from policies.settings.settings import SettingsError
from tests.policies.conftest import TINY, MakeCory
from tests.policies.test_cory import flatten, learner_state


def response_tuples(samples: list[dict[str, Any]]) -> list[list[tuple[str, str, str]]]:
    return [[(turn["role"], turn["policy"], turn["text"]) for turn in sample["responses"]] for sample in samples]


@pytest.mark.slow
def test_a_clone_continues_from_its_donor_on_all_runners_with_its_own_settings(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    donor = make_cory(exchange_period=1, num_updates=9)
    for _ in range(3):
        report = donor.train()
    samples, roles = response_tuples(donor.evaluator.samples(donor.mapping, 4)), donor.mapping
    saved = donor.save(str(tmp_path / "donor"))

    clone = make_cory(num_runners=2, exchange_period=2, num_updates=9, lr=3e-5, kl_coef=0.7, eval_kl_coef=0.3)
    clone.train()
    clone.restore(saved)  # as Tune does
    assert response_tuples(clone.evaluator.samples(clone.mapping, 4)) == samples  # two from each runner
    assert (clone.mapping, clone.exchanges, clone.updates_since_exchange) == (roles, 3, 0)
    assert roles.as_dict() == {"pioneer": "llm_2", "observer": "llm_1"}
    assert clone.combined_reward == report["combined_reward"]
    clone_state, donor_state = learner_state(clone), learner_state(donor)
    for name, array in flatten(donor_state["rl_module"]).items():
        np.testing.assert_array_equal(flatten(clone_state["rl_module"])[name], array)
    moments = [name for name in flatten(donor_state["optimizer"]) if "exp_avg" in name]
    assert moments
    for name in moments:
        np.testing.assert_array_equal(flatten(clone_state["optimizer"])[name], flatten(donor_state["optimizer"])[name])
    assert {group["lr"] for o in clone.learner_group._learner._optimizer_parameters for group in o.param_groups} == {
        3e-5
    }

    fourth, fifth = (clone.train() for _ in range(2))
    assert (fourth["training_iteration"], fourth["updates"]) == (4, 4)
    assert fourth["cory"]["roles"] == fifth["cory"]["roles"] == roles.as_dict()
    assert (fourth["cory"]["exchanges"], fifth["cory"]["exchanges"]) == (3, 4)  # two updates after the donor's last
    assert fourth["cory"]["policy"]["llm_1"]["kl_coef"] == 0.7


def test_a_result_has_the_last_evaluation_and_is_done_after_the_last_update(make_cory: MakeCory) -> None:
    algorithm = make_cory(eval_every=2, num_updates=3, queries_per_update=4, minibatch_size=4)
    results = [algorithm.train() for _ in range(3)]
    evaluations = [result["cory"].get("evaluation") for result in results]
    assert evaluations[0] is None and np.isnan(results[0]["combined_reward"])
    assert results[1]["combined_reward"] == evaluations[1]["mean"]["combined_reward"]
    assert results[2]["combined_reward"] == evaluations[2]["mean"]["combined_reward"] != results[1]["combined_reward"]
    assert [(result["updates"], result["done"]) for result in results] == [(1, False), (2, False), (3, True)]


def test_a_search_space_requires_a_tuner() -> None:
    config = CoryConfig().cory(exchange_period=tune.grid_search([1, None]))
    with pytest.raises(SettingsError, match=r"`exchange_period` is a search space\. Run it with"):
        config.build_algo()


@pytest.mark.parametrize(
    ("before", "changes", "eval_kl_coef"),
    [
        ({}, {}, 0.01),
        ({"kl_coef": 0.1}, {}, 0.1),
        ({"eval_kl_coef": 0.05}, {}, 0.05),
        ({}, {"eval_kl_coef": 0.05}, 0.05),
    ],
)
def test_a_search_over_kl_coef_does_not_change_eval_kl_coef(
    before: dict[str, float], changes: dict[str, float], eval_kl_coef: float
) -> None:
    config = CoryConfig().cory(**before).cory(kl_coef=tune.uniform(0, 1), **changes)
    for kl_coef in (0.0, 0.9):
        settings = CoryConfig().cory(**{**config.cory_settings, "kl_coef": kl_coef}).settings
        assert (settings.kl_coef, settings.report_kl_coef) == (kl_coef, eval_kl_coef)


@pytest.mark.parametrize(
    ("settings", "cpus", "gpus"),
    [
        ({"num_runners": 0}, 1, 0),
        ({"num_runners": 1}, 2, 0),
        ({"num_runners": 2, "runner_threads": 3, "num_learners": 2}, 9, 0),
        ({"num_runners": 2, "gpus_per_runner": 0.5, "gpus_per_learner": 1}, 3, 2),
        ({"num_runners": 1, "gpus_per_runner": 1, "num_learners": 2, "gpus_per_learner": 1}, 2, 3),
    ],
)
def test_a_trial_requests_resources_for_driver_runners_and_learners(
    settings: dict[str, float], cpus: float, gpus: float
) -> None:
    config = CoryConfig().cory(**{**TINY, **settings})
    resources = Cory.default_resource_request(config.to_dict()).required_resources
    assert (resources["CPU"], resources.get("GPU", 0)) == (cpus, gpus)
