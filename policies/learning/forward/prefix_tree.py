"""Forward passes over packs of rows, in which a prefix that several rows share is computed once.

A pack holds the tokens of its rows as the nodes of a tree. A node's position id is its depth, it attends to itself and
its ancestors only, and it predicts the tokens that follow it in the rows. So its logits are those that each of its rows
would get alone. The last token of a row predicts nothing and is left out. A plain row is a pack of its own.

The nodes of a pack are numbered in preorder: the descendants of a node are the numbers from its own to the end of its
subtree, so two numbers per node give the attention mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from policies.learning.rows import Rows, send

LONGEST_PACK = 4096  # maximum number of nodes of a pack
ATTENTION_COST = 1.5  # time per operation of masked attention, relative to that of matrix products


class Layout(NamedTuple):
    """The input of a forward pass over `B` rows, and where in its logits each response token is predicted.

    `K` packs of at most `T` nodes, padded on the left.
    """

    tokens: Tensor  # int64 `[K, T]`
    depths: Tensor  # int64 `[K, T]`, the position ids
    preorder: Tensor  # int64 `[K, T]`, -1 on padding
    ends: Tensor
    """int64 `[K, T]`, the end of each node's subtree: a is b or above it if preorder[a] <= preorder[b] < ends[a]."""
    num_logits: int  # the last nodes of each pack, which need logits: all that predict response tokens are among them
    sources: Tensor  # int64 `[E]`, for each response token the node that predicts it, an index into `[K, num_logits]`
    rows: Tensor  # int64 `[E]`, each response token's row
    positions: Tensor  # int64 `[E]`, its position in the response
    shared: bool  # whether any pack branches, so that attention needs a mask of its own

    def to(self, device: torch.device) -> Layout:
        """Copies the tensors to a device; does not wait for it."""
        sent: dict[str, Any] = self._asdict()
        for name, part in sent.items():
            if isinstance(part, Tensor):
                sent[name] = send(part, device)
        return Layout(**sent)

    def attention_mask(self, config: PreTrainedConfig, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """The attention mask of the packs.

        Returns:
            Of plain rows, `[K, T]`. Of trees an additive mask `[K, 1, T, T]`, for each type of layers if the config has
            them; transformers uses it as it is, and does not apply sliding windows.
        """
        if not self.shared:
            return (self.preorder >= 0).long()
        queries = self.preorder.unsqueeze(2)
        visible = (self.preorder.unsqueeze(1) <= queries) & (queries < self.ends.unsqueeze(1))
        config = config.get_text_config()
        layer_types = set(getattr(config, "layer_types", None) or ())
        masks = dict.fromkeys(layer_types, visible)
        if "sliding_attention" in masks:
            first_visible = self.depths.unsqueeze(2) - config.sliding_window + 1
            masks["sliding_attention"] = visible & (self.depths.unsqueeze(1) >= first_visible)
        additive = {name: _additive(mask, dtype) for name, mask in masks.items()}
        return additive or _additive(visible, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


class Pack(NamedTuple):
    """Neighbouring rows of `Paths` that are forwarded as one sequence."""

    start: int
    end: int
    nodes: int  # distinct tokens
    predicting: int  # at least how many of them predict response tokens; a shared one may do so only in a later row


class ForwardCost(NamedTuple):
    """Cost of a forward pass relative to the matrix products of a transformer block (12 H² weights) per token."""

    attention: float  # per token and token of the pack, of all blocks
    head: float  # per token whose logits are computed
    longest: int = LONGEST_PACK  # maximum number of nodes of a pack

    @classmethod
    def from_config(cls, config: PreTrainedConfig, longest: int) -> Self:
        """The costs of a model, by its configuration."""
        config = config.get_text_config()
        head = config.vocab_size / (12 * config.hidden_size * config.num_hidden_layers)
        return cls(ATTENTION_COST / (6 * config.hidden_size), head, longest)

    def estimate(self, packs: Sequence[Pack]) -> float:
        """The cost of a micro-batch."""
        nodes, predicting = max(pack.nodes for pack in packs), max(pack.predicting for pack in packs)
        return len(packs) * (nodes * (1 + self.attention * nodes) + self.head * predicting)


def longest_pack(eager: bool, max_length: int | None) -> int:
    """The maximum number of nodes of a pack; with eager attention, which keeps all scores, that of two long rows."""
    return min(max(128, 2 * (max_length or 0)), LONGEST_PACK) if eager else LONGEST_PACK


class Paths:
    """The tokens of `B` rows without the last one, sorted so that rows with a common prefix are neighbours."""

    def __init__(self, rows: Rows) -> None:
        """Sorts rows; they are on the CPU."""
        prompts, responses = rows.prompt_mask.sum(1).numpy(), rows.mask.sum(1).long().numpy()
        lengths = np.maximum(prompts + responses - 1, 1)
        both = torch.cat([rows.prompts, rows.responses], dim=1).numpy()
        depths = np.arange(lengths.max(initial=1))
        columns = rows.prompts.shape[1] - prompts[:, None] + depths
        tokens = np.take_along_axis(both, np.minimum(columns, both.shape[1] - 1), axis=1)
        tokens = np.where(depths < lengths[:, None], tokens, -1)
        keys = np.ascontiguousarray((tokens + 1).astype(">u4"))  # bytes that sort like tokens; padding first
        order = np.argsort(keys.view(np.dtype((np.void, keys.shape[1] * 4))).ravel(), kind="stable")
        self.order, self.tokens, self.lengths = order, tokens[order], lengths[order]
        self.prompts, self.responses = prompts[order], responses[order]
        self.has_turns = rows.turns is not None
        same = (self.tokens[1:] == self.tokens[:-1]) & (self.tokens[1:] >= 0)
        self.common = np.zeros(len(order), np.int64)  # tokens that each row shares with the one before it
        self.common[1:] = np.logical_and.accumulate(same, axis=1).sum(1)
        self.groups = np.append(np.flatnonzero(self.common < self.prompts), len(order))
        """The starts of the groups of rows with the same prompt, and the end of the last one."""

    def packs(self, limit: int, size: int) -> list[Pack]:
        """Cuts the rows into packs of at most `limit` nodes and `size` rows, if possible between groups.

        A group is rows with the same prompt. A row longer than `limit` is a pack of its own.
        """
        added = (self.lengths - self.common).tolist()
        predicting = np.minimum(self.lengths - self.common, self.responses).tolist()
        packs: list[Pack] = []

        def add(start: int, end: int) -> bool:
            """Adds rows to the last pack, if they fit."""
            if not packs:
                return False
            last = packs[-1]
            nodes = last.nodes + sum(added[start:end])
            if nodes > limit or end - last.start > size:
                return False
            packs[-1] = Pack(last.start, end, nodes, last.predicting + sum(predicting[start:end]))
            return True

        for start, end in itertools.pairwise(self.groups.tolist()):
            if add(start, end):
                continue
            for row in range(start, end):
                if row == start or not add(row, row + 1):
                    packs.append(Pack(row, row + 1, int(self.lengths[row]), int(self.responses[row])))
        return packs

    def micro_batches(
        self, size: int, tokens: int | None, cost: ForwardCost | None, ranks: int = 1
    ) -> list[list[list[Pack]]]:
        """Chooses how long packs are, and shares them out.

        Args:
            tokens: maximum number of its nodes, including padding; None: no limit. A longer row is a micro-batch of
                its own.
            cost: of the model, to choose the cheapest length; None: plain rows.

        Returns:
            The packs of each micro-batch of each rank.
        """
        choices = []
        for limit in [0] if cost is None else [0, *self._limits(min(cost.longest, tokens or cost.longest))]:
            packs = sorted(self.packs(limit, size), key=lambda pack: (pack.predicting, pack.nodes))
            choices.append([_split(packs[rank::ranks], size, tokens) for rank in range(ranks)])
            if len(packs) == 1:
                break
        if cost is None:
            return choices[0]
        return min(
            choices, key=lambda shares: max(sum(map(cost.estimate, share)) for share in shares)
        )  # the slowest rank

    def _limits(self, longest: int) -> Iterator[int]:
        """Lengths of packs to try: parts and multiples of the largest group, up to `longest`."""
        ends = np.append(0, np.cumsum(self.lengths - self.common))[self.groups]
        largest = int((np.diff(ends) + self.common[self.groups[:-1]]).max(initial=1))
        limit = -(-largest // 4)
        while limit < longest:
            yield limit
            limit *= 2
        yield longest

    def plain(self) -> list[Pack]:
        """Every row as a pack, in the order of the batch."""
        packs = self.packs(0, 1)
        return [packs[row] for row in np.argsort(self.order)]

    def index(self, packs: Sequence[Pack]) -> Tensor:
        """The indices in the batch of the rows of packs, int64 `[B]`."""
        return torch.from_numpy(np.concatenate([self.order[pack.start : pack.end] for pack in packs]))

    def layout(self, packs: Sequence[Pack]) -> Layout:
        """The forward pass over packs, whose rows keep this order."""
        rows = np.concatenate([np.arange(pack.start, pack.end) for pack in packs])
        tokens, lengths, prompts, responses = (
            x[rows] for x in (self.tokens, self.lengths, self.prompts, self.responses)
        )
        tokens = tokens[:, : lengths.max()]
        pack_of_row = np.repeat(np.arange(len(packs)), [pack.end - pack.start for pack in packs])
        is_first = np.diff(pack_of_row, prepend=-1) > 0
        common = np.where(is_first, 0, self.common[rows])
        count, depths = len(rows), np.arange(tokens.shape[1])

        # Row by row, the nodes that are not in an earlier row, numbered over all packs.
        is_new = (common[:, None] <= depths) & (depths < lengths[:, None])
        row_of_node, depth_of_node = is_new.nonzero()
        starts = np.append(0, np.cumsum(lengths - common))
        branches = common[:, None] <= depths  # whether a row has left the path of the row before it
        indices = np.arange(count)[:, None]
        owners = np.maximum.accumulate(np.where(branches, indices, 0))
        nodes = starts[owners] + depths - common[owners]  # [B, L], of each token of each row
        later = np.append(np.where(branches, indices, count), np.full((1, len(depths)), count), axis=0)
        next_branch = np.minimum.accumulate(later[::-1])[::-1][1:]  # the next row that leaves the path

        # Within each pack, those that predict response tokens come last, unless all packs are paths, such as the turns
        # of an agent, each of which continues the one before: then plain causal attention is enough.
        is_path = self.has_turns and bool((is_first | (common == np.append(0, lengths[:-1]))).all())
        pack_of_node = pack_of_row[row_of_node]
        bases = starts[:-1][is_first]
        sizes = np.diff(np.append(bases, starts[-1]))
        row_of_token = np.repeat(np.arange(count), responses)
        positions = np.arange(len(row_of_token)) - np.repeat(np.cumsum(responses) - responses, responses)
        sources = nodes[row_of_token, prompts[row_of_token] - 1 + positions]
        predicts = np.zeros(starts[-1], bool)
        predicts[sources] = True
        order = np.lexsort((predicts & (not is_path), pack_of_node))
        width = sizes.max()
        if len(packs) < count and not is_path:
            width = -(-width // 8) * 8  # else CUDA kernels would copy the mask in every layer, to align it
        slots = np.empty_like(order)
        slots[order] = np.arange(len(order)) + (width - sizes - bases)[pack_of_node]
        num_logits = int((width - slots[predicts]).max(initial=0))

        def padded(values: NDArray[np.int64], padding: int) -> Tensor:
            matrix = np.full((len(packs), width), padding)
            matrix[pack_of_node, slots] = values
            return torch.from_numpy(matrix)

        return Layout(
            tokens=padded(tokens[is_new], 0),
            depths=padded(depth_of_node, 0),
            preorder=padded(np.arange(len(order)) - bases[pack_of_node], -1),
            ends=padded(starts[next_branch[is_new]] - bases[pack_of_node], 0),
            num_logits=max(num_logits, 1),
            sources=torch.from_numpy(pack_of_node[sources] * num_logits + slots[sources] - (width - num_logits)),
            rows=torch.from_numpy(row_of_token),
            positions=torch.from_numpy(positions),
            shared=len(packs) < count and not is_path,
        )


def _split(packs: Sequence[Pack], size: int, tokens: int | None) -> list[list[Pack]]:
    """Cuts sorted packs into micro-batches of at most `size` rows and `tokens` nodes with padding."""
    micro_batches: list[list[Pack]] = []
    rows = width = 0
    for pack in packs:
        rows, width = rows + pack.end - pack.start, max(width, pack.nodes)
        fits = micro_batches and rows <= size and (tokens is None or (len(micro_batches[-1]) + 1) * width <= tokens)
        if fits:
            micro_batches[-1].append(pack)
        else:
            micro_batches.append([pack])
            rows, width = pack.end - pack.start, pack.nodes
    return micro_batches
