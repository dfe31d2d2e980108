"""Descriptions of metrics, by their names in `metrics.jsonl` and trackers; `report.Report` describes the others."""

METRIC_DOCS = {
    "task_reward": "Mean task reward of the responses, before `credit` and `reward_scaling`.",
    "kl": "Mean KL to the reference policy per response, in nats, summed over tokens and computed over the whole "
    "vocabulary. Policy and reference are given the same prompt. Not in `last_response`.",
    "kl_k3": "Only in training, instead of `kl`, if policies do not score their responses before they train: the KL "
    "estimated by k3 from the sampled tokens. That is so with `old_logprobs=sampler`, and if an update is one "
    "optimizer step and the KL is in the loss.",
    "bare_kl": "Only in `last_response`: KL if the reference is given the bare query, estimated from the sampled "
    "tokens. In files of earlier versions it is named `kl`.",
    "combined_reward": "Mean of task reward minus `eval_kl_coef` times KL (in `last_response`: `bare_kl`; in place of "
    "`kl`, `kl_k3`). It selects the best checkpoint.",
    "response_length": "Mean response length, in tokens.",
    "eos_rate": "Share of responses that end with a stop token, not at the length limit.",
    "repetition": "Share of a response's pairs of adjacent tokens that occur earlier in it.",
    "thought_cut_rate": "Share of responses that end within their thought, without an end tag, so they have no answer "
    "(`thinking`).",
    "in_chain_kl": "Only in `last_response`: KL if the reference is given the last agent's own prompt, as in training; "
    "computed like `kl`.",
    "chain_tokens": "In `final.json` and evaluations, if chains can stop: tokens that a chain generated for a query.",
    "task_reward_std": "Standard deviation of the task reward over responses.",
    "entropy": "Mean entropy of the policy over the vocabulary, in nats per token; with `kl_k3`, estimated from the "
    "sampled tokens.",
    "logprob_diff_mean": "Mean |sampler − learner| log-probability per token; near 0 if engine and learner agree. "
    "If policies do not score their responses, of the first mini-batch.",
    "logprob_diff_max": "Maximum |sampler − learner| log-probability per token.",
    "importance_sampling_ratio": "Mean ratio of the learner's to the sampler's probability per token, before "
    "`importance_sampling_clip_max`.",
    "importance_sampling_frac_high": "Share of tokens whose importance sampling weight was above "
    "`importance_sampling_clip_max`, so it was truncated or masked (`importance_sampling_mode`).",
    "importance_sampling_frac_low": "The same for weights below `importance_sampling_clip_min`.",
    "kl_coef": "Weight of the KL penalty in the update; changes only with `kl_target`.",
    "credited_reward": "Mean reward that `credit` assigned to a response, with the `overlong` penalty, before "
    "`reward_scaling`.",
    "explained_variance": "Share of the variance of returns that the critic explains (`advantage=gae`).",
    "frac_zero_std": "Share of responses in zero-variance groups, which contribute only their KL (`rloo`, `grpo`, "
    "`dr_grpo`, `gdpo`).",
    "frac_alone": "Share of responses in an environment without any other to compare with (`rloo`, `grpo`, `dr_grpo`); "
    "their advantage is 0.",
    "overlong_penalty": "Mean penalty added to the reward of a response near the length limit (`overlong=penalty`).",
    "policy_loss": "Mean policy loss per response token, over all epochs of the update. With `loss=gspo`, here and in "
    "the following shares, the mean over responses of their means.",
    "clip_fraction": "Share of tokens whose probability ratio was clipped; with `loss=gspo` of responses.",
    "dual_clip_fraction": "Share of tokens whose loss `dual_clip` bounded; they have no gradient.",
    "grad_norm": "Mean gradient norm over optimizer steps, before `grad_clip`.",
    "value_loss": "Mean loss of the critic per response token (`advantage=gae`).",
}
"""Metrics of an LLM, a role or an evaluation; with several reward functions, also `reward/NAME`, the mean of each."""
PHASE_DOCS = {
    "rollout": "Generation of responses, without rewards.",
    "reward": "Computation of rewards.",
    "learn": "Scoring, credit assignment and optimization.",
    "sync": "Averaging of LLMs, and weight sync to the engines.",
    "evaluate": "Evaluation on held-out queries.",
    "total": "The whole update.",
}
"""Keys of `seconds`."""
