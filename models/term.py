"""Integers and truth values that stand for every case at once.

An :class:`Int` is a polynomial over atoms in normal form, a :class:`Bool` a formula over
comparisons of such with 0; both are interned, so that equal terms are one object and equality of
normal forms costs nothing. Arithmetic on them is Python's own: ``//`` and ``%`` floor, for negative
divisors too. What simplifies to a number or a truth value *is* a Python ``int`` or ``bool``, so
nothing downstream has to ask. Testing a :class:`Bool` (``if``, ``assert``) asks the current path to
decide.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Union

IntLike = Union[int, "Int"]
BoolLike = Union[bool, "Bool"]

#: A product of atoms, as ascending atom ids; the empty product is never stored.
Monomial = tuple[int, ...]
Coefficients = tuple[tuple[Monomial, int], ...]


class Unsupported(BaseException):
    """The lifter does not understand a construct; the message names it.

    No `Exception`, so that no `except Exception` of lifted code can turn it into a guess.
    """


@dataclass(frozen=True)
class Atom:
    """An indivisible integer: a variable, a floor division, a choice or a cell of an array.

    ``low`` and ``high`` are bounds known from the declaration; None is no bound.
    """

    uid: int
    kind: str  # "var" | "div" | "choice" | "cell"
    args: tuple[Any, ...]
    low: int | None
    high: int | None


ATOMS: Final[list[Atom]] = []
_atom_of: Final[dict[tuple[Any, ...], Atom]] = {}
_int_of: Final[dict[tuple[Coefficients, int], Int]] = {}
_bool_of: Final[dict[tuple[Any, ...], Bool]] = {}

#: Set by `models.path`: decides a formula on the path being executed.
decide: Callable[[Bool], bool] | None = None


def _nothing_implied(formula: Bool) -> bool | None:
    return None


#: Set by `models.path`: what the path already implies about a formula, None where nothing.
implied: Callable[[Bool], bool | None] = _nothing_implied
#: Whether terms may become text. False while lifted code runs, other than for its messages: what
#: it did with the text of a term would be a guess.
text_allowed = True


#: Set by `models.containers`: `[block] * n` for a term `n`.
repeat_list: Callable[[list[Any], Int], Any] | None = None


def _intern_atom(
    kind: str, args: tuple[Any, ...], low: int | None = None, high: int | None = None
) -> Int:
    key = (kind, *(arg._key if isinstance(arg, Int | Bool) else arg for arg in args))
    atom = _atom_of.get(key)
    if atom is None:
        atom = _atom_of[key] = Atom(len(ATOMS), kind, args, low, high)
        ATOMS.append(atom)
    result = _make({(atom.uid,): 1}, 0)
    assert isinstance(result, Int)
    return result


def _make(coefficients: dict[Monomial, int], constant: int) -> IntLike:
    return _interned(tuple(sorted([item for item in coefficients.items() if item[1]])), constant)


def _interned(terms: Coefficients, constant: int) -> IntLike:
    if not terms:
        return constant
    key = (terms, constant)
    found = _int_of.get(key)
    if found is None:
        found = _int_of[key] = Int(terms, constant)
    return found


def _plus(a: Int, b: Int, sign: int, constant: int) -> IntLike:
    """``a + sign * b + constant``."""
    total = dict(a.terms)
    for m, c in b.terms:
        total[m] = total.get(m, 0) + sign * c
    return _make(total, a.constant + sign * b.constant + constant)


def _less(a: Any, b: Any, constant: int) -> IntLike:
    """``a - b + constant``."""
    if isinstance(a, Int) and isinstance(b, Int):
        return _plus(a, b, -1, constant)
    difference: IntLike = a - b + constant
    return difference


class _Unsupporting:
    """Operations that would turn a term into a guess."""

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"{what} of a symbolic {type(self).__name__.lower()}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not hasattr(int, name):
            raise AttributeError(name)
        self._refuse(f"attribute {name}")

    def __index__(self) -> NoReturn:
        self._refuse("use as an index or a count")

    def __float__(self) -> NoReturn:
        self._refuse("conversion to float")

    def __truediv__(self, other: object) -> NoReturn:
        self._refuse("true division")

    def __pow__(self, other: object) -> NoReturn:
        self._refuse("power")

    def __lshift__(self, other: object) -> NoReturn:
        self._refuse("shift")

    def __hash__(self) -> NoReturn:
        self._refuse("hash")

    def __str__(self) -> str:
        if not text_allowed:
            self._refuse("text")
        return show(self)

    def __format__(self, spec: str) -> str:
        return str(self)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    __repr__ = __str__
    __rtruediv__ = __truediv__
    __rpow__ = __pow__
    __rshift__ = __rlshift__ = __rrshift__ = __lshift__
    __int__ = __index__


class Int(_Unsupporting):
    """A polynomial ``constant + sum(coefficient * product of atoms)`` that is not a number."""

    __slots__ = ("_bounds", "_key", "constant", "terms")

    def __init__(self, terms: Coefficients, constant: int) -> None:
        self.terms, self.constant = terms, constant
        self._key = (terms, constant)
        self._bounds: tuple[int | None, int | None] | None = None

    __hash__ = _Unsupporting.__hash__

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> IntLike:
        return _interned(tuple((m, -c) for m, c in self.terms), -self.constant)

    def __pos__(self) -> Int:
        return self

    def __round__(self, digits: int | None = None) -> Int:
        if digits is not None:
            self._refuse("rounding to digits")
        return self

    __ceil__ = __floor__ = __trunc__ = __pos__

    def __abs__(self) -> IntLike:
        magnitude: IntLike = choose(self >= 0, self, -self)
        return magnitude

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Bool):
            other = int_of(other)
        if isinstance(other, int):
            return _interned(self.terms, self.constant + other)
        return _plus(self, other, 1, 0) if isinstance(other, Int) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Bool):
            other = int_of(other)
        if isinstance(other, int):
            return _interned(self.terms, self.constant - other)
        return _plus(self, other, -1, 0) if isinstance(other, Int) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Bool):
            other = int_of(other)
        if isinstance(other, int):
            return _make({m: c * other for m, c in self.terms}, self.constant * other)
        if isinstance(other, list) and repeat_list is not None:
            return repeat_list(other, self)
        if not isinstance(other, Int):
            return NotImplemented
        product: dict[Monomial, int] = {}
        for m1, c1 in (*self.terms, ((), self.constant)):
            for m2, c2 in (*other.terms, ((), other.constant)):
                m = tuple(sorted(m1 + m2))
                product[m] = product.get(m, 0) + c1 * c2
        return _make(product, product.pop((), 0))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return floor_div(self, other) if isinstance(other, int | Int) else NotImplemented

    def __rfloordiv__(self, other: Any) -> Any:
        return floor_div(other, self) if isinstance(other, int) else NotImplemented

    def __mod__(self, other: Any) -> Any:
        return self - other * (self // other) if isinstance(other, int | Int) else NotImplemented

    def __rmod__(self, other: Any) -> Any:
        return other - self * (other // self) if isinstance(other, int) else NotImplemented

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __le__(self, other: Any) -> Any:
        return at_most_zero(_less(self, other, 0))

    def __lt__(self, other: Any) -> Any:
        return at_most_zero(_less(self, other, 1))

    def __ge__(self, other: Any) -> Any:
        return at_most_zero(_less(other, self, 0))

    def __gt__(self, other: Any) -> Any:
        return at_most_zero(_less(other, self, 1))

    def __eq__(self, other: object) -> Any:
        if isinstance(other, int | Int | Bool):
            return is_zero(_less(self, other, 0))
        return _equals_no_number(self, other)

    def __ne__(self, other: object) -> Any:
        return negation(self == other)


class Bool(_Unsupporting):
    """A formula: ``le`` and ``eq`` compare an integer with 0; ``var``, ``not``, ``and``, ``or``."""

    __slots__ = ("_key", "_negation", "args", "kind")

    def __init__(self, kind: str, args: tuple[Any, ...]) -> None:
        self.kind, self.args = kind, args
        self._negation: BoolLike | None = None
        self._key = (kind, *(id(arg) if isinstance(arg, Int | Bool) else arg for arg in args))

    __hash__ = _Unsupporting.__hash__

    def __bool__(self) -> bool:
        if decide is None:
            raise Unsupported("a symbolic truth value was tested outside a path")
        return decide(self)

    def __and__(self, other: Any) -> Any:
        return conjunction((self, other)) if isinstance(other, bool | Bool) else NotImplemented

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        return disjunction((self, other)) if isinstance(other, bool | Bool) else NotImplemented

    __ror__ = __or__

    def __xor__(self, other: Any) -> Any:
        if isinstance(other, bool):
            return negation(self) if other else self
        if not isinstance(other, Bool):
            return NotImplemented
        return (self & negation(other)) | (negation(self) & other)

    __rxor__ = __xor__

    def __eq__(self, other: object) -> Any:
        if isinstance(other, bool | Bool):
            return negation(self ^ other)
        if isinstance(other, int | Int):
            return int_of(self) == other
        return _equals_no_number(self, other)

    def __ne__(self, other: object) -> Any:
        return negation(self == other)

    def choose(self, then: Any, otherwise: Any) -> Any:
        """``then`` where the formula holds, ``otherwise`` elsewhere (`spec.logic.choose`)."""
        return choose(self, then, otherwise)

    def __add__(self, other: Any) -> Any:
        return int_of(self) + other

    def __sub__(self, other: Any) -> Any:
        return int_of(self) - other

    def __rsub__(self, other: Any) -> Any:
        return other - int_of(self)

    def __mul__(self, other: Any) -> Any:
        return int_of(self) * other

    def __le__(self, other: Any) -> Any:
        return int_of(self) <= other

    def __lt__(self, other: Any) -> Any:
        return int_of(self) < other

    def __ge__(self, other: Any) -> Any:
        return int_of(self) >= other

    def __gt__(self, other: Any) -> Any:
        return int_of(self) > other

    __radd__, __rmul__ = __add__, __mul__


def _equals_no_number(x: _Unsupporting, other: object) -> bool:
    """An integer equals nothing but numbers; whether it equals a float is not modelled."""
    if isinstance(other, numbers.Number):
        x._refuse(f"comparison with a {type(other).__name__}")
    return False


def _formula(kind: str, *args: Any) -> Bool:
    candidate = Bool(kind, args)
    return _bool_of.setdefault(candidate._key, candidate)


def int_var(name: str, low: int | None = None, high: int | None = None) -> Int:
    """Declare an integer variable; a second declaration must repeat the bounds."""
    variable = _intern_atom("var", (name,), low, high)
    atom = ATOMS[variable.terms[0][0][0]]
    assert (atom.low, atom.high) == (low, high), f"{name} was declared with other bounds"
    return variable


def bool_var(name: str) -> Bool:
    """Declare a truth-value variable."""
    return _formula("var", name)


def atom(uid: int) -> IntLike:
    """The integer that is an atom alone."""
    return _make({(uid,): 1}, 0)


def cell(array: str, index: IntLike) -> Int:
    """The integer at ``index`` of an array of which nothing else is known."""
    return _intern_atom("cell", (array, index))


def at_most_zero(x: IntLike) -> BoolLike:
    """``x <= 0`` in normal form: coprime coefficients, constant rounded to an integer bound."""
    if isinstance(x, int):
        return x <= 0
    low, high = bounds(x)
    if high is not None and high <= 0:
        return True
    if low is not None and low > 0:
        return False
    divisor = math.gcd(*(c for _, c in x.terms))
    if divisor > 1:
        x = _divided(x, divisor, -(-x.constant // divisor))
    return _formula("le", x)


def is_zero(x: IntLike) -> BoolLike:
    """``x == 0`` in normal form: coprime coefficients, the first one positive."""
    if isinstance(x, int):
        return x == 0
    low, high = bounds(x)
    divisor = math.gcd(*(c for _, c in x.terms))
    if (low is not None and low > 0) or (high is not None and high < 0) or x.constant % divisor:
        return False
    if x.terms[0][1] < 0:
        divisor = -divisor
    return _formula("eq", _divided(x, divisor, x.constant // divisor) if divisor != 1 else x)


def _divided(x: Int, divisor: int, constant: int) -> Int:
    """The sum of ``x``'s terms by a divisor of all their coefficients, and of a constant."""
    divided = _interned(tuple((m, c // divisor) for m, c in x.terms), constant)
    assert isinstance(divided, Int)
    return divided


def negation(x: BoolLike) -> BoolLike:
    """The formula that holds exactly where ``x`` does not."""
    if isinstance(x, bool):
        return not x
    if x._negation is None:
        x._negation = opposite = _negated(x)
        if isinstance(opposite, Bool) and opposite._negation is None:
            opposite._negation = x
    return x._negation


def _negated(x: Bool) -> BoolLike:
    if x.kind == "le":
        return at_most_zero(1 - x.args[0])
    if x.kind == "and":
        return disjunction(negation(part) for part in x.args)
    if x.kind == "or":
        return conjunction(negation(part) for part in x.args)
    inner: Bool = x.args[0] if x.kind == "not" else _formula("not", x)
    return inner


def conjunction(parts: Iterable[BoolLike]) -> BoolLike:
    """All of ``parts``; True where there are none."""
    return _gather("and", parts, absorbing=False)


def disjunction(parts: Iterable[BoolLike]) -> BoolLike:
    """Any of ``parts``; False where there are none."""
    return _gather("or", parts, absorbing=True)


def _gather(kind: str, parts: Iterable[BoolLike], *, absorbing: bool) -> BoolLike:
    kept: dict[int, Bool] = {}
    for part in parts:
        if isinstance(part, bool):
            if part is absorbing:
                return absorbing
            continue
        for piece in part.args if part.kind == kind else (part,):
            if piece.kind not in ("and", "or") and id(negation(piece)) in kept:
                return absorbing
            kept[id(piece)] = piece
    if not kept:
        return not absorbing
    return next(iter(kept.values())) if len(kept) == 1 else _formula(kind, *kept.values())


def conjuncts(x: BoolLike) -> tuple[BoolLike, ...]:
    """Formulas that hold together exactly where ``x`` does; none for True."""
    if x is True:
        return ()
    return x.args if isinstance(x, Bool) and x.kind == "and" else (x,)


def disjuncts(x: BoolLike) -> tuple[BoolLike, ...]:
    """Formulas one of which holds exactly where ``x`` does; none for False."""
    if x is False:
        return ()
    return x.args if isinstance(x, Bool) and x.kind == "or" else (x,)


def excludes(x: BoolLike, comparison: BoolLike) -> bool:
    """Whether each way for ``x`` to hold has a comparison that adds up to more than 0 with this.

    Two sums of at most 0 do not: that is seen from the normal forms and the bounds declared.
    """
    if isinstance(x, bool):
        return not x
    if isinstance(comparison, bool) or comparison.kind != "le":
        return False
    if x.kind == "le":
        low, _ = bounds(x.args[0] + comparison.args[0])
        return low is not None and low > 0
    if x.kind in ("and", "or"):
        each = (excludes(part, comparison) for part in x.args)
        return any(each) if x.kind == "and" else all(each)
    return False


def choose(condition: BoolLike, then: Any, otherwise: Any) -> Any:
    """``then if condition else otherwise`` without taking a side."""
    if isinstance(condition, Bool):
        known = implied(condition)
        condition = condition if known is None else known
    if isinstance(condition, bool):
        return then if condition else otherwise
    if then is otherwise:
        return then
    if isinstance(then, bool | Bool) and isinstance(otherwise, bool | Bool):
        return (condition & then) | (negation(condition) & otherwise)
    if isinstance(then, int | Int) and isinstance(otherwise, int | Int):
        if condition.kind == "not":
            condition, then, otherwise = condition.args[0], otherwise, then
        low, high = _hull(bounds(then), bounds(otherwise))
        return _intern_atom("choice", (condition, then, otherwise), low, high)
    raise Unsupported(f"a choice between {type(then).__name__} and {type(otherwise).__name__}")


def int_of(x: BoolLike | IntLike) -> IntLike:
    """Python's ``int(x)``: 1 for true, 0 for false, numbers as they are."""
    number: IntLike = choose(x, 1, 0) if isinstance(x, bool | Bool) else x
    return number


def floor_div(a: IntLike, b: IntLike) -> IntLike:
    """Python's ``a // b``.

    Raises:
        ZeroDivisionError: ``b`` is 0, or may be on the current path and the path takes that side.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    low, high = bounds(b)
    if high is not None and high < 0:
        return floor_div(-a, -b)
    if low is None or low <= 0:
        if b == 0:
            raise ZeroDivisionError("integer division or modulo by zero")
        if b < 0:
            return floor_div(-a, -b)
    whole, rest = _multiples_of(b, a)
    if isinstance(rest, int) and isinstance(b, int):
        return whole + rest // b
    if isinstance(rest, int) and rest in (0, -1):
        return whole + rest  # 0 // b is 0 and -1 // b is -1 for every b > 0
    chosen = _only_choice(rest)
    if chosen is not None:
        # A quotient of a choice is a choice of quotients: what a side leaves is one known form.
        condition, then, otherwise = chosen
        of_sides: IntLike = choose(condition, floor_div(then, b), floor_div(otherwise, b))
        return whole + of_sides
    if isinstance(rest, Int) and rest.terms[0][1] < 0:
        # One form for floor and ceiling: (-a) // b == -((a - 1) // b) - 1 for every b > 0.
        return whole - floor_div(-rest - 1, b) - 1
    rest_low, rest_high = bounds(rest)
    quotient = _intern_atom(
        "div",
        (rest, b),
        None if rest_low is None else (0 if rest_low >= 0 else rest_low),
        None if rest_high is None else (-1 if rest_high < 0 else rest_high),
    )
    result: IntLike = quotient + whole
    return result


def _only_choice(x: IntLike) -> tuple[Bool, IntLike, IntLike] | None:
    """Split ``x`` by the one choice that it is linear in: condition, ``x`` if so, ``x`` if not."""
    if isinstance(x, int):
        return None
    choices = [(m, c) for m, c in x.terms if any(ATOMS[uid].kind == "choice" for uid in m)]
    if len(choices) != 1 or len(choices[0][0]) != 1:
        return None
    (uid,), coefficient = choices[0]
    condition, then, otherwise = ATOMS[uid].args
    without = _make(dict(x.terms) | {(uid,): 0}, x.constant)
    return condition, without + coefficient * then, without + coefficient * otherwise


def _multiples_of(b: IntLike, a: IntLike) -> tuple[IntLike, IntLike]:
    """Split ``a`` into ``b * whole + rest`` as far as the normal forms show it."""
    if isinstance(a, int):
        return 0, a
    if isinstance(b, int):
        whole = {m: c // b for m, c in a.terms}
        rest = {m: c % b for m, c in a.terms}
        return _make(whole, a.constant // b), _make(rest, a.constant % b)
    if len(b.terms) != 1 or b.constant or b.terms[0][1] != 1:
        return 0, a
    factor = b.terms[0][0]
    whole_terms, rest_terms, constant = {}, {}, 0
    for m, c in a.terms:
        left = _without(m, factor)
        if left is None:
            rest_terms[m] = c
        elif left:
            whole_terms[left] = c
        else:
            constant = c
    return _make(whole_terms, constant), _make(rest_terms, a.constant)


def _without(monomial: Monomial, factor: Monomial) -> Monomial | None:
    left = list(monomial)
    for uid in factor:
        if uid not in left:
            return None
        left.remove(uid)
    return tuple(left)


def bounds(x: IntLike) -> tuple[int | None, int | None]:
    """Least and greatest value that the declarations alone allow; None is no bound."""
    if isinstance(x, int):
        return x, x
    if x._bounds is None:
        x._bounds = _bounds(x)
    return x._bounds


def _bounds(x: Int) -> tuple[int | None, int | None]:
    low: int | None = x.constant
    high: int | None = x.constant
    for monomial, c in x.terms:
        product: tuple[int | None, int | None] = (1, 1)
        for uid in monomial:
            product = _product(product, (ATOMS[uid].low, ATOMS[uid].high))
        least, most = product if c > 0 else (product[1], product[0])
        low = None if low is None or least is None else low + c * least
        high = None if high is None or most is None else high + c * most
    return low, high


def _product(
    a: tuple[int | None, int | None], b: tuple[int | None, int | None]
) -> tuple[int | None, int | None]:
    if a == (1, 1):
        return b
    if a[0] is None or b[0] is None or a[0] < 0 or b[0] < 0:
        return None, None
    return a[0] * b[0], None if a[1] is None or b[1] is None else a[1] * b[1]


def _hull(
    a: tuple[int | None, int | None], b: tuple[int | None, int | None]
) -> tuple[int | None, int | None]:
    low = None if a[0] is None or b[0] is None else min(a[0], b[0])
    high = None if a[1] is None or b[1] is None else max(a[1], b[1])
    return low, high


def show(x: Any) -> str:
    """A term as text, for messages."""
    if isinstance(x, Int):
        parts = [f"{c}*{'*'.join(_show_atom(u) for u in m)}" for m, c in x.terms]
        if x.constant:
            parts.append(str(x.constant))
        return " + ".join(part.removeprefix("1*") for part in parts)
    if isinstance(x, Bool):
        if x.kind in ("le", "eq"):
            return f"({show(x.args[0])} {'<=' if x.kind == 'le' else '=='} 0)"
        if x.kind == "var":
            return str(x.args[0])
        if x.kind == "not":
            return f"not {show(x.args[0])}"
        return "(" + f" {x.kind} ".join(show(part) for part in x.args) + ")"
    return repr(x)


def _show_atom(uid: int) -> str:
    atom = ATOMS[uid]
    if atom.kind == "var":
        return str(atom.args[0])
    if atom.kind == "div":
        return f"({show(atom.args[0])})//({show(atom.args[1])})"
    if atom.kind == "cell":
        return f"{atom.args[0]}[{show(atom.args[1])}]"
    return "({1} if {0} else {2})".format(*map(show, atom.args))
