"""Reward functions in their child process: what they get, and what happens when they fail."""

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

GOOD = ["a", "bb", "ccc"]


def score(function: str, completions: list[str], **columns: list[object]) -> list[float | None]:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20) as worker:
        return worker.rewards(["query"] * len(completions), completions, columns)


@pytest.mark.parametrize("function", ["length", "asynchronous", "scalars", "loud"])
def test_plain_async_printing_and_array_functions_all_work(function: str) -> None:
    assert score(function, GOOD) == [1.0, 2.0, 3.0]


def test_a_function_gets_only_the_columns_that_it_accepts() -> None:
    assert score("with_column", ["4", "5"], answer=["4", "4"], other=[1, 2]) == [1.0, 0.0]
    assert score("count_columns", ["x"], answer=["4"], other=[1]) == [3.0]


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
def test_reward_functions_written_for_trl_run_as_they_are(function: str, expected: list[float]) -> None:
    columns: dict[str, list[object]] = {
        "answer": ["a", "c"],
        "completion_ids": [[1, 2, 3], [4, 5]],
        "role": ["pioneer"] * 2,
    }
    assert score(function, ["a", "bb"], **columns) == expected


def test_what_an_async_function_keeps_between_calls_goes_on_to_work() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:trl_judges_one_at_a_time", timeout=20) as worker:
        for texts in (GOOD, GOOD[:2], ["abcd"]):  # a semaphore takes the event loop of its first wait
            assert worker.rewards(["query"] * len(texts), texts, {}) == [float(len(text)) for text in texts]


def test_a_finished_episode_offers_the_tokens_of_its_responses() -> None:
    episode = ChainEpisode(chain(2), QUERIES[0])
    for text in (" good", " a very good film"):
        episode.respond(response(text))
    with RewardWorker("tests.cory_env.sample_rewards:trl_token_lengths", timeout=20) as worker:
        assert reward_episodes(worker, [episode]) == [[float(len(tokens)) for tokens in episode.responses]]


def test_a_missing_module_is_named_in_one_short_sentence_with_the_folder_looked_from() -> None:
    with RewardWorker("no_such_module:f", timeout=20) as worker, pytest.raises(RewardError) as error:
        worker.rewards(["q"], ["c"], {})
    assert f"neither in {os.getcwd()}, nor on PYTHONPATH, nor installed" in str(error.value)
    assert len(str(error.value)) < 400


def test_a_column_that_the_data_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(RewardError, match=r"asks for answer, but is offered only completions, other, prompts"):
        score("with_column", ["4"], other=[1])


def test_a_missing_value_reaches_only_a_function_with_a_default_for_it() -> None:
    columns: dict[str, list[object]] = {"answer": ["4", None]}
    assert score("with_default", ["4", "4"], **columns) == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"sample 1 of 2.*was not called, because it asks for answer"):
        score("with_column", ["4", "4"], **columns)
    with RewardWorker("tests.cory_env.sample_rewards:with_column", timeout=20, on_error="skip") as worker:
        assert worker.rewards(["query"] * 2, ["4", "4"], columns) == [1.0, None]


@pytest.mark.parametrize(("function", "count"), [("inserts", 2), ("clears", 0)])
def test_a_function_that_changes_the_list_of_completions_must_still_return_a_value_for_each(
    function: str, count: int
) -> None:
    with pytest.raises(RewardError, match=rf"it returned {count} values for 1 samples"):
        score(function, GOOD)
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20, on_error="skip") as worker:
        assert worker.rewards(["query"] * 3, GOOD, {}) == [None] * 3


def test_what_a_function_does_to_the_value_of_one_sample_is_not_done_to_another_s() -> None:
    words = ["two", "words"]  # of one query, whose row the samples of all its roles share
    assert score("uses_up", GOOD, words=[words, words, words]) == [2.0, 2.0, 2.0]


def test_settings_in_the_name_reach_the_function() -> None:
    assert score("fixed?value=2.5", ["x", "y"]) == [2.5, 2.5]
    assert score("fixed?value=2.5", ["x"], value=["9"]) == [2.5]
    with pytest.raises(RewardError, match=r"cannot be used.*arguments"):
        score("fixed?valeu=2.5", ["x"])


def test_a_name_that_gives_a_setting_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fixed\?value=1&value=2' cannot be used: .* each setting once"):
        RewardWorker("tests.cory_env.sample_rewards:fixed?value=1&value=2")


@pytest.mark.parametrize(
    "name", ["length", "sample_rewards", "tests.cory_env.sample_rewards:", ":f", "a b:c", "m:f?x", "m:f?=1"]
)
def test_a_malformed_name_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ValueError, match="Write module:function"):
        RewardWorker(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "module 'no_such_module'.* was not found.*PYTHONPATH"),
        ("tests.cory_env.sample_rewards:no_such", "has no function 'no_such'"),
        ("sys:no_such", r"The module 'sys' \(built in\) has no function 'no_such'"),
        ("tests.cory_env.sample_rewards:BAD", "names a str, not a function"),
        ("tests.cory_env.sample_rewards:Brevity", "names a class, not a function. Name a function, or an object"),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_function_that_cannot_be_loaded_stops_even_where_samples_are_skipped(
    name: str, message: str, on_error: str
) -> None:
    with RewardWorker(name, timeout=20, on_error=on_error) as worker, pytest.raises(RewardError, match=message):  # type: ignore[arg-type]
        worker.rewards(["q"], ["c"], {})


FAILURES = [
    ("raises", "it raised RuntimeError: this completion is beyond me\n.*sample_rewards.py"),
    ("exits", "it ended its process with exit code 3"),
    ("returns_none", "it returned None .in TRL: .* instead of a finite number"),
    ("returns_text", "it returned '1.0' .str. instead"),
    ("returns_nan", "it returned nan .float. instead"),
    ("returns_infinity", "it returned inf .float. instead"),
    ("forgets_one", "it returned 0 values for 1 samples"),
]


@pytest.mark.parametrize(("function", "message"), FAILURES)
def test_a_failure_stops_with_the_function_and_the_sample_named(function: str, message: str) -> None:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20) as worker:
        with pytest.raises(RewardError, match=f"(?s){message}") as error:
            worker.rewards(["p", "q", "r"], ["fine", BAD, "fine"], {"role": ["pioneer", "observer", "pioneer"]})
        assert f"tests.cory_env.sample_rewards:{function}" in str(error.value)
        assert "sample 1 of 3, role observer, prompt 'q', completion 'bad'" in str(error.value)
        assert "on_reward_error" in str(error.value)
        assert None not in worker.rewards(["p"], ["fine"], {})  # it goes on after a failure


@pytest.mark.parametrize("function", [function for function, _ in FAILURES])
def test_skipping_gives_none_to_the_failing_samples_alone_and_counts_them(function: str) -> None:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}", timeout=20, on_error="skip") as worker:
        values = worker.rewards(["q"] * 4, ["x", BAD, "x", BAD], {})
        assert values[0] == values[2] == 1.0 and values[1] is None and values[3] is None
        assert worker.skipped == 2


def test_a_hang_is_ended_at_the_time_limit_and_its_sample_named() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:hangs", timeout=3) as worker:
        started = time.monotonic()
        with pytest.raises(
            RewardError, match=r"sample 1 of 2.*completion 'bad': it ran longer than its time limit of 3 s"
        ):
            worker.rewards(["q", "q"], ["fine", BAD], {})
        assert time.monotonic() - started < 60  # the function would never end
        assert worker.rewards(["q"], ["fine"], {}) == [4.0]


def test_a_hang_can_be_skipped() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:hangs", timeout=3, on_error="skip") as worker:
        assert worker.rewards(["q"] * 3, ["fine", BAD, "ok"], {}) == [4.0, None, 2.0]


def test_a_function_that_fails_on_batches_alone_is_reported_as_such() -> None:
    with pytest.raises(RewardError, match="no sample of which was found to fail alone"):
        score("raises_on_two", ["a", "b"])
    with RewardWorker("tests.cory_env.sample_rewards:raises_on_two", timeout=20, on_error="skip") as worker:
        assert worker.rewards(["q", "q"], ["a", "b"], {}) == [None, None]
        assert worker.skipped == 2


@pytest.mark.parametrize(
    ("function", "message"), [("quits", "SystemExit: no more"), ("returns_one_number", "returned 1.0 .float.")]
)
def test_an_exit_call_and_a_single_number_are_errors_too(function: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(function, GOOD)


def test_one_child_process_serves_all_calls_and_ends_with_close() -> None:
    worker = RewardWorker("tests.cory_env.sample_rewards:process_id", timeout=20)
    (first,) = worker.rewards(["q"], ["c"], {})
    (second,) = worker.rewards(["q"], ["c"], {})
    assert first == second != os.getpid()
    worker.close()
    assert first is not None and not Path(f"/proc/{int(first)}").exists()


def test_what_a_reward_can_load_ahead_is_loaded_once_with_its_settings_and_before_the_first_batch(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with RewardWorker(f"tests.cory_env.sample_rewards:logged_preparation?log={log}") as worker:
        worker.prepare()
        assert worker.rewards(["", ""], ["a", "bc"], {}) == [1.0, 2.0]
        assert worker.rewards([""], ["abc"], {}) == [3.0]
    assert log.read_text().split() == ["prepared", "2", "1"]


@pytest.mark.parametrize("function", ["unprepared", "loud"])  # whose preparation fails, and that has none
def test_a_preparation_that_fails_or_is_none_changes_nothing(function: str) -> None:
    with RewardWorker(f"tests.cory_env.sample_rewards:{function}") as worker:
        worker.prepare()
        assert worker.rewards([""], ["abc"], {}) == [3.0]


def test_a_reward_that_cannot_be_loaded_says_so_in_the_call_after_its_preparation() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:nothing_like_it") as worker:
        worker.prepare()
        with pytest.raises(RewardError, match="nothing_like_it"):
            worker.rewards([""], ["abc"], {})


def test_a_child_that_was_killed_between_two_calls_is_replaced_at_the_next() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:process_id", timeout=20) as worker:
        (first,) = worker.rewards(["q"], ["c"], {})
        assert first is not None
        os.kill(int(first), signal.SIGKILL)
        (second,) = worker.rewards(["q"], ["c"], {})
        assert second not in (None, first)


def killed_at_first(log: Path, times: int, on_error: OnError) -> RewardWorker:
    spec = f"tests.cory_env.sample_rewards:killed_at_first?log={log}&times={times}"
    return RewardWorker(spec, timeout=20, on_error=on_error)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_batch_during_which_the_system_kills_the_process_is_tried_again_as_a_whole(
    tmp_path: Path, on_error: OnError
) -> None:
    with killed_at_first(tmp_path / "log", times=2, on_error=on_error) as worker:
        assert worker.rewards(["q"] * 3, GOOD, {}) == [1.0, 2.0, 3.0]
        assert worker.skipped == 0
    assert (tmp_path / "log").read_text().split() == ["3", "3", "3"]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_batch_that_is_killed_again_and_again_is_an_error_that_may_pass_and_blames_no_sample(
    on_error: OnError,
) -> None:
    with RewardWorker("tests.cory_env.sample_rewards:killed_by_two", timeout=20, on_error=on_error) as worker:
        with pytest.raises(RewardKilled) as raised:
            worker.rewards(["q"] * 3, GOOD, {})
        assert worker.skipped == 0
    told = str(raised.value)
    assert "failed at 3 attempts on a batch of 3, no sample of which was found to fail alone" in told
    assert "ended its process with signal SIGKILL" in told and "where memory runs out" in told
    assert "Correct the function or the data" not in told


def test_a_sample_that_is_killed_alone_is_named_or_skipped() -> None:
    with pytest.raises(RewardKilled, match=r"at 3 attempts on sample 1 of 3, .*completion 'bad'"):
        score("killed_by_bad", ["a", BAD, "c"])
    with RewardWorker("tests.cory_env.sample_rewards:killed_by_bad", timeout=20, on_error="skip") as worker:
        assert worker.rewards(["q"] * 3, ["a", BAD, "c"], {}) == [1.0, None, 1.0]
        assert worker.skipped == 1
        with pytest.raises(RewardKilled):  # all of the batch: nothing says that it is to blame
            worker.rewards(["q"], [BAD], {})


def test_a_function_whose_module_is_killed_as_it_loads_is_an_error_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    child = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 5
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def seven(completions): return [7] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    with RewardWorker("my_rewards:seven", timeout=20) as worker:
        assert worker.rewards(["q"], ["c"], {}) == [7.0]


def test_a_large_batch_passes_through() -> None:
    completions = ["x" * 5000] * 500
    assert score("length", completions) == [5000.0] * 500


def test_lists_of_different_lengths_and_settings_out_of_range_are_refused() -> None:
    with RewardWorker("tests.cory_env.sample_rewards:length") as worker:
        with pytest.raises(ValueError, match=r"one length.*'answer': 1"):
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
