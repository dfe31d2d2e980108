import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.console.errors import CommandError
from launch.experiments.results import final_figures, read, result_file, round_significant, write
from launch.experiments.study import load
from launch.experiments.study_runs import ProcessResult, StudyJob, TrainProcess, collect_result
from launch.main import main
from launch.run_folder import final
from launch.run_folder.final import Final
from launch.run_folder.locks import lock_folder
from launch.run_folder.records import Evaluation
from policies.learning.metrics import RESPONSE_METRICS
from policies.settings.settings import Settings
from tests.launch import results_of_studies as made_up
from tests.launch.conftest import record

UPDATES = 15
RESPONSE = "a wonderful film. It has great performances. It features all"


def job(folder: Path, arm: str = "cory", updates: int = UPDATES) -> StudyJob:
    """Returns a run of the shipped study that was recorded without training."""
    study = load("imdb")
    found = StudyJob(study, study.arms[arm], 3, folder)
    settings = study.settings(found.arm, found.seed)
    run = record(found.run, settings, range(updates + 1))
    for update in range(0, updates + 1, 3):
        held_out = update in (0, updates)
        for _ in range(3 if held_out else 4):
            responses = [
                {"role": role, "policy": module, "text": RESPONSE, "task_reward": 1.23456789}
                for role, module in zip(settings.roles, settings.policy_ids, strict=True)
            ]
            run.samples.append({"update": update, "held_out": held_out, "query": "This is", "responses": responses})
    final.write(run.final, last_responses(settings, 500))
    run.unlock()
    return found


def last_responses(settings: Settings, count: int) -> Final:
    return Final(
        update=UPDATES,
        policy={
            module: [
                Evaluation(
                    policy=module,
                    role="pioneer",
                    query=query,
                    sample=0,
                    prompt="This is a really",
                    text=RESPONSE,
                    tokens=[],
                    metrics=dict.fromkeys(RESPONSE_METRICS, place + 0.123456789 * query),
                )
                for query in range(count)
            ]
            for place, module in enumerate(settings.policy_ids)
        },
    )


DONE = ProcessResult(code=0, printed="")


def test_a_result_is_read_back_as_it_was_written_and_is_small_enough_to_commit(tmp_path: Path) -> None:
    made = collect_result(job(tmp_path, updates=45), DONE)
    file = tmp_path / "results" / "cory" / "seed_3.json"
    write(file, made)
    assert file.stat().st_size < 40_000
    (found,) = read(tmp_path)
    assert [line["update"] for line in found.metrics] == list(range(46))
    for line in found.metrics[1:]:
        roles, policy = line["roles"], line["policy"]
        assert line.pop("role") == {role: policy[roles[role]] for role in ("pioneer", "observer")}
        for figures in policy.values():
            reward, kl, combined = figures["task_reward"], figures["kl"], figures.pop("combined_reward")
            assert reward is not None and combined == pytest.approx(reward - 0.1 * (kl or 0.0))
    kept = json.loads(file.read_text())
    write(file, found)  # what follows from the rest was filled in, and is left out again
    assert json.loads(file.read_text()) == kept
    assert found._replace(metrics=[]) == made._replace(metrics=[])
    assert [line.get("tokens") for line in found.metrics] == [line.get("tokens") for line in made.metrics]
    assert (found.status, found.reason) == ("done", None)
    assert (found.cost["tokens"], found.cost["seconds"]) == (45 * 3000, 90.0)
    assert found.samples and all(sample["held_out"] for sample in found.samples)


def test_a_result_holds_the_means_over_held_out_queries(tmp_path: Path) -> None:
    made = collect_result(job(tmp_path), DONE).final
    assert made is not None and made["queries"] == 500
    mean = 0.123456789 * 499 / 2
    assert made["policy"]["llm_2"]["kl"] == pytest.approx(1 + mean, rel=1e-4)
    assert made["mean"]["task_reward"] == pytest.approx(0.5 + mean, rel=1e-4)


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (ProcessResult(2, "x\nError: No room.\nUpdate 3 is saved.\n"), "No room."),
        (ProcessResult(1, "Traceback\nKeyError: 3\n"), "KeyError: 3"),
        (ProcessResult(-9, ""), "Its process was ended by SIGKILL."),
    ],
)
def test_a_run_that_failed_has_no_result_but_a_reason(tmp_path: Path, ended: ProcessResult, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        collect_result(job(tmp_path), ended)


def test_a_run_that_stop_on_collapse_ended_has_a_result(tmp_path: Path) -> None:
    made = collect_result(job(tmp_path), DONE._replace(code=3))
    assert (made.status, made.reason) == ("collapsed", "stop_on_collapse ended it after update 15.")
    assert made.final is not None


def test_a_gradient_that_was_not_finite_is_a_result(tmp_path: Path) -> None:
    one = job(tmp_path)
    (one.run / "refused_update_000016_llm_1.safetensors").touch()
    made = collect_result(one, DONE._replace(code=2, printed="Error: The gradient of llm_1 is not finite.\n"))
    assert (made.status, made.reason) == ("diverged", "The gradient of llm_1 is not finite.")
    (one.run / "refused_update_000016_llm_1.safetensors").rename(one.run / "refused_update_000009_llm_1.safetensors")
    with pytest.raises(CommandError, match="No room"):  # it continued after that one
        collect_result(one, DONE._replace(code=2, printed="Error: No room.\n"))


def test_a_result_made_with_other_settings_is_refused(tmp_path: Path) -> None:
    one = job(tmp_path)
    write(one.result, collect_result(one, DONE))
    assert one.read() == read(tmp_path)[0]
    study = load("imdb", ["lr=1e-5", "num_runners=2", "checkpoint_every=3"])
    with pytest.raises(CommandError, match="was made with other settings: lr"):
        StudyJob(study, study.arms["cory"], 3, tmp_path).read()


def test_a_run_that_another_process_still_trains_is_left_to_it(tmp_path: Path) -> None:
    one = job(tmp_path)
    with lock_folder(one.run):
        assert one.claim() is None
    claim = one.claim()
    assert claim is not None and one.claim() is None
    claim.close()


@pytest.mark.parametrize("in_job", [False, True])
def test_a_stopped_study_asks_its_run_to_stop_once_and_in_a_job_ray_does(
    in_job: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    trainer = TrainProcess(lambda: None)
    trainer.interrupts.requested = signal.SIGTERM
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as run:
        trainer._process = run
        trainer._pass_on()
        run.communicate(b"\n")  # it ends by itself if nothing asks it to
    assert run.returncode == (0 if in_job else -signal.SIGTERM)


def test_a_folder_without_results_and_a_damaged_result_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="holds no results of a study"):
        read(tmp_path)
    file = tmp_path / "results" / "cory" / "seed_0.json"
    file.parent.mkdir(parents=True)
    file.write_text("{")
    with pytest.raises(CommandError, match=r"seed_0\.json cannot be read as a study's result.*Remove it"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("metrics", None, "not iterable"),
        ("metrics", [{"update": 1, "policy": {"llm_1": {}}}], "KeyError.'task_reward'"),
        ("settings", [], "mapping"),
        ("arm", "ppo", "it is of arm ppo, seed 0"),
    ],
)
def test_a_result_of_which_a_part_is_damaged_is_refused(
    tmp_path: Path, key: str, value: object, complaint: str
) -> None:
    file = result_file(tmp_path, "cory", 0)
    write(file, made_up.study_run("cory", 0, *[made_up.figures(1.0, 1.0)] * 2))
    read(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(CommandError, match=complaint):
        read(tmp_path)


def test_what_an_earlier_version_kept_of_a_run_and_this_one_does_not_is_dropped(tmp_path: Path) -> None:
    file = result_file(tmp_path, "cory", 0)
    write(file, made_up.study_run("cory", 0, *[made_up.figures(1.0, 1.0)] * 2))
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "undisturbed": True, "cost": kept["cost"]}))
    (found,) = read(tmp_path)
    write(file, found)
    assert json.loads(file.read_text()) == kept


def test_of_a_run_one_policy_of_which_has_no_figure_the_mean_is_not_that_of_the_others(tmp_path: Path) -> None:
    one = job(tmp_path)
    last = last_responses(load("imdb").settings(one.arm, one.seed), 3)
    for response, reward in zip(last["policy"]["llm_1"], [None, 1.0, 2.0], strict=True):
        response["metrics"]["task_reward"] = reward  # a mean is over those queries that have it
    for response in last["policy"]["llm_2"]:
        response["metrics"]["kl"] = None
    found = final_figures(last, ("llm_1", "llm_2"))
    assert found["policy"]["llm_1"]["task_reward"] == 1.5 and found["mean"]["task_reward"] is not None
    assert found["policy"]["llm_1"]["kl"] is not None and found["mean"]["kl"] is None
    assert set(
        final_figures({**last, "policy": {"llm_1": last["policy"]["llm_1"]}}, ("llm_1", "llm_2"))["mean"].values()
    ) == {None}


def test_figures_are_rounded_to_significant_digits_and_what_is_not_finite_is_none() -> None:
    value = {"a": [0.000123456789, 123456.789, float("nan"), 3, "text", True, None]}
    assert round_significant(value) == {"a": [0.00012346, 123460.0, None, 3, "text", True, None]}


def test_a_result_s_command_gives_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = collect_result(job(tmp_path, "no-exchange"), DONE)
    words = made.command.split()
    assert words[:2] == ["cory", "train"]
    assert main([*words[1:], "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == made.settings.model_dump()
    assert made.settings.exchange_period is None
