"""TRL beside us: the same class and the same scripted responses give the same messages, token ids and trained tokens.

Needs TRL, which no extra installs: `pip install --no-deps --target benchmarks/.trl-1 trl==1.16.0`.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from cory_env.tokenizer import load_tokenizer
from policies.models.model_names import model_path
from tests.cory_env.text_envs.test_trl import make_episode, play

TRL = Path(__file__).parents[3] / "benchmarks" / ".trl-1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TRL / "trl").is_dir(), reason="TRL is not in benchmarks/.trl-1"),
]

ROW = {"prompt": [{"role": "user", "content": "Reach 12."}], "start": 0}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
Write = Callable[..., str]


def write_json(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_elements(name: str, **arguments: Any) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def write_parameters(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


TEMPLATES: dict[str, tuple[str, Write]] = {
    "qwen2_5": ("<|im_end|>", write_json),
    "qwen3": ("<|im_end|>", write_json),
    "qwen3_instruct_2507": ("<|im_end|>", write_json),
    "qwen3_5_nothink": ("<|im_end|>", write_elements),
    "nemotron_3_nano": ("<|im_end|>", write_elements),
    "llama3_1": ("<|eot_id|>", write_parameters),
}
"""TRL's copies of chat templates, with the token that ends a turn, and how a call is written."""


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(TRL))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import trl

    yield trl
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]


def make_tokenizer(template: str, end: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(model_path("smollm2"))
    text = (TRL / "trl" / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    marks = sorted({end, *re.findall(r"<\|[^|<>]+\|>", text)})
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "eos_token": end, "pad_token": "<|endoftext|>"})
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.chat_template = text
    return tokenizer


def scripts(write: Write) -> list[list[str]]:
    """The responses of episodes; the last one of an episode has no calls, or is cut."""
    several = f"I will. {write('add', amount=2)}\n{write('shout', text='hi é', times=2)}"
    return [
        [write("add", amount=5), write("fly", x=1), "Done"],
        ["The answer is 3."],
        ["<tool_call>{broken"],
        [f"<think>\nhm\n</think>\n\n{write('add', amount='7')}", "It is"],
        *([] if write is write_parameters else [[several, write("add", amount="x"), write("add"), "ok"]]),
        [write("add", amount=6), write("add", amount=6), "12"],
    ]


def run_trl(trl: Any, tokenizer: PreTrainedTokenizerBase, responses: Sequence[Sequence[list[int]]]) -> dict[str, Any]:
    """TRL's rollouts and rewards with these responses instead of sampled ones."""
    from datasets import Dataset

    from tests.trl_envs import Counter

    config = AutoConfig.from_pretrained(model_path("drafts-llama-tiny"))
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 4096
    count = len(responses)
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_config(config),
        train_dataset=Dataset.from_list([ROW]),
        environment_factory=Counter,
        processing_class=tokenizer,
        args=trl.GRPOConfig(
            output_dir="unused",
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_completion_length=2000,
            max_tool_calling_iterations=8,
            **dict.fromkeys(("per_device_train_batch_size", "num_generations", "generation_batch_size"), count),
        ),
    )
    turns: list[int] = [0] * count
    contexts: list[list[int]] = [[]] * count

    def generate(prompts: Sequence[list[int]], *_: object, **__: object) -> tuple[list[list[int]], list[list[float]]]:
        """Gives each prompt the next response of the episode that it continues."""
        generated, free = [], [*range(count)]
        for prompt in prompts:
            episode = next(
                k for k in free if prompt[: len(contexts[k])] == contexts[k] and turns[k] < len(responses[k])
            )
            free.remove(episode)
            generated.append([*responses[episode][turns[episode]]])
            contexts[episode] = [*prompt, *generated[-1]]
            turns[episode] += 1
        return generated, [[0.0] * len(tokens) for tokens in generated]

    result: dict[str, Any] = {}
    run_tools, reward = trainer._tool_call_loop, trainer._calculate_rewards

    def record(prompts: Any, prompt_ids: Any, *arguments: Any) -> Any:
        loop = run_tools(prompts, prompt_ids, *arguments)
        result.update(prompts=prompt_ids, mask=loop[0], messages=loop[1], completions=loop[2])
        return loop

    def record_rewards(*arguments: Any, **keywords: Any) -> Any:
        result["rewards"] = reward(*arguments, **keywords)
        return result["rewards"]

    trainer._generate_single_turn, trainer._tool_call_loop = generate, record
    trainer._calculate_rewards = record_rewards
    trainer.model.train()
    trainer._generate_and_score_completions([copy.deepcopy(ROW) for _ in range(count)])
    return result


def plain(message: Any) -> dict[str, Any]:
    """A message without what only one of both has: ids of calls, and thoughts."""
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls", [])]
    content = {key: message[key] for key in ("role", "content", "name") if key in message}
    return {**content, "tool_calls": calls} if calls else content


@pytest.mark.parametrize("template", TEMPLATES)
def test_messages_tokens_and_trained_tokens_are_trl_s(template: str, trl: Any) -> None:
    end, write = TEMPLATES[template]
    tokenizer = make_tokenizer(template, end)
    texts = [[text if text == "It is" else text + end for text in script] for script in scripts(write)]
    ids = [[tokenizer(text, add_special_tokens=False)["input_ids"] for text in script] for script in texts]
    theirs = run_trl(trl, tokenizer, ids)
    for k, script in enumerate(texts):
        row = {"query": ROW["prompt"], "start": 0}
        episode = play(make_episode(tokenizer=tokenizer, row=row, max_prompt_tokens=3000), *script, end="")
        tokens = [*episode.prompts[len(script) - 1].tokens, *episode.responses[-1]]
        mask = [0] * len(tokens)
        for prompt, response in zip(episode.prompts, episode.responses, strict=True):
            mask[len(prompt.tokens) : len(prompt.tokens) + len(response)] = [1] * len(response)
        messages = [
            message
            for action, state in zip(episode.actions, episode.states[1:], strict=True)
            for message in (action, *state.messages)
        ]
        first = [*theirs["prompts"][k]]
        assert tokens == [*first, *theirs["completions"][k]]
        assert mask[len(first) :] == [*theirs["mask"][k]]
        assert [plain(message) for message in messages] == [plain(message) for message in theirs["messages"][k]]
        assert episode.returns()["agent"] == float(theirs["rewards"][k])
