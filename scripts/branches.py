"""The branches of a function, found by name in a syntax tree, as coverage.py counts them.

coverage.py names a branch by two lines, of the statement that decides and of the one that comes
next. Here it has the text of its condition and the way it goes, which other releases share.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

#: Two lines, as coverage.py writes them; a negative second one leaves the function.
Arc = tuple[int, int]

_Deciding = ast.If | ast.While | ast.For


class BranchError(Exception):
    """A branch that coverage.py counts is not understood; one line."""


@dataclass(frozen=True, order=True)
class Branch:
    """One way out of a statement that decides.

    Attributes:
        function: Qualified name.
        condition: Its text, as `ast.unparse` writes it; a loop's is what it goes over.
        way: `true` or `false`; of a loop `round` or `end`.
        line: Of the statement.
        behind: The ways of enclosing statements that lead to this one, innermost first, as
            (line, way).
    """

    function: str
    condition: str
    way: str
    line: int
    behind: tuple[tuple[int, str], ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """What a judgement names it by: no line, so that it lasts from release to release."""
        return self.function, self.condition, self.way


def function_named(source: str, name: str) -> ast.FunctionDef | None:
    """Return a function or a method (`Class.method`), None where the source has none."""
    body: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        body = getattr(found, "body", [])
    return found if isinstance(found, ast.FunctionDef) else None


def branches_of(source: str, name: str, arcs: Collection[Arc]) -> Mapping[Arc, Branch]:
    """Return those of a file's branches that lie in a function.

    Args:
        source: Text of the file.
        name: Qualified name of the function.
        arcs: All of the file's branches.

    Raises:
        BranchError: The function is not there, or one of its branches is of no known statement.
    """
    function = function_named(source, name)
    if function is None:
        raise BranchError(f"no function {name}")
    deciding = {node.lineno: (node, behind) for node, behind in _deciding(function.body)}
    inside = (
        arc for arc in arcs if function.body[0].lineno <= arc[0] <= (function.end_lineno or 0)
    )
    found: dict[Arc, Branch] = {}
    for arc in sorted(inside):
        if arc[0] not in deciding:
            raise BranchError(f"{name}: line {arc[0]} decides, and is no if, while or for")
        node, behind = deciding[arc[0]]
        yes, no = ("round", "end") if isinstance(node, ast.For) else ("true", "false")
        what = node.iter if isinstance(node, ast.For) else node.test
        way = yes if arc[1] == node.body[0].lineno else no
        found[arc] = Branch(name, ast.unparse(what), way, arc[0], behind)
    return found


def _deciding(
    body: list[ast.stmt], behind: tuple[tuple[int, str], ...] = ()
) -> Iterator[tuple[_Deciding, tuple[tuple[int, str], ...]]]:
    """Yield the statements that decide, with the ways that lead to each, innermost first."""
    for node in body:
        if isinstance(node, _Deciding):
            yield node, behind
            yes, no = ("round", "end") if isinstance(node, ast.For) else ("true", "false")
            yield from _deciding(node.body, ((node.lineno, yes), *behind))
            yield from _deciding(node.orelse, ((node.lineno, no), *behind))
        else:
            parts = (getattr(node, field, []) for field in ("body", "orelse", "finalbody"))
            handlers = (handler.body for handler in getattr(node, "handlers", []))
            for part in chain(parts, handlers):
                yield from _deciding(part, behind)
