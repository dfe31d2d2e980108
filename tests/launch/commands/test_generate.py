"""`cory generate`: the chain of a run's policies, told while it is written, and the same as when it is not."""

import io
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query, Task
from cory_env.tasks.task import TemplateError
from launch.console.errors import CommandError
from launch.main import main
from launch.models.trained import open_trained
from launch.models.trained_chain import TokenPrinter, TrainedChain
from launch.run_folder.run import Run
from policies.generation.generator import EVALUATION_STREAM, Sampling, sampling_seed
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.language_model import load_language_model
from policies.models.model_names import model_path
from tests.launch.conftest import ENVIRONMENT, RUN_SETTINGS, read_policy

QUERIES = ["This movie", "I did not expect", "The acting"]


def chain(run: Run, *policy_ids: str, temperature: float = 1.0, seed: int = 0) -> TrainedChain:
    return TrainedChain(open_trained(run.path, "6"), policy_ids, temperature, seed)


def test_what_is_told_is_what_is_answered_and_what_a_batch_without_a_stream_samples(policies_run: Run) -> None:
    made, output = chain(policies_run, "llm_2", "llm_1"), io.StringIO()
    answers = [made.answer(number, text, TokenPrinter(output, repeat=True)) for number, text in enumerate(QUERIES)]
    told = ""
    for answer in answers:
        first, second = (response["text"].lstrip() for response in answer["responses"])
        told += f"{answer['query']}\npioneer (llm_2): {first}\nobserver (llm_1): {second}\n"
    assert output.getvalue() == told

    episodes = [ChainEpisode(made.chain, Query(number, text)) for number, text in enumerate(QUERIES)]
    for position, policy in enumerate(("llm_2", "llm_1")):
        seeds = [sampling_seed(0, EVALUATION_STREAM, number, position) for number in range(len(QUERIES))]
        prompts = [episode.prompt_ids() for episode in episodes]
        for episode, response in zip(
            episodes,
            made.generator.generate(prompts, policy, Sampling(1.0, 8, seeds, made.chain.stop_token_ids)),
            strict=True,
        ):
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
    assert [[response["text"] for response in answer["responses"]] for answer in answers] == [
        episode.completions for episode in episodes
    ]


def test_llms_of_different_models_answer_each_with_its_own(two_models_run: Run) -> None:
    made = TrainedChain(open_trained(two_models_run.path), ("llm_2", "llm_1"), 1.0, 0)
    assert isinstance(made.generator, TransformersGenerator)
    widths = {name: model.config.n_embd for name, model in made.generator.models.items()}
    assert widths == {"llm_2": 64, "llm_1": 256}
    assert [each["policy"] for each in made.answer(0, "This movie")["responses"]] == ["llm_2", "llm_1"]


def test_one_policy_alone_answers_the_bare_query_and_at_temperature_0_whatever_the_seed(
    policies_run: Run,
) -> None:
    answers = [chain(policies_run, "llm_2", temperature=0, seed=seed).answer(0, "This movie") for seed in (1, 2)]
    assert answers[0] == answers[1]
    assert [(response["role"], response["policy"]) for response in answers[0]["responses"]] == [("pioneer", "llm_2")]
    made = chain(policies_run, "llm_2")
    tokens = ChainEpisode(made.chain, Query(0, "This movie")).prompt_ids()
    assert isinstance(made.generator, TransformersGenerator)
    greedy = made.generator.models["llm_2"].generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)
    assert made.chain.decode(greedy[0, len(tokens) :].tolist()) == answers[0]["responses"][0]["text"]


def test_adapters_answer_as_the_policies_that_were_trained(adapters_run: Run) -> None:
    trained = open_trained(adapters_run.path)
    answer = TrainedChain(trained, ["llm_2", "llm_1"], 0, 0).answer(0, "This movie")
    prompts = TrainedChain(trained, ["llm_2", "llm_1"], 0, 0).chain
    episode = ChainEpisode(prompts, Query(0, "This movie"))
    for policy, response in zip(("llm_2", "llm_1"), answer["responses"], strict=True):
        module = read_policy(trained.folder, trained.settings, policy)
        tokens = episode.prompt_ids()
        both = [
            lm.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :].tolist()
            for lm in (module.policy.lm, module.policy.reference())
        ]
        assert response["text"] == prompts.decode(both[0]) != prompts.decode(both[1])
        episode.respond({"tokens": both[0], "length": len(both[0])})


def test_roles_checkpoint_and_seed_are_those_of_the_run_unless_others_are_named(
    policies_run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([QUERIES[0], "  ", QUERIES[1]]) + "\n"))
    assert main(["generate", str(policies_run.path), "--json"]) == 0
    output, errors = capsys.readouterr()
    assert errors.startswith(f"llm_2 then llm_1, after update 5 of {policies_run.path}\n")
    answers = [json.loads(line) for line in output.splitlines()]
    assert [answer["query"] for answer in answers] == QUERIES[:2]

    trained = open_trained(policies_run.path, "best")
    own = TrainedChain(trained, ["llm_2", "llm_1"], RUN_SETTINGS.temperature, RUN_SETTINGS.seed)
    assert answers == [own.answer(number, text) for number, text in enumerate(QUERIES[:2])]
    other = TrainedChain(trained, ["llm_1", "llm_1", "llm_2"], 0.5, 3).answer(0, QUERIES[0])
    named = ["--roles", "llm_1, llm_1,llm_2", "--temperature", "0.5", "--seed", "3", "--checkpoint", "5", "--json"]
    for words in ([QUERIES[0], *named], [*named, QUERIES[0]]):
        assert main(["generate", str(policies_run.path), *words]) == 0
        assert json.loads(capsys.readouterr().out) == other
    assert [response["role"] for response in other["responses"]] == ["pioneer", "observer_1", "observer_2"]


def test_the_mean_of_all_llms_answers_as_their_mean_weights_do(
    policies_run: Run, adapters_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--roles", "mean", "--temperature", "0", "--json"]
    assert main(["generate", str(policies_run.path), QUERIES[0], *words]) == 0
    output, errors = capsys.readouterr()
    assert errors.startswith("llm_mean, after update 5")
    trained = open_trained(policies_run.path, "best")
    model = load_language_model(model_path(trained.base("llm_1")))
    for name, parameter in model.named_parameters():
        both = [torch.from_numpy(trained.weights(policy)[name].copy()) for policy in ("llm_1", "llm_2")]
        parameter.data = (both[0] + both[1]) / 2
    tokenizer = trained.settings.make_tokenizers()["llm_1"]
    prompt = tokenizer(QUERIES[0], return_tensors="pt")["input_ids"]
    limit = trained.settings.max_response_tokens
    expected = model.generate(prompt, max_new_tokens=limit, do_sample=False)[0, prompt.shape[1] :]
    (response,) = json.loads(output)["responses"]
    assert response["text"] == tokenizer.decode(expected)
    assert main(["generate", str(adapters_run.path), QUERIES[0], *words]) == 2
    assert "The mean of adapters has a higher rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["word " * 90], "needs a prompt of"),
        (["word " * 45], "needs a prompt of"),  # of the second alone, which repeats the query
        ([" "], "The query is empty."),
        (["This movie", "--roles", "llm_1,llm_7"], "no policy `llm_7`. Its policies are: llm_1, llm_2, mean."),
        (["This movie", "--checkpoint", "1"], "no checkpoint `1`. It has: best (5), latest (6), 5, 6."),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(
    policies_run: Run, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert main(["generate", str(policies_run.path), *words]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.splitlines()[-1].startswith("Error: ") and what in errors


def test_prompts_that_hold_columns_of_the_data_cannot_be_filled_by_a_query_alone(policies_run: Run) -> None:
    task = Task(name="custom", train=[], test=[], reward="r:r", observer_template="{hint} {query} {reference}")
    made = chain(policies_run, "llm_1", "llm_2")
    made.chain = Chain(task, made.chain.tokenizer)
    assert made.columns == {"hint"}
    with pytest.raises(TemplateError, match="uses the column 'hint', but this query's row has only"):
        made.answer(0, "This movie")


def test_the_best_of_several_responses_cannot_be_shown_without_a_reward(policies_run: Run) -> None:
    trained = open_trained(policies_run.path, "6")
    trained = replace(trained, settings=trained.settings.model_copy(update={"observed": "best"}))
    with pytest.raises(CommandError, match=r"only the reward can tell\. Let fewer answer: --roles llm_1,llm_2\."):
        TrainedChain(trained, ["llm_1", "llm_2", "llm_1"], 1.0, 0)
    answer = TrainedChain(trained, ["llm_1", "llm_2"], 1.0, 0).answer(0, QUERIES[0])
    assert answer == chain(policies_run, "llm_1", "llm_2").answer(0, QUERIES[0])


def test_a_model_cannot_steer_the_terminal() -> None:
    output = io.StringIO()
    TokenPrinter(output, repeat=False).print("red: \x1b[31m, bell: \x07, \x9b31m, kept: é🙂\u00a0\n")
    assert output.getvalue() == "red: �[31m, bell: �, �31m, kept: é🙂\u00a0\n"


def test_at_a_terminal_it_asks_goes_on_after_a_query_that_is_too_long_and_ends_with_ctrl_c(
    policies_run: Run,
) -> None:
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cory_rllib", "generate", str(policies_run.path)],
        env={**ENVIRONMENT, "TERM": "xterm"},
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    os.close(inside)

    def until(text: str) -> str:
        seen = ""
        while text not in seen:
            assert select.select([terminal], [], [], 200)[0], seen
            seen += os.read(terminal, 1024).decode()
        return seen

    try:
        until("query: ")
        os.write(terminal, b"word " * 90 + b"\n")
        assert "needs a prompt of" in until("query: ")
        os.write(terminal, b"This movie\n")
        shown = until("query: ")
        assert "pioneer (llm_2): " in shown and "observer (llm_1): " in shown and "\x1b[2m" in shown
        for _ in range(12):  # one between the prompt and the wait for input is noted, but wakes nobody
            process.send_signal(signal.SIGINT)
            if select.select([terminal], [], [], 5)[0]:
                break
        assert "Aborted." in until("Aborted.").splitlines()
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        os.close(terminal)
