"""What rewritten source calls, and the builtins that it sees.

A connective of formulas becomes one formula where looking at its later operands needs no decision
and changes nothing; otherwise its operands are decided one by one, as Python would.
"""

from __future__ import annotations

import builtins
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from models import rewrite, term
from models.containers import Table
from models.loader import PlaceholderUsed
from models.path import NeedsDecision, Path
from models.term import Bool, Int, IntLike, Unsupported

#: Rounds after which a loop whose length is not known is given up.
MAX_ROUNDS = 64

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "is": lambda a, b: _same(a, b),
    "is not": lambda a, b: _not(_same(a, b)),
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
}


def current_path() -> Path:
    """Return the path being followed.

    Raises:
        Unsupported: No path is being followed.
    """
    owner = getattr(term.decide, "__self__", None)
    if not isinstance(owner, Path):
        raise Unsupported("symbolic code ran outside a path")
    return owner


def _speculating() -> bool:
    owner = getattr(term.decide, "__self__", None)
    return isinstance(owner, Path) and owner.speculating


def _and(*operands: Callable[[], Any]) -> Any:
    return _connective(operands, settles=False, join=operator.and_)


def _or(*operands: Callable[[], Any]) -> Any:
    return _connective(operands, settles=True, join=operator.or_)


def _connective(
    operands: tuple[Callable[[], Any], ...], *, settles: bool, join: Callable[[Any, Any], Any]
) -> Any:
    value = operands[0]()
    for operand in operands[1:]:
        if isinstance(value, Bool):
            supposed = term.negation(value) if settles else value
            merged = _looked_at(supposed, operand)
            if isinstance(merged, bool | Bool):
                value = join(value, merged)
                continue
        if bool(value) is settles:
            return value
        value = operand()
    return value


def _looked_at(supposed: Any, operand: Callable[[], Any]) -> Any:
    """Value of ``operand`` where ``supposed`` holds, or None if it cannot be had for free."""
    try:
        with current_path().supposing(supposed):
            return operand()
    except (NeedsDecision, Unsupported, PlaceholderUsed, ArithmeticError, LookupError):
        return None
    except (AssertionError, TypeError, AttributeError, ValueError):
        return None


def _not(value: Any) -> Any:
    return term.negation(value) if isinstance(value, Bool) else not value


def _choose(test: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    if isinstance(test, Int):
        test = test != 0
    if isinstance(test, Bool):
        sides = _looked_at(test, then), _looked_at(term.negation(test), otherwise)
        if all(isinstance(side, int | Int | Bool) for side in sides):
            return term.choose(test, *map(term.int_of, sides))
    return then() if test else otherwise()


def _compare(left: Any, *rest: Any) -> Any:
    def links() -> Iterator[Callable[[], Any]]:
        value = left
        for symbol, operand in zip(rest[::2], rest[1::2], strict=True):
            right = operand()
            yield lambda symbol=symbol, a=value, b=right: _OPERATORS[symbol](a, b)
            value = right

    if len(rest) == 2:
        return next(links())()
    return _and(*links())


def _same(a: Any, b: Any) -> Any:
    same = getattr(a, "is_same_block", None)
    if same is not None:
        return same(b)
    if isinstance(a, Int | Bool) and isinstance(b, int | Int | Bool):
        raise Unsupported("identity of symbolic values")
    return a is b


def _fill(element: Callable[[], Any], over: Any) -> Any:
    if isinstance(over, SymbolicRange):
        return Table.filled(element(), over.count())
    return [element() for _ in over]


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if _speculating() and not _changes_nothing(function):
        raise NeedsDecision
    return function(*args, **kwargs)


def _changes_nothing(function: Any) -> bool:
    if function in _PURE_BUILTINS:
        return True
    code = getattr(function, "__func__", function)
    return isinstance(code, types.FunctionType) and code.__module__.startswith("_capproof_tree")


def _effect() -> None:
    if _speculating():
        raise NeedsDecision


class SymbolicRange:
    """``range`` whose ends are terms; a constant step."""

    def __init__(self, start: IntLike, stop: IntLike, step: int = 1) -> None:
        if not isinstance(step, int) or step == 0:
            raise Unsupported("a range with a symbolic step")
        self.start, self.stop, self.step = start, stop, step

    def count(self) -> IntLike:
        """Number of values, possibly a term."""
        span = (self.stop - self.start) if self.step > 0 else (self.start - self.stop)
        rounds = -(-span // abs(self.step))
        return term.choose(rounds > 0, rounds, 0)

    def __len__(self) -> int:
        raise Unsupported("the length of a symbolic range as a number")

    def __iter__(self) -> Iterator[IntLike]:
        value = self.start
        for _ in itertools.repeat(None, MAX_ROUNDS):
            if not (value < self.stop if self.step > 0 else value > self.stop):
                return
            yield value
            value = value + self.step
        raise Unsupported(f"a loop of more than {MAX_ROUNDS} rounds over a symbolic range")


class _RangeType(type):
    def __call__(cls, *args: Any) -> Any:
        start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
        if any(isinstance(end, Int | Bool) for end in (start, stop, step)):
            return SymbolicRange(start, stop, step)
        return builtins.range(*args)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.range | SymbolicRange)


class _Range(metaclass=_RangeType):
    """``range`` for numbers and terms alike."""


class _IntType(type):
    def __call__(cls, value: Any = 0, *rest: Any) -> Any:
        if isinstance(value, Int | Bool):
            return term.int_of(value)
        return builtins.int(value, *rest)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.int | Int)


class _Int(builtins.int, metaclass=_IntType):
    """``int`` for numbers and terms alike; a type, since annotations and checks name it."""


def _len(of: Any) -> Any:
    return of.length if isinstance(of, Table) else builtins.len(of)


def _extreme(
    python: Callable[..., Any], wins: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    def pick(*args: Any, **kwargs: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else list(args)
        if kwargs or not any(isinstance(value, Int) for value in values):
            return python(*args, **kwargs)
        best = values[0]
        for value in values[1:]:
            best = term.choose(wins(best, value), best, value)
        return best

    return pick


_min = _extreme(builtins.min, operator.le)
_max = _extreme(builtins.max, operator.ge)
_PURE_BUILTINS: tuple[Any, ...] = (
    *(_min, _max, _len, _Int, _Range, abs, isinstance, bool, tuple),
    *(_and, _or, _not, _choose, _compare),
)

#: Names that shadow builtins inside a lifted tree.
BUILTINS: dict[str, Any] = {
    "len": _len,
    "min": _min,
    "max": _max,
    "int": _Int,
    "range": _Range,
    rewrite.AND: _and,
    rewrite.OR: _or,
    rewrite.NOT: _not,
    rewrite.CHOOSE: _choose,
    rewrite.COMPARE: _compare,
    rewrite.FILL: _fill,
    rewrite.CALL: _call,
    rewrite.EFFECT: _effect,
}
