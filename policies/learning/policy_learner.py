"""One LLM's learner: it scores the LLM's rows, learns from them, and hands its weights on. Plain PyTorch.

It knows nothing of other LLMs. Where several processes learn one LLM, they share the work, not the data: each holds the
whole batch (token ids are small), takes every n-th of the rows that it has to forward, sorted by length, and gets the
others' scores. So statistics over the batch are the same on all ranks as they stand, mini-batches hold the same rows,
and the gradient is the same with one process or several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from policies.learning import stored_policy, token_ppo
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.offloaded_adam import OffloadedAdamW
from policies.learning.policy_model import SCORES, VALUE_HEAD, PolicyModel
from policies.learning.ranks import Ranks
from policies.learning.rows import NonFiniteUpdate, Rows, by_length, places, take, trimmed
from policies.learning.sharding import whole
from policies.models.language_model import master_dtype


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
            group: the processes that learn this LLM together; None: this one alone, or those that a model that is
                split is split over.
        """
        self.model = model
        self.hyperparameters = hyperparameters
        self.name = name
        self.stream = stream
        self.ranks = Ranks(group if model.mesh is None else model.mesh.get_group())
        self.parameters = [parameter for _, parameter in model.trainable()]
        adam = OffloadedAdamW if hyperparameters.offload_optimizer else torch.optim.AdamW
        self.optimizer = adam(
            self.parameters, lr=hyperparameters.lr, weight_decay=hyperparameters.weight_decay, fused=True
        )
        if model.mesh is None:
            self.ranks.broadcast(self.parameters)

    # What a batch is before it is learned from.

    def score(self, rows: Rows) -> Rows:
        """What `PolicyModel.score` gives, `[B, R]` each, zero outside the mask; all ranks must call it alike."""
        rows = self._here(rows)
        names = (*SCORES, "values") if self.model.critic else SCORES
        scores = torch.zeros(
            len(names), *rows["mask"].shape, dtype=master_dtype(self.model.dtype), device=self.model.device
        )
        for index, micro in self._micro_batches(rows):
            scored = self.model.score(micro)
            for i, name in enumerate(names):
                scores[i, index, : scored[name].shape[1]] = scored[name][: len(index)]
        self.ranks.sum(scores)  # what another rank scored is zero here
        return dict(zip(names, scores * rows["mask"], strict=True))

    def score_under(self, weights: Mapping[str, np.ndarray], rows: Rows) -> Rows:
        """What `score` gives under other weights than the present ones, which are put back.

        Args:
            weights: by the names of `stream_weights`.
            rows: to score.
        """
        with self.model.temporary_weights():
            self.model.load({f"lm.{name}": array for name, array in weights.items()}, critic=False)
            return self.score(rows)

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
        for epoch in range(self.hyperparameters.num_epochs):
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
        means = (self.ranks.sum(sums) / max(tokens, 1.0)).tolist()
        learned = {"grad_norm": sum(norms) / max(len(norms), 1), "lr": self.hyperparameters.lr_at(update)}
        return {**dict(zip(totals, means, strict=True)), **learned}

    def _minibatches(self, count: int, update: int, epoch: int) -> Iterator[Tensor]:
        """Places of the rows of each mini-batch: a permutation of all, split evenly; all ranks draw the same."""
        h = self.hyperparameters
        random = np.random.default_rng([h.seed, update, epoch, self.stream])
        for part in np.array_split(random.permutation(count), h.steps):
            yield torch.from_numpy(part).to(self.model.device)

    def _micro_batches(self, rows: Rows) -> Iterator[tuple[Tensor, Rows]]:
        """This rank's share of the rows: what it forwards at once, and the places of that in `rows`.

        Of a model that is split all ranks forward equally often, each for all: one that has no more takes a row that
        has no place.
        """
        h = self.hyperparameters
        shares = self.ranks.shares(rows)
        parts = [places(take(rows, share), h.micro_batch_size, h.micro_batch_tokens) for share in shares]
        own, share = parts[self.ranks.rank], shares[self.ranks.rank]
        for index in own:
            yield share[index], trimmed(rows, share[index])
        if self.model.mesh is not None:
            row = by_length(rows)[:1]
            for _ in range(max(map(len, parts)) - len(own)):
                yield row[:0], trimmed(rows, row)

    def _accumulate(self, part: Rows, kl_coef: float, totals: dict[str, float]) -> None:
        """Computes the gradient of a mini-batch's mean loss per token, micro-batch by micro-batch, over all ranks.

        This rank's sums of what `loss` gives are added to `totals`.
        """
        tokens = part["mask"].sum()
        self.optimizer.zero_grad(set_to_none=True)
        for index, micro in self._micro_batches(part):
            loss, figures = self.loss(micro, kl_coef)
            (loss / tokens * bool(len(index))).backward()
            for name, figure in figures.items() if len(index) else ():
                totals[name] += figure
        if self.model.mesh is None:  # else every backward did it
            self.ranks.sum_gradients(self.parameters)

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
        policy, clipped = token_ppo.policy_loss(
            logprobs, rows["logprobs"], rows["advantages"], h.clip_ratio, h.clip_ratio_high
        )
        weights = token_ppo.importance_sampling_weights(
            rows["logprobs"], rows["sampler_logprobs"], h.importance_sampling_clip_max
        )
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
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit)
        return float(whole(norm))

    def _here(self, rows: Rows) -> Rows:
        return {name: column.to(self.model.device) for name, column in rows.items()}

    # Weights and state.

    @property
    def leads(self) -> bool:
        """Whether this is the rank that answers for all that learn this LLM."""
        return self.ranks.rank == 0

    def stream_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the policy's own weights one by one, without the value head, fp32, by Hugging Face names.

        All ranks must ask alike; only the one that leads gets any.
        """
        for name, parameter in self.played_weights():
            tensor = whole(parameter)
            if self.leads:
                yield name, tensor.cpu().numpy().copy()

    def played_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what a generation engine needs, by Hugging Face names: all but the value head. It may be split."""
        for name, parameter in self.model.trainable():
            if not name.startswith(VALUE_HEAD):
                yield name.removeprefix("lm."), parameter.detach()

    def forget(self) -> None:
        """Forgets Adam's moments."""
        self.optimizer.state.clear()

    def state(self, weights: str, moments: str) -> dict[str, dict[str, Tensor]]:
        """All that further learning depends on, as this rank has it, by the folder that it is for."""
        trained = {name: parameter.detach() for name, parameter in self.model.trainable()}
        known = stored_policy.moments(dict(self.model.trainable()), self.optimizer)
        return {weights: trained, moments: known} if known else {weights: trained}

    def save(self, weights: str, moments: str) -> None:
        """Writes its state into two folders, each rank what it has of it."""
        for folder, tensors in self.state(weights, moments).items():
            stored_policy.save(tensors, folder, self.ranks.group)

    def restore(self, weights: str, moments: str | None) -> None:
        """Takes what any number of ranks saved; without `moments` the weights alone.

        The learning rate stays that of the hyperparameters.
        """
        trained = dict(self.model.trainable())
        stored_policy.restore({name: tensor.detach() for name, tensor in trained.items()}, weights, self.ranks.group)
        if moments is not None:
            stored_policy.make_moments(trained, self.optimizer, stored_policy.stored(moments))
            if known := stored_policy.moments(trained, self.optimizer):
                stored_policy.restore(known, moments, self.ranks.group)
