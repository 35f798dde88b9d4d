"""Verdicts as JUnit XML, one test case per obligation.

JUnit knows passed, skipped, failure and error. PROVED alone is a pass. What is refuted as expected
is skipped with a message that says so, and so is what a theorem is not about. Another verdict than
the expected one is a failure; UNKNOWN, UNSUPPORTED and VACUOUS are errors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

from conformance.obligations import Row
from conformance.outcomes import (
    Outcome,
    kind,
    outcome,
    printable,
    production_sizes,
    prove_command,
    said,
)
from spec.theorems import THEOREMS

#: Element of a test case by outcome; PROVED has none.
_ELEMENT = {
    Outcome.KNOWN: "skipped",
    Outcome.NOT_ABOUT: "skipped",
    Outcome.FAILED: "failure",
    Outcome.UNDECIDED: "error",
}
#: Attribute of a suite that counts an element.
_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def junit(rows: Sequence[Row]) -> str:
    """Return a JUnit XML document, a suite per target."""
    root = ElementTree.Element("testsuites", {"name": "capproof", **_counts(rows)})
    for target in dict.fromkeys(row["target"] for row in rows):
        of_target = [row for row in rows if row["target"] == target]
        named = {"name": printable(target), **_counts(of_target)}
        suite = ElementTree.SubElement(root, "testsuite", named)
        for row in of_target:
            _add_case(suite, row)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n"


def _counts(rows: Sequence[Row]) -> dict[str, str]:
    counts = Counter(_ELEMENT.get(outcome(row)) for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    of_each = {name: str(counts[element]) for element, name in _COUNTED.items()}
    return {"tests": str(len(rows)), **of_each, "time": f"{seconds:.3f}"}


def _add_case(suite: ElementTree.Element, row: Row) -> None:
    named = {
        "classname": printable(f"{row['target']}.{row['manager']}.{kind(row)}"),
        "name": row["theorem"],
        "time": f"{row['seconds']:.3f}",
    }
    case = ElementTree.SubElement(suite, "testcase", named)
    element = _ELEMENT.get(outcome(row))
    if element is None:
        return
    told = {"message": printable(said(row), kept="")}
    if element == "skipped":
        ElementTree.SubElement(case, element, told)
        return
    told["type"] = row["verdict"]
    ElementTree.SubElement(case, element, told).text = printable("\n".join(_details(row)))


def _details(row: Row) -> list[str]:
    """What a person needs to judge and to repeat a verdict."""
    at_scale = production_sizes(row)
    return [
        THEOREMS[row["theorem"]].sentence,
        said(row),
        *([] if at_scale is None else [f"at production sizes: {at_scale}"]),
        f"again: {prove_command(row)}",
        *([] if row["scenario"] is None else ["scenario:", json.dumps(row["scenario"], indent=1)]),
    ]
