from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from models import smt, term
from models.evaluate import Evaluator
from models.smt import Answer
from spec.families import (
    FAMILIES,
    checkpoint_position,
    family_of,
    reserves_checkpoint,
    tags_of,
)
from spec.logic import negation
from spec.vocabulary import Call, Geometry, Situation


def number(name: str, low: int = 0) -> Any:
    return term.int_var(f"any_{name}", low)


def any_situation() -> Situation:
    """Every field symbolic, none tied to another."""
    return Situation(
        geometry=Geometry(
            block_size=number("block_size", 1),
            hash_block_size=number("hash_block_size", 1),
            num_speculative_blocks=number("num_speculative_blocks"),
            num_prefill_checkpoint_blocks=number("num_prefill_checkpoint_blocks"),
            prefill_checkpoint_alignment=number("prefill_checkpoint_alignment", 1),
            drop_eagle_checkpoint_block=term.bool_var("any_drop_eagle_checkpoint_block"),
        ),
        call=Call(
            num_tokens=number("num_tokens"),
            num_tokens_main_model=number("num_tokens_main_model"),
            total_computed_tokens=number("total_computed_tokens"),
            num_local_computed_tokens=number("num_local_computed_tokens"),
            prefill_end=number("prefill_end"),
        ),
        table_length=number("table_length"),
        prefill_length=number("prefill_length"),
        num_hit_blocks=number("num_hit_blocks"),
        num_external_tokens=number("num_external_tokens"),
        loads_asynchronously=term.bool_var("any_loads_asynchronously"),
        parked=term.bool_var("any_parked"),
        preempted=term.bool_var("any_preempted"),
        owns_partial_tail=term.bool_var("any_owns_partial_tail"),
    )


MEMBERSHIP = {slug: family.holds(any_situation()) for slug, family in FAMILIES.items()}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(FAMILIES, 2)])
def test_families_are_disjoint(one: str, other: str) -> None:
    """No step whatever, possible or not, belongs to two families."""
    assert smt.Question().ask(MEMBERSHIP[one], MEMBERSHIP[other]).answer is Answer.UNSAT


def test_families_cover_every_step() -> None:
    """Every step belongs to a family."""
    outside = term.conjunction(negation(holds) for holds in MEMBERSHIP.values())

    assert smt.Question().ask(outside).answer is Answer.UNSAT


@pytest.mark.parametrize("slug", FAMILIES)
def test_no_family_is_empty(slug: str) -> None:
    """Each family has steps, and without it the others do not cover everything."""
    assert smt.Question().ask(MEMBERSHIP[slug]).answer is Answer.SAT


def a_situation(chance: random.Random) -> Situation:
    hash_block_size = chance.randrange(1, 5)
    start = chance.choice((0, chance.randrange(30)))
    end = start + chance.randrange(1, 40)
    return Situation(
        geometry=Geometry(
            hash_block_size * chance.randrange(1, 4),
            hash_block_size,
            chance.randrange(4),
            chance.randrange(2),
            chance.choice((1, 1, 2, hash_block_size)),
            chance.random() < 0.5,
        ),
        call=Call(end, end, start, start, chance.choice((0, 0, end, end + 1))),
        table_length=chance.choice((0, 3)),
        prefill_length=chance.choice((1, end, 60)),
        num_hit_blocks=chance.choice((0, 0, 2)),
        num_external_tokens=chance.choice((0, 0, 5)),
        loads_asynchronously=chance.random() < 0.5,
        parked=chance.random() < 0.3,
        preempted=chance.random() < 0.3,
        owns_partial_tail=chance.random() < 0.3,
    )


def position_by_counting(s: Situation) -> int:
    """The greatest hash boundary below the chunk's end, one lower under the EAGLE drop."""
    h, end = s.geometry.hash_block_size, s.call.num_tokens_main_model
    boundaries = list(range(0, end, h))
    keep = len(boundaries) - (1 if s.geometry.drop_eagle_checkpoint_block else 0)
    return boundaries[keep - 1] if keep > 0 else 0


def reserves_by_counting(s: Situation) -> bool:
    """Whether a checkpoint is kept, said with columns and ranges instead of arithmetic."""
    g, start, end = s.geometry, s.call.total_computed_tokens, s.call.num_tokens_main_model
    position = position_by_counting(s)
    column_of_token = [token // g.block_size for token in range(end)]
    column_before_last = column_of_token[end - 1] - 1
    initial_column = column_of_token[start - 1] if start else -1
    exportable = range(start + g.hash_block_size, end)
    return (
        g.num_prefill_checkpoint_blocks > 0
        and not (s.call.prefill_end and end < s.call.prefill_end)
        and start in range(0, end, g.hash_block_size)
        and position in exportable
        and position in range(start, end, g.prefill_checkpoint_alignment)
        and column_before_last > initial_column
    )


def family_by_cases(s: Situation) -> str:
    """The family as a decision tree."""
    if s.table_length:
        if s.parked:
            return "promoted"
        if s.owns_partial_tail:
            return "own-tail"
        if s.call.total_computed_tokens >= s.prefill_length:
            return "drafts"
        return "checkpoint" if reserves_by_counting(s) else "running"
    if s.preempted:
        return "resumed"
    if s.num_external_tokens:
        return "external-async" if s.loads_asynchronously else "external-sync"
    if not s.num_hit_blocks:
        return "first"
    ends_inside = s.call.num_local_computed_tokens % s.geometry.block_size
    return "hit-partial" if ends_inside else "hit-full"


def test_numbers_get_the_family_that_their_description_says() -> None:
    """The predicates agree with a decision tree and with counting, on every family."""
    chance = random.Random(7)
    seen = set()
    for _ in range(6000):
        s = a_situation(chance)
        assert checkpoint_position(s) == position_by_counting(s)
        assert reserves_checkpoint(s) is reserves_by_counting(s)
        assert family_of(s) == family_by_cases(s)
        assert [slug for slug, family in FAMILIES.items() if family.holds(s)] == [family_of(s)]
        seen.add((family_of(s), *tags_of(s)))

    assert {family for family, *_ in seen} == set(FAMILIES)
    assert ("first", "checkpoint", "eagle", "sparse") in seen
    assert not any("checkpoint" in tags for family, *tags in seen if family == "checkpoint")


def test_terms_and_numbers_get_the_same_family() -> None:
    """A predicate evaluated as a term says what it says of numbers."""
    chance = random.Random(8)
    names = {
        "geometry": (
            "block_size",
            "hash_block_size",
            "num_speculative_blocks",
            "num_prefill_checkpoint_blocks",
            "prefill_checkpoint_alignment",
            "drop_eagle_checkpoint_block",
        ),
        "call": (
            "num_tokens",
            "num_tokens_main_model",
            "total_computed_tokens",
            "num_local_computed_tokens",
            "prefill_end",
        ),
    }
    for _ in range(300):
        s = a_situation(chance)
        values = {
            f"any_{name}": getattr(getattr(s, part), name)
            for part, fields in names.items()
            for name in fields
        } | {f"any_{name}": value for name, value in vars(s).items() if name not in names}
        evaluator = Evaluator(values)
        assert [slug for slug, holds in MEMBERSHIP.items() if evaluator.truth(holds)] == [
            family_of(s)
        ]
