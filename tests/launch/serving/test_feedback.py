"""`cory serve --feedback`: the same chains as `cory generate`, drafts with feedback, columns, and errors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.console.errors import CommandError
from launch.models.generators import load_generator
from launch.models.trained import open_trained
from launch.models.trained_chain import TrainedChain, make_env_chain
from launch.run_folder.run import Run
from launch.serving.batches import BatchRunner
from tests.launch.commands.test_generate_feedback import HIDDEN, SHOWN, record_run
from tests.launch.conftest import Cory
from tests.launch.serving.test_server import make_model, running_server

openai = pytest.importorskip("openai")

QUERY = "This movie"
CHAIN = ("llm_1", "llm_2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_run(tmp_path_factory.mktemp("served") / "run", observer_prompt=SHOWN)


@pytest.fixture(scope="module")
def client(run: Run) -> Iterator[Any]:
    with serve(run, CHAIN) as run_client:
        yield run_client


@contextmanager
def serve(run: Run, policy_ids: tuple[str, ...]) -> Iterator[Any]:
    """Yields a client of a server in this process, with transformers."""
    trained = open_trained(run.path)
    models = {name: make_model(trained, name) for name in dict.fromkeys(policy_ids)}
    models["chain"] = make_model(trained, *policy_ids, feedback=True)
    generator = load_generator(trained, tuple(dict.fromkeys(policy_ids)), "transformers", 8)
    runner = BatchRunner(generator, models["chain"].worker, 8)
    with running_server(runner, models) as running_client:
        yield running_client


ROLES = [
    {"name": "solver", "max_response_tokens": 4},
    {"name": "critic", "prompt": "{query}|{solver.response}", "produces_response": False, "max_response_tokens": 2},
    {"name": "reviser", "prompt": "{query}|{critic.response}|{solver.feedback}", "max_response_tokens": 3},
]


def test_roles_have_their_own_limits_and_critics_get_no_feedback(tmp_path: Path) -> None:
    team_run = record_run(tmp_path / "run", roles=ROLES, num_agents=3)
    team = ("llm_1", "llm_2", "llm_1")
    expected = TrainedChain(open_trained(team_run.path), team, 0.7, 3).answer(0, QUERY, columns={"letter": "#"})
    solver, critic, reviser = expected["responses"]
    with serve(team_run, team) as team_client:
        choice = ask(team_client, "#").choices[0]
    assert choice.message.content == reviser["text"] and choice.finish_reason == "length"
    assert choice.message.drafts == [draft(solver), draft(critic)]
    assert choice.message.drafts[0]["feedback"] == "no #" and "feedback" not in choice.message.drafts[1]
    for policy_ids in (team[:2], (*team, "llm_2")):
        message = rf"^{len(policy_ids)} policies were chosen, but .* ends with a response only after 1, 3\. Choose"
        with pytest.raises(CommandError, match=message):
            make_env_chain(open_trained(team_run.path), policy_ids, feedback=True)


def ask(client: Any, letter: str | None = "e", model: str = "chain", **fields: Any) -> Any:
    body = {} if letter is None else {"extra_body": {"columns": {"letter": letter}}}
    messages = [{"role": "user", "content": QUERY}]
    return client.chat.completions.create(model=model, messages=messages, **{"seed": 3, **body, **fields})


def expected_responses(run: Run, letter: str, count: int) -> list[Any]:
    chain = TrainedChain(open_trained(run.path), CHAIN, 0.7, 3)
    return [chain.answer(number, QUERY, columns={"letter": letter})["responses"] for number in range(count)]


def test_drafts_of_roles_have_their_own_limits_and_the_feedback_on_them(tmp_path: Path) -> None:
    roles = [
        {"name": "solver", "count": 2, "max_response_tokens": 4},
        {
            "name": "critic",
            "prompt": "{query} {solver.response} {solver.feedback}",
            "produces_response": False,
            "max_response_tokens": 2,
        },
        {"name": "reviser", "prompt": "{query} {critic.response}", "max_response_tokens": 6},
    ]
    policies = {"num_agents": 4, "num_policies": None, "observer_prompt": None, "credit": "chain"}
    run = record_run(tmp_path / "run", roles=roles, stop_when=None, **policies)
    trained = open_trained(run.path)
    with serve(run, trained.policy_ids) as client:
        message = ask(client, "q").choices[0].message
    expected = TrainedChain(trained, trained.policy_ids, 0.7, 3).answer(0, QUERY, columns={"letter": "q"})
    *drafts, answer = expected["responses"]
    assert ["feedback" in response for response in drafts] == [True, True, False]
    assert [draft(response) for response in drafts] == message.drafts
    assert message.content == answer["text"]


def draft(response: Any) -> dict[str, Any]:
    names = ("role", "policy", "feedback")
    return {**{name: response[name] for name in names if name in response}, "content": response["text"]}


@pytest.mark.parametrize("letter", ["e", "q"])
def test_chains_equal_those_of_generate_and_drafts_have_their_feedback(client: Any, run: Run, letter: str) -> None:
    expected = expected_responses(run, letter, 8)
    lengths = {len(responses) for responses in expected}
    assert lengths == ({1, 2} if letter == "e" else {2})
    completion = ask(client, letter, n=8)
    for choice, responses in zip(completion.choices, expected, strict=True):
        assert choice.message.content == responses[-1]["text"]
        assert getattr(choice.message, "drafts", []) == [draft(response) for response in responses[:-1]]
    text = client.completions.create(
        model="chain", prompt=QUERY, n=8, seed=3, extra_body={"columns": {"letter": letter}}
    )
    assert [choice.text for choice in text.choices] == [responses[-1]["text"] for responses in expected]
    assert text.usage == completion.usage


def test_a_streamed_answer_is_the_same_whether_the_chain_stops_or_not(client: Any) -> None:
    complete = ask(client, n=8, stream=False)
    texts, reasons = [""] * 8, [""] * 8
    drafts: list[Any] = [[]] * 8
    for chunk in ask(client, n=8, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            drafts[choice.index] = getattr(choice.delta, "drafts", drafts[choice.index])
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for choice, text, streamed_drafts, reason in zip(complete.choices, texts, drafts, reasons, strict=True):
        assert (choice.message.content, choice.finish_reason) == (text, reason)
        assert getattr(choice.message, "drafts", []) == streamed_drafts


def test_an_accepted_draft_obeys_the_limit_of_tokens_and_stop_texts(client: Any, run: Run) -> None:
    (responses,) = expected_responses(run, " ", 1)  # every response has a space
    text = responses[0]["text"]
    assert len(responses) == 1
    choice = ask(client, " ", max_tokens=2).choices[0]
    assert (
        choice.finish_reason == "length" and text.startswith(choice.message.content) and choice.message.content != text
    )
    stop = text[4:7]
    choice = ask(client, " ", stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_missing_or_reserved_columns_and_unknown_models_are_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"requires the column letter, which query 'This movie' lacks"):
        ask(client, None)
    with pytest.raises(openai.BadRequestError, match="columns: role is reserved and cannot be a column"):
        ask(client, extra_body={"columns": {"role": "x"}})
    with pytest.raises(openai.BadRequestError, match="Send one prompt per request"):
        client.completions.create(model="chain", prompt=[QUERY, QUERY], extra_body={"columns": {"letter": "e"}})
    with pytest.raises(openai.NotFoundError, match=r"Unknown model `other`\. This server has: llm_1"):
        ask(client, model="other")
    assert ask(client, None, model="llm_1").choices[0].message.content


def test_failing_feedback_fails_its_request_only(client: Any) -> None:
    with ThreadPoolExecutor(3) as threads:  # in one batch
        first, failed, last = [threads.submit(ask, client, letter) for letter in ("e", "!", "q")]
    with pytest.raises(openai.InternalServerError, match="not a letter"):
        failed.result()
    for letter, future in (("e", first), ("q", last)):
        assert future.result().choices == ask(client, letter).choices


def test_serve_checks_the_function_at_the_start(policies_run: Run, tmp_path: Path, cory_in_process: Cory) -> None:
    result = cory_in_process("serve", str(policies_run.path), "--feedback", "--port", "0")
    assert result.returncode == 2 and "--feedback requires a run with feedback between agents" in result.stderr
    broken = record_run(tmp_path / "run", feedback="tests.policies.sample_rewards:nothing", observer_prompt=HIDDEN)
    words = ("serve", str(broken.path), "--feedback", "--port", "0", "--backend", "transformers")
    result = cory_in_process(*words)
    assert result.returncode == 2 and "has no function 'nothing'" in result.stderr


def test_a_chain_whose_prompts_show_feedback_is_served_with_feedback_only(
    run: Run, cory_in_process: Cory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record_names(_: object, names: tuple[str, ...], *__: object) -> None:
        raise CommandError(f"loads {names}")

    monkeypatch.setattr("launch.models.generators.load_generator", record_names)
    result = cory_in_process("serve", str(run.path), "--port", "0", "--backend", "transformers")
    assert "`chain` is not served: its prompts show feedback, which requires --feedback." in result.stderr
    assert "loads ('llm_1', 'llm_2')" in result.stderr
