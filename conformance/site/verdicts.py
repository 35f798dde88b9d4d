"""Verdicts as the site shows them: a table per theorem, kinds of step by targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from conformance.expectations import where
from conformance.obligations import NOT_APPLICABLE, Row, is_as_expected
from conformance.site import names
from spec.assumptions import Assumption
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS, Theorem

#: A sign and a word by verdict; whatever else there is, is no verdict to rely on.
WORDS = {
    "PROVED": ("\N{CHECK MARK}", "proved"),
    "REFUTED": ("\N{BALLOT X}", "refuted"),
    NOT_APPLICABLE: ("\N{EN DASH}", "not about it"),
}
_OTHER_SIGN = "?"


@dataclass(frozen=True)
class Cell:
    """A verdict of a target."""

    row: Row
    page: str
    """Its counterexample's page, without `.html`; empty without one."""

    @property
    def sign(self) -> str:
        """What stands before the word."""
        return WORDS.get(self.row["verdict"], (_OTHER_SIGN, ""))[0]

    @property
    def word(self) -> str:
        """The verdict in a word."""
        verdict = str(self.row["verdict"])
        return WORDS.get(verdict, ("", verdict.lower().replace("_", " ")))[1]

    @property
    def kind(self) -> str:
        """A class for the style sheet."""
        verdict = str(self.row["verdict"])
        return verdict.lower().replace("_", "-") if verdict in WORDS else "odd"

    @property
    def is_as_expected(self) -> bool:
        """Whether the verdict is the expected one."""
        return is_as_expected(self.row)


@dataclass(frozen=True)
class Line:
    """A kind of step, with a cell for each target; None where nothing was asked."""

    family: str
    tags: tuple[str, ...]
    manager: str
    cells: tuple[Cell | None, ...]

    @property
    def name(self) -> str:
        """The family with its tags."""
        return where(self.family, self.tags)

    @property
    def place(self) -> str:
        """Where it stands on the theorem's page."""
        return names.of_row(self.manager, self.family, self.tags)

    @property
    def groups(self) -> list[list[Cell]]:
        """The cells, neighbours that the claim is not about for one reason together."""
        found: list[list[Cell]] = []
        for cell in filter(None, self.cells):
            if found and _is_like(found[-1][0], cell):
                found[-1].append(cell)
            else:
                found.append([cell])
        return found

    @property
    def is_about_nothing(self) -> bool:
        """Whether the claim is about no such step of any target, all for one reason."""
        reasons = {
            cell.row["reason"] if cell.row["verdict"] == NOT_APPLICABLE else ""
            for cell in self.cells
            if cell is not None
        }
        return len(reasons) == 1 and "" not in reasons


def _is_like(cell: Cell, other: Cell) -> bool:
    """Whether a row of the table may say of two targets why the claim is not about them."""
    return (
        cell.row["verdict"] == other.row["verdict"] == NOT_APPLICABLE
        and cell.row["reason"] == other.row["reason"]
        and cell.is_as_expected == other.is_as_expected
    )


@dataclass(frozen=True)
class Sheet:
    """A theorem with its verdicts."""

    theorem: Theorem
    targets: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def page(self) -> str:
        """The theorem's page."""
        return names.of_theorem(self.theorem.slug)

    @cached_property
    def rows(self) -> list[Row]:
        """Its verdicts, kind of step by kind of step."""
        return [cell.row for line in self.lines for cell in line.cells if cell is not None]

    @property
    def by_manager(self) -> dict[str, list[Line]]:
        """The lines of each manager that has any."""
        found = {
            manager: [line for line in self.lines if line.manager == manager]
            for manager in MANAGERS
        }
        return {manager: lines for manager, lines in found.items() if lines}

    @cached_property
    def counts(self) -> dict[str, Counter[str]]:
        """How many verdicts of each sort there are, by target."""
        return {
            target: Counter(row["verdict"] for row in self.rows if row["target"] == target)
            for target in self.targets
        }

    @cached_property
    def scope_names(self) -> dict[str, str]:
        """A letter for each scope of its verdicts, in the order in which they come."""
        found = dict.fromkeys(str(row["scope"]) for row in self.rows if row["scope"])
        return {scope: _letters(number) for number, scope in enumerate(found)}

    def used(self, assumptions: Sequence[Assumption]) -> dict[str, tuple[int, int]]:
        """Return of how many proofs an assumption is in the unsat core, and of how many in all."""
        proofs = [row for row in self.rows if row["verdict"] == "PROVED"]
        return {
            one.slug: (sum(one.slug in row["assumptions"] for row in proofs), len(proofs))
            for one in assumptions
        }


def sheets(rows: Sequence[Row], pages: Mapping[str, tuple[str, Iterable[Row]]]) -> list[Sheet]:
    """Return the theorems that rows are about, in the catalogue's order.

    Args:
        rows: Verdicts; targets come in their order.
        pages: Rows with a counterexample, by its page.
    """
    targets = tuple(dict.fromkeys(row["target"] for row in rows))
    page_of = {id(row): path for path, (_, found) in pages.items() for row in found}
    cells = {
        (row["theorem"], row["manager"], row["family"], tuple(row["tags"]), row["target"]): Cell(
            row, page_of.get(id(row), "")
        )
        for row in rows
    }
    found = []
    for theorem in THEOREMS.values():
        lines = []
        for manager in MANAGERS:
            for kind in OBLIGATIONS:
                of_kind = tuple(
                    cells.get((theorem.slug, manager, *kind, target)) for target in targets
                )
                if any(of_kind):
                    lines.append(Line(*kind, manager, of_kind))
        if lines:
            found.append(Sheet(theorem, targets, tuple(lines)))
    return found


def _letters(number: int) -> str:
    """`a`, `b` and so on; numbers where letters end."""
    return chr(ord("a") + number) if number < 26 else str(number + 1)
