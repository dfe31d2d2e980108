"""`PolicyModel` against plain forward passes of the same models, the bundled one and tiny random ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows, make_rows
from policies.models.language_model import shared_base
from policies.models.model_check import ModelError
from policies.sync_check import perturb
from tests.policies.conftest import make_model

BUNDLED = str(DEFAULT_TOKENIZER)
VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
DROPPING = {"attention_dropout": 0.5}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        attn_pdrop=0.5,
        initializer_range=0.3,
    ),
    "llama, tied": LlamaConfig(**SIZES, **DROPPING, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**SIZES, **DROPPING, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, **DROPPING, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, **DROPPING, head_dim=8, tie_word_embeddings=True),
    "granite": GraniteConfig(**SIZES, **DROPPING, logits_scaling=4.0),  # divides its logits
    # In training mode it samples among experts with similar scores.
    "phimoe": PhimoeConfig(**SIZES, **DROPPING, num_local_experts=4, router_jitter_noise=0.5),
}
FAMILIES = ["bundled", *CONFIGS]
TIED = {"bundled": True, "gpt2": True, "llama, tied": True, "qwen3": True, "llama, untied": False, "qwen2": False}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder per family; all weights are random except the bundled model's."""
    folders = {"bundled": BUNDLED}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        folders[name] = str(tmp_path_factory.mktemp("model"))
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return folders


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, paths: dict[str, str]) -> str:
    return paths[request.param]


def build(path: str, *, dtype: str = "fp32", temperature: float = 1.0, **settings: int) -> PolicyModel:
    """A model whose value head is not zero."""
    module = make_model(path, dtype=dtype, temperature=temperature, **settings)
    torch.nn.init.normal_(module.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(module.value_head.bias, 0.5)
    return module


def values_of(module: PolicyModel, rows: Rows) -> Tensor:
    values: Tensor | None = module(rows)[1]
    assert values is not None
    return values


PROMPT_LENGTHS, RESPONSE_LENGTHS = [3, 11, 1, 7], [5, 2, 6, 1]


def ragged() -> Rows:
    """Four rows of different prompt and response lengths; none has both the longest prompt and response."""
    random = np.random.default_rng(0)
    prompts, responses = (
        [random.integers(1, VOCAB, length).tolist() for length in lengths]
        for lengths in (PROMPT_LENGTHS, RESPONSE_LENGTHS)
    )
    logprobs = [[0.0] * length for length in RESPONSE_LENGTHS]
    return make_rows(prompts, responses, logprobs, [0.0] * 4, [False] * 4)


def unpadded(rows: Rows) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Row number, prompt `[1, p]` and response `[1, r]`, without padding."""
    for row, (p, r) in enumerate(zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)):
        yield row, rows.prompts[row : row + 1, -p:], rows.responses[row : row + 1, :r]


@torch.no_grad()
def plain_logprobs(module: PolicyModel, rows: Rows, temperature: float = 1.0) -> list[Tensor]:
    """Log-probabilities of each response `[r]`, from a plain forward pass of its unpadded row."""
    out = []
    for _, prompt, response in unpadded(rows):
        logits = module.lm(torch.cat([prompt, response], 1)).logits[0, prompt.shape[1] - 1 : -1] / temperature
        out.append(logits.log_softmax(-1).gather(1, response[0].unsqueeze(1)).squeeze(1))
    return out


def max_difference(padded: Tensor, single: list[Tensor]) -> float:
    """Largest difference between padded `[B, R]` numbers and unpadded ones."""
    return max(float((padded[row, : len(x)] - x).detach().abs().max()) for row, x in enumerate(single))


def test_a_reference_with_bf16_linear_layers_scores_like_one_under_autocast(path: str) -> None:
    module, rows = build(path, dtype="bf16"), ragged()
    expected = module.score(rows).columns()["reference_logprobs"]
    cpu = torch.device("cpu")
    reference = shared_base(path, cpu, linear_dtype=torch.bfloat16, eager=module._eager(cpu))
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.float32, torch.bfloat16}
    module._reference = [reference]
    assert torch.equal(module.score(rows).columns()["reference_logprobs"], expected)


def test_padding_changes_neither_log_probabilities_nor_values(path: str) -> None:
    module, rows = build(path), ragged()
    with torch.no_grad():
        logprobs, values, _ = module(rows)
        hidden = [
            module.lm(torch.cat([prompt, response], 1), output_hidden_states=True).hidden_states[-1][0]
            for _, prompt, response in unpadded(rows)
        ]
    assert max_difference(logprobs, plain_logprobs(module, rows)) < 1e-5
    before = [
        states[p - 1 : -1] @ module.value_head.weight[0] + module.value_head.bias
        for states, p in zip(hidden, PROMPT_LENGTHS, strict=True)
    ]
    assert max_difference(values, before) < 1e-5


def test_scoring_gives_the_log_probabilities_of_training(path: str) -> None:
    module, rows = build(path), ragged()
    trained = module(rows)[0]
    assert trained.requires_grad
    scored = module.score(rows)
    assert not any(column.requires_grad for column in scored.columns().values())
    torch.testing.assert_close(scored.logprobs, trained.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["bundled", "gpt2"])
def test_without_positions_from_the_mask_gpt2_would_score_wrongly(family: str, paths: dict[str, str]) -> None:
    module, rows = build(paths[family]), ragged()
    tokens = torch.cat([rows.prompts, rows.responses], 1)
    mask = torch.cat([rows.prompt_mask, rows.mask.long()], 1)
    with torch.no_grad():
        naive = module.lm(tokens, attention_mask=mask).logits[:, rows.prompts.shape[1] - 1 : -1]
    chosen = naive.log_softmax(-1).gather(2, rows.responses.unsqueeze(2)).squeeze(2)
    assert max_difference(chosen, plain_logprobs(module, rows)) > 0.01


def test_the_temperature_divides_the_logits_of_policy_and_reference(path: str) -> None:
    module, rows = build(path, temperature=0.7), ragged()
    single = plain_logprobs(module, rows, temperature=0.7)
    assert max_difference(module(rows)[0], single) < 1e-5
    assert max_difference(module.score(rows).columns()["reference_logprobs"], single) < 1e-5
    assert max_difference(build(path).score(rows).logprobs, single) > 1e-3


def test_keeping_only_the_response_s_logits_changes_nothing(path: str) -> None:
    module, rows = build(path), ragged()
    assert module._supports_logits_to_keep
    expected = module.score(rows).columns()
    module._supports_logits_to_keep = False  # as for the few families without that argument
    for name, column in module.score(rows).columns().items():
        torch.testing.assert_close(column, expected[name], rtol=0, atol=1e-5)


def test_the_kl_is_zero_until_the_weights_change(path: str) -> None:
    module, rows = build(path), ragged()
    before = module.score(rows)
    mask = rows.mask.bool()
    # Equal weights at other memory addresses: some processors round differently.
    torch.testing.assert_close(
        before.columns()["full_kl"][mask], torch.zeros_like(before.columns()["full_kl"][mask]), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(before.logprobs[mask], before.columns()["reference_logprobs"][mask], rtol=0, atol=1e-5)
    module.load(perturb(module.state(), seed=0))
    after = module.score(rows)
    assert (after.columns()["full_kl"][mask] > 1e-4).all()
    assert torch.equal(after.columns()["reference_logprobs"], before.columns()["reference_logprobs"])


def test_forward_passes_of_training_agree_with_each_other_and_with_scoring(path: str) -> None:
    module, rows = build(path), ragged()
    mask = rows.mask.bool()
    scored = module.score(rows)
    module.train()
    first, second = module(rows)[:2], module(rows)[:2]
    assert module.training
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    for after in (scored, module.score(rows)):  # before and after the model was first in train mode
        torch.testing.assert_close(first[0][mask], after.logprobs[mask], rtol=0, atol=1e-5)


def test_the_reference_is_one_frozen_object_that_no_module_owns(path: str) -> None:
    one, two = build(path), build(path)
    reference = one.reference()
    assert two.reference() is reference and one.reference() is reference
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    frozen = {p.data_ptr() for p in reference.parameters()}
    for module in (one, two):
        assert frozen.isdisjoint(p.data_ptr() for p in module.parameters())
        assert reference not in list(module.modules())
        assert all(p.requires_grad for p in module.parameters())
        assert {name.split(".")[0] for name in (*module.state(), *module.state_dict())} == {"lm", "value_head"}


def test_loading_a_state_restores_every_weight_even_from_read_only_arrays(path: str) -> None:
    source, target, rows = build(path), build(path), ragged()
    state = perturb(source.state(), seed=1)
    for array in state.values():
        array.setflags(write=False)
    source.load(state)
    target.load(source.state())
    assert state.keys() == target.state().keys()
    for name, array in target.state().items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, state[name])
    for name, column in source.score(rows).columns().items():
        assert torch.equal(column, target.score(rows).columns()[name])


def test_a_state_is_a_copy_that_later_steps_do_not_change(path: str) -> None:
    module = build(path)
    state = module.state()
    expected = {name: array.copy() for name, array in state.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    for name, array in state.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("family", TIED)
def test_tied_weights_appear_once_and_stay_tied(family: str, paths: dict[str, str]) -> None:
    module = build(paths[family])
    state = module.state()
    assert ("lm.lm_head.weight" in state) == (not TIED[family])
    module.load(perturb(state, seed=2))
    head, embedding = module.lm.get_output_embeddings().weight, module.lm.get_input_embeddings().weight
    assert (head is embedding) == TIED[family]


def test_the_value_head_starts_at_zero_so_that_values_are_zero() -> None:
    assert (values_of(make_model(BUNDLED), ragged()) == 0).all()


def test_without_a_critic_there_is_no_value_head() -> None:
    model = make_model(BUNDLED, advantage="reinforce")
    assert model(ragged())[1] is None and model.score(ragged()).values is None
    assert {name.split(".")[0] for name in model.state()} == {"lm"}
    with pytest.raises(KeyError, match="value_head"):
        build(BUNDLED).load(model.state())


def test_bf16_computes_over_fp32_weights(path: str) -> None:
    full, half, rows = build(path), build(path, dtype="bf16"), ragged()
    logprobs, values, _ = half(rows)
    assert {logprobs.dtype, values.dtype} == {torch.float32}
    (logprobs.sum() + values.sum()).backward()
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in half.parameters() if p.grad is not None} == {torch.float32}
    assert {array.dtype for array in half.state().values()} == {np.dtype(np.float32)}
    difference = (logprobs - full(rows)[0]).abs() * rows.mask
    assert 1e-5 < difference.max().item() < 0.2
    assert (half.score(rows).columns()["full_kl"] * rows.mask == 0).all()


def test_the_error_for_a_folder_without_a_model_is_one_line_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"^[^\n]+`{tmp_path}`: [^\n]+$"):
        build(str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "max_length", "eager"), [("bf16", 79, True), ("bf16", 144, False), ("fp32", 79, False)]
)
def test_a_run_uses_one_attention_so_that_a_row_s_scores_do_not_depend_on_its_batch(
    dtype: str, max_length: int, eager: bool
) -> None:
    module = build(BUNDLED, dtype=dtype, max_prompt_tokens=max_length - 15, max_response_tokens=15)
    prompts, responses = [[*range(30, 52)], [*range(100, 96 + max_length - 8)]], [[61, 7, 940, 12], [5, 6, 7, 8]]
    logprobs = [[0.0] * 4] * 2
    single = make_rows(prompts[:1], responses[:1], logprobs[:1], [0.0], [False])
    batch = make_rows(prompts, responses, logprobs, [0.0] * 2, [False] * 2)
    for name in ("logprobs", "reference_logprobs"):
        ours, theirs = (module.score(rows).columns()[name][0] for rows in (single, batch))
        # Fused attention sums in blocks whose size depends on the width; another implementation differs by 0.06.
        assert (ours - theirs).abs().max() < (1e-4 if dtype == "fp32" else 0.02)
    for lm in (module.lm, module.reference()):
        assert (lm.config._attn_implementation == "eager") is eager
