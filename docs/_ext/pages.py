"""Sphinx extension of this site.

Links to files outside `docs/` lead to a page that shows the file. The table of contents stands in `contents.md`,
because code hosts would show it as text in `index.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
TARGET = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]*)(#[^)\s]+)?(?=\))")
"""The target of a Markdown link that is not a URI: path and anchor, each optional."""
CONTENTS = Path(__file__).with_name("contents.md")
ON_THE_SITE = (".md", ".ipynb", ".png", ".svg")


def render_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Rewrites the links of a Markdown page, and stores to which files of the repository they lead."""
    if app.env.doc2path(docname).suffix != ".md":
        return
    paths: set[str] = set()

    def resolve(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        target = normpath(join("docs", docname, "..", path))
        if not path or (target.startswith("docs/") and target.endswith(ON_THE_SITE)):
            return path + anchor
        if not (ROOT / target).exists():
            logger.warning("%s does not exist", target, location=docname)
        paths.add(target)
        return f"source:{relpath(f'source/{target}.html', normpath(join(docname, '..')))}"

    contents = CONTENTS.read_text(encoding="utf-8") if docname == "index" else ""
    source[0] = TARGET.sub(resolve, source[0]) + contents
    app.env.source_files[docname] = paths  # type: ignore[attr-defined]


def initialize(app: Sphinx) -> None:
    """Adds an attribute to the environment, which Sphinx keeps between builds."""
    if not hasattr(app.env, "source_files"):
        app.env.source_files = {}  # type: ignore[attr-defined]


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields a page for each file or folder that a page links to."""
    paths: set[str] = set().union(*app.env.source_files.values())  # type: ignore[attr-defined]
    for folder in [path for path in paths if (ROOT / path).is_dir()]:
        paths |= {f"{folder}/{file.name}" for file in (ROOT / folder).iterdir() if file.is_file()}
    for path in sorted(paths):
        yield f"source/{path}", {"title": path, "body": _body(app, path)}, "page.html"


def _body(app: Sphinx, path: str) -> str:
    title = f"<h1><code>{escape(path)}</code></h1>"
    file = ROOT / path
    if file.is_dir():
        names = sorted(entry.name for entry in file.iterdir() if entry.is_file())
        links = (f'<li><a href="{escape(f"{file.name}/{name}.html")}">{escape(name)}</a></li>' for name in names)
        return f"{title}<ul>{''.join(links)}</ul>"
    try:
        language = get_lexer_for_filename(file.name).aliases[0]
    except ClassNotFound:
        language = "text"
    text = file.read_text(encoding="utf-8")
    code: str = app.builder.highlighter.highlight_block(text, language)  # type: ignore[attr-defined]
    return title + code


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension with Sphinx."""
    app.add_lexer("csv", TextLexer)
    app.connect("builder-inited", initialize)
    app.connect("source-read", render_page)
    app.connect("html-collect-pages", source_pages)
    return {"version": "1", "parallel_read_safe": False}
