"""`cory plan`: the estimate beside what was measured, who finds room where, and what a cluster lacks."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.roofline import MODELS
from cory_env.tokenizer import DEFAULT_TOKENIZER
from launch.cluster.placement import Node, check_placement, make_node, pack
from launch.cluster.session import check_driver
from launch.commands.plan import estimate, make_machines, plan
from launch.console.configuration import resolve
from launch.console.errors import CommandError
from launch.main import main
from policies.cory import CoryConfig
from policies.models.model_check import ModelError
from policies.models.model_names import BUNDLED_LM
from policies.settings.files import presets
from policies.settings.memory import Memory, learner, runner, shapes
from policies.settings.processes import Process, processes
from policies.settings.settings import Settings, make_settings


def test_the_estimate_is_near_what_the_benchmarks_measured() -> None:
    # `scaling` in benchmarks/README.md: 2.4 GB for driver, runner and reward of imdb-tiny, in bf16.
    settings = make_settings(
        {
            "queries_per_update": 128,
            "minibatch_size": 64,
            "micro_batch_size": 64,
            "max_response_tokens": 12,
            "dtype": "bf16",
            "num_epochs": 2,
        }
    )
    models = shapes(settings)
    assert [model.parameters for model in models] == [4_273_664] * 2
    total = learner(settings, models).total + runner(settings, models).total
    assert 0.8 < total / 2.4e9 < 1.2


def test_adapters_are_counted_as_peft_makes_them_and_cost_less_than_copies() -> None:
    from policies.models.adapters import add_lora
    from policies.models.language_model import load_language_model

    settings = make_settings({"weights": "lora", "lora_rank": 4, "lora_target_modules": "c_attn"})
    assert settings.lora is not None
    model = add_lora(load_language_model(settings.model_paths["llm_1"]).requires_grad_(False), settings.lora)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert [each.adapter for each in shapes(settings)] == [trained] * 2 and trained > 0
    full = make_settings({})
    assert learner(settings, shapes(settings)).total < learner(full, shapes(full)).total


def test_each_llm_counts_with_the_sizes_of_its_own_model(
    small_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    large, small, both = (
        make_settings({"model": model, "dtype": "fp32"})
        for model in (BUNDLED_LM, small_model, [BUNDLED_LM, small_model])
    )
    one, other = shapes(large)[0], shapes(small)[0]
    assert one.parameters > 5 * other.parameters and shapes(both) == [one, other]
    of_all = 4.0 * (one.parameters + other.parameters)
    parts = learner(both, [one, other]).parts
    assert parts["weights"] == parts["reference"] == parts["Adam"] / 2 == of_all
    assert parts["gradients"] == 4.0 * one.parameters  # LLMs learn one after another
    assert learner(large, [one, one]).parts["reference"] == 4.0 * one.parameters
    engines = runner(both, [one, other]).parts
    assert engines["weights"] == of_all
    assert 2 * engines["KV caches"] == sum(runner(each, shapes(each)).parts["KV caches"] for each in (large, small))
    assert plan(["imdb-tiny", f"model=[{BUNDLED_LM}, {small_model}]"]) == 0
    output = capsys.readouterr().out
    assert f"{BUNDLED_LM}: 4.3 M parameters, model family gpt2: " in output
    assert f"{small_model}: 0.4 M parameters, model family " in output
    with pytest.raises(ModelError, match=f"tensor_parallel_size=4 cannot split {small_model} with 2 attention heads"):
        plan(["imdb-tiny", f"model=[{BUNDLED_LM}, {small_model}]", "gpus_per_runner=4", "tensor_parallel_size=4"])


def test_adam_s_moments_are_counted_where_they_are() -> None:
    values = {"num_learners": 1, "gpus_per_learner": 1, "dtype": "bf16"}
    beside, offloaded = (make_settings({**values, "offload_optimizer": offload}) for offload in (False, True))
    models = shapes(beside)
    one, other = learner(beside, models), learner(offloaded, models)
    of_one = 8.0 * models[0].parameters
    assert one.parts["Adam"] == 2 * of_one and "Adam" not in other.parts
    assert one.parts["weights"] == other.parts["weights"] and other.parts["Adam at once"] <= of_one
    assert other.host == one.host + 2 * of_one  # both LLMs'


def test_a_learner_of_one_llm_or_of_a_part_of_one_needs_no_more_than_that(small_model: str) -> None:
    def settings(**values: Any) -> Settings:
        return make_settings({"model": [BUNDLED_LM, small_model], "dtype": "fp32", **values})

    models = shapes(settings(shards_per_policy=4, num_learners=8))
    both, own, part = (
        learner(settings(shards_per_policy=shards, num_learners=2 * (shards or 0)), models).parts
        for shards in (None, 1, 4)
    )
    large = models[0]
    assert large.block > 0 and large.parameters == 4 * large.block + large.outside
    assert own["weights"] == own["reference"] == 4.0 * large.parameters < both["weights"]
    for name in ("weights", "reference", "gradients", "Adam"):
        assert part[name] == own[name] / 4
    assert part["whole at once"] == 4.0 * (2 * large.outside + 3 * large.block) and "whole at once" not in own


@pytest.mark.parametrize(
    ("preset", "size", "nodes"),
    [
        ("gsm8k-qwen7b-lora", "7B", make_machines(1, 16, 200, 1, 80)),
        ("gsm8k-qwen7b", "7B", make_machines(1, 96, 1000, 8, 80)),
        ("gsm8k-qwen14b", "14B", make_machines(2, 96, 1000, 8, 80)),
    ],
)
def test_presets_for_large_machines_fit_on_them_and_split_their_llms_no_more_than_they_must(
    preset: str, size: str, nodes: list[Node], tmp_path: Path
) -> None:
    MODELS[size].save_pretrained(tmp_path)
    settings = resolve(preset, [], [f"model={tmp_path}", "dtype=bf16"])
    needs = estimate(settings, shapes(settings))
    filled, lacking = pack(processes(settings), nodes, needs)
    assert lacking == [] and all(gpu < 0.6 for node in filled for gpu in node.gpus)
    if settings.shards_per_policy:
        fewer = settings.shards_per_policy - 1
        words = [f"shards_per_policy={fewer}", f"num_learners={2 * fewer}"]
        tighter = resolve(preset, [], [f"model={tmp_path}", "dtype=bf16", *words])
        assert learner(tighter, shapes(tighter)).total > 80e9 > needs["learner"][0].total


@pytest.mark.parametrize(
    ("size", "words", "said"),
    [
        (
            "7B",
            ["shards_per_policy=2", "num_learners=4"],
            "Learners fit on GPUs of 80 GB with shards_per_policy=3 num_learners=6 gpus_per_learner=1.",
        ),
        pytest.param(
            "70B",
            [],
            "A runner's engines fit on GPUs of 80 GB with tensor_parallel_size=8 gpus_per_runner=8.\nLearners fit on "
            "GPUs "
            "of 80 GB with shards_per_policy=32 num_learners=64",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "70B",
            ["weights=lora", "shards_per_policy=2", "num_learners=4"],
            "A runner's engines fit on GPUs of 80 GB with tensor_parallel_size=4 gpus_per_runner=4.\nLearners fit on "
            "GPUs "
            "of 80 GB with shards_per_policy=4 num_learners=8 gpus_per_learner=1.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_of_what_does_not_fit_is_said_over_how_many_gpus_it_would(
    size: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MODELS[size].save_pretrained(tmp_path)  # no weights, as the machines need not be there either
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_TOKENIZER / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert plan(["gsm8k-qwen7b", f"model={tmp_path}", "dtype=bf16", *words], nodes=1) == 1
    assert said in capsys.readouterr().out
    with pytest.raises(ModelError, match="holds no weights"):
        plan(["gsm8k-qwen7b", f"model={tmp_path}", *words])


def test_a_plan_for_machines_that_need_not_be_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")  # which nobody asks
    words = ["imdb-tiny", "shards_per_policy=2", "num_learners=4", "gpus_per_learner=1", "gpus_per_runner=1"]
    assert main(["plan", *words, "--nodes", "2", "--gpus", "3", "--gpu-memory", "16"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^4 learners +0 +1 +\d\.\d of a GPU, 0\.4 beside it \(learns\)$", output, re.MULTILINE)
    assert "whole at once" in output and "node 2 of 2: " in output and output.endswith("It fits.\n")
    assert main(["plan", *words, "--nodes", "1", "--gpus", "3"]) == 1
    assert "no room for 2 of 4 learners: node 1 of 1 has 0 GPUs left" in capsys.readouterr().out
    assert main(["plan", *words, "--nodes", "2", "--gpus", "3", "learner_resources=big=1"]) == 0
    assert main(["plan", *words, "--nodes", "0"]) == 2
    assert main(["plan", *words, "--gpus", "8"]) == 0
    assert "node 1 of 1: " in capsys.readouterr().out


def test_each_of_the_gpus_that_an_engine_is_split_over_holds_its_part_and_on_a_cpu_all_parts_are_one_sum() -> None:
    whole = make_settings({"gpus_per_runner": 1, "dtype": "bf16"})
    split = make_settings({"gpus_per_runner": 2, "tensor_parallel_size": 2, "dtype": "bf16"})
    models = shapes(split)
    one, each = runner(whole, models), runner(split, models)
    assert each.parts["weights"] == one.parts["weights"] / 2 == 2 * models[0].parameters
    assert each.parts["KV caches"] == one.parts["KV caches"] / 2
    assert each.host > one.host
    few = [model._replace(heads=1) for model in models]
    assert runner(split, few).parts["KV caches"] == runner(whole, few).parts["KV caches"]
    on_cpu = runner(make_settings({"runner_threads": 2, "tensor_parallel_size": 2, "dtype": "bf16"}), models)
    assert on_cpu.parts["weights"] == runner(make_settings({"dtype": "bf16"}), models).parts["weights"]


def test_a_split_engine_finds_room_on_gpus_that_would_not_hold_it_alone_but_not_on_those_of_two_nodes() -> None:
    need = {"runner": [Memory("cuda", {"weights": 15e9}, 0.0)]}
    split = Process("runner", 1, 1, 2, {})

    def gpus(count: int, memory: float) -> Node:
        return Node("a", 4, [1.0] * count, {}, 8e9, memory)

    assert pack([split], [gpus(2, 16e9)], need)[1] == []
    assert pack([split], [gpus(2, 14e9)], need)[1][0].reasons == ["a: 1 of a GPU is 14.0 GB"]
    assert pack([split], [gpus(1, 80e9), gpus(1, 80e9)], need)[1][0].left == 1
    values = {"tensor_parallel_size": 2, "gpus_per_runner": 2}
    config = CoryConfig().cory(**values)
    config.validate()
    assert config.num_gpus_per_env_runner == 2
    one, two = make_node("a", {"CPU": 1, "GPU": 1}), make_node("b", {"CPU": 1, "GPU": 2})
    check_placement(processes(make_settings(values)), [one, two])
    with pytest.raises(CommandError, match=r"1 of 1 runner with CPU=1, GPU=2 \(node a has 1 GPUs left\)"):
        check_placement(processes(make_settings(values)), [one, one])


def test_a_driver_that_learns_shares_no_gpu_with_runners_that_need_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    both = {"num_runners": 1, "gpus_per_runner": 1, "gpus_per_learner": 1}
    for crowded in (both, {"num_runners": 2, "gpus_per_runner": 0.5, "gpus_per_learner": 0.5}):
        with pytest.raises(CommandError, match=r"do not fit on one GPU\. Set num_learners=1\.$"):
            check_driver(make_settings(crowded))
        with pytest.raises(CommandError, match=r"do not fit on one GPU\. Set num_learners=1\.$"):
            plan([f"{key}={value}" for key, value in crowded.items()])
        check_driver(make_settings({**crowded, "num_learners": 1}))
        check_driver(make_settings(crowded), driver_gpus=1.0)
    for values in ({}, {**both, "gpus_per_runner": 0}, {"gpus_per_runner": 0.5, "gpus_per_learner": 0.5}):
        check_driver(make_settings(values))
    for preset in presets():
        check_driver(resolve(preset, [], []))


@pytest.mark.parametrize("words", [["gpus_per_runner=0.5"], ["gpus_per_runner=0.5", "num_learners=1"]])
def test_a_driver_that_generates_on_a_gpu_does_not_fit_where_there_is_none(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert plan(["imdb-tiny", "num_runners=0", *words]) == 1
    assert capsys.readouterr().out.endswith("It does not fit.\n")
    assert plan(["imdb-tiny", "num_runners=0", *words], gpus=1, gpu_memory=16) == 0
    assert re.search(r"^1 driver +0 +0\.5 ", capsys.readouterr().out, re.MULTILINE)


def test_a_driver_that_generates_shares_no_gpu_with_learners_that_need_the_rest_of_it() -> None:
    values = {"num_runners": 0, "gpus_per_runner": 0.5, "num_learners": 1, "gpus_per_learner": 1}
    with pytest.raises(
        CommandError, match=r"num_runners=0 the driver generates .* to learners too, .* Set num_runners=1"
    ):
        check_driver(make_settings(values))
    check_driver(make_settings({**values, "num_runners": 1}))


def test_this_machine_holds_the_preset_and_no_gpu_it_does_not_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert plan([]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^1 driver +0 +0 +\d\.\d \+ \d\.\d \(leads and learns and generates\)$", output, re.MULTILINE)
    assert output.endswith(": 1 driver\nIt fits.\n")
    assert plan(["num_runners=1"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^1 driver +0 +0 +\d\.\d \(leads and learns\)$", output, re.MULTILINE)
    assert re.search(r"^1 runner +1 +0 +\d\.\d \(2 vLLM engines\)$", output, re.MULTILINE)
    assert output.endswith("It fits.\n")
    assert plan(["imdb-tiny", "num_learners=1", "gpus_per_learner=64"]) == 1
    output = capsys.readouterr().out
    assert "Lacking: no room for 1 of 1 learner: this machine" in output and output.endswith("It does not fit.\n")
    with pytest.raises(
        ModelError, match=r"tensor_parallel_size=8 cannot split .*imdb-gpt2-tiny with 4 attention heads"
    ):
        plan(["imdb-tiny", "gpus_per_runner=8", "tensor_parallel_size=8"])
    assert plan(["imdb-tiny", "gpus_per_runner=4", "tensor_parallel_size=4"]) == 1
    output = capsys.readouterr().out
    assert re.search(
        r"^1 runner +1 +4 +\d\.\d of each of 4 GPUs, \d+\.\d beside it "
        r"\(2 vLLM engines\)$",
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


def test_a_cluster_is_asked_for_what_its_nodes_have(
    cluster: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    words = ["imdb-tiny", "runner_resources=sampling=1", "runner_threads=4"]  # Ray is asked for no CPU of the driver
    assert plan([*words, "num_runners=1"]) == 0
    assert re.search(r"^node [\d.]+: 1 runner, 1 driver\nIt fits\.$", capsys.readouterr().out, re.MULTILINE)
    assert plan([*words, "num_runners=2"]) == 1
    assert re.search(
        r"^Lacking: no room for 1 of 2 runners: node [\d.]+ has 0 CPUs and 0 sampling left\.$",
        capsys.readouterr().out,
        re.MULTILINE,
    )


def test_a_tokenizer_that_cannot_be_loaded_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(DEFAULT_TOKENIZER, tmp_path / "model"))
    (model / "tokenizer.json").unlink()
    assert main(["plan", "imdb-tiny", f"model={model}"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith(f"Error: No tokenizer could be loaded from '{model}': ") and "\n" not in told


def test_the_model_s_family_is_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "imdb-tiny"]) == 0
    assert "model family gpt2: sdpa attention; LoRA on c_attn, c_fc, c_proj" in capsys.readouterr().out
