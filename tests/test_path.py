from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_term import read

from models import term
from models.evaluate import Evaluator
from models.path import MAX_ROUNDS, NeedsDecision, Path, following
from models.term import Bool, Unsupported
from spec.logic import negation

A = term.int_var("a")
M = term.int_var("m", 0)
Q = term.bool_var("q")
R = term.bool_var("r")
TERMS = {"a": A, "m": M, "q": Q, "r": R}
#: All values of a small box: what holds everywhere must hold there.
BOX = [
    dict(zip("amqr", values, strict=True))
    for values in itertools.product(range(-3, 4), range(4), (False, True), (False, True))
]

_SIDES = st.sampled_from(["a", "m"]) | st.integers(-4, 4)
_SIDES = _SIDES | st.tuples(st.sampled_from("+-"), _SIDES, _SIDES)
_SIDES = _SIDES | st.tuples(st.just("*"), st.integers(-3, 3), _SIDES)
_LITERALS: Any = st.sampled_from(["q", "r"]) | st.tuples(
    st.sampled_from(["<=", "<", ">=", ">", "==", "!="]), _SIDES, _SIDES
)
FORMULAS: Any = st.recursive(
    _LITERALS,
    lambda inner: (
        st.tuples(st.just("not"), inner) | st.tuples(st.sampled_from(["and", "or"]), inner, inner)
    ),
    max_leaves=5,
)


def made_of(expressions: list[Any]) -> list[Any]:
    return [read(expression, TERMS) for expression in expressions]


@settings(max_examples=400, deadline=None)
@given(st.lists(FORMULAS, max_size=4), st.lists(FORMULAS, min_size=1, max_size=8))
def test_what_is_implied_holds_wherever_the_facts_do(facts: Any, asked: Any) -> None:
    """A path never takes a formula for settled that the facts leave open, or settle otherwise."""
    where = [values for values in BOX if all(read(fact, values) for fact in facts)]
    assume(where)
    path = Path(where[0], tuple(made_of(facts)))

    for expression, formula in zip(asked, made_of(asked), strict=True):
        said = path.implied(formula) if isinstance(formula, Bool) else formula
        if said is not None:
            assert all(read(expression, values) is said for values in where)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(BOX), st.lists(FORMULAS, min_size=1, max_size=8))
def test_the_literals_are_the_exact_condition(sample: dict[str, Any], asked: Any) -> None:
    """Whoever satisfies a path's literals would have decided everything on it the same way."""
    path = Path(sample, ())
    with following(path):
        sides = [bool(formula) for formula in made_of(asked)]

    condition = term.conjunction(path.literals)
    where = [values for values in BOX if Evaluator(values).truth(condition)]
    assert sample in where
    for values in where:
        assert [read(expression, values) for expression in asked] == sides


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BOX), FORMULAS, FORMULAS, FORMULAS)
def test_supposing_decides_nothing_and_leaves_nothing(
    sample: dict[str, Any], first: Any, supposed: Any, asked: Any
) -> None:
    """After looking at what would follow, the path knows what it knew, and took no decision."""
    path = Path(sample, ())
    with following(path):
        bool(read(first, TERMS))
        before = path.literals[:], path._upper.copy(), path._true.copy()
        formula = read(asked, TERMS)
        implied_before = path.implied(formula) if isinstance(formula, Bool) else None

        with path.supposing(read(supposed, TERMS)):
            try:
                bool(formula)
            except NeedsDecision:
                assert path.implied(formula) is None
            assert path.speculating

        assert (path.literals, path._upper, path._true) == before
        assert not path.speculating
        if isinstance(formula, Bool):
            assert path.implied(formula) is implied_before


def test_supposing_is_undone_after_an_exception() -> None:
    """A look that fails leaves no supposition behind, at any depth."""
    path = Path({"a": 1}, ())
    with following(path):
        with pytest.raises(KeyError), path.supposing(A <= 0), path.supposing(M <= 0):
            raise KeyError
        assert path.implied(A <= 0) is None
        assert path.implied(M <= 0) is None
        assert not path.speculating


def test_a_decision_is_taken_once() -> None:
    """What a path has decided, or follows from it linearly, gets no second literal."""
    path = Path({"a": 3, "m": 1}, ())
    with following(path):
        assert A >= 3
        assert A + 1 > 2
        assert not A <= 2
        assert A != 1
        assert (A - 1 >= 0) | Q

    assert path.literals == [A >= 3]


def test_assumptions_need_no_literal() -> None:
    """What holds on every path is no part of a path's condition."""
    path = Path({"a": 3, "q": False}, (A == 3, negation(Q)))
    with following(path):
        assert A == 3
        assert A < 4
        assert not Q

    assert path.literals == []


def test_following_ends_with_the_block() -> None:
    """Outside the block nothing decides, not even after an exception; an outer path goes on."""
    outer, inner = Path({"a": 1}, ()), Path({"a": -1}, ())
    with following(outer):
        with following(inner):
            assert A < 0
        with pytest.raises(KeyError), following(inner):
            raise KeyError
        assert A > 0
    with pytest.raises(Unsupported):
        bool(A > 5)
    assert term.text_allowed


def test_a_line_of_lifted_code_may_not_decide_for_ever() -> None:
    """A loop whose end is symbolic is given up, since it has no last path."""
    code: dict[str, Any] = {"__name__": "_capproof_tree_of_a_test"}
    exec("def loop(n):\n    rounds = 0\n    while rounds < n:\n        rounds += 1\n", code)

    with following(Path({"a": MAX_ROUNDS - 1}, ())):
        code["loop"](A)
    with following(Path({"a": 10**9}, ())), pytest.raises(Unsupported, match="rounds"):
        code["loop"](A)
