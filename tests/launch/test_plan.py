"""`cory plan`: the estimate beside what was measured, who finds room where, and what a cluster lacks."""

import re
import subprocess
import sys

import pytest

from launch.command import CommandError
from launch.configuration import presets, resolve
from launch.memory import Memory, learner, runner, shape
from launch.plan import Node, place, plan
from launch.session import check_driver, check_nodes, check_resources
from policies.cory_config import CoryConfig
from policies.language_model import ModelError
from policies.placement import Process, processes
from policies.settings import make_settings
from tests.launch.conftest import ENVIRONMENT

SMALL = Memory("cpu", {"libraries": 1e9}, 0.0)
ON_CLUSTER = """
import os
import ray
from launch.plan import plan

context = ray.init(address="local", num_cpus=1, resources={"sampling": 1}, include_dashboard=False, log_to_driver=False)
os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
code = plan(["imdb-tiny", "runner_resources=sampling=1"])
ray.shutdown()
print("code", code)
"""


def node(name: str, cpus: float = 4, gpus: int = 0, memory: float = 8e9, **custom: float) -> Node:
    return Node(name, cpus, [1.0] * gpus, custom, memory)


def placed(kinds: list[Process], *nodes: Node) -> tuple[list[str], dict[str, list[str]]]:
    lacking = place(kinds, {kind.name: [SMALL] for kind in kinds}, list(nodes))
    return lacking, {each.name: each.holds for each in nodes}


def test_the_estimate_is_near_what_the_benchmarks_measured() -> None:
    # `scaling` in benchmarks/README.md: 2.4 GB for driver, runner and reward of imdb-tiny, in bf16.
    settings = make_settings(
        {"queries": 128, "minibatch": 64, "micro_batch": 64, "max_response": 12, "dtype": "bf16", "epochs": 2}
    )
    model = shape(settings)
    assert model.parameters == 4_273_664
    total = learner(settings, model).total + runner(settings, model).total
    assert 0.8 < total / 2.4e9 < 1.2


def test_adapters_are_counted_as_peft_makes_them_and_cost_less_than_copies() -> None:
    from policies.adapters import adapted
    from policies.language_model import load_language_model

    settings = make_settings({"weights": "lora", "lora_rank": 4, "lora_targets": "c_attn"})
    assert settings.lora is not None
    model = adapted(load_language_model(settings.model_path).requires_grad_(False), settings.lora)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape(settings).adapter == trained > 0
    full = make_settings({})
    assert learner(settings, shape(settings)).total < learner(full, shape(full)).total


def test_each_of_the_gpus_that_an_engine_is_split_over_holds_its_part_and_on_a_cpu_all_parts_are_one_sum() -> None:
    whole = make_settings({"gpus_per_runner": 1, "dtype": "bf16"})
    split = make_settings({"gpus_per_runner": 2, "tensor_parallel": 2, "dtype": "bf16"})
    model = shape(split)
    one, each = runner(whole, model), runner(split, model)
    assert each.parts["weights"] == one.parts["weights"] / 2 == 2 * model.parameters
    assert each.parts["KV caches"] == one.parts["KV caches"] / 2
    assert each.host > one.host and each.share == one.share == 0.9
    copied = runner(split, model._replace(heads=1))
    assert copied.parts["KV caches"] == runner(whole, model._replace(heads=1)).parts["KV caches"]
    on_cpu = runner(make_settings({"runner_threads": 2, "tensor_parallel": 2, "dtype": "bf16"}), model)
    assert on_cpu.parts["weights"] == runner(make_settings({"dtype": "bf16"}), model).parts["weights"]


def test_a_split_engine_finds_room_on_gpus_that_would_not_hold_it_alone_but_not_on_those_of_two_nodes() -> None:
    need = {"runner": [Memory("cuda", {"weights": 15e9}, 0.0)]}
    split = Process("runner", 1, 1, 2, {})

    def gpus(count: int, memory: float) -> Node:
        return Node("a", 4, [1.0] * count, {}, 8e9, memory)

    assert place([split], need, [gpus(2, 16e9)]) == []
    assert "1 of a GPU is 14.0 GB" in place([split], need, [gpus(2, 14e9)])[0]
    assert "no room for 1 of 1 runner" in place([split], need, [gpus(1, 80e9), gpus(1, 80e9)])[0]
    values = {"tensor_parallel": 2, "gpus_per_runner": 2}
    config = CoryConfig().cory(**values)
    config.validate()
    assert config.num_gpus_per_env_runner == 2
    check_nodes(make_settings(values), [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 2}])
    with pytest.raises(CommandError, match=r"A runner asks for CPU=1, GPU=2, and .* \(GPU: at most 1 on one\)"):
        check_nodes(make_settings(values), [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}])


def test_a_driver_that_learns_shares_no_gpu_with_runners_that_need_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    both = {"num_runners": 1, "gpus_per_runner": 1, "gpus_per_learner": 1}
    for crowded in (both, {"num_runners": 2, "gpus_per_runner": 0.5, "gpus_per_learner": 0.5}):
        with pytest.raises(CommandError, match=r"do not fit on one\. Set num_learners=1\.$"):
            check_driver(make_settings(crowded))
        with pytest.raises(CommandError, match=r"do not fit on one\. Set num_learners=1\.$"):
            plan([f"{key}={value}" for key, value in crowded.items()])
        check_driver(make_settings({**crowded, "num_learners": 1}))
        check_driver(make_settings(crowded), own=1.0)
    for values in ({}, {**both, "gpus_per_runner": 0}, {"gpus_per_runner": 0.5, "gpus_per_learner": 0.5}):
        check_driver(make_settings(values))
    for preset in presets():
        check_driver(resolve(preset, [], []))


@pytest.mark.parametrize(
    ("values", "nodes", "refused"),
    [
        ({"runner_threads": 16}, [{"CPU": 8}] * 3, r"A runner asks for CPU=16, .* \(CPU: at most 8 on one\)\. Lower"),
        ({"runner_resources": "sampling=2"}, [{"CPU": 8, "sampling": 1}] * 2, "sampling: at most 1 on one"),
        ({"runner_threads": 2, "gpus_per_runner": 1}, [{"CPU": 8}, {"CPU": 1, "GPU": 2}], "not all on one"),
        ({"num_learners": 1, "gpus_per_learner": 2}, [{"CPU": 8, "GPU": 1}] * 2, "A learner asks for GPU=2"),
        ({"gpus_per_learner": 2}, [{"CPU": 8, "GPU": 1}] * 2, "A driver asks for CPU=1, GPU=2"),
    ],
)
def test_what_one_process_asks_for_is_on_one_node(
    values: dict[str, object], nodes: list[dict[str, float]], refused: str
) -> None:
    settings = make_settings({"num_runners": 1, **values})
    with pytest.raises(CommandError, match=refused):
        check_nodes(settings, nodes)
    check_nodes(settings, [*nodes, {"CPU": 16, "GPU": 2, "sampling": 2}])


def test_processes_go_where_what_they_ask_for_is() -> None:
    kinds = [
        Process("runner", 2, 1, 0, {"sampling": 1}),
        Process("learner", 1, 0, 1, {}),
        Process("driver", 1, 1, 0, {}),
    ]
    lacking, holds = placed(kinds, node("a"), node("b", gpus=1), node("c", sampling=2))
    assert lacking == []
    assert holds == {"a": ["1 driver"], "b": ["1 learner"], "c": ["2 runners"]}


@pytest.mark.parametrize(
    ("kind", "nodes", "reason"),
    [
        (Process("runner", 1, 1, 2, {}), [node("a", gpus=1), node("b", gpus=1)], "a has 1 GPUs left"),
        (Process("runner", 3, 1, 0.6, {}), [node("a", gpus=2)], "no room for 1 of 3 runners"),
        (Process("runner", 1, 8, 0, {}), [node("a"), node("b")], "b has 4 CPUs left"),
        (Process("runner", 1, 1, 0, {"fast": 1}), [node("a", sampling=2)], "a has 0 fast left"),
        (Process("runner", 2, 1, 0, {}), [node("a", memory=1.5e9)], "a has 0.5 GB of memory left"),
    ],
)
def test_what_no_node_has_is_named(kind: Process, nodes: list[Node], reason: str) -> None:
    lacking, _ = placed([kind], *nodes)
    assert len(lacking) == 1 and reason in lacking[0]


def test_this_machine_holds_the_preset_and_no_gpu_it_does_not_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert plan([]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^1 driver +1 +0 +\d\.\d \(leads and learns\)$", output, re.MULTILINE)
    assert re.search(r"^1 runner +1 +0 +\d\.\d \(2 vLLM engines\)$", output, re.MULTILINE)
    assert output.endswith("It fits.\n")
    assert plan(["imdb-tiny", "num_learners=1", "gpus_per_learner=64"]) == 1
    output = capsys.readouterr().out
    assert "Lacking: no room for 1 of 1 learner: this machine" in output and output.endswith("It does not fit.\n")
    with pytest.raises(ModelError, match="tensor_parallel=8 cannot split a model with 4 attention heads"):
        plan(["imdb-tiny", "gpus_per_runner=8", "tensor_parallel=8"])
    assert plan(["imdb-tiny", "gpus_per_runner=4", "tensor_parallel=4"]) == 1
    output = capsys.readouterr().out
    assert re.search(
        r"^1 runner +1 +4 +\d\.\d of each of 4 GPUs, \d+\.\d beside them; its engines take 90% of each "
        r"\(2 vLLM engines, each over 4 GPUs\)$",
        output,
        re.MULTILINE,
    )


def test_the_preset_like_the_released_code_is_planned_with_a_model_at_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    small = ["model=imdb-gpt2-tiny", "gpus_per_runner=0", "gpus_per_learner=0"]
    assert plan(["imdb-paper-compat", *small]) == 0
    assert capsys.readouterr().out.endswith("It fits.\n")


def test_a_cluster_is_asked_for_what_its_nodes_have() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ON_CLUSTER], env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("code 1\n")
    assert re.search(r"^node [\d.]+: 1 runner$", result.stdout, re.MULTILINE)
    assert re.search(
        r"^Lacking: no room for 1 of 1 driver: node [\d.]+ has 0 CPUs left\.$", result.stdout, re.MULTILINE
    )


def test_custom_resources_reach_rllib_and_a_cluster_without_them_is_refused() -> None:
    values = {"num_runners": 2, "num_learners": 1, "runner_resources": "sampling=1, fast=0.5"}
    config = CoryConfig().cory(**values, learner_resources="big=1")
    config.validate()
    assert config.custom_resources_per_env_runner == {"sampling": 1, "fast": 0.5}
    assert config.custom_resources_per_learner == {"big": 1}
    settings = make_settings(values)
    assert [kind.custom for kind in processes(settings)] == [{}, {"sampling": 1, "fast": 0.5}, {}]
    check_resources(settings, {"CPU": 8, "sampling": 2, "fast": 1})
    with pytest.raises(CommandError, match="ask for 2 of `sampling` in all, but the Ray cluster has 1"):
        check_resources(settings, {"CPU": 8, "sampling": 1, "fast": 1})
