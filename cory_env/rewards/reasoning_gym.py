"""Reward and feedback for data sets of reasoning-gym (extra `reasoning-gym`), by their own verifiers.

The answer is what the last <answer> and </answer> of a completion enclose, reasoning-gym's own format. Verifiers give
scores from 0 to 1; some evaluate an answer as Python code, so they run in the sandbox (`?sandbox=off`: without one).
"""

import contextlib
import importlib.util
import json
import math
import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from cory_env.functions import split_settings
from cory_env.message import Message
from cory_env.rewards.prepared import TIMEOUT_VARIABLE, import_extra, prepare_with
from cory_env.sandbox import machine
from cory_env.sandbox.grading import TimeBudget
from cory_env.sandbox.machine import CODE_ROOT, HERE
from cory_env.sandbox.verifier import READY, make_dataset

EXTRA = "reasoning-gym"
ANSWER_FORMAT = "<answer>{}</answer>"
NO_ANSWER = "There is no answer between <answer> and </answer>."
WRONG = "This answer is wrong."
PARTLY_RIGHT = "This answer is only partly right: it scores {:.2g} of 1."
MEMORY = 4 * 2**30  # bytes of address space of a verifier
MAX_SECONDS = 10.0  # time limit of one answer
START_SECONDS = 120.0
TIME_SHARE = 0.8  # share of the reward's time limit that verifiers may use


def read_entries(source: str) -> list[dict[str, Any]]:
    """Returns a data set's entries: question, answer and metadata.

    A process of its own makes them, because some data sets depend on Python's hash seed, which differs from process to
    process.

    Args:
        source: The data set without `reasoning_gym:`, such as `chain_sum?size=2000&seed=1&min_terms=3`.

    Raises:
        ValueError: There is no such data set or setting, or a value is out of range.
        ModuleNotFoundError: The package is not installed.
    """
    _require_package()
    code = f"from cory_env.rewards.reasoning_gym import write_entries; write_entries({source!r})"
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    if process.returncode:
        raise ValueError(f"reasoning-gym failed:\n{process.stderr.decode(errors='replace')[-2000:]}")
    result: list[dict[str, Any]] | ValueError = pickle.loads(process.stdout)
    if isinstance(result, ValueError):
        raise result
    return result


def write_entries(source: str) -> None:
    """Writes a data set's entries, or what is wrong with its name or settings, to standard output, pickled."""
    result: list[dict[str, Any]] | ValueError
    with contextlib.redirect_stdout(sys.stderr):  # data sets may print
        try:
            dataset = make_dataset(*parse_dataset(source))
            result = [dataset[index] for index in range(len(dataset))]
        except ValueError as error:
            result = error
    sys.stdout.buffer.write(pickle.dumps(result))


def _require_package() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        import_extra("reasoning_gym", EXTRA)


def parse_dataset(source: str) -> tuple[str, str]:
    """Splits a source into the data set's name and its settings as a JSON object.

    Values are read as JSON, such as `["+", "-"]`; what is not JSON is text.
    """
    name, settings = split_settings(source)
    return name, json.dumps({setting: _value(text) for setting, text in sorted(settings.items())})


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


class _Verifier:
    """The process that scores answers; started at the first one, and again after it ended."""

    def __init__(self, sandbox: str) -> None:
        self._sandbox = sandbox
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts it, unless it runs.

        Raises:
            ModuleNotFoundError: The package is not installed.
            SandboxError: It cannot be sandboxed.
        """
        if self._process is not None and self._process.poll() is None:
            return
        _require_package()
        if self._sandbox == "required":
            machine.require_sandbox()
        elif self._sandbox != "off":
            raise machine.SandboxError(f"sandbox is {self._sandbox!r}, but must be required or off.")
        is_off = self._sandbox == "off"
        root = str(HERE.parents[1]) if is_off else CODE_ROOT
        code = (
            f"import sys; sys.path.insert(0, {root!r}); from cory_env.sandbox.verifier import main; sys.path.pop(0); "
        )
        code += f"main({machine.packages()!r}, {MEMORY}, {is_off})"
        command = [machine.interpreter(), *machine.OPTIONS, "-c", code]
        self._process = subprocess.Popen(
            command if is_off else machine.sandbox_command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=machine.environment(),
        )
        if self._read_line(START_SECONDS) != READY:
            self._process.kill()
            raise machine.SandboxError(
                f"The verifiers of reasoning-gym did not start within {START_SECONDS:.0f} s (sandbox={self._sandbox}). "
                'Check that `python -c "import reasoning_gym"` works and is fast enough.'
            )

    def score(self, request: tuple[str, str, dict[str, object], str, float]) -> float:
        """Returns the score of one answer; 0 if the verifier's process ends on it."""
        with self._lock:
            self.start()
            process = self._process
            assert process is not None and process.stdin is not None
            try:
                process.stdin.write(pickle.dumps(request))
                process.stdin.flush()
                return float(self._read_line(request[-1] + START_SECONDS))
            except (BrokenPipeError, ValueError):
                process.kill()
                process.wait()
                return 0.0

    def _read_line(self, seconds: float) -> bytes:
        """Returns the next line; nothing if it does not come in time."""
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout
        return stream.readline() if select.select([stream], [], [], seconds)[0] else b""


@cache
def _verifier(sandbox: str) -> _Verifier:
    return _Verifier(sandbox)


def start_verifier(sandbox: str = "required") -> None:
    """Starts the verifiers' process."""
    _verifier(sandbox).start()


@prepare_with(start_verifier)
def score(
    completions: Sequence[str | list[Message]],
    prompts: Sequence[object],
    metadata: Sequence[dict[str, object]],
    dataset: Sequence[str],
    answer: Sequence[object] = (),  # a default, as some data sets have none
    sandbox: str = "required",
) -> list[float]:
    """Returns the scores of the completions' answers; 0 without an answer, or if a verifier fails or is too slow.

    Args:
        completions: The decoded responses.
        prompts: The queries.
        metadata: reasoning-gym's.
        dataset: The source of each row's data set, as for `read_entries`.
        answer: The right answers, None where a data set has none.
        sandbox: `required`, or `off` to let verifiers evaluate answers without one.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
        SandboxError: The sandbox does not work on this machine.
    """
    total = float(os.environ.get(TIMEOUT_VARIABLE, math.inf)) * TIME_SHARE
    budget = TimeBudget(len(completions), 1, MAX_SECONDS, total)
    scores = []
    for completion, question, extra, source, right in zip(completions, prompts, metadata, dataset, answer, strict=True):
        text, seconds = find_answer(completion), budget.next()
        entry = {"question": question, "answer": right, "metadata": extra}
        request = (*parse_dataset(source), entry, text or "", seconds)
        scores.append(0.0 if text is None else _verifier(sandbox).score(request))
    return scores


def feedback(
    completions: Sequence[str | list[Message]],
    prompts: Sequence[object],
    metadata: Sequence[dict[str, object]],
    dataset: Sequence[str],
    answer: Sequence[object] = (),  # a default, as some data sets have none
    sandbox: str = "required",
) -> list[str | None]:
    """Says whether an answer is missing, wrong or partly right, with its score; None for a right one.

    Takes the arguments of `score`.
    """
    scores = score(completions, prompts, metadata, dataset, answer, sandbox)
    texts: list[str | None] = []
    for completion, value in zip(completions, scores, strict=True):
        if value >= 1.0:
            texts.append(None)
        elif find_answer(completion) is None:
            texts.append(NO_ANSWER)
        else:
            texts.append(PARTLY_RIGHT.format(value) if value > 0.0 else WRONG)
    return texts


def find_answer(completion: str | list[Message]) -> str | None:
    """Returns the text between the last <answer> and the </answer> after it; None if there is none."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    before, after = ANSWER_FORMAT.split("{}")
    _, start, tail = text.rpartition(before)
    inside, end, _ = tail.partition(after)
    return inside.strip() if start and end else None
