"""Where the estimators of two trees give different answers to the same step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from models import smt, term
from models.evaluate import Evaluator
from models.lift import Exploration, variants_of
from models.predict import LiftedTree
from models.prove import in_numbers, variables_in_order
from models.term import BoolLike, IntLike
from spec.vocabulary import Situation


@dataclass(frozen=True)
class Difference:
    """A step that two trees estimate differently, the least one that was found.

    Attributes:
        situation: What is asked, in the words of the first tree.
        estimate: Blocks that the first tree asks for; None where it raises.
        other_estimate: Blocks that the second tree asks for; None where it raises.
    """

    situation: Situation
    estimate: int | None
    other_estimate: int | None


@dataclass(frozen=True)
class Comparison:
    """What is known of two estimators in one kind of step.

    Attributes:
        difference: Where they differ, None where they never do or that is not known.
        reason: Why it is not known, None where it is.
    """

    difference: Difference | None = None
    reason: str | None = None


def compare(one: LiftedTree, other: LiftedTree, family: str, tags: tuple[str, ...]) -> Comparison:
    """Compare two trees in every setting that both know.

    Unsat iff both estimates are the same number in every step that both can be asked; a model is a
    step where they differ.

    Raises:
        NotUnderstood: The lifter does not understand the code of one of them.
    """
    for tree in (one, other):
        reason = tree.traits.why_not(family, tags)
        if reason is not None:
            return Comparison(reason=reason)
    shared = set(variants_of(other.traits, family))
    for variant in variants_of(one.traits, family):
        if variant in shared:
            found = _compare(*(tree.exploration(family, tags, variant) for tree in (one, other)))
            if found != Comparison():
                return found
    return Comparison()


def _compare(one: Exploration, other: Exploration) -> Comparison:
    differs = term.negation(_estimate(one) == _estimate(other))
    question = smt.Question()
    question.add(*one.assumptions.values(), *other.assumptions.values(), differs)
    question.add(*_same(one.situation, other.situation))
    result = question.ask()
    if result.answer is smt.Answer.UNKNOWN:
        return Comparison(reason=result.reason)
    if result.answer is smt.Answer.UNSAT:
        return Comparison()
    values = question.minimize(result.values, variables_in_order())
    evaluator = Evaluator(values)
    found = [_none_if_raised(evaluator.number(_estimate(each))) for each in (one, other)]
    return Comparison(Difference(in_numbers(one.situation, evaluator), *found))


#: What two releases say in other words of one and the same request.
_IN_OTHER_WORDS = ("num_tokens_behind_checkpoint",)


def _same(one: Any, other: Any) -> Iterator[BoolLike]:
    """Equations of two situations: what is fixed in one tree may be free in the other."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(a):
            yield from _same(a, b)
        elif field.name not in _IN_OTHER_WORDS:
            yield term.int_of(a) == term.int_of(b)


#: Stands for the estimate of a step that raised before there was one.
_RAISED = -(2**40)


def _estimate(exploration: Exploration) -> IntLike:
    """The estimate of whichever path is taken; exactly one is."""
    estimate: IntLike = _RAISED
    for path in exploration.paths:
        condition: BoolLike = path.condition
        taken = _RAISED if path.step.raised is not None else path.step.estimate
        estimate = term.choose(condition, taken, estimate)
    return estimate


def _none_if_raised(estimate: int) -> int | None:
    return None if estimate == _RAISED else estimate
