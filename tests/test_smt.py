from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from test_term import FORMULAS, NUMBERS, TERMS, VALUES, P, X, Y, Z, read_both

from models import smt, term
from models.evaluate import Evaluator
from models.smt import Answer, ModelMismatch, Question


def pinned(values: dict[str, Any]) -> list[Any]:
    """Formulas that leave each variable one value."""
    return [TERMS[name] == value for name, value in values.items()]


@settings(max_examples=500, deadline=None)
@given(NUMBERS | FORMULAS, VALUES)
def test_the_solver_and_python_agree_on_a_term(expression: Any, values: dict[str, Any]) -> None:
    """With every variable given, a term can have Python's value for the solver, and no other."""
    expected, made, path = read_both(expression, values)
    if expected is ZeroDivisionError:
        return
    question = Question()
    question.add(*pinned(values), *path.literals)

    assert question.ask(made == expected).answer is Answer.SAT
    assert question.ask(made != expected).answer is Answer.UNSAT


@settings(max_examples=200, deadline=None)
@given(FORMULAS, VALUES)
def test_a_model_is_a_model_in_python_too(expression: Any, values: dict[str, Any]) -> None:
    """Every value that the solver proposes is one for which Python says the same."""
    _, made, path = read_both(expression, values)
    if made is ZeroDivisionError:
        return
    question = Question()
    question.add(*path.literals)

    result = question.ask(made)

    if result.answer is Answer.SAT:
        assert Evaluator(result.values).truth(made)


def test_arrays_are_functions() -> None:
    """Cells of one array at equal places are equal, and their values come back by place."""
    here, there = term.cell("array", X), term.cell("array", Z)
    question = Question()

    assert question.ask(X == Z, here != there).answer is Answer.UNSAT
    result = question.ask(X == 3, Z == 4, here == 10, there == 20)
    assert result.values["array"] == {3: 10, 4: 20}


def test_asking_leaves_no_trace() -> None:
    """What is asked besides holds for that question only; what is added stays."""
    question = Question()
    question.add(X >= 1)

    assert question.ask(X <= 0).answer is Answer.UNSAT
    assert question.ask(X == 7).answer is Answer.SAT
    question.add(X <= 0)
    assert question.ask().answer is Answer.UNSAT


def test_a_core_names_what_was_needed() -> None:
    """A refutation names the formulas it used, and these alone refute."""
    named = {"above": X >= 5, "unused": Y == 1, "below": X <= 3}

    core = Question(named).ask().core

    assert set(core) == {"above", "below"}
    assert Question({slug: named[slug] for slug in core}).ask().answer is Answer.UNSAT


def test_least_values_come_first_in_their_order() -> None:
    """Among all models, the one with the least values in the given order is taken."""
    question = Question()
    question.add(Z + Y >= 6, Z >= 2)
    start = question.ask(Y >= 50)

    for order, least in (([Z, Y], {"z": 2, "y": 4}), ([Y, Z], {"y": 1, "z": 5})):
        assert question.minimize(start.values, order) == least


def test_least_values_keep_what_is_asked_besides() -> None:
    """A condition given for one minimisation holds in what it returns."""
    question = Question()
    question.add(Z <= Y)
    start = question.ask(Z >= 3)

    values = question.minimize(start.values, [Z], Z >= 3)

    assert values["z"] == 3


def test_what_was_least_once_binds_no_later_question() -> None:
    """Not even of a variable, or a quotient, that was first met while the least was sought."""
    question = Question()
    question.add(Z <= 40)
    start = question.ask(Z >= 3)

    question.minimize({**start.values, "y": 9, "x": 9}, [Y], Z >= 3, X // Y >= 1)

    assert question.ask(Z == 0).answer is Answer.SAT
    found = question.ask(Y == 5, X // Y == 7)
    assert found.answer is Answer.SAT
    assert found.values["x"] // 5 == 7
    assert question.ask(X // Y == 7, X == 0, Y == 5).answer is Answer.UNSAT


def test_unknown_is_an_answer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that exceeds its budget is unknown, with the solver's words and the budget."""
    monkeypatch.setattr(smt, "RESOURCE_LIMIT", 1)
    cubes = X * X * X + Y * Y * Y == 3 * Z * Z * Z + 1

    result = Question().ask(cubes, Y >= 10, X >= 10, (X * X) // Y == 7)

    assert result.answer is Answer.UNKNOWN
    assert "budget: 1 solver steps" in str(result.reason)


def test_a_solver_that_runs_on_without_counting_steps_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where steps do not end an attempt, time does: unknown, and not a run without an end."""
    monkeypatch.setattr(smt, "RESOURCE_LIMIT", 0)  # none
    monkeypatch.setattr(smt, "ATTEMPTS", {0: 0.05, 1: 0.06, 2: 0.07})
    x, y, z = (term.int_var(f"side_{name}", 1) for name in "xyz")
    cubes = x * x * x + y * y * y == z * z * z

    result = Question().ask(cubes)

    assert result.answer is Answer.UNKNOWN
    assert "attempts of 0.05, 0.06, 0.07 s" in str(result.reason)


@pytest.mark.parametrize("sabotage", ["le", "eq", "choice", "div"])
def test_a_wrong_encoding_is_noticed(monkeypatch: pytest.MonkeyPatch, sabotage: str) -> None:
    """A model of an encoding that says something else than the term is never handed out."""
    translation = smt._Translation()
    made, made_atom, honest = translation._made, translation._made_atom, smt._Translation()

    def formula_of(x: term.Bool) -> Any:
        return smt.z3.Not(made(x)) if x.kind == sabotage else made(x)

    def atom_of(uid: int) -> Any:
        return made_atom(uid) + 1 if term.ATOMS[uid].kind == sabotage else made_atom(uid)

    monkeypatch.setattr(translation, "_made", formula_of)
    monkeypatch.setattr(translation, "_made_atom", atom_of)
    monkeypatch.setattr(translation, "_conditions_of", honest._conditions_of)
    monkeypatch.setattr(smt, "_TRANSLATION", translation)
    formula = {
        "le": X <= 3,
        "eq": X == 3,
        "choice": term.choose(P, X, Z) == 4,
        "div": X // Y == 4,
    }[sabotage]

    with pytest.raises(ModelMismatch):
        Question().ask(formula)


def test_a_refutation_says_which_of_the_given_formulas_it_used() -> None:
    """Those it did not need are left out, and none of them binds a later question."""
    question = Question({"least": X >= 3})
    result = question.ask(X + Z <= 3, given=[Z >= 1, Y <= 5, P])

    assert result.answer is Answer.UNSAT
    assert (result.core, result.given) == (("least",), (Z >= 1,))
    assert question.ask(X + Z <= 3, given=[P]).answer is Answer.SAT
    assert question.ask(Z <= 0).answer is Answer.SAT


def test_a_model_keeps_the_given_formulas() -> None:
    """What is given holds in the answer, whichever question it was given with first."""
    question = Question()
    for number in (7, 9, 7):
        result = question.ask(X >= 1, given=[number == X])
        assert (result.answer, result.values["x"]) == (Answer.SAT, number)
    assert question.ask(X == 8).answer is Answer.SAT


def test_a_term_is_translated_for_each_question_with_its_side_conditions() -> None:
    """A quotient that another question knew is one here, too."""
    for _ in range(2):
        assert Question().ask(X // Y * Y > X, Y >= 1).answer is Answer.UNSAT


def test_a_script_says_the_same_question() -> None:
    """The exported SMT-LIB script has the same answer as the question."""
    for formula, answer in ((X // Y * Y + X % Y == X, "unsat"), (X // Y * Y == X, "sat")):
        question = Question()
        question.add(term.negation(formula))
        solver = smt.z3.Solver()
        solver.from_string(question.smtlib())
        assert str(solver.check()) == answer
