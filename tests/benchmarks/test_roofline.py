"""Where an update's time would go, by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.roofline import LOST, Machine, spent, uneven
from policies.settings.memory import model_shapes
from policies.settings.settings import Settings
from tests.paper import make_settings


def settings(**values: Any) -> Settings:
    apart = {"num_learners": 2, "gpus_per_learner": 1, "gpus_per_runner": 1, "dtype": "bf16"}
    return make_settings({"queries_per_update": 64, "minibatch_size": 64, **apart, **values})


def test_the_parts_are_all_of_an_update_and_each_setting_moves_the_part_that_it_is_about() -> None:
    s = settings()
    (model, _) = model_shapes(s)
    plain = spent(s, model, Machine(), 1)
    assert tuple(plain) == LOST and sum(plain.values()) == pytest.approx(1)
    assert all(-1e-9 <= share < 1 for share in plain.values()) and plain["twice"] == 0 < plain["waiting"]
    assert spent(settings(gradient_checkpointing=True), model, Machine(), 1)["twice"] > 0
    assert spent(settings(checkpoint_every=1), model, Machine(), 1)["save"] > plain["save"]
    assert spent(s, model, Machine(engine=1e6), 1)["sync"] > plain["sync"]
    assert spent(s, model, Machine(memory=1e9), 1)["decode"] > plain["decode"]
    split = settings(shards_per_policy=2, num_learners=4)
    slow = spent(split, model, Machine(link=1e6), 1)
    assert slow["traffic"] > 0.5 > spent(split, model, Machine(), 1)["traffic"]


def test_rows_cost_more_than_their_tokens_where_they_are_padded_or_wait_for_one_another() -> None:
    alone = settings(micro_batch_size=1)
    assert uneven(alone) == 1.0
    assert 1.0 < uneven(settings(micro_batch_size=8)) < 2.0
    assert uneven(settings(micro_batch_size=1, shards_per_policy=2, num_learners=4)) > 1.0
