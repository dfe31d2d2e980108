"""The reward of a preference model: a classifier with one output, trained to score preferred answers higher."""

from collections.abc import Callable, Sequence
from typing import cast

from cory_env.message import Message
from cory_env.rewards import classifier
from cory_env.rewards.prepared import prepare_with


@prepare_with(classifier.load)
def score(
    prompts: Sequence[str | list[Message]],
    completions: Sequence[str | list[Message]],
    model: str,
    device: str = "",
) -> list[float]:
    """Returns the model's raw score of each answer.

    A model with a chat template reads the conversation in it; another one reads what was asked and the answer as a
    pair of texts, as encoders such as DeBERTa are trained to.

    Args:
        prompts: The bare queries: text, or conversations that end with the user's turn.
        completions: The answers, in the same form.
        model: A folder or hub id of a sequence classifier with one output, in a configuration
            `cory_env.rewards.preference:score?model=Skywork/Skywork-Reward-V2-Qwen3-0.6B`.
        device: Where it runs, such as `cpu` or `cuda:0`; empty for a GPU if this process sees one, else the CPU.

    Raises:
        ValueError: The classifier has several outputs.
    """
    tokenizer, judge = classifier.load(model, device)
    if judge.config.num_labels != 1:
        raise ValueError(
            f"The classifier {model} has {judge.config.num_labels} outputs, but a preference model has one. Name "
            "another one."
        )
    if judge.config.pad_token_id is None:  # a causal one finds each text's end by it
        judge.config.pad_token_id = tokenizer.pad_token_id
    asked, answers = [_conversation(p, "user") for p in prompts], [_conversation(c, "assistant") for c in completions]
    if tokenizer.chat_template:

        def render(messages: list[Message]) -> str:
            return cast(str, tokenizer.apply_chat_template(messages, tokenize=False))

        control = classifier.control_tokens(
            tokenizer, render(_conversation("a", "user") + _conversation("a", "assistant"))
        )
        texts = [
            control.break_up(render(_masked(question + answer, control.mask)))
            for question, answer in zip(asked, answers, strict=True)
        ]
        found = classifier.logits(tokenizer, judge, texts, special_tokens=False)  # the template has written them
    else:
        found = classifier.logits(tokenizer, judge, [_text(q) for q in asked], [_text(a) for a in answers])
    values: list[float] = found[:, 0].tolist()
    return values


def _conversation(turn: str | list[Message], role: str) -> list[Message]:
    return [Message(role=role, content=turn)] if isinstance(turn, str) else turn


def _masked(messages: Sequence[Message], mask: Callable[[str], str]) -> list[Message]:
    """Returns messages whose texts open no turns of their own in a template."""
    return [Message(role=message["role"], content=mask(message["content"])) for message in messages]


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
