"""What rewritten source calls, and the builtins that it sees.

A connective of formulas becomes one formula where looking at its later operands needs no decision
and changes nothing; otherwise its operands are decided one by one, as Python would.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from models import rewrite, term
from models.containers import Block, Log, Pending, Pool, Sweep, Table
from models.loader import PlaceholderUsed
from models.path import LIFTED, MAX_ROUNDS, NeedsDecision, Path
from models.term import Bool, Int, IntLike, Unsupported

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
    except (NeedsDecision, Unsupported, PlaceholderUsed, Exception):
        return None


def _not(value: Any) -> Any:
    return term.negation(value) if isinstance(value, Bool) else not value


def _choose(test: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    if isinstance(test, Int):
        test = test != 0
    if isinstance(test, Bool):
        sides = _looked_at(test, then), _looked_at(term.negation(test), otherwise)
        if all(isinstance(side, bool | Bool) for side in sides):
            return term.choose(test, *sides)
        if all(isinstance(side, int | Int | Bool) for side in sides):
            return term.choose(test, *map(term.int_of, sides))
    return then() if test else otherwise()


def _compare(left: Any, *rest: Any) -> Any:
    """A chain: each operand evaluated at most once, and none after a link that fails."""
    values = [left]

    def link(symbol: str, operand: Callable[[], Any], place: int) -> Callable[[], Any]:
        def holds() -> Any:
            values[place:] = [operand()]
            return _OPERATORS[symbol](values[place - 1], values[place])

        return holds

    pairs = zip(rest[::2], rest[1::2], strict=True)
    return _and(*(link(*pair, place) for place, pair in enumerate(pairs, start=1)))


def _same(a: Any, b: Any) -> Any:
    if isinstance(a, Block):
        return a.is_same_block(b)
    if isinstance(b, Block):
        return False
    if any(isinstance(x, Int | Bool) for x in (a, b)) and all(
        isinstance(x, int | Int | Bool) for x in (a, b)
    ):
        raise Unsupported("identity of symbolic values")
    return a is b


def _fill(element: Callable[[], Any], over: Any) -> Any:
    if isinstance(over, SymbolicRange):
        # One block for all columns, if evaluating it once is as good as once per column.
        block = _looked_at(over.count() > 0, element)
        if isinstance(block, Block):
            return Table.filled(block, over.count())
    return [element() for _ in over]


class _Each:
    """What a comprehension goes over, as it would: an iterator that can also be added up whole."""

    def __init__(self, over: Any, element: Callable[[Any], Any], tests: tuple[Any, ...]) -> None:
        self._over, self._element, self._tests = over, element, tests
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._items is None:
            over = self._over
            self._items = (self._element(x) for x in over if all(test(x) for test in self._tests))
        return next(self._items)

    def of_any_column(self) -> Any:
        """What it says of any one column of a table of symbolic length, None where it is none."""
        over = self._over
        if self._tests or not isinstance(over, Table) or isinstance(over.length, int):
            return None
        return _looked_at(True, lambda: self._element(over.column(term.int_var("any_column", 0))))

    def total(self, start: Any) -> Any:
        """The sum, run by run where the columns of a table are known so."""
        runs = self._over.runs if isinstance(self._over, Table) else None
        if runs is None or self._tests or self._items is not None:
            total = start
            for item in self:
                total = total + (term.int_of(item) if isinstance(item, Bool) else item)
            return total
        for length, block in runs:
            # What is said of one column of a run holds for each, if saying it changes nothing.
            item = _looked_at(length > 0, functools.partial(self._element, block))
            if not isinstance(item, int | Int | Bool):
                raise Unsupported("a sum over a symbolic table of what cannot be said of a column")
            start = start + term.int_of(item) * length
        return start


def _each(is_list: bool, over: Any, element: Callable[[Any], Any], *tests: Any) -> Any:
    if is_list and tests and isinstance(over, Log):
        return over.without_some()
    each = _Each(over, element, tests)
    return list(each) if is_list else each


def _sum(over: Any, start: Any = 0) -> Any:
    return (
        over.total(start) if isinstance(over, _Each) else _Each(over, lambda x: x, ()).total(start)
    )


def _reversed(over: Any) -> Any:
    return over.in_reverse() if isinstance(over, Table) else builtins.reversed(over)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if any(function is asking for asking in _ASK_THE_CALLER):
        raise Unsupported(f"{function.__name__}()")
    if function is builtins.type and len(args) == 1 and not kwargs:
        return _type_of(args[0])
    if _speculating() and not _changes_nothing(function):
        raise NeedsDecision
    return function(*args, **kwargs)


#: The frame of everything that lifted code calls.
call_helper = _call


def _changes_nothing(function: Any) -> bool:
    if any(function is pure for pure in _PURE_BUILTINS):
        return True
    code = getattr(function, "__func__", function)
    return isinstance(code, types.FunctionType) and str(code.__module__).startswith(LIFTED)


def _effect(*on: Any) -> None:
    """Something is about to change; adding to a value that cannot change is no effect."""
    if _speculating() and not (on and isinstance(on[0], int | Int | Bool | str | tuple | None)):
        raise NeedsDecision


def _item(container: Any, key: Any) -> Any:
    if _speculating() and hasattr(type(container), "__missing__") and key not in container:
        raise NeedsDecision  # A look-up that adds the key.
    return container[key]


def _message(build: Callable[[], Any]) -> Any:
    """Build a message, in which terms may become text."""
    before, term.text_allowed = term.text_allowed, True
    try:
        return build()
    finally:
        term.text_allowed = before


def _refuse(what: str) -> None:
    raise Unsupported(what)


def _drop(container: Any, *args: Any) -> None:
    """`container.pop(*args)` where nobody looks at what it returns."""
    if isinstance(container, Pending) and len(args) == 2:
        _effect()
        container.drop(args[0])
    else:
        _call(container.pop, *args)


class SymbolicRange:
    """``range`` whose ends are terms; a constant step."""

    def __init__(self, start: IntLike, stop: IntLike, step: int = 1) -> None:
        if not isinstance(step, int) or step == 0:
            raise Unsupported("a range with a symbolic step")
        self.start, self.stop, self.step = start, stop, step

    def __contains__(self, value: object) -> bool:
        raise Unsupported("membership of a symbolic range")

    def count(self) -> IntLike:
        """Number of values, possibly a term."""
        span = (self.stop - self.start) if self.step > 0 else (self.start - self.stop)
        rounds = -(-span // abs(self.step))
        count: IntLike = term.choose(rounds > 0, rounds, 0)
        return count

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


def _sweep(over: Any, breaks: bool) -> Any:
    """A loop that only stores into its own column, over a range whose length nobody knows.

    Its body runs once, for any column of the range; what it stores there is stored in any columns
    of the range (`models.containers.Sweep`). Where it stores nothing there it may elsewhere: that
    is the run for that column. Where the body may break, that column may not be reached: the body
    then runs for the one before it that breaks the loop.

    Args:
        over: The range.
        breaks: Whether the body may break.
    """
    if not isinstance(over, SymbolicRange) or isinstance(over.count(), int):
        return over
    if over.step not in (1, -1):
        raise Unsupported("a range with steps over the columns of a symbolic table")
    low = over.start if over.step == 1 else over.stop + 1
    high = over.stop - 1 if over.step == 1 else over.start
    path = current_path()
    sweep = Sweep(path.new_name("swept"), low, high)
    path.swept.append(sweep.column)
    if not breaks:
        return _swept(sweep)
    first = low if over.step == 1 else sweep.column + 1
    last = sweep.column - 1 if over.step == 1 else high
    return _swept(sweep, Sweep(path.new_name("broke"), first, last))


def _swept(sweep: Sweep, before: Sweep | None = None) -> Iterator[IntLike]:
    if not sweep.holds(sweep.column):
        return
    if before is not None:
        is_broken = term.bool_var(f"{before.name}_before")
        if term.conjunction((is_broken, before.holds(before.column))):
            with before.under_way():
                yield before.column
            current_path().is_impossible = True  # the body went on: it broke nothing there
            return
    with sweep.under_way():
        yield sweep.column


class _RangeType(type):
    def __call__(cls, *args: Any) -> Any:
        start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
        if any(isinstance(end, Int | Bool) for end in (start, stop, step)):
            return SymbolicRange(term.int_of(start), term.int_of(stop), step)
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
        return isinstance(instance, builtins.int | Int | Bool)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)


class _Int(builtins.int, metaclass=_IntType):
    """``int`` for numbers and terms alike; a type, since annotations and checks name it."""


#: What a term or a modelled container is an instance of.
_STAND_INS: dict[type, Any] = {Int: 0, Bool: True, Table: []}


def _isinstance(instance: Any, kind: Any) -> bool:
    """``isinstance``, where terms are ints and bools, and a table is a list."""
    if type(instance) in (Block, Pool):
        raise Unsupported("the class of a block or a pool")
    return builtins.isinstance(_STAND_INS.get(type(instance), instance), kind)


def _type_of(instance: Any) -> Any:
    """``type(instance)``, by the names that lifted code knows the builtins by."""
    if type(instance) in (Block, Pool):
        raise Unsupported("the class of a block or a pool")
    kind = type(_STAND_INS.get(type(instance), instance))
    return {builtins.int: _Int, builtins.range: _Range, SymbolicRange: _Range}.get(kind, kind)


def _len(of: Any) -> Any:
    if isinstance(of, Table):
        return of.length
    return of.count() if isinstance(of, SymbolicRange) else builtins.len(of)


def _extreme(python: Callable[..., Any], wins: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def pick(*args: Any, **kwargs: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else list(args)
        if kwargs or not any(isinstance(value, Int) for value in values):
            return python(values, **kwargs)
        best = values[0]
        for value in values[1:]:
            best = term.choose(wins(best, value), best, value)
        return best

    return pick


_min = _extreme(builtins.min, operator.le)
_max = _extreme(builtins.max, operator.ge)
_PURE_BUILTINS: tuple[Any, ...] = (
    *(_min, _max, _len, _sum, _Int, _Range, _isinstance, abs, bool, divmod),
    *(_and, _or, _not, _choose, _compare, _same),
)
#: They look at the calling frame, which is ours.
_ASK_THE_CALLER = (
    builtins.globals,
    builtins.locals,
    builtins.vars,
    builtins.dir,
    builtins.eval,
    builtins.exec,
    builtins.id,
)

#: Names that shadow builtins inside a lifted tree.
BUILTINS: dict[str, Any] = {
    "len": _len,
    "min": _min,
    "max": _max,
    "int": _Int,
    "range": _Range,
    "isinstance": _isinstance,
    "sum": _sum,
    "reversed": _reversed,
    rewrite.AND: _and,
    rewrite.OR: _or,
    rewrite.NOT: _not,
    rewrite.CHOOSE: _choose,
    rewrite.COMPARE: _compare,
    rewrite.IDENTITY: _same,
    rewrite.FILL: _fill,
    rewrite.EACH: _each,
    rewrite.SWEEP: _sweep,
    rewrite.CALL: _call,
    rewrite.ITEM: _item,
    rewrite.EFFECT: _effect,
    rewrite.MESSAGE: _message,
    rewrite.OURS: (NeedsDecision, Unsupported, PlaceholderUsed),
    rewrite.REFUSE: _refuse,
    rewrite.DROP: _drop,
}
