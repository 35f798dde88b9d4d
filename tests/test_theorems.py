from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from spec.assumptions import ASSUMPTIONS, OF_SOME_RELEASES
from spec.families import FAMILIES, family_of
from spec.logic import implies
from spec.theorems import OBLIGATIONS, THEOREMS, Need, Pool, in_obligation
from spec.vocabulary import Call, Geometry, Situation, Step

#: How a reason names where a rule is kept: a file of vLLM, then a symbol in it.
PLACE = re.compile(r"([\w/]+\.py), ([\w.]+)")

GEOMETRY = Geometry(16, 4, 3, 1, 4, False)
#: A first admission of 40 tokens, which keeps a checkpoint.
FIRST = Situation(GEOMETRY, Call(40, 40, 0, 0), 0, 40)
#: What 0.31.0 does then: state, drafts and checkpoint.
STEP = Step(
    *(5, 5, 5, 6, True),
    checkpoint_is_pending=True,
    checkpoint_position=36,
    checkpoint_column=1,
)
POOL = Pool(num_free_blocks=5, watermark_blocks=0, reserved_blocks=0)
NEED = Need(5)


@pytest.mark.parametrize("slug", THEOREMS)
def test_a_theorem_is_complete(slug: str) -> None:
    """Each theorem has a sentence, says how an answer reads, and has a witness and a source."""
    theorem = THEOREMS[slug]

    assert theorem.slug == slug
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", slug)
    assert theorem.sentence.endswith(".")
    assert re.fullmatch(r"Unsat iff .*; a model is .*\.", theorem.unsat_iff)
    assert theorem.source
    assert theorem.witness(FIRST, STEP) is True
    assert theorem.witness(FIRST, replace(STEP, estimate=0, drawn=0)) is False
    assert theorem.claim(FIRST, STEP, POOL, NEED) is True


#: One change to a step that keeps all claims, and the claims that it breaks.
BREAKS: list[tuple[dict[str, object], set[str]]] = [
    ({"drawn": 6}, {"no-undercount", "exact-estimate", "allocation-succeeds", "matches-intended"}),
    ({"drawn": 4}, {"exact-estimate", "matches-intended"}),
    ({"dry_run": 6}, {"dry-run-parity"}),
    ({"dry_run_left_state": False}, {"dry-run-pure"}),
    (
        {"dry_run": 6, "estimate": 6, "drawn": 6},
        {"bounded-demand", "matches-intended"},
    ),
    (
        {"dry_run": -1, "estimate": -1, "drawn": -1},
        {"estimate-nonnegative", "matches-intended"},
    ),
    ({"raised": "ValueError"}, {"allocation-succeeds"}),
    ({"table_length": 7}, {"state-invariant"}),
    ({"checkpoint_is_pending": False}, {"checkpoint-recorded"}),
    ({"checkpoint_position": 32}, {"checkpoint-recorded"}),
    ({"checkpoint_column": 2}, {"checkpoint-recorded"}),
    ({"checkpoint_block_is_held": False}, {"checkpoint-recorded"}),
    ({"returned_new_columns": False}, {"new-columns-returned"}),
    ({"no_block_is_twice": False}, {"no-block-twice"}),
    ({"column_to_retire": 0}, {"retirement-recorded"}),
    ({"tail_is_held": False}, {"state-invariant"}),
]


@pytest.mark.parametrize(("change", "broken"), BREAKS)
def test_each_claim_notices_its_own_fault(change: dict[str, object], broken: set[str]) -> None:
    """A step that is wrong in one way breaks the claims that speak of it, and no other."""
    step = replace(STEP, **change)  # type: ignore[arg-type]

    assert {
        slug for slug, theorem in THEOREMS.items() if not theorem.claim(FIRST, step, POOL, NEED)
    } == broken


def test_every_claim_is_broken_by_some_fault() -> None:
    """No claim of the catalogue is true of everything."""
    assert set().union(*(broken for _, broken in BREAKS)) == set(THEOREMS)


@pytest.mark.parametrize(
    ("pool", "succeeds"),
    [
        (Pool(5, 0, 0), False),  # The check passes and one block is missing.
        (Pool(6, 0, 0), True),
        (Pool(6, 1, 0), True),
        (Pool(5, 1, 0), True),  # The check does not pass.
        (Pool(5, 0, 1), True),
        (Pool(7, 1, 1), True),
    ],
)
def test_allocation_counts_against_what_the_check_allows(pool: Pool, succeeds: bool) -> None:
    """A step may fail where the check refuses it, and nowhere else."""
    short = replace(STEP, drawn=6)

    assert THEOREMS["allocation-succeeds"].claim(FIRST, short, pool, NEED) is succeeds


def test_only_allocation_speaks_of_steps_that_raise() -> None:
    """What a step that raised has drawn is no claim of the others."""
    speaking = [slug for slug, theorem in THEOREMS.items() if theorem.survives_exception]

    assert speaking == ["allocation-succeeds"]


def test_the_bound_does_not_depend_on_tokens() -> None:
    """`bounded-demand` allows the same number of blocks for 40 and for 700,000 tokens."""
    long = replace(FIRST, call=Call(700_000, 700_000, 0, 0))
    for estimate in range(10):
        step = replace(STEP, estimate=estimate)
        allowed = [THEOREMS["bounded-demand"].claim(s, step, POOL, NEED) for s in (FIRST, long)]
        assert allowed == [estimate <= 5] * 2


def test_obligations_are_about_families_that_exist() -> None:
    """Families and tags with obligations are in the vocabulary, and tags split a family."""
    assert {family for family, _ in OBLIGATIONS} <= set(FAMILIES)
    assert len(set(OBLIGATIONS)) == len(OBLIGATIONS)
    assert family_of(FIRST) == "first"
    assert in_obligation(FIRST, ("checkpoint",)) is True
    assert in_obligation(FIRST, ()) is False


@pytest.mark.parametrize("assumption", [*ASSUMPTIONS, *OF_SOME_RELEASES], ids=lambda a: a.slug)
def test_an_assumption_names_who_keeps_it(trees: Mapping[str, Path], assumption: object) -> None:
    """Every reason names files and symbols that 0.31.0 has."""
    places = PLACE.findall(assumption.reason)  # type: ignore[attr-defined]

    assert places
    assert len(re.findall(r"\.py\b", assumption.reason)) == len(places)  # type: ignore[attr-defined]
    for path, symbol in places:
        text = (trees["0.31.0"] / "vllm" / path).read_text()
        for name in symbol.strip(".").split("."):
            assert re.search(rf"\b{name}\b", text), (path, symbol)


#: A situation that keeps every assumption, and changes that break one each.
KEPT = Situation(GEOMETRY, Call(60, 56, 20, 20), 5, 100)
BROKEN = {
    "hash-divides-block": replace(KEPT, geometry=replace(GEOMETRY, hash_block_size=3)),
    "speculation-in-range": replace(
        KEPT, geometry=replace(GEOMETRY, num_speculative_blocks=9), table_length=11
    ),
    "at-most-one-checkpoint-block": replace(
        KEPT, geometry=replace(GEOMETRY, num_prefill_checkpoint_blocks=2)
    ),
    "step-computes-tokens": replace(KEPT, call=Call(20, 20, 20, 20)),
    "lookahead-adds-tokens": replace(KEPT, call=Call(55, 56, 20, 20)),
    "nothing-external": replace(KEPT, num_external_tokens=4),
    "retention-decides-prefill-end": replace(KEPT, call=Call(60, 56, 20, 20, 99)),
    "prompt-has-tokens": replace(KEPT, prefill_length=0),
    "admission-starts-at-zero": replace(KEPT, table_length=0),
    "table-holds-computed-state": replace(KEPT, table_length=6),
    "left-over-needs-checkpoint-blocks": replace(
        KEPT,
        geometry=replace(GEOMETRY, num_prefill_checkpoint_blocks=0),
        has_left_over_checkpoint=True,
    ),
    "release-is-dense": replace(KEPT, call=Call(60, 56, 20, 20, 100)),
}


@pytest.mark.parametrize("assumption", [*ASSUMPTIONS, *OF_SOME_RELEASES], ids=lambda a: a.slug)
def test_an_assumption_excludes_what_it_says(assumption: object) -> None:
    """Each assumption holds for an ordinary step, and alone excludes one that breaks it."""
    every = (*ASSUMPTIONS, *OF_SOME_RELEASES)
    slug = assumption.slug  # type: ignore[attr-defined]

    assert all(a.holds(KEPT) is True for a in every)
    others = {"release-is-dense"} if slug == "retention-decides-prefill-end" else set()
    assert {a.slug for a in every if not a.holds(BROKEN[slug])} == {slug} | others


def test_connectives_are_those_of_logic() -> None:
    """Implication fails only for a true premise and a false conclusion."""
    table = {(p, q): implies(p, q) for p in (False, True) for q in (False, True)}

    assert [pair for pair, holds in table.items() if not holds] == [(True, False)]
