"""`python -m benchmarks.one_llm`: trains one LLM by `PolicyLearner` alone, from arrays, on a CPU or a GPU.

It needs PyTorch and transformers (for adapters PEFT too), but neither Ray nor vLLM nor an environment, so it measures
the learner on any machine. It prints a line per update, and then a JSON object.
"""

import argparse
import json
import resource
import tempfile
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from policies.learning.estimation import AdvantageEstimator
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows, make_rows
from policies.models.lora import Lora

SHAPES = {
    "5M": (256, 4, 4, 4096),
    "0.5B": (1024, 24, 16, 32000),
    "1.5B": (2048, 24, 16, 32000),
    "7B": (4096, 32, 32, 32000),
}
"""Width, layers, heads and vocabulary of random Llamas."""


def main() -> None:
    """Trains and prints the results."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:  # the reference is read from there when it is first needed
        measure(options, options.model or random_model(options.shape, folder))


def measure(options: argparse.Namespace, path: str) -> None:
    """Trains the model in a folder, and prints what that took."""
    device = torch.device(options.device)
    model = PolicyModel(
        path,
        critic=options.advantage == "gae",
        dtype=options.dtype,
        device=options.device,
        lora=Lora(options.lora_rank, 2.0 * options.lora_rank) if options.lora_rank else None,
        gradient_checkpointing=options.gradient_checkpointing,
    ).to(device)
    hyper = Hyperparameters(
        lr=1.41e-5,
        lr_schedule="constant",
        warmup_updates=0,
        num_updates=100,
        weight_decay=0.0,
        num_epochs=options.epochs,
        steps=options.steps,
        micro_batch_size=options.micro_batch_size,
        micro_batch_tokens=None,
        offload_optimizer=False,
        seed=0,
        advantage=options.advantage,
        gamma=1.0,
        lam=0.95,
        loss="ppo",
        clip_ratio=None,
        clip_ratio_high=None,
        dual_clip=None,
        entropy_coef=0.0,
        importance_sampling_mode="token_truncate",
        importance_sampling_clip_max=None,
        importance_sampling_clip_min=None,
        value_clip=0.2,
        value_coef=0.1,
        grad_clip=1.0,
        kl_coef=0.3,
        kl_estimator="k1",
        old_logprobs="learner",
        kl_target=None,
        kl_horizon=10_000,
        reward_scaling="none",
        gdpo_weights=(),
        overlong="keep",
        overlong_buffer=None,
        overlong_penalty=1.0,
        response_limits=(),
    )
    learner, estimation = PolicyLearner(model, hyper), AdvantageEstimator(hyper)
    rows = random_rows(options, model.lm.config.get_text_config().vocab_size)
    tokens = int(rows.mask.sum() + rows.prompt_mask.sum())
    trained = sum(parameter.numel() for parameter in learner.parameters)
    num_parameters = sum(parameter.numel() for parameter in model.lm.parameters())
    print(
        f"{num_parameters / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained, {tokens} tokens a pass, on {device}"
    )
    seconds = []
    for update in range(options.updates):
        started = time.perf_counter()
        scored = rows.with_scores(learner.score(rows))
        estimates, _ = estimation.estimate(scored, rows.task_rewards.float())
        figures = learner.update(scored.with_estimates(estimates), update)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        print(f"update {update + 1}: {seconds[-1]:.2f} s, loss {figures['loss']:+.4f}", flush=True)
    fastest = min(seconds)
    passes = (
        2 + 3 * hyper.num_epochs
    )  # policy and reference score once; an epoch goes forward and, twice as dear, backward
    results = {
        "seconds_per_update": fastest,
        "tokens_per_second": hyper.num_epochs * tokens / fastest,
        "teraflops": 2e-12 * passes * num_parameters * tokens / fastest,
        "peak_gb": peak_memory(device) / 1e9,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "options": vars(options),
    }
    print(json.dumps(results, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_llm", description=__doc__)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--model", help="a folder or hub id")
    group.add_argument("--shape", choices=SHAPES, default="5M", help="a random Llama of about this size (default: 5M)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bf16", "fp32"), help="compute type")
    parser.add_argument("--rows", type=int, default=64, help="responses per update (default: 64)")
    parser.add_argument("--prompt", type=int, default=32, help="longest prompt, in tokens (default: 32)")
    parser.add_argument("--response", type=int, default=32, help="longest response, in tokens (default: 32)")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="responses per forward pass (default: 16)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the rows (default: 2)")
    parser.add_argument("--steps", type=int, default=2, help="mini-batches per pass (default: 2)")
    parser.add_argument("--advantage", default="gae", choices=("gae", "reinforce"), help="with or without a critic")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank (default: all weights)")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--updates", type=int, default=3)
    return parser.parse_args()


def random_model(shape: str, folder: str) -> str:
    """Writes a Llama with random weights, and returns its folder."""
    width, layers, heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=int(8 * width / 3) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def random_rows(options: argparse.Namespace, vocabulary: int) -> Rows:
    """Rows of random tokens; prompts and responses have from half of the longest to all of it."""
    random = np.random.default_rng(0)
    prompts, responses = (
        [
            random.integers(1, vocabulary, random.integers((limit + 1) // 2, limit + 1)).tolist()
            for _ in range(options.rows)
        ]
        for limit in (options.prompt, options.response)
    )
    rewards = random.normal(size=options.rows)
    logprobs = [[0.0] * len(response) for response in responses]
    return make_rows(prompts, responses, logprobs, rewards.tolist(), [False] * options.rows)


def peak_memory(device: torch.device) -> float:
    """Bytes at the peak: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
