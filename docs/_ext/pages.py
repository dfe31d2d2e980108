"""Sphinx extension of this site.

- A line that is only a link to a Markdown file outside `docs/`, such as `[…](../../CHANGELOG.md)`, is replaced by that
  file's text without its title. On GitHub it stays a link.
- A line `<!-- generated: settings -->` is replaced by the result of the function `settings` in `reference`.
- Links to such an included file lead to its page. Links to other files of the repository lead to a page that shows the
  file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

import reference
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INCLUDED = re.compile(r"^\[[^\]]*\]\(((?:\.\./)+[\w./-]+\.md)\)$")
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$")
TARGET = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]*)(#[^)\s]+)?(?=\))")
"""The target of a Markdown link that is not a URI: path and anchor, each optional."""
ON_THE_SITE = (".md", ".ipynb", ".png", ".svg")


def included_files() -> dict[str, str]:
    """Maps each included file's path in the repository to the page that includes it."""
    including = {}
    for page in sorted(DOCS.glob("**/*.md")):
        for line in page.read_text(encoding="utf-8").splitlines():
            if match := INCLUDED.match(line):
                file = (page.parent / match[1]).resolve().relative_to(ROOT).as_posix()
                including[file] = page.relative_to(DOCS).with_suffix("").as_posix()
    return including


class Page:
    """Prepares one Markdown page for Sphinx."""

    def __init__(self, docname: str, including_pages: dict[str, str]) -> None:
        """Takes the page's name, and the result of `included_files`."""
        self.docname = docname
        self.including_pages = including_pages
        self.source_files: set[str] = set()
        """Files and folders of the repository that the page links to; each gets a page."""

    def render(self, text: str) -> str:
        """Returns the text with included and generated parts, and with links that are valid on the site."""
        return "\n".join(self._line(line) for line in text.splitlines()) + "\n"

    def _line(self, line: str) -> str:
        if line.endswith("*") and self.docname == "index" and not [*DOCS.glob(f"{line}.md")]:
            return ""  # a pattern in the table of contents that matches no page of this version
        if match := GENERATED.match(line):
            return str(getattr(reference, match[1])())
        if match := INCLUDED.match(line):
            file = normpath(join("docs", self.docname, "..", match[1]))
            _, _, text = (ROOT / file).read_text(encoding="utf-8").partition("\n")  # below its title
            return self._links(text, file)
        return self._links(line, f"docs/{self.docname}.md")

    def _links(self, text: str, file: str) -> str:
        return TARGET.sub(lambda match: self._target(match[1], match[2] or "", file), text)

    def _target(self, path: str, anchor: str, file: str) -> str:
        """Resolves a link in a file of the repository to its target on the site."""
        target = normpath(join(file, "..", path)) if path else file
        if target in self.including_pages:
            return self._relative(f"{self.including_pages[target]}.md") + anchor
        if not path or (target.startswith("docs/") and target.endswith(ON_THE_SITE)):
            return self._relative(target.removeprefix("docs/")) + anchor
        if not (ROOT / target).exists():
            logger.warning("%s links to %s, which does not exist", file, target, location=self.docname)
        self.source_files.add(target)
        return f"source:{self._relative(f'source/{target}.html')}"

    def _relative(self, path: str) -> str:
        return relpath(path, normpath(join(self.docname, "..")))


def render_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Renders a Markdown page, and stores which files it links to."""
    if app.env.doc2path(docname).suffix == ".md":
        page = Page(docname, included_files())
        source[0] = page.render(source[0])
        app.env.source_files[docname] = page.source_files  # type: ignore[attr-defined]


def initialize(app: Sphinx) -> None:
    """Adds an attribute to the environment, which Sphinx keeps between builds."""
    if not hasattr(app.env, "source_files"):
        app.env.source_files = {}  # type: ignore[attr-defined]


def outdated(app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Reads all Markdown pages again in every build, because included and generated parts may have changed."""
    return [docname for docname in env.found_docs if env.doc2path(docname).suffix == ".md"]


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


def docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Converts a docstring's Markdown to reStructuredText: `code`, and indented code blocks below a sentence."""
    code = r"(?<!`)`([^`]+)`(?!`)(?=(\w?))"
    text = re.sub(code, lambda match: f"``{match[1]}``" + "\\ " * bool(match[2]), "\n".join(lines))
    lines[:] = re.sub(r"(?m)^(\S.*[^:\n])\n\n(?= {4}\S)", r"\1\n\n::\n\n", text).split("\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension with Sphinx."""
    app.add_lexer("csv", TextLexer)
    app.connect("builder-inited", initialize)
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", render_page)
    app.connect(
        "autodoc-process-docstring", docstring, priority=400
    )  # before napoleon, which respects code in two backquotes
    app.connect("html-collect-pages", source_pages)
    return {"version": "1", "parallel_read_safe": False}
