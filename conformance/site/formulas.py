"""Formulas of theorems as they stand in the catalogue, with the functions of it that they call."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

import spec.theorems

#: What claims are functions of, which goes without saying.
_HEAD = re.compile(r"lambda s, step(, pool, need)?: ")
#: Positions of the claim and of the interesting case among the arguments of a `Theorem`.
CLAIM, WITNESS = 3, 4


def formula_of(slug: str, position: int = CLAIM) -> str:
    """Return the text of a theorem's formula, and of what it calls in its own module.

    Args:
        slug: A slug of the catalogue.
        position: Which formula: `CLAIM` or `WITNESS`.

    Returns:
        Python, the formula first.
    """
    formulas, functions = _catalogue()
    text = formulas[slug, position]
    parts = [] if text in functions else [_HEAD.sub("", text, count=1)]
    seen: set[str] = set()
    waiting = _called_in(text, functions)
    while waiting:
        name = waiting.pop(0)
        if name not in seen:
            seen.add(name)
            parts.append(functions[name])
            waiting += _called_in(functions[name], functions)
    return "\n\n".join(parts)


@cache
def _catalogue() -> tuple[dict[tuple[str, int], str], dict[str, str]]:
    """Texts of formulas by slug and position, and of the module's own functions by name."""
    source = Path(spec.theorems.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source)
    formulas = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) <= WITNESS:
            continue
        slug = node.args[0]
        if isinstance(node.func, ast.Name) and node.func.id == "Theorem":
            assert isinstance(slug, ast.Constant)
            for position in (CLAIM, WITNESS):
                formulas[str(slug.value), position] = _segment(source, node.args[position])
    functions = {
        node.name: _segment(source, node) for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    return formulas, functions


def _segment(source: str, node: ast.expr | ast.stmt) -> str:
    """A node's text, moved to the left."""
    text = ast.get_source_segment(source, node, padded=True) or ""
    first, _, rest = text.strip("\n").partition("\n")
    first = first.lstrip()
    if not rest:
        return first
    inner = "    " if isinstance(node, ast.FunctionDef) else ""
    return f"{first}\n{textwrap.indent(textwrap.dedent(rest), inner)}"


def _called_in(text: str, functions: dict[str, str]) -> list[str]:
    names = [
        node.id for node in ast.walk(ast.parse(text, mode="exec")) if isinstance(node, ast.Name)
    ]
    return [name for name in dict.fromkeys(names) if name in functions]
