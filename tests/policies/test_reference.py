"""The reference is loaded and used only if a KL weight needs it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies.learning.policy_model import PolicyModel
from policies.rllib.causal_lm_module import module_config
from policies.settings.memory import estimate_learner, model_shapes
from tests.paper import make_settings
from tests.policies.conftest import MakeCory


@pytest.mark.parametrize("eval_kl_coef", [None, 0.1])
def test_without_a_kl_penalty_training_never_uses_the_reference(
    make_cory: MakeCory, monkeypatch: pytest.MonkeyPatch, eval_kl_coef: float | None
) -> None:
    uses: list[str] = []
    reference, phase = PolicyModel.reference, ["start"]

    def record(model: PolicyModel) -> Any:
        uses.append(phase[0])
        return reference(model)

    monkeypatch.setattr(PolicyModel, "reference", record)
    algorithm = make_cory(kl_coef=0.0, eval_kl_coef=eval_kl_coef, eval_every=1, check_weight_sync=True)
    evaluate = algorithm.evaluator.evaluate

    def record_evaluation() -> Any:
        phase[0] = "evaluation"
        result = evaluate()
        phase[0] = "training"
        return result

    monkeypatch.setattr(algorithm.evaluator, "evaluate", record_evaluation)
    phase[0] = "training"
    report = algorithm.train()["cory"]
    assert set(uses) == (set() if eval_kl_coef is None else {"evaluation"})
    training = [*report["policy"].values(), *report["role"].values()]
    held_out = [*report["evaluation"].values(), report["last_response"]]
    for metrics in (*training, *held_out):
        measured = eval_kl_coef is not None and metrics in held_out
        kl = metrics["bare_kl" if metrics is report["last_response"] else "kl"]
        assert math.isnan(kl) is not measured
        if eval_kl_coef is None:
            assert metrics["combined_reward"] == metrics["task_reward"]
        elif measured:
            expected = metrics["task_reward"] - 0.1 * kl
            assert metrics["combined_reward"] == pytest.approx(expected, abs=1e-5)
        else:
            assert math.isnan(metrics["combined_reward"])
    assert math.isnan(report["last_response"]["in_chain_kl"]) is (eval_kl_coef is None)
    assert "kl" not in {warning["signature"] for warning in report["health"]}
    assert report["policy"]["llm_1"]["policy_loss"] != 0.0


def test_the_memory_plan_counts_a_reference_only_if_evaluations_measure_the_kl() -> None:
    def parts(**settings: Any) -> set[str]:
        s = make_settings(settings)
        assert module_config(s, "llm_1")["reference"] is s.evaluates_with_reference
        return set(estimate_learner(s, model_shapes(s)).parts)

    assert "reference" in parts(kl_coef=0.1) and "reference" in parts(kl_coef=0.0, eval_kl_coef=0.1)
    assert "reference" not in parts(kl_coef=0.0)
    assert "base and reference" in parts(weights="lora") and "base" in parts(weights="lora", kl_coef=0.0)


def test_the_reference_is_needed_if_a_kl_coef_is_above_zero() -> None:
    for values, needed in (
        ({"kl_coef": 0.2}, (True, True)),
        ({"kl_coef": 0.2, "eval_kl_coef": 0.0}, (True, True)),
        ({"kl_coef": 0.0}, (False, False)),
        ({"kl_coef": 0.0, "eval_kl_coef": 0.1}, (False, True)),
    ):
        s = make_settings(values)
        assert (s.trains_with_reference, s.evaluates_with_reference) == needed, values
