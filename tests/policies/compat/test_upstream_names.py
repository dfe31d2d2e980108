"""The private interfaces of libraries that `policies.compat` uses still exist."""

from __future__ import annotations

import inspect
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager
from ray.tune import Trainable

from policies.compat.rllib import disable_runner_state_sync
from policies.compat.transformers import (
    adapters_disabled,
    attn_implementation,
    can_switch_attention,
    ignored_weights,
    no_split_classes,
)
from policies.compat.vllm import skip_token_ranks
from policies.generation.installed import vllm_installed

HIDDEN = 8


def source_contains(definition: Any, *names: str) -> bool:
    source = inspect.getsource(definition)
    return all(name in source for name in names)


def test_rllib_has_the_private_attributes_that_we_use() -> None:
    assert source_contains(EnvRunnerGroup.__init__, "self._worker_manager = FaultTolerantActorManager(")
    assert source_contains(LearnerGroup.__init__, "self._worker_manager = FaultTolerantActorManager(")
    assert {"actors", "is_actor_healthy", "set_actor_state", "foreach_actor", "clear"} <= {
        *dir(FaultTolerantActorManager)
    }
    assert source_contains(Trainable.__init__, "self._setup_logdir()") and source_contains(
        Trainable._setup_logdir, "self._storage"
    )
    assert source_contains(EnvRunnerGroup.__init__, "ray.put(") and source_contains(
        EnvRunnerGroup.sync_weights, "ray.put("
    )
    config = AlgorithmConfig()
    assert config._dont_auto_sync_env_runner_states is False
    disable_runner_state_sync(config)
    assert config._dont_auto_sync_env_runner_states is True


def test_transformers_has_the_private_attributes_that_we_use() -> None:
    config = transformers.GPT2Config(n_embd=HIDDEN, n_layer=1, n_head=1, vocab_size=HIDDEN)
    model = transformers.GPT2LMHeadModel(config)
    assert attn_implementation(model) in ("sdpa", "eager") and no_split_classes(model) == {"GPT2Block"}
    model.set_attn_implementation("eager")
    assert attn_implementation(model) == "eager" and can_switch_attention(model)
    assert isinstance(ignored_weights(model), tuple) and hasattr(model, "_keys_to_ignore_on_load_unexpected")


def test_without_adapters_disables_adapters_and_keeps_them_trainable() -> None:
    config = transformers.GPT2Config(n_embd=HIDDEN, n_layer=1, n_head=1, vocab_size=HIDDEN)
    model = peft.get_peft_model(
        transformers.GPT2LMHeadModel(config), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    )
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    with adapters_disabled(model):
        assert layers and all(layer.disable_adapters for layer in layers)
        assert any(parameter.requires_grad for parameter in model.parameters())
    assert not any(layer.disable_adapters for layer in layers)


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_vllm_has_the_private_attributes_that_we_use() -> None:
    from vllm.distributed import parallel_state
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.models.transformers import base
    from vllm.platforms.interface import Platform
    from vllm.triton_utils import dispatcher
    from vllm.v1.engine import core, core_client
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert source_contains(
        core_client, "engine_dead", "engine_manager", "outputs_queue", "utility_results", "_finalizer"
    )
    assert callable(core.cleanup_dist_env_and_memory) and callable(base.support_torch_compile)
    assert source_contains(WorkerLoRAManager, "self._adapter_manager") and source_contains(
        GPUModelRunner, "reload_weights"
    )
    assert callable(get_layerwise_info) and callable(Platform.get_punica_wrapper)
    assert callable(MultiprocExecutor._init_executor)
    assert source_contains(dispatcher._rebind_kernels, "sys.modules.values()") and source_contains(
        dispatcher.register_kernels, "_rebind_kernels("
    )
    assert source_contains(parallel_state.cleanup_dist_env_and_memory, "gc.collect()")  # engines of other tests wrap it
    assert source_contains(
        Sampler.gather_logprobs, "token_ranks = batched_count_greater_than(logprobs, token_logprobs)"
    )


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_engines_compute_no_ranks_of_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import sampler

    monkeypatch.setattr(sampler, "batched_count_greater_than", sampler.batched_count_greater_than)
    skip_token_ranks()
    logprobs = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]).log()
    tensors = sampler.Sampler.gather_logprobs(logprobs, 0, token_ids=torch.tensor([2, 0]))
    assert tensors.logprob_token_ids.tolist() == [[2], [0]] and tensors.selected_token_ranks.tolist() == [0, 0]
    torch.testing.assert_close(tensors.logprobs, logprobs[[0, 1], [2, 0]].unsqueeze(1))
