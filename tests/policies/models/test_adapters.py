"""Adapters on one shared base, on the bundled model and a small Llama."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.learning.rows import make_rows
from policies.models.adapters import add_lora, linear_layers, peft_config, peft_names
from policies.models.language_model import load_language_model, shared_base
from policies.models.lora import Lora
from policies.models.model_check import ModelError
from tests.policies.conftest import make_model

CPU = torch.device("cpu")
BUNDLED = str(DEFAULT_TOKENIZER)
TOKENS = torch.arange(5, 25).reshape(2, 10)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3)
    folder = str(tmp_path_factory.mktemp("llama"))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(params=["gpt2", "llama"])
def path(request: pytest.FixtureRequest, llama: str) -> str:
    return BUNDLED if request.param == "gpt2" else llama


def move(model: torch.nn.Module, seed: int) -> None:
    """Gives an adapter weights far from its initial ones."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1, generator=random)


def test_a_new_adapter_computes_like_the_base_and_changing_it_affects_no_other_model(
    path: str,
) -> None:
    base = shared_base(path, CPU)
    before = base(TOKENS).logits
    one, two = add_lora(base, Lora(4, 8.0)), add_lora(base, Lora(4, 8.0))
    assert torch.equal(one(TOKENS).logits, before)
    move(one, seed=1)
    assert (one(TOKENS).logits - before).abs().max() > 0.1
    assert torch.equal(two(TOKENS).logits, before)
    assert torch.equal(base(TOKENS).logits, before)


def test_adapters_share_every_tensor_of_the_base_and_own_only_trainable_ones(path: str) -> None:
    base = shared_base(path, CPU)
    shared = {id(parameter) for parameter in base.parameters()}
    for model in (add_lora(base, Lora(4, 8.0)), add_lora(base, Lora(4, 8.0))):
        names = {name for name, parameter in model.named_parameters() if id(parameter) not in shared}
        assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert names and all("lora_" in name for name in names)
        assert len(list(model.parameters())) == len(shared) + len(names)
    assert not any(parameter.requires_grad for parameter in base.parameters())


def test_every_adapter_gets_gradients_when_all_forward_passes_precede_one_backward_pass(path: str) -> None:
    base = shared_base(path, CPU)
    models = [add_lora(base, Lora(4, 8.0)) for _ in range(3)]
    for seed, model in enumerate(models):
        move(model, seed)
    torch.stack([model(TOKENS).logits.sum() for model in models]).sum().backward()
    for model in models:
        grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
    assert all(parameter.grad is None for parameter in base.parameters())


def test_a_new_adapter_depends_only_on_the_seed(path: str) -> None:
    states = [make_model(path, weights="lora", seed=seed).state() for seed in (3, 3, 4)]
    torch.rand(1)  # advances the global generator
    states.append(make_model(path, weights="lora", seed=3).state())
    assert all(np.array_equal(states[0][name], states[k][name]) for name in states[0] for k in (1, 3))
    assert any(not np.array_equal(states[0][name], states[2][name]) for name in states[0])


def test_the_reference_of_a_policy_with_an_adapter_is_its_base(path: str) -> None:
    one, two = (make_model(path, weights="lora") for _ in range(2))
    assert one.reference() is two.reference() is shared_base(path, CPU)


def test_a_state_has_only_adapter_and_value_head(path: str) -> None:
    full, module = make_model(path), make_model(path, weights="lora", lora_rank=2)
    state = module.state()
    assert all("lora_" in name or name.startswith("value_head.") for name in state)
    size = sum(array.size for array in state.values())
    assert size < 0.1 * sum(array.size for array in full.state().values())


def test_target_layers_can_be_named_and_unknown_ones_are_rejected(llama: str) -> None:
    base = shared_base(llama, CPU)
    assert linear_layers(base) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    names = {n for n, p in add_lora(base, Lora(2, 2.0, ("q_proj", "v_proj"))).named_parameters() if p.requires_grad}
    assert {name.split(".")[4] for name in names} == {"q_proj", "v_proj"}
    with pytest.raises(ModelError, match=r"no linear layer 'v_porj' to adapt\. It has down_proj, gate_proj"):
        add_lora(base, Lora(2, 2.0, ("q_proj", "v_porj")))


def test_gradient_checkpointing_does_not_change_gradients(path: str) -> None:
    logprobs = [[0.0] * 4] * 2
    rows = make_rows(TOKENS[:, :6].tolist(), TOKENS[:, 6:].tolist(), logprobs, [0.0] * 2, [False] * 2)
    grads = []
    for checkpointing in (False, True):
        module = make_model(path, weights="lora", gradient_checkpointing=checkpointing)
        move(module.lm, seed=1)
        layer = next(m for name, m in module.lm.named_modules() if name.endswith("mlp"))
        passes: list[object] = []
        layer.register_forward_pre_hook(lambda *_, passes=passes: passes.append(None))
        module.train()
        module(rows)[0].sum().backward()
        assert len(passes) == 1 + checkpointing  # recomputed in the backward pass
        grads.append({name: p.grad for name, p in module.trainable() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6)


def test_peft_loads_a_saved_adapter_with_the_same_logits(path: str, tmp_path: Path) -> None:
    lora = Lora(4, 12.0)
    model = add_lora(shared_base(path, CPU), lora)
    move(model, seed=5)
    peft_config(shared_base(path, CPU), lora).save_pretrained(tmp_path)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_file(peft_names(weights), tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(load_language_model(path), str(tmp_path))
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
