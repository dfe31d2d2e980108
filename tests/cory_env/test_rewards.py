"""Reward functions in their child process: arguments and failures."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import reward_episodes
from cory_env.rewarding.worker import OnError, RewardError, RewardKilled, RewardWorker
from tests.cory_env.sample_rewards import BAD
from tests.cory_env.sample_tasks import QUERIES, chain, response

COMPLETIONS = ["a", "bb", "ccc"]


def compute_rewards(function: str, completions: list[str], **columns: list[object]) -> list[float | None]:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20) as worker:
        return worker.rewards(["query"] * len(completions), completions, columns)


@pytest.mark.parametrize("function", ["length", "asynchronous", "awaitable", "scalars", "loud"])
def test_plain_async_printing_and_array_functions_work(function: str) -> None:
    assert compute_rewards(function, COMPLETIONS) == [1.0, 2.0, 3.0]


def test_a_function_gets_only_the_columns_that_it_accepts() -> None:
    assert compute_rewards("with_column", ["4", "5"], answer=["4", "4"], other=[1, 2]) == [1.0, 0.0]
    assert compute_rewards("count_columns", ["x"], answer=["4"], other=[1]) == [3.0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("trl_keyword_arguments", [1.0, 0.0]),
        ("trl_token_lengths", [3.0, 2.0]),
        ("trl_gathers", [1.0, 2.0]),
        ("brevity", [-0.5, -1.0]),
        ("async_brevity", [-0.5, -1.0]),
    ],
)
def test_reward_functions_for_trl_work_unchanged(function: str, expected: list[float]) -> None:
    columns: dict[str, list[object]] = {
        "answer": ["a", "c"],
        "completion_ids": [[1, 2, 3], [4, 5]],
        "role": ["pioneer"] * 2,
    }
    assert compute_rewards(function, ["a", "bb"], **columns) == expected


def test_async_functions_share_one_event_loop_across_calls() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:trl_judges_one_at_a_time", timeout=20) as worker:
        for texts in (COMPLETIONS, COMPLETIONS[:2], ["abcd"]):  # a semaphore takes the event loop of its first wait
            assert worker.rewards(["query"] * len(texts), texts, {}) == [float(len(text)) for text in texts]


def test_rewards_get_the_token_ids_of_responses() -> None:
    episode = ChainEpisode(chain(2), QUERIES[0])
    for text in (" good", " a very good film"):
        episode.respond(response(text))
    with RewardWorker("tests.cory_env.sample_rewards:trl_token_lengths", timeout=20) as worker:
        assert reward_episodes(worker, [episode]) == [[float(len(tokens)) for tokens in episode.responses]]


def test_a_missing_module_is_reported_with_the_searched_folder() -> None:
    with RewardWorker("no_such_module:f", timeout=20) as worker, pytest.raises(RewardError) as error:
        worker.rewards(["q"], ["c"], {})
    assert f"not found in {os.getcwd()}, on PYTHONPATH or among the installed packages" in str(error.value)
    assert len(str(error.value)) < 400


def test_a_missing_column_is_reported_with_the_available_ones() -> None:
    with pytest.raises(RewardError, match=r"requires answer, but only completions, other, prompts are available"):
        compute_rewards("with_column", ["4"], other=[1])


def test_a_missing_value_is_passed_only_to_arguments_with_a_default() -> None:
    columns: dict[str, list[object]] = {"answer": ["4", None]}
    assert compute_rewards("with_default", ["4", "4"], **columns) == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"sample 1 of 2.*was not called, because it requires answer"):
        compute_rewards("with_column", ["4", "4"], **columns)
    with RewardWorker("tests.cory_env.sample_rewards:with_column", timeout=20, on_error="skip") as worker:
        assert worker.rewards(["query"] * 2, ["4", "4"], columns) == [1.0, None]


@pytest.mark.parametrize(("function", "count"), [("inserts", 2), ("clears", 0)])
def test_a_function_that_changes_the_list_of_completions_must_still_return_a_value_for_each(
    function: str, count: int
) -> None:
    with pytest.raises(RewardError, match=rf"it returned {count} values for 1 samples"):
        compute_rewards(function, COMPLETIONS)
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20, on_error="skip") as worker:
        assert worker.rewards(["query"] * 3, COMPLETIONS, {}) == [None] * 3


def test_changing_a_value_in_place_does_not_affect_other_samples() -> None:
    words = ["two", "words"]  # shared by the samples of one query
    assert compute_rewards("pops_words", COMPLETIONS, words=[words, words, words]) == [2.0, 2.0, 2.0]


def test_settings_in_the_name_are_passed_to_the_function() -> None:
    assert compute_rewards("fixed?value=2.5", ["x", "y"]) == [2.5, 2.5]
    assert compute_rewards("fixed?value=2.5", ["x"], value=["9"]) == [2.5]
    with pytest.raises(RewardError, match=r"cannot be used.*arguments"):
        compute_rewards("fixed?valeu=2.5", ["x"])


def test_a_name_that_repeats_a_setting_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"fixed\?value=1&value=2': .* without repetition"):
        RewardWorker("tests.cory_env.sample_rewards:fixed?value=1&value=2")


@pytest.mark.parametrize(
    "name", ["length", "sample_rewards", "tests.cory_env.sample_rewards:", ":f", "a b:c", "m:f?x", "m:f?=1"]
)
def test_a_malformed_name_is_rejected_immediately(name: str) -> None:
    with pytest.raises(ValueError, match="Write module:function"):
        RewardWorker(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "Module 'no_such_module'.* not found.*PYTHONPATH"),
        ("tests.cory_env.sample_rewards:no_such", "has no function 'no_such'"),
        ("sys:no_such", r"Module 'sys' \(built in\) has no function 'no_such'"),
        ("tests.cory_env.sample_rewards:BAD", "is a str, not a function"),
        ("tests.cory_env.sample_rewards:Brevity", r"is a class, not a function\. Name a function or a callable"),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_function_that_cannot_be_loaded_raises_even_with_skip(name: str, message: str, on_error: str) -> None:
    with RewardWorker(name, timeout=20, on_error=on_error) as worker, pytest.raises(RewardError, match=message):  # type: ignore[arg-type]
        worker.rewards(["q"], ["c"], {})


FAILURES = [
    ("raises", "it raised RuntimeError: this completion is beyond me\n.*sample_rewards.py"),
    ("exits", "it ended its process with exit code 3"),
    ("returns_1e300", r"it returned 1e\+300 .float., but learners compute in fp32, so rewards must be from -1e\+15 to"),
    ("returns_a_huge_integer", "it returned 1000000.* .int. instead of a finite number"),
    ("returns_none", "it returned None .in TRL: .* instead of a finite number"),
    ("returns_text", "it returned '1.0' .str. instead"),
    ("returns_nan", "it returned nan .float. instead"),
    ("returns_infinity", "it returned inf .float. instead"),
    ("omits_one", "it returned 0 values for 1 samples"),
]


@pytest.mark.parametrize(("function", "message"), FAILURES)
def test_a_failure_raises_with_the_function_and_the_sample(function: str, message: str) -> None:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20) as worker:
        with pytest.raises(RewardError, match=f"(?s){message}") as error:
            worker.rewards(["p", "q", "r"], ["fine", BAD, "fine"], {"role": ["pioneer", "observer", "pioneer"]})
        assert f"tests.cory_env.sample_rewards:{function}" in str(error.value)
        assert "sample 1 of 3, role observer, prompt 'q', completion 'bad'" in str(error.value)
        assert "on_reward_error" in str(error.value)
        assert None not in worker.rewards(["p"], ["fine"], {})  # it works after a failure


@pytest.mark.parametrize("function", [function for function, _ in FAILURES])
def test_skip_returns_none_for_failing_samples_and_counts_them(function: str) -> None:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20, on_error="skip") as worker:
        values = worker.rewards(["q"] * 4, ["x", BAD, "x", BAD], {})
        assert values[0] == values[2] == 1.0 and values[1] is None and values[3] is None
        assert worker.skipped == 2


def test_a_hang_ends_at_the_time_limit_and_its_sample_is_reported() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:hangs", timeout=3) as worker:
        started = time.monotonic()
        with pytest.raises(
            RewardError, match=r"sample 1 of 2.*completion 'bad': it ran longer than its time limit of 3 s"
        ):
            worker.rewards(["q", "q"], ["fine", BAD], {})
        assert time.monotonic() - started < 60  # the function itself never ends
        assert worker.rewards(["q"], ["fine"], {}) == [4.0]


def test_a_hang_can_be_skipped() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:hangs", timeout=3, on_error="skip") as worker:
        assert worker.rewards(["q"] * 3, ["fine", BAD, "ok"], {}) == [4.0, None, 2.0]


def test_a_function_that_fails_only_on_batches_ends_the_run() -> None:
    with pytest.raises(RewardError, match="none of whose samples failed alone"):
        compute_rewards("raises_on_two", ["a", "b"])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises_on_two", "one at a time"),
        ("hangs_on_two", "ran longer than its time limit of 3 s"),
        ("exits_on_two", "ended its process with exit code 3"),
        ("one_for_all", "returned 1 values for 2 samples"),
        ("killed_by_batches", "ended its process with signal SIGKILL"),
    ],
)
def test_with_skip_a_batch_that_fails_as_a_whole_has_the_rewards_of_its_single_samples(
    function: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=3, on_error="skip") as worker:
        assert worker.rewards(["q", "q"], ["a", "bc"], {}) == [1.0, 2.0]
        assert worker.skipped == 0
    assert "a batch of 2, none of whose samples failed alone" in caplog.messages[-1] and reason in caplog.messages[-1]
    assert caplog.messages[-1].endswith("The values of the single calls are used.")


@pytest.mark.parametrize(
    ("function", "message"), [("quits", "SystemExit: no more"), ("returns_one_number", "returned 1.0 .float.")]
)
def test_sys_exit_and_a_single_number_are_errors(function: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        compute_rewards(function, COMPLETIONS)


def test_one_child_process_serves_all_calls_and_ends_with_close() -> None:
    worker = RewardWorker("tests.cory_env.sample_rewards:process_id", timeout=20)
    (first,) = worker.rewards(["q"], ["c"], {})
    (second,) = worker.rewards(["q"], ["c"], {})
    assert first == second != os.getpid()
    worker.close()
    assert first is not None and not Path(f"/proc/{int(first)}").exists()


def test_prepare_runs_once_with_the_settings_before_the_first_batch(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with RewardWorker(f"tests.cory_env.sample_rewards:logged_preparation?log={log}") as worker:
        worker.prepare()
        assert worker.rewards(["", ""], ["a", "bc"], {}) == [1.0, 2.0]
        assert worker.rewards([""], ["abc"], {}) == [3.0]
    assert log.read_text().split() == ["prepared", "2", "1"]


@pytest.mark.parametrize("function", ["preparation_fails", "loud"])  # the latter has no preparation
def test_a_failing_or_missing_prepare_has_no_effect(function: str) -> None:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}") as worker:
        worker.prepare()
        assert worker.rewards([""], ["abc"], {}) == [3.0]


def test_a_reward_that_cannot_be_loaded_raises_in_the_call_after_prepare() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:no_such_reward") as worker:
        worker.prepare()
        with pytest.raises(RewardError, match="no_such_reward"):
            worker.rewards([""], ["abc"], {})


def test_a_child_killed_between_two_calls_is_restarted() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:process_id", timeout=20) as worker:
        (first,) = worker.rewards(["q"], ["c"], {})
        assert first is not None
        os.kill(int(first), signal.SIGKILL)
        (second,) = worker.rewards(["q"], ["c"], {})
        assert second not in (None, first)


def make_killed_at_first(log: Path, times: int, on_error: OnError) -> RewardWorker:
    spec = f"tests.cory_env.sample_rewards:killed_at_first?log={log}&times={times}"
    return RewardWorker(spec, timeout=20, on_error=on_error)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_batch_whose_process_is_killed_is_retried(tmp_path: Path, on_error: OnError) -> None:
    with make_killed_at_first(tmp_path / "log", times=2, on_error=on_error) as worker:
        assert worker.rewards(["q"] * 3, COMPLETIONS, {}) == [1.0, 2.0, 3.0]
        assert worker.skipped == 0
    assert (tmp_path / "log").read_text().split() == ["3", "3", "3"]


def test_a_batch_whose_process_is_killed_again_while_it_loads_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "growing_rewards.py").write_text(
        "import os, pathlib, signal\n"
        "log = pathlib.Path(__file__).with_name('log')\n"
        "loads = len(log.read_text()) if log.exists() else 0\n"
        "log.write_text('x' * (loads + 1))\n"
        "def f(completions):\n"
        "    if loads == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [1.0] * len(completions)\n"
        "if loads == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardWorker("growing_rewards:f", timeout=20) as worker:
        assert worker.rewards(["q"], ["c"], {}) == [1.0]
    assert (tmp_path / "log").read_text() == "xxx"


def test_a_batch_killed_at_every_attempt_raises_reward_killed_without_blaming_a_sample() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:killed_by_batches", timeout=20) as worker:
        with pytest.raises(RewardKilled) as raised:
            worker.rewards(["q"] * 3, COMPLETIONS, {})
        assert worker.skipped == 0

    message = str(raised.value)
    assert "failed at 3 attempts on a batch of 3, none of whose samples failed alone" in message
    assert "ended its process with signal SIGKILL" in message and "ran out of memory" in message
    assert "Correct the function or the data" not in message


def test_a_sample_whose_process_is_killed_is_reported_or_skipped() -> None:
    with pytest.raises(RewardKilled, match=r"at 3 attempts on sample 1 of 3, .*completion 'bad'"):
        compute_rewards("killed_by_bad", ["a", BAD, "c"])
    with RewardWorker("tests.cory_env.sample_rewards:killed_by_bad", timeout=20, on_error="skip") as worker:
        assert worker.rewards(["q"] * 3, ["a", BAD, "c"], {}) == [1.0, None, 1.0]
        assert worker.skipped == 1
        with pytest.raises(RewardKilled):  # if the whole batch is killed, the sample may not be the cause
            worker.rewards(["q"], [BAD], {})


def test_a_module_killed_while_loading_raises_reward_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_rewards.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardWorker("large_rewards:f", timeout=20) as worker:
        with pytest.raises(RewardKilled, match="cannot be used: ended its process with signal SIGKILL"):
            worker.start()
        with pytest.raises(RewardKilled):
            worker.rewards(["q"], ["c"], {})


def test_the_child_ends_when_its_parent_is_killed() -> None:
    code = (
        "import os, signal; from cory_env.rewarding.worker import RewardWorker\n"
        "worker = RewardWorker('tests.cory_env.sample_rewards:process_id')\n"
        "print(int(worker.rewards(['q'], ['c'], {})[0]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    child = Path(f"/proc/{int(result.stdout)}")
    deadline = time.monotonic() + 5
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def seven(completions): return [7] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    with RewardWorker("my_rewards:seven", timeout=20) as worker:
        assert worker.rewards(["q"], ["c"], {}) == [7.0]


def test_a_large_batch_is_rewarded() -> None:
    completions = ["x" * 5000] * 500
    assert compute_rewards("length", completions) == [5000.0] * 500


def test_lists_of_different_lengths_and_settings_out_of_range_are_rejected() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:length") as worker:
        with pytest.raises(ValueError, match=r"differ in length.*'answer': 1"):
            worker.rewards(["q", "q"], ["c", "c"], {"answer": ["4"]})
        assert worker.rewards([], [], {}) == []
    for timeout in (0.0, math.nan):
        with pytest.raises(ValueError, match="reward_timeout"):
            RewardWorker("tests.cory_env.sample_rewards:length", timeout=timeout)


def test_episodes_are_rewarded_in_one_call_with_their_roles() -> None:
    episodes = []
    for index, text in enumerate([" good", " good good", " good good good"]):
        episode = ChainEpisode(chain(), QUERIES[index])
        episode.respond(response(text))
        episode.respond(response(text + "."))
        episodes.append(episode)
    with RewardWorker("tests.cory_env.sample_rewards:length", timeout=20) as worker:
        assert reward_episodes(worker, episodes) == [[5.0, 6.0], [10.0, 11.0], [15.0, 16.0]]
    with RewardWorker("tests.cory_env.sample_rewards:observer_bonus", timeout=20) as worker:
        assert reward_episodes(worker, episodes) == [[0.0, 1.0]] * 3
