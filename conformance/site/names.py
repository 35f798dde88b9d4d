"""Names of the site's files and of places in them, made of letters, digits and hyphens alone.

What a page is called never comes from a text as it stands: a text is slugged, cut, and told apart
by a hash, so that no name of a scenario or a target leaves the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from conformance.history import releases_in_words
from conformance.targets import KNOWN_RELEASES

#: Characters of a text that a name keeps.
_MOST_CHARACTERS = 80
#: Hexadecimal digits that tell apart what slugs to the same name.
_DIGITS = 8

INDEX = "index.html"
CHARTS = "charts.html"
STYLE = "site.css"
SCRIPT = "site.js"


def slugged(text: str) -> str:
    """Return a text as lower-case letters, digits and single hyphens, `x` where none is left."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_MOST_CHARACTERS].strip("-") or "x"


def hashed(content: object) -> str:
    """Return a few hexadecimal digits that tell JSON contents apart."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]


def of_theorem(slug: str) -> str:
    """Return the path of a theorem's page."""
    return f"theorems/{slugged(slug)}.html"


def of_counterexample(name: str, content: object) -> str:
    """Return the path of a counterexample's page, without `.html`.

    Args:
        name: The scenario's name.
        content: What makes it another counterexample, as JSON.
    """
    return f"counterexamples/{slugged(name)}-{hashed(content)}"


def of_doc(path: str) -> str:
    """Return the path of a page made of a Markdown file, by its path below `docs/`."""
    parts = path.removesuffix(".md").split("/")
    return f"docs/{'/'.join(map(slugged, parts))}.html"


def of_row(manager: str, family: str, tags: Sequence[str]) -> str:
    """Return the place on a theorem's page where a kind of step stands."""
    return slugged("-".join((manager, family, *tags)))


def short(target: str) -> str:
    """Return how a target is called where its kind goes without saying: a release by its number."""
    return target.removeprefix("vllm==")


def listed(targets: Sequence[str]) -> str:
    """Return targets in few words, known releases as ranges."""
    releases = [short(target) for target in targets]
    if set(releases) <= set(KNOWN_RELEASES):
        return releases_in_words(releases)
    return ", ".join(releases)
