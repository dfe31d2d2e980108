"""Policies with different models: each has its own weights, reference and tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.cory import Cory
from policies.generation.installed import vllm_installed
from policies.learning.rows import left_padded
from policies.models.language_model import load_language_model
from policies.models.model_names import BUNDLED_LM, model_path
from policies.models.weights import checksum
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.prompt_sampling import PromptRef
from tests.policies.conftest import MakeCory
from tests.policies.test_cory import assert_same_learner, learner_state

DRAFTS: dict[str, Any] = {"task": "drafts", "data": None, "eval_data": None, "max_prompt_tokens": 48}


def evaluate(algorithm: Cory) -> dict[str, dict[str, float]]:
    evaluation: dict[str, dict[str, float]] = algorithm.evaluator.evaluate()["evaluation"]
    return evaluation


def test_each_policy_starts_from_its_own_model_and_keeps_it_as_its_reference(
    make_cory: MakeCory, small_model: str
) -> None:
    models = {"llm_1": BUNDLED_LM, "llm_2": small_model}
    algorithm = make_cory(
        model=[*models.values()],
        check_weight_sync=True,
        exchange_period=1,
        lr=1e-3,
        minibatch_size=4,
        credit="chain",
    )
    bases = {name: dict(load_language_model(model_path(model)).named_parameters()) for name, model in models.items()}

    def assert_references() -> None:
        references = algorithm.learners.call_first(
            lambda learner: {policy_id: p.model.reference() for policy_id, p in learner.policies.items()}
        )
        for policy_id, base in bases.items():
            reference = dict(references[policy_id].named_parameters())
            assert reference.keys() == base.keys()
            assert all(torch.equal(reference[name], base[name]) for name in base)

    for policy_id, base in bases.items():
        assert {name: array.shape for name, array in algorithm.weights(policy_id).items()} == {
            name: tuple(parameter.shape) for name, parameter in base.items()
        }
        assert evaluate(algorithm)[policy_id]["kl"] == pytest.approx(0.0, abs=1e-6)
    reports = [algorithm.train()["cory"] for _ in range(2)]
    assert [report["roles"]["pioneer"] for report in reports] == ["llm_1", "llm_2"]
    assert max(report["logprob_diff_max"] for report in reports) < 1e-4
    assert all(evaluate(algorithm)[policy_id]["kl"] > 1e-4 for policy_id in models)
    assert_references()
    engine_parameters = algorithm.env_runner_group.local_env_runner.generator.trainable
    for policy_id in models:
        loaded = {name: parameter.numpy() for name, parameter in engine_parameters[policy_id].items()}
        assert checksum(loaded) == checksum(algorithm.weights(policy_id))


def test_a_run_with_two_models_resumes_exactly(make_cory: MakeCory, small_model: str, tmp_path: Path) -> None:
    algorithm = make_cory(model=[small_model, BUNDLED_LM], exchange_period=1)
    algorithm.train()
    algorithm.save_to_path(str(tmp_path / "checkpoint"))
    algorithm.train()
    resumed = Cory.from_checkpoint(tmp_path / "checkpoint")
    assert resumed.settings.models == {"llm_1": small_model, "llm_2": BUNDLED_LM}
    resumed.train()
    assert_same_learner(learner_state(algorithm), learner_state(resumed))
    assert algorithm.mapping == resumed.mapping
    resumed.stop()


def test_policies_with_different_tokenizers_pass_on_text(make_cory: MakeCory) -> None:
    algorithm = make_cory(
        **DRAFTS,
        model=["drafts-llama-tiny", BUNDLED_LM],
        check_weight_sync=True,
        exchange_period=1,
        max_response_tokens=8,
    )
    task, tokenizers = algorithm.task, algorithm.settings.make_tokenizers()
    assert len(tokenizers["llm_1"]) < 20 and len(tokenizers["llm_2"]) == 4096
    prompt_refs = [PromptRef(query) for query in range(8)]
    for mapping in (algorithm.mapping, algorithm.mapping.rotated()):
        rollout = algorithm.runners.generate(prompt_refs, mapping=mapping, split="test")
        for prompt_ref, sample, episode in zip(prompt_refs, rollout.samples, rollout.episodes, strict=True):
            query = task.test[prompt_ref.query]
            texts: list[str] = []
            for response in sample["responses"]:
                agent, tokenizer = episode.agent_episodes[response["role"]], tokenizers[response["policy"]]
                observation, action = agent.observations[0], agent.actions[0]
                prompt = task.observer_prompt(query, texts) if texts else task.prompt(query)
                tokens = action["tokens"][: action["length"]]
                assert observation["tokens"][: observation["length"]].tolist() == tokenizer(prompt)["input_ids"]
                assert tokenizer.decode(tokens, skip_special_tokens=True) == response["text"]
                texts.append(response["text"])
    reports = [algorithm.train()["cory"] for _ in range(2)]
    assert [report["roles"]["pioneer"] for report in reports] == ["llm_1", "llm_2"]
    assert max(report["logprob_diff_max"] for report in reports) < 1e-4

    # The last response's `kl` is to the policy's own base, prompted with the bare query in its own tokens.
    for mapping in (algorithm.mapping, algorithm.mapping.rotated()):
        rollout, metrics = algorithm.evaluator.measure(prompt_refs, mapping, "test")
        policy_id = mapping("observer")
        rows = rows_from_episodes(rollout.episodes)[policy_id].at_position(1)
        prompts = [
            tokenizers[policy_id](task.prompt(task.test[prompt_ref.query]))["input_ids"] for prompt_ref in prompt_refs
        ]
        tokens, mask = left_padded(prompts)
        bare_rows = replace(rows, prompts=tokens, prompt_mask=mask)
        bare = algorithm.learners.score({policy_id: bare_rows})[policy_id].columns()["reference_logprobs"]
        logprobs = algorithm.learners.score({policy_id: rows})[policy_id].logprobs
        np.testing.assert_allclose(metrics["observer"]["bare_kl"], (logprobs - bare).sum(1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("tokenizer", ["different", "shared"])
def test_vllm_has_an_engine_per_policy_of_its_models_size(
    make_cory: MakeCory, small_model: str, tokenizer: str
) -> None:
    settings = {"model": [BUNDLED_LM, small_model]}
    if tokenizer == "different":
        settings = {"model": [BUNDLED_LM, "drafts-llama-tiny"], **DRAFTS}
    algorithm = make_cory(**settings, backend="vllm", num_runners=1, check_weight_sync=True, exchange_period=1, lr=1e-3)
    starts = algorithm.sync_check.state
    assert starts.keys() == {*algorithm.settings.policy_ids} and all(mean < 1e-3 for mean, _, _ in starts.values())
    reports: list[dict[str, Any]] = [algorithm.train()["cory"] for _ in range(2)]
    assert all(report["logprob_diff_max"] < 1e-3 and report["weight_version_lag"] == 0 for report in reports)
    policy_ids = algorithm.settings.policy_ids
    weights = {policy_id: algorithm.weights(policy_id) for policy_id in policy_ids}
    for policy_id in policy_ids:
        loaded = algorithm.runners.call_one("load_weights", policy_id=policy_id, weights=weights[policy_id], version=2)
        assert loaded.checksum == checksum(weights[policy_id])
    sizes = [sum(int(np.prod(array.shape)) for array in weights[policy_id].values()) for policy_id in policy_ids]
    assert sizes[0] > 5 * sizes[1]
