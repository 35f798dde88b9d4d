"""One path through the code: the decisions taken, and what they already imply.

A path follows one sample (concrete values of every variable). A truth value met on the way is
decided by what earlier decisions imply, else by the sample, and then it is written down. The
literals of a finished path are therefore the exact condition under which the code runs that way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from models import term
from models.evaluate import Evaluator
from models.term import Bool, BoolLike, Coefficients, Int, IntLike, Unsupported

#: Names of lifted modules start so; `models.loader` gives them.
LIFTED = "_capproof_tree"
#: Decisions at one line on one path, after which a loop is given up.
MAX_ROUNDS = 64


class NeedsDecision(BaseException):
    """While both sides of a connective are looked at, a decision would be needed.

    No `Exception`, so that no `except Exception` of lifted code can swallow it.
    """


class Path:
    """The condition of one run, growing as the run goes on.

    Args:
        sample: Values of all variables; it must satisfy ``assumptions``.
        assumptions: What holds on every path, so needs no literal.
    """

    def __init__(self, sample: Mapping[str, Any], assumptions: tuple[BoolLike, ...]) -> None:
        self.literals: list[Bool] = []
        self.taken: list[bool] = []
        """What was decided of each formula that was asked for, in the order of the literals."""
        self.swept: list[IntLike] = []
        """The column that each loop over the columns of a table ran for."""
        self.is_impossible = False
        """Whether what was supposed of a loop was not so: no run on numbers takes this path."""
        self._evaluator = Evaluator(sample)
        self._upper: dict[Coefficients, int] = {}
        self._true: set[tuple[Any, ...]] = set()
        self._speculating = False
        self._decisions: Counter[tuple[str, int]] = Counter()
        self._names: Counter[str] = Counter()
        for assumption in assumptions:
            self._learn(assumption)

    def decide(self, formula: Bool) -> bool:
        """Return the formula's value on this path, and remember it if it was not implied.

        Raises:
            NeedsDecision: Both sides of a connective are being looked at.
            Unsupported: The same line has decided more often than any loop of known length does.
        """
        known = self.implied(formula)
        if known is not None:
            return known
        if self._speculating:
            raise NeedsDecision
        self._count_decision()
        value = self._evaluator.truth(formula)
        literal = formula if value else term.negation(formula)
        assert isinstance(literal, Bool)
        self.literals.append(literal)
        self.taken.append(value)
        self._learn(literal)
        return value

    def implied(self, formula: Bool) -> bool | None:
        """Return what earlier decisions say about the formula by linear facts; None is nothing."""
        if formula._key in self._true:
            return True
        kind = formula.kind
        if kind == "le":
            return self._implied_at_most_zero(formula.args[0])
        if kind == "eq":
            return self._implied_zero(formula.args[0])
        if kind == "not":
            inner = self.implied(formula.args[0])
            return None if inner is None else not inner
        if kind == "var":
            return False if ("not", id(formula)) in self._true else None
        values = [self.implied(part) for part in formula.args]
        absorbing = kind == "or"
        if absorbing in values:
            return absorbing
        return None if None in values else not absorbing

    @contextmanager
    def supposing(self, *formulas: BoolLike) -> Iterator[None]:
        """Look at what follows if ``formulas`` hold, without deciding anything.

        Raises:
            NeedsDecision: From inside, when something is neither implied nor decidable for free.
        """
        saved = self._upper.copy(), self._true.copy(), self._speculating
        self._speculating = True
        for formula in formulas:
            self._learn(formula)
        try:
            yield
        finally:
            self._upper, self._true, self._speculating = saved

    def new_name(self, stem: str) -> str:
        """Return a name that this path gives to no other variable: the same on every path."""
        self._names[stem] += 1
        return f"{stem}_{self._names[stem]}"

    @property
    def speculating(self) -> bool:
        """Whether both sides of a connective are being looked at."""
        return self._speculating

    def _count_decision(self) -> None:
        place = _lifted_line()
        self._decisions[place] += 1
        if place[1] and self._decisions[place] > MAX_ROUNDS:
            raise Unsupported(f"a loop of more than {MAX_ROUNDS} rounds whose end is symbolic")

    def _learn(self, formula: BoolLike) -> None:
        if isinstance(formula, bool):
            return
        self._true.add(formula._key)
        if formula.kind == "and":
            for part in formula.args:
                self._learn(part)
        elif formula.kind == "le":
            self._bound(formula.args[0])
        elif formula.kind == "eq":
            self._bound(formula.args[0])
            self._bound(-formula.args[0])

    def _bound(self, at_most_zero: Any) -> None:
        terms, limit = at_most_zero.terms, -at_most_zero.constant
        self._upper[terms] = min(limit, self._upper.get(terms, limit))

    def _implied_at_most_zero(self, x: Int) -> bool | None:
        upper = self._upper.get(x.terms)
        if upper is not None and upper + x.constant <= 0:
            return True
        lower = self._upper.get(_opposite(x.terms))
        if lower is not None and -lower + x.constant > 0:
            return False
        return None

    def _implied_zero(self, x: Int) -> bool | None:
        upper = self._upper.get(x.terms)
        lower = self._upper.get(_opposite(x.terms))
        if upper is not None and upper + x.constant < 0:
            return False
        if lower is not None and -lower + x.constant > 0:
            return False
        if upper is not None and lower is not None and upper == -lower == -x.constant:
            return True
        return False if ("not", id(term.is_zero(x))) in self._true else None


def _opposite(terms: Coefficients) -> Coefficients:
    return tuple((m, -c) for m, c in terms)


def _lifted_line() -> tuple[str, int]:
    """File and line of the lifted code that is being executed; line 0 where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(LIFTED):
            return frame.f_code.co_filename, frame.f_lineno
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "", 0


@contextmanager
def following(path: Path) -> Iterator[Path]:
    """Decide every truth value met inside the block on ``path``."""
    before: tuple[Callable[[Bool], bool] | None, Any] = (term.decide, term.implied)
    text_before = term.text_allowed
    term.decide, term.implied, term.text_allowed = path.decide, path.implied, False
    try:
        yield path
    finally:
        term.decide, term.implied = before
        term.text_allowed = text_before
