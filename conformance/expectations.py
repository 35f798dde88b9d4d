"""Expected verdicts: `spec/expectations.toml`."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import spec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPECTATIONS_FILE = Path(spec.__file__).with_name("expectations.toml")
#: The manager that is modelled.
MANAGER = "mamba-align"
#: All that can be expected; UNKNOWN, UNSUPPORTED and VACUOUS never can.
EXPECTABLE = ("PROVED", "REFUTED", "NOT_APPLICABLE")

_Key = tuple[str, str, str, str]


def where(family: str, tags: tuple[str, ...] | list[str]) -> str:
    """Return a family with its tags as one word: `first+checkpoint`."""
    return "+".join((family, *tags))


@cache
def expectations() -> dict[_Key, str]:
    """Return the expected verdict by target, manager, family with tags, and theorem.

    Raises:
        ValueError: The file expects what cannot be expected.
    """
    content = tomllib.loads(EXPECTATIONS_FILE.read_text(encoding="utf-8"))
    found: dict[_Key, str] = {}
    for entry in content["expect"]:
        if entry["verdict"] not in EXPECTABLE:
            raise ValueError(f"{EXPECTATIONS_FILE}: {entry['verdict']} cannot be expected")
        for target in entry["targets"]:
            for family in entry["families"]:
                for theorem in entry["theorems"]:
                    found[target, entry["manager"], family, theorem] = entry["verdict"]
    return found


def expected(target: str, manager: str, family: str, theorem: str) -> str | None:
    """Return the expected verdict, None for a target without expectations."""
    return expectations().get((target, manager, family, theorem))
