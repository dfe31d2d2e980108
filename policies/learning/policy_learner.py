"""One policy's learner: it scores the policy's rows, trains on them, and provides its weights. Plain PyTorch.

It knows nothing about other policies. If several processes (ranks) train one policy, they share the work, not the data:
every rank holds the whole batch (token ids are small), forwards every n-th pack in order of length, and receives the
scores of the other ranks. So batch statistics are the same on all ranks without communication, mini-batches hold the
same rows, and the gradient is the same with one process or several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from policies.learning import losses, stored_policy
from policies.learning.forward.prefix_tree import Layout, Paths
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.metrics import LOGPROB_DIFF, SAMPLER_METRICS, compare_logprobs
from policies.learning.offloaded_adam import OffloadedAdamW
from policies.learning.policy_model import VALUE_HEAD, PolicyModel
from policies.learning.ranks import Ranks
from policies.learning.rows import NonFiniteUpdate, Rows, Scores, TrainRows, send
from policies.learning.sharding import full_tensor
from policies.models.language_model import master_dtype

RowsT = TypeVar("RowsT", bound=Rows)


class PolicyLearner:
    """Trains one policy by token-level PPO, or by a critic-free algorithm (RLOO, GRPO, Dr. GRPO, REINFORCE++).

    One update is `score`, then credit assignment and advantage estimation outside this class, then `update`.
    """

    def __init__(
        self,
        model: PolicyModel,
        hyperparameters: Hyperparameters,
        *,
        name: str = "policy",
        policy_index: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Creates the optimizer; all ranks start from the weights of rank 0.

        Args:
            policy_index: index of the policy in the run; it seeds the mini-batches.
            group: the processes that train this policy together; None: this process alone, or the mesh of a sharded
                model.
        """
        self.model = model
        self.hyperparameters = hyperparameters
        self.name = name
        self.policy_index = policy_index
        self._sum_names = (*hyperparameters.loss_metrics, "loss")
        self.ranks = Ranks(group if model.mesh is None else model.mesh.get_group())
        self.parameters = [parameter for _, parameter in model.trainable()]
        adam = OffloadedAdamW if hyperparameters.offload_optimizer else torch.optim.AdamW
        self.optimizer = adam(
            self.parameters, lr=hyperparameters.lr, weight_decay=hyperparameters.weight_decay, fused=True
        )
        if model.mesh is None:
            self.ranks.broadcast(self.parameters)

    def check_forward(self, prefix_sharing: bool = True) -> None:
        """Checks the model (`PolicyModel.check_forward`); rows share prefixes if they can on all ranks."""
        self.model.check_forward(prefix_sharing)
        cannot = torch.tensor(float(self.model.cost is None), device=self.model.device)
        if self.ranks.sum(cannot).item():
            self.model.cost = None

    # Scoring, once per batch, before training.

    def score(self, rows: Rows, *, reference: bool = True) -> Scores:
        """Scores rows with the current weights, in their order. All ranks must call it with the same rows."""
        names = ["logprobs", "entropy", *(["reference_logprobs", "full_kl"] if reference else [])]
        names += ["values"] if self.model.critic else []
        scores = torch.zeros(
            len(names), *rows.mask.shape, dtype=master_dtype(self.model.dtype), device=self.model.device
        )
        for index, micro_batch, layout in self._micro_batches(rows):
            scored = torch.stack([*self.model.score(micro_batch, layout, reference=reference).columns().values()])
            scores[:, index, : scored.shape[2]] = scored[:, : len(index)]
        self.ranks.sum(scores)  # rows of other ranks are zero here
        columns = map(torch.clone, scores.cpu())  # a view would be sent with the whole tensor
        return Scores(**dict(zip(names, columns, strict=True)))

    def score_reference(self, rows: Rows) -> Scores:
        """Scores rows with the reference alone: their log-probabilities are the sampler's. All ranks must call it."""
        scores = torch.zeros_like(rows.mask, device=self.model.device)
        for index, micro_batch, layout in self._micro_batches(rows):
            logprobs = self.model.score_reference(micro_batch, layout)
            scores[index, : logprobs.shape[1]] = logprobs[: len(index)].to(scores.dtype)
        return Scores(rows.sampler_logprobs, reference_logprobs=self.ranks.sum(scores).cpu())

    def score_under(self, weights: Mapping[str, np.ndarray], rows: Rows) -> Scores:
        """Scores rows with other weights, without the reference, and restores the current ones.

        Args:
            weights: by the names of `stream_weights`.
        """
        with self.model.temporary_weights():
            self.model.load({f"lm.{name}": array for name, array in weights.items()}, critic=False)
            return self.score(rows, reference=False)

    # Training.

    def update(
        self, rows: TrainRows, update: int, kl_coef: float = 0.0, *, num_scored: int | None = None
    ) -> dict[str, float]:
        """Trains on the rows of one update: `num_epochs` passes in mini-batches, one optimizer step per mini-batch.

        If rows were dropped after scoring, there are proportionally fewer mini-batches, so that those left are not much
        smaller. Adam's steps do not depend on the size of a mini-batch: a few rows in as many steps as usual would
        change the weights as much as a whole batch.

        Args:
            rows: the same on all ranks.
            update: number of the update, from 0. Mini-batches are drawn from (seed, update, epoch, policy index).
            kl_coef: weight of the KL, if it is in the loss.
            num_scored: number of rows before some were dropped; None: none was.

        Returns:
            Means over response tokens (`losses.token_weights`) of `Hyperparameters.loss_metrics` and the total `loss`.
            Mean over optimizer steps of `grad_norm`, before clipping. The update's `lr`. If the policy did not score
            the rows, `compare_logprobs` of the first mini-batch, before its optimizer step, or NaN if there was none.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.hyperparameters.lr_at(update)
        weight = 0.0
        norms: list[float] = []
        steps = math.ceil(Fraction(self.hyperparameters.steps * len(rows), num_scored or max(len(rows), 1)))
        totals = torch.zeros(len(self._sum_names), dtype=torch.float64, device=self.model.device)
        sampler_metrics = dict.fromkeys((*SAMPLER_METRICS, *LOGPROB_DIFF), math.nan) | {"logprob_diff_tokens": 0.0}
        self.model.train()
        for epoch in range(self.hyperparameters.num_epochs):
            for index in self._minibatches(rows, update, epoch, steps):
                if not len(index):  # there are fewer rows than mini-batches, as rewards failed
                    continue
                minibatch = rows.select(index)
                logprobs = None
                if not self.hyperparameters.scores_policy and not norms:
                    logprobs = torch.zeros_like(minibatch.mask, device=self.model.device)
                weight += self._accumulate(minibatch, kl_coef, totals, logprobs)
                norm = self._clip_gradients()
                if not np.isfinite(norm):
                    raise NonFiniteUpdate(self.name, update + 1, rows)
                if logprobs is not None:
                    compared = compare_logprobs(minibatch, self.ranks.sum(logprobs).cpu())
                    sampler_metrics = {name: float(value) for name, value in compared.items()}
                norms.append(norm)
                self.optimizer.step()
        means = (self.ranks.sum(totals) / max(weight, 1.0)).tolist()
        step_metrics = {"grad_norm": sum(norms) / max(len(norms), 1), "lr": self.hyperparameters.lr_at(update)}
        step_metrics |= {} if self.hyperparameters.scores_policy else sampler_metrics
        return {**dict(zip(self._sum_names, means, strict=True)), **step_metrics}

    def _minibatches(self, rows: Rows, update: int, epoch: int, steps: int | None = None) -> Iterator[Tensor]:
        """Yields the row indices of each mini-batch, the same on all ranks.

        They are a random permutation, split evenly, in which rows with the same prompt stay together. In an environment
        episodes are split, whose turns share their prefixes. NumPy ignores
        trailing zeros of a seed, so in epoch 0 the first policy draws from the stream of `query_order(seed, update)`.
        Its mini-batches still do not depend on the order of the queries, which a test measures.
        """
        h = self.hyperparameters
        count = max(h.steps if steps is None else steps, 1)
        random = np.random.default_rng([h.seed, update, epoch, self.policy_index])
        if rows.turns is not None:
            return rows.split_by_episode(count, random)
        prompts, prompt_of_row = np.unique(rows.prompts.numpy(), axis=0, return_inverse=True)
        order = random.permutation(len(prompt_of_row))
        order = order[np.argsort(random.permutation(len(prompts))[prompt_of_row[order]], kind="stable")]
        return (torch.from_numpy(part) for part in np.array_split(order, count))

    def _micro_batches(self, rows: RowsT) -> Iterator[tuple[Tensor, RowsT, Layout]]:
        """Yields this rank's micro-batches on its device, with their row indices.

        All ranks of a sharded model must forward equally often, as each forward pass gathers weights from all. A rank
        with fewer micro-batches repeats the first one with an empty index.
        """
        h, device, paths = self.hyperparameters, self.model.device, Paths(rows)
        shares = paths.micro_batches(h.micro_batch_size, h.micro_batch_tokens, self.model.cost, self.ranks.count)
        own = shares[self.ranks.rank]
        missing = max(map(len, shares)) - len(own) if self.model.mesh is not None else 0
        for number, packs in enumerate([*own, *[shares[0][0]] * missing]):
            index = paths.index(packs)
            micro_batch = rows.trim(index).to(device)
            index = index if number < len(own) else index[:0]
            yield send(index, device), micro_batch, paths.layout(packs).to(device)

    def _accumulate(
        self, minibatch: TrainRows, kl_coef: float, totals: Tensor, logprobs: Tensor | None = None
    ) -> float:
        """Computes the gradient of a mini-batch's mean loss per token, micro-batch by micro-batch, over all ranks.

        Adds this rank's sums from `loss` to `totals`, and writes its log-probabilities into `logprobs`, `[B, R]`.
        Returns the weight of the mini-batch's tokens.
        """
        h = self.hyperparameters
        weight = float(losses.token_weights(minibatch.mask, h).sum())
        self.optimizer.zero_grad(set_to_none=True)
        for index, micro_batch, layout in self._micro_batches(minibatch):
            outputs = self.model(micro_batch, layout, with_entropy=h.entropy_coef > 0)
            if logprobs is not None:
                logprobs[index, : outputs[0].shape[1]] = outputs[0].detach()[: len(index)].to(logprobs.dtype)
            loss, sums = losses.total_loss(outputs, micro_batch, h, kl_coef)
            counts = bool(len(index))
            (loss / weight * counts).backward()
            totals += torch.stack([sums[name] for name in self._sum_names]) * counts
        if self.model.mesh is None:  # FSDP sums gradients in every backward pass
            self.ranks.sum_gradients(self.parameters)
        return weight

    def loss(
        self, rows: TrainRows, kl_coef: float = 0.0, layout: Layout | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of rows and its terms (`losses.total_loss`)."""
        h = self.hyperparameters
        return losses.total_loss(self.model(rows, layout, with_entropy=h.entropy_coef > 0), rows, h, kl_coef)

    def _clip_gradients(self) -> float:
        """Clips the gradients to `grad_clip` by their global norm; returns the norm before clipping."""
        limit = self.hyperparameters.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, float("inf") if limit is None else limit)
        return float(full_tensor(norm))

    # Weights and state.

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0 of the processes that train this policy; it alone returns results."""
        return self.ranks.rank == 0

    def stream_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the trainable weights one by one, without the value head, fp32, by Hugging Face names.

        All ranks must call it; only rank 0 gets the weights.
        """
        for name, parameter in self.engine_weights():
            tensor = full_tensor(parameter)
            if self.is_rank_zero:
                yield name, tensor.cpu().numpy().copy()

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights that a generation engine needs (all but the value head) by Hugging Face names.

        The weights of a sharded model are sharded.
        """
        for name, parameter in self.model.trainable():
            if not name.startswith(VALUE_HEAD):
                yield name.removeprefix("lm."), parameter.detach()

    def reset_optimizer(self) -> None:
        """Resets Adam's moments."""
        self.optimizer.state.clear()

    def state(self, weights: str, moments: str) -> dict[str, dict[str, Tensor]]:
        """This rank's part of the training state: weights and Adam's moments.

        Returns:
            The tensors of each folder, by name; no entry for the moments before the first step.
        """
        parameters = {name: parameter.detach() for name, parameter in self.model.trainable()}
        adam = stored_policy.adam_moments(dict(self.model.trainable()), self.optimizer)
        return {weights: parameters, moments: adam} if adam else {weights: parameters}

    def save(self, weights: str, moments: str) -> None:
        """Writes the training state into two folders, each rank its part."""
        for folder, tensors in self.state(weights, moments).items():
            stored_policy.save(tensors, folder, self.ranks.group)

    def restore(self, weights: str, moments: str | None) -> None:
        """Restores what any number of ranks saved; without `moments` only the weights.

        The learning rate is not restored; `update` sets it from the hyperparameters.
        """
        parameters = dict(self.model.trainable())
        tensors = {name: parameter.detach() for name, parameter in parameters.items()}
        stored_policy.restore(tensors, weights, self.ranks.group)
        if moments is not None:
            stored_policy.init_moments(parameters, self.optimizer, stored_policy.stored_shapes(moments))
            if adam := stored_policy.adam_moments(parameters, self.optimizer):
                stored_policy.restore(adam, moments, self.ranks.group)
