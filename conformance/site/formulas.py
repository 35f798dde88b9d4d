"""Formulas of theorems as they stand in the catalogue, with the functions of it that they call."""

from __future__ import annotations

import ast
import textwrap
from functools import cache
from pathlib import Path

import spec.theorems

#: What claims are functions of, which goes without saying.
_HEAD = "lambda s, step, pool, need: "
#: Position of the claim among the arguments of a `Theorem`.
_CLAIM = 3


def formula_of(slug: str) -> str:
    """Return the text of a theorem's claim, and of what it calls in its own module.

    Args:
        slug: A slug of the catalogue.

    Returns:
        Python, the claim first.
    """
    claims, functions = _catalogue()
    text = claims[slug]
    parts = [text.removeprefix(_HEAD)]
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
def _catalogue() -> tuple[dict[str, str], dict[str, str]]:
    """Texts of claims by slug, and of the module's own functions by name."""
    source = Path(spec.theorems.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source)
    claims = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) <= _CLAIM:
            continue
        slug = node.args[0]
        if isinstance(node.func, ast.Name) and node.func.id == "Theorem":
            assert isinstance(slug, ast.Constant)
            claims[str(slug.value)] = _segment(source, node.args[_CLAIM])
    functions = {
        node.name: _segment(source, node) for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    return claims, functions


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
