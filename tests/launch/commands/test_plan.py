"""Tests of `cory plan`: the memory estimate against measurements, placement, and missing resources."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.roofline import EXAMPLES, MODELS, example_settings
from cory_env.home import IN_JOB
from cory_env.tokenizer import DEFAULT_TOKENIZER
from launch.cluster.machines import make_machines
from launch.cluster.memory import check_run_memory, estimate_processes, estimate_runner
from launch.cluster.placement import Node, check_placement, make_node, pack
from launch.cluster.session import check_driver
from launch.commands.plan import plan
from launch.console.configuration import resolve_settings
from launch.console.errors import CommandError
from launch.main import main
from policies.cory import CoryConfig
from policies.models.model_check import ModelError
from policies.models.model_names import BUNDLED_LM
from policies.settings.files import presets
from policies.settings.hardware import devices
from policies.settings.memory import Memory, estimate_learner, model_shapes
from policies.settings.processes import Process, processes
from policies.settings.settings import Settings
from tests.paper import PAPER, make_settings


def test_the_estimate_is_close_to_measured_memory() -> None:
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
    models = model_shapes(settings)
    assert [model.parameters for model in models] == [4_273_664] * 2
    total = estimate_learner(settings, models).total + estimate_runner(settings, models).total
    assert 0.8 < total / 2.4e9 < 1.2


def test_adapters_have_the_size_of_pefts_and_need_less_memory_than_copies() -> None:
    from policies.models.adapters import add_lora
    from policies.models.language_model import load_language_model

    settings = make_settings({"weights": "lora", "lora_rank": 4, "lora_target_modules": "c_attn"})
    assert settings.lora is not None
    model = add_lora(load_language_model(settings.model_paths["llm_1"]).requires_grad_(False), settings.lora)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert [model_shape.adapter for model_shape in model_shapes(settings)] == [trained] * 2 and trained > 0
    full = make_settings({})
    assert estimate_learner(settings, model_shapes(settings)).total < estimate_learner(full, model_shapes(full)).total


def test_each_llm_has_the_sizes_of_its_own_model(
    small_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    large, small, mixed = (
        make_settings({"model": model, "dtype": "fp32"})
        for model in (BUNDLED_LM, small_model, [BUNDLED_LM, small_model])
    )
    large_shape, small_shape = model_shapes(large)[0], model_shapes(small)[0]
    assert large_shape.parameters > 5 * small_shape.parameters and model_shapes(mixed) == [large_shape, small_shape]
    total = 4.0 * (large_shape.parameters + small_shape.parameters)
    parts = estimate_learner(mixed, [large_shape, small_shape]).parts
    assert parts["weights"] == parts["reference"] == parts["Adam"] / 2 == total
    assert parts["gradients"] == 4.0 * large_shape.parameters  # LLMs learn one after another
    assert estimate_learner(large, [large_shape, large_shape]).parts["reference"] == 4.0 * large_shape.parameters
    engines = estimate_runner(mixed, [large_shape, small_shape]).parts
    assert engines["weights"] == total
    assert 2 * engines["KV caches"] == sum(
        estimate_runner(s, model_shapes(s)).parts["KV caches"] for s in (large, small)
    )
    assert plan(["imdb-tiny", f"model=[{BUNDLED_LM}, {small_model}]"]) == 0
    output = capsys.readouterr().out
    assert f"{BUNDLED_LM}: 4.3 M parameters, model family gpt2: " in output
    assert f"{small_model}: 0.4 M parameters, model family " in output
    with pytest.raises(ModelError, match=f"tensor_parallel_size=4 cannot split {small_model} with 2 attention heads"):
        plan(["imdb-tiny", f"model=[{BUNDLED_LM}, {small_model}]", "gpus_per_runner=4", "tensor_parallel_size=4"])


def test_offloaded_moments_of_adam_count_as_cpu_memory() -> None:
    values = {"num_learners": 1, "gpus_per_learner": 1, "dtype": "bf16"}
    on_gpu, offloaded = (make_settings({**values, "offload_optimizer": offload}) for offload in (False, True))
    models = model_shapes(on_gpu)
    gpu_memory, offloaded_memory = estimate_learner(on_gpu, models), estimate_learner(offloaded, models)
    moments = 8.0 * models[0].parameters  # of one LLM
    assert gpu_memory.parts["Adam"] == 2 * moments and "Adam" not in offloaded_memory.parts
    assert gpu_memory.parts["weights"] == offloaded_memory.parts["weights"]
    assert offloaded_memory.parts["Adam chunk"] <= moments
    assert offloaded_memory.host == gpu_memory.host + 2 * moments


def test_a_learner_with_shards_needs_memory_for_one_llm_or_a_shard_of_it(small_model: str) -> None:
    def settings(**values: Any) -> Settings:
        return make_settings({"model": [BUNDLED_LM, small_model], "dtype": "fp32", **values})

    models = model_shapes(settings(shards_per_policy=4, num_learners=8))
    unsharded, single, shard = (
        estimate_learner(settings(shards_per_policy=shards, num_learners=2 * (shards or 0)), models).parts
        for shards in (None, 1, 4)
    )
    large = models[0]
    assert large.block > 0 and large.parameters == 4 * large.block + large.outside
    assert single["weights"] == single["reference"] == 4.0 * large.parameters < unsharded["weights"]
    for name in ("weights", "reference", "gradients", "Adam"):
        assert shard[name] == single[name] / 4
    assert shard["unsharded blocks"] == 4.0 * (2 * large.outside + 3 * large.block)
    assert "unsharded blocks" not in single


@pytest.mark.parametrize(
    ("name", "size", "nodes"),
    [
        ("gsm8k-qwen7b-lora", "7B", make_machines(1, 16, 200, 1, 80)),
        ("gsm8k-qwen7b", "7B", make_machines(1, 96, 1000, 8, 80)),
        ("gsm8k-qwen14b", "14B", make_machines(2, 96, 1000, 8, 80)),
    ],
)
def test_examples_for_large_machines_fit_with_the_fewest_shards(
    name: str, size: str, nodes: list[Node], tmp_path: Path
) -> None:
    MODELS[size].save_pretrained(tmp_path)
    settings = example_settings(name, [f"model={tmp_path}", "dtype=bf16"])
    needs = estimate_processes(settings, model_shapes(settings))
    filled, shortfalls = pack(processes(settings), nodes, needs)
    assert shortfalls == [] and all(gpu < 0.6 for node in filled for gpu in node.gpus)
    if settings.shards_per_policy:
        fewer = settings.shards_per_policy - 1
        words = [f"shards_per_policy={fewer}", f"num_learners={2 * fewer}"]
        tighter = example_settings(name, [f"model={tmp_path}", "dtype=bf16", *words])
        assert estimate_learner(tighter, model_shapes(tighter)).total > 80e9 > needs["learner"][0].total


def test_a_plan_names_the_processes_that_do_not_fit_and_needs_weights_only_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MODELS["7B"].save_pretrained(tmp_path)  # without weights, which hypothetical machines do not need
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_TOKENIZER / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = [str(EXAMPLES / "gsm8k-qwen7b.yaml"), f"model={tmp_path}", "shards_per_policy=2", "num_learners=4"]
    assert plan([*words, "dtype=bf16"], nodes=1) == 1
    output = capsys.readouterr().out
    assert re.search(r"Missing: no room for 4 of 4 learners: .*1 of a GPU is 80\.0 GB, but a learner needs \d+", output)
    with pytest.raises(ModelError, match="holds no weights"):
        plan(words)


def test_a_plan_for_hypothetical_machines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")  # no connection is made
    words = ["imdb-tiny", "shards_per_policy=2", "num_learners=4", "gpus_per_learner=1", "gpus_per_runner=1"]
    assert main(["plan", *words, "--nodes", "2", "--gpus", "3", "--gpu-memory", "16"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^4 learners +0 +1 +\d\.\d of a GPU, 0\.4 of CPU memory \(learns\)$", output, re.MULTILINE)
    assert "unsharded blocks" in output and "node 2 of 2: " in output and output.endswith("It fits.\n")
    assert main(["plan", *words, "--nodes", "1", "--gpus", "3"]) == 1
    assert "no room for 2 of 4 learners: node 1 of 1 has 0 GPUs left" in capsys.readouterr().out
    assert main(["plan", *words, "--nodes", "0"]) == 2
    assert main(["plan", *words, "--gpus", "8"]) == 0
    assert "node 1 of 1: " in capsys.readouterr().out


def test_a_split_engine_counts_per_gpu_and_in_total_on_a_cpu() -> None:
    unsplit = make_settings({"gpus_per_runner": 1, "dtype": "bf16"})
    split = make_settings({"gpus_per_runner": 2, "tensor_parallel_size": 2, "dtype": "bf16"})
    models = model_shapes(split)
    unsplit_memory, split_memory = estimate_runner(unsplit, models), estimate_runner(split, models)
    assert split_memory.parts["weights"] == unsplit_memory.parts["weights"] / 2 == 2 * models[0].parameters
    assert split_memory.parts["KV caches"] == unsplit_memory.parts["KV caches"] / 2
    assert split_memory.host > unsplit_memory.host
    single_head = [model._replace(heads=1) for model in models]
    assert (
        estimate_runner(split, single_head).parts["KV caches"]
        == estimate_runner(unsplit, single_head).parts["KV caches"]
    )
    on_cpu = estimate_runner(make_settings({"runner_threads": 2, "tensor_parallel_size": 2, "dtype": "bf16"}), models)
    assert on_cpu.parts["weights"] == estimate_runner(make_settings({"dtype": "bf16"}), models).parts["weights"]


def test_a_split_engine_fits_on_several_gpus_of_one_node_but_not_on_gpus_of_two_nodes() -> None:
    need = {"runner": [Memory("cuda", {"weights": 15e9}, 0.0)]}
    split = Process("runner", 1, 1, 2)

    def gpus(count: int, memory: float) -> Node:
        return Node("a", 4, [1.0] * count, 8e9, memory)

    assert pack([split], [gpus(2, 16e9)], need)[1] == []
    assert pack([split], [gpus(2, 14e9)], need)[1][0].reasons == [
        "a: 1 of a GPU is 14.0 GB, but a runner needs 15.0 GB"
    ]
    assert pack([split], [gpus(1, 80e9), gpus(1, 80e9)], need)[1][0].num_unplaced == 1
    values = {"tensor_parallel_size": 2, "gpus_per_runner": 2}
    config = CoryConfig().cory(**{**PAPER, **values})
    config.validate()
    assert config.num_gpus_per_env_runner == 2
    node_a, node_b = make_node("a", {"CPU": 1, "GPU": 1}), make_node("b", {"CPU": 1, "GPU": 2})
    check_placement(processes(make_settings(values)), [node_a, node_b])
    with pytest.raises(CommandError, match=r"1 of 1 runner: node a has 1 GPUs left\."):
        check_placement(processes(make_settings(values)), [node_a, node_a])


def test_a_driver_that_learns_cannot_share_a_gpu_with_runners_that_need_more_than_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = {"num_runners": 1, "gpus_per_runner": 1, "gpus_per_learner": 1}
    for crowded in (both, {"num_runners": 2, "gpus_per_runner": 0.5, "gpus_per_learner": 0.5}):
        with pytest.raises(CommandError, match=r"do not fit on one GPU\. Set num_learners=1\.$"):
            check_driver(make_settings(crowded))
        with pytest.raises(CommandError, match=r"do not fit on one GPU\. Set num_learners=1\.$"):
            plan(["imdb-tiny", *(f"{key}={value}" for key, value in crowded.items())])
        check_driver(make_settings({**crowded, "num_learners": 1}))
        with monkeypatch.context() as job:  # of `ray job submit --entrypoint-num-gpus 1`
            job.setenv(IN_JOB, "{}")
            with pytest.raises(CommandError, match=r"do not fit on one GPU"):
                check_driver(make_settings(crowded))
            job.setenv("CUDA_VISIBLE_DEVICES", "3")
            check_driver(make_settings(crowded))
    for values in ({}, {**both, "gpus_per_runner": 0}, {"gpus_per_runner": 0.5, "gpus_per_learner": 0.5}):
        check_driver(make_settings(values))
    for preset in presets():
        check_driver(resolve_settings(preset, [], []))


@pytest.mark.parametrize("words", [["gpus_per_runner=0.5"], ["gpus_per_runner=0.5", "num_learners=1"]])
def test_a_driver_that_generates_on_a_gpu_does_not_fit_without_one(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert plan(["imdb-tiny", "num_runners=0", *words]) == 1
    assert capsys.readouterr().out.endswith("It does not fit.\n")
    assert plan(["imdb-tiny", "num_runners=0", *words], gpus=1, gpu_memory=16) == 0
    assert re.search(r"^1 driver +0 +0\.5 ", capsys.readouterr().out, re.MULTILINE)


def test_a_driver_that_generates_cannot_share_a_gpu_with_learners_that_need_all_of_it() -> None:
    values = {"num_runners": 0, "gpus_per_runner": 0.5, "num_learners": 1, "gpus_per_learner": 1}
    with pytest.raises(
        CommandError, match=r"num_runners=0 the driver generates .* to learners too, .* Set num_runners=1"
    ):
        check_driver(make_settings(values))
    check_driver(make_settings({**values, "num_runners": 1}))


def test_a_preset_fits_on_this_machine_but_missing_gpus_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert plan(["imdb-tiny"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^1 driver +0 +0 +\d\.\d \+ \d\.\d \(coordinates, learns, generates\)$", output, re.MULTILINE)
    assert output.endswith(": 1 driver\nIt fits.\n")
    assert plan(["imdb-tiny", "num_runners=1"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^1 driver +0 +0 +\d\.\d \(coordinates, learns\)$", output, re.MULTILINE)
    assert re.search(r"^1 runner +1 +0 +\d\.\d \(2 vLLM engines\)$", output, re.MULTILINE)
    assert output.endswith("It fits.\n")
    assert plan(["imdb-tiny", "num_learners=1", "gpus_per_learner=64"]) == 1
    output = capsys.readouterr().out
    assert "Missing: no room for 1 of 1 learner: this machine" in output and output.endswith("It does not fit.\n")
    with pytest.raises(
        ModelError, match=r"tensor_parallel_size=8 cannot split .*imdb-gpt2-tiny with 4 attention heads"
    ):
        plan(["imdb-tiny", "gpus_per_runner=8", "tensor_parallel_size=8"])
    assert plan(["imdb-tiny", "gpus_per_runner=4", "tensor_parallel_size=4"]) == 1
    output = capsys.readouterr().out
    assert re.search(
        r"^1 runner +1 +4 +\d\.\d of each of 4 GPUs, \d+\.\d of CPU memory \(2 vLLM engines\)$",
        output,
        re.MULTILINE,
    )


def test_the_paper_compat_preset_is_planned_with_a_small_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    small = ["model=imdb-gpt2-tiny", "gpus_per_runner=0", "gpus_per_learner=0"]
    assert plan(["imdb-paper-compat", *small]) == 0
    assert capsys.readouterr().out.endswith("It fits.\n")


def test_a_plan_for_a_cluster_uses_the_resources_of_its_nodes(
    cluster: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster["RAY_ADDRESS"])
    words = ["imdb-tiny", "runner_threads=4"]  # the driver needs no Ray CPU
    assert plan([*words, "num_runners=1"]) == 0
    assert re.search(r"^node [\d.]+: 1 runner, 1 driver\nIt fits\.$", capsys.readouterr().out, re.MULTILINE)
    assert plan([*words, "num_runners=2"]) == 1
    assert re.search(
        r"^Missing: no room for 1 of 2 runners: node [\d.]+ has 0 CPUs left\.$",
        capsys.readouterr().out,
        re.MULTILINE,
    )


def test_the_error_of_a_missing_tokenizer_has_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(DEFAULT_TOKENIZER, tmp_path / "model"))
    (model / "tokenizer.json").unlink()
    assert main(["plan", "imdb-tiny", f"model={model}"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"Error: The tokenizer of '{model}' cannot be loaded: ") and "\n" not in error


def test_the_plan_names_the_model_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "imdb-tiny"]) == 0
    assert "model family gpt2: sdpa attention; LoRA on c_attn, c_fc, c_proj" in capsys.readouterr().out


def test_a_gpu_that_is_asked_about_is_used_and_the_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["imdb-tiny"], nodes=1, gpus=1, gpu_memory=80, cpus=16) == 0
    output = capsys.readouterr().out
    assert re.search(r"^1 driver +0 +1 .* of a GPU", output, re.MULTILINE)
    assert "Each machine: 16 CPUs, 1000 GB of memory, 1 GPU of 80 GB (assumed: --memory).\n" in output
    assert "No process uses" not in output
    assert plan(["imdb-tiny"], nodes=2, gpus=1, gpu_memory=80, cpus=16, memory=100) == 0
    output = capsys.readouterr().out  # on a cluster, a run would not use them
    assert "No process uses a GPU, as gpus_per_learner and gpus_per_runner are 0" in output
    assert plan(["imdb-tiny"], gpus=0, cpus=16, memory=100) == 0
    assert "No process uses" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "machine", "advice"),
    [
        ([], {"memory": 300, "gpus": 0}, "gradient_checkpointing=true, weights=lora or a smaller model."),
        (["weights=lora"], {"memory": 20, "gpus": 0}, "micro_batch_tokens, gradient_checkpointing=true or a smaller"),
        ([], {"gpus": 1, "gpu_memory": 80}, "weights=lora, quantization=nf4 with backend=transformers or a smaller"),
    ],
)
def test_a_plan_that_lacks_memory_says_which_settings_save_memory(
    words: list[str], machine: dict[str, Any], advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MODELS["7B"].save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_TOKENIZER / name, tmp_path)
    assert plan(["imdb-tiny", f"model={tmp_path}", *words], nodes=1, **machine) == 1
    output = capsys.readouterr().out
    assert advice in output and "GB" in output


def test_train_and_validate_reject_a_run_that_exceeds_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "ram_bytes", lambda: 0.9e9)
    words = ["imdb-tiny", "reward=tests.policies.sample_rewards:letters"]
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert re.match(r"Error: The run does not fit into memory: it needs about \d\.\d GB of memory, but", error), error
    assert "there are 0.9 GB. Less memory is needed with a smaller micro_batch_tokens" in error
    assert not (tmp_path / "runs").exists()
    assert main(["validate", *words]) == 0
    assert "does not fit into memory" in capsys.readouterr().out
    settings = resolve_settings("imdb-tiny", [], [])
    monkeypatch.setenv("CORY_UNCHECKED", "1")
    check_run_memory(settings)
    monkeypatch.delenv("CORY_UNCHECKED")
    with pytest.raises(CommandError):
        check_run_memory(settings)
    monkeypatch.setattr(devices, "ram_bytes", lambda: 100e9)
    check_run_memory(settings)
