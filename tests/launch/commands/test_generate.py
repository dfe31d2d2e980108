"""`cory generate` with single queries: responses equal those of a batch."""

import io
import json
import os
import select
import signal
import subprocess
import sys

import pytest
import torch

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query, Task
from cory_env.tasks.task import TemplateError
from launch.commands.generate import print_answer
from launch.main import main
from launch.models.trained import open_trained
from launch.models.trained_chain import TrainedChain
from launch.run_folder.run import Run
from policies.generation.generator import EVALUATION_UPDATE, Sampling, sampling_seed
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.language_model import load_language_model
from policies.models.model_names import model_path
from tests.launch.conftest import ENVIRONMENT, RUN_SETTINGS, read_policy

QUERIES = ["This movie", "I did not expect", "The acting"]


def make_chain(run: Run, *policy_ids: str, temperature: float = 1.0, seed: int = 0) -> TrainedChain:
    return TrainedChain(open_trained(run.path, "6"), policy_ids, temperature, seed)


def test_printed_responses_equal_returned_ones_and_those_of_a_batch(
    policies_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = make_chain(policies_run, "llm_2", "llm_1")
    answers = [chain.answer(number, text) for number, text in enumerate(QUERIES)]
    for answer in answers:
        print_answer(answer, print_query=True)
    expected = ""
    for answer in answers:
        first, second = (response["text"].lstrip() for response in answer["responses"])
        expected += f"{answer['query']}\npioneer (llm_2): {first}\nobserver (llm_1): {second}\n"
    assert capsys.readouterr().out == expected

    episodes = [ChainEpisode(chain.chain, Query(number, text)) for number, text in enumerate(QUERIES)]
    for position, policy_id in enumerate(("llm_2", "llm_1")):
        seeds = [sampling_seed(0, EVALUATION_UPDATE, number, position) for number in range(len(QUERIES))]
        prompts = [episode.prompt_ids() for episode in episodes]
        for episode, response in zip(
            episodes,
            chain.generator.generate(
                prompts, policy_id, Sampling(1.0, 8, seeds, chain.chain.encoders[0].stop_token_ids)
            ),
            strict=True,
        ):
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
    assert [[response["text"] for response in answer["responses"]] for answer in answers] == [
        episode.completions for episode in episodes
    ]


def test_llms_of_different_base_models_use_their_own_model(two_models_run: Run) -> None:
    chain = TrainedChain(open_trained(two_models_run.path), ("llm_2", "llm_1"), 1.0, 0)
    assert isinstance(chain.generator, TransformersGenerator)
    widths = {name: model.config.n_embd for name, model in chain.generator.models.items()}
    assert widths == {"llm_2": 64, "llm_1": 256}
    responses = chain.answer(0, "This movie")["responses"]
    assert [response["policy"] for response in responses] == ["llm_2", "llm_1"]


def test_a_single_policy_answers_the_bare_query_and_temperature_0_ignores_the_seed(policies_run: Run) -> None:
    answers = [make_chain(policies_run, "llm_2", temperature=0, seed=seed).answer(0, "This movie") for seed in (1, 2)]
    assert answers[0] == answers[1]
    assert [(response["role"], response["policy"]) for response in answers[0]["responses"]] == [("pioneer", "llm_2")]
    chain = make_chain(policies_run, "llm_2")
    tokens = ChainEpisode(chain.chain, Query(0, "This movie")).prompt_ids()
    assert isinstance(chain.generator, TransformersGenerator)
    greedy = chain.generator.models["llm_2"].generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)
    assert chain.chain.encoders[0].decode(greedy[0, len(tokens) :].tolist()) == answers[0]["responses"][0]["text"]


def test_adapters_generate_the_same_responses_as_the_trained_modules(adapters_run: Run) -> None:
    trained = open_trained(adapters_run.path)
    answer = TrainedChain(trained, ["llm_2", "llm_1"], 0, 0).answer(0, "This movie")
    chain = TrainedChain(trained, ["llm_2", "llm_1"], 0, 0).chain
    episode = ChainEpisode(chain, Query(0, "This movie"))
    for policy_id, response in zip(("llm_2", "llm_1"), answer["responses"], strict=True):
        module = read_policy(trained.folder, trained.settings, policy_id)
        tokens = episode.prompt_ids()
        adapted, base = (
            lm.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0, len(tokens) :].tolist()
            for lm in (module.policy.lm, module.policy.reference())
        )
        assert response["text"] == chain.encoders[0].decode(adapted) != chain.encoders[0].decode(base)
        episode.respond({"tokens": adapted, "length": len(adapted)})


def test_roles_checkpoint_temperature_and_seed_default_to_those_of_the_run(
    policies_run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([QUERIES[0], "  ", QUERIES[1]]) + "\n"))
    assert main(["generate", str(policies_run.path), "--json"]) == 0
    output, errors = capsys.readouterr()
    assert errors.startswith(f"llm_2 then llm_1, after update 5 of {policies_run.path}\n")
    answers = [json.loads(line) for line in output.splitlines()]
    assert [answer["query"] for answer in answers] == QUERIES[:2]

    trained = open_trained(policies_run.path, "best")
    default_chain = TrainedChain(trained, ["llm_2", "llm_1"], RUN_SETTINGS.temperature, RUN_SETTINGS.seed)
    assert answers == [default_chain.answer(number, text) for number, text in enumerate(QUERIES[:2])]
    expected = TrainedChain(trained, ["llm_1", "llm_1", "llm_2"], 0.5, 3).answer(0, QUERIES[0])
    options = ["--roles", "llm_1, llm_1,llm_2", "--temperature", "0.5", "--seed", "3", "--checkpoint", "5", "--json"]
    for words in ([QUERIES[0], *options], [*options, QUERIES[0]]):
        assert main(["generate", str(policies_run.path), *words]) == 0
        assert json.loads(capsys.readouterr().out) == expected
    assert [response["role"] for response in expected["responses"]] == ["pioneer", "observer_1", "observer_2"]


def test_the_mean_generates_with_the_mean_weights(
    policies_run: Run, adapters_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--roles", "mean", "--temperature", "0", "--json"]
    assert main(["generate", str(policies_run.path), QUERIES[0], *words]) == 0
    output, errors = capsys.readouterr()
    assert errors.startswith("llm_mean, after update 5")
    trained = open_trained(policies_run.path, "best")
    model = load_language_model(model_path(trained.base("llm_1")))
    for name, parameter in model.named_parameters():
        weights = [torch.from_numpy(trained.weights(policy_id)[name].copy()) for policy_id in ("llm_1", "llm_2")]
        parameter.data = (weights[0] + weights[1]) / 2
    tokenizer = trained.settings.make_tokenizers()["llm_1"]
    prompt = tokenizer(QUERIES[0], return_tensors="pt")["input_ids"]
    limit = trained.settings.max_response_tokens
    expected = model.generate(prompt, max_new_tokens=limit, do_sample=False)[0, prompt.shape[1] :]
    (response,) = json.loads(output)["responses"]
    assert response["text"] == tokenizer.decode(expected)
    assert main(["generate", str(adapters_run.path), QUERIES[0], *words]) == 2
    assert "The mean of adapters cannot be used here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["word " * 90], "needs a prompt of"),
        (["word " * 45], "needs a prompt of"),  # the observer's prompt, which repeats the query
        ([" "], "The query is empty."),
        (["This movie", "--roles", "llm_1,llm_7"], "Unknown policy `llm_7`. RUN has: llm_1, llm_2, mean."),
        (["This movie", "--checkpoint", "1"], "no checkpoint `1`. It has: best (5), latest (6), 5, 6."),
    ],
)
def test_invalid_queries_and_options_are_rejected(
    policies_run: Run, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["generate", str(policies_run.path), *words]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.splitlines()[-1].startswith("Error: ")
    assert message.replace("RUN", str(policies_run.path)) in errors


def test_a_query_without_columns_cannot_fill_a_template_with_columns(policies_run: Run) -> None:
    task = Task(name="custom", train=[], test=[], reward="r:r", observer_template="{hint} {query} {reference}")
    chain = make_chain(policies_run, "llm_1", "llm_2")
    chain.chain = Chain(task, chain.chain.encoders[0].tokenizer)
    assert chain.columns == {"hint"}
    with pytest.raises(TemplateError, match="uses the column 'hint', but this query's row has only"):
        chain.answer(0, "This movie")


def test_terminal_control_codes_of_a_model_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    text = "red: \x1b[31m, bell: \x07, \x9b31m, text: é🙂\u00a0"
    print_answer({"query": "q", "responses": [{"role": "pioneer", "policy": "llm_1", "text": text}]}, print_query=False)
    assert capsys.readouterr().out == "pioneer (llm_1): red: �[31m, bell: �, �31m, text: é🙂\u00a0\n"


def test_at_a_terminal_a_query_that_is_too_long_is_reported_and_ctrl_c_aborts(policies_run: Run) -> None:
    terminal, process_end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cory_rllib", "generate", str(policies_run.path)],
        env={**ENVIRONMENT, "TERM": "xterm"},
        stdin=process_end,
        stdout=process_end,
        stderr=process_end,
        start_new_session=True,
    )
    os.close(process_end)

    def read_until(text: str) -> str:
        output = ""
        while text not in output:
            assert select.select([terminal], [], [], 200)[0], output
            output += os.read(terminal, 1024).decode()
        return output

    try:
        read_until("query: ")
        os.write(terminal, b"word " * 90 + b"\n")
        assert "needs a prompt of" in read_until("query: ")
        os.write(terminal, b"This movie\n")
        output = read_until("query: ")
        assert "pioneer (llm_2): " in output and "observer (llm_1): " in output and "\x1b[2m" in output
        for _ in range(12):  # a signal between the prompt and the call of `input` does not interrupt it
            process.send_signal(signal.SIGINT)
            if select.select([terminal], [], [], 5)[0]:
                break
        assert "Aborted." in read_until("Aborted.").splitlines()
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        os.close(terminal)
