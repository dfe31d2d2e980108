"""The weight-sync check by model family: rounding passes in bf16 and fp32, other weights do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.tiny_models import tiny_model
from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.generation.generator import Generator, Response, Sampling
from policies.generation.installed import vllm_installed
from policies.generation.transformers_generator import TransformersGenerator
from policies.generation.vllm_generator import VLLMGenerator
from policies.learning.policy_learner import PolicyLearner
from policies.learning.rows import Rows, make_rows
from policies.models.smollm2 import SmolLM2Error
from policies.models.weights import Weights
from policies.rollout.runners import WeightSyncError
from policies.sync_check import LogprobDiff, check_diff, check_weight_sync, perturb
from tests.paper import make_settings, paper_hyperparameters
from tests.policies.conftest import make_model

SMALLEST = (
    *("starcoder2", "minicpm3", "arcee", "ernie4_5", "smollm3", "vaultgemma", "apertus", "gemma2", "gemma3_text"),
    "nemotron",
)
"""The families of the table with the fewest parameters as a tiny model; without mamba, whose scan is slow on a CPU."""
WEIGHTS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"weights": "lora", "lora_rank": 4}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
PROMPTS = [[token, token + 1, token + 2] * (1 + token % 4) for token in range(5, 15)]


def assert_tells_rounding_from_other_weights(
    generator: Generator, path: str, dtype: str, settings: dict[str, Any]
) -> None:
    """Runs the check at start, then compares an engine with the learner's weights and with two others."""
    policy = PolicyLearner(make_model(path, dtype=dtype, **settings), paper_hyperparameters())
    initial = dict(policy.stream_weights())
    trained, others = perturb(initial, seed=1, noise=0.05), perturb(initial, seed=2, noise=0.05)

    def load(weights: Weights) -> None:
        generator.load("llm_1", weights, 0)

    def generate(prompts: Sequence[Sequence[int]]) -> list[Response]:
        return generator.generate(prompts, "llm_1", Sampling(1.0, 8, range(len(prompts)), [0]))

    def score(weights: Weights, rows: Rows) -> torch.Tensor:
        return policy.score_under(weights, rows).logprobs

    load(initial)  # as a run does; vLLM has no adapter before
    tolerance = {"fp32": 0.005, "bf16": 0.05}[dtype]
    start = check_weight_sync(initial, PROMPTS, load, generate, score, "llm_1", tolerance)

    def check_engine_with(weights: Weights) -> None:
        load(weights)
        responses = generate(PROMPTS)
        tokens, logprobs = ([list(getattr(r, name)) for r in responses] for name in ("tokens", "logprobs"))
        rows = make_rows(PROMPTS, tokens, logprobs, [0.0] * len(PROMPTS), [False] * len(PROMPTS))
        diff = LogprobDiff.measure(rows, score(trained, rows))
        check_diff("llm_1", diff, start, DTYPES[dtype], make_settings({"dtype": dtype}))

    check_engine_with(trained)
    for weights in (initial, others):
        with pytest.raises(WeightSyncError, match="Sampler and learner of llm_1 differ"):
            check_engine_with(weights)


KINDS = [(family, dtype, weights) for family in SMALLEST for dtype in DTYPES for weights in WEIGHTS]
"""Each family is tested with one of the four kinds of weights, and all kinds are; the other tests are slow."""


@pytest.mark.parametrize(
    ("family", "dtype", "weights"),
    [
        pytest.param(*kind, marks=[] if index % 4 == index // 4 % 4 else pytest.mark.slow)
        for index, kind in enumerate(KINDS)
    ],
)
def test_rounding_passes_and_other_weights_are_detected(tmp_path: Path, family: str, dtype: str, weights: str) -> None:
    model = tiny_model(CONFIG_MAPPING[family]())
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path)
    lora = make_settings(WEIGHTS[weights]).lora
    generator = TransformersGenerator({"llm_1": str(tmp_path)}, dtype=dtype, device=CPU, lora=lora)
    assert_tells_rounding_from_other_weights(generator, str(tmp_path), dtype, WEIGHTS[weights])


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("model", [str(DEFAULT_TOKENIZER), pytest.param("smollm2", marks=pytest.mark.slow)])
def test_with_vllm_in_bf16_rounding_passes_and_other_weights_are_detected(
    engines: list[VLLMGenerator], model: str, weights: str
) -> None:
    try:
        path = str(make_settings({"model": model}).model_paths["llm_1"])
    except SmolLM2Error as error:
        pytest.skip(str(error))
    shape: dict[str, Any] = {"max_prompt_tokens": 16, "max_response_tokens": 8, "max_sequences": 16}
    lora = make_settings(WEIGHTS[weights]).lora
    engines.append(VLLMGenerator({"llm_1": path}, dtype="bf16", device=CPU, lora=lora, **shape))
    assert_tells_rounding_from_other_weights(engines[-1], path, "bf16", WEIGHTS[weights])
