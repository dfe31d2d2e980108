"""Prompt templates: plain text with `{name}` placeholders, filled from a query's row."""

from collections.abc import Mapping
from string import Formatter


class TemplateError(ValueError):
    """A prompt template cannot be filled."""


def placeholders(template: str) -> frozenset[str]:
    """Returns the names in `template`; a literal brace is written twice, `{{` or `}}`.

    Raises:
        TemplateError: A brace is unbalanced, or a placeholder is more than a plain name.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise TemplateError(
            f"The template {template!r} is not valid: {error}. Write a literal brace twice, {{{{ or }}}}."
        ) from error
    names = {name for _, name, _, _ in parts if name is not None}
    for _, name, spec, conversion in parts:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise TemplateError(
                f"The template {template!r} has the placeholder {name!r}, which is not a plain column name. "
                "Write {column} without an index, attribute or format; write a literal brace twice, {{ or }}."
            )
    return frozenset(names)


def literals(template: str) -> list[str]:
    """Returns the texts of `template` around its placeholders."""
    return [text for text, *_ in Formatter().parse(template) if text]


def fill(template: str, values: Mapping[str, object]) -> str:
    """Returns `template` with its placeholders replaced. Braces inside the values are left alone.

    Raises:
        TemplateError: A placeholder has no value.
    """
    try:
        return template.format_map(values)
    except KeyError as error:
        raise TemplateError(
            f"The template {template!r} asks for {error}, which this query's row does not have; it has "
            f"{', '.join(sorted(values))}. Correct the template or add the column to the data."
        ) from error
