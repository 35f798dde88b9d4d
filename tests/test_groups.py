"""The sum over groups: what it is made of, that it is the real one, and that faults are noticed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from conftest import CopyTree

from conformance.driver import core_driver
from conformance.generate import of_path
from conformance.predicted import scenario_of
from conformance.replay import Outcome, replay
from models import smt, term
from models.lift import NotUnderstood, Variant
from models.predict import LiftedTree
from models.prove import Prover, Verdict, prove
from spec.assumptions import MAMBA_GROUPS
from spec.theorems import OBLIGATIONS, THEOREMS, Asks

COORDINATOR_FILE = "vllm/v1/core/kv_cache_coordinator.py"
KV_CACHE_MANAGER_FILE = "vllm/v1/core/kv_cache_manager.py"
NEWEST = "0.33.0"
#: The first and the newest release; `make selfcheck` takes one of each shape of the calls.
SHOWN = ("0.24.0", NEWEST)
if os.environ.get("CAPPROOF_ALL_RELEASES"):
    SHOWN = ("0.24.0", "0.26.0", "0.29.0", "0.31.0", NEWEST)

CopyCore = Callable[..., Path]


@pytest.fixture
def copy_core(copy_tree: CopyTree) -> CopyCore:
    """Copies the core of the newest release; edits replace text in one of its files, once."""

    def copy(file: str, *edits: tuple[str, str]) -> Path:
        root = copy_tree(NEWEST)
        for old, new in edits:
            text = (root / file).read_text()
            assert old in text, old
            (root / file).write_text(text.replace(old, new, 1))
        return root

    return copy


def verdicts(root: Path, family: str, *theorems: str) -> dict[str, Verdict]:
    """Verdicts of the coordinator in the steps of a family without tags."""
    found = prove(
        LiftedTree(root), managers=("coordinator",), kinds=[(family, ())], theorems=theorems
    )
    return {obligation.theorem: obligation.verdict for obligation in found}


def kinds_of(tree: LiftedTree) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Kinds of step that a tree has."""
    return ((f, tags) for f, tags in OBLIGATIONS if tree.traits.why_not(f, tags) is None)


@pytest.mark.parametrize("release", SHOWN)
def test_the_real_allocate_slots_takes_every_path_as_lifted(
    release: str, release_trees: Mapping[str, Path], lifted_trees: Mapping[str, LiftedTree]
) -> None:
    """Each way through, of every kind of step, by a request that gets there, on both sides."""
    lifted, driver = lifted_trees[release], core_driver(release_trees[release])
    target, shown = f"vllm=={release}", 0
    for family, tags in kinds_of(lifted):
        for groups in MAMBA_GROUPS:
            joined = lifted.exploration(family, tags, Variant(), num_mamba_groups=groups)
            for path in joined.paths[::3]:
                for request, _ in of_path(joined, path, with_edges=False):
                    made = scenario_of(request, trees={target: lifted}, source="a path")
                    seen = replay(made, driver, target)
                    assert (made.manager, made.num_mamba_groups) == ("coordinator", groups)
                    assert seen.outcome is Outcome.REPRODUCED, (made.name, seen.detail)
                    shown += 1
    assert shown > 50


def test_an_estimate_that_forgets_a_group_is_refuted(copy_core: CopyCore) -> None:
    """A coordinator that returns the last group's number undercounts."""
    root = copy_core(
        COORDINATOR_FILE,
        (
            "                num_blocks_to_allocate += manager.get_num_blocks_to_allocate(\n"
            "                    request_id,\n                    num_tokens,\n",
            "                num_blocks_to_allocate = manager.get_num_blocks_to_allocate(\n"
            "                    request_id,\n                    num_tokens,\n",
        ),
    )

    found = verdicts(root, "running")

    refuted = {slug for slug, verdict in found.items() if verdict is Verdict.REFUTED}
    assert {"no-undercount", "exact-estimate", "allocation-succeeds"} <= refuted
    assert found["dry-run-parity"] is Verdict.PROVED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "available_blocks = self.block_pool.get_num_free_blocks() - reserved_blocks",
            "available_blocks = self.block_pool.get_num_free_blocks()",
        ),
        (
            "        required_blocks = num_blocks_to_allocate + watermark_blocks\n"
            "        if required_blocks > available_blocks:",
            "        required_blocks = num_blocks_to_allocate\n"
            "        if required_blocks > available_blocks:",
        ),
    ],
    ids=["reserved", "watermark"],
)
def test_a_check_that_forgets_what_is_promised_is_refuted(
    old: str, new: str, copy_core: CopyCore
) -> None:
    """Nothing runs dry, but what others were promised is taken."""
    found = verdicts(
        copy_core(KV_CACHE_MANAGER_FILE, (old, new)),
        "first",
        "admission-keeps-reserve",
        "allocation-succeeds",
        "no-undercount",
    )

    assert found == {
        "admission-keeps-reserve": Verdict.REFUTED,
        "allocation-succeeds": Verdict.PROVED,
        "no-undercount": Verdict.PROVED,
    }


def test_a_check_that_is_left_out_is_refuted(copy_core: CopyCore) -> None:
    """A step that finds too few blocks and goes on takes what others were promised."""
    old = "        if required_blocks > available_blocks:\n"
    found = verdicts(
        copy_core(KV_CACHE_MANAGER_FILE, (old, "        if False:\n")),
        "first",
        "admission-keeps-reserve",
        "no-undercount",
    )

    assert found["admission-keeps-reserve"] is Verdict.REFUTED
    assert found["no-undercount"] is Verdict.PROVED


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            KV_CACHE_MANAGER_FILE,
            "            num_tokens_main_model=num_tokens_main_model,\n"
            "            prefill_end=prefill_end,\n        )\n\n        # Keep",
            "            num_tokens_main_model=num_tokens_need_slot,\n"
            "            prefill_end=prefill_end,\n        )\n\n        # Keep",
        ),
        (
            COORDINATOR_FILE,
            "        if self.retention_interval != 0:\n            prefill_end = 0\n",
            "",
        ),
        (
            COORDINATOR_FILE,
            "        if num_external_computed_tokens > 0:\n            for i, manager",
            "        if num_external_computed_tokens > 1:\n            for i, manager",
        ),
    ],
    ids=["lookahead", "retention", "external"],
)
def test_groups_that_are_asked_something_else_are_not_understood(
    file: str, old: str, new: str, copy_core: CopyCore
) -> None:
    """The sum is made of proofs about what the groups were asked, and of no other steps."""
    lifted = LiftedTree(copy_core(file, (old, new)))

    with pytest.raises(NotUnderstood, match=r"kv_cache_(coordinator|manager)\.py"):
        lifted.exploration("external-sync", (), Variant(), num_mamba_groups=1)


def test_hits_are_touched_before_anything_is_drawn(copy_core: CopyCore) -> None:
    """A block drawn for one group could be the hit of another (vLLM #33775)."""
    loop = "        for i, manager in enumerate(self.single_type_managers):\n"
    first_loop = f"{loop}            manager.add_local_computed_blocks(\n"
    too_early = (
        f"{loop}            if i and num_external_computed_tokens > 0:\n"
        "                self.single_type_managers[0].allocate_external_computed_blocks(\n"
        "                    request_id, num_local_computed_tokens, num_external_computed_tokens\n"
        "                )\n            manager.add_local_computed_blocks(\n"
    )
    lifted = LiftedTree(copy_core(COORDINATOR_FILE, (first_loop, too_early)))

    with pytest.raises(NotUnderstood, match="group"):
        lifted.exploration("external-sync", (), Variant(), num_mamba_groups=1)


def test_the_sum_is_harmless_while_the_lookahead_fits_a_block(
    lifted_trees: Mapping[str, LiftedTree],
) -> None:
    """A negative estimate cancels nothing then, in whatever tables, with one or two groups."""
    lifted = lifted_trees[NEWEST]
    for theorem in (THEOREMS["allocation-succeeds"], THEOREMS["admission-keeps-reserve"]):
        for family, tags in OBLIGATIONS:
            if "overwide" not in tags or family == "own-tail":
                continue
            for groups in MAMBA_GROUPS:
                joined = lifted.exploration(family, tags, Variant(), num_mamba_groups=groups)
                call, geometry = joined.situation.call, joined.situation.geometry
                fits = call.num_tokens - call.num_tokens_main_model <= geometry.block_size
                question = smt.Question(joined.assumptions)
                violation = Prover(joined).violation(theorem)

                assert question.ask(violation).answer is smt.Answer.SAT
                assert question.ask(violation, fits).answer is smt.Answer.UNSAT


def test_the_gate_covers_what_takes_no_slots_for_drafts(
    lifted_trees: Mapping[str, LiftedTree],
) -> None:
    """Without lookahead and checkpoint the gate's sum covers an admission; with lookahead not."""
    theorem = THEOREMS["gate-covers-first-step"]
    for family in ("first", "hit-full", "hit-partial"):
        joined = lifted_trees[NEWEST].exploration(
            family, (), Variant(), asks=Asks.GATE, num_mamba_groups=1
        )
        call = joined.situation.call
        question = smt.Question(joined.assumptions)
        violation = Prover(joined).violation(theorem)

        assert question.ask(violation).answer is smt.Answer.SAT
        plain = call.num_tokens == call.num_tokens_main_model
        assert question.ask(violation, plain).answer is smt.Answer.UNSAT


def test_evictable_hits_of_two_groups_need_not_agree(
    lifted_trees: Mapping[str, LiftedTree],
) -> None:
    """The second Mamba group's hit may be free where the first one's is in use."""
    joined = lifted_trees[NEWEST].exploration("hit-full", (), Variant(), num_mamba_groups=2)
    situation = joined.situation
    differ = term.conjunction(
        (situation.other_hits_are_evictable, term.negation(situation.hit_is_evictable))
    )
    drawn = [
        term.conjunction((path.condition, differ, path.step.drawn == path.step.estimate))
        for path in joined.paths
        if path.step.refused is False and path.step.deferred is False
    ]

    assert smt.Question(joined.assumptions).ask(term.disjunction(drawn)).answer is smt.Answer.SAT
