"""Whether the estimators of two trees can differ, for each kind of step that both have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from models import smt, term
from models.evaluate import Evaluator
from models.lift import Exploration, NotUnderstood, variants_of
from models.predict import LiftedTree
from models.prove import in_numbers
from models.term import BoolLike, IntLike
from spec.vocabulary import Situation

#: Follow from what a release is, and are no part of what a step is asked.
_OF_THE_RELEASE = ("num_tokens_behind_checkpoint",)
#: Order in which the values of a step where they differ are made least.
_LEAST_FIRST = (
    *("num_prefill_checkpoint_blocks", "num_speculative_blocks", "prefill_end"),
    *("block_size", "hash_block_size", "prefill_checkpoint_alignment"),
    *("cache_hit_alignment_tokens", "num_external_tokens", "num_hit_blocks"),
    *("num_local_computed_tokens", "total_computed_tokens", "num_tokens_main_model"),
    *("num_tokens", "table_length", "prefill_length", "num_request_tokens"),
    *("hit_is_evictable", "hit_is_of_this_step", "has_left_over_checkpoint"),
)


class Comparison(Enum):
    """What can be said of two estimators in one kind of step."""

    EQUAL = "EQUAL"
    DIFFER = "DIFFER"
    UNKNOWN = "UNKNOWN"
    NOT_COMPARABLE = "NOT_COMPARABLE"


@dataclass(frozen=True)
class Difference:
    """How two estimators compare in one kind of step.

    Attributes:
        comparison: EQUAL in every step that both trees have; DIFFER in some.
        situation: The least step where they differ.
        estimates: What the two then estimate, in blocks.
        reason: Why nothing can be said, where that is so.
    """

    comparison: Comparison
    situation: Situation | None = None
    estimates: tuple[int, int] | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` holds of it."""
        return {
            "comparison": self.comparison.value,
            "situation": None if self.situation is None else asdict(self.situation),
            "estimates": None if self.estimates is None else list(self.estimates),
            "reason": self.reason,
        }


def difference(
    tree: LiftedTree, baseline: LiftedTree, family: str, tags: tuple[str, ...]
) -> Difference:
    """Compare the estimates of two trees in all steps of one kind.

    Unsat iff the two estimate the same in every step that both have; a model is a step where they
    differ.
    """
    for traits in (tree.traits, baseline.traits):
        reason = traits.why_not(family, tags)
        if reason is not None:
            return Difference(Comparison.NOT_COMPARABLE, reason=reason)
    unknown = None
    theirs = variants_of(baseline.traits, family)
    for variant in variants_of(tree.traits, family):
        if variant not in theirs:
            continue
        try:
            explorations = [one.exploration(family, tags, variant) for one in (tree, baseline)]
        except NotUnderstood as error:
            return Difference(Comparison.UNKNOWN, reason=str(error))
        found = _between(*explorations)
        if found.comparison is Comparison.DIFFER:
            return found
        unknown = unknown or (found if found.comparison is Comparison.UNKNOWN else None)
    return unknown or Difference(Comparison.EQUAL)


def _between(ours: Exploration, theirs: Exploration) -> Difference:
    question = smt.Question()
    question.add(*ours.assumptions.values(), *theirs.assumptions.values())
    question.add(*_same(ours.situation, theirs.situation), _differ(ours, theirs))
    result = question.ask()
    if result.answer is smt.Answer.UNSAT:
        return Difference(Comparison.EQUAL)
    if result.answer is smt.Answer.UNKNOWN:
        return Difference(Comparison.UNKNOWN, reason=result.reason)
    evaluator = Evaluator(question.minimize(result.values, _order(ours.situation)))
    estimates = [
        evaluator.number(path.step.estimate)
        for exploration in (ours, theirs)
        for path in exploration.paths
        if evaluator.truth(path.condition)
    ]
    situation = in_numbers(ours.situation, evaluator)
    return Difference(Comparison.DIFFER, situation, (estimates[0], estimates[1]))


def _differ(ours: Exploration, theirs: Exploration) -> BoolLike:
    """The formula of all steps that come to two estimates; those that raise come to none."""
    return term.disjunction(
        term.conjunction((one.condition, other.condition, unequal))
        for one in ours.paths
        for other in theirs.paths
        if one.step.raised is None and other.step.raised is None
        for unequal in [term.negation(one.step.estimate == other.step.estimate)]
        if unequal is not False
    )


def _same(ours: Any, theirs: Any) -> Iterator[BoolLike]:
    """Yield a formula for each number that the two situations must agree in."""
    for field in fields(ours):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if hasattr(one, "__dataclass_fields__"):
            yield from _same(one, other)
        elif field.name not in _OF_THE_RELEASE:
            yield one == other


def _order(situation: Situation) -> Sequence[IntLike]:
    values = {**vars(situation), **vars(situation.call), **vars(situation.geometry)}
    terms = [values[name] for name in _LEAST_FIRST]
    numbers = [term.int_of(one) for one in terms if isinstance(one, term.Int | term.Bool)]
    return [one for one in numbers if term.bounds(one)[0] is not None]
