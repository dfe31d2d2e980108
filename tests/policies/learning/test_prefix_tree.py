"""Rows in prefix trees: every token sees what it sees in a plain row, and learning computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from policies.learning.forward.prefix_tree import ForwardCost, Layout, Pack, Paths
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows, make_rows
from policies.models.families import supports_prefix_trees
from policies.models.lora import Lora
from policies.sync_check import perturb
from tests.policies.learning.test_policy_learner import VOCAB, gradients, make_learner, path, ready  # noqa: F401
from tests.policies.models.test_families import save_model

FREE = ForwardCost(attention=0.0, head=0.0)
"""Only tokens cost something, so that prefixes are shared wherever there are any."""


def rows_of(pairs: list[tuple[list[int], list[int]]], **columns: Any) -> Rows:
    """Rows of (prompt, response)."""
    prompts, responses = zip(*pairs, strict=True)
    count = len(pairs)
    logprobs = [[-4.0] * len(response) for response in responses]
    return make_rows(prompts, responses, logprobs, [float(row) for row in range(count)], [True] * count, **columns)


def chain_rows(seed: int = 0) -> Rows:
    """Groups of a pioneer, prompts that continue its responses, equal responses, responses that share a prefix."""
    random = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return random.integers(1, VOCAB, random.integers(low, high)).tolist()

    system, pairs = tokens(4, 5), []
    for _ in range(3):
        prompt = [*system, *tokens(1, 5)]
        answers = [tokens(1, 7) for _ in range(3)]
        answers.append([*answers[0][:1], *tokens(1, 4)])
        pairs += [(prompt, answer) for answer in answers] + [(prompt, answers[1])]
        pairs += [([*prompt, *answers[0], *tokens(1, 4)], tokens(1, 6)) for _ in range(2)]
    pairs = [pairs[row] for row in random.permutation(len(pairs))]
    positions = [int(len(prompt) > 8) for prompt, _ in pairs]
    return rows_of(pairs, groups=[row // 3 for row in range(len(pairs))], positions=positions)


def read(rows: Rows, layout: Layout) -> list[list[tuple[list[int], int]]]:
    """For each row what the model sees where each response token is predicted, in order of depth, and the token."""
    contexts: list[list[tuple[list[int], int]]] = [[] for _ in rows.mask]
    count = layout.tokens.shape[1]
    mask = layout.attention_mask(CONFIG_MAPPING["gpt2"](), torch.float32)
    assert isinstance(mask, Tensor)
    for source, row, position in torch.stack([layout.sources, layout.rows, layout.positions], dim=1).tolist():
        pack, node = source // layout.num_logits, count - layout.num_logits + source % layout.num_logits
        visible = (mask[pack, 0, node] == 0).nonzero()[:, 0]
        depths = layout.depths[pack, visible]
        assert sorted(depths.tolist()) == list(range(len(visible)))
        seen = layout.tokens[pack, visible[depths.argsort()]].tolist()
        contexts[row].append((seen, int(rows.responses[row, position])))
    return contexts


def test_a_tree_of_three_rows_by_hand() -> None:
    rows = rows_of([([1, 2], [3, 4]), ([1, 2], [5]), ([1, 2, 9], [6, 7])])
    paths = Paths(rows)
    (pack,) = paths.packs(limit=64, size=64)
    assert pack == Pack(start=0, end=3, nodes=5, predicting=4)
    assert paths.index([pack]).tolist() == [1, 0, 2]  # 1 2 | 1 2 3 | 1 2 9 6, without the last tokens
    layout = paths.layout([pack])
    assert layout.tokens.tolist() == [[0, 0, 0, 1, 2, 3, 9, 6]]
    assert layout.depths.tolist() == [[0, 0, 0, 0, 1, 2, 2, 3]]
    assert layout.preorder.tolist() == [[-1] * 3 + [0, 1, 2, 3, 4]]
    assert layout.ends.tolist() == [[0] * 3 + [5, 5, 3, 5, 5]]
    assert layout.num_logits == 4 and layout.shared
    # 5 and 3 follow 2; 4 follows 3; 6 follows 9; 7 follows 6.
    assert layout.sources.tolist() == [0, 0, 1, 2, 3]
    assert layout.rows.tolist() == [0, 1, 1, 2, 2] and layout.positions.tolist() == [0, 0, 1, 0, 1]


def test_rows_that_continue_one_another_are_a_path_with_plain_causal_attention() -> None:
    rows = replace(rows_of([([1, 2], [3, 4]), ([1, 2], [5]), ([1, 2, 3], [6, 7])]), turns=torch.arange(3))
    paths = Paths(rows)
    (pack,) = paths.packs(limit=64, size=64)
    assert pack == Pack(start=0, end=3, nodes=4, predicting=3)
    assert paths.index([pack]).tolist() == [1, 0, 2]  # 1 2 | 1 2 3 | 1 2 3 6, without the last tokens
    layout = paths.layout([pack])
    assert layout.tokens.tolist() == [[1, 2, 3, 6]] and layout.depths.tolist() == [[0, 1, 2, 3]]
    assert layout.num_logits == 3 and not layout.shared
    # 5 and 3 follow 2; 4 and 6 follow 3; 7 follows 6.
    assert layout.sources.tolist() == [0, 0, 1, 1, 2]
    assert layout.rows.tolist() == [0, 1, 1, 2, 2] and layout.positions.tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [0, 12, 30, 1000])
def test_a_token_is_predicted_from_exactly_the_tokens_before_it_in_its_row(seed: int, limit: int) -> None:
    rows = chain_rows(seed)
    paths = Paths(rows)
    packs = paths.packs(limit, size=64)
    assert sum(pack.end - pack.start for pack in packs) == len(rows.mask)
    assert all(pack.nodes <= limit or pack.end - pack.start == 1 for pack in packs)
    chosen = rows.trim(paths.index(packs))
    layout = paths.layout(packs)
    assert int((layout.preorder >= 0).sum()) == sum(pack.nodes for pack in packs)
    if not layout.shared:
        layout = layout._replace(shared=True)  # the same mask in four dimensions
    for row, seen in enumerate(read(chosen, layout)):
        prompt = chosen.prompts[row][chosen.prompt_mask[row].bool()].tolist()
        response = chosen.responses[row][chosen.mask[row].bool()].tolist()
        assert seen == [([*prompt, *response[:index]], token) for index, token in enumerate(response)]
    if limit == 1000:
        prefixes = {tuple(row) for row in _prefixes(chosen)}
        assert len(packs) == 1 and packs[0].nodes == len(prefixes)  # no token is computed twice


def _prefixes(rows: Rows) -> Iterator[list[int]]:
    for row in range(len(rows.mask)):
        prompt = rows.prompts[row][rows.prompt_mask[row].bool()].tolist()
        both = prompt + rows.responses[row][rows.mask[row].bool()].tolist()
        yield from (both[:length] for length in range(1, len(both)))


@pytest.mark.parametrize(("size", "tokens", "ranks"), [(64, None, 1), (5, None, 1), (64, 40, 1), (3, 25, 2)])
def test_micro_batches_hold_every_row_once_within_their_limits(size: int, tokens: int | None, ranks: int) -> None:
    rows = chain_rows()
    paths = Paths(rows)
    shares = paths.micro_batches(size, tokens, FREE, ranks)
    assert len(shares) == ranks
    batches = [packs for share in shares for packs in share]
    assert sorted(torch.cat([paths.index(packs) for packs in batches]).tolist()) == list(range(len(rows.mask)))
    for packs in batches:
        assert sum(pack.end - pack.start for pack in packs) <= size
        nodes = len(packs) * max(pack.nodes for pack in packs)
        assert tokens is None or nodes <= tokens or (len(packs) == 1 and packs[0].end - packs[0].start == 1)
    plain = sum(pack.nodes for pack in paths.packs(0, size))
    assert sum(pack.nodes for packs in batches for pack in packs) < plain


def test_rows_that_share_little_stay_plain_if_attention_costs_more() -> None:
    random = np.random.default_rng(0)
    start = random.integers(1, VOCAB, 3).tolist()
    rows = rows_of([([*start, *random.integers(1, VOCAB, 9).tolist()], [1, 2]) for _ in range(16)])
    paths = Paths(rows)
    (share,) = paths.micro_batches(64, None, ForwardCost(attention=0.02, head=0.0))
    assert all(pack.end - pack.start == 1 for packs in share for pack in packs)
    (share,) = paths.micro_batches(64, None, FREE)
    assert len(share[0]) == 1


def test_every_rank_gets_a_share_rather_than_one_all_of_the_work() -> None:
    rows = rows_of([([1, group], [1, 2]) for group in range(2, 6) for _ in range(4)])
    shares = Paths(rows).micro_batches(64, None, FREE, ranks=4)
    assert [len(Paths(rows).index(packs)) for share in shares for packs in share] == [4, 4, 4, 4]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("lora", {"advantage": "rloo", "entropy_coef": 0.1}),
    ("full", {"advantage": "grpo", "kl_estimator": "k3", "loss": "gspo"}),
    ("lora", {"offload_optimizer": True}),
]


@pytest.mark.parametrize(("weights", "others"), CASES, ids=["critic", "lora", "gspo", "offload"])
def test_scores_metrics_and_gradients_are_those_of_plain_rows(
    path: str,  # noqa: F811
    weights: str,
    others: dict[str, Any],
) -> None:
    learners = [make_learner(path, weights, micro_batch_size=8, **others) for _ in range(2)]
    shared, plain = learners
    shared.model.cost = FREE
    shared.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    rows = [ready(learner, chain_rows()) for learner in learners]
    for name, column in rows[0].columns().items():
        torch.testing.assert_close(column, rows[1].columns()[name], rtol=0, atol=1e-5)
    metrics = [learner.update(columns, 0, kl_coef=0.1) for learner, columns in zip(learners, rows, strict=True)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    for name, gradient in gradients(shared).items():
        expected = gradients(plain)[name]
        assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-8


def test_a_bf16_base_with_adapters_differs_by_rounding_only(
    path: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: a CPU would keep the base in fp32."""
    monkeypatch.setattr("policies.learning.policy_model.base_dtype", lambda *_: torch.bfloat16)
    models = [PolicyModel(path, dtype=dtype, critic=False, lora=Lora(4, 8.0)) for dtype in ("fp32", "bf16", "bf16")]
    rows = chain_rows()
    paths = Paths(rows)
    packs = paths.packs(64, 64)
    chosen = rows.select(paths.index(packs))
    logprobs, slopes = [], []
    for model, layout in zip(models, (None, None, paths.layout(packs)), strict=True):
        model.load(perturb(model.state(), 0))
        logprobs.append(model.score(chosen, layout).logprobs)
        model(chosen, layout)[0].sum().backward()
        slopes.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    assert {weight.dtype for weight in models[2].lm.parameters()} == {torch.bfloat16, torch.float32}
    for exact, plain, tree in (logprobs, slopes):
        assert 0 < float((tree - exact).norm()) <= 1.5 * float((plain - exact).norm())


def test_mini_batches_keep_rows_with_the_same_prompt_together_and_are_equally_large(path: str) -> None:  # noqa: F811
    learner = make_learner(path, "full", steps=4)
    rows = rows_of([([1, group], [1, 2]) for group in (7, 8, 9, 10) * 4])
    prompts = [rows.prompts[index, 1].tolist() for index in learner._minibatches(rows, 0, 0)]
    assert sorted(map(set, prompts), key=min) == [{7}, {8}, {9}, {10}]
    orders = [[index.tolist() for index in learner._minibatches(rows, update, 0)] for update in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    learner.hyperparameters = replace(learner.hyperparameters, steps=3)
    sizes = [len(index) for index in learner._minibatches(rows, 0, 0)]
    assert sizes == [6, 5, 5]


SHARING = ("gpt2", "llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3", "olmo2", "mixtral", "gpt_neox", "opt")
"""Families, most of all those with sliding windows or learned positions."""
PLAIN = ("bloom", "mpt", "falcon_h1", "gpt_neo")
"""Positions counted in keys, recurrent layers, and windows counted in keys."""


def difference(folder: Path, model_type: str) -> float:
    """The largest difference of a tiny model's scores in a tree from those of plain rows; its windows are exceeded."""
    model = PolicyModel(save_model(folder, model_type), dtype="fp32", critic=False)
    rows = chain_rows()
    paths = Paths(rows)
    packs = paths.packs(64, 64)
    chosen = rows.select(paths.index(packs))
    plain, tree = model.score(chosen).columns(), model.score(chosen, paths.layout(packs)).columns()
    return max(float((plain[name] - tree[name]).abs().max()) for name in plain)


@pytest.mark.parametrize("model_type", SHARING)
def test_a_family_computes_the_same_in_a_tree(tmp_path: Path, model_type: str) -> None:
    model = PolicyModel(save_model(tmp_path, model_type), dtype="fp32", max_length=100)
    windowed = model_type == "mistral"  # a window of 8 in all layers, which only plain rows can have
    assert supports_prefix_trees(model.lm.config, 100) is not windowed
    model.check_forward()
    assert (model.cost is None) is windowed
    if not windowed:
        assert difference(tmp_path, model_type) < 2e-5


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_family_that_computes_something_else_in_a_tree_uses_plain_rows(tmp_path: Path, model_type: str) -> None:
    model = PolicyModel(save_model(tmp_path, model_type), dtype="fp32", max_length=100)
    model.check_forward()
    assert model.cost is None


def test_a_window_that_no_row_exceeds_allows_trees() -> None:
    config = CONFIG_MAPPING["mistral"](sliding_window=64)
    assert (
        supports_prefix_trees(config, 64)
        and not supports_prefix_trees(config, 65)
        and not supports_prefix_trees(config, None)
    )
    assert supports_prefix_trees(CONFIG_MAPPING["mistral"](sliding_window=None), None)
    assert not supports_prefix_trees(
        CONFIG_MAPPING["lfm2"](num_hidden_layers=2, layer_types=["conv", "full_attention"]), 16
    )
    assert supports_prefix_trees(CONFIG_MAPPING["qwen3_moe"](max_window_layers=48, sliding_window=None), 64)
    for model_type in ("llama4_text", "qwen3_next"):  # attention in chunks, recurrent layers
        assert not supports_prefix_trees(CONFIG_MAPPING[model_type](), 16)


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host, which wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default or function is torch.ops.aten.nonzero.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_host_reads(learner: PolicyLearner, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostReads]:
    """Counts them during the forward and backward passes of micro-batches, not while these are planned on the host."""
    reads, loss = HostReads(), learner.loss
    backward, tolist = Tensor.backward, Tensor.tolist

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with reads:
                return function(*args, **kwargs)

        return call

    def counted_tolist(tensor: Tensor) -> Any:
        reads.count += 1
        return tolist(tensor)

    with monkeypatch.context() as patches:
        patches.setattr(learner, "loss", counted(loss))
        patches.setattr(Tensor, "backward", counted(backward))
        patches.setattr(Tensor, "tolist", counted_tolist)
        yield reads


@pytest.mark.parametrize("others", [{}, {"advantage": "grpo", "loss": "cispo", "entropy_coef": 0.1}], ids=str)
def test_forward_and_backward_passes_read_no_value_on_the_host(
    path: str,  # noqa: F811
    others: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = make_learner(path, "full", micro_batch_size=16, importance_sampling_clip_max=2.0, **others)
    learner.model.cost = FREE
    rows = ready(learner, chain_rows())  # all share a prefix; of plain rows, transformers reads the padding mask
    totals = torch.zeros(len(learner._sum_names), dtype=torch.float64)
    with counted_host_reads(learner, monkeypatch) as reads:
        learner._accumulate(rows, 0.1, totals)
    assert reads.count == 0 and totals.abs().sum() > 0
    with reads:
        totals.sum().item()
    assert reads.count == 1
