"""One LLM's learner: it scores the LLM's rows, learns from them, and hands its weights on. Plain PyTorch.

It knows nothing of other LLMs. Where several processes learn one LLM, they share the work, not the data: each holds the
whole batch (token ids are small), takes every n-th of the rows that it has to forward, sorted by length, and gets the
others' scores. So statistics over the batch are the same on all ranks as they stand, mini-batches hold the same rows,
and the gradient is the same with one process or several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.non_finite import NonFiniteUpdate
from policies.learning.policy_model import SCORES, VALUE_HEAD, PolicyModel
from policies.learning.rows import Rows, by_length, micro_batches, take


class PolicyLearner:
    """Learns one LLM by token-level PPO, or by its relatives without a critic."""

    def __init__(
        self,
        model: PolicyModel,
        hyperparameters: Hyperparameters,
        *,
        name: str = "policy",
        stream: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Makes the optimizer; all ranks start from the weights of the group's first.

        Args:
            model: on its device.
            hyperparameters: how it learns.
            name: of the LLM, for messages.
            stream: a number that no other LLM of a run has: mini-batches are drawn by it.
            group: the processes that learn this LLM together; None: this one alone.
        """
        self.model = model
        self.hyperparameters = hyperparameters
        self.name = name
        self.stream = stream
        self.group = group
        self.parameters = [parameter for _, parameter in model.trainable()]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=hyperparameters.lr, weight_decay=hyperparameters.weight_decay, fused=True
        )
        if group is not None:
            for parameter in self.parameters:
                dist.broadcast(parameter.data, group=group, group_src=0)

    # What a batch is before it is learned from.

    def score(self, rows: Rows) -> Rows:
        """What `PolicyModel.score` gives, `[B, R]` each, zero outside the mask; all ranks must call it alike."""
        rows = self._here(rows)
        names = (*SCORES, "values") if self.model.critic else SCORES
        scores = torch.zeros(len(names), *rows["mask"].shape, device=self.model.device)
        own = self._share(rows)
        for index, micro in self._micro_batches(take(rows, own)):
            scored = self.model.score(micro)
            for i, name in enumerate(names):
                scores[i, own[index], : scored[name].shape[1]] = scored[name]
        self._sum(scores)  # what another rank scored is zero here
        return dict(zip(names, scores * rows["mask"], strict=True))

    def score_under(self, weights: Mapping[str, np.ndarray], rows: Rows) -> Rows:
        """What `score` gives under other weights than the present ones, which are put back.

        Args:
            weights: by the names of `stream_weights`.
            rows: to score.
        """
        present = self.model.state()
        try:
            self.model.load({**present, **{f"lm.{name}": array for name, array in weights.items()}})
            return self.score(rows)
        finally:
            self.model.load(present)

    # One update.

    def update(self, rows: Rows, update: int, kl_coef: float = 0.0) -> dict[str, float]:
        """Learns from an update's rows: a few passes over them, a mini-batch at a time.

        Args:
            rows: scored, with `advantages`, and with a critic `returns`; all ranks must call it with the same.
            update: its number, from 0; mini-batches are drawn from (seed, update, epoch, stream).
            kl_coef: weight of the KL, where it is in the loss.

        Returns:
            Means over response tokens of `policy_loss`, `clip_fraction`, with a critic `value_loss`, and of the whole
            `loss`; over optimizer steps of `grad_norm`, the norm before it was clipped; the update's `lr`.

        Raises:
            NonFiniteUpdate: a gradient was not finite; that step changed no weight.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.hyperparameters.lr_at(update)
        rows, tokens, norms = self._here(rows), 0.0, []
        totals = dict.fromkeys(self._figures, 0.0)  # of this rank
        self.model.train()
        for epoch in range(self.hyperparameters.epochs):
            for index in self._minibatches(len(rows["mask"]), update, epoch):
                part = take(rows, index)
                if not len(part["mask"]):  # queries were left out, and there are fewer rows than mini-batches
                    continue
                tokens += float(part["mask"].sum())
                self._accumulate(part, kl_coef, totals)
                norm = self._clip_gradients()
                if not np.isfinite(norm):
                    raise NonFiniteUpdate(self.name, update + 1, {name: c.cpu() for name, c in rows.items()})
                norms.append(norm)
                self.optimizer.step()
        sums = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.model.device)
        means = (self._sum(sums) / max(tokens, 1.0)).tolist()
        learned = {"grad_norm": sum(norms) / max(len(norms), 1), "lr": self.hyperparameters.lr_at(update)}
        return {**dict(zip(totals, means, strict=True)), **learned}

    def _minibatches(self, count: int, update: int, epoch: int) -> Iterator[Tensor]:
        """Places of the rows of each mini-batch: a permutation of all, split evenly; all ranks draw the same."""
        h = self.hyperparameters
        random = np.random.default_rng([h.seed, update, epoch, self.stream])
        for part in np.array_split(random.permutation(count), h.steps):
            yield torch.from_numpy(part).to(self.model.device)

    def _micro_batches(self, rows: Rows) -> Iterator[tuple[Tensor, Rows]]:
        """What is forwarded at once; nothing of no rows."""
        h = self.hyperparameters
        return micro_batches(rows, h.micro_batch, h.micro_batch_tokens) if len(rows["mask"]) else iter(())

    def _accumulate(self, part: Rows, kl_coef: float, totals: dict[str, float]) -> None:
        """Computes the gradient of a mini-batch's mean loss per token, micro-batch by micro-batch, over all ranks.

        This rank's sums of what `loss` gives are added to `totals`.
        """
        tokens = part["mask"].sum()
        own = take(part, self._share(part))
        self.optimizer.zero_grad(set_to_none=True)
        for _, micro in self._micro_batches(own):
            loss, figures = self.loss(micro, kl_coef)
            (loss / tokens).backward()
            for name, figure in figures.items():
                totals[name] += figure
        self._sum_gradients()

    @property
    def _figures(self) -> tuple[str, ...]:
        return ("policy_loss", "clip_fraction", *(("value_loss",) if self.model.critic else ()), "loss")

    def loss(self, rows: Rows, kl_coef: float = 0.0) -> tuple[Tensor, dict[str, float]]:
        """The loss, *summed* over response tokens: the clipped policy loss; with a critic `value_coef` times the
        clipped value loss, or, where the KL is in the loss, `kl_coef` times its k3 estimate (GRPO).

        Returns:
            A scalar, and the sums over tokens that it consists of.
        """
        h, mask = self.hyperparameters, rows["mask"]
        logprobs, values = self.model(rows)
        policy, clipped = token_ppo.policy_loss(logprobs, rows["logprobs"], rows["advantages"], h.clip, h.clip_high)
        weights = token_ppo.importance(rows["logprobs"], rows["sampler_logprobs"], h.importance_cap)
        loss = (policy * weights * mask).sum()
        figures = {"policy_loss": loss.item(), "clip_fraction": (clipped * mask).sum().item()}
        if values is not None:
            value = (token_ppo.value_loss(values, rows["values"], rows["returns"], h.value_clip) * mask).sum()
            figures["value_loss"] = value.item()
            loss = loss + h.value_coef * value
        if h.kl_in_loss:
            kl = token_ppo.sampled_kl(logprobs * mask, rows["reference_logprobs"], "k3")  # its exp could be infinite
            loss = loss + kl_coef * kl.sum()
        return loss, {**figures, "loss": loss.item()}

    def _clip_gradients(self) -> float:
        """Clips the gradients to `grad_clip` by their global norm, and returns the norm before."""
        limit = self.hyperparameters.grad_clip
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit))

    # The other ranks.

    def _share(self, rows: Rows) -> Tensor:
        """Places of the rows that this rank forwards."""
        rank, ranks = (0, 1) if self.group is None else (dist.get_rank(self.group), dist.get_world_size(self.group))
        return by_length(rows)[rank::ranks]

    def _sum(self, x: Tensor) -> Tensor:
        """Adds a tensor over all ranks, in place, and returns it."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def _sum_gradients(self) -> None:
        """One flat all-reduce; a rank without rows adds zeros."""
        if self.group is None:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = self._sum(torch.cat([grad.reshape(-1) for grad in grads]))
        for parameter, grad in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()

    def _here(self, rows: Rows) -> Rows:
        return {name: column.to(self.model.device) for name, column in rows.items()}

    # Weights and state.

    def stream_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the policy's own weights one by one, without the value head, fp32, by Hugging Face names."""
        for name, parameter in self.model.trainable():
            if not name.startswith(VALUE_HEAD):
                yield name.removeprefix("lm."), parameter.detach().cpu().numpy().copy()

    def forget(self) -> None:
        """Forgets Adam's moments."""
        self.optimizer.state.clear()

    def state(self) -> dict[str, Any]:
        """All that further learning depends on."""
        return {"weights": self.model.state(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned; the learning rate stays that of the hyperparameters."""
        self.model.load(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.keep_own()

    def keep_own(self) -> None:
        """Gives the optimizer its own settings and kernel again, which a loaded state has changed."""
        for group in self.optimizer.param_groups:
            group.update(lr=self.hyperparameters.lr, weight_decay=self.hyperparameters.weight_decay, fused=True)
