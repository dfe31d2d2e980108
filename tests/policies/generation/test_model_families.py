"""Model families with tied and untied heads: both backends load new weights and adapters correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cory_env.episode import ChainEpisode
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from policies.cory import Cory
from policies.generation.generator import Generator, LoadedWeights, Sampling
from policies.generation.installed import vllm_installed
from policies.generation.transformers_generator import TransformersGenerator
from policies.generation.vllm_generator import VLLMGenerator
from policies.learning.rows import make_rows
from policies.models.lora import Lora
from policies.models.weights import checksum
from policies.sync_check import perturb
from tests.paper import make_settings
from tests.policies.conftest import MakeCory, make_model, weights_of

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
GROUPED = {**SHAPE, "num_key_value_heads": 1}  # like all but the oldest models of these families
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PADDED = {"pad_token_id": 0}  # the default is beyond a small vocabulary
ORIGINAL_LENGTH = 48
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + 0.5 * index for index in range(16)],
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "gpt_neox": {"num_key_value_heads": None},
    "gptj": {"num_key_value_heads": None, "rotary_dim": 16},
    "olmo2": PADDED,
    "phi3": {**PADDED, "original_max_position_embeddings": ORIGINAL_LENGTH, "rope_parameters": LONGROPE},
    "smollm3": PADDED,
    "mixtral": EXPERTS,
    "olmoe": {**EXPERTS, **PADDED},
    "glm4_moe": {
        **EXPERTS,
        "head_dim": 32,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {**EXPERTS, "head_dim": 32},
}
"""Configuration of a family that differs from `SHAPE` and `GROUPED`; None removes a field."""
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
TRANSFORMERS_FAMILIES = ("gpt_neox", "olmo2", "smollm3")
"""Some of the families without a vLLM class, which vLLM runs with Hugging Face's."""
MODELS = [(family, tied) for family in FAMILIES for tied in (True, False)]
LORA = {"weights": "lora", "lora_rank": 4}
WEIGHTS_SETTINGS: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA}
CASES = [
    (weights, *model) for weights in WEIGHTS_SETTINGS for model in MODELS if weights == "full" or model[1]
]  # adapters leave heads alone
PROMPTS = [[5, 6, 7], [8], list(range(9, 40))]


def save_model(folder: Path, family: str, tied: bool, vocab_size: int = 99, **tokens: Any) -> str:
    """Saves a small model with random parameters, including biases.

    A vocabulary of 99 is not a multiple of the size to which engines pad it.
    """
    tokens = {"bos_token_id": 0, "eos_token_id": 0, **tokens}
    shape = SHAPE if family == "gpt2" else GROUPED
    shape = {name: value for name, value in {**shape, **FAMILY_CONFIG.get(family, {})}.items() if value is not None}
    config = CONFIG_MAPPING[family](vocab_size=vocab_size, tie_word_embeddings=tied, **shape, **tokens)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed=0)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name or ".ln_" in name else 0.0
        parameter.normal_(mean, 0.1, generator=random)


def measure_weight_sync(generator: Generator, path: str, weights: str) -> dict[str, float]:
    """Loads new weights into the engine, and compares its log-probabilities with the learner's.

    Returns:
        `diff`, the largest difference under the new weights; `stale_diff`, under the old ones; `loaded`, whether the
        engine reports the right version and checksum.
    """
    learner = make_model(path, **WEIGHTS_SETTINGS[weights])
    old = learner.state()
    learner.load(perturb(old, seed=1, noise=0.5))
    new_weights = weights_of(learner)
    loaded = generator.load("llm_1", new_weights, 3)
    out = generator.generate(PROMPTS, "llm_1", Sampling(1.0, 8, range(len(PROMPTS)), [0]))
    rewards = [0.0] * len(out)
    rows = make_rows(PROMPTS, [r.tokens for r in out], [r.logprobs for r in out], rewards, [False] * len(out))

    def max_diff() -> float:
        return float(((learner.score(rows).logprobs - rows.sampler_logprobs).abs() * rows.mask).max())

    result = {"loaded": float(loaded == LoadedWeights(3, checksum(new_weights))), "diff": max_diff()}
    learner.load(old)
    return {**result, "stale_diff": max_diff()}


def assert_synced(result: dict[str, float]) -> None:
    assert result["loaded"] and result["diff"] < 1e-4 and result["stale_diff"] > 0.1, result


def lora_of(weights: str) -> Lora | None:
    return make_settings(WEIGHTS_SETTINGS[weights]).lora


@pytest.mark.parametrize(("weights", "family", "tied"), CASES)
def test_transformers_samples_with_new_weights(tmp_path: Path, weights: str, family: str, tied: bool) -> None:
    path = save_model(tmp_path, family, tied)
    lora = lora_of(weights)
    generator = TransformersGenerator({"llm_1": path}, dtype="fp32", device=CPU, lora=lora)
    assert_synced(measure_weight_sync(generator, path, weights))


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize(("weights", "family", "tied"), CASES)
def test_vllm_samples_with_new_weights(
    engines: list[VLLMGenerator], tmp_path: Path, weights: str, family: str, tied: bool
) -> None:
    path = save_model(tmp_path, family, tied)
    shape: dict[str, Any] = {"max_prompt_tokens": 64, "max_response_tokens": 8, "max_sequences": 4}
    engines.append(VLLMGenerator({"llm_1": path}, dtype="fp32", device=CPU, lora=lora_of(weights), **shape))
    assert_synced(measure_weight_sync(engines[-1], path, weights))


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_vllm_rotates_short_rows_by_longrope_s_long_factors_like_the_learner(
    engines: list[VLLMGenerator], tmp_path: Path
) -> None:
    path = save_model(tmp_path, "phi3", False)
    shape: dict[str, Any] = {"max_prompt_tokens": 64, "max_response_tokens": 8, "max_sequences": 4}
    engines.append(VLLMGenerator({"llm_1": path}, dtype="fp32", device=CPU, **shape))
    assert_synced(measure_weight_sync(engines[-1], path, "full"))  # all rows are shorter than the original length


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("weights", WEIGHTS_SETTINGS)
@pytest.mark.parametrize("family", TRANSFORMERS_FAMILIES)
def test_a_family_that_vllm_runs_with_transformers_can_be_trained_in_the_engines_process(
    engines: list[VLLMGenerator], tmp_path: Path, family: str, weights: str
) -> None:
    path = save_model(tmp_path, family, False)
    shape: dict[str, Any] = {"max_prompt_tokens": 64, "max_response_tokens": 8, "max_sequences": 4}
    engines.append(VLLMGenerator({"llm_1": path}, dtype="fp32", device=CPU, lora=lora_of(weights), **shape))
    assert_synced(measure_weight_sync(engines[-1], path, weights))  # the learner is built in the engine's process


def train_twice(make_cory: MakeCory, path: str, **settings: Any) -> Cory:
    """Trains for two updates, and checks that the second one samples with the new weights."""
    algorithm = make_cory(model=path, num_agents=1, lr=1e-2, **settings)
    before = checksum(algorithm.weights("llm_1"))
    first, second = (algorithm.train()["cory"] for _ in range(2))
    assert abs(first["policy"]["llm_1"]["kl"]) < 1e-6 < 1e-3 < second["policy"]["llm_1"]["kl"]
    assert max(first["logprob_diff_max"], second["logprob_diff_max"]) < 1e-4
    assert checksum(algorithm.weights("llm_1")) != before
    return algorithm


def test_a_model_with_an_untied_head_trains(make_cory: MakeCory, tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    train_twice(make_cory, save_model(tmp_path, "gpt2", False, len(tokenizer), eos_token_id=tokenizer.eos_token_id))


def test_an_instruction_tuned_model_trains_on_conversations_and_stops_at_any_of_its_stop_tokens(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}assistant:"
    )
    tokenizer.save_pretrained(tmp_path)
    stops = [tokenizer.eos_token_id, *range(2000)]  # about half of an untrained model's tokens
    path = save_model(tmp_path, "qwen3", True, len(tokenizer), eos_token_id=stops)
    turns = [{"role": "assistant", "content": "What can I do?"}, {"role": "user", "content": "Name a fruit."}]
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps({'prompt': turns})}\n" * 8)
    source = f"{data}?query_column=prompt"
    settings = {"data": source, "eval_data": source, "reward": "tests.cory_env.sample_rewards:conversational"}
    algorithm = train_twice(make_cory, path, task="custom", chat=True, system_prompt="Be brief.", **settings)
    chain = algorithm.env_runner_group.local_env_runner.env
    prompt = ChainEpisode(chain, algorithm.settings.make_task().train[0]).prompt_ids()
    assert tokenizer.decode(prompt) == (
        "system: Be brief.<|im_end|>assistant: What can I do?<|im_end|>user: Name a fruit.<|im_end|>assistant:"
    )
    assert algorithm.evaluator.evaluate()["evaluation"]["llm_1"]["eos_rate"] > 0.5
