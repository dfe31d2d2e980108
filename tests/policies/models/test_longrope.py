"""Models with longrope: the maximal length of a run selects one set of factors for rows of all lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.families import export_difference
from launch.console.errors import CommandError
from launch.training.preflight import check_rope_factors
from policies.generation.generator import Sampling
from policies.generation.transformers_generator import TransformersGenerator
from policies.learning.rows import Rows, make_rows
from policies.models.adapters import describe_family
from policies.models.families import fix_rope_factors
from policies.models.language_model import init_empty
from tests.paper import make_settings
from tests.policies.conftest import make_model
from tests.policies.generation.test_model_families import LONGROPE, LORA, ORIGINAL_LENGTH, save_model

LONG = {"max_prompt_tokens": 64, "max_response_tokens": 40}
SHORT = {"max_prompt_tokens": ORIGINAL_LENGTH - 8, "max_response_tokens": 8}
BRIEF, LENGTHY = list(range(1, 9)), [index % 90 + 1 for index in range(60)]
"""Prompts that are shorter and longer than the original context."""


@pytest.fixture
def phi3(tmp_path: Path) -> str:
    return save_model(tmp_path / "phi3", "phi3", False, vocab_size=128)


def rows_of(*prompts: list[int]) -> Rows:
    number = len(prompts)
    return make_rows([*prompts], [[7, 5, 3, 11]] * number, [[0.0] * 4] * number, [0.0] * number, [False] * number)


def own_logprobs(path: str, prompt: list[int], factors: str) -> Tensor:
    """Log-probabilities of the response by transformers, whose short factors are replaced by those of a name."""
    config = CONFIG_MAPPING["phi3"].from_pretrained(path)
    config.rope_parameters["short_factor"] = config.rope_parameters[factors]
    model = AutoModelForCausalLM.from_pretrained(path, config=config)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, 7, 5, 3, 11]])).logits[0, -5:-1]
    return logits.log_softmax(-1).gather(1, torch.tensor([[7], [5], [3], [11]])).squeeze(1)


@pytest.mark.parametrize("weights", [{}, LORA])
@pytest.mark.parametrize(("lengths", "factors"), [(LONG, "long_factor"), (SHORT, "short_factor")])
def test_scores_of_a_row_do_not_depend_on_the_length_of_others(
    phi3: str, lengths: dict[str, int], factors: str, weights: dict[str, Any]
) -> None:
    model = make_model(phi3, **lengths, **weights)
    model.check_forward()
    expected = own_logprobs(phi3, BRIEF, factors)
    other = own_logprobs(phi3, BRIEF, "short_factor" if factors == "long_factor" else "long_factor")
    assert (expected - other).abs().max() > 0.1
    batches = [rows_of(BRIEF)] + ([rows_of(BRIEF, LENGTHY)] if lengths is LONG else [])
    for scores in map(model.score, batches):
        for name in ("logprobs", "reference_logprobs"):
            torch.testing.assert_close(scores.columns()[name][0], expected, atol=2e-5, rtol=0)


def test_generation_beyond_the_original_length_follows_the_learner(phi3: str) -> None:
    generator = TransformersGenerator({"llm_1": phi3}, dtype="fp32", device=torch.device("cpu"), max_length=104)
    prompts = [BRIEF, [9, 8, 7], [5]]
    responses = generator.generate(prompts, "llm_1", Sampling(1.0, 60, range(3), [127]))
    assert max(len(response.tokens) for response in responses) == 60 > ORIGINAL_LENGTH
    tokens, logprobs = [r.tokens for r in responses], [r.logprobs for r in responses]
    rows = make_rows(prompts, tokens, logprobs, [0.0] * 3, [False] * 3)
    scored = make_model(phi3, **LONG).score(rows).logprobs
    assert ((scored - rows.sampler_logprobs).abs() * rows.mask).max() < 1e-4


def test_a_sharded_model_and_the_description_of_its_family_follow_the_maximal_length(phi3: str) -> None:
    for length, long in ((ORIGINAL_LENGTH, False), (ORIGINAL_LENGTH + 1, True)):
        rope = init_empty(phi3, max_length=length).config.rope_parameters
        assert (rope["short_factor"] == rope["long_factor"]) is long
        assert ("longrope's long factors for rows of all lengths" in describe_family(phi3, length)) is long


def test_an_export_has_the_factors_of_training_for_rows_of_all_lengths(phi3: str, tmp_path: Path) -> None:
    for name, lengths in (("short", SHORT), ("long", LONG)):
        export_difference(phi3, lengths, str(tmp_path / name))
        rope = json.loads((tmp_path / name / "config.json").read_text())["rope_parameters"]
        assert (rope["short_factor"] == rope["long_factor"]) is (name == "long")
        assert rope["original_max_position_embeddings"] == ORIGINAL_LENGTH  # which scales attention
    learner, exported = make_model(phi3, **LONG), make_model(str(tmp_path / "long"), **SHORT)
    exported.load(learner.state(), critic=False)
    scores = [model.score(rows_of(BRIEF)).logprobs for model in (learner, exported)]
    assert torch.equal(*scores)


def test_an_evaluation_whose_lengths_select_other_factors_than_training_is_refused(phi3: str) -> None:
    trained_length = make_settings({"model": phi3, **LONG}).max_length
    check_rope_factors(make_settings({"model": phi3, **LONG, "max_response_tokens": 20}), trained_length)
    with pytest.raises(CommandError, match=r"uses longrope's short factors\. It was trained .* Raise max_response_tok"):
        check_rope_factors(make_settings({"model": phi3, **SHORT}), trained_length)
    with pytest.raises(CommandError, match=r"is 104, for which .* long factors\. .* for 48 tokens\. Lower max_resp"):
        check_rope_factors(make_settings({"model": phi3, **LONG}), ORIGINAL_LENGTH)


def test_factors_are_found_by_layer_type_in_a_text_configuration_and_in_foreign_code() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    layers = {"full_attention": {**LONGROPE, "rope_theta": 1e4}, "sliding_attention": plain}
    text = {"num_hidden_layers": 2, "head_dim": 32, "rope_parameters": layers}
    config = CONFIG_MAPPING["gemma3"](text_config=text)
    assert not fix_rope_factors(config, None) and not fix_rope_factors(config, ORIGINAL_LENGTH)
    assert fix_rope_factors(config, ORIGINAL_LENGTH + 1)
    rope = config.text_config.rope_parameters
    assert rope["full_attention"]["short_factor"] == LONGROPE["long_factor"] and rope["sliding_attention"] == plain

    scaling = {"type": "su", **{name: LONGROPE[name] for name in ("short_factor", "long_factor")}}
    foreign = PreTrainedConfig(max_position_embeddings=128, original_max_position_embeddings=ORIGINAL_LENGTH)
    foreign.rope_scaling = scaling
    assert fix_rope_factors(foreign, 100) and foreign.rope_scaling["short_factor"] == LONGROPE["long_factor"]

    experts = CONFIG_MAPPING["phimoe"](rope_parameters={**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3})
    assert fix_rope_factors(experts, 100) and experts.rope_parameters["short_mscale"] == 1.3

    for rope_type in ("linear", "dynamic", "yarn", "llama3"):  # the same for rows of all lengths that models accept
        scaled = {"rope_type": rope_type, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        assert not fix_rope_factors(CONFIG_MAPPING["llama"](rope_parameters=scaled), 10**6)
