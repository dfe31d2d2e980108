"""Policies that are sharded over several processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from policies.learning import stored_policy
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import TrainRows
from policies.learning.sharding import learner_mesh, transformer_blocks
from policies.models.language_model import init_empty
from policies.models.lora import Lora
from policies.models.model_check import ModelError
from policies.models.stored_weights import StoredWeights
from policies.sync_check import perturb
from tests.forked import run_ranks
from tests.paper import paper_hyperparameters
from tests.policies.learning.test_policy_learner import VOCAB, make_row_batch, path, ready

__all__ = ["path"]

RANKS = 3
SAMPLING = {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": 1.5}
COUNTS = (6, 6, 1)
"""Rows per update. With a single row, all ranks but one get none."""


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of two layers with an untied head, in several files."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return str(folder)


def make_learner(path: str, weights: str, mesh: Any = None, dtype: str = "fp32", **others: Any) -> PolicyLearner:
    hyper = paper_hyperparameters(
        **{
            "lr": 1e-4,
            "num_epochs": 2,
            "steps": 2,
            "grad_clip": 0.5,
            "micro_batch_size": 2,
            "kl_estimator": "full",
            **others,
        }
    )
    lora = Lora(4, 8.0) if weights == "lora" else None
    model = PolicyModel(
        path, dtype=dtype, critic=hyper.critic, lora=lora, gradient_checkpointing=lora is not None, mesh=mesh
    )
    model.load(perturb(model.state(), 0))
    return PolicyLearner(model, hyper, name="llm_1")


def batch(learner: PolicyLearner, count: int) -> TrainRows:
    groups = torch.tensor([0, 0, 0, 1, 1, 1])[:count]
    return ready(learner, replace(make_row_batch(count), groups=groups))


def learn(learner: PolicyLearner, updates: range) -> list[dict[str, float]]:
    return [learner.update(batch(learner, COUNTS[update]), update) for update in updates]


def rank(number: int, cases: list[tuple[str, str, dict[str, Any]]], out: str) -> None:
    """Trains two updates, saves and continues; then resumes from a single process's checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=RANKS)
    mesh = learner_mesh(1, RANKS, "cpu")["shard"]
    for case, (model, weights, others) in enumerate(cases):
        learner = make_learner(model, weights, mesh, **others)
        learner.check_forward()
        assert learner.model.cost is not None
        assert all(isinstance(parameter, DTensor) for parameter in learner.model.parameters())
        size = sum(tensor.numel() for tensor in learner.model.local_weights())
        metrics = learn(learner, range(2))
        learner.save(f"{out}/{case}/sharded/weights", f"{out}/{case}/sharded/moments")
        metrics += learn(learner, range(2, 3))
        state, scores = learner.model.state(), learner.score(make_row_batch())
        engine_weights = dict(lm_weights(learner))
        assert list(dict(learner.stream_weights())) == ([] if number else list(engine_weights))
        zero_scores = learner.score_under({name: 0 * array for name, array in engine_weights.items()}, make_row_batch())
        after = learner.model.state()
        learner.restore(f"{out}/{case}/single/weights", f"{out}/{case}/single/moments")
        learn(learner, range(2, 3))
        torch.save((size, metrics, state, scores, zero_scores, after, learner.model.state()), f"{out}/{case}/{number}")
    dist.destroy_process_group()


def relative_distance(one: dict[str, Any], other: dict[str, Any], start: dict[str, Any]) -> float:
    """Distance between two trained states, relative to the distance from the start to the second."""
    distance = sum(float(((one[name] - other[name]) ** 2).sum()) for name in start)
    return float(np.sqrt(distance / sum(float(((other[name] - start[name]) ** 2).sum()) for name in start)))


def lm_weights(learner: PolicyLearner) -> list[tuple[str, Any]]:
    state = learner.model.state()
    return [(name.removeprefix("lm."), array) for name, array in state.items() if name.startswith("lm.")]


def test_a_sharded_policy_trains_and_scores_like_a_single_process_and_each_resumes_the_other_s_checkpoint(
    path: str, llama: str, tmp_path: Path
) -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        (path, "full", {}),  # GPT-2: tied embeddings
        (llama, "full", {"advantage": "rloo", "loss": "gspo", "entropy_coef": 0.1, **SAMPLING}),
        (llama, "lora", {"offload_optimizer": True, "loss": "cispo", "entropy_coef": 0.1}),
        (llama, "full", {"dtype": "bf16"}),  # rounds differently: embeddings and norms are gathered in bf16 too
    ]
    expected = []
    for case, (model, weights, others) in enumerate(cases):
        learner = make_learner(model, weights, **others)
        metrics = learn(learner, range(2))
        learner.save(str(tmp_path / str(case) / "single/weights"), str(tmp_path / str(case) / "single/moments"))
        metrics += learn(learner, range(2, 3))
        zeros = {name: 0 * array for name, array in lm_weights(learner)}
        rows = make_row_batch()
        expected.append((metrics, learner.model.state(), learner.score(rows), learner.score_under(zeros, rows)))
    run_ranks(rank, RANKS, cases, str(tmp_path))
    for case, (model, weights, others) in enumerate(cases):
        metrics, state, scores, zero_scores = expected[case]
        exact = "dtype" not in others
        weight_atol, score_atol, metric_rtol = (5e-5, 2e-5, 1e-3) if exact else (1e-3, 0.2, 0.1)
        sizes = []
        for number in range(RANKS):
            size, rank_metrics, sharded, rank_scores, rank_zero_scores, after, resumed = torch.load(
                tmp_path / str(case) / str(number), weights_only=False
            )
            sizes.append(size)
            for ours, theirs in zip(rank_metrics, metrics, strict=True):
                assert ours == pytest.approx(theirs, rel=metric_rtol, abs=1e-5 if exact else 0.05)
            start = make_learner(model, weights, **others).model.state()
            distances = (relative_distance(weights_after, state, start) for weights_after in (sharded, resumed))
            assert max(distances) < (0.02 if exact else 0.5)
            for name, array in state.items():
                assert abs(sharded[name] - array).max() < weight_atol
                assert abs(resumed[name] - array).max() < weight_atol
                assert (after[name] == sharded[name]).all()
            for actual, wanted in ((rank_scores, scores), (rank_zero_scores, zero_scores)):
                for name, column in wanted.columns().items():
                    torch.testing.assert_close(actual.columns()[name], column, rtol=0, atol=score_atol)
        total = sum(array.size for array in state.values())
        assert sum(sizes) == total and max(sizes) < total / RANKS * 1.5  # adapters have few rows
        single = make_learner(model, weights, **others)
        single.restore(str(tmp_path / str(case) / "sharded/weights"), str(tmp_path / str(case) / "sharded/moments"))
        stored = stored_policy.open_weights(str(tmp_path / str(case) / "sharded/weights"))
        assert stored.keys() == state.keys()
        assert all((stored[name] == array).all() for name, array in single.model.state().items())
        learn(single, range(2, 3))
        for name, array in single.model.state().items():
            assert abs(array - state[name]).max() < weight_atol


def test_a_family_that_declares_no_blocks_is_rejected(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = init_empty(llama)
    assert [type(block).__name__ for block in transformer_blocks(lm)] == ["LlamaDecoderLayer"] * 2
    monkeypatch.setattr(lm, "_no_split_modules", [])
    with pytest.raises(ModelError, match=r"does not declare them .* Set shards_per_policy=1\."):
        transformer_blocks(lm)


def test_every_part_of_a_tensor_must_be_stored_exactly_once(tmp_path: Path, llama: str) -> None:
    learner = make_learner(llama, "full")
    learner.save(str(tmp_path / "weights"), str(tmp_path / "moments"))
    (file,) = (tmp_path / "weights").iterdir()
    shutil.copy(file, file.with_name("shard-00002-model-00001-of-00001.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"has missing or duplicate parts of lm\..*"):
        learner.restore(str(tmp_path / "weights"), None)


def test_files_with_tensors_that_the_model_lacks_are_not_read_row_by_row(tmp_path: Path, llama: str) -> None:
    lm = init_empty(llama)
    names = StoredWeights(llama).names(lm)
    assert names is not None and names.keys() == {name for name, _ in lm.named_parameters()}
    folder = shutil.copytree(llama, tmp_path / "scaled")
    (first, *_) = sorted(folder.glob("*.safetensors"))
    save_file(load_file(first) | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, first)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.up_proj.weight_scale"] = first.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert StoredWeights(str(folder)).names(lm) is None
