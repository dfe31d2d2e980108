"""`cory evaluate --lm-eval`: a task in a local file, on base and policies, against what they give it by hand."""

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
    """Of ` good` after the first texts."""
    tokenizer = open_trained(run.path).settings.make_tokenizers()["llm_1"]
    (target,) = tokenizer(" good")["input_ids"]
    found = []
    for text in TEXTS[:count]:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        found.append(torch.log_softmax(logits.float(), -1)[target].item())
    return math.exp(-sum(found) / count)


@harness
def test_base_and_policies_stand_in_one_table_with_the_figures_of_their_own_weights(
    policies_run: Run, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--lm-eval", "mood", "--lm-eval-tasks-folder", str(tasks), "--queries", "2", "--out", str(out)]
    assert main(["evaluate", str(policies_run.path), *words]) == 0
    said = capfd.readouterr().out
    trained = open_trained(policies_run.path)
    models = {"base": load_language_model(model_path(trained.base("llm_1")))}
    for policy in ("llm_1", "llm_2"):
        models[policy] = read_policy(trained.folder, trained.settings, policy).policy.lm
    shown = {}
    lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
    found = {found["model"]: found["results"]["mood"] for found in map(json.loads, lines[1:])}
    for label, model in models.items():
        results = found[label]
        shown[label] = f"{results['perplexity,none']:.4f} ± {results['perplexity_stderr,none']:.4f}"
        assert results["perplexity,none"] == pytest.approx(perplexity(model, policies_run, 2), rel=1e-4)
        assert shown[label] in said and "2 of 3" in said and "perplexity ↓" in said
    assert len(set(shown.values())) == 3

    (out / "results.jsonl").write_text("".join(lines[:-1]))  # as after a kill: the others are not measured again
    assert main(["evaluate", str(policies_run.path), *words]) == 0
    again = capfd.readouterr().out
    assert "Measuring llm_2" in again and "Measuring base" not in again and shown["llm_2"] in again

    words[5] = "3"
    assert main(["evaluate", str(policies_run.path), *words]) == 2
    assert f"{out}/results.jsonl contains other work: different limit." in capfd.readouterr().err


@harness
def test_what_cannot_be_measured_is_one_sentence(
    policies_run: Run, tasks: Path, cory_here: Cory, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(policies_run.path, run)
    for words, said in (
        (["--lm-eval", "mood", "temperature=1"], "it has its own tasks and sampling"),
        (["--lm-eval", "moods", "--lm-eval-tasks-folder", str(tasks)], "The harness knows no task moods."),
    ):
        ended = cory_here("evaluate", str(run), *words)
        assert ended.returncode == 2 and said in ended.stderr


def test_a_row_is_what_is_a_number_for_every_model() -> None:
    metrics = {"alias": "t", "acc,none": 0.5, "acc_stderr,none": "N/A", "note,none": "N/A"}
    more = {"n-samples": {"t": {"original": 9, "effective": 9}}, "higher_is_better": {"t": {"acc": True}}}
    found = {label: {"results": {"t": metrics, "group": {" ": " ", "alias": "group"}}, **more} for label in "ab"}
    output = io.StringIO()
    Console(file=output, width=80).print(lm_eval.results_table(found))
    assert output.getvalue().split("\n")[2].split() == ["t", "9", "of", "9", "acc", "↑", "0.5000", "0.5000"]
