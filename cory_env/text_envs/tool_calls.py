"""Reads tool calls in responses, in the format of the model's chat template.

transformers' `parse_response` reads them by a `response_template`. A tokenizer may bring its own. If it has none, the
format is the one in `FORMATS` that reads a call as the chat template writes it.
"""

import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from cory_env.chat import TOOL_CALL, TOOL_NAME, ChatError
from cory_env.message import Message, has_surrogate
from cory_env.prompt_encoder import Prompt, PromptEncoder

_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_LISTED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}


def _tags(tag: str, name: str, parameter: str) -> dict[str, Any]:
    """A call whose arguments are elements of their own; the tool's schema gives their types."""
    return {
        "open_pattern": rf"<{tag}>\s*{name}",
        "close_pattern": rf"</{tag}>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": parameter, "value_parser": {"name": "text"}},
        "transform": _NAMED_CALL,
    }


_FUNCTION, _PARAMETER = r"<function=(?P<name>[^\n>]+)>", r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"

FORMATS: dict[str, dict[str, Any]] = {
    "JSON in <tool_call>, as in Qwen2.5, Qwen3, SmolLM3, EXAONE 4 and Granite 4": {
        "open": "<tool_call>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "json",
        "transform": _CALL,
    },
    "elements in <tool_call>, as in Qwen3.5, Qwen3-Coder and Nemotron 3": _tags("tool_call", _FUNCTION, _PARAMETER),
    "elements in <seed:tool_call>, as in Seed-OSS": _tags("seed:tool_call", _FUNCTION, _PARAMETER),
    "JSON with parameters, as in Llama 3.1 to 3.3": {
        "open_pattern": r'(?:<\|python_tag\|>\s*)?\{\s*"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": r"\}\s*$",
        "repeats": True,
        "content": "json",
        "transform": _NAMED_CALL,
    },
    "a list after [TOOL_CALLS], as in Mistral": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
        "content": "json",
        "transform": _LISTED_CALL,
        "transform_each": True,
    },
    "a list after <|tool_call|>, as in Granite 3 and Phi-4-mini": {
        "open_pattern": r"<\|?tool_call\|?>\s*(?=\[)",
        "close_pattern": r"<\|?/tool_call\|?>\s*",
        "content": "json",
        "transform": _LISTED_CALL,
        "transform_each": True,
    },
}
"""Fields `tool_calls` of transformers' response templates, by what they look like."""

_TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {"marker_key": {"type": "string", "description": ""}}},
    },
}


def read_message(
    encoder: PromptEncoder,
    prompt: Prompt,
    response: Sequence[int],
    shown: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
) -> Message:
    """Returns a response as a message: its text, and under `tool_calls` the calls in it, if there are any.

    If calls are malformed, all of it is text, as in TRL.

    Args:
        encoder: Of the agent.
        prompt: Before the response.
        response: The response's tokens.
        shown: Those after its thought.
        tools: Their schemas give the types of arguments.

    Raises:
        ChatError: See `find_format`.
    """
    field, tokenizer = find_format(encoder), encoder.tokenizer
    try:
        if field is None:
            parsed: Any = tokenizer.parse_response([*response], prefix=[*prompt.tokens], tools=[*tools])
        else:
            raw = str(tokenizer.decode(encoder.without_end(shown), skip_special_tokens=False))
            parsed = _parse(tokenizer, raw, field, tools)
        calls = [_checked_call(call, index) for index, call in enumerate(parsed.get("tool_calls") or [])]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # whatever the model wrote
        return Message(role="assistant", content=encoder.decode(shown) if shown else "")
    content = str(parsed.get("content") or "")
    message = Message(role="assistant", content=content if encoder.stop is None else content.partition(encoder.stop)[0])
    return {**message, "tool_calls": calls} if calls else message


@lru_cache(maxsize=64)
def find_format(encoder: PromptEncoder) -> dict[str, Any] | None:
    """Returns the format of the tool calls of an encoder's chat template; None: the tokenizer's `response_template`.

    Raises:
        ChatError: There is no template, or it writes no tool calls or results, or in an unknown format.
    """
    chat, tokenizer = encoder.chat, encoder.tokenizer
    if chat is None:
        raise ChatError(
            "The environment has tools, but chat is off. Set chat=true for a model with a chat template, or use "
            "another model."
        )
    result = Message(role="tool", content="Marker2Text", name=TOOL_NAME, tool_call_id=TOOL_CALL["id"])
    written, rest = chat.render_tool_results([result])
    shows_tools = TOOL_NAME in chat.render_messages([Message(role="user", content="a")], [_TOOL])
    if "marker_key" not in written or "Marker1Text" not in written or "Marker2Text" not in rest or not shows_tools:
        raise ChatError(
            f"The chat template of {tokenizer.name_or_path} drops "
            f"{'arguments or results of tool calls' if shows_tools else 'the tools'}. Use a model that was trained to "
            "call tools."
        )
    if getattr(tokenizer, "response_template", None) is not None:
        return None
    for field in FORMATS.values():
        try:
            parsed = _parse(tokenizer, written, field, [_TOOL])
        except (ValueError, TypeError, KeyError):
            continue
        if [call.get("function") for call in parsed.get("tool_calls", [])] == [TOOL_CALL["function"]]:
            return field
    raise ChatError(
        f"The chat template of {tokenizer.name_or_path} writes tool calls in an unknown format: {written!r:.200}. Save "
        "a `response_template` with its tokenizer (see transformers' documentation on parsing responses), or use "
        "another model."
    )


def _parse(tokenizer: Any, text: str, field: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "\0",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
            "tool_calls": field,
            "content": {},
        },
    }
    parsed: dict[str, Any] = tokenizer.parse_response(text, template, prefix="", tools=[*tools])
    return parsed


def _checked_call(call: Any, index: int) -> dict[str, Any]:
    """Returns a call with an id.

    Raises:
        ValueError: It has no name or arguments without names, or text that is not UTF-8, which JSON can spell.
        RecursionError: Its arguments are nested too deeply.
    """
    function = call["function"]
    name, arguments = function["name"], function.get("arguments")
    if (
        not isinstance(name, str)
        or not name
        or not isinstance(arguments, Mapping | None)
        or has_surrogate([name, arguments])
    ):
        raise ValueError(f"{call!r:.80} is not a call")
    pickle.dumps(arguments)  # as it is sent to the environment's process
    return {"type": "function", "id": f"call{index:05}", "function": {"name": name, "arguments": dict(arguments or {})}}
