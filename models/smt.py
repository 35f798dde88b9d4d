"""The only module that knows the solver.

Terms are translated once each; a floor division becomes a fresh integer with its defining bounds,
so that the solver sees products and linear facts instead of ``div``. One function calls ``check``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import z3  # type: ignore[import-untyped]

from models import term
from models.evaluate import Evaluator
from models.term import ATOMS, Bool, BoolLike, Int, IntLike

#: Solver steps (not seconds) per question, so that an answer does not depend on the machine.
RESOURCE_LIMIT = 30_000_000
#: Seconds per attempt, by seed. What the solver learned from earlier questions leads it astray now
#: and then, and so does what depends on names that do not matter: into places where it runs on and
#: counts no steps. So the first attempt may take many times what most questions take and no more,
#: and those after it, each by a solver of its own, longer.
ATTEMPTS = {0: 1.0, 1: 60.0, 2: 300.0}
LOGIC = "QF_UFNIA"
SOLVER_VERSION = z3.get_version_string()


class Answer(Enum):
    """What a solver can say; unknown is never rounded to either of the others."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Result:
    """The answer to one question.

    Attributes:
        answer: sat, unsat or unknown.
        values: A model, by variable name, where sat; arrays are mappings.
        core: Slugs of the named formulas that a refutation used, where unsat.
        given: The formulas among those given that it used.
        reason: The solver's words and the budget, where unknown.
    """

    answer: Answer
    values: Mapping[str, Any] = field(default_factory=dict)
    core: tuple[str, ...] = ()
    given: tuple[BoolLike, ...] = ()
    reason: str | None = None


class ModelMismatch(AssertionError):
    """A solver model does not satisfy the formulas when evaluated in plain Python."""


class Question:
    """A growing set of formulas put to the solver, incrementally.

    Args:
        named: Formulas that a refutation may turn out not to need, by slug.
    """

    def __init__(self, named: Mapping[str, BoolLike] | None = None) -> None:
        self._solver = _solver()
        self._encoder = _Encoder(self._solver)
        self._formulas: list[BoolLike] = []
        self._labels: dict[str, z3.BoolRef] = {}
        self._given: dict[int, z3.BoolRef] = {}
        for name, formula in (named or {}).items():
            label = self._labels[name] = z3.Bool(f"assumption:{name}")
            self._solver.add(z3.Implies(label, self._encoder.formula(formula)))
            self._formulas.append(formula)

    def add(self, *formulas: BoolLike) -> None:
        """Require formulas from now on."""
        self._solver.add(*[self._encoder.formula(formula) for formula in formulas])
        self._formulas += formulas

    def ask(self, *also: BoolLike, given: Sequence[BoolLike] = ()) -> Result:
        """Ask whether all formulas can hold together, and these besides.

        Args:
            also: More formulas.
            given: More formulas still, of which a refutation says which ones it used.

        Raises:
            ModelMismatch: The solver's model is none in plain Python.
        """
        encoded = [self._encoder.formula(formula) for formula in also]
        labels = [self._label(formula) for formula in given]
        self._solver.push()
        self._solver.add(*encoded)
        try:
            return self._check((*self._formulas, *also), given, labels)
        finally:
            self._solver.pop()

    def _label(self, formula: BoolLike) -> z3.BoolRef:
        """A truth value that brings the formula with it, said once."""
        label = self._given.get(id(formula))
        if label is None:
            label = self._given[id(formula)] = z3.Bool(f"given:{len(self._given)}")
            self._solver.add(z3.Implies(label, self._encoder.formula(formula)))
        return label

    def _check(
        self,
        formulas: Sequence[BoolLike],
        given: Sequence[BoolLike],
        of_given: Sequence[z3.BoolRef],
    ) -> Result:
        solver, labels = self._solver, (*self._labels.values(), *of_given)
        answer = solver.check(*labels)
        for seed in list(ATTEMPTS)[1:]:
            if answer != z3.unknown:
                break
            solver = _solver(seed)
            solver.add(*self._solver.assertions())
            answer = solver.check(*labels)
        if answer == z3.unsat:
            # To ask which of no labels were used takes as long as many a question.
            used = {label.get_id() for label in (solver.unsat_core() if labels else ())}
            core = (name for name, label in self._labels.items() if label.get_id() in used)
            needed = (
                one for one, label in zip(given, of_given, strict=True) if label.get_id() in used
            )
            return Result(Answer.UNSAT, core=tuple(core), given=tuple(needed))
        if answer == z3.unknown:
            seconds = ", ".join(f"{limit:g}" for limit in ATTEMPTS.values())
            budget = f"{RESOURCE_LIMIT:,} solver steps, attempts of {seconds} s"
            reason = f"{solver.reason_unknown()} (budget: {budget})"
            return Result(Answer.UNKNOWN, reason=reason)
        values = self._encoder.values(solver.model())
        evaluator = Evaluator(values)
        for formula in (*formulas, *given):
            if not evaluator.truth(formula):
                raise ModelMismatch(f"the solver's model does not satisfy {term.show(formula)}")
        return Result(Answer.SAT, values=values)

    def minimize(
        self, values: Mapping[str, Any], order: Sequence[IntLike], *also: BoolLike
    ) -> Mapping[str, Any]:
        """Return the model with the least values of ``order``, the first one first.

        ``values`` is a model to start from, of all formulas and of ``also``. Each term must have a
        lower bound by declaration.
        """
        with self._scope(*also, about=order):
            for target in order:
                low, _ = term.bounds(target)
                assert low is not None, f"{term.show(target)} has no lower bound"
                high, step = Evaluator(values).number(target), 0
                while low < high:  # the least value is near its bound, more often than not
                    tried = min(low + step, high - 1)
                    result = self.ask(target <= tried)
                    if result.answer is Answer.SAT:
                        values, high = result.values, Evaluator(result.values).number(target)
                        step = (high - low) // 2
                    else:
                        low, step = tried + 1, 2 * step + 1
                self.add(target == high)
        return values

    @contextmanager
    def _scope(self, *formulas: BoolLike, about: Sequence[IntLike]) -> Iterator[None]:
        """Require formulas, and what the block adds, until it ends.

        It adds nothing but of the terms `about`, of which all is said outside the block.
        """
        num_formulas = len(self._formulas)
        for x in (*formulas, *about):
            self._encoder.need(x)
        self._solver.push()
        try:
            self.add(*formulas)
            yield
        finally:
            self._solver.pop()
            del self._formulas[num_formulas:]

    def cells(self, array: str) -> Iterator[IntLike]:
        """Yield the indices at which the formulas look up an array."""
        for uid in tuple(self._encoder.cells):
            name, index = ATOMS[uid].args
            if name == array:
                yield index

    def smtlib(self) -> str:
        """The question as an SMT-LIB 2 script."""
        solver = z3.Solver()
        solver.add(*self._solver.assertions(), *self._labels.values())
        return str(solver.to_smt2())


def _solver(seed: int = 0) -> z3.Solver:
    solver = z3.SolverFor(LOGIC)
    solver.set("rlimit", RESOURCE_LIMIT)
    solver.set("timeout", int(ATTEMPTS[seed] * 1000))
    # Groebner bases cost more than they find here: the order of quotients is said outright.
    solver.set("arith.nl.grobner", False)
    if seed:
        solver.set("random_seed", seed)
    return solver


class _Encoder:
    """Hands translated terms to a solver, after the side conditions of the atoms in them.

    Side conditions are said once each, where they are first needed and outside every scope.
    """

    def __init__(self, solver: z3.Solver) -> None:
        self._solver = solver
        self._atoms: dict[int, z3.ArithRef] = {}
        self._formulas: set[int] = set()
        self._truths: dict[str, z3.BoolRef] = {}
        self.cells: dict[int, tuple[str, z3.ArithRef]] = {}
        self._quotients: dict[Any, list[int]] = {}

    def formula(self, x: BoolLike) -> z3.BoolRef:
        self.need(x)
        return _TRANSLATION.formula(x)

    def values(self, model: z3.ModelRef) -> dict[str, Any]:
        def integer(x: z3.ArithRef) -> int:
            return int(model.eval(x, model_completion=True).as_long())

        values: dict[str, Any] = {}
        for uid, encoded in self._atoms.items():
            if ATOMS[uid].kind == "var":
                values[ATOMS[uid].args[0]] = integer(encoded)
        for name, truth in self._truths.items():
            values[name] = z3.is_true(model.eval(truth, model_completion=True))
        for uid, (array, index) in self.cells.items():
            values.setdefault(array, {})[integer(index)] = integer(self._atoms[uid])
        return values

    def need(self, x: BoolLike | IntLike) -> None:
        if isinstance(x, Int):
            for monomial, _ in x.terms:
                for uid in monomial:
                    if uid not in self._atoms:
                        self._need_atom(uid)
        elif isinstance(x, Bool) and id(x) not in self._formulas:
            self._formulas.add(id(x))
            if x.kind == "var":
                self._truths[x.args[0]] = _TRANSLATION.formula(x)
                return
            for part in x.args:
                self.need(part)

    def _need_atom(self, uid: int) -> None:
        atom = ATOMS[uid]
        if atom.kind != "var":
            for part in atom.args:
                self.need(part)
        self._atoms[uid] = _TRANSLATION.atom(uid)
        if atom.kind == "cell":
            array, index = atom.args
            self.cells[uid] = (array, _TRANSLATION.number(index))
        self._solver.add(*_TRANSLATION.side_conditions(uid))
        if atom.kind == "div":
            self._say_order(uid)

    def _say_order(self, uid: int) -> None:
        """Say that division by one positive divisor is monotone: it spares the solver products."""
        others = self._quotients.setdefault(_key(ATOMS[uid].args[1]), [])
        for other in others:
            self._solver.add(*_TRANSLATION.order(uid, other))
        others.append(uid)


class _Translation:
    """The solver's form of every term, made once: terms are interned and never go away."""

    def __init__(self) -> None:
        self._formulas: dict[int, z3.BoolRef] = {}
        self._atoms: dict[int, z3.ArithRef] = {}
        self._side_conditions: dict[int, tuple[z3.BoolRef, ...]] = {}
        self._orders: dict[tuple[int, int], tuple[z3.BoolRef, ...]] = {}

    def formula(self, x: BoolLike) -> z3.BoolRef:
        if isinstance(x, bool):
            return z3.BoolVal(x)
        found = self._formulas.get(id(x))
        if found is None:
            found = self._formulas[id(x)] = self._made(x)
        return found

    def number(self, x: IntLike) -> z3.ArithRef:
        if isinstance(x, int):
            return z3.IntVal(x)
        parts = [z3.IntVal(x.constant)] if x.constant else []
        for monomial, coefficient in x.terms:
            factors = [self.atom(uid) for uid in monomial]
            product = factors[0]
            for factor in factors[1:]:
                product = product * factor
            parts.append(product if coefficient == 1 else coefficient * product)
        return parts[0] if len(parts) == 1 else z3.ArithRef(_applied(z3.Z3_mk_add, parts))

    def atom(self, uid: int) -> z3.ArithRef:
        found = self._atoms.get(uid)
        if found is None:
            found = self._atoms[uid] = self._made_atom(uid)
        return found

    def side_conditions(self, uid: int) -> tuple[z3.BoolRef, ...]:
        """What makes a quotient one, and the bounds that were declared of an atom."""
        found = self._side_conditions.get(uid)
        if found is None:
            found = self._side_conditions[uid] = tuple(self._conditions_of(uid))
        return found

    def order(self, one: int, other: int) -> tuple[z3.BoolRef, ...]:
        """Two quotients by one divisor are in the order of their numerators."""
        found = self._orders.get((one, other))
        if found is None:
            difference = ATOMS[one].args[0] - ATOMS[other].args[0]
            forward, backward = term.at_most_zero(difference), term.at_most_zero(-difference)
            a, b = self.atom(one), self.atom(other)
            found = self._orders[one, other] = (
                z3.Implies(self.formula(forward), a <= b),
                z3.Implies(self.formula(backward), b <= a),
            )
        return found

    def _conditions_of(self, uid: int) -> Iterator[z3.BoolRef]:
        atom, encoded = ATOMS[uid], self.atom(uid)
        if atom.kind == "choice":
            return
        if atom.kind == "div":
            numerator, divisor = map(self.number, atom.args)
            whole = divisor * encoded
            is_quotient = z3.And(whole <= numerator, numerator < whole + divisor)
            yield z3.Implies(divisor > 0, is_quotient)
        if atom.low is not None:
            yield encoded >= atom.low
        if atom.high is not None:
            yield encoded <= atom.high

    def _made(self, x: Bool) -> z3.BoolRef:
        kind, args = x.kind, x.args
        if kind in ("le", "eq"):
            whole: Int = args[0]
            rest, constant = self.number(whole - whole.constant), z3.IntVal(-whole.constant)
            return rest <= constant if kind == "le" else rest == constant
        if kind == "var":
            return z3.Bool(args[0])
        if kind == "not":
            return z3.Not(self.formula(args[0]))
        parts = [self.formula(part) for part in args]
        return z3.BoolRef(_applied(z3.Z3_mk_and if kind == "and" else z3.Z3_mk_or, parts))

    def _made_atom(self, uid: int) -> z3.ArithRef:
        kind, args = ATOMS[uid].kind, ATOMS[uid].args
        if kind == "choice":
            condition, then, otherwise = args
            return z3.If(self.formula(condition), self.number(then), self.number(otherwise))
        if kind == "cell":
            array, index = args
            return z3.Function(array, z3.IntSort(), z3.IntSort())(self.number(index))
        return z3.Int(f"quotient{uid}" if kind == "div" else args[0])


_TRANSLATION = _Translation()


def _applied(make: Any, parts: Sequence[z3.ExprRef]) -> Any:
    """`z3.And`, `z3.Or` and `z3.Sum` without their conversions, which take longer than the rest."""
    arguments = (z3.Ast * len(parts))(*[part.as_ast() for part in parts])
    return make(z3.main_ctx().ref(), len(parts), arguments)


def _key(x: IntLike) -> Any:
    return x if isinstance(x, int) else x._key
