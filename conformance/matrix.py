"""The matrix of releases, theorems and kinds of step as a page, and what each manager knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from conformance.expectations import where
from models.loader import Core
from models.traits import Traits, traits_of
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS, Theorem

#: A verdict by target, manager, family with tags, and theorem.
Verdicts = Mapping[tuple[str, str, str, str], str]

_SYMBOLS = {"PROVED": "P", "REFUTED": "R", "NOT_APPLICABLE": "-"}
_HEAD = """# What holds where

Written by `make matrix`; do not edit it. **P** is proved for all sizes,
**R** refuted, **-** means that the theorem is not about such a step, or that the release has none.
`spec/expectations.toml` says what each refutation comes from, `capproof explain THEOREM` what each
theorem claims."""


def verdicts_of(rows: Sequence[Mapping[str, Any]]) -> Verdicts:
    """Return the verdicts of rows as `capproof prove --json` has them."""
    return {
        (row["target"], row["manager"], where(row["family"], row["tags"]), row["theorem"]): row[
            "verdict"
        ]
        for row in rows
    }


def traits_in(root: Path) -> Traits:
    """Read what the manager of a tree knows, natively.

    Raises:
        CoreError: The tree cannot be loaded, or lacks a class that every release has.
    """
    return traits_of(Core(root))


def page(verdicts: Verdicts, traits: Mapping[str, Traits]) -> str:
    """Return the page, in Markdown.

    Args:
        verdicts: What the cells say; a theorem or a kind of step without verdicts is left out.
        traits: What each target's manager knows; its targets are the columns, in this order.
    """
    parts = [_HEAD, _counts(verdicts, list(traits)), _knowledge(traits)]
    for manager, sentence in MANAGERS.items():
        of_manager = {key: verdict for key, verdict in verdicts.items() if key[1] == manager}
        if of_manager:
            parts.append(f"# {manager}\n\n{sentence}")
        for theorem in THEOREMS.values():
            if any(slug == theorem.slug for *_, slug in of_manager):
                parts.append(_of_theorem(theorem, manager, of_manager, list(traits)))
    return "\n\n".join(parts) + "\n"


def _counts(verdicts: Verdicts, targets: Sequence[str]) -> str:
    def count(target: str, symbol: str) -> int:
        return sum(
            _symbol(verdict) == symbol for (of, *_), verdict in verdicts.items() if of == target
        )

    symbols = dict.fromkeys((*_SYMBOLS.values(), *map(_symbol, verdicts.values())))
    rows = [[symbol, *(str(count(target, symbol)) for target in targets)] for symbol in symbols]
    return f"## Verdicts per release\n\n{_table(['', *map(_short, targets)], rows)}"


def _knowledge(traits: Mapping[str, Traits]) -> str:
    rows = [
        [
            f"`{field.name}`",
            *("yes" if getattr(known, field.name) else "-" for known in traits.values()),
        ]
        for field in fields(Traits)
    ]
    head = "## What a tree's manager knows\n\nRead from the tree itself by `models/traits.py`."
    return f"{head}\n\n{_table(['', *map(_short, traits)], rows)}"


def _of_theorem(theorem: Theorem, manager: str, verdicts: Verdicts, targets: Sequence[str]) -> str:
    rows = []
    for kind in _kinds_in(verdicts):
        cells = [verdicts.get((target, manager, kind, theorem.slug)) for target in targets]
        if any(cells):
            rows.append([f"`{kind}`", *map(_symbol, cells)])
    table = _table(["", *map(_short, targets)], rows)
    return f"## {theorem.slug}\n\n{theorem.sentence}\n\n{table}"


def _kinds_in(verdicts: Verdicts) -> Iterator[str]:
    present = {kind for _, _, kind, _ in verdicts}
    yield from (kind for kind in (where(*of) for of in OBLIGATIONS) if kind in present)


def _symbol(verdict: str | None) -> str:
    return "" if verdict is None else _SYMBOLS.get(verdict, f"**{verdict}**")


def _short(target: str) -> str:
    return target.removeprefix("vllm==").replace("|", r"\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up in the source too."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * max(width, 3) for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(max(width, 3)) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
