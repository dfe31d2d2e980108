"""Splitting queries among runners, and failures of runners."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import ray

from cory_env.rewarding.worker import RewardError
from policies.generation.generator import GenerationError
from policies.generation.installed import vllm_installed
from policies.models.model_check import ModelError
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.runners import TaskChangedError, split_prompts
from policies.sync_check import perturb
from tests.policies.conftest import MakeCory
from tests.policies.models.test_language_model import deeper_than_its_weights

REWARDS = "tests.policies.sample_rewards"
WITH_VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]


@pytest.mark.parametrize("runners", [1, 2, 3, 7])
def test_shares_contain_every_query_once_and_in_order(runners: int) -> None:
    prompt_refs = [PromptRef(query) for query in range(5)]
    shares = split_prompts(prompt_refs, runners)
    assert len(shares) == min(runners, 5)
    assert [prompt_ref for share in shares for prompt_ref in share] == prompt_refs


@pytest.mark.parametrize(
    ("backend", "reference_runners", "runners", "transfer"),
    [
        ("transformers", 0, 2, {}),
        pytest.param("vllm", 1, 1, {}, marks=WITH_VLLM),
        pytest.param("vllm", 1, 2, {"weight_transfer": "gloo"}, marks=WITH_VLLM),
    ],
)
def test_responses_are_the_same_if_runners_are_killed_or_have_other_weights(
    make_cory: MakeCory, tmp_path: Path, backend: str, reference_runners: int, runners: int, transfer: dict[str, Any]
) -> None:
    flag, data = tmp_path / "die", tmp_path / "data.jsonl"
    rows = [f'{{"query": "This film, number {number},"}}\n' for number in range(20)]
    data.write_text("".join(rows))
    settings = {
        "queries_per_update": 4,
        "minibatch_size": 4,
        "exchange_period": 1,
        "reward": f"{REWARDS}:kill_runner_once?flag={flag}",
    }
    settings["data"] = str(data)
    reference = make_cory(num_runners=reference_runners, backend=backend, **settings)
    faulty = make_cory(num_runners=runners, backend=backend, **settings, **transfer)
    expected = [reference.train()["cory"] for _ in range(2)]
    flag.touch()  # a runner kills itself during its first rollout
    reports = [faulty.train()["cory"]]
    assert not flag.exists()
    weights = perturb(faulty.weights("llm_1"), seed=0)
    faulty.runners.call_one("load_weights", policy_id="llm_1", weights=weights, version=99)  # it then fails to generate
    reports.append(faulty.train()["cory"])
    assert faulty.updates == 2
    for one, other in zip(expected, reports, strict=True):
        assert response_texts(one) == response_texts(other)
        assert one["roles"] == other["roles"]
        assert other["weight_version_lag"] == 0

    data.write_text("".join(rows[1:]))  # a restarted runner reads the data again
    for runner in faulty.runners.manager.actors().values():
        ray.kill(runner, no_restart=False)
    with pytest.raises(TaskChangedError, match=r"Runner \d restarted and loaded different queries"):
        faulty.train()


def test_the_drivers_engine_gets_new_weights_even_if_it_dies_during_the_sync(
    make_cory: MakeCory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_cory(num_runners=0, queries_per_update=2, minibatch_size=2)
    runner = algorithm.env_runner_group.local_env_runner
    load = runner.load_weights
    failures: list[Any] = []

    def fail_once(**arguments: Any) -> Any:
        if not failures:
            failures.append(arguments)
            raise GenerationError("The vLLM engine of llm_1 died; it was restarted.")
        return load(**arguments)

    monkeypatch.setattr(runner, "load_weights", fail_once)
    algorithm.train()
    assert failures and "The vLLM engine of llm_1 died; it was restarted. Trying again." in caplog.messages
    assert algorithm.train()["cory"]["weight_version_lag"] == 0


def response_texts(report: dict[str, Any]) -> list[list[str]]:
    return [[response["text"] for response in sample["responses"]] for sample in report["samples"]]


@pytest.mark.slow
def test_a_reward_that_hangs_longer_than_generation_timeout_is_reported(make_cory: MakeCory) -> None:
    hanging = {"reward": f"{REWARDS}:hang", "reward_timeout": 5.0, "generation_timeout": 8.0}
    algorithm = make_cory(num_runners=1, queries_per_update=2, minibatch_size=2, **hanging)
    with pytest.raises(RewardError, match=r"sample_rewards:hang failed .* it ran longer than its time limit of 5 s"):
        algorithm.train()


@pytest.mark.slow  # `test_errors` has the cause of an actor's failed start
def test_a_runner_that_cannot_start_raises_the_cause(make_cory: MakeCory, tmp_path: Path) -> None:
    model = deeper_than_its_weights(tmp_path)
    with pytest.raises(
        ModelError, match=r"do not match its config.json: 12 parameters are missing .* transformer\.h\.4"
    ):
        make_cory(num_runners=1, model=str(model))


@pytest.mark.slow
def test_queries_that_kill_every_runner_stop_the_run(make_cory: MakeCory) -> None:
    algorithm = make_cory(num_runners=1, queries_per_update=2, minibatch_size=2, reward=f"{REWARDS}:kill_runner")
    with pytest.raises(GenerationError, match="All runners failed 3 times in a row on the same queries"):
        algorithm.train()


def test_if_every_reward_fails_nothing_is_evaluated_and_training_stops(
    make_cory: MakeCory, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_cory(reward=f"{REWARDS}:boom", on_reward_error="skip", queries_per_update=2, minibatch_size=2)
    evaluation = algorithm.evaluator.evaluate()["evaluation"]
    assert set(evaluation) == {"llm_1", "llm_2", "mean"}
    assert all(math.isnan(value) for policy in evaluation.values() for value in policy.values())
    assert "The reward failed on all 4 held-out queries of llm_1: not evaluated." in caplog.messages
    with pytest.raises(RewardError, match="failed on every query of 6 batches in a row, for update 1"):
        algorithm.train()
    assert (algorithm.updates, algorithm.updates_since_exchange) == (0, 0)
