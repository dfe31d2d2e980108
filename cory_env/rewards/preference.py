"""Reward of a preference model: a classifier with one output, trained to score preferred responses higher."""

from collections.abc import Callable, Sequence
from typing import cast

from cory_env.message import Message
from cory_env.rewards import classifier
from cory_env.rewards.prepared import prepare_with


@prepare_with(classifier.load_classifier)
def score(
    prompts: Sequence[str | list[Message]],
    completions: Sequence[str | list[Message]],
    model: str,
    device: str = "",
) -> list[float]:
    """Returns the model's raw score of each response.

    If the model has a chat template, its input is the rendered conversation. Otherwise its input is the query and the
    response as a pair of texts, as for encoders such as DeBERTa.

    Args:
        prompts: The queries: texts, or conversations that end with a user message.
        completions: The responses, in the same form.
        model: A folder or hub id of a sequence classifier with one output, in a configuration
            `cory_env.rewards.preference:score?model=Skywork/Skywork-Reward-V2-Qwen3-0.6B`.
        device: Device, such as `cpu` or `cuda:0`; if empty, a GPU if this process sees one, else the CPU.

    Raises:
        ValueError: The classifier has several outputs.
    """
    tokenizer, classifier_model = classifier.load_classifier(model, device)
    if classifier_model.config.num_labels != 1:
        raise ValueError(
            f"The classifier {model} has {classifier_model.config.num_labels} outputs, but a preference model has "
            "one. Use another model."
        )
    if classifier_model.config.pad_token_id is None:  # causal models use it to find each text's end
        classifier_model.config.pad_token_id = tokenizer.pad_token_id
    queries = [_to_messages(prompt, "user") for prompt in prompts]
    responses = [_to_messages(completion, "assistant") for completion in completions]
    if tokenizer.chat_template:

        def render(messages: list[Message]) -> str:
            return cast(str, tokenizer.apply_chat_template(messages, tokenize=False))

        control = classifier.control_tokens(
            tokenizer, render(_to_messages("a", "user") + _to_messages("a", "assistant"))
        )
        texts = [
            control.break_up(render(_mask_messages(query + response, control.mask)))
            for query, response in zip(queries, responses, strict=True)
        ]
        # The template has added the special tokens.
        logits = classifier.logits(tokenizer, classifier_model, texts, special_tokens=False)
    else:
        pairs = [_text(response) for response in responses]
        logits = classifier.logits(tokenizer, classifier_model, [_text(query) for query in queries], pairs)
    scores: list[float] = logits[:, 0].tolist()
    return scores


def _to_messages(value: str | list[Message], role: str) -> list[Message]:
    return [Message(role=role, content=value)] if isinstance(value, str) else value


def _mask_messages(messages: Sequence[Message], mask: Callable[[str], str]) -> list[Message]:
    """Returns messages whose texts cannot open turns in a template."""
    return [Message(role=message["role"], content=mask(message["content"])) for message in messages]


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
