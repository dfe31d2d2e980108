"""RLlib's Learner, around one `PolicyLearner` per LLM."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch.distributed as dist
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module import MultiRLModule, MultiRLModuleSpec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from policies.generation.cuda import check_cuda
from policies.generation.generator import LoadedWeights
from policies.learning.estimation import nonzero_std
from policies.learning.policy_learner import PolicyLearner
from policies.learning.ranks import means, move_to_mean
from policies.learning.rows import Rows
from policies.learning.sharding import learner_mesh
from policies.learning.stored_policy import begin_save, writing_group
from policies.models.weights import Weights, checksum
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from policies.rllib.weight_sender import WeightSender

T = TypeVar("T")


class TokenPPOLearner(TorchLearner):
    """Trains every LLM on its own responses (paper Algorithm 1, lines 14-16).

    RLlib's own step forwards all modules and then runs one backward, wraps modules in DDP and averages per rank. None
    of it is used: each LLM's learner knows its ranks, and nothing of the other LLMs.
    """

    policies: dict[str, PolicyLearner]
    """By LLM, in sorted order."""
    _module_spec: MultiRLModuleSpec
    mesh: DeviceMesh | None
    """All learners, policy × shard, with `shards_per_policy`: this one learns its part of one LLM. Else None."""

    def build(self) -> None:
        """Builds the LLMs and their learners.

        Raises:
            ModelError: there is no such model, or its family's code scores rows of a batch wrongly.
            DeviceError: PyTorch cannot compute on the GPU that this learner was given.
        """
        self.settings: Settings = self.config.settings
        if self.settings.gpus_per_learner:
            check_cuda("gpus_per_learner", self.settings.gpus_per_learner)
        self.policies, self._lent = {}, ExitStack()
        self._senders: dict[str, WeightSender] = {}
        self._rows: dict[str, Rows] = {}
        self._saving: Future[None] | None = None
        super().build()
        for policy in self.policies.values():
            policy.model.check_forward()
        parts = None if self.mesh is None else self.mesh.get_group("shard")
        self._of_saving = writing_group(parts) if parts is not None and self._copies else None

    def _make_module(self) -> MultiRLModule:
        """Builds the LLMs that this process learns."""
        s = self.settings
        self.mesh = None
        if s.shards_per_policy is not None:
            self.mesh = learner_mesh(len(s.policy_ids), s.shards_per_policy, self._device.type)
            own = sorted(s.policy_ids)[self.mesh.get_local_rank("policy")]
            specs = self._module_spec.rl_module_specs
            self._module_spec = MultiRLModuleSpec(rl_module_specs={own: specs[own]})
        return super()._make_module()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Makes the LLM's learner; RLlib is told of its optimizer, whose state it keeps."""
        known = sorted(self.settings.policy_ids)
        together = self.config.num_learners > 1 and self.mesh is None
        learner = PolicyLearner(
            self.module[module_id].unwrapped().policy,
            self.settings.hyperparameters,
            name=module_id,
            stream=known.index(module_id),
            group=dist.group.WORLD if together else None,
        )
        self.policies[module_id] = learner
        self.policies = {name: self.policies[name] for name in known if name in self.policies}
        self.register_optimizer(module_id=module_id, optimizer=learner.optimizer, params=learner.parameters)

    def _make_modules_ddp_if_necessary(self) -> None:
        """No DDP: an LLM's ranks start from the same weights, and add their gradients up themselves."""

    def score(self, rows: dict[str, Rows], *, keep: bool = False) -> dict[str, Rows]:
        """Scores the rows of its LLMs, and gives what it answers for; all learners must call it alike.

        Args:
            rows: by LLM.
            keep: keep them, with their scores, for `learn`.
        """
        own = [name for name in sorted(rows) if name in self.policies]
        scored = {name: on_cpu(self.policies[name].score(rows[name])) for name in own}
        if keep:
            self._rows = {name: rows[name] | scores for name, scores in scored.items()}
        return {name: scores for name, scores in scored.items() if self.policies[name].leads}

    def learn(self, columns: dict[str, Rows], update: int, kl_coefs: dict[str, float]) -> dict[str, Any]:
        """Every LLM of this process learns from the rows that `score` kept.

        Args:
            columns: by LLM, those that these rows lack.
            update: its number, from 0.
            kl_coefs: each LLM's weight of the KL, where it is in the loss.

        Raises:
            NonFiniteUpdate: a gradient was not finite.
        """
        kept, self._rows = self._rows, {}
        for name in [name for name in columns if name in self.policies]:
            rows = kept[name] | columns[name]
            if self.settings.drop_zero_std_groups:
                rows = nonzero_std(rows)
            figures = self.policies[name].update(rows, update, kl_coefs[name])
            self.policies[name].optimizer.zero_grad(set_to_none=True)  # their memory is the next LLM's
            self.metrics.log_dict(figures, key=name, window=1)
        result: dict[str, Any] = self.metrics.reduce()
        return result

    def forget(self) -> None:
        """Forgets Adam's moments of every LLM."""
        for policy in self.policies.values():
            policy.forget()

    def average(self, share: float) -> None:
        """Moves all LLMs towards the mean of their weights; all learners must call it alike.

        Value heads move along: a head reads its LLM's hidden states, so belongs to those weights. Adam's moments stay
        each LLM's own. Of adapters the factors are averaged, as the mean of their products has a higher rank.

        Args:
            share: of the way.
        """
        move_to_mean([policy.model.own() for policy in self.policies.values()], share, self._same_parts)

    def lend(self, policy_id: str) -> None:
        """Lets an LLM hold the mean of all LLMs' weights, until `take_back`; all learners must call it alike."""
        if policy_id in self.policies:
            self._lent.enter_context(self.policies[policy_id].model.temporary_weights())
        place = list(self.policies).index(policy_id) if policy_id in self.policies else None
        for tensors, middle in means([policy.model.own() for policy in self.policies.values()], self._same_parts):
            if place is not None:
                tensors[place].copy_(middle)

    def take_back(self) -> None:
        """Gives an LLM that was lent its own weights back."""
        self._lent.close()

    @property
    def _same_parts(self) -> dist.ProcessGroup | None:
        """The learners that have the same parts of the other LLMs; None: this one has all LLMs."""
        return None if self.mesh is None else self.mesh.get_group("policy")

    def weights(self, policy_id: str) -> Weights | None:
        """An LLM's weights, without its value head; None: another learner answers for it."""
        policy = self.policies.get(policy_id)
        return dict(policy.stream_weights()) or None if policy is not None else None

    def packed(self, policy_id: str) -> tuple[list[ray.ObjectRef[Weights]], int] | None:
        """An LLM's weights in Ray's object store, and their checksum; None: another learner answers for it.

        The reference is in a list, as Ray would fetch what it is to.
        """
        weights = self.weights(policy_id)
        return None if weights is None else ([ray.put(weights)], checksum(weights))

    def transfer(
        self, policy_id: str, runners: Sequence[Any], version: int, restarts: int, weights: Any = None
    ) -> tuple[int, list[LoadedWeights] | None] | None:
        """Sends an LLM's weights to runners, by vLLM's weight transfer; all learners must call it alike.

        The arguments are those of `WeightSender.send`, and what it returns; None: another learner answers for it.
        """
        from policies.rllib.weight_sender import WeightSender  # which takes vLLM's seconds to import

        policy, s = self.policies.get(policy_id), self.settings
        if policy is None:
            return None
        assert s.weight_transfer is not None
        if policy_id not in self._senders:
            self._senders[policy_id] = WeightSender(
                policy, s.weight_transfer, s.tensor_parallel_size, s.generation_timeout
            )
        sent = self._senders[policy_id].send(runners, version, restarts, fetched(weights))
        return sent if policy.leads else None

    def score_under(self, policy_id: str, weights: Weights | ray.ObjectRef[Weights], rows: Rows) -> Rows | None:
        """Scores an LLM's rows under other weights; None: another learner answers for it."""
        policy = self.policies.get(policy_id)
        if policy is None:
            return None
        scored = policy.score_under(fetched(weights), rows)
        return on_cpu(scored) if policy.leads else None

    def begin_save(self, folder: str) -> None:
        """Begins to write its LLMs as they are now, each into folders of its name, until `finish_save`; all learners
        must call it alike.

        On a CPU it writes at once: a copy of all its LLMs would take of the memory that learning needs, and gain little
        where its cores are busy (docs/sharding.md).
        """
        self.finish_save()
        state: dict[str, dict[str, Tensor]] = {}
        for name, policy in self.policies.items():
            if not self._copies:
                policy.save(*_folders(folder, name))
            elif self.mesh is not None or policy.leads:  # else another learner has the same
                state |= policy.state(*_folders(folder, name))
        if self._copies:
            self._saving = begin_save(state, self._of_saving)

    @property
    def _copies(self) -> bool:
        """Whether LLMs are in another memory than the machine's, so that they are copied to be written anyway."""
        return self._device.type != "cpu"

    def saved(self) -> bool:
        """Whether what `begin_save` began is over, written or not."""
        return self._saving is None or self._saving.done()

    def finish_save(self) -> None:
        """Waits for what `begin_save` began.

        Raises:
            OSError: one of those that learn an LLM could not write.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def restore(self, folder: str, *, moments: bool = True) -> None:
        """Reads its LLMs from where any learners saved them; without `moments` the weights alone."""
        for name, policy in self.policies.items():
            weights, adam = _folders(folder, name)
            policy.restore(weights, adam if moments else None)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Rows, fwd_out: Any) -> Tensor:
        """An LLM's loss over rows that are estimated, summed over response tokens."""
        return self.policies[module_id].loss(batch)[0]


def _folders(folder: str, policy_id: str) -> tuple[str, str]:
    """Returns where an LLM's weights and its Adam's moments lie in a checkpoint of learners."""
    return f"{folder}/{COMPONENT_RL_MODULE}/{policy_id}", f"{folder}/{COMPONENT_OPTIMIZER}/{policy_id}"


def on_cpu(rows: Rows) -> Rows:
    """Returns rows whose columns are in the machine's memory."""
    return {name: column.cpu() for name, column in rows.items()}


def fetched(value: T | ray.ObjectRef[T]) -> T:
    """Returns a value itself; of one in Ray's object store what is there."""
    found: T = ray.get(value) if isinstance(value, ray.ObjectRef) else value
    return found
