"""Writes the generated parts of pages: those between a line `<!-- generated: settings -->` and `<!-- end -->`.

`python docs/_ext/reference.py` writes them all, and a test compares them with the code. Each such part is the result
of the function of that name: plain Markdown, as code hosts show it, too.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from metric_docs import METRIC_DOCS, PHASE_DOCS
from pydantic.fields import FieldInfo

import cory_rllib
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
PUBLIC_METHODS = {
    "CoryConfig": ("from_preset", "build_algo"),
    "Run": ("location", "settings", "config", "metrics", "samples", "frame", "best_update", "open_policies", "chain"),
}
"""Members of public classes that pages use; those of `Cory` are RLlib's."""
DOCS = Path(__file__).parents[1]
END = "<!-- end -->"
PART = re.compile(rf"^(<!-- generated: (\w+) -->)\n.*?^{END}$", flags=re.MULTILINE | re.DOTALL)
SIGNS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}


def settings() -> str:
    """All settings, a table for each heading of `fields.py`."""
    headings = dict(_topics())
    parts = []
    for name, field in Settings.model_fields.items():
        if name in headings:
            parts += [f"\n### {headings[name]}\n", "| setting | values | default | |", "|---|---|---|---|"]
        metadata = METADATA[name]
        changeable = [
            occasion
            for occasion, allowed in (
                ("resuming", metadata.resume),
                ("searches", metadata.search),
                ("PBT", metadata.clone),
            )
            if allowed
        ]
        note = f" *{metadata.category.capitalize()}{'; ' if changeable else ''}{', '.join(changeable)}.*"
        cells = (
            f"{_anchor(name)}`{name}`",
            kind(field),
            f"`{to_yaml(field.default)}`",
            _text(field.description) + note,
        )
        parts.append(_row(cells))
    return "\n".join(parts).strip()


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
    return "\n".join(_command(name, summary) for name, summary in COMMANDS.items()).strip()


def _command(name: str, summary: str) -> str:
    parsed = command(name)
    context = parsed.make_context(f"cory {name}", [], resilient_parsing=True)
    description, _, epilogue = (parsed.help or summary).partition("\n\n")
    usage = " ".join([context.command_path, *parsed.collect_usage_pieces(context)])
    records = (parameter.get_help_record(context) for parameter in parsed.params)
    options = [_row((f"`{title}`".replace("|", "\\|"), _text(text))) for title, text in filter(None, records)]
    table = ["| | |", "|---|---|", *options, ""]
    parts = [f"## cory {name}\n", f"{_text(description, cell=False)}\n", _code(f"Usage: {usage}", "text"), *table]
    return "\n".join([*parts, *([_code(epilogue, "text")] if epilogue else [])])


def presets() -> str:
    """All presets: name, with a link to its file, and description."""
    rows = [
        _row((f"{_anchor(name)}[`{name}`](../../policies/settings/presets/{name}.yaml)", _text(summary)))
        for name, summary in preset_names().items()
    ]
    return "\n".join(["| preset | |", "|---|---|", *rows])


def metrics() -> str:
    """All metrics of an update: of LLMs, roles and evaluations, and of the update as a whole."""
    parts = []
    for heading, meanings in (
        ("Metrics", METRIC_DOCS),
        ("Entries of an update", dict(_report())),
        ("Seconds", PHASE_DOCS),
    ):
        rows = [_row((f"`{name}`", _text(meaning))) for name, meaning in meanings.items()]
        parts.append("\n".join([f"## {heading}", "", "| name | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts).strip()


def api() -> str:
    """The public names of `cory_rllib`, the decorators for rewards and the environment, with their docstrings."""
    from cory_env import cory_v0
    from cory_env.rewards import prepared

    objects = {name: getattr(cory_rllib, name) for name in sorted(cory_rllib.__all__, key=str.lower)}
    objects |= {f"cory_env.rewards.prepared.{name}": getattr(prepared, name) for name in ("prepare_with", "check_with")}
    environment = f"### cory_env.cory_v0\n\n{_code(inspect.cleandoc(cory_v0.__doc__ or ''), 'text')}"
    return "\n".join([*(_entry(name, value) for name, value in objects.items()), environment]).strip()


def _entry(name: str, value: Any) -> str:
    parts = [_declaration("class" if inspect.isclass(value) else "def", name.rpartition(".")[2], value)]
    for method in PUBLIC_METHODS.get(name, ()):
        member = inspect.getattr_static(value, method)
        keyword, function = ("def", getattr(value, method))
        if isinstance(member, property):
            keyword, function = "@property\ndef", member.fget
        parts.append(textwrap.indent(_declaration(keyword, method, function), "    "))
    return "\n".join([f"### {name}\n", _code("\n\n".join(parts), "python")])


def _declaration(keyword: str, name: str, value: Any) -> str:
    """Returns the head of a class or function with its docstring, as in a stub file."""
    signature = "" if keyword == "class" else _signature(value)
    text = textwrap.indent(inspect.cleandoc(value.__doc__ or ""), "    ").strip()
    return f'{keyword} {name}{signature}:\n    """{text}"""'


class _Annotation:
    """A type as its source has it; `inspect` prints a string in quotes."""

    def __init__(self, annotation: Any) -> None:
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        self.text = re.sub(r"\b[a-z_.]+\.(?=[A-Z])|~", "", text.strip("\"'"))

    def __repr__(self) -> str:
        return self.text


def _signature(function: Any) -> str:
    """Returns a signature, with a line per parameter if it is long."""
    signature = inspect.signature(function)
    parameters = [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=_Annotation(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    result = _Annotation(signature.return_annotation)
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("'", '"')
    if len(text) > 100:
        lines = re.split(r", (?=[*\w]+(?:[:,=]|$))", text[1:-1])
        text = "\n    ".join(["(", *(f"{line}," for line in lines)]) + "\n)"
    return f"{text} -> {result}"


def trl() -> str:
    """TRL's settings and ours; error messages use the same table."""
    return _names("trl")


def verl() -> str:
    """The settings of verl, and ours."""
    return _names("verl")


def openrlhf() -> str:
    """OpenRLHF's settings and ours."""
    return _names("openrlhf")


def _names(library: str) -> str:
    return (files("policies.settings.migration") / f"{library}.md").read_text(encoding="utf-8").strip()


def _report() -> Iterator[tuple[str, str]]:
    """Yields each entry of an update's report with its docstring, from the source: importing it imports Ray."""
    source = (files("policies") / "report.py").read_text(encoding="utf-8")
    (report,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Report"]
    for entry, text in pairwise(report.body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and isinstance(text, ast.Expr):
            yield entry.target.id, str(ast.literal_eval(text.value))


def _text(text: str | None, *, cell: bool = True) -> str:
    """Returns a description as Markdown: page paths become links, options code, and bars of a table's cell escaped."""
    words = " ".join((text or "").split())
    words = re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", words)
    words = re.sub(r"(`[^`]*`)|(--[a-z][\w-]*)", lambda match: match[1] or f"`{match[2]}`", words)
    return words.replace("|", "\\|") if cell else words


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _anchor(name: str) -> str:
    return f'<a id="{name}"></a>'


def _code(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```\n"


def generated(page: str) -> str:
    """Returns the text of a page with its generated parts written anew."""
    return PART.sub(lambda match: f"{match[1]}\n\n{globals()[match[2]]()}\n\n{END}", page)


def pages() -> Iterator[Path]:
    """Yields the pages that have generated parts."""
    for file in sorted(DOCS.rglob("*.md")):
        if PART.search(file.read_text(encoding="utf-8")):
            yield file


if __name__ == "__main__":
    for file in pages():
        file.write_text(generated(file.read_text(encoding="utf-8")), encoding="utf-8")
        print(file.relative_to(DOCS.parent), file=sys.stderr)
