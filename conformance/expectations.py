"""Expected verdicts: `spec/expectations.toml`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import spec
from conformance.targets import KNOWN_RELEASES
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPECTATIONS_FILE = Path(spec.__file__).with_name("expectations.toml")
#: All that can be expected; UNKNOWN, UNSUPPORTED and VACUOUS never can.
EXPECTABLE = ("PROVED", "REFUTED", "NOT_APPLICABLE")

_Key = tuple[str, str, str, str]


def suite_of(manager: str, family: str) -> str:
    """Return the name of a family's scenarios and tests on a manager."""
    return family if manager == "mamba-align" else f"{manager}-{family}"


def where(family: str, tags: tuple[str, ...] | list[str]) -> str:
    """Return a family with its tags as one word: `first+checkpoint`."""
    return "+".join((family, *tags))


@cache
def expectations() -> dict[_Key, str]:
    """Return the expected verdict by target, manager, family with tags, and theorem.

    Raises:
        ValueError: The file expects what cannot be expected, or of what does not exist.
    """
    return {key: entry["verdict"] for key, entry in _entries().items()}


def why_nothing_is_expected(target: str) -> str | None:
    """Return in one line why a target cannot be expected to have faults, None where it can."""
    known = [f"vllm=={release}" for release in KNOWN_RELEASES]
    if target in known:
        return None
    return f"nothing is expected of {target!r}; name one of {known[0]} to {known[-1]}"


def _content() -> dict[str, Any]:
    return tomllib.loads(EXPECTATIONS_FILE.read_text(encoding="utf-8"))


def _entries() -> dict[_Key, dict[str, Any]]:
    """The entry of the file that stands for each obligation, the last that names it."""
    content = _content()
    known = {
        "targets": [f"vllm=={release}" for release in KNOWN_RELEASES],
        "families": [where(family, tags) for family, tags in OBLIGATIONS],
        "theorems": list(THEOREMS),
    }
    found: dict[_Key, dict[str, Any]] = {}
    for entry in content["expect"]:
        if entry["verdict"] not in EXPECTABLE:
            raise ValueError(f"{EXPECTATIONS_FILE}: {entry['verdict']} cannot be expected")
        targets, families, theorems = (_matching(entry[of], names) for of, names in known.items())
        entry_managers = _matching([entry["manager"]], list(MANAGERS))
        for target in targets:
            for manager, family, theorem in product(entry_managers, families, theorems):
                if manager in THEOREMS[theorem].managers:
                    found[target, manager, family, theorem] = entry
    return found


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches, in which `*` stands for anything.

    Raises:
        ValueError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{EXPECTATIONS_FILE}: nothing is called {pattern!r}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def expected(target: str, manager: str, family: str, theorem: str) -> str | None:
    """Return the expected verdict, None for a target without expectations."""
    return expectations().get((target, manager, family, theorem))


def cause(target: str, manager: str, family: str, theorem: str) -> str | None:
    """Return the public report, or the cause, of what is expected; None where none is given."""
    return _causes().get((target, manager, family, theorem))


@cache
def _causes() -> dict[_Key, str]:
    return {key: entry["report"] for key, entry in _entries().items() if "report" in entry}


def missed_by(cause: str) -> str | None:
    """Return why vLLM's own tests do not show what has a cause; None where nobody has looked."""
    return _missed().get(cause)


@cache
def _missed() -> dict[str, str]:
    return {
        cause: entry["by"] for entry in _content().get("missed", ()) for cause in entry["reports"]
    }
