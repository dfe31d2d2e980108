"""The critic: a value head on a language model's last hidden states."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueHead(nn.Linear):
    """The critic: linear in the last hidden state, initialised to zero."""

    def __init__(self, hidden: int) -> None:
        """Creates the head for hidden states of this width."""
        super().__init__(hidden, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """The value before each response token: `[E]`, of fp32 hidden states `[E, H]`."""
        return F.linear(hidden, self.weight, self.bias).squeeze(-1)  # with FSDP, self(hidden) would free the weights


def head_width(lm: PreTrainedModel) -> int:
    """Width of the hidden states at the LM's output head; OPT-350m projects them down before it."""
    return int(lm.get_output_embeddings().weight.shape[1])
