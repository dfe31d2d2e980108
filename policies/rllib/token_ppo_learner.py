"""Token-level PPO for several LLMs in one RLlib Learner, with an update step of its own.

RLlib's step forwards all modules and then runs one backward, wraps modules in DDP and averages per rank. Here each
LLM, in sorted order, is taken micro-batch by micro-batch through forward, loss and backward; every loss is a sum
divided by the mini-batch's count of response tokens; gradients are added over ranks once per optimizer step.

Several learners share the work, not the data: each holds the whole batch (token ids are small), takes every n-th of the
rows that it has to forward, sorted by length, and gets the others' scores. So statistics over the batch are the same
on all ranks as they stand, mini-batches hold the same rows, and the gradient is the same with one learner or several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from torch import Tensor

from policies.generation.generator import Weights
from policies.learning import token_ppo
from policies.learning.advantages import GROUPED, reinforce
from policies.learning.measures import measure, measure_responses
from policies.learning.rows import Rows, by_length, micro_batches, take
from policies.rllib.causal_lm_module import SCORES
from policies.rllib.token_batch import TokenBatch
from policies.settings.settings import Settings

UPDATE = "update"


class NonFiniteUpdate(RuntimeError):
    """A gradient is NaN or infinite; the weights are as they were before this optimizer step.

    Attributes:
        module_id: the LLM.
        update: the update, counted from 1.
        rows: all that the LLM was to learn from in this update, `[B]` and `[B, R]` columns by name, on the CPU.
    """

    def __init__(self, module_id: str, update: int, rows: dict[str, Tensor]) -> None:
        """Keeps what a process on another machine needs to tell."""
        super().__init__(module_id, update, rows)
        self.module_id, self.update, self.rows = module_id, update, rows

    def __str__(self) -> str:
        broken = [name for name, column in self.rows.items() if not bool(column.isfinite().all())]
        where = f"so are {', '.join(broken)} in its batch" if broken else "its batch is finite"
        return (
            f"The gradient of {self.module_id} is not finite in update {self.update} ({where}). The step was refused: "
            "its weights are as they were before it. A smaller lr, a larger kl_coef or dtype=fp32 usually helps."
        )


class TokenPPOLearner(PPOTorchLearner):
    """Trains every LLM on its own responses (paper Algorithm 1, lines 14-16)."""

    def build(self) -> None:
        """Builds modules and optimizers."""
        self.settings: Settings = self.config.settings
        critic = self.settings.critic
        self._scored = (*SCORES, "values") if critic else SCORES
        self._trained = ("policy_loss", "clip_fraction", "grad_norm", *(("value_loss",) if critic else ()))
        super().build()
        self.start_afresh()
        self._update_index = 0
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._totals: dict[str, dict[str, float]] = {}

    def start_afresh(self) -> None:
        """Forgets what was learned beside the weights, for every LLM: Adam's moments, KL coefficient, score moments."""
        for optimizer in self._optimizer_parameters:
            optimizer.state.clear()
        self.kl_coefs = dict.fromkeys(sorted(self.module.keys()), self.settings.kl_coef)
        self.score_moments = {module_id: token_ppo.ScoreMoments() for module_id in sorted(self.module.keys())}

    def _make_modules_ddp_if_necessary(self) -> None:
        """No DDP: all ranks start from rank 0's weights and add their gradients up themselves."""
        if self._place()[1] > 1:
            for module_id in sorted(self.module.keys()):
                for parameter in self.get_parameters(self.module[module_id]):
                    dist.broadcast(parameter.data, src=0)

    # One update, from top to bottom.

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Learns which update this is; mini-batches are drawn from (seed, update)."""
        super().before_gradient_based_update(timesteps=timesteps)
        self._update_index = int(timesteps[UPDATE])

    def _create_iterator_if_necessary(
        self, *, training_data: Any, num_epochs: int = 1, minibatch_size: int | None = None, **kwargs: Any
    ) -> Iterator[MultiAgentBatch]:
        """Scores the batch once, computes advantages once, then deals out mini-batches.

        Replaces RLlib's cyclic iterator, which repeats rows when sizes do not divide and shuffles by a global RNG.
        """
        batch = self._make_batch_if_necessary(training_data=training_data)
        self._totals = {}
        rows = {mid: self._to_device(batch.policy_batches[mid]) for mid in sorted(batch.policy_batches)}
        for module_id, columns in rows.items():
            columns.update(self._score(module_id, columns))
        self._compute_advantages(rows)
        self._rows = rows
        return self._minibatches(rows)

    def _score(self, module_id: str, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """What `CausalLMModule.score` gives, `[B, R]` each, zero outside the mask; every learner must call it alike."""
        rank, ranks = self._place()
        own = by_length(rows)[rank::ranks]
        scores = torch.zeros(len(self._scored), *rows["mask"].shape, device=self._device)
        module = self.module[module_id].unwrapped()
        for index, micro in micro_batches(take(rows, own), self.settings.micro_batch) if len(own) else ():
            scored = module.score(micro)
            for place, name in enumerate(self._scored):
                scores[place, own[index], : scored[name].shape[1]] = scored[name]
        if ranks > 1:
            dist.all_reduce(scores)  # what another rank scored is zero here
        return dict(zip(self._scored, scores * rows["mask"], strict=True))

    def _place(self) -> tuple[int, int]:
        """This learner's rank, and the number of learners."""
        return (dist.get_rank(), dist.get_world_size()) if self.config.num_learners > 1 else (0, 1)

    def _compute_advantages(self, rows: dict[str, dict[str, Tensor]]) -> None:
        """Adds `kl` and what `_estimate` gives to the rows, and logs the batch."""
        s = self.settings
        for module_id, columns in rows.items():
            mask, logprobs, reference = columns["mask"], columns["logprobs"], columns["reference_logprobs"]
            if s.kl_estimator == "full":
                columns["kl"] = columns["full_kl"]
            else:
                columns["kl"] = token_ppo.sampled_kl(logprobs, reference, s.kl_estimator) * mask
            score_mean, _ = self.score_moments[module_id].update(columns["rewards"])
            scores = self.score_moments[module_id].scale(columns["rewards"], s.score_scaling)
            columns.update(self._estimate(columns, scores, self.kl_coefs[module_id]))
            measured = measure(columns, s.report_kl_coef)
            measured |= {"kl_coef": self.kl_coefs[module_id], "score_mean": score_mean}
            if s.critic:
                explained = token_ppo.explained_variance(columns["values"], columns["returns"], mask)
                measured["explained_variance"] = explained
            self._log(module_id, measured)

    def _estimate(self, rows: dict[str, Tensor], scores: Tensor, kl_coef: float) -> dict[str, Tensor]:
        """The `advantages` of one LLM's rows, and with a critic their `returns`; `[B, R]` each.

        Args:
            rows: with `kl`.
            scores: `[B]`, scaled rewards of whole responses.
            kl_coef: weight of the KL in the reward; not used where it is in the loss.
        """
        s, mask = self.settings, rows["mask"]
        rewards = token_ppo.token_rewards(scores, rows["kl"], mask, kl_coef)
        if s.critic:
            advantages, returns = token_ppo.gae(rewards, rows["values"], mask, s.gamma, s.lam)
            moments = token_ppo.masked_moments(advantages, mask)
            return {"advantages": token_ppo.whiten(advantages, mask, moments), "returns": returns}
        if s.advantage == "reinforce":
            return {"advantages": reinforce(rewards, mask, s.gamma)}
        compared = GROUPED[s.advantage](scores if s.kl_in_loss else rewards.sum(1), rows["queries"])
        return {"advantages": compared.unsqueeze(1) * mask}

    def _minibatches(self, rows: dict[str, dict[str, Tensor]]) -> Iterator[MultiAgentBatch]:
        """This learner's shares of the mini-batches: a permutation drawn from (seed, update, epoch, LLM), split evenly.

        All learners draw the same. A share may be empty, then its LLM is missing from it.
        """
        s, (rank, ranks) = self.settings, self._place()
        steps = s.responses // s.minibatch
        for epoch in range(s.epochs):
            parts: dict[str, Sequence[np.ndarray]] = {}
            for place, (module_id, columns) in enumerate(rows.items()):
                random = np.random.default_rng([s.seed, self._update_index, epoch, place])
                parts[module_id] = np.array_split(random.permutation(len(columns["mask"])), steps)
            for step in range(steps):
                batches = {}
                for module_id, columns in rows.items():
                    part = take(columns, torch.from_numpy(parts[module_id][step]).to(self._device))
                    if ranks > 1:
                        part = take(part, by_length(part)[rank::ranks])
                    if len(part["mask"]):
                        batches[module_id] = SampleBatch(part)
                yield MultiAgentBatch(batches, env_steps=sum(len(batch) for batch in batches.values()))

    def _uncompiled_update(self, batch: dict[str, Any], **kwargs: Any) -> tuple[Any, dict[str, float], Any]:
        """One optimizer step: forward, loss and backward per LLM and micro-batch, then gradients summed over ranks.

        Raises:
            NonFiniteUpdate: before any weight changed.
        """
        modules = sorted(self.module.keys())
        masks = [batch[mid]["mask"] if mid in batch else torch.zeros(1, device=self._device) for mid in modules]
        tokens = token_ppo.sum_over_ranks(torch.stack([mask.sum() for mask in masks]).double())
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        losses = torch.zeros_like(tokens)
        for place, module_id in enumerate(modules):
            if module_id not in batch:
                continue
            for _, micro in micro_batches(dict(batch[module_id]), self.settings.micro_batch):
                fwd_out = self.module[module_id].forward_train(micro)
                loss = self.compute_loss_for_module(
                    module_id=module_id, config=self.config, batch=micro, fwd_out=fwd_out
                )
                loss = loss / tokens[place].float()
                loss.backward()
                losses[place] += loss.detach()
        trained = [module_id for module_id, count in zip(modules, tokens.tolist(), strict=True) if count]
        self._sum_gradients_over_ranks(trained)
        norms = {module_id: self._clip_gradients(module_id) for module_id in trained}
        for module_id in trained:
            self._add(module_id, "grad_norm", norms[module_id], 1.0)
            self.get_optimizer(module_id).step()
        return None, dict(zip(modules, token_ppo.sum_over_ranks(losses).tolist(), strict=True)), {}

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Tensor], fwd_out: dict[str, Tensor]
    ) -> Tensor:
        """One LLM's loss, *summed* over response tokens; a scalar.

        The clipped policy loss; with a critic `value_coef` times the clipped value loss, or, where the KL is in the
        loss, `kl_coef` times its k3 estimate (GRPO).
        """
        s, mask = self.settings, batch["mask"]
        tokens, logprobs = float(mask.sum()), fwd_out[Columns.ACTION_LOGP]
        policy, clipped = token_ppo.policy_loss(logprobs, batch["logprobs"], batch["advantages"], s.clip)
        loss = (policy * mask).sum()
        self._add(module_id, "policy_loss", loss.item(), tokens)
        self._add(module_id, "clip_fraction", (clipped * mask).sum().item(), tokens)
        if s.critic:
            value = token_ppo.value_loss(fwd_out[Columns.VF_PREDS], batch["values"], batch["returns"], s.value_clip)
            value_sum = (value * mask).sum()
            self._add(module_id, "value_loss", value_sum.item(), tokens)
            loss = loss + s.value_coef * value_sum
        if s.kl_in_loss:
            kl = token_ppo.sampled_kl(logprobs * mask, batch["reference_logprobs"], "k3")  # its exp could be infinite
            loss = loss + self.kl_coefs[module_id] * kl.sum()
        return loss

    def _sum_gradients_over_ranks(self, modules: list[str]) -> None:
        """One flat all-reduce; a rank without rows of an LLM adds zeros."""
        if self._place()[1] == 1:
            return
        parameters = [p for module_id in modules for p in self.get_parameters(self.module[module_id])]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()

    def _clip_gradients(self, module_id: str) -> float:
        """Clips one LLM's gradients to `grad_clip` by their global norm, and returns the norm before."""
        limit = self.settings.grad_clip
        parameters = self.get_parameters(self.module[module_id])
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit))
        if not np.isfinite(norm):
            rows = {name: column.cpu() for name, column in self._rows[module_id].items()}
            raise NonFiniteUpdate(module_id, self._update_index + 1, rows)
        return norm

    def get_parameters(self, module: Any) -> list[Any]:
        """The trainable parameters only."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    # What is reported.

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Logs the update's mean losses, clip fractions and gradient norms; adapts KL coefficients."""
        super().after_gradient_based_update(timesteps=timesteps)
        for module_id in sorted(self._rows):
            totals = self._totals.get(module_id, {})  # of this rank, which may have had no share in anything
            sums = [[totals.get(f"{name}/sum", 0.0), totals.get(f"{name}/count", 0.0)] for name in self._trained]
            whole = token_ppo.sum_over_ranks(torch.tensor(sums, dtype=torch.float64, device=self._device))
            self._log(module_id, {name: float(whole[i, 0] / whole[i, 1]) for i, name in enumerate(self._trained)})
            self._adapt_kl_coef(module_id, self._rows[module_id]["kl"])
        self._rows = {}

    def _adapt_kl_coef(self, module_id: str, kl: Tensor) -> None:
        s, count = self.settings, len(kl)
        if s.kl_control == "adaptive":
            self.kl_coefs[module_id] = token_ppo.adapt_kl_coef(
                self.kl_coefs[module_id], float(kl.sum()) / count, s.kl_target, count, s.kl_horizon
            )

    def measure_episodes(self, episodes: Sequence[Any]) -> dict[str, dict[str, np.ndarray]]:
        """What `measure_responses` gives for episodes that are not trained on (held-out ones).

        Returns:
            Per LLM, its figures by name, fp32 `[B]`: a value per response, in the order of the episodes.
        """
        out = {}
        for module_id, rows in TokenBatch()(rl_module=self.module, batch={}, episodes=episodes).items():
            columns = self._to_device(rows)
            columns.update(self._score(module_id, columns))
            figures = measure_responses(columns, self.settings.report_kl_coef)
            out[module_id] = {name: column.cpu().numpy() for name, column in figures.items()}
        return out

    def score_under(self, module_id: str, weights: Weights, rows: Rows) -> Tensor:
        """Log-probabilities `[B, R]` of rows under other weights than the present ones, which are put back."""
        module = self.module[module_id].unwrapped()
        present = module.get_state()
        try:
            module.set_state({**present, **{f"lm.{name}": array for name, array in weights.items()}})
            return self._score(module_id, self._to_device(rows))["logprobs"].cpu()
        finally:
            module.set_state(present)

    def _add(self, module_id: str, name: str, total: float, count: float) -> None:
        totals = self._totals.setdefault(module_id, {})
        totals[f"{name}/sum"] = totals.get(f"{name}/sum", 0.0) + total
        totals[f"{name}/count"] = totals.get(f"{name}/count", 0.0) + count

    def _log(self, module_id: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.metrics.log_value((module_id, name), value, window=1)

    def _to_device(self, rows: Any) -> dict[str, Tensor]:
        return {name: column.to(self._device) for name, column in rows.items()}

    # State: with it, k updates + restore + k updates equal 2k updates.

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, and with it KL coefficients and score moments."""
        state = super().get_state(*args, **kwargs)
        state["kl_coefs"] = dict(self.kl_coefs)
        state["score_moments"] = {mid: asdict(moments) for mid, moments in self.score_moments.items()}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; weights are taken even from an older state than the present one.

        Settings stay this learner's own, as Tune's population-based training changes them in a clone: the learning
        rate, which optimizers carry along in their state, and the KL coefficient, unless a controller steers it.
        """
        self._weights_seq_no = 0
        super().set_state(state)
        for optimizer in self._optimizer_parameters:
            self._set_optimizer_lr(optimizer, self.settings.lr)
        if self.settings.kl_control == "adaptive":
            self.kl_coefs.update(state.get("kl_coefs", {}))
        for module_id, moments in state.get("score_moments", {}).items():
            self.score_moments[module_id] = token_ppo.ScoreMoments(**moments)
