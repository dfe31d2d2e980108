"""RLlib's Learner, wrapping one `PolicyLearner` per policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch
import torch.distributed as dist
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module import MultiRLModule, MultiRLModuleSpec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from policies.generation.cuda import check_cuda
from policies.generation.generator import LoadedWeights
from policies.learning.policy_learner import PolicyLearner
from policies.learning.ranks import mean_tensors, move_to_mean
from policies.learning.rows import Estimates, Rows, ScoredRows, Scores, TrainRows
from policies.learning.sharding import learner_mesh
from policies.learning.stored_policy import begin_save, checkpoint_group
from policies.models.weights import Weights
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from policies.rllib.weight_sender import WeightSender

T = TypeVar("T")


class TokenPPOLearner(TorchLearner):
    """Trains every policy on its own responses (CORY paper Algorithm 1, lines 14-16).

    RLlib's own training step is not used: it forwards all modules before one backward pass, wraps modules in DDP, and
    averages per rank. Here each policy's learner handles its own ranks, independently of other policies.
    """

    policies: dict[str, PolicyLearner]  # by policy id, in sorted order
    _module_spec: MultiRLModuleSpec
    mesh: DeviceMesh | None
    """All learners, policy × shard, with `shards_per_policy`: this one trains its shard of one policy. Else None."""

    def build(self) -> None:
        """Builds the models and their learners."""
        self.settings: Settings = self.config.settings
        # RLlib makes PyTorch deterministic on a CPU; then every new tensor would also be filled, to reveal reads of
        # uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if self.settings.gpus_per_learner:
            check_cuda("gpus_per_learner", self.settings.gpus_per_learner)
        self.policies, self._swapped = {}, ExitStack()
        self._senders: dict[str, WeightSender] = {}
        self._rows: dict[str, ScoredRows] = {}
        self._saving: Future[None] | None = None
        super().build()
        for policy in self.policies.values():
            policy.check_forward()
            if self.settings.torch_compile:
                policy.model.compile_blocks()
        shards = None if self.mesh is None else self.mesh.get_group("shard")
        self._checkpoint_group = checkpoint_group(shards) if shards is not None and self._saves_in_background else None

    def _make_module(self) -> MultiRLModule:
        """Builds the modules of the policies that this process trains."""
        s = self.settings
        self.mesh = None
        if s.shards_per_policy is not None:
            self.mesh = learner_mesh(len(s.policy_ids), s.shards_per_policy, self._device.type)
            policy_id = sorted(s.policy_ids)[self.mesh.get_local_rank("policy")]
            specs = self._module_spec.rl_module_specs
            self._module_spec = MultiRLModuleSpec(rl_module_specs={policy_id: specs[policy_id]})
        return super()._make_module()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Creates the policy's learner and registers its optimizer with RLlib."""
        policy_ids = sorted(self.settings.policy_ids)
        data_parallel = self.config.num_learners > 1 and self.mesh is None
        learner = PolicyLearner(
            self.module[module_id].unwrapped().policy,
            self.settings.hyperparameters,
            name=module_id,
            policy_index=policy_ids.index(module_id),
            group=dist.group.WORLD if data_parallel else None,
        )
        self.policies = dict(sorted({**self.policies, module_id: learner}.items()))
        self.register_optimizer(module_id=module_id, optimizer=learner.optimizer, params=learner.parameters)

    def _make_modules_ddp_if_necessary(self) -> None:
        """Does nothing: `PolicyLearner` broadcasts weights and sums gradients itself."""

    def score(
        self, rows: dict[str, Rows], *, keep: bool = False, reference: bool = True, policy: bool = True
    ) -> dict[str, Scores]:
        """Scores the rows of this learner's policies; all learners must call it with the same rows.

        Args:
            keep: keep the rows with their scores for `learn`.
            policy: score with the policy; if not, only with the reference.

        Returns:
            Scores by policy id, only of policies for which this learner is rank 0.
        """
        policies = {policy_id: self.policies[policy_id] for policy_id in sorted(rows) if policy_id in self.policies}

        def score(learner: PolicyLearner, part: Rows) -> Scores:
            if policy:
                return learner.score(part, reference=reference)
            return learner.score_reference(part) if reference else Scores(part.sampler_logprobs)

        scored = {name: score(learner, rows[name]) for name, learner in policies.items()}
        if keep:
            self._rows = {policy_id: rows[policy_id].with_scores(scores) for policy_id, scores in scored.items()}
        return {name: scores for name, scores in scored.items() if policies[name].is_rank_zero}

    def learn(self, estimates: dict[str, Estimates], update: int, kl_coefs: dict[str, float]) -> dict[str, Any]:
        """Trains every policy of this process on the rows that `score` kept.

        Args:
            update: number of the update, from 0.
            kl_coefs: weight of the KL by policy id, used if the KL is in the loss.
        """
        scored_rows, self._rows = self._rows, {}
        for policy_id in [policy_id for policy_id in estimates if policy_id in self.policies]:
            rows = scored_rows[policy_id].with_estimates(estimates[policy_id])
            num_scored = len(rows)
            if self.settings.overlong == "mask":
                rows = rows.select(rows.ended.bool())
            metrics = self.policies[policy_id].update(rows, update, kl_coefs[policy_id], num_scored=num_scored)
            self.policies[policy_id].optimizer.zero_grad(set_to_none=True)  # frees memory for the next policy
            self.metrics.log_dict(metrics, key=policy_id, window=1)
        result: dict[str, Any] = self.metrics.reduce()
        return result

    def call_policy(self, policy_id: str, function: Callable[[PolicyLearner], T]) -> T | None:
        """Calls a function on a policy's learner; None unless this process is rank 0 of the policy."""
        policy = self.policies.get(policy_id)
        if policy is None:
            return None
        result = function(policy)
        return result if policy.is_rank_zero else None

    def average(self, tau: float) -> None:
        """Moves all policies towards the mean of their weights; all learners must call it.

        Value heads move too: a head reads its model's hidden states, so it belongs to those weights. Adam's moments
        are not averaged. For LoRA the factors A and B are averaged, since the mean of their products has a higher rank.

        Args:
            tau: fraction of the way, 0 to 1.
        """
        move_to_mean([policy.model.local_weights() for policy in self.policies.values()], tau, self._policy_group)

    def swap_in_average(self, policy_id: str) -> None:
        """Replaces a policy's weights by the mean of all, until `restore_weights`; all learners must call it."""
        if policy_id in self.policies:
            self._swapped.enter_context(self.policies[policy_id].model.temporary_weights())
        index = list(self.policies).index(policy_id) if policy_id in self.policies else None
        weights = [policy.model.local_weights() for policy in self.policies.values()]
        for tensors, mean in mean_tensors(weights, self._policy_group):
            if index is not None:
                tensors[index].copy_(mean)

    def restore_weights(self) -> None:
        """Restores the weights that `swap_in_average` replaced."""
        self._swapped.close()

    @property
    def _policy_group(self) -> dist.ProcessGroup | None:
        """The learners that have the same shard of the other policies; None: this one has all policies."""
        return None if self.mesh is None else self.mesh.get_group("policy")

    def transfer(
        self, policy_id: str, runners: Sequence[Any], version: int, restarts: int, weights: Weights | None
    ) -> tuple[int, list[LoadedWeights] | None] | None:
        """Sends a policy's weights to runners by vLLM's weight transfer; see `WeightSender.send` and `call_policy`."""
        from policies.rllib.weight_sender import WeightSender  # imports vLLM, which takes seconds

        s = self.settings
        assert s.weight_transfer is not None
        backend, workers, timeout = s.weight_transfer, s.tensor_parallel_size, s.generation_timeout

        def send(policy: PolicyLearner) -> tuple[int, list[LoadedWeights] | None]:
            if policy_id not in self._senders:
                self._senders[policy_id] = WeightSender(policy, backend, workers, timeout)
            return self._senders[policy_id].send(runners, version, restarts, weights)

        return self.call_policy(policy_id, send)

    def begin_save(self, folder: str) -> None:
        """Starts writing a snapshot of this learner's policies; `finish_save` completes it. All learners must call it.

        On a CPU it writes before it returns: a copy of all policies would need memory that training needs, and gain
        little because the cores are busy (docs/lab/memory.md).
        """
        self.finish_save()
        state: dict[str, dict[str, Tensor]] = {}
        for name, policy in self.policies.items():
            if not self._saves_in_background:
                policy.save(*_folders(folder, name))
            elif self.mesh is not None or policy.is_rank_zero:  # without shards, rank 0 has all of the state
                state |= policy.state(*_folders(folder, name))
        if self._saves_in_background:
            self._saving = begin_save(state, self._checkpoint_group)

    @property
    def _saves_in_background(self) -> bool:
        """Whether `begin_save` writes from a copy in host memory, in the background: if the policies are on a GPU."""
        return self._device.type != "cpu"

    def is_saved(self) -> bool:
        """Whether the write that `begin_save` started has ended, successfully or not."""
        return self._saving is None or self._saving.done()

    def finish_save(self) -> None:
        """Waits for the write that `begin_save` started."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def restore(self, folder: str, *, moments: bool = True) -> None:
        """Restores this learner's policies from what any set of learners saved; without `moments` only the weights."""
        for policy_id, policy in self.policies.items():
            weights_folder, moments_folder = _folders(folder, policy_id)
            policy.restore(weights_folder, moments_folder if moments else None)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: TrainRows, fwd_out: Any) -> Tensor:
        """A policy's loss over rows with advantages, summed over response tokens."""
        return self.policies[module_id].loss(batch)[0]


def _folders(folder: str, policy_id: str) -> tuple[str, str]:
    """The folders of a policy's weights and of its Adam moments in a checkpoint of learners."""
    return f"{folder}/{COMPONENT_RL_MODULE}/{policy_id}", f"{folder}/{COMPONENT_OPTIMIZER}/{policy_id}"


def fetch(value: T | ray.ObjectRef[T]) -> T:
    """Fetches a value from Ray's object store; returns any other value itself."""
    fetched: T = ray.get(value) if isinstance(value, ray.ObjectRef) else value
    return fetched
