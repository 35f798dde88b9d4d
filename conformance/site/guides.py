"""Pages made of the project's documentation, so that the site explains itself without a network.

Markdown in, HTML out, with no HTML of the text's own. A link to a file that is no page of the site
becomes plain text.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.site import names
from spec.theorems import THEOREMS

if TYPE_CHECKING:
    from markdown_it.token import Token

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
#: Pages that the site's first page names, with what they answer.
NAMED = {
    "findings.md": "What was found, with the numbers, for someone who runs vLLM",
    "soundness.md": "What a proof does not show",
    "how-it-works.md": "How a verdict comes about, for a sceptic",
    "lives.md": "Whole requests, lived on the real manager",
    "mutants.md": "Which changes to vLLM's code would be noticed",
    "benchmarks.md": "How long it takes, beside other tools",
}
#: The site itself is what this file says.
_THE_SITE = "matrix.md"


@dataclass(frozen=True)
class Guide:
    """A page."""

    path: str
    title: str
    html: str


@dataclass(frozen=True)
class Finding:
    """A page of `docs/findings/`."""

    title: str
    href: str
    """From the site's folder."""
    report: str
    """The public report, as the page says it; empty where it says nothing."""


def guides(docs: Path = DOCS) -> dict[str, Guide]:
    """Return the pages by their file below a folder, none where it is not the project's."""
    if not all((docs / name).is_file() for name in NAMED):
        return {}
    files = sorted(file.relative_to(docs).as_posix() for file in docs.rglob("*.md"))
    known = [file for file in files if file != _THE_SITE]
    return {file: _guide(docs, file, known) for file in known}


def findings(docs: Path = DOCS) -> dict[str, list[Finding]]:
    """Return the findings by the theorem that they name, in the order of `findings.md`.

    A finding names its theorems in its table, or, where it has none, in its first paragraph.
    """
    file = docs / "findings.md"
    if not file.is_file():
        return {}
    found: dict[str, list[Finding]] = {}
    for path in re.findall(r"\]\((findings/[^)]*\.md)\)", file.read_text(encoding="utf-8")):
        title, _, body = (docs / path).read_text(encoding="utf-8").partition("\n")
        first = body.strip().partition("\n\n")[0]
        row = re.search(r"^\| (?:theorems?|checks?) \|(.*)\|$", body, re.MULTILINE)
        report = re.search(r"^\| public reports? \|(.*)\|$", body, re.MULTILINE)
        said = _plain(report.group(1)) if report else ""
        one = Finding(_plain(title.removeprefix("# ")), names.of_doc(path), said)
        slugs = re.findall(r"`([a-z-]+)`", row.group(1) if row else first)
        for slug in dict.fromkeys(slug for slug in slugs if slug in THEOREMS):
            found.setdefault(slug, []).append(one)
    return found


def _plain(text: str) -> str:
    """A line of Markdown without its marks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("**", "").strip()


def _guide(docs: Path, file: str, known: list[str]) -> Guide:
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse((docs / file).read_text(encoding="utf-8"))
    title, seen = file, Counter[str]()
    for token, inline in itertools.pairwise(tokens):
        if token.type == "heading_open":
            place = names.slugged(inline.content)
            seen[place] += 1
            token.attrSet("id", place if seen[place] == 1 else f"{place}-{seen[place]}")
            title = _plain(inline.content) if token.tag == "h1" else title
    pages = {other: names.of_doc(other) for other in known} | {_THE_SITE: names.INDEX}
    for token in tokens:
        if token.children is not None:
            token.children = list(_linked(token.children, file, pages))
    html = markdown.renderer.render(tokens, markdown.options, {})
    html = html.replace("<table>", '<div class="scroll"><table>')
    return Guide(names.of_doc(file), title, html.replace("</table>", "</table></div>"))


def _linked(children: list[Token], file: str, pages: Mapping[str, str]) -> Iterator[Token]:
    """The inline pieces of a text, with links that lead somewhere in the site, or away from it."""
    drops = False
    for token in children:
        if token.type == "link_open":
            href = _href(str(token.attrGet("href") or ""), file, pages)
            drops = href is None
            if href is not None:
                token.attrSet("href", href)
        if not (drops and token.type in ("link_open", "link_close")) and token.type != "image":
            yield token


def _href(href: str, file: str, pages: Mapping[str, str]) -> str | None:
    """Where a link leads from a page, None where it leads to no page."""
    if re.match(r"https?://", href):
        return href
    path, hash_sign, place = href.partition("#")
    to = posixpath.normpath(posixpath.join(posixpath.dirname(file), path)) if path else file
    if to not in pages:
        return None
    here = posixpath.dirname(names.of_doc(file))
    place = names.slugged(place) if hash_sign else ""
    return posixpath.relpath(pages[to], here) + (f"#{place}" if place else "")
