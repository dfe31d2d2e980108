"""What the figures of an update mean, as `metrics.jsonl` and trackers call them; the rest is in `report.Report`."""

METRICS = {
    "task_reward": "Mean of what the task's reward gave the responses, not scaled or shared.",
    "kl": "Mean KL to the reference policy, in nats, summed over a response, over the whole vocabulary. Of a chain's "
    "last answer: from the sampled tokens, to the reference that is asked the bare query.",
    "combined_reward": "Mean of task reward less `eval_kl_coef` times KL. It chooses the best checkpoint.",
    "response_length": "Mean length of a response, in tokens.",
    "eos_rate": "Share of responses that ended by themselves, not at `max_response_tokens`.",
    "repetition": "Share of a response's pairs of neighbouring tokens that stand earlier in it too.",
    "in_chain_kl": "Of a chain's last answer: KL to the reference in the last agent's own prompt, as it is trained.",
    "task_reward_std": "Standard deviation of the task reward over responses.",
    "entropy": "Mean entropy of the policy over the vocabulary, in nats per token.",
    "logprob_diff_mean": "Mean |sampler − learner| log-probability of a token: whether engine and learner agree.",
    "logprob_diff_max": "The largest such difference.",
    "importance_sampling_ratio": "Mean of learner's / sampler's probability of a token, before "
    "`importance_sampling_clip_max`.",
    "kl_coef": "Weight of the KL penalty that the update learned with; it moves with `kl_control=adaptive` alone.",
    "credited_reward": "Mean of what a response was paid by `credit`, before `reward_scaling`.",
    "explained_variance": "Share of the variance of returns that the critic explains (`advantage=gae`).",
    "frac_zero_std": "Share of responses in zero-variance groups, which teach nothing (`rloo`, `grpo`, `dr_grpo`).",
    "policy_loss": "Mean of the clipped loss over response tokens, over all passes of the update.",
    "clip_fraction": "Share of tokens whose probability ratio was clipped.",
    "grad_norm": "Mean norm of the gradient over optimizer steps, before `grad_clip`.",
    "value_loss": "Mean loss of the critic over response tokens (`advantage=gae`).",
}
"""Of an LLM, a role or a held-out evaluation; `reward/NAME` besides, the mean of one of several reward functions."""
PHASES = {
    "rollout": "Chains were played, without rewards.",
    "reward": "Rewards were computed.",
    "learn": "Responses were scored, credited and learned from.",
    "sync": "LLMs were averaged, and weights sent to the engines.",
    "evaluate": "Held-out queries were played.",
    "total": "All of the update.",
}
"""Of `seconds`."""
