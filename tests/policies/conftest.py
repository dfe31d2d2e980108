"""Fixtures and helpers for small real runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from launch.cluster.session import init_ray
from policies.cory import Cory, CoryConfig
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.models.model_names import BUNDLED_LM, model_path
from policies.models.weights import Weights
from policies.rllib.causal_lm_module import module_config
from tests.paper import PAPER, make_settings, paper_hyperparameters
from tests.small_inputs import few_queries, small_model

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise Ray's processes starve next to the tests' own
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # no Python worker per CPU; few tests use them

TINY: dict[str, Any] = {
    **PAPER,
    **few_queries(),
    "model": small_model(),
    "backend": "transformers",
    "num_runners": 0,
    "dtype": "fp32",
    "queries_per_update": 8,
    "minibatch_size": 8,
    "micro_batch_size": 4,
    "num_epochs": 2,
    "lr": 1e-4,
    "max_response_tokens": 6,
    "exchange_period": 2,
    "eval_every": 2,
    "eval_queries": 4,
    "check_weight_sync": False,
    "reward": "tests.policies.sample_rewards:letters",  # starts immediately, whereas the preset's loads a classifier
}

BUNDLED: dict[str, Any] = {"model": BUNDLED_LM, "data": None, "eval_data": None}
"""The bundled model and all queries of the task `imdb` in place of the small ones, for responses that make sense."""

MakeCory = Callable[..., Cory]


def make_model(path: str, **settings: Any) -> PolicyModel:
    """A learner's model of one policy, without an algorithm."""
    config = module_config(make_settings({"model": path, "dtype": "fp32", **settings}), "llm_1")
    return PolicyModel(model_path(config.pop("model")), **config)


def weights_of(model: PolicyModel) -> Weights:
    """A policy's weights in the form that engines get."""
    return dict(PolicyLearner(model, paper_hyperparameters()).stream_weights())


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray instance for all tests that need it."""
    # address="local": otherwise it would connect to any Ray on this machine, such as another test's.
    init_ray(
        address="local",
        num_cpus=4,
        resources={"sampling": 1},
        include_dashboard=False,
        log_to_driver=False,
        ignore_reinit_error=True,
    )
    yield
    ray.shutdown()


@pytest.fixture
def make_cory(ray_session: None) -> Iterator[MakeCory]:
    """Builds algorithms from `TINY` and overrides, and stops them after the test."""
    built: list[Cory] = []

    def make(**settings: Any) -> Cory:
        built.append(CoryConfig().cory(**{**TINY, **settings}).build_algo())
        return built[-1]

    yield make
    for algorithm in built:
        algorithm.stop()
