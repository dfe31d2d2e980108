"""Conflicts between settings: every message names the setting and a fix."""

from __future__ import annotations

from typing import Any

import pytest

from policies.settings.settings import SettingsError
from tests.paper import make_settings

GDPO: dict[str, Any] = {
    **{"advantage": "gdpo", "num_generations": 2, "queries_per_update": 128, "kl_estimator": "k3"},
    "reward": ["own:right", "own:short"],
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl_coeff": 0.1}, "Unknown setting `kl_coeff`. Did you mean `kl_coef`?"),
        ({"lr": -1}, "Setting `lr`=-1: Input should be greater than 0."),
        ({"num_updates": "many"}, "Setting `num_updates`='many'"),
        ({"lr": float("inf")}, "Setting `lr`=inf: Input should be a finite number."),
        ({"backend": "triton"}, "'vllm' or 'transformers'"),
        ({"queries_per_update": 12, "minibatch_size": 8}, "(queries_per_update=12). Valid sizes: 1, 2, 3, 4, 6, 12."),
        (
            {"queries_per_update": 3, "num_generations": 2, "minibatch_size": 4},
            "does not divide the 6 responses per policy and update",
        ),
        (
            {"queries_per_update": 3, "num_generations": 2, "minibatch_size": 4},
            "(queries_per_update=3). Valid sizes: 1, 2, 3, 6.",
        ),
        ({"num_agents": 4, "num_policies": 3}, "num_policies=3 is neither a divisor nor a multiple of num_agents=4."),
        (
            {"num_policies": 8, "queries_per_update": 6, "minibatch_size": 1},
            "queries_per_update=6 is not divisible by the 4 teams. Set a multiple.",
        ),
        (
            {"num_policies": 8, "queries_per_update": 32, "num_generations": 2, "minibatch_size": 3},
            "does not divide the 16 responses",
        ),
        ({"num_policies": 1, "queries_per_update": 3, "minibatch_size": 4}, "does not divide the 6 responses"),
        ({"credit": "chain", "partner_reward": 0.5}, "partner_reward=0.5 requires credit=sum. Set that, or partner"),
        ({"credit": "own"}, "credit=own is unknown. Set it to sum, chain, or your own function"),
        ({"credit": "own:scheme", "chain_gamma": 0.5}, "chain_gamma=0.5 requires credit=chain, or env. Set that, or"),
        (
            {"credit": "own:scheme", "reward_scope": "last", "knowledge_transfer": False},
            "reward_scope=last requires knowledge_transfer=true.",
        ),
        ({"chain_lam": 0.5}, "chain_lam=0.5 requires credit=chain, or env. Set that, or chain_lam=1.0."),
        (
            {"credit": "chain", "knowledge_transfer": False},
            "credit=chain requires knowledge_transfer=true. Set",
        ),
        (
            {"reward_scope": "last", "partner_reward": 0},
            "Role pioneer learns from no reward with partner_reward=0. Set credit=chain, or rew",
        ),
        (
            {"reward_scope": "last", "credit": "chain", "chain_gamma": 0},
            "with chain_gamma=0. Set chain_gamma",
        ),
        ({"reward_scope": "last", "knowledge_transfer": False}, "reward_scope=last requires knowledge_transfer=true."),
        ({"credit": "chain", "reward_scaling": "scale"}, "reward_scaling=scale requires credit=sum. Set that"),
        (
            {"credit": "chain", "chain_lam": 0.5, "advantage": "rloo", "num_generations": 4},
            "chain_lam=0.5 requires advantage=gae. Set that, or chain_lam=1.0.",
        ),
        ({"select_by": "mean"}, "select_by=mean requires eval_average=true. Set that, or select_by=bare."),
        ({"feedback": "task", "knowledge_transfer": False}, "feedback=task requires num_agents of 2 or more, and know"),
        ({"observer_prompt": "{query}{reference}{feedback}"}, "observer_prompt shows feedback, but the run has none."),
        ({"num_agents": 1, "select_by": "chain"}, "select_by=chain requires num_agents of 2 or more, and"),
        ({"warmup_updates": 5, "num_updates": 5}, "warmup_updates=5 is not below num_updates=5. Lower it."),
        ({"dynamic_sampling": 3}, "dynamic_sampling=3 requires advantage=rloo, grpo, dr_grpo or gdpo. Set that"),
        ({"dynamic_sampling": 0}, "Setting `dynamic_sampling`=0: Input should be greater than or equal to 1."),
        ({"overlong_buffer": 4}, "overlong_buffer=4 requires overlong=penalty. Set that, or overlong_buffer=null."),
        ({"overlong": "penalty"}, "overlong=penalty requires overlong_buffer below the length limit, usually"),
        ({"overlong": "penalty", "overlong_buffer": 15}, "overlong=penalty requires overlong_buffer below the"),
        (
            {"overlong": "penalty", "overlong_buffer": 2, "min_response_tokens": 4},
            "min_response_tokens=4 requires overlong=keep or mask. Set that, or",
        ),
        (
            {"advantage": "gdpo", "num_generations": 2, "kl_estimator": "k3"},
            "advantage=gdpo requires reward to be a list",
        ),
        ({**GDPO, "reward_scaling": "scale"}, "reward_scaling=scale requires an advantage other than gdpo"),
        (
            {**GDPO, "overlong": "penalty", "overlong_buffer": 2},
            "overlong=penalty requires an advantage other than gdpo",
        ),
        (
            {**GDPO, "num_generations": 1, "queries_per_update": 256},
            "advantage=gdpo requires num_generations of 2 or more (4 or 8 are usual)",
        ),
        (
            {**GDPO, "roles": [{"name": "solver"}, {"name": "critic", "reward": "own:critic"}]},
            "advantage=gdpo requires the same reward functions in all roles. Remove those of roles.",
        ),
        ({"advantage": "rloo"}, "advantage=rloo requires num_generations of 2 or more (4 or 8 are usual), not 1."),
        (
            {"advantage": "grpo", "num_generations": 2},
            "advantage=grpo has the KL in its loss: kl_estimator=k1. Set k3, or kl_coef=0.",
        ),
        ({"advantage": "dr_grpo", "num_generations": 2, "kl_estimator": "full"}, "kl_estimator=full. Set k3, or"),
        ({"advantage": "rloo", "num_generations": 2, "gamma": 0.9}, "gamma=0.9 requires advantage=gae or reinfo"),
        ({"seed": 2**31}, "Setting `seed`=2147483648: Input should be less than 2147483648."),
        ({"max_lag": 2}, "Setting `max_lag`=2: Input should be less than or equal to 1."),
        ({"max_lag": 1, "num_runners": 0, "backend": "transformers"}, "max_lag=1 requires num_runners of 1 or more."),
        ({"max_lag": 1, "importance_sampling_clip_max": None}, "max_lag=1 requires importance_sampling_clip_max. Set"),
        (
            {"importance_sampling_mode": "token_mask", "importance_sampling_clip_max": None},
            "importance_sampling_mode=token_mask requires importance_sampling_clip_max. Set that, or",
        ),
        ({"importance_sampling_clip_min": 2}, "Setting `importance_sampling_clip_min`=2: Input should be less than or"),
        (
            {"loss": "gspo"},
            "loss=gspo requires advantage=rloo, grpo, dr_grpo or gdpo. Set that, or loss=ppo.",
        ),
        (
            {"loss": "gspo", "advantage": "reinforce"},
            "loss=gspo requires advantage=rloo",
        ),
        ({"loss": "cispo", "dual_clip": 3}, "dual_clip=3.0 requires loss=ppo. Set that, or dual_clip=null."),
        ({"dual_clip": 1}, "Setting `dual_clip`=1: Input should be greater than 1."),
        ({"min_response_tokens": 9, "max_response_tokens": 8}, "min_response_tokens=9 requires max_response_tokens of"),
        ({"temperature": 0.005, "backend": "vllm"}, "backend=vllm requires temperature of 0.01 or more, not 0.005."),
        ({"kl_target": 6, "kl_horizon": 255}, "Set kl_horizon to 256 or more."),
        ({"kl_target": 6, "kl_coef": 0}, "kl_target=6.0 requires kl_coef above 0. Set that, or kl_target=null."),
        ({"kl_horizon": 2000}, "kl_horizon=2000 requires kl_target. Set that, or kl_horizon=10000."),
        (
            {"min_query_tokens": 9, "max_query_tokens": 8},
            "min_query_tokens=9 requires max_query_tokens of at least as many",
        ),
        ({"min_query_tokens": 2}, "min_query_tokens=2 requires max_query_tokens. Set that, or min_query_tokens=null."),
        ({"system_prompt": "Be kind."}, "system_prompt=Be kind. requires chat=true. Set that, or system_prompt=null."),
        ({"stop": ""}, "Setting `stop`='': String should have at least 1 character."),
        ({"quantization": "nf4", "backend": "transformers"}, "quantization=nf4 requires weights=lora."),
        ({"quantization": "nf4", "weights": "lora"}, "quantization=nf4 requires backend=transformers. Set"),
        (
            {"quantization": "nf4", "weights": "lora", "backend": "transformers"},
            "quantization=nf4 requires gpus_per_learner and gpus_per_runner",
        ),
        ({"lr": True}, "Setting `lr`=True: Input should be a valid number."),
        ({"exchange_period": False}, "Input should be a valid integer"),
        ({"prompt": "half \ud83d"}, "Setting `prompt`='half \\ud83d': should be text in UTF-8"),
        ({"model": ["a", "\ud83d"]}, "should be text in UTF-8"),
        ({"chat": True, "chat_date": "2026-99-99"}, "Setting `chat_date`='2026-99-99': month must be in 1..12."),
        ({"average_period": 5, "num_agents": 1}, "average_period=5 requires two or more LLMs with the same model."),
        ({"average_period": 5, "num_policies": 1, "minibatch_size": 512}, "Set that, or average_period=null."),
        ({"eval_average": True, "num_agents": 1}, "eval_average=true requires two or more LLMs with"),
        ({"average_tau": 0.5}, "average_tau=0.5 requires average_period. Set that, or average_tau=1.0."),
        ({"lora_rank": 8}, "lora_rank=8 requires weights=lora. Set that, or lora_rank=16."),
        ({"average_period": 2, "average_tau": 0}, "Setting `average_tau`=0: Input should be greater than 0"),
        (
            {"model": ["a", "b"], "num_agents": 3},
            "model lists 2 models for 3 LLMs. List one per LLM, or name a single one for all.",
        ),
        ({"model": [], "num_agents": 1}, "model lists 0 models for 1 LLMs"),
        ({"model": ["a", 1]}, "Setting `model`=['a', 1]: Input should be a valid string."),
        ({"model": ["a", "b"], "weights": "lora"}, "weights=lora requires a single base model, not a, b. Set"),
        ({"model": ["a", "b"], "average_period": 2}, "average_period=2 requires two or more LLMs with the same model"),
        (
            {"model": ["a", "b"], "eval_average": True, "select_by": "mean"},
            "eval_average=true requires two or more LLMs with the same model.",
        ),
        ({"num_learners": 3, "queries_per_update": 8, "minibatch_size": 8}, "not divisible by num_learners=3"),
        ({"offload_optimizer": True}, "offload_optimizer=true requires gpus_per_learner."),
        ({"torch_compile": True, "num_runners": 0}, "torch_compile=true requires num_runners of 1 or more."),
        ({"num_learners": 2, "gpus_per_learner": 0.5}, "num_learners=2 requires whole GPUs, as NCCL does. Set"),
        ({"shards_per_policy": 2, "num_learners": 3}, "shards_per_policy=2 requires num_learners=4, 2 per LLM, not 3."),
        ({"shards_per_policy": 1, "num_policies": 1}, "requires num_learners=1, 1 per LLM, not 0."),
        (
            {
                **{"shards_per_policy": 2, "num_learners": 4, "quantization": "nf4", "weights": "lora"},
                "backend": "transformers",
            },
            "quantization=nf4 requires shards_per_policy=1. Set that, or quantization=none.",
        ),
        ({"num_agents": 10**6}, "less than or equal to 32"),
        ({"num_runners": 10**6}, "less than or equal to 1024"),
        ({"num_learners": 10**6}, "less than or equal to 1024"),
        ({"num_policies": 10**6}, "less than or equal to 256"),
        (
            {"roles": [{"name": "a", "count": 10**9}, {"name": "b"}]},
            "The roles have 1000000001 agents, but a chain has",
        ),
        (
            {"roles": [{"name": "a", "repeat": 10**9}], "feedback": "a:b", "stop_when": "solved"},
            "The roles have 1000000000 agents, but a chain has at most 32. Lower count or repeat.",
        ),
        ({"num_agents": 2, "roles": [{"name": "a", "count": 33}]}, "The roles have 33 agents"),
        ({"queries_per_update": 10**16 + 61}, "Input should be less than or equal to 100000."),
        ({"num_generations": 10**9, "advantage": "rloo"}, "Input should be less than or equal to 1000."),
        ({"tensor_parallel_size": 2, "backend": "transformers"}, "tensor_parallel_size=2 requires backend=vllm. Set"),
        ({"weight_transfer": "gloo", "weights": "lora"}, "weight_transfer=gloo requires weights=full. Set that, or"),
        ({"weight_transfer": "gloo", "backend": "transformers"}, "weight_transfer=gloo requires backend=vllm"),
        (
            {"weight_transfer": "nccl", "gpus_per_learner": 0.5, "gpus_per_runner": 0.5},
            "weight_transfer=nccl requires whole GPUs for learners and runners (nccl), or",
        ),
        (
            {"weight_transfer": "ipc", "gpus_per_learner": 0.5, "gpus_per_runner": 0.5, "num_runners": 2},
            "weight_transfer=ipc requires whole",
        ),
        (
            {"tensor_parallel_size": 2, "num_runners": 0, "gpus_per_runner": 2},
            "tensor_parallel_size=2 requires num_runners of 1 or more",
        ),
        (
            {"num_runners": 0, "gpus_per_runner": 1, "gpus_per_learner": 0.5},
            "num_runners=0 generates in the driver, which uses one GPU, not 1.5. Set num_runners=1.",
        ),
        (
            {"num_runners": 0, "gpus_per_runner": 2, "num_learners": 1, "gpus_per_learner": 1},
            "which uses one GPU, not 2.",
        ),
        (
            {"weights": "lora", "gpus_per_runner": 0.5, "dtype": "fp32", "backend": "vllm"},
            "vLLM 0.32 does not support weights=lora dtype=fp32 on a GPU. Set dtype=bf16, or backend=transformers.",
        ),
        (
            {"tensor_parallel_size": 2, "gpus_per_runner": 0.5},
            "tensor_parallel_size=2 requires as many gpus_per_runner, or 0. Set that, or",
        ),
        ({"tensor_parallel_size": 2, "gpus_per_runner": 4}, "requires as many gpus_per_runner, or 0."),
        ({"tensor_parallel_size": 2}, "requires as many gpus_per_runner, or without GPUs as many runner_"),
    ],
)
def test_the_message_of_an_invalid_setting_names_it_and_a_fix(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        make_settings(values)
    assert message in str(raised.value)
