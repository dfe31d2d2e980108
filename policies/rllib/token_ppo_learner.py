"""RLlib's Learner, around one `PolicyLearner` per LLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from torch import Tensor

from policies.learning.averaging import mean, move_to_mean
from policies.learning.policy_learner import PolicyLearner
from policies.learning.rows import Rows
from policies.settings.settings import Settings

UPDATE, KL_COEFS = "update", "kl_coefs"


class TokenPPOLearner(TorchLearner):
    """Trains every LLM on its own responses (paper Algorithm 1, lines 14-16).

    RLlib's own step forwards all modules and then runs one backward, wraps modules in DDP and averages per rank. None
    of it is used: each LLM's learner knows its ranks, and nothing of the other LLMs.
    """

    policies: dict[str, PolicyLearner]
    """By LLM, in sorted order."""
    earlier: dict[str, Any]
    """What versions whose learners estimated advantages kept of that in the state that was loaded."""

    _own: dict[str, np.ndarray]
    """The weights of the LLM that is lent, if one is."""

    def build(self) -> None:
        """Builds the LLMs and their learners."""
        self.settings: Settings = self.config.settings
        self.policies, self.earlier, self._own = {}, {}, {}
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Makes the LLM's learner; RLlib is told of its optimizer, whose state it keeps."""
        known = sorted(self.module.keys())
        learner = PolicyLearner(
            self.module[module_id].unwrapped().policy,
            self.settings.hyperparameters,
            name=module_id,
            stream=known.index(module_id),
            group=dist.group.WORLD if self.config.num_learners > 1 else None,
        )
        self.policies[module_id] = learner
        self.policies = {name: self.policies[name] for name in known if name in self.policies}
        self.register_optimizer(module_id=module_id, optimizer=learner.optimizer, params=learner.parameters)

    def _make_modules_ddp_if_necessary(self) -> None:
        """No DDP: an LLM's ranks start from the same weights, and add their gradients up themselves."""

    def score(self, rows: dict[str, Rows]) -> dict[str, Rows]:
        """Scores every LLM's rows; all learners must call it alike."""
        return {name: on_cpu(self.policies[name].score(rows[name])) for name in sorted(rows)}

    def update(self, training_data: TrainingData, *, timesteps: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Every LLM learns from its rows.

        Args:
            training_data: a `SharedRows`.
            timesteps: the number of the update, from 0, under `UPDATE`.
            **kwargs: under `KL_COEFS` each LLM's weight of the KL, where it is in the loss.

        Raises:
            NonFiniteUpdate: a gradient was not finite.
        """
        training_data.solve_refs()
        for name, rows in sorted(training_data.batch.items()):
            figures = self.policies[name].update(rows, int(timesteps[UPDATE]), kwargs[KL_COEFS][name])
            self.policies[name].optimizer.zero_grad(set_to_none=True)  # their memory is the next LLM's
            self.metrics.log_dict(figures, key=name, window=1)
        return self.metrics.reduce()

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
        move_to_mean([policy.parameters for policy in self.policies.values()], share)

    def lend(self, module_id: str) -> None:
        """Lets an LLM hold the mean of all LLMs' weights, until `take_back`; its own are set aside."""
        policies = self.policies
        self._own = policies[module_id].model.state()
        with torch.no_grad():
            for tensors in zip(policies[module_id].parameters, *(p.parameters for p in policies.values()), strict=True):
                tensors[0].copy_(mean(tensors[1:]))

    def take_back(self, module_id: str) -> None:
        """Gives an LLM that was lent its own weights back."""
        self.policies[module_id].model.load(self._own)
        self._own = {}

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Rows, fwd_out: Any) -> Tensor:
        """An LLM's loss over rows that are estimated, summed over response tokens."""
        return self.policies[module_id].loss(batch)[0]

    def get_parameters(self, module: Any) -> list[Any]:
        """The trainable parameters only."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; weights are taken even from an older state than the present one.

        The learning rate, which optimizers carry along in their state, stays this learner's own: Tune's
        population-based training changes it in a clone.
        """
        self._weights_seq_no = 0
        super().set_state(state)
        for policy in self.policies.values():
            policy.keep_own()
        self.earlier = {name: state[name] for name in ("kl_coefs", "score_moments") if name in state}


def on_cpu(rows: Rows) -> Rows:
    """Returns rows whose columns are in the machine's memory."""
    return {name: column.cpu() for name, column in rows.items()}
