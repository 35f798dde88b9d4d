from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import RELEASES

from spec.assumptions import (
    ASSUMPTIONS,
    OF_GROUPS,
    OF_SOME_RELEASES,
    OF_THE_COORDINATOR,
    OF_THE_GATE,
    Assumption,
)
from spec.families import FAMILIES, family_of
from spec.logic import implies
from spec.theorems import OBLIGATIONS, THEOREMS, Need, Pool, in_obligation
from spec.vocabulary import Call, Geometry, Situation, Step

#: How a reason names where a rule is kept: a file of vLLM, then a symbol in it.
PLACE = re.compile(r"([\w/]+\.py), ([\w.]+)")

GEOMETRY = Geometry(16, 4, 3, 1, 4, False)
#: A first admission of 40 tokens, which keeps a checkpoint.
FIRST = Situation(GEOMETRY, Call(40, 40, 0, 0), 0, 40)
#: The same of a request that has computed 4 of them.
LATER = replace(FIRST, call=Call(40, 40, 4, 4), table_length=4)
#: What 0.31.0 does then: state, drafts and checkpoint.
STEP = Step(
    *(5, 5, 5, 6, True),
    gate=5,
    held=5,
    reserved_at_startup=6,
    removed_blocks=True,
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
    assert theorem.witness(LATER, STEP) is True
    idle = replace(STEP, estimate=0, drawn=0, held=0, removed_blocks=False)
    assert theorem.witness(LATER, idle) is False
    assert theorem.claim(FIRST, STEP, POOL, NEED) is True


#: One change to a step that keeps all claims, and the claims that it breaks.
BREAKS: list[tuple[dict[str, object], set[str]]] = [
    (
        {"drawn": 6},
        {
            "no-undercount",
            "exact-estimate",
            "allocation-succeeds",
            "matches-intended",
            "admission-keeps-reserve",
            "gate-covers-first-step",
        },
    ),
    ({"drawn": 4}, {"exact-estimate", "matches-intended"}),
    ({"dry_run": 6}, {"dry-run-parity"}),
    ({"dry_run_left_state": False}, {"dry-run-pure"}),
    (
        {"dry_run": 6, "estimate": 6, "drawn": 6, "gate": 6},
        {"bounded-demand", "matches-intended", "admission-keeps-reserve", "admission-fits-whole"},
    ),
    (
        {"dry_run": -1, "estimate": -1, "drawn": -1},
        {"estimate-nonnegative", "matches-intended", "allocation-succeeds"},
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
    ({"gate": 4}, {"gate-covers-first-step", "gate-covers-lifetime"}),
    ({"gate": 6}, {"admission-fits-whole"}),
    ({"removal_kept_state": False}, {"removal-keeps-state"}),
    ({"removal_freed_skipped": False}, {"removal-frees-skipped"}),
    ({"removal_freed_ended": False}, {"removal-frees-ended"}),
    ({"state_is_in_place": False}, {"live-state-kept"}),
    ({"only_states_are_held": False}, {"only-states-are-held"}),
    ({"drawn_are_held": False}, {"conservation"}),
    ({"held": 6}, {"gate-covers-lifetime"}),
    ({"held": 7}, {"gate-covers-lifetime", "peak-within-sizing"}),
    ({"held_before": 2}, {"eventually-admitted"}),
    ({"deferred": True}, {"matches-intended"}),
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


@pytest.mark.parametrize("slug", THEOREMS)
def test_a_step_that_was_put_off_is_no_fault(slug: str) -> None:
    """Of a step that waits for its hit the dry run is claimed to say the same, and to be pure."""
    waits = replace(FIRST, num_hit_blocks=1, hit_is_of_this_step=True)
    put_off = replace(
        STEP, deferred=True, estimate=10**6, dry_run=10**6 + 1, drawn=99, table_length=0
    )
    theorem, impure = THEOREMS[slug], replace(STEP, deferred=True, dry_run_left_state=False)

    assert theorem.holds(waits, put_off, POOL, NEED) is (slug != "dry-run-parity")
    assert theorem.holds(waits, impure, POOL, NEED) is (slug != "dry-run-pure")


def test_a_step_that_should_have_waited_for_its_hit_is_a_fault() -> None:
    """The intended model lets no step start from a state that is written in the same step."""
    waits = replace(FIRST, num_hit_blocks=1, hit_is_of_this_step=True)

    for slug, theorem in THEOREMS.items():
        assert theorem.holds(waits, STEP, POOL, NEED) is (slug != "matches-intended")


@pytest.mark.parametrize("slug", THEOREMS)
def test_a_step_that_was_refused_is_no_fault(slug: str) -> None:
    """Of a step that did nothing only the dry run is claimed anything."""
    refused = replace(STEP, refused=True, estimate=99, drawn=0, table_length=0)

    assert THEOREMS[slug].holds(FIRST, refused, POOL, NEED) is (slug != "dry-run-parity")


def test_a_theorem_that_is_not_about_every_family_says_why() -> None:
    """Which families a theorem is about is written down, with a reason for the others."""
    assert {slug: t.families for slug, t in THEOREMS.items() if t.families} == {
        "removal-keeps-state": ("promoted", "running", "checkpoint", "own-tail", "drafts"),
        "removal-frees-skipped": ("promoted", "running", "checkpoint", "own-tail", "drafts"),
        "removal-frees-ended": ("running",),
        "live-state-kept": tuple(family for family in FAMILIES if family != "first"),
        "gate-covers-lifetime": ("running", "checkpoint"),
        "new-columns-returned": ("first", "running", "checkpoint", "own-tail", "drafts"),
        "admission-fits-whole": (
            "first",
            "hit-full",
            "hit-partial",
            "external-sync",
            "external-async",
            "resumed",
        ),
        "gate-covers-first-step": (
            "first",
            "hit-full",
            "hit-partial",
            "external-sync",
            "external-async",
            "resumed",
        ),
    }
    for theorem in THEOREMS.values():
        others = [family for family in FAMILIES if theorem.why_not(family) is not None]
        assert set(others) == (set(FAMILIES) - set(theorem.families) if theorem.families else set())
        assert all(theorem.why_not(family) for family in others)


def test_a_claim_is_about_what_keeps_its_own_assumptions_only() -> None:
    """A decoding step longer than a block is nothing that the sizing is claimed of."""
    holds_too_many = replace(STEP, held=7)
    decoding = replace(LATER, prefill_length=4, call=Call(8, 8, 4, 4))
    too_long = replace(decoding, call=Call(9, 9, 4, 4))

    for slug in ("peak-within-sizing", "eventually-admitted"):
        theorem = THEOREMS[slug]
        broken = replace(holds_too_many, held_before=7)
        assert not theorem.holds(decoding, broken, POOL, NEED)
        assert theorem.holds(too_long, broken, POOL, NEED)
        assert theorem.shows(decoding, STEP)
        assert not theorem.shows(too_long, STEP)


def test_a_tag_can_be_what_a_theorem_is_not_about() -> None:
    """No decoding step that a block holds keeps a checkpoint, so nothing is claimed of one."""
    theorem = THEOREMS["peak-within-sizing"]

    assert theorem.why_not("drafts") is None
    assert theorem.why_not("drafts", ("overwide",)) is None
    assert "reaches no checkpoint" in str(theorem.why_not("drafts", ("checkpoint", "overwide")))
    assert "taken back" in str(theorem.why_not("checkpoint", ("overwide",)))
    assert theorem.why_not("promoted", ("overwide",)) is None


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
    assert in_obligation(FIRST, "first", ("checkpoint",)) is True
    assert in_obligation(FIRST, "first", ()) is False


def kinds_found() -> set[tuple[str, tuple[str, ...]]]:
    """Kinds of the small steps with any table, at B 2, H 1 and K 0 or 1."""
    found = set()
    flags = list(itertools.product((False, True), repeat=3))
    for blocks, start, end, excess in itertools.product((0, 1), range(6), range(1, 9), (0, 1)):
        geometry = Geometry(2, 1, 1, blocks, 1, False)
        for parked, owns, decodes in flags:
            length = -(-start // 2) + 1 + excess
            call = Call(end, end, start, start)
            s = Situation(geometry, call, length, start if decodes else 99)
            s = replace(s, parked=parked, owns_partial_tail=owns)
            if 0 < start < end and all(a.holds(s) is True for a in ASSUMPTIONS):
                kind = [o for o in OBLIGATIONS if o[0] == family_of(s) and in_obligation(s, *o)]
                assert len(kind) == 1, s
                found.update(kind)
    return found


def test_a_step_with_a_table_has_obligations_under_exactly_one_kind() -> None:
    """Tags split families of requests with a table: no step is left out, and none counts twice."""
    admissions = {
        "first",
        "hit-full",
        "hit-partial",
        "external-sync",
        "external-async",
        "resumed",
    }

    assert kinds_found() == {kind for kind in OBLIGATIONS if kind[0] not in admissions}


#: Every assumption about a situation, whether in force always, for some releases, of the gate or
#: of several groups.
EVERY = (*ASSUMPTIONS, *OF_SOME_RELEASES, *OF_THE_GATE, *OF_GROUPS)
#: Releases that a reason speaks of, where it does not speak of the newest.
OLDER = re.compile(r"\b(0\.\d+\.0)\b")


def releases_named(reason: str) -> list[tuple[str, str, str]]:
    """Release, path and symbol of each place: those of its clause, or the newest."""
    found, spoken_of = [], (RELEASES[-1],)
    for clause in reason.split("; "):
        named = tuple(OLDER.findall(clause))
        if named and re.match(r"before ", clause):
            spoken_of = tuple(r for r in RELEASES if r < named[0])
        elif named and re.match(r"from ", clause):
            spoken_of = tuple(r for r in RELEASES if r >= named[0])
        elif named:
            spoken_of = named
        found += [(r, *place) for r in spoken_of for place in PLACE.findall(clause)]
    return found


def defines(text: str, symbol: str) -> bool:
    """Whether a module's text has a class, a function or a name, and the names within it."""
    return all(re.search(rf"\b{name}\b", text) for name in symbol.strip(".").split("."))


@pytest.mark.parametrize("assumption", [*EVERY, *OF_THE_COORDINATOR], ids=lambda a: a.slug)
def test_an_assumption_names_who_keeps_it(
    release_trees: Mapping[str, Path], assumption: Assumption
) -> None:
    """Every reason names files and symbols that the releases it speaks of have."""
    places = PLACE.findall(assumption.reason)

    assert places
    assert len(re.findall(r"\.py\b", assumption.reason)) == len(places)
    named = releases_named(assumption.reason)
    assert {place for _, *place in map(list, named) for place in [tuple(place)]} == set(places)
    for release, path, symbol in named:
        text = (release_trees[release] / "vllm" / path).read_text()
        assert defines(text, symbol), (release, path, symbol)


#: A situation that keeps every assumption that is in force for all families.
KEPT = Situation(GEOMETRY, Call(60, 56, 20, 20), 5, 100, num_request_tokens=100)
#: The same with all tokens found in the prefix cache, and with some brought by a connector.
HIT = replace(KEPT, table_length=0, num_hit_blocks=2)
LOADED = replace(HIT, call=Call(60, 56, 40, 20), num_external_tokens=20)
PARKED = replace(LOADED, call=Call(40, 40, 40, 20), loads_asynchronously=True)


def with_sizes(situation: Situation, **sizes: object) -> Situation:
    return replace(situation, geometry=replace(situation.geometry, **sizes))  # type: ignore[arg-type]


AT_BLOCKS = with_sizes(
    KEPT,
    hash_block_size=16,
    cache_hit_alignment_tokens=16,
    prefill_checkpoint_alignment=1,
    num_tokens_behind_checkpoint=0,
)
EAGLE = with_sizes(KEPT, drop_eagle_checkpoint_block=True)
OWN_TAIL = replace(KEPT, owns_partial_tail=True)

#: Situations that keep an assumption, beside `KEPT`; of those that contradict it, all.
KEEPING: dict[str, tuple[Situation, ...]] = {
    "step-computes-tokens": (KEPT, PARKED, replace(KEPT, call=Call(21, 21, 20, 20))),
    "computed-tokens-are-local-or-external": (KEPT, HIT, LOADED, PARKED),
    "hit-ends-with-local-tokens": (
        *(HIT, LOADED, replace(LOADED, num_hit_blocks=0), replace(LOADED, num_hit_blocks=1)),
    ),
    "table-holds-computed-state": (KEPT, HIT, replace(KEPT, table_length=6)),
    "tail-ends-inside-block": (KEPT, OWN_TAIL, replace(KEPT, call=Call(60, 56, 32, 32))),
    "parked-tail-ends-table": (
        *(replace(OWN_TAIL, parked=True), replace(OWN_TAIL, table_length=6)),
        replace(KEPT, parked=True, table_length=6),
    ),
    "left-over-needs-checkpoint-blocks": (KEPT, replace(KEPT, has_left_over_checkpoint=True)),
    "hits-are-whole-blocks": (KEPT, replace(HIT, call=Call(60, 56, 32, 32))),
    "checkpoint-at-block-boundary": (
        AT_BLOCKS,
        with_sizes(KEPT, num_prefill_checkpoint_blocks=0),
    ),
    "checkpoint-where-hits-end": tuple(
        with_sizes(KEPT, cache_hit_alignment_tokens=unit) for unit in (4, 16, 32, 160)
    ),
    "eagle-drop-leaves-tokens": (KEPT, with_sizes(EAGLE, num_tokens_behind_checkpoint=0)),
    "lookahead-hash-leaves-tokens": (
        with_sizes(EAGLE, num_tokens_behind_checkpoint=0),
        *(with_sizes(KEPT, num_tokens_behind_checkpoint=tokens) for tokens in range(1, 9)),
    ),
    "request-holds-all-tokens": (KEPT, replace(KEPT, num_request_tokens=101)),
    "attention-covers-mamba": (
        HIT,
        *(replace(KEPT, attention_table_length=columns) for columns in (2, 3, 9)),
    ),
    "attention-hit-holds-local-tokens": (
        KEPT,
        *(replace(HIT, num_evictable_attention_hits=number) for number in (0, 1, 2)),
    ),
}
#: Situations that break an assumption, and no other one that is always in force.
BREAKING: dict[str, tuple[Situation, ...]] = {
    "hash-divides-block": (with_sizes(KEPT, hash_block_size=3, cache_hit_alignment_tokens=3),),
    "speculation-in-range": (
        replace(with_sizes(KEPT, num_speculative_blocks=9), table_length=11),
        with_sizes(KEPT, num_speculative_blocks=-1),
    ),
    "at-most-one-checkpoint-block": (with_sizes(KEPT, num_prefill_checkpoint_blocks=2),),
    "step-computes-tokens": (
        replace(KEPT, call=Call(20, 20, 20, 20)),
        replace(PARKED, call=Call(41, 41, 40, 20)),
        replace(PARKED, loads_asynchronously=False),
    ),
    "lookahead-adds-tokens": (replace(KEPT, call=Call(55, 56, 20, 20)),),
    "computed-tokens-are-local-or-external": (
        replace(KEPT, call=Call(60, 56, 20, 16)),
        replace(LOADED, call=Call(60, 56, 41, 20)),
        replace(LOADED, call=Call(60, 56, 20, 20), num_external_tokens=20),
    ),
    "hit-ends-with-local-tokens": (
        replace(KEPT, num_hit_blocks=2),
        replace(KEPT, call=Call(60, 56, 20, 0), num_external_tokens=20),
        replace(HIT, num_hit_blocks=1),
        replace(HIT, num_hit_blocks=0),
        replace(LOADED, num_hit_blocks=3),
    ),
    "retention-decides-prefill-end": (replace(KEPT, call=Call(60, 56, 20, 20, 99)),),
    "prompt-has-tokens": (replace(KEPT, prefill_length=0),),
    "table-holds-computed-state": (
        replace(KEPT, table_length=4),
        replace(KEPT, call=Call(60, 56, 0, 0)),
    ),
    "tail-ends-inside-block": (replace(OWN_TAIL, call=Call(60, 56, 32, 32)),),
    "parked-tail-ends-table": (replace(OWN_TAIL, parked=True, table_length=6),),
    "left-over-needs-checkpoint-blocks": (
        replace(
            with_sizes(KEPT, num_prefill_checkpoint_blocks=0),
            has_left_over_checkpoint=True,
        ),
    ),
    "release-is-dense": (replace(KEPT, call=Call(60, 56, 20, 20, 100)),),
    "hits-are-whole-blocks": (HIT, LOADED),
    "checkpoint-at-block-boundary": (
        with_sizes(AT_BLOCKS, hash_block_size=4),
        with_sizes(AT_BLOCKS, cache_hit_alignment_tokens=32),
        with_sizes(AT_BLOCKS, prefill_checkpoint_alignment=2),
        with_sizes(AT_BLOCKS, num_tokens_behind_checkpoint=1),
    ),
    "checkpoint-at-hash-boundary": (with_sizes(KEPT, cache_hit_alignment_tokens=16),),
    "checkpoint-where-hits-end": (
        with_sizes(KEPT, cache_hit_alignment_tokens=8),
        with_sizes(KEPT, cache_hit_alignment_tokens=24),
    ),
    "one-token-behind-checkpoint": (
        with_sizes(KEPT, num_tokens_behind_checkpoint=0),
        with_sizes(KEPT, num_tokens_behind_checkpoint=2),
    ),
    "eagle-drop-leaves-tokens": (EAGLE, with_sizes(KEPT, num_tokens_behind_checkpoint=0)),
    "lookahead-hash-leaves-tokens": (
        EAGLE,
        with_sizes(KEPT, num_tokens_behind_checkpoint=0),
        with_sizes(KEPT, num_tokens_behind_checkpoint=9),
    ),
    "request-holds-all-tokens": (
        replace(KEPT, num_request_tokens=99),
        replace(KEPT, num_request_tokens=102),
        replace(KEPT, prefill_length=50, num_request_tokens=51),
    ),
    "attention-covers-mamba": (
        replace(KEPT, attention_table_length=1),
        replace(HIT, attention_table_length=1),
    ),
    "attention-hit-holds-local-tokens": (
        replace(KEPT, num_evictable_attention_hits=1),
        replace(HIT, num_evictable_attention_hits=3),
        replace(HIT, num_evictable_attention_hits=-1),
    ),
}


@pytest.mark.parametrize("assumption", EVERY, ids=lambda a: a.slug)
def test_an_assumption_excludes_what_it_says(assumption: Assumption) -> None:
    """Each assumption holds for ordinary steps, and alone excludes the ones that break it."""
    always = {a.slug: a for a in ASSUMPTIONS}

    for kept in KEEPING.get(assumption.slug, (KEPT,)):
        assert assumption.holds(kept) is True
        assert all(a.holds(kept) is True for a in ASSUMPTIONS)
    for broken in BREAKING[assumption.slug]:
        assert assumption.holds(broken) is False
        found = {slug for slug, a in always.items() if not a.holds(broken)}
        assert found == {assumption.slug} & set(always), broken


def test_every_assumption_has_a_step_that_breaks_it() -> None:
    """Nothing is assumed that is true of everything."""
    assert set(BREAKING) == {assumption.slug for assumption in EVERY}
    assert len(EVERY) == len(BREAKING)


def test_connectives_are_those_of_logic() -> None:
    """Implication fails only for a true premise and a false conclusion."""
    table = {(p, q): implies(p, q) for p in (False, True) for q in (False, True)}

    assert [pair for pair, holds in table.items() if not holds] == [(True, False)]
