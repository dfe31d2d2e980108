import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.console.errors import CommandError
from launch.experiments.results import final_figures, read_results, result_file, round_significant, write_result
from launch.experiments.study import load_study
from launch.experiments.study_runs import ProcessResult, StudyJob, TrainProcess, collect_result, list_jobs
from launch.main import main
from launch.run_folder import final
from launch.run_folder.final import FinalEvaluation
from launch.run_folder.locks import lock_folder
from launch.run_folder.records import EvaluatedResponse
from policies.learning.metrics import RESPONSE_METRICS
from policies.settings.settings import Settings
from tests.launch import results_of_studies
from tests.launch.conftest import record_test_run

CHECKOUT = Path(__file__).parents[3]
UPDATES = 15
RESPONSE = "a wonderful film. It has great performances. It features all"


def make_job(folder: Path, arm: str = "cory", updates: int = UPDATES) -> StudyJob:
    """Returns a run of the bundled study, recorded without training."""
    study = load_study("imdb")
    job = StudyJob(study, study.arms[arm], 3, folder)
    settings = study.settings(job.arm, job.seed)
    run = record_test_run(job.run, settings, range(updates + 1))
    for update in range(0, updates + 1, 3):
        held_out = update in (0, updates)
        for _ in range(3 if held_out else 4):
            responses = [
                {"role": role, "policy": policy_id, "text": RESPONSE, "task_reward": 1.23456789}
                for role, policy_id in zip(settings.agents, settings.policy_ids, strict=True)
            ]
            run.samples_file.append(
                {"update": update, "held_out": held_out, "query": "This is", "responses": responses}
            )
    final.write_final(run.final, last_responses(settings, 500))
    run.unlock()
    return job


def last_responses(settings: Settings, count: int) -> FinalEvaluation:
    return FinalEvaluation(
        update=UPDATES,
        policy={
            policy_id: [
                EvaluatedResponse(
                    policy=policy_id,
                    role="pioneer",
                    query=query,
                    sample=0,
                    prompt="This is a really",
                    text=RESPONSE,
                    tokens=[],
                    metrics=dict.fromkeys(RESPONSE_METRICS, index + 0.123456789 * query),
                )
                for query in range(count)
            ]
            for index, policy_id in enumerate(settings.policy_ids)
        },
    )


DONE = ProcessResult(code=0, output="")


def test_a_result_is_read_back_unchanged_and_is_small_enough_to_commit(tmp_path: Path) -> None:
    result = collect_result(make_job(tmp_path, updates=45), DONE)
    file = tmp_path / "results" / "cory" / "seed_3.json"
    write_result(file, result)
    assert file.stat().st_size < 40_000
    (loaded,) = read_results(tmp_path)
    assert [line["update"] for line in loaded.metrics] == list(range(46))
    for line in loaded.metrics[1:]:
        roles, policy = line["roles"], line["policy"]
        assert line.pop("role") == {role: policy[roles[role]] for role in ("pioneer", "observer")}
        for figures in policy.values():
            reward, kl, combined = figures["task_reward"], figures["kl"], figures.pop("combined_reward")
            assert reward is not None and combined == pytest.approx(reward - 0.1 * (kl or 0.0))
    stored = json.loads(file.read_text())
    write_result(file, loaded)  # derived metrics, which reading has added, are omitted again
    assert json.loads(file.read_text()) == stored
    assert loaded._replace(metrics=[]) == result._replace(metrics=[])
    assert [line.get("tokens") for line in loaded.metrics] == [line.get("tokens") for line in result.metrics]
    assert (loaded.status, loaded.reason) == ("done", None)
    assert (loaded.cost["tokens"], loaded.cost["seconds"]) == (45 * 3000, 90.0)
    assert loaded.samples and all(sample["held_out"] for sample in loaded.samples)


def test_a_result_contains_means_over_held_out_queries(tmp_path: Path) -> None:
    final_metrics = collect_result(make_job(tmp_path), DONE).final
    assert final_metrics is not None and final_metrics["queries"] == 500
    mean = 0.123456789 * 499 / 2
    assert final_metrics["policy"]["llm_2"]["kl"] == pytest.approx(1 + mean, rel=1e-4)
    assert final_metrics["mean"]["task_reward"] == pytest.approx(0.5 + mean, rel=1e-4)


@pytest.mark.parametrize(
    ("process_result", "reason"),
    [
        (ProcessResult(2, "x\nError: No memory.\nUpdate 3 is saved.\n"), "No memory."),
        (ProcessResult(1, "Traceback\nKeyError: 3\n"), "KeyError: 3"),
        (ProcessResult(-9, ""), "Its process was killed by SIGKILL."),
    ],
)
def test_a_failed_run_has_a_reason_instead_of_a_result(
    tmp_path: Path, process_result: ProcessResult, reason: str
) -> None:
    with pytest.raises(CommandError, match=reason):
        collect_result(make_job(tmp_path), process_result)


def test_a_run_that_failed_before_it_had_a_folder_has_its_own_reason(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    shutil.rmtree(job.run)
    with pytest.raises(CommandError, match="No module named mine"):
        collect_result(job, ProcessResult(2, "Error: No module named mine.\n"))


def test_a_run_with_a_non_finite_gradient_has_a_result(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (job.run / "refused_update_000016_llm_1.safetensors").touch()
    result = collect_result(job, DONE._replace(code=2, output="Error: The gradient of llm_1 is not finite.\n"))
    assert (result.status, result.reason) == ("diverged", "The gradient of llm_1 is not finite.")
    (job.run / "refused_update_000016_llm_1.safetensors").rename(job.run / "refused_update_000009_llm_1.safetensors")
    with pytest.raises(CommandError, match="No memory"):  # the run has continued after the refused update
        collect_result(job, DONE._replace(code=2, output="Error: No memory.\n"))


def test_a_result_with_other_settings_is_rejected(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    write_result(job.result, collect_result(job, DONE))
    assert job.read() == read_results(tmp_path)[0]
    study = load_study("imdb", ["lr=1e-5", "num_runners=2", "checkpoint_every=3"])
    with pytest.raises(CommandError, match="was created with other settings: lr"):
        StudyJob(study, study.arms["cory"], 3, tmp_path).read()


def test_a_run_that_another_process_trains_cannot_be_claimed(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with lock_folder(job.run):
        assert job.claim() is None
    claim = job.claim()
    assert claim is not None and job.claim() is None
    claim.close()


@pytest.mark.parametrize("in_job", [False, True])
def test_a_stopped_study_signals_its_run_once_except_in_a_ray_job(
    in_job: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    trainer = TrainProcess(lambda: None)
    trainer.interrupts.requested = signal.SIGTERM
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as run:
        trainer._process = run
        trainer._forward_signal()
        run.communicate(b"\n")  # without a signal, the process ends by itself
    assert run.returncode == (0 if in_job else -signal.SIGTERM)


def test_a_folder_without_results_and_a_damaged_result_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="contains no study results"):
        read_results(tmp_path)
    file = tmp_path / "results" / "cory" / "seed_0.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(CommandError, match=r"seed_0\.json is not a valid study result.*Remove it"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("metrics", None, "not iterable"),
        ("metrics", [{"update": 1, "policy": {"llm_1": {}}}], "KeyError.'task_reward'"),
        ("settings", [], "mapping"),
        ("arm", "ppo", "it belongs to arm ppo, seed 0"),
    ],
)
def test_a_partly_damaged_result_is_rejected(tmp_path: Path, key: str, value: object, message: str) -> None:
    file = result_file(tmp_path, "cory", 0)
    write_result(file, results_of_studies.study_run("cory", 0, *[results_of_studies.policy_metrics(1.0, 1.0)] * 2))
    read_results(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(CommandError, match=message):
        read_results(tmp_path)


def test_unknown_keys_of_older_versions_are_ignored(tmp_path: Path) -> None:
    file = result_file(tmp_path, "cory", 0)
    write_result(file, results_of_studies.study_run("cory", 0, *[results_of_studies.policy_metrics(1.0, 1.0)] * 2))
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "undisturbed": True, "cost": stored["cost"]}))
    (run,) = read_results(tmp_path)
    write_result(file, run)
    assert json.loads(file.read_text()) == stored


def test_the_mean_over_policies_is_missing_if_a_policy_lacks_the_metric(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    responses = last_responses(load_study("imdb").settings(job.arm, job.seed), 3)
    for response, reward in zip(responses["policy"]["llm_1"], [None, 1.0, 2.0], strict=True):
        response["metrics"]["task_reward"] = reward  # the mean covers only queries that have the metric
    for response in responses["policy"]["llm_2"]:
        response["metrics"]["kl"] = None
    final_metrics = final_figures(responses, ("llm_1", "llm_2"))
    assert final_metrics["policy"]["llm_1"]["task_reward"] == 1.5
    assert final_metrics["mean"]["task_reward"] is not None
    assert final_metrics["policy"]["llm_1"]["kl"] is not None and final_metrics["mean"]["kl"] is None
    only_first: FinalEvaluation = {**responses, "policy": {"llm_1": responses["policy"]["llm_1"]}}
    assert set(final_figures(only_first, ("llm_1", "llm_2"))["mean"].values()) == {None}


def test_floats_are_rounded_to_significant_digits_and_non_finite_ones_become_none() -> None:
    value = {"a": [0.000123456789, 123456.789, float("nan"), 3, "text", True, None]}
    assert round_significant(value) == {"a": [0.00012346, 123460.0, None, 3, "text", True, None]}


def test_the_command_of_a_result_reproduces_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = collect_result(make_job(tmp_path, "no-exchange"), DONE)
    words = result.command.split()
    assert words[:2] == ["cory", "train"]
    assert main([*words[1:], "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == result.settings.model_dump()
    assert result.settings.exchange_period is None


@pytest.mark.parametrize("name", ["arithmetic", "credit", "drafts", "imdb"])
def test_committed_results_belong_to_their_study_so_that_its_command_prints_them(name: str) -> None:
    study, folder = load_study(name), CHECKOUT / "docs" / "study" / name
    committed = {result_file(folder, run.arm, run.seed) for run in read_results(folder)}
    jobs = list_jobs(study, folder, list(study.arms.values()), seeds=range(20))
    assert committed and {job.result for job in jobs if job.read() is not None} == committed
