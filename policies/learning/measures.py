"""What is reported of an LLM's responses, from their scored rows."""

from __future__ import annotations

from torch import Tensor

from policies.learning import token_ppo


def measure_responses(rows: dict[str, Tensor], eval_kl_coef: float) -> dict[str, Tensor]:
    """What is reported of each response of one LLM.

    Args:
        rows: columns of `Rows` and of `CausalLMModule.score`.
        eval_kl_coef: weight of the KL in the combined reward (paper §5: own task reward - eta * summed KL).

    Returns:
        fp32 `[B]` each: `task_reward`, `kl` (nats, summed over the response), `combined_reward`, `response_length`
        (tokens), `eos_rate` (1 where it ends by itself), `repetition`.
    """
    kl = rows["full_kl"].sum(1)
    return {
        "task_reward": rows["task_rewards"],
        "kl": kl,
        "combined_reward": rows["task_rewards"] - eval_kl_coef * kl,
        "response_length": rows["mask"].sum(1),
        "eos_rate": rows["ended"],
        "repetition": token_ppo.repetition(rows["responses"], rows["mask"]),
    }


def measure(rows: dict[str, Tensor], eval_kl_coef: float) -> dict[str, float]:
    """What is reported of one LLM's scored rows; for the arguments see `measure_responses`.

    Returns:
        The means over responses of what `measure_responses` gives; means over tokens of `entropy` and
        `sampler_gap_mean` (|sampler - learner| log-probability), and `sampler_gap_max`, its largest; the deviation
        `task_reward_std`.
    """
    mask, tokens = rows["mask"], rows["mask"].sum()
    gap = (rows["sampler_logprobs"] - rows["logprobs"]).abs() * mask
    figures = {
        **{name: column.mean() for name, column in measure_responses(rows, eval_kl_coef).items()},
        "task_reward_std": rows["task_rewards"].std(unbiased=False),
        "entropy": rows["entropy"].sum() / tokens,
        "sampler_gap_mean": gap.sum() / tokens,
        "sampler_gap_max": gap.max(),
    }
    return {name: float(value) for name, value in figures.items()}
