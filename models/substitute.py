"""Terms with other terms in place of variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from models import term
from models.term import ATOMS, Bool, BoolLike, Int, IntLike

_Record = TypeVar("_Record")


class Substitution:
    """Puts terms in place of variables, each shared part once.

    Args:
        values: Term or number per variable name; what is absent stays.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._atoms: dict[int, IntLike] = {}
        self._formulas: dict[int, BoolLike] = {}

    def number(self, x: IntLike) -> IntLike:
        """Return an integer term with the variables replaced."""
        if isinstance(x, int):
            return x
        total: IntLike = x.constant
        for monomial, coefficient in x.terms:
            product: IntLike = coefficient
            for uid in monomial:
                product = product * self._atom(uid)
            total = total + product
        return total

    def truth(self, x: BoolLike) -> BoolLike:
        """Return a formula with the variables replaced."""
        if isinstance(x, bool):
            return x
        found = self._formulas.get(id(x))
        if found is None:
            found = self._formulas[id(x)] = self._formula(x)
        return found

    def record(self, record: _Record) -> _Record:
        """Return a dataclass of terms with the variables replaced in every field."""
        changes: dict[str, Any] = {}
        for field in fields(record):  # type: ignore[arg-type]
            value = getattr(record, field.name)
            if isinstance(value, Bool):
                changes[field.name] = self.truth(value)
            elif isinstance(value, Int):
                changes[field.name] = self.number(value)
        return replace(record, **changes)  # type: ignore[type-var]

    def _formula(self, x: Bool) -> BoolLike:
        kind, args = x.kind, x.args
        if kind == "var":
            value: BoolLike = self._values.get(args[0], x)
            return value
        if kind in ("le", "eq"):
            number = self.number(args[0])
            return term.at_most_zero(number) if kind == "le" else term.is_zero(number)
        if kind == "not":
            return term.negation(self.truth(args[0]))
        join = term.conjunction if kind == "and" else term.disjunction
        return join(map(self.truth, args))

    def _atom(self, uid: int) -> IntLike:
        found = self._atoms.get(uid)
        if found is None:
            found = self._atoms[uid] = self._replaced(uid)
        return found

    def _replaced(self, uid: int) -> IntLike:
        atom = ATOMS[uid]
        args, result = atom.args, term.atom(uid)
        if atom.kind == "var":
            value: IntLike = self._values.get(args[0], result)
            return value
        if atom.kind == "cell":
            return term.cell(args[0], self.number(args[1]))
        if atom.kind == "div":
            divisor = self.number(args[1])
            number = self.number(args[0])
            unchanged = number is args[0] and divisor is args[1]
            return result if unchanged else term.floor_div(number, divisor)
        chosen: IntLike = term.choose(self.truth(args[0]), *map(self.number, args[1:]))
        return chosen
