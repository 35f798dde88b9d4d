"""Verdicts as SARIF 2.1.0, for annotations on the lines of a tree that they are about.

A rule per theorem, a run per target. What is not as expected is a result of level `error` each, or
one together where the same reason keeps many from being settled; what is refuted as expected is one
`note` per theorem and manager, so that annotations stay few.
Files are relative to the tree: of a checkout (`path:`) its root is `SRCROOT`; the files of a
release are in no repository, and their root is `TREE`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.obligations import Row, project_version
from conformance.outcomes import (
    Outcome,
    kind,
    obligations_of,
    outcome,
    printable,
    production_sizes,
    prove_command,
    said,
    surprises,
)
from models.loader import INTERFACE, KV_CACHE_MANAGER, MANAGERS
from spec.theorems import THEOREMS, Theorem

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
VERSION = "2.1.0"

#: Module, class and function.
_Symbol = tuple[str, str, str]
_ESTIMATE: _Symbol = (MANAGERS, "MambaManager", "get_num_blocks_to_allocate")
_ALLOCATION: _Symbol = (MANAGERS, "MambaManager", "allocate_new_blocks")
_REMOVAL: _Symbol = (MANAGERS, "MambaManager", "remove_skipped_blocks")
_SIZING: _Symbol = (INTERFACE, "MambaSpec", "max_memory_usage_bytes")
_SLOTS: _Symbol = (KV_CACHE_MANAGER, "KVCacheManager", "allocate_slots")
#: What a theorem is about where that is not the estimate.
_ABOUT: Mapping[str, _Symbol] = {
    **dict.fromkeys(
        (
            *("state-invariant", "checkpoint-recorded", "new-columns-returned", "no-block-twice"),
            *("retirement-recorded", "live-state-kept", "only-states-are-held", "conservation"),
        ),
        _ALLOCATION,
    ),
    **dict.fromkeys(
        ("removal-keeps-state", "removal-frees-skipped", "removal-frees-ended"), _REMOVAL
    ),
    "peak-within-sizing": _SIZING,
    "admission-keeps-reserve": _SLOTS,
    "admission-fits-whole": _SLOTS,
}
#: `file:line: ` at the beginning of the reason of an UNSUPPORTED row.
_PLACE = re.compile(r"^(vllm/[^\s:]+\.py):(\d+)\b")
#: What ends the text of a link and begins its destination (3.11.6); an odd backslash escapes it.
_LINK = re.compile(r"(?<!\\)((?:\\\\)*)\]\(")


def sarif(rows: Sequence[Row], roots: Mapping[str, Path]) -> str:
    """Return a SARIF log.

    Args:
        rows: Verdicts.
        roots: Folder that holds `vllm/`, by target.
    """
    runs = [
        _run(target, [row for row in rows if row["target"] == target], roots[target])
        for target in dict.fromkeys(row["target"] for row in rows)
    ]
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": runs}, indent=1) + "\n"


def _run(target: str, rows: Sequence[Row], root: Path) -> dict[str, Any]:
    slugs = list(dict.fromkeys(row["theorem"] for row in rows))
    places = _Places(target, root)
    results = [*_errors(rows, places), *_notes(rows, places)]
    driver = {
        "name": "capproof",
        "version": project_version(),
        "rules": [_rule(THEOREMS[slug]) for slug in slugs],
    }
    return {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"capproof/{target}/"},
        "originalUriBaseIds": {places.base: places.base_location},
        "columnKind": "unicodeCodePoints",
        "results": [{**result, "ruleIndex": slugs.index(result["ruleId"])} for result in results],
    }


def _rule(theorem: Theorem) -> dict[str, Any]:
    help_text = f"{theorem.unsat_iff} Source: {theorem.source}."
    more = f"`capproof explain {theorem.slug}` says which assumptions it rests on."
    return {
        "id": theorem.slug,
        "name": theorem.slug.title().replace("-", ""),
        "shortDescription": {"text": theorem.sentence},
        "fullDescription": {"text": theorem.unsat_iff},
        "help": {
            "text": f"{help_text} {more.replace('`', '')}",
            "markdown": f"**{theorem.sentence}**\n\n{help_text}\n\n{more}",
        },
        "defaultConfiguration": {"level": "error"},
    }


def _errors(rows: Sequence[Row], places: _Places) -> Iterator[dict[str, Any]]:
    for together in surprises(rows):
        row = together[0]
        words = [THEOREMS[row["theorem"]].sentence]
        words.append(f"{obligations_of(together)}: {said(row)}.")
        at_scale = production_sizes(row)
        words += [] if at_scale is None else [f"At production sizes: {at_scale}."]
        words.append(f"Again: {prove_command(row)}")
        yield _result("error", row, " ".join(words), kind(row), places)


def _notes(rows: Sequence[Row], places: _Places) -> Iterator[dict[str, Any]]:
    known: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if outcome(row) is Outcome.KNOWN:
            known.setdefault((row["theorem"], row["manager"]), []).append(row)
    for of_theorem in known.values():
        first, kinds = of_theorem[0], ", ".join(map(kind, of_theorem))
        words = f"{THEOREMS[first['theorem']].sentence} Known to be broken in {kinds}."
        words += f" The first: {said(first)}."
        yield _result("note", first, words, "known", places)


def _result(level: str, row: Row, text: str, of: str, places: _Places) -> dict[str, Any]:
    # Without lines, so that an annotation stays the same one when the file changes elsewhere.
    identity = f"{row['manager']} {of} {row['theorem']}"
    return {
        "ruleId": row["theorem"],
        "level": level,
        "message": message(text),
        "locations": [{"physicalLocation": places.of(row)}],
        "partialFingerprints": {"capproof/v1": hashlib.sha256(identity.encode()).hexdigest()},
        "properties": {
            "target": printable(row["target"]),
            "manager": row["manager"],
            "kind": kind(row),
            "verdict": row["verdict"],
            "expected": row["expected"],
        },
    }


def message(text: str) -> dict[str, str]:
    r"""Return a message object that shows a text as it is: with no link, and no placeholder.

    SARIF 2.1.0 has braces doubled in every message, with arguments or without (3.11.5). Brackets
    and backslashes stand for themselves outside of links (3.11.6), so that only `](` is escaped.
    """
    shown = printable(text).replace("{", "{{").replace("}", "}}")
    return {"text": _LINK.sub(r"\1\\](", shown)}


class _Places:
    """Where in a tree the functions are that verdicts are about."""

    def __init__(self, target: str, root: Path) -> None:
        self._root = root
        self._lines: dict[_Symbol, int] = {}
        self.base = "SRCROOT" if target.startswith("path:") else "TREE"
        self.base_location: dict[str, Any] = {
            "description": message(f"Folder that holds vllm/ of {target}.")
        }
        if self.base == "SRCROOT":
            self.base_location["uri"] = f"{root.resolve().as_uri()}/"

    def of(self, row: Row) -> dict[str, Any]:
        """Return the physical location of a row."""
        stopped = _PLACE.match(row["reason"] or "")
        if stopped is not None:
            return self._location(stopped[1], int(stopped[2]))
        symbol = (
            _SLOTS if row["manager"] == "coordinator" else _ABOUT.get(row["theorem"], _ESTIMATE)
        )
        if symbol not in self._lines:
            self._lines[symbol] = line_of(self._root, symbol)
        return self._location(_relative(symbol[0]), self._lines[symbol])

    def _location(self, uri: str, line: int) -> dict[str, Any]:
        file = {"uri": uri, "uriBaseId": self.base}
        return {"artifactLocation": file, "region": {"startLine": max(line, 1)}}


def line_of(root: Path, symbol: tuple[str, str, str]) -> int:
    """Return the line of a method in a tree: its own, else that of a base class in the file.

    Args:
        root: Folder that holds `vllm/`.
        symbol: Module, class and function.

    Returns:
        The line of the `def`; of the class where no base of the file has the function; 1 where the
        file has no such class.
    """
    module, class_name, function = symbol
    try:
        tree = ast.parse((root / _relative(module)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 1
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        return 1
    waiting, seen = [class_name], set()
    while waiting:
        name = waiting.pop(0)
        if name in seen or name not in classes:
            continue
        seen.add(name)
        for node in classes[name].body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return node.lineno
        waiting += [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return classes[class_name].lineno


def _relative(module: str) -> str:
    return module.replace(".", "/") + ".py"
