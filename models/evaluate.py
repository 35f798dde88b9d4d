"""The value of a term where every variable has one: plain Python, no solver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.term import ATOMS, Atom, Bool, BoolLike, Int, IntLike


class Evaluator:
    """Evaluates terms under one assignment, each shared part once.

    Args:
        values: Value per variable name; an absent one has its least value (no such: 0, or its
            greatest if that is less), an absent truth value is false; an array is a mapping from
            index to value, absent is 1.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._atoms: dict[int, int] = {}
        self._truths: dict[int, bool] = {}

    def number(self, x: IntLike | BoolLike) -> int:
        """Return the value of an integer term."""
        if isinstance(x, int):
            return x
        if isinstance(x, Bool):
            return int(self.truth(x))
        total = x.constant
        for monomial, coefficient in x.terms:
            for uid in monomial:
                coefficient *= self._atom(uid)
            total += coefficient
        return total

    def truth(self, x: BoolLike) -> bool:
        """Return the value of a formula."""
        if isinstance(x, bool):
            return x
        found = self._truths.get(id(x))
        if found is None:
            found = self._truths[id(x)] = self._formula(x)
        return found

    def _formula(self, x: Bool) -> bool:
        kind, args = x.kind, x.args
        if kind == "le":
            return self.number(args[0]) <= 0
        if kind == "eq":
            return self.number(args[0]) == 0
        if kind == "var":
            return bool(self.values.get(args[0], False))
        if kind == "not":
            return not self.truth(args[0])
        if kind == "and":
            return all(self.truth(part) for part in args)
        return any(self.truth(part) for part in args)

    def _atom(self, uid: int) -> int:
        found = self._atoms.get(uid)
        if found is not None:
            return found
        atom = ATOMS[uid]
        args = atom.args
        if atom.kind == "var":
            value = int(self.values.get(args[0], _default(atom)))
        elif atom.kind == "div":
            divisor = self.number(args[1])
            value = self.number(args[0]) // divisor if divisor else 0
        elif atom.kind == "choice":
            value = self.number(args[1] if self.truth(args[0]) else args[2])
        else:
            value = self.values.get(args[0], {}).get(self.number(args[1]), 1)
        self._atoms[uid] = value
        return value


def _default(atom: Atom) -> int:
    if atom.low is not None:
        return atom.low
    return 0 if atom.high is None else min(0, atom.high)


def value_of(x: Any, values: Mapping[str, Any]) -> Any:
    """Return the Python value of a term, a formula or a plain value."""
    evaluator = Evaluator(values)
    if isinstance(x, Bool):
        return evaluator.truth(x)
    return evaluator.number(x) if isinstance(x, Int) else x
