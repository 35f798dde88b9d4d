from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import smt, term
from models.evaluate import Evaluator, value_of
from models.path import Path, following
from models.term import Bool, Int, Unsupported
from spec.logic import cdiv, choose, count, greatest, implies, least, negation

X = term.int_var("x")
Y = term.int_var("y", 1)
Z = term.int_var("z", 0, 5)
W = term.int_var("w", None, -1)
P = term.bool_var("p")
TERMS = {"x": X, "y": Y, "z": Z, "w": W, "p": P}

# ---- laws ---------------------------------------------------------------------------------------

#: A law holds if the solver finds no values that break it.
LAWS: dict[str, Any] = {
    "addition commutes": X + Z == Z + X,
    "multiplication distributes": X * (Y + Z) == X * Y + X * Z,
    "division and remainder make the whole": X // Y * Y + X % Y == X,
    "the remainder of a positive divisor is at least 0": X % Y >= 0,
    "the remainder is below a positive divisor": X % Y < Y,
    "the remainder of a negative divisor is at most 0": X % W <= 0,
    "a quotient by a greater divisor of a positive number is 0": implies((Z < Y), Z // Y == 0),
    "ceiling and floor differ by at most 1": cdiv(X, Y) - X // Y <= 1,
    "ceiling division covers": cdiv(X, Y) * Y >= X,
    "ceiling division wastes less than one block": cdiv(X, Y) * Y < X + Y,
    "division is monotone": implies(X <= Z, X // Y <= Z // Y),
    "ceiling division is monotone": implies(X <= Z, cdiv(X, Y) <= cdiv(Z, Y)),
    "an absolute value is not negative": abs(X) >= 0,
    "the lesser is one of both": (least(X, Z) == X) | (least(X, Z) == Z),
    "the greater is no less than either": (greatest(X, Z) >= X) & (greatest(X, Z) >= Z),
    "a choice takes the first side": implies(P, choose(P, X, Z) == X),
    "a choice takes the other side": implies(negation(P), choose(P, X, Z) == Z),
    "counting is 1 or 0": (count(P) == 1) ^ (count(P) == 0),
    "comparison is total": (X <= Z) | (Z <= X),
    "strictly less excludes equal": negation((X < Z) & (X == Z)),
    "exclusive or": (P ^ (X <= 0)) == ((X <= 0) != P),
}
#: No law: the solver finds values that break it.
NO_LAWS: dict[str, Any] = {
    "division is not exact": X // Y * Y == X,
    "ceiling is not floor": cdiv(X, Y) == X // Y,
    "floor is not truncation": implies(X < 0, X // Y == -(-X // Y)),
    "the remainder may be 0": X % Y > 0,
    "division is not strictly monotone": implies(X < Z, X // Y < Z // Y),
    "a product may be less than a factor": X * Z >= X,
    "the lesser is not always the first": least(X, Z) == X,
    "a choice depends on its condition": choose(P, X, Z) == X,
    "an absolute value may differ from the number": abs(X) == X,
    "counting may be 1": count(P) == 0,
}


def broken(law: Any) -> smt.Answer:
    return smt.Question().ask(negation(law)).answer


@pytest.mark.parametrize("law", LAWS)
def test_a_law_has_no_counterexample(law: str) -> None:
    """Arithmetic on terms, as the solver sees it, obeys the laws of Python's integers."""
    assert broken(LAWS[law]) is smt.Answer.UNSAT


@pytest.mark.parametrize("no_law", NO_LAWS)
def test_what_is_no_law_has_a_counterexample(no_law: str) -> None:
    """The encoding does not make false statements true."""
    assert broken(NO_LAWS[no_law]) is smt.Answer.SAT


# ---- normal forms -------------------------------------------------------------------------------

#: Two ways to write one term.
SAME: dict[str, tuple[Any, Any]] = {
    "cancelled": (X + Z - Z, X),
    "a common factor of a bound": (2 * X <= 1, X <= 0),
    "a common factor of a bound, rounded up": (3 * X >= 4, X >= 2),
    "a common factor of an equation": (4 * X == 8, X == 2),
    "both sides of a comparison": (X <= Z, Z >= X),
    "strict and weak": (X < Z, X + 1 <= Z),
    "an equation turned round": (X == Z, Z == X),
    "the negation of a comparison": (negation(X <= Z), X > Z),
    "a negation twice": (negation(negation(X == Z)), X == Z),
    "De Morgan": (negation((X <= 0) & P), (X > 0) | negation(P)),
    "a multiple of the divisor": ((X * Y + Z) // Y, X + Z // Y),
    "a constant multiple of the divisor": ((6 * X + 5) // 3, 2 * X + 1),
    "a negative divisor": (X // W, -X // -W),
    "a remainder of a multiple": ((X * Y) % Y, 0),
    "floor of a negative and ceiling": (-(-X // Y), (X - 1) // Y + 1),
    "the same condition twice": (P & P, P),
    "a condition and its negation": (P & negation(P), False),
    "a condition or its negation": (P | negation(P), True),
    "a bound of a declaration": (Z <= 5, True),
    "beyond a bound of a declaration": (Z >= 6, False),
    "a product of declared signs": (Y * Z >= 0, True),
    "an odd number is not even": (2 * X == 2 * Z + 1, False),
    "0 divided": (0 // Y, 0),
    "-1 divided": (-1 // Y, -1),
    "a choice between the same": (choose(P, X, X), X),
    "a choice by a negation": (choose(negation(P), X, Z), choose(P, Z, X)),
    "bool as a number": (P + 1, count(P) + 1),
    "rounding an integer": (round(X), X),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_normal_forms_are_one_object(name: str) -> None:
    """What is written in two ways but is one normal form costs no solver call."""
    one, other = SAME[name]

    assert one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def test_a_variable_keeps_its_bounds() -> None:
    """Declaring a variable again with other bounds would make earlier simplifications wrong."""
    with pytest.raises(AssertionError, match="other bounds"):
        term.int_var("z", 0, 6)


def test_copies_are_the_term_itself() -> None:
    """Terms are compared by identity, so there must not be a second object for one term."""
    assert copy.copy(X) is X
    assert copy.deepcopy([P, X + 1])[1] is X + 1


# ---- random terms -------------------------------------------------------------------------------


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "divmod": lambda a, b: sum(divmod(a, b)),
    "cdiv": cdiv,
    "min": least,
    "max": greatest,
    "neg": lambda a: -a,
    "abs": abs,
    "choose": choose,
    "count": count,
}
LOGIC: dict[str, Callable[..., Any]] = {
    "<=": lambda a, b: a <= b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    ">": lambda a, b: a > b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "and": lambda p, q: p & q,
    "or": lambda p, q: p | q,
    "xor": lambda p, q: p ^ q,
    "iff": lambda p, q: p == q,
    "not": negation,
    "choose": choose,
}


def _grown(numbers: Any, formulas: Any) -> tuple[Any, Any]:
    """Numbers and formulas one operation deeper."""
    deeper_numbers = st.one_of(
        numbers,
        *(
            st.tuples(st.just(op), numbers, numbers)
            for op in ("+", "-", "*", "//", "%", "divmod", "cdiv", "min", "max")
        ),
        *(st.tuples(st.just(op), numbers) for op in ("neg", "abs")),
        st.tuples(st.just("choose"), formulas, numbers, numbers),
        st.tuples(st.just("count"), formulas),
    )
    deeper_formulas = st.one_of(
        formulas,
        *(st.tuples(st.just(op), numbers, numbers) for op in ("<=", "<", ">=", ">", "==", "!=")),
        *(st.tuples(st.just(op), formulas, formulas) for op in ("and", "or", "xor", "iff")),
        st.tuples(st.just("not"), formulas),
        st.tuples(st.just("choose"), formulas, formulas, formulas),
    )
    return deeper_numbers, deeper_formulas


def _expressions(depth: int) -> tuple[Any, Any]:
    numbers: Any = st.sampled_from(["x", "y", "z", "w"]) | st.integers(-7, 7)
    formulas: Any = st.just("p") | st.booleans()
    for _ in range(depth):
        numbers, formulas = _grown(numbers, formulas)
    return numbers, formulas


#: Expressions as nested tuples, read alike for Python's numbers and for terms.
NUMBERS, FORMULAS = _expressions(depth=3)
VALUES = st.fixed_dictionaries(
    {
        "x": st.integers(-9, 9),
        "y": st.integers(1, 9),
        "z": st.integers(0, 5),
        "w": st.integers(-9, -1),
        "p": st.booleans(),
    }
)


def read(expression: Any, variables: dict[str, Any]) -> Any:
    """The value of an expression, in numbers or in terms, as the variables are."""
    if isinstance(expression, str):
        return variables[expression]
    if not isinstance(expression, tuple):
        return expression
    operation, *operands = expression
    values = [read(operand, variables) for operand in operands]
    is_logic = operation in LOGIC and operation not in ARITHMETIC
    return (LOGIC if is_logic else ARITHMETIC)[operation](*values)


def read_both(expression: Any, values: dict[str, Any]) -> tuple[Any, Any, Path]:
    """The value in Python's numbers, the term, and the path on which it was made."""
    path = Path(values, ())
    with following(path):
        try:
            made = read(expression, TERMS)
        except ZeroDivisionError:
            made = ZeroDivisionError
    try:
        expected = read(expression, values)
    except ZeroDivisionError:
        expected = ZeroDivisionError
    return expected, made, path


@settings(max_examples=2500, deadline=None)
@given(NUMBERS | FORMULAS, VALUES)
def test_terms_count_as_python_does(expression: Any, values: dict[str, Any]) -> None:
    """A term's value is what Python computes from the same values, zero divisors included."""
    expected, made, _ = read_both(expression, values)

    if expected is ZeroDivisionError or made is ZeroDivisionError:
        assert made is expected
    else:
        assert value_of(made, values) == expected
        assert isinstance(made, bool | Bool) == isinstance(expected, bool)


@settings(max_examples=1500, deadline=None)
@given(NUMBERS, VALUES)
def test_bounds_hold(expression: Any, values: dict[str, Any]) -> None:
    """No value that the declarations allow lies outside a term's bounds."""
    expected, made, _ = read_both(expression, values)

    if made is not ZeroDivisionError:
        low, high = term.bounds(made)
        assert low is None or low <= expected
        assert high is None or expected <= high


@settings(max_examples=500, deadline=None)
@given(FORMULAS, VALUES)
def test_a_negation_holds_exactly_where_the_formula_does_not(
    expression: Any, values: dict[str, Any]
) -> None:
    """A formula and its negation never agree, whatever form they have."""
    _, made, _ = read_both(expression, values)

    if made is not ZeroDivisionError:
        assert value_of(term.negation(made), values) is not value_of(made, values)
        assert term.negation(term.negation(made)) is made or not isinstance(made, Bool)


@pytest.mark.parametrize(
    ("formula", "comparison", "is_excluded"),
    [
        (X + Y + Z <= 3, X + Y >= 4, True),  # Z is not negative
        (X + Y + Z <= 3, X + Y >= 3, False),
        ((X + Z <= 3) & P, X >= 4, True),
        ((X + Z <= 3) | (X + Y <= 4), X >= 4, True),
        ((X + Z <= 3) | P, X >= 4, False),
        (P, X >= 4, False),
        (X == 3, X >= 4, False),  # so it is, but only sums of two are looked at
        (X <= 3, (X >= 4) & P, False),
        (False, P, True),
        (True, X >= 4, False),
        (X <= 3, True, False),
    ],
)
def test_a_formula_excludes_a_comparison_only_where_no_values_keep_both(
    formula: Any, comparison: Any, is_excluded: bool
) -> None:
    """What is seen to be excluded is so, as the solver confirms."""
    assert term.excludes(formula, comparison) is is_excluded
    if is_excluded:
        question = smt.Question()
        question.add(formula, comparison)
        assert question.ask().answer is smt.Answer.UNSAT


def test_the_parts_of_a_formula_say_the_same_together() -> None:
    """Of a conjunction all, of a disjunction any, of others the formula itself."""
    for formula in (X <= 3, P, (X <= 3) & P, (X <= 3) | P, True, False):
        assert term.conjunction(term.conjuncts(formula)) is formula
        assert term.disjunction(term.disjuncts(formula)) is formula


def test_an_absent_variable_has_a_declared_value() -> None:
    """A sample that leaves variables out stays within the declarations."""
    for variable in (X, Y, Z, W):
        low, high = term.bounds(variable)
        value = Evaluator({}).number(variable)
        assert low is None or low <= value
        assert high is None or value <= high


# ---- what has no meaning ------------------------------------------------------------------------

REFUSED: dict[str, Callable[[], Any]] = {
    "true division": lambda: X / 2,
    "true division by a term": lambda: 2 / X,
    "power": lambda: X**2,
    "shift": lambda: X << 1,
    "shift by a term": lambda: 1 >> X,
    "index": lambda: [1, 2][Z],  # type: ignore[call-overload]
    "repetition": lambda: [1] * Z,
    "float": lambda: float(X),  # type: ignore[arg-type]
    "int": lambda: int(X),  # type: ignore[call-overload]
    "hash": lambda: {X: 1},
    "hash of a formula": lambda: {P},
    "rounding to digits": lambda: round(X, 1),
    "comparison with a float": lambda: X == 1.0,
    "comparison of a formula with a float": lambda: P == 1.0,
    "membership among floats": lambda: X in [1.5],
    "a choice of texts": lambda: choose(P, "a", "b"),
    "a test outside a path": lambda: bool(P),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_a_guess_is_refused(name: str) -> None:
    """Operations that would need a value are Unsupported, not some value."""
    with pytest.raises(Unsupported):
        REFUSED[name]()


@pytest.mark.parametrize("operation", [lambda: X + "a", lambda: X & 1, lambda: ~P, lambda: X < ""])
def test_what_python_refuses_for_numbers_is_a_type_error(operation: Callable[[], Any]) -> None:
    """Operands that terms know nothing of are left to Python, which refuses them."""
    with pytest.raises(TypeError):
        operation()


@pytest.mark.parametrize("text", [str, repr, "{}".format, lambda x: f"{x:>3}", lambda x: f"{x!r}"])
def test_terms_are_no_text_while_code_runs(text: Callable[[Any], str]) -> None:
    """What lifted code did with the text of a term would be a guess; a message is none."""
    assert text(X + 1) == "x + 1"
    with following(Path({}, ())), pytest.raises(Unsupported):
        text(X + 1)


def test_a_number_equals_nothing_but_numbers() -> None:
    """Comparison with None or a text is False, as for every number."""
    assert (X == None) is False  # noqa: E711
    assert (X != "x") is True
    assert (P == None) is False  # noqa: E711
    assert isinstance(X, Int)
