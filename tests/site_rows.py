"""Rows that stand for a run's, and the site that is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from conformance.commands.arguments import GENERATED_TESTS
from conformance.obligations import Row
from conformance.site import guides
from conformance.site.build import build
from conformance.targets import Tree, resolve

TARGETS = ("vllm==0.30.0", "vllm==0.31.0")
#: A committed counterexample: the estimate that vLLM #57050 is about.
COUNTEREXAMPLE = "exact-estimate-checkpoint-vllm-0-30-0"


def row(target: str, family: str, theorem: str, verdict: str, **others: Any) -> Row:
    """A row as the prover makes it."""
    found = {
        "target": target,
        "manager": "mamba-align",
        "family": family,
        "tags": [],
        "theorem": theorem,
        "verdict": verdict,
        "scope": "all sizes" if verdict != "NOT_APPLICABLE" else "",
        "params": {"S": [0], "K": [0, 1]},
        "seconds": 0.25,
        "assumptions": ["step-computes-tokens", "family"] if verdict == "PROVED" else [],
        "scenario": None,
        "replay": "reproduced" if verdict == "REFUTED" else None,
        "scenario_at_production_sizes": None,
        "reason": "it is about other steps" if verdict == "NOT_APPLICABLE" else None,
        "expected": verdict,
    }
    return {**found, **others}


def scenario(**others: Any) -> dict[str, Any]:
    """The committed counterexample as JSON, with other fields."""
    file = GENERATED_TESTS / "scenarios" / "refutations" / f"{COUNTEREXAMPLE}.json"
    return {**json.loads(file.read_text(encoding="utf-8")), **others}


def rows() -> list[Row]:
    """Verdicts of two releases: a counterexample that two theorems share, proofs, and no claim."""
    found = []
    for target in TARGETS:
        broken = {
            "verdict": "REFUTED",
            "scenario": scenario(),
            "scenario_at_production_sizes": scenario(name=f"{COUNTEREXAMPLE}-longest"),
        }
        broken = broken if target == TARGETS[0] else {}
        for theorem in ("exact-estimate", "bounded-demand"):
            found.append(row(target, "running", theorem, "PROVED"))
            found.append(row(target, "checkpoint", theorem, **{"verdict": "PROVED", **broken}))
        found.append(row(target, "first", "removal-keeps-state", "NOT_APPLICABLE"))
    return found


def trees() -> list[Tree]:
    """The targets' trees."""
    return [resolve(target) for target in TARGETS]


def site(made_of: Sequence[Row] | None = None, of: Sequence[Tree] | None = None) -> dict[str, str]:
    """The files of a site; of other rows than the usual ones, without the documentation."""
    docs = guides.DOCS if made_of is None else Path("no-documentation")
    given = rows() if made_of is None else made_of
    return build(given, trees() if of is None else of, docs=docs)


class Page(HTMLParser):
    """What a browser would see of a page."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__()
        self.path, self.tags, self.text = path, [], ""
        self.links: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag and its attributes."""
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name in ("href", "src"):
                self.links.append(value or "")
            elif name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.text += data


def pages(files: dict[str, str]) -> dict[str, Page]:
    """The pages of a site, read."""
    return {path: Page(path, text) for path, text in files.items() if Path(path).suffix == ".html"}
