"""The critic: a value head on a language model's last hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.learning.rows import Rows


class ValueHead(nn.Linear):
    """The critic: linear in the last hidden state, initialised to zero.

    A centralised critic (`critic_inputs=chain`; used in training only, the policy does not see its inputs) also has,
    for each role, a bias and a weight for the task reward of each earlier response.
    """

    def __init__(self, hidden: int, agents: int) -> None:
        """Creates the head.

        Args:
            hidden: width of the hidden states.
            agents: number of agents in the chain, for a centralised critic; 0: the critic sees only tokens.
        """
        super().__init__(hidden, 1)
        self.agents = agents
        if agents:
            self.of_role = nn.Parameter(torch.zeros(agents))
            self.of_earlier = nn.Parameter(torch.zeros(agents, agents - 1))
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, hidden: Tensor, rows: Rows, of_row: Tensor) -> Tensor:
        """The value before each response token.

        Args:
            hidden: `[E, H]`, fp32.
            rows: the responses; a centralised critic uses their `positions` and `earlier_rewards`.
            of_row: int64 `[E]`, the row of each token.

        Returns:
            `[E]`.
        """
        values = F.linear(hidden, self.weight, self.bias).squeeze(-1)  # with FSDP, self(hidden) would free the weights
        if not self.agents:
            return values
        positions, earlier = rows["positions"], rows["earlier_rewards"]
        earlier = F.pad(earlier, (0, self.agents - 1 - earlier.shape[1]))  # evaluations may have fewer agents
        chain_values = self.of_role[positions] + (self.of_earlier[positions] * earlier).sum(1)
        return values + chain_values[of_row]


def head_width(lm: PreTrainedModel) -> int:
    """Width of the hidden states at the LM's output head; OPT-350m projects them down before it."""
    return int(lm.get_output_embeddings().weight.shape[1])
