"""What the figures of an update mean, as `metrics.jsonl` and trackers call them."""

FIGURES = {
    "task_reward": "Mean of what the task's reward gave the responses, not scaled or shared.",
    "kl": "Mean KL to the reference policy, in nats, summed over a response, over the whole vocabulary. Of a chain's "
    "last answer: from the sampled tokens, to the reference that is asked the bare query.",
    "combined_reward": "Mean of task reward less `eval_kl_coef` times KL. It chooses the best checkpoint.",
    "response_length": "Mean length of a response, in tokens.",
    "eos_rate": "Share of responses that ended by themselves, not at `max_response`.",
    "repetition": "Share of a response's pairs of neighbouring tokens that stand earlier in it too.",
    "seen_kl": "Of a chain's last answer: KL to the reference in the last agent's own prompt, as it is trained.",
    "task_reward_std": "Standard deviation of the task reward over responses.",
    "entropy": "Mean entropy of the policy over the vocabulary, in nats per token.",
    "sampler_gap_mean": "Mean |sampler − learner| log-probability of a token: whether engine and learner agree.",
    "sampler_gap_max": "The largest such difference.",
    "importance": "Mean of learner's / sampler's probability of a token, before `importance_cap`.",
    "kl_coef": "Weight of the KL penalty that the update learned with; it moves with `kl_control=adaptive` alone.",
    "score_mean": "Mean of what a response was paid by `credit`, before `score_scaling`.",
    "explained_variance": "Share of the variance of returns that the critic explains (`advantage=gae`).",
    "flat_groups": "Share of responses whose group was all paid alike, so teaches nothing (`rloo`, `grpo`, `dr_grpo`).",
    "policy_loss": "Mean of the clipped loss over response tokens, over all passes of the update.",
    "clip_fraction": "Share of tokens whose probability ratio was clipped.",
    "grad_norm": "Mean norm of the gradient over optimizer steps, before `grad_clip`.",
    "value_loss": "Mean loss of the critic over response tokens (`advantage=gae`).",
}
"""Of an LLM, a role or a held-out evaluation; `reward/NAME` besides, the mean of one of several reward functions."""
RUN_WIDE = {
    "update": "Updates done. Line 0 precedes training and holds an evaluation alone.",
    "roles": "Who played which role in this update, of several teams the first.",
    "exchanged": "Roles were exchanged after this update.",
    "exchanges": "Role exchanges so far.",
    "averaged": "All LLMs moved to the mean of their weights after this update.",
    "tokens": "Response tokens that this update's runners generated.",
    "tokens_per_second": "These per second of the rollout.",
    "truncated_prompts": "Prompts that were cut to `max_prompt`.",
    "reward_errors": "Chains that were dropped because their reward failed (`on_reward_error=skip`).",
    "weight_version_lag": "Updates by which the weights that sampled are behind those that learned.",
    "sampler_gap_mean": "Mean of the LLMs' `sampler_gap_mean`.",
    "sampler_gap_max": "Largest of the LLMs' `sampler_gap_max`.",
    "health": "Warnings that stand: the sign, whom it is of, in words, and for how many updates (docs/health.md).",
    "collapsed": "One of them is a sign of collapse.",
    "policy": "The figures of each LLM.",
    "role": "The figures of each role.",
    "evaluation": "Held out: the figures of each LLM alone on the bare query, and the `mean` over the LLMs; with "
    "`evaluate_average` those of `llm_mean`.",
    "last_answer": "Held out: the figures of the chain's last answer.",
    "seconds": "How long the phases took.",
}
"""Of an update as a whole."""
PHASES = {
    "rollout": "Chains were played, without rewards.",
    "reward": "Rewards were computed.",
    "learn": "Responses were scored, credited and learned from.",
    "sync": "LLMs were averaged, and weights sent to the engines.",
    "evaluate": "Held-out queries were played.",
    "total": "All of the update.",
}
"""Of `seconds`."""
