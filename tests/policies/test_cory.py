"""End-to-end tests of the algorithm: role exchange, resuming, weight syncs, chain lengths."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from metric_docs import METRIC_DOCS, PHASE_DOCS
from ray.rllib.algorithms import algorithm_config
from ray.rllib.core import COMPONENT_LEARNER_GROUP
from ray.tune import Trainable
from ray.util import debug
from transformers import LlamaConfig, LlamaForCausalLM

from cory_env.tokenizer import load_tokenizer
from policies.cory import Cory, CoryConfig, WeightSyncError
from policies.generation.generator import LoadedWeights
from policies.learning.credit import CreditError
from policies.models.weights import checksum
from policies.report import Report
from policies.rollout.prompt_sampling import PromptRef, sample_prompts
from policies.rollout.role_mapping import RoleMapping
from policies.sync_check import perturb
from tests.paper import PAPER
from tests.policies.conftest import TINY, MakeCory


class Trained(NamedTuple):
    """An algorithm and its reports."""

    algorithm: Cory
    reports: list[dict[str, Any]]


@pytest.fixture(params=["full", pytest.param("lora", marks=pytest.mark.slow)])
def make_either(make_cory: MakeCory, request: pytest.FixtureRequest) -> MakeCory:
    """Builds algorithms with full weights or adapters."""
    return partial(make_cory, weights=request.param)


@pytest.fixture(scope="module", params=["full", pytest.param("lora", marks=pytest.mark.slow)])
def trained(ray_session: None, request: pytest.FixtureRequest) -> Iterator[Trained]:
    """An algorithm after two updates, whose tests leave its weights and roles as they are."""
    settings = {**TINY, "weights": request.param, "exchange_period": None, "eval_every": 1}
    algorithm = CoryConfig().cory(**settings).build_algo()
    yield Trained(algorithm, [algorithm.train()["cory"] for _ in range(2)])
    algorithm.stop()


def learner_state(algorithm: Cory) -> dict[str, Any]:
    """The complete state of learning: weights, optimizers and estimators."""
    state: dict[str, Any] = {"rl_module": {}, "optimizer": {}}
    for policy_id, policy in algorithm.learner_group._learner.policies.items():
        for component, tensors in policy.state("rl_module", "optimizer").items():
            state[component][policy_id] = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    cory_state = algorithm.get_state(not_components=[COMPONENT_LEARNER_GROUP])["cory"]
    return {**state, "estimations": cory_state["estimations"]}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flatten(value, f"{prefix}/{key}").items()}
    if isinstance(tree, list | tuple):
        return {k: v for i, value in enumerate(tree) for k, v in flatten(value, f"{prefix}/{i}").items()}
    return {prefix: np.asarray(tree)}


def assert_same_learner(a: dict[str, Any], b: dict[str, Any]) -> None:
    for component in ("rl_module", "optimizer", "estimations"):
        left, right = flatten(a[component]), flatten(b[component])
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=f"{component}{name}")


def test_a_role_exchange_changes_neither_weights_nor_adams_moments(trained: Trained) -> None:
    algorithm = trained.algorithm
    before = learner_state(algorithm)
    assert any(np.abs(x).max() > 0 for name, x in flatten(before["optimizer"]).items() if "exp_avg" in name)
    algorithm.exchange_roles()
    assert_same_learner(before, learner_state(algorithm))
    assert algorithm.mapping.as_dict() == {"pioneer": "llm_2", "observer": "llm_1"}
    algorithm.exchange_roles()


def test_sampler_and_learner_agree_on_log_probabilities_in_fp32(trained: Trained) -> None:
    for report in trained.reports:
        assert report["logprob_diff_max"] < 1e-4
        assert report["weight_version_lag"] == 0


def test_all_reported_metrics_are_documented(trained: Trained, make_cory: MakeCory) -> None:
    without_critic = {"advantage": "rloo", "num_generations": 2, "queries_per_update": 4, "eval_every": 1}
    for report in (trained.reports[0], make_cory(**without_critic).train()["cory"]):
        assert report.keys() == Report.__annotations__.keys() - {"truncated_episodes"}  # of environments
        assert report["seconds"].keys() == PHASE_DOCS.keys()
        all_metrics = [*report["policy"].values(), *report["role"].values(), *report["evaluation"].values()]
        for metrics in (*all_metrics, report["last_response"]):
            assert metrics.keys() <= METRIC_DOCS.keys()


def test_runner_weights_equal_learner_weights_after_sync(trained: Trained) -> None:
    state = learner_state(trained.algorithm)["rl_module"]
    for policy_id, model in trained.algorithm.env_runner_group.local_env_runner.generator.models.items():
        parameters = dict(model.named_parameters())
        lm_state = state[policy_id]
        weights = {name.removeprefix("lm."): array for name, array in lm_state.items() if name.startswith("lm.")}
        assert weights
        for name, array in weights.items():
            np.testing.assert_array_equal(parameters[name].numpy(), array)


def test_an_engine_with_other_weights_than_sent_stops_the_run(trained: Trained) -> None:
    algorithm, runners = trained.algorithm, trained.algorithm.runners
    runners.sync_weights(4)
    with pytest.raises(WeightSyncError, match="llm_1: version 4"):
        runners.check_loaded("llm_1", [LoadedWeights(4, checksum(perturb(algorithm.weights("llm_1"), seed=0)))])
    with pytest.raises(WeightSyncError, match="llm_2: version 4"):
        runners.check_loaded("llm_2", [LoadedWeights(3, checksum(algorithm.weights("llm_2")))])
    with pytest.raises(WeightSyncError, match=r"llm_1: 2 of the engine's weights were not updated, such as bias"):
        runners.check_loaded("llm_1", [LoadedWeights(4, checksum(algorithm.weights("llm_1")), ("bias", "head"))])


def test_collective_rewards_reach_the_learner(make_cory: MakeCory) -> None:
    report = make_cory(partner_reward=-0.5).train()["cory"]
    pioneer, observer = (report["role"][role]["task_reward"] for role in ("pioneer", "observer"))
    credited = report["policy"][report["roles"]["pioneer"]]["credited_reward"]
    assert credited == pytest.approx(pioneer - 0.5 * observer, abs=1e-5) and observer != 0


def test_roles_rotate_every_exchange_period_and_reports_have_their_updates_roles(make_cory: MakeCory) -> None:
    algorithm = make_cory(
        num_agents=4,
        weights="lora",
        exchange_period=1,
        queries_per_update=4,
        minibatch_size=4,
        num_epochs=1,
        reward=["tests.policies.sample_rewards:letters", "tests.policies.sample_rewards:commas"],
        reward_weights=[1.0, -0.5],
    )
    reports = [algorithm.train()["cory"] for _ in range(5)]
    assert [report["roles"]["pioneer"] for report in reports] == ["llm_1", "llm_2", "llm_3", "llm_4", "llm_1"]
    assert list(reports[1]["roles"].values()) == ["llm_2", "llm_3", "llm_4", "llm_1"]
    assert [report["exchanges"] for report in reports] == [1, 2, 3, 4, 5]
    for report in reports:
        sample_roles = {response["role"]: response["policy"] for response in report["samples"][0]["responses"]}
        assert sample_roles == report["roles"]
        for role, policy_id in report["roles"].items():
            metrics = report["role"][role]
            assert metrics["task_reward"] == report["policy"][policy_id]["task_reward"]
            weighted_sum = metrics["reward/letters"] - 0.5 * metrics["reward/commas"]
            assert metrics["task_reward"] == pytest.approx(weighted_sum, abs=1e-6)
        response = report["samples"][0]["responses"][0]
        assert response["rewards"]["letters"] - 0.5 * response["rewards"]["commas"] == response["task_reward"]


def test_the_log_folder_is_in_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(Trainable, "_setup_logdir")  # which `Cory` overrides
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    algorithm = Cory.__new__(Cory)
    algorithm._storage = None
    algorithm._setup_logdir()
    assert [Path(algorithm.logdir)] == list(tmp_path.iterdir())


def test_resuming_is_exact(make_either: MakeCory, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"exchange_period": 3, "kl_target": 6.0, "reward_scaling": "scale"}
    uninterrupted = make_either(**settings)
    interrupted = make_either(**settings)
    for _ in range(2):
        uninterrupted.train()
        interrupted.train()
    interrupted.save_to_path(tmp_path / "checkpoint")
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    try:
        for _ in range(2):
            expected, report = uninterrupted.train()["cory"], resumed.train()["cory"]
        assert (resumed.updates, resumed.exchanges, resumed.mapping) == (4, 1, uninterrupted.mapping)
        assert report["samples"] == expected["samples"]
        assert_same_learner(learner_state(uninterrupted), learner_state(resumed))
    finally:
        resumed.stop()


@pytest.mark.parametrize("num_runners", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_restoring_an_older_checkpoint_into_a_running_algorithm_syncs_all_runners(
    make_either: MakeCory, tmp_path: Path, num_runners: int
) -> None:
    algorithm = make_either(num_runners=num_runners, queries_per_update=4, minibatch_size=4)
    algorithm.train()
    algorithm.save_to_path(tmp_path / "old")
    expected = algorithm.evaluator.samples(algorithm.mapping, 2)
    for _ in range(2):
        algorithm.train()
    assert algorithm.evaluator.samples(algorithm.mapping, 2) != expected
    algorithm.restore_from_path(str(tmp_path / "old"))
    assert algorithm.updates == 1
    assert algorithm.evaluator.samples(algorithm.mapping, 2) == expected


def test_load_policies_restores_weights_without_optimizers(make_either: MakeCory, tmp_path: Path) -> None:
    trained = make_either()
    for _ in range(2):
        trained.train()
    trained.save_to_path(tmp_path / "checkpoint")
    fresh = make_either()
    base = fresh.evaluator.evaluate()["evaluation"]
    fresh.load_policies(tmp_path / "checkpoint", 2)
    for policy_id in ("llm_1", "llm_2"):
        assert checksum(fresh.weights(policy_id)) == checksum(trained.weights(policy_id))
    assert fresh.evaluator.evaluate()["evaluation"] == trained.evaluator.evaluate()["evaluation"] != base
    assert not any("exp_avg" in name for name in flatten(learner_state(fresh)["optimizer"]))
    assert fresh.mapping.as_dict() == {
        "pioneer": "llm_1",
        "observer": "llm_2",
    }  # the initial mapping, not the checkpoint's


def test_a_pioneer_is_evaluated_as_if_alone_and_samples_of_a_query_differ(make_cory: MakeCory) -> None:
    algorithm = make_cory(num_agents=3, queries_per_update=4, minibatch_size=4)
    algorithm.train()
    prompt_refs = [PromptRef(query, sample) for query in (3, 0) for sample in (0, 1)]
    single, single_metrics = algorithm.evaluator.measure(prompt_refs, RoleMapping(("pioneer",), ("llm_2",)), "test")
    mapping = RoleMapping(algorithm.settings.agents, ("llm_2", "llm_3", "llm_1"))
    chain, chain_metrics = algorithm.evaluator.measure(prompt_refs, mapping, "test")
    assert single.prompt_refs == chain.prompt_refs == prompt_refs
    texts = [[sample["responses"][0]["text"] for sample in rollout.samples] for rollout in (single, chain)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    assert list(chain_metrics) == list(algorithm.settings.agents) and list(single_metrics) == ["pioneer"]
    for name, column in single_metrics["pioneer"].items():
        np.testing.assert_allclose(chain_metrics["pioneer"][name], column, rtol=1e-5, atol=1e-6)


def test_one_agent_is_single_agent_ppo(make_cory: MakeCory) -> None:
    report = make_cory(num_agents=1, exchange_period=1).train()["cory"]
    assert report["roles"] == {"pioneer": "llm_1"} and not report["exchanged"] and report["exchanges"] == 0
    assert list(report["policy"]) == ["llm_1"]


def test_every_query_is_sampled_once_per_epoch(make_cory: MakeCory, tmp_path: Path) -> None:
    data = tmp_path / "queries.jsonl"
    data.write_text("".join(f'{{"query": "The film number {i}"}}\n' for i in range(12)))
    algorithm = make_cory(data=str(data), eval_data=str(data), queries_per_update=8, minibatch_size=8)
    total = len(algorithm.task.train)
    queries = [prompt_ref.query for update in range(3) for prompt_ref in sample_prompts(0, update, 8, total)]
    assert sorted(queries[:12]) == sorted(queries[12:]) == list(range(12))
    assert queries[:12] != queries[12:]


def test_policies_start_from_the_same_model_with_zero_kl(make_either: MakeCory) -> None:
    algorithm = make_either()
    held_out = algorithm.evaluator.evaluate()["evaluation"]
    assert held_out["llm_1"] == held_out["llm_2"]
    assert held_out["mean"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert checksum(algorithm.weights("llm_1")) == checksum(algorithm.weights("llm_2"))


def test_an_invalid_credit_scheme_is_rejected_before_anything_starts(make_cory: MakeCory) -> None:
    with pytest.raises(CreditError, match=r"torch:flatten returned shape \(4,\) for task rewards of shape \(2, 2\)"):
        make_cory(credit="torch:flatten")


def test_rllib_does_not_suggest_its_old_api_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(debug, "_logged", set())
    logger = logging.getLogger(algorithm_config.__name__)
    logger.addHandler(caplog.handler)
    CoryConfig().cory(**PAPER).validate()
    logger.removeHandler(caplog.handler)
    assert "API stack" not in caplog.text


def test_a_causal_lm_without_a_pad_token_trains(make_cory: MakeCory, tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8,  # models may pad their embeddings
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    report = make_cory(model=str(tmp_path)).train()["cory"]
    assert report["logprob_diff_max"] < 1e-4
    assert report["policy"]["llm_1"]["kl"] == 0.0
