"""Generates the reference pages from the code: each function returns the Markdown of one page."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from metric_docs import METRIC_DOCS, PHASE_DOCS
from pydantic.fields import FieldInfo

from cory_env.chain_settings import Role, Thinking
from launch.console.cli import COMMANDS, command
from policies.models.families import ENGINE_LOGPROB_TOLERANCE, LOGPROB_TOLERANCE, read_family_table
from policies.settings import fields
from policies.settings.files import presets as preset_names
from policies.settings.settings import METADATA, Settings
from policies.settings.yaml12 import to_yaml

KINDS = {int: "integer", float: "number", bool: "true or false", str: "string", NoneType: "null"}
NESTED = {
    list[str]: "list of strings",
    list[float]: "list of numbers",
    list[Role]: "list of roles",
    dict[str, Any]: "mapping",
    Thinking: "mapping",
}
SIGNS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}


def settings() -> str:
    """All settings, under the headings of `fields.py`."""
    headings = dict(_topics())
    parts = []
    for name, field in Settings.model_fields.items():
        if name in headings:
            parts.append(f"## {headings[name]}\n")
        metadata = METADATA[name]
        changeable = [
            occasion
            for occasion, allowed in (
                ("when resuming", metadata.resume),
                ("in searches", metadata.search),
                ("in PBT clones", metadata.clone),
            )
            if allowed
        ]
        changes = f"; can change {', '.join(changeable)}" if changeable else ""
        text = f"{_add_links(field.description or '')}\n\n*Category: {metadata.category}{changes}.*"
        default = f"`{to_yaml(field.default)}`"
        parts.append(_directive("confval", name, text, type=kind(field), default=default))
    return "\n".join(parts)


def families() -> str:
    """The measurements of each model family."""
    table = read_family_table()
    columns = (
        "family",
        "padding",
        "attention",
        "prefix tree",
        "export",
        "LoRA on",
        "vLLM's model",
        "at first",
        "after an update",
        "LoRA",
    )
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name, row in sorted(table.families.items()):
        lines.append(f"| {' | '.join((f'`{name}`', *_learner_cells(row), *_engine_cells(row['vllm'])))} |")
    measured = ", ".join(f"{package} {version}" for package, version in table.versions.items())
    return "\n".join([f"Measured with {measured}, on a CPU, in fp32.\n", *lines])


def _learner_cells(row: dict[str, Any]) -> Iterator[str]:
    yield _nats(row["padding"], LOGPROB_TOLERANCE)
    yield "eager" if row["attention"] == "eager" else "any"
    yield "fails" if row["prefix_tree"] is None else _nats(row["prefix_tree"], LOGPROB_TOLERANCE)
    yield _nats(row["export"], LOGPROB_TOLERANCE) if isinstance(row["export"], float) else "fails"
    yield ", ".join(f"`{layer}`" for layer in row["lora_layers"] if layer not in row["vllm"].get("lora_barred", {}))


def _engine_cells(row: dict[str, Any]) -> Iterator[str]:
    yield (
        "transformers' implementation"
        if "Transformers" in row.get("model", "")
        else "its own"
        if "model" in row
        else "none"
    )
    for name in ("before", "after"):
        yield _nats(row[name], ENGINE_LOGPROB_TOLERANCE) if name in row else "–"
    yield _nats(row["lora_after"], ENGINE_LOGPROB_TOLERANCE) if "lora_after" in row else "no"


def _nats(difference: float, limit: float) -> str:
    return f"{difference:.0e}" if difference < limit else f"**{difference:.2g}**"


def _topics() -> Iterator[tuple[str, str]]:
    """Yields each setting that follows a comment line in `fields.py`, and that comment's first sentence."""
    source = inspect.getsource(fields)
    lines = source.splitlines()
    (settings_class,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in settings_class.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = lines[node.lineno - 2].strip()
            if comment.startswith("# "):
                yield node.target.id, comment[2:].split(".")[0]


def kind(field: FieldInfo) -> str:
    """Returns the values that a setting accepts, in words."""
    annotation = field.annotation
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if field.default is None and NoneType not in choices:  # null is replaced by a computed number, such as of GPUs
        choices = (*choices, NoneType)
    words = [word for choice in choices for word in _words(choice)]
    words[0] = " ".join([words[0], _limits(field.metadata)]).strip()
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _limits(metadata: Iterable[Any]) -> str:
    limits = (
        SIGNS[name].format(f"{value:,}" if isinstance(value, int) else f"{value:g}")
        for limit in metadata
        for name in SIGNS
        if (value := getattr(limit, name, None)) is not None
    )
    return ", ".join(limits)


def _words(choice: Any) -> Iterable[str]:
    if get_origin(choice) is Annotated:
        number, *fields = get_args(choice)
        return [f"{KINDS[number]} {_limits(limit for field in fields for limit in field.metadata)}".strip()]
    if get_origin(choice) is Literal:
        return [f"`{value}`" for value in get_args(choice)]
    return [KINDS[choice] if choice in KINDS else NESTED[choice]]


def commands() -> str:
    """All commands: purpose, usage, arguments, options, and the epilogue of the help text."""
    return "\n".join(_command(name, summary) for name, summary in COMMANDS.items())


def _command(name: str, summary: str) -> str:
    parsed = command(name)
    context = parsed.make_context(f"cory {name}", [], resilient_parsing=True)
    description, _, epilogue = (parsed.help or summary).partition("\n\n")
    usage = " ".join([context.command_path, *parsed.collect_usage_pieces(context)])
    parts = [
        f"## cory {name}\n",
        f"{_add_links(description)}\n",
        _code(usage, "text"),
        f"```{{program}} cory {name}\n```\n",
    ]
    for parameter in parsed.params:
        title, text = parameter.get_help_record(context)
        if parameter.param_type_name == "argument":
            parts.append(f"{title}\n: {_add_links(text)}\n")
        else:
            parts.append(_directive("option", title, _add_links(text)))
    return "\n".join([*parts, *([_code(epilogue, "text")] if epilogue else [])])


def presets() -> str:
    """All presets: description, training command and file."""
    parts = []
    for name, summary in preset_names().items():
        text = (files("policies.settings") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
        parts += [f"## {name}\n", f"{_add_links(summary)}\n", _code(f"cory train {name}", "text")]
        parts.append(_code(text.split("\n", 1)[1], "yaml"))
    return "\n".join(parts)


def metrics() -> str:
    """All metrics of an update: of LLMs, roles and evaluations, and of the update as a whole."""
    parts = []
    for heading, meanings in (
        ("Metrics", METRIC_DOCS),
        ("Entries of an update", dict(_report())),
        ("Seconds", PHASE_DOCS),
    ):
        rows = [f"| `{name}` | {_add_links(meaning)} |" for name, meaning in meanings.items()]
        parts.append("\n".join([f"## {heading}", "", "| name | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _report() -> Iterator[tuple[str, str]]:
    """Yields each entry of an update's report with its docstring, from the source: importing it imports Ray."""
    source = (files("policies") / "report.py").read_text(encoding="utf-8")
    (report,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Report"]
    for entry, text in pairwise(report.body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(text, ast.Expr):
            yield entry.target.id, str(ast.literal_eval(text.value)).replace("|", "\\|")


def _add_links(text: str) -> str:
    """Turns page paths in a text into links, and options into code."""
    text = re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", " ".join(text.split()))
    return re.sub(r"(`[^`]*`)|(--[a-z][\w-]*)", lambda match: match[1] or f"`{match[2]}`", text)


def _directive(name: str, title: str, text: str, **options: str) -> str:
    lines = [f":{option}: {value}" for option, value in options.items()]
    return "\n".join([f"````{{{name}}} {title}", *lines, "", text, "````", ""])


def _code(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```\n"
