"""`cory export`: atomic folders that plain `transformers` loads, and their model cards."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel

from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from launch.main import main
from launch.models.export import full_model
from launch.models.trained import open_trained
from launch.run_folder.run import Run
from launch.run_folder.sources import collect_sources
from launch.training.preflight import load_task
from policies.learning.rows import make_rows
from tests.launch.conftest import read_policy, record_test_run, write_policies
from tests.paper import paper_settings

TEXT = "This movie is a wonderful film, and I liked it."


def test_an_export_loaded_by_plain_transformers_has_the_log_probabilities_of_training(
    policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "out"
    assert (
        main(["export", str(policies_run.path), "--policy", "llm_2", "--checkpoint", "latest", "--out", str(out)]) == 0
    )
    assert capsys.readouterr().out == f"{out}: llm_2 after update 6, fp32, 17 MB.\n"
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}
    assert (out / "model.safetensors").is_file()

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    tokens = tokenizer(TEXT)["input_ids"]
    assert tokens == load_tokenizer()(TEXT)["input_ids"]
    trained = open_trained(policies_run.path, "latest")
    module = read_policy(trained.folder, trained.settings, "llm_2")
    with torch.no_grad():
        rows = make_rows([tokens[:4]], [tokens[4:]], [[0.0] * len(tokens[4:])], [0.0], [True])
        expected = module._forward(rows)["action_logp"][0]
        logits = model(torch.tensor([tokens])).logits[0, 3:-1] / model.generation_config.temperature
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[4:])[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_an_export_has_the_dropout_and_chat_template_of_its_base_and_samples_as_in_training(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tokenizer = load_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    template = (
        "{{ strftime_now('%Y') }}{{ mark }}{% for message in messages %}<{{ message.content }}<|end|>{% endfor %}"
    )
    template += "{% if add_generation_prompt %}<{% endif %}"
    tokenizer.chat_template = {"default": template, "other": "{{ messages }}"}
    tokenizer.save_pretrained(base)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.3)
    model = GPT2LMHeadModel(config)
    model.generation_config = GenerationConfig(eos_token_id=[5, 7], do_sample=True, top_p=0.5, repetition_penalty=1.2)
    model.save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: mit\nlanguage: fr\n---\n# Base\n")
    settings = paper_settings(
        model=str(base), num_agents=1, temperature=1.5, chat=True, system_prompt="Be kind.", num_runners=1
    )
    settings = settings.model_copy(update={"chat_date": "2019-05-01", "chat_template_kwargs": {"mark": "'!'"}})
    settings = settings.model_copy(update={"prompt": "Write\n```python\n{query}\n```"})
    run = record_test_run(tmp_path / "run", settings, updates=[0])
    run.checkpoints.save(0, lambda folder: write_policies(folder, settings, seed=1))
    collect_sources(settings, *load_task(settings)).write(run.path)

    out = tmp_path / "out"
    out.mkdir()
    assert main(["export", str(run.path), "--out", str(out), "--dtype", "bf16"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert (loaded.dtype, loaded.config.resid_pdrop) == (torch.bfloat16, 0.3)
    generation = GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [tokenizer.eos_token_id, 5, 7, tokenizer.convert_tokens_to_ids("<|end|>")]
    assert (generation.do_sample, generation.temperature, generation.top_k, generation.top_p) == (True, 1.5, 0, 1.0)
    assert generation.repetition_penalty in (None, 1.0)
    assert (out / "additional_chat_templates").stat().st_mode & 0o777 == 0o755  # readable by others
    chat = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "Hello"}]
    assert chat.apply_chat_template(messages, tokenize=False).endswith("<Hello<|end|>")
    card = (out / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["license"] == "mit" and header["language"] == "fr"
    assert "{'role': 'system', 'content': 'Be kind.'}" in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code
    namespace: dict[str, Any] = {}
    exec(code[1].replace("FOLDER", str(out)), namespace)
    assert chat.decode(namespace["inputs"]["input_ids"][0]) == "2019'!'<Be kind.<|end|><PROMPT<|end|><"
    assert """`--default-chat-template-kwargs '{"mark": "\\u0027!\\u0027"}'`""" in card
    assert "As pioneer:\n````\nWrite\n```python\n{query}\n```\n````\n" in card


def test_the_card_contains_base_task_results_and_commands_and_a_working_example(
    policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = tmp_path / "out", Run(tmp_path / "run")
    shutil.copytree(policies_run.path, run.path, symlinks=True)
    collect_sources(run.settings, *load_task(run.settings)).write(run.path)
    assert main(["export", str(run.path), "--policy", "llm_1", "--out", str(out)]) == 0
    card = (out / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "transformers" and "cory" in header["tags"] and "base_model" not in header
    assert "# llm_1 of run\n" in card and "`imdb-gpt2-tiny`" in card and "the task `imdb`: 5 updates" in card
    assert 'I can make this sentence "{query}{reference}" more positive: {query}' in card
    held_out = policies_run.metrics[0]["evaluation"]["llm_1"]
    assert "|  | update 0 |" in card and f"| length | {held_out['response_length']:.1f} |" in card
    assert "\ncory train\n" in card and "\nlr: 1.41e-05\n" in card

    example = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    capsys.readouterr()
    exec(example.replace("FOLDER", str(out)).replace("PROMPT", "This movie"), {})
    assert capsys.readouterr().out.startswith("This movie")


def test_a_collapsing_policy_is_exported_with_a_printed_warning_and_one_in_the_card(
    policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = policies_run.metrics
    health_warning = {"signature": "repetition", "subject": "llm_1", "text": "llm_1 repeats itself: 61%.", "updates": 4}
    run = Run(tmp_path / "run")
    run.path.mkdir()
    (run.path / "checkpoints").symlink_to(policies_run.path / "checkpoints")
    (run.path / "config.yaml").write_text((policies_run.path / "config.yaml").read_text())
    for line in lines:
        run.metrics_file.append({**line, "health": [health_warning] if line["update"] == 6 else []})
    for policy_id, checkpoint, has_warning in (("llm_1", "6", True), ("llm_1", "5", False), ("llm_2", "6", False)):
        out = tmp_path / f"{policy_id}-{checkpoint}"
        words = ["--policy", policy_id, "--checkpoint", checkpoint, "--out", str(out)]
        assert main(["export", str(run.path), *words]) == 0
        assert ("Warning: At update 6, llm_1 repeats itself: 61%." in capsys.readouterr().err) == has_warning
        assert ("**Warning.** llm_1 repeats itself: 61%." in (out / "README.md").read_text()) == has_warning


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_is_exported_alone_or_merged_into_its_base(
    adapters_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], merge: bool
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(adapters_run.path), "--policy", "llm_2", "--out", str(out), *["--merge"] * merge]) == 0
    assert (out / "adapter_model.safetensors").is_file() != merge
    assert (out / "model.safetensors").is_file() == merge
    model_class = AutoModelForCausalLM if merge else AutoPeftModelForCausalLM
    model, tokenizer = model_class.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    trained = open_trained(adapters_run.path)
    module = read_policy(trained.folder, trained.settings, "llm_2")
    tokens = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        logits, base_logits = model(tokens).logits, module.policy.reference()(tokens).logits
        torch.testing.assert_close(logits, module.policy.lm(tokens).logits, atol=1e-4, rtol=0)
    assert (logits - base_logits).abs().max() > 0.1
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == ("transformers" if merge else "peft")
    assert ("--enable-lora --max-lora-rank 8" in card) != merge
    example = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    capsys.readouterr()
    exec(example.replace("FOLDER", str(out)).replace("PROMPT", "This movie"), {})
    assert capsys.readouterr().out.startswith("This movie")


@pytest.mark.parametrize(("policy_id", "width", "base"), [("llm_1", 256, "imdb-gpt2-tiny"), ("llm_2", 64, "small")])
def test_each_llm_is_exported_with_the_configuration_and_name_of_its_own_base(
    two_models_run: Run, tmp_path: Path, policy_id: str, width: int, base: str
) -> None:
    assert main(["export", str(two_models_run.path), "--policy", policy_id, "--out", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = open_trained(two_models_run.path).weights(policy_id)
    assert model.config.n_embd == width
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, torch.tensor(weights[name]), atol=0, rtol=0)
    assert f"\n`{base}`, trained by reinforcement" in (tmp_path / "out" / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == load_tokenizer()(TEXT)["input_ids"]


def test_llms_with_different_base_models_have_no_mean(
    two_models_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        ([], "Missing --policy. Use one of: llm_1, llm_2.\n"),
        (["--policy", "mean"], f"Unknown policy `mean`. {two_models_run.path} has: llm_1, llm_2."),
    ):
        assert main(["export", str(two_models_run.path), *words, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_mean_of_all_policies_is_exported(
    policies_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {}
    for name, words in {
        "1": ["--policy", "llm_1"],
        "2": ["--policy", "llm_2"],
        "mean": ["--policy", "mean"],
        "named": ["--policy", "llm_mean"],
    }.items():
        assert main(["export", str(policies_run.path), *words, "--out", str(tmp_path / name)]) == 0
        models[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
    assert f"{tmp_path / 'mean'}: llm_mean after update 5, fp32" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(DEFAULT_TOKENIZER).state_dict()
    for key, _start in base.items():
        middle = (models["1"][key] + models["2"][key]) / 2
        torch.testing.assert_close(models["mean"][key], middle, rtol=0, atol=0)
        torch.testing.assert_close(models["named"][key], middle, rtol=0, atol=0)
    assert any(not torch.equal(models["mean"][key], start) for key, start in base.items())
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "# llm_mean of run\n" in card and "It is the mean of the weights of llm_1, llm_2, which started" in card
    assert "The run did not evaluate llm_mean: set eval_average" in card
    card = (tmp_path / "2" / "README.md").read_text()
    assert "It is the mean" not in card and "|  | update 0 |" in card


@pytest.mark.parametrize("merge", [False, True])
def test_the_mean_of_adapters_adds_the_mean_of_their_weight_updates(
    adapters_run: Run, tmp_path: Path, merge: bool
) -> None:
    out = tmp_path / "out"
    words = ["--policy", "mean", "--out", str(out)]
    assert main(["export", str(adapters_run.path), *words, *["--merge"] * merge]) == 0
    model = (AutoModelForCausalLM if merge else AutoPeftModelForCausalLM).from_pretrained(out)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(out)(TEXT)["input_ids"]])
    trained = open_trained(adapters_run.path)
    plain = AutoModelForCausalLM.from_pretrained(DEFAULT_TOKENIZER)
    states = [full_model(trained, policy_id, torch.float32).state_dict() for policy_id in ("llm_1", "llm_2")]
    base = plain.state_dict()
    plain.load_state_dict({key: base[key] + 0.5 * sum(state[key] - base[key] for state in states) for key in base})
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, atol=1e-3, rtol=0)
    card = (out / "README.md").read_text()
    assert "the mean of the adapters' weight updates (the mean of the products B A) of llm_1, llm_2" in card
    if not merge:
        assert "--max-lora-rank 8" in card and '"r": 8' in (out / "adapter_config.json").read_text()


def test_a_merged_adapter_equals_one_merged_by_peft(adapters_run: Run, tmp_path: Path) -> None:
    for name, words in {"adapter": [], "merged": ["--merge"]}.items():
        assert main(["export", str(adapters_run.path), "--policy", "llm_1", "--out", str(tmp_path / name), *words]) == 0
    expected = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload().state_dict()
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def test_merging_an_adapter_of_a_quantized_base_is_rejected(
    adapters_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    shutil.copytree(adapters_run.path, run.path)
    config = (run.path / "config.yaml").read_text()
    config = config.replace("quantization: none", "quantization: nf4")
    config = re.sub(r"gpus_per_(runner|learner): 0(\.0)?", r"gpus_per_\1: 0.5", config)
    (run.path / "config.yaml").write_text(config)
    assert main(["export", str(run.path), "--policy", "llm_1", "--out", str(tmp_path / "out"), "--merge"]) == 2
    assert "--merge conflicts with quantization=nf4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "new", "--policy", "llm_1", "--merge"], "--merge requires an adapter, but"),
        (["--out", "new"], "Missing --policy. Use one of: llm_1, llm_2, mean."),
        (["--out", "new", "--policy", "llm_9"], "Unknown policy `llm_9`."),
        (["--out", "new", "--policy", "llm_1", "--checkpoint", "7"], "no checkpoint `7`. It has: best (5), latest (6)"),
        (["--out", "full", "--policy", "llm_1"], "full is not a new or empty folder"),
        (["--out", "file", "--policy", "llm_1"], "file is not a new or empty folder"),
        (["--out", "file/deep", "--policy", "llm_1"], "cannot be created: File exists"),
    ],
)
def test_an_invalid_export_is_rejected_and_leaves_no_files(
    policies_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(policies_run.path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_single_llm_has_no_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = paper_settings(num_agents=1)
    run = record_test_run(tmp_path / "run", settings, updates=[0])
    run.checkpoints.save(0, lambda folder: write_policies(folder, settings, seed=1))
    assert main(["export", str(run.path), "--policy", "mean", "--out", str(tmp_path / "out")]) == 2
    assert f"Unknown policy `mean`. {tmp_path / 'run'} has: llm_1." in capsys.readouterr().err


def test_a_base_model_that_has_changed_since_training_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    load_tokenizer().save_pretrained(base)
    GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_embd=16, n_layer=1, n_head=2)).save_pretrained(base)
    settings = paper_settings(model=str(base), num_agents=1)
    run = record_test_run(tmp_path / "run", settings, updates=[0])
    run.checkpoints.save(0, lambda folder: write_policies(folder, settings, seed=1))
    GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_embd=16, n_layer=2, n_head=2)).save_pretrained(base)
    assert main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 2
    assert "has changed since" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_files(policies_run: Run, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(policies_run.path), "--policy", "llm_1", "--out", str(disk / "out")]) == 2
    message = capsys.readouterr().err
    assert f"{disk / 'out'}" in message and "No space left on device" in message
    assert not list(disk.iterdir())
