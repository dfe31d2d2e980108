"""`cory evaluate --lm-eval` with a task in a local file, compared with perplexities computed here."""

import io
import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from launch.main import main
from launch.models import lm_eval
from launch.models.trained import open_trained
from launch.run_folder.run import Run
from policies.models.language_model import load_language_model
from policies.models.model_names import model_path
from tests.launch.conftest import Cory, read_policy

harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")

TEXTS = ["This movie is", "The acting was so", "I did not"]
TASK = """task: mood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " good"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with one task."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "mood.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "mood.yaml").write_text(TASK.format(data=data))
    return folder


def perplexity(model: torch.nn.Module, run: Run, count: int) -> float:
    """Returns the perplexity of ` good` after the first texts."""
    tokenizer = open_trained(run.path).settings.make_tokenizers()["llm_1"]
    (target,) = tokenizer(" good")["input_ids"]
    logprobs = []
    for text in TEXTS[:count]:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        logprobs.append(torch.log_softmax(logits.float(), -1)[target].item())
    return math.exp(-sum(logprobs) / count)


@harness
def test_the_table_shows_the_metrics_of_the_base_and_of_every_policy(
    policies_run: Run, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--lm-eval", "mood", "--lm-eval-tasks-folder", str(tasks), "--queries", "2", "--out", str(out)]
    assert main(["evaluate", str(policies_run.path), *words]) == 0
    output = capfd.readouterr().out
    trained = open_trained(policies_run.path)
    models = {"base": load_language_model(model_path(trained.base("llm_1")))}
    for policy_id in ("llm_1", "llm_2"):
        models[policy_id] = read_policy(trained.folder, trained.settings, policy_id).policy.lm
    cells = {}
    lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
    results_by_model = {line["model"]: line["results"]["mood"] for line in map(json.loads, lines[1:])}
    for label, model in models.items():
        results = results_by_model[label]
        cells[label] = f"{results['perplexity,none']:.4f} ± {results['perplexity_stderr,none']:.4f}"
        assert results["perplexity,none"] == pytest.approx(perplexity(model, policies_run, 2), rel=1e-4)
        assert cells[label] in output and "2 of 3" in output and "perplexity ↓" in output
    assert len(set(cells.values())) == 3

    (out / "results.jsonl").write_text("".join(lines[:-1]))  # as after a kill: the other models are not repeated
    assert main(["evaluate", str(policies_run.path), *words]) == 0
    output = capfd.readouterr().out
    assert "Evaluating llm_2" in output and "Evaluating base" not in output and cells["llm_2"] in output

    words[5] = "3"
    assert main(["evaluate", str(policies_run.path), *words]) == 2
    assert f"{out}/results.jsonl contains other work: different limit." in capfd.readouterr().err


@harness
def test_invalid_arguments_are_rejected(policies_run: Run, tasks: Path, cory_in_process: Cory, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(policies_run.path, run)
    for words, message in (
        (["--lm-eval", "mood", "temperature=1"], "has its own tasks and sampling"),
        (["--lm-eval", "moods", "--lm-eval-tasks-folder", str(tasks)], "Unknown lm-eval task moods."),
    ):
        result = cory_in_process("evaluate", str(run), *words)
        assert result.returncode == 2 and message in result.stderr


def test_the_table_contains_only_metrics_that_are_numeric_for_every_model() -> None:
    metrics = {"alias": "t", "acc,none": 0.5, "acc_stderr,none": "N/A", "note,none": "N/A"}
    more = {"n-samples": {"t": {"original": 9, "effective": 9}}, "higher_is_better": {"t": {"acc": True}}}
    results = {label: {"results": {"t": metrics, "group": {" ": " ", "alias": "group"}}, **more} for label in "ab"}
    output = io.StringIO()
    Console(file=output, width=80).print(lm_eval.results_table(results))
    assert output.getvalue().split("\n")[2].split() == ["t", "9", "of", "9", "acc", "↑", "0.5000", "0.5000"]
