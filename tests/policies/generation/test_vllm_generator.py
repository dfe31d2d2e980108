"""The vLLM backend with real engines: agreement with the learner, weight syncs and their check, adapters."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from policies.generation import vllm_lora
from policies.generation.generator import LoadedWeights, Request, Response, Sampling, sampling_seed
from policies.generation.installed import vllm_installed
from policies.generation.vllm_device import EngineStartError
from policies.generation.vllm_generator import VLLMGenerator
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows, make_rows
from policies.models.lora import Lora
from policies.models.weights import Weights, checksum, shared_memory_file
from policies.sync_check import LogprobDiff, WeightSyncCheckError, check_weight_sync, perturb
from tests.policies.conftest import make_model, weights_of
from tests.policies.generation.conftest import close_all

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]

MODEL = str(DEFAULT_TOKENIZER)
EOS = [load_tokenizer(MODEL).eos_token_id]
MAX_PROMPT = 200  # longer than a block of vLLM's KV cache, so that prompts are cached


def make_generator(policy_ids: Sequence[str] = ("llm_1",), **settings: Any) -> VLLMGenerator:
    arguments: dict[str, Any] = {
        "dtype": "fp32",
        "device": torch.device("cpu"),
        "max_prompt_tokens": MAX_PROMPT,
        "max_response_tokens": 8,
        "max_sequences": 64,
        **settings,
    }
    return VLLMGenerator(dict.fromkeys(policy_ids, MODEL), **arguments)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[VLLMGenerator]]:
    """The engines of this process, closed together at the end."""
    engines: list[VLLMGenerator] = []
    yield engines
    close_all(engines)


@pytest.fixture(scope="module")
def generator(engines: list[VLLMGenerator]) -> VLLMGenerator:
    engines.append(make_generator())
    return engines[-1]


@pytest.fixture(scope="module")
def learner() -> PolicyModel:
    """The learner's model, for comparison."""
    return make_model(MODEL)


@pytest.fixture(scope="module")
def weights(learner: PolicyModel) -> Weights:
    return weights_of(learner)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL)
    short = [tokenizer(text)["input_ids"] for text in ("This movie is", "I really liked", "The worst thing about it")]
    return [*short, (short[2] * MAX_PROMPT)[:MAX_PROMPT]]


def sampling(prompts: Sequence[Sequence[int]]) -> Sampling:
    return Sampling(1.0, 8, [sampling_seed(0, 0, query, 0) for query in range(len(prompts))], EOS)


def make_score(learner: PolicyModel) -> Callable[[Weights, Rows], torch.Tensor]:
    state = learner.state()

    def score(weights: Weights, rows: Rows) -> torch.Tensor:
        learner.load({**state, **{f"lm.{name}": array for name, array in weights.items()}})
        logprobs = learner.score(rows).logprobs
        learner.load(state)
        return logprobs

    return score


def run_weight_sync_check(
    generator: VLLMGenerator,
    learner: PolicyModel,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    load: Callable[[Weights], Any],
) -> LogprobDiff:
    def generate(prompts: Sequence[Sequence[int]]) -> list[Response]:
        return generator.generate(prompts, "llm_1", sampling(prompts))

    return check_weight_sync(weights, prompts, load, generate, make_score(learner), "llm_1")


def test_log_probabilities_agree_with_the_learner(
    generator: VLLMGenerator, learner: PolicyModel, prompts: list[list[int]]
) -> None:
    out = generator.generate(prompts, "llm_1", sampling(prompts))
    rewards = [0.0] * len(out)
    rows = make_rows(prompts, [r.tokens for r in out], [r.logprobs for r in out], rewards, [False] * len(out))
    diff = (learner.score(rows).logprobs - rows.sampler_logprobs).abs() * rows.mask
    assert float(diff.max()) < 1e-4


def test_a_response_does_not_depend_on_its_batch(generator: VLLMGenerator, prompts: list[list[int]]) -> None:
    batch = generator.generate(prompts, "llm_1", sampling(prompts))
    seeds = sampling(prompts).seeds
    singles = [
        generator.generate([prompt], "llm_1", Sampling(1.0, 8, [seed], EOS))[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert [response.tokens for response in batch] == [response.tokens for response in singles]


def make_request(key: int, prompt: Sequence[int], max_tokens: int, policy_id: str = "llm_1") -> Request:
    return Request(key, policy_id, prompt, Sampling(1.0, max_tokens, [sampling_seed(0, 0, key, 0)], ()))


def test_the_engine_uses_the_requested_model_runner(generator: VLLMGenerator) -> None:
    core = generator.engines["llm_1"].llm_engine.engine_core.engine_core
    use_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # set by `test_model_runner_v2`
    assert core.vllm_config.use_v2_model_runner is use_v2
    runner = type(core.model_executor.driver_worker.worker.model_runner)
    assert ("gpu.model_runner" in "".join(base.__module__ for base in runner.__mro__)) is use_v2


def test_an_engine_on_a_cpu_compiles_nothing(generator: VLLMGenerator, prompts: list[list[int]]) -> None:
    generator.generate(prompts, "llm_1", sampling(prompts))
    assert not torch._dynamo.utils.counters["frames"]


def test_any_of_several_stop_tokens_ends_a_response(generator: VLLMGenerator, prompts: list[list[int]]) -> None:
    full = [response.tokens for response in generator.generate(prompts, "llm_1", sampling(prompts))]
    stops = sampling(prompts)._replace(stop_token_ids=[*EOS, full[0][2], full[1][0]])
    stopped = [response.tokens for response in generator.generate(prompts, "llm_1", stops)]
    assert stopped[0] == full[0][:3] and stopped[1] == full[1][:1]


def test_more_prompt_tokens_than_fit_in_one_engine_step_change_nothing(
    generator: VLLMGenerator, prompts: list[list[int]]
) -> None:
    long_prompts = [prompts[-1]] * 50  # 10,000 tokens at once
    seeds = [sampling_seed(0, 0, query, 0) for query in range(50)]
    batch = generator.generate(long_prompts, "llm_1", Sampling(1.0, 8, seeds, EOS))
    last = generator.generate(long_prompts[-1:], "llm_1", Sampling(1.0, 8, seeds[-1:], EOS))
    assert batch[-1].tokens == last[0].tokens


def test_temperature_reaches_the_log_probabilities(
    generator: VLLMGenerator, learner: PolicyModel, prompts: list[list[int]]
) -> None:
    out = generator.generate(prompts, "llm_1", sampling(prompts)._replace(temperature=0.5))
    rewards = [0.0] * len(out)
    rows = make_rows(prompts, [r.tokens for r in out], [r.logprobs for r in out], rewards, [False] * len(out))
    learner.temperature = 0.5
    diff = (learner.score(rows).logprobs - rows.sampler_logprobs).abs() * rows.mask
    learner.temperature = 1.0
    assert float(diff.max()) < 1e-4


def test_load_returns_the_version_and_the_checksum_of_the_loaded_weights(
    generator: VLLMGenerator, weights: Weights
) -> None:
    new_weights = perturb(weights, seed=1)
    loaded = generator.load("llm_1", new_weights, 3)
    assert loaded == LoadedWeights(3, checksum(new_weights)) != LoadedWeights(3, checksum(weights))
    assert generator.load("llm_1", weights, 4) == LoadedWeights(4, checksum(weights))
    assert not list(Path("/dev/shm").glob("cory-weights-*"))


def test_weights_that_were_not_sent_are_stale(generator: VLLMGenerator, weights: Weights) -> None:
    names = list(weights)
    for omitted in (names[0], names[len(names) // 2], names[-1]):
        incomplete = {name: array for name, array in weights.items() if name != omitted}
        assert generator.load("llm_1", incomplete, 1).stale == (omitted,)
    assert generator.load("llm_1", weights, 2).stale == ()


def test_the_weight_sync_check_passes_on_a_correct_engine(
    generator: VLLMGenerator, learner: PolicyModel, weights: Weights, prompts: list[list[int]]
) -> None:
    diff = run_weight_sync_check(generator, learner, weights, prompts, lambda w: generator.load("llm_1", w, 0))
    assert diff.mean < 1e-3


def test_the_weight_sync_check_detects_an_engine_that_ignores_new_weights(
    generator: VLLMGenerator, learner: PolicyModel, weights: Weights, prompts: list[list[int]]
) -> None:
    with pytest.raises(WeightSyncCheckError, match="does not use new weights"):
        run_weight_sync_check(generator, learner, weights, prompts, lambda w: None)


def test_the_weight_sync_check_detects_a_stale_tied_head(
    generator: VLLMGenerator, learner: PolicyModel, weights: Weights, prompts: list[list[int]], tmp_path: Path
) -> None:
    def load_all_but_the_head(new: Weights) -> None:
        engine = generator.engines["llm_1"]

        def reload(worker: Any) -> None:
            tensors = [(name, torch.from_numpy(np.array(array))) for name, array in new.items()]
            with torch.inference_mode():
                worker.model_runner.reload_weights(weights_iterator=iter(tensors), is_checkpoint_format=True)

        engine.collective_rpc(reload)
        assert engine.reset_prefix_cache()

    with pytest.raises(WeightSyncCheckError):
        run_weight_sync_check(generator, learner, weights, prompts, load_all_but_the_head)
    generator.load("llm_1", weights, 0)


def test_the_weight_sync_check_detects_a_stale_prefix_cache(
    generator: VLLMGenerator, learner: PolicyModel, weights: Weights, prompts: list[list[int]]
) -> None:
    def load_without_dropping_caches(new: Weights) -> None:
        with shared_memory_file(new) as path:
            generator.engines["llm_1"].collective_rpc("load_weights", args=(path,))

    with pytest.raises(WeightSyncCheckError):
        run_weight_sync_check(generator, learner, weights, prompts[-1:], load_without_dropping_caches)
    generator.load("llm_1", weights, 0)


def test_the_weight_sync_check_detects_one_stale_tensor(
    generator: VLLMGenerator, learner: PolicyModel, weights: Weights, prompts: list[list[int]]
) -> None:
    bias = "transformer.h.1.ln_2.bias"  # contributes 1.5 % of the total difference

    def load_all_but_one(new: Weights) -> None:
        generator.load("llm_1", {**new, bias: weights[bias]}, 0)

    with pytest.raises(WeightSyncCheckError, match="does not use new weights"):
        run_weight_sync_check(generator, learner, weights, prompts, load_all_but_one)
    generator.load("llm_1", weights, 0)


@pytest.fixture(scope="module")
def adapters(engines: list[VLLMGenerator]) -> VLLMGenerator:
    """One engine for the adapters of three policies."""
    engines.append(make_generator(["llm_1", "llm_2", "llm_3"], lora=Lora(4, 8.0)))
    return engines[-1]


def adapter_weights(seed: int) -> Weights:
    return perturb(weights_of(make_model(MODEL, weights="lora", lora_rank=4, lora_alpha=8.0)), seed)


def test_one_engine_serves_all_adapters_and_new_weights_replace_only_their_own(
    adapters: VLLMGenerator, prompts: list[list[int]]
) -> None:
    learner = make_model(MODEL, weights="lora", lora_rank=4, lora_alpha=8.0)
    weights = {policy_id: adapter_weights(seed) for seed, policy_id in enumerate(adapters.policy_ids)}
    score = make_score(learner)

    def max_diff(policy_id: str, under: Weights) -> float:
        out = adapters.generate(prompts, policy_id, sampling(prompts))
        rewards = [0.0] * len(out)
        rows = make_rows(prompts, [r.tokens for r in out], [r.logprobs for r in out], rewards, [False] * len(out))
        return float(((score(under, rows) - rows.sampler_logprobs).abs() * rows.mask).max())

    assert len(adapters.engines) == 1
    for version in range(2):
        for policy_id in adapters.policy_ids:
            loaded = adapters.load(policy_id, weights[policy_id], version)
            assert loaded == LoadedWeights(version, checksum(weights[policy_id]))
        for policy_id in adapters.policy_ids:
            assert max_diff(policy_id, weights[policy_id]) < 1e-4
        assert max_diff("llm_1", weights["llm_2"]) > 0.1
        weights["llm_2"] = adapter_weights(seed=9)


def test_a_row_without_an_adapter_uses_the_base_in_a_batch_with_adapters(
    adapters: VLLMGenerator, learner: PolicyModel, prompts: list[list[int]]
) -> None:
    for seed, policy_id in enumerate(adapters.policy_ids):
        adapters.load(policy_id, adapter_weights(seed), 5)
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=6, seed=1, logprobs=0, detokenize=False)
    requests = [None, *(vllm_lora.lora_request(policy_id, k + 1) for k, policy_id in enumerate(adapters.policy_ids))]
    inputs = [TokensPrompt(prompt_token_ids=prompts[0])] * 4
    (engine,) = adapters.engines.values()
    first = engine.generate(inputs, [params] * 4, use_tqdm=False, lora_request=requests)[0].outputs[0]
    tokens = list(first.token_ids)
    logprobs = [step[token].logprob for step, token in zip(first.logprobs or [], tokens, strict=True)]
    rows = make_rows(prompts[:1], [tokens], [logprobs], [0.0], [False])
    assert float(((learner.score(rows).logprobs - rows.sampler_logprobs).abs() * rows.mask).max()) < 1e-4


def test_caches_larger_than_the_free_memory_are_rejected_with_advice() -> None:
    with pytest.raises(EngineStartError, match=r"KV caches .* GiB of memory are free\. Lower max_prompt_tokens"):
        make_generator(max_prompt_tokens=10**9)


def test_an_engine_that_cannot_start_raises_a_one_line_error() -> None:
    with pytest.raises(EngineStartError, match=r"could not start an engine .*max_model_len") as raised:
        make_generator(max_prompt_tokens=300)  # the bundled model has 256 positions
    assert "\n" not in str(raised.value)


def test_an_engine_keeps_working_after_other_engines_of_its_process_end(
    generator: VLLMGenerator, prompts: list[list[int]]
) -> None:
    before = generator.generate(prompts, "llm_1", sampling(prompts))
    closed, collected = make_generator(), make_generator()
    closed.close()
    assert generator.generate(prompts, "llm_1", sampling(prompts)) == before
    del collected
    gc.collect()
    assert generator.generate(prompts, "llm_1", sampling(prompts)) == before


def test_the_tensor_parallel_size_reaches_the_engine() -> None:
    with pytest.raises(
        EngineStartError, match=r"attention heads \(4\) must be divisible by tensor parallel size \(3\)"
    ):
        make_generator(tensor_parallel_size=3)
