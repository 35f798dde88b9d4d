from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from models import term
from models.evaluate import value_of
from models.substitute import Substitution

X, Y, Z = (term.int_var(f"substituted_{name}", 0) for name in "xyz")
B = term.int_var("substituted_size", 1)
P, Q = (term.bool_var(f"substituted_{name}") for name in "pq")


def one_of(*terms: Any) -> st.SearchStrategy[Any]:
    """One of some terms, which cannot be hashed as `sampled_from` wants."""
    return st.integers(0, len(terms) - 1).map(lambda index: terms[index])


_NUMBERS = st.recursive(
    one_of(X, Y, Z, 2, -3),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: two[0] + two[1]),
        st.tuples(inner, inner).map(lambda two: two[0] * two[1]),
        inner.map(lambda one: one // B),
        inner.map(lambda one: term.cell("substituted_table", one)),
        st.tuples(one_of(P, Q, X <= Y, X + Y == Z), inner, inner).map(
            lambda three: term.choose(*three)
        ),
    ),
    max_leaves=6,
)
_VALUES = st.fixed_dictionaries(
    {f"substituted_{name}": st.integers(0, 9) for name in "xyz"}
    | {f"substituted_{name}": st.booleans() for name in "pq"}
    | {"substituted_size": st.integers(1, 5)}
)


@given(_NUMBERS, _VALUES)
def test_a_term_put_in_place_of_a_variable_has_its_value(x: Any, values: dict[str, Any]) -> None:
    """Substituting and evaluating is evaluating with the variable at the term's value."""
    table = {"substituted_table": {0: 7, 3: 5}}
    put = {"substituted_x": Y + 2 * Z, "substituted_p": Y <= Z}
    known = {**values, **table}

    result = Substitution(put).number(x)

    taken = {name: value_of(new, known) for name, new in put.items()}
    assert value_of(result, known) == value_of(x, {**known, **taken})


@given(_NUMBERS, _NUMBERS, _VALUES)
def test_a_formula_keeps_its_truth(x: Any, y: Any, values: dict[str, Any]) -> None:
    """Comparisons, negations and connectives are put together again."""
    formula = term.disjunction(
        (term.conjunction((x <= y, P)), term.negation(Q), term.negation(x == y))
    )
    put = {"substituted_z": X + 1, "substituted_q": X <= 4}

    result = Substitution(put).truth(formula)

    taken = {name: value_of(new, values) for name, new in put.items()}
    assert value_of(result, values) == value_of(formula, {**values, **taken})


def test_what_is_not_replaced_stays_the_same_object() -> None:
    """Terms are interned, so an unchanged one is equal by identity."""
    x = (X + 3) // B + term.choose(P, Y, Z)

    assert Substitution({"somebody_else": 1}).number(x) is x
