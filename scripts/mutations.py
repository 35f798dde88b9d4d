"""Small changes to the lifted functions, as data, and copies of a release that have one of them."""

from __future__ import annotations

import ast
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from models.loader import CORE_MODULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Lives run functions of it; no mutant is in it.
SCHEDULER = "vllm.v1.core.sched.scheduler"
ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "mutants.toml"
KINDS = (
    "comparison",
    "sign",
    "constant",
    "extreme",
    "dropped-term",
    "negated-condition",
    "dropped-statement",
)


class MutantError(Exception):
    """The data is malformed, or does not fit the release; one line."""


@dataclass(frozen=True)
class Mutant:
    """One change of a few tokens.

    Attributes:
        name: Slug.
        file: Path below the tree's root.
        function: Qualified name of the function that changes.
        before: Tokens to change; they occur exactly once in the function.
        after: What they become.
        kind: One of `KINDS`.
        breaks: What changes in behaviour, in one line.
        judgement: Why the theorems may not see it, in one line; it still counts as a survivor.
    """

    name: str
    file: str
    function: str
    before: str
    after: str
    kind: str
    breaks: str
    judgement: str = ""


def load(path: Path = DATA) -> list[Mutant]:
    """Return the mutants of a file.

    Raises:
        MutantError: A record lacks a key or has an unknown one, a kind is unknown, or a name is
            there twice.
    """
    records = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    wanted = {field.name for field in fields(Mutant)}
    for record in records:
        if set(record) | {"judgement"} != wanted:
            wrong = ", ".join(sorted((set(record) | {"judgement"}) ^ wanted))
            raise MutantError(f"{path}: {record.get('name', '?')}: missing or unknown: {wrong}")
        if record["kind"] not in KINDS:
            raise MutantError(f"{path}: {record['name']}: unknown kind {record['kind']!r}")
    names = Counter(record["name"] for record in records)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise MutantError(f"{path}: more than once: {', '.join(twice)}")
    return [Mutant(**record) for record in records]


def mutated(source: str, mutant: Mutant) -> str:
    """Return the source of a file with the change made.

    Raises:
        MutantError: The function is not there, or does not hold `before` exactly once.
    """
    lines_of = _function_lines(source, mutant.function)
    if lines_of is None:
        raise MutantError(f"{mutant.name}: {mutant.file} has no function {mutant.function}")
    first, last = lines_of
    lines = source.splitlines(keepends=True)
    function = "".join(lines[first:last])
    times = function.count(mutant.before)
    if times != 1:
        where = f"{mutant.file}: {mutant.function}"
        raise MutantError(f"{mutant.name}: {where} holds {mutant.before!r} {times} times, not once")
    changed = function.replace(mutant.before, mutant.after)
    return "".join([*lines[:first], changed, *lines[last:]])


@cache
def _function_lines(source: str, qualified_name: str) -> tuple[int, int] | None:
    """First line of a function and the line behind it, from 0; None where it is not there."""
    body: Sequence[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for name in qualified_name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == name), None)
        body = getattr(found, "body", [])
    if not isinstance(found, ast.FunctionDef) or found.end_lineno is None:
        return None
    return found.lineno - 1, found.end_lineno


@contextmanager
def mutated_tree(root: Path, mutant: Mutant | None) -> Iterator[Path]:
    """Copy a tree's core and scheduler to a temporary folder, make the change, give the folder.

    Raises:
        MutantError: As :func:`mutated`, or the tree has no such file.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for module in (*CORE_MODULES, SCHEDULER):
            path = Path(*module.split(".")).with_suffix(".py")
            if (root / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, folder / path)
        if mutant is not None:
            _make(mutant, folder)
        yield folder


def _make(mutant: Mutant, folder: Path) -> None:
    target = folder / mutant.file
    if not target.is_file():
        raise MutantError(f"{mutant.name}: the core has no {mutant.file}")
    target.write_text(mutated(target.read_text(encoding="utf-8"), mutant), encoding="utf-8")


def fits(mutant: Mutant, root: Path) -> bool:
    """Whether the change can be made to a tree."""
    try:
        with mutated_tree(root, mutant):
            return True
    except MutantError:
        return False
