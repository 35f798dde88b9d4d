"""What docs/findings/ says of the newest release.

Shown by vLLM's own `allocate_slots`, mended in a patched copy, and the mend proved.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import CopyTree

from conformance.replay import PROJECT_ROOT, tier_environment
from conformance.targets import resolve
from models import smt
from models.lift import Variant
from models.predict import LiftedTree
from models.prove import Prover, Verdict, prove
from spec.logic import negation
from spec.theorems import ADMISSIONS, OBLIGATIONS, THEOREMS, Asks, Theorem

#: A family with its tags.
Kind = tuple[str, tuple[str, ...]]
#: The newest release that is described.
NEWEST = "0.33.0"
#: The state that a connector loads takes a block of its own unless the hit's block is that block.
COUNT_THE_LOADED_BLOCK = (
    (
        "            num_tokens = num_tokens_main_model\n",
        """            num_tokens = num_tokens_main_model
            num_adopted = cdiv(total_computed_tokens, self.block_size)
            is_loaded = (
                total_computed_tokens > num_local_computed_tokens
                and len(new_computed_blocks) < num_adopted
            )
            if is_loaded:
                new_computed_blocks = [self._null_block] * num_adopted
""",
    ),
    (
        """            has_partial_hit = (
                self._has_partial_local_hit(
                    new_computed_blocks, num_local_computed_tokens
                )
""",
        """            has_partial_hit = (
                not is_loaded
                and self._has_partial_local_hit(
                    new_computed_blocks, num_local_computed_tokens
                )
""",
    ),
    (
        "            return num_new_blocks + num_evictable_computed_blocks\n",
        """            return (
                num_new_blocks + int(is_loaded) + num_evictable_computed_blocks
            )
""",
    ),
)
#: A table that is longer than required needs nothing; it gives nothing back either.
NEVER_LESS_THAN_NOTHING = (
    "            num_evictable_computed_blocks = self._get_num_evictable_blocks(\n",
    """            num_new_blocks = max(num_new_blocks, 0)
            num_evictable_computed_blocks = self._get_num_evictable_blocks(
""",
)
#: Whether everything is gone through, in several groups as well; else some kinds of step are.
ALL = bool(os.environ.get("CAPPROOF_ALL_RELEASES"))
MANAGERS = () if ALL else ("mamba-align",)
SAFE = ("no-undercount", "exact-estimate", "allocation-succeeds", "estimate-nonnegative")

#: One full-attention and one align group; a prompt whose first tokens a connector brings.
ALLOCATE_SLOTS = """
import inspect, sys, torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec,
)
from vllm.v1.request import Request

def call(function, **values):
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})

def answer(block_size, external, new, num_blocks):
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    mamba = MambaSpec(
        block_size=block_size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    groups = [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["mamba"], mamba)]
    manager = call(
        KVCacheManager,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        max_model_len=2**20,
        enable_caching=True,
        hash_block_size=block_size,
        scheduler_block_size=block_size,
        max_num_batched_tokens=2**20,
        max_in_flight_tokens=2**20,
    )
    request = call(
        Request,
        request_id="request",
        prompt_token_ids=[0] * (external + new),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        eos_token_id=0,
    )
    try:
        blocks = manager.allocate_slots(
            request, new, num_external_computed_tokens=external, full_sequence_must_fit=True
        )
        return "refused" if blocks is None else "admitted"
    except ValueError as error:
        return str(error)

for question in sys.argv[1:]:
    print(answer(*map(int, question.split(","))))
"""


def allocate_slots(questions: Iterable[tuple[int, ...]]) -> list[str]:
    """Ask the newest release's `KVCacheManager` for a request's first slots, in one process.

    Args:
        questions: Tokens per block of both groups, tokens that a connector brings, tokens to
            compute behind them, and blocks in the pool, null block included.
    """
    root = resolve(f"vllm=={NEWEST}").root
    asked = [",".join(map(str, question)) for question in questions]
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ALLOCATE_SLOTS), *asked],
        capture_output=True,
        text=True,
        cwd=PROJECT_ROOT,
        env=tier_environment(root),
        timeout=300,
        check=True,
    )
    return process.stdout.strip().splitlines()[-len(asked) :]


def of_all(kinds: Sequence[Kind]) -> Sequence[Kind]:
    """All of these, or every fourth."""
    return kinds if ALL else kinds[::4]


def proved_of(
    root: Path, kinds: Iterable[Kind], theorems: Iterable[str]
) -> dict[tuple[str, tuple[str, ...], str], Verdict]:
    """Verdicts of theorems about kinds of step of a Mamba group by itself."""
    asked = {"managers": ("mamba-align",), "kinds": [*kinds], "theorems": tuple(theorems)}
    return {(o.family, o.tags, o.theorem): o.verdict for o in prove(LiftedTree(root), **asked)}


def verdicts(root: Path, *families: str) -> dict[str, set[str]]:
    """Verdicts of the theorems that keep the pool from running dry, by kind of step."""
    found: dict[str, set[str]] = {}
    for o in prove(LiftedTree(root), managers=MANAGERS, families=families, theorems=SAFE):
        found.setdefault("+".join((o.family, *o.tags)), set()).add(o.verdict.value)
    return found


def test_the_newest_release_runs_dry_where_a_connector_brings_the_first_tokens() -> None:
    """Gate and check pass, and the allocation that follows finds no block left."""
    pytest.importorskip("torch")
    sizes = {(16, 40, 60): 9, (896, 23_040, 2_048): 30}

    answers = allocate_slots(
        (*asked, num_blocks + more) for asked, num_blocks in sizes.items() for more in (-1, 0, 1)
    )

    assert answers == 2 * ["refused", "Cannot get 1 free blocks from the pool", "admitted"]


def test_counting_the_block_that_a_connector_fills_mends_it(copy_tree: CopyTree) -> None:
    """With the loaded state's block in the estimate, it is exact for all sizes."""
    root = copy_tree(NEWEST, *COUNT_THE_LOADED_BLOCK)

    found = verdicts(root, "external-sync", "external-async")

    assert set(found) == {"external-sync", "external-sync+checkpoint", "external-async"}
    assert set().union(*found.values()) == {Verdict.PROVED.value}


def test_an_estimate_that_never_falls_below_nothing_is_exact(copy_tree: CopyTree) -> None:
    """A table that rejected drafts left too long is asked nothing for, and takes nothing."""
    root = copy_tree(NEWEST, NEVER_LESS_THAN_NOTHING)

    found = verdicts(root, "drafts")

    assert set().union(*found.values()) == {Verdict.PROVED.value}


#: With a block for the copy of a block that is written into.
RESERVE_A_COPY = ("2 + self.num_speculative_blocks", "3 + self.num_speculative_blocks")
OF_THE_SIZING = ("peak-within-sizing", "eventually-admitted")
#: Kinds of step that the release's sizing is too small for.
BEYOND_THE_SIZING: tuple[Kind, ...] = (
    *(("hit-partial", ()), ("hit-partial", ("checkpoint",))),
    *(("external-sync", ()), ("external-sync", ("checkpoint",))),
    *(("external-async", ()), ("resumed", ()), ("resumed", ("checkpoint",))),
    *(("promoted", ("own-tail",)), ("promoted", ("checkpoint", "own-tail"))),
    *(("own-tail", ()), ("own-tail", ("checkpoint",))),
)


def reserve_a_copy(root: Path) -> None:
    """Have start-up reserve a block more for each request."""
    file = root / "vllm" / "v1" / "kv_cache_interface.py"
    text = file.read_text()
    assert RESERVE_A_COPY[0] in text
    file.write_text(text.replace(*RESERVE_A_COPY))


def test_a_block_reserved_for_a_copy_mends_the_sizing(copy_tree: CopyTree) -> None:
    """With it, and what a connector loads counted, a request holds and asks for no more."""
    root = copy_tree(NEWEST, *COUNT_THE_LOADED_BLOCK)
    reserve_a_copy(root)

    kinds = of_all(BEYOND_THE_SIZING)

    found = proved_of(root, kinds, OF_THE_SIZING)

    assert set(found) == {(*kind, slug) for kind in kinds for slug in OF_THE_SIZING}
    assert set(found.values()) == {Verdict.PROVED}


#: A later chunk keeps the state that it starts from, and may keep a checkpoint.
ASK_FOR_A_LIFE = (
    """                if not blocks_allocated:
                    physical_block_cap += self.num_speculative_blocks
""",
    """                if not blocks_allocated:
                    physical_block_cap += self.num_speculative_blocks
                if apply_admission_cap:
                    physical_block_cap = (
                        2
                        + self.num_speculative_blocks
                        + self.has_prefill_checkpoint_blocks
                    )
""",
)
#: Kinds of step that the release's gate asks too little for, by theorem.
BEYOND_THE_GATE: Mapping[str, tuple[Kind, ...]] = {
    "gate-covers-lifetime": (("running", ()), ("checkpoint", ())),
    "gate-covers-first-step": tuple(
        (family, ("checkpoint",))
        for family in ("first", "hit-full", "hit-partial", "external-sync", "resumed")
    ),
}


@pytest.mark.parametrize("slug", BEYOND_THE_GATE)
def test_a_gate_that_asks_for_what_chunks_hold_covers_them(copy_tree: CopyTree, slug: str) -> None:
    """It need not know where the chunks will end: two states, drafts and a checkpoint at most."""
    root = copy_tree(NEWEST, *COUNT_THE_LOADED_BLOCK, ASK_FOR_A_LIFE)

    kinds = of_all(BEYOND_THE_GATE[slug])

    found = proved_of(root, kinds, (slug,))

    assert set(found) == {(*kind, slug) for kind in kinds}
    assert set(found.values()) == {Verdict.PROVED}


#: So that a request that is alone on the least pool that start-up accepts passes the gate.
GATE_WITHIN_SIZING = replace(
    THEOREMS["peak-within-sizing"],
    slug="gate-within-sizing",
    claim=lambda s, step, pool, need: step.gate <= step.reserved_at_startup,
    asks=Asks.GATE,
)


def test_such_a_gate_asks_for_no_more_than_startup_reserves(copy_tree: CopyTree) -> None:
    """Where start-up reserves a block for a copy."""
    root = copy_tree(NEWEST, *COUNT_THE_LOADED_BLOCK, ASK_FOR_A_LIFE)
    reserve_a_copy(root)
    lifted = LiftedTree(root)
    for kind in of_all([kind for kind in OBLIGATIONS if kind[0] in ADMISSIONS]):
        for exploration in lifted.explorations_of(*kind, asks=Asks.GATE):
            found = Prover(exploration).settle(GATE_WITHIN_SIZING)

            assert found.verdict is Verdict.PROVED, kind


def test_its_sum_covers_an_admission_without_lookahead(copy_tree: CopyTree) -> None:
    """Drafts' slots in full attention are what it leaves out."""
    lifted = LiftedTree(copy_tree(NEWEST, *COUNT_THE_LOADED_BLOCK, ASK_FOR_A_LIFE))
    for kind in (("first", ("checkpoint",)), ("hit-partial", ("checkpoint",))):
        joined = lifted.exploration(*kind, Variant(), asks=Asks.GATE, num_mamba_groups=1)
        call = joined.situation.call
        question = smt.Question(joined.assumptions)
        violation = Prover(joined).violation(THEOREMS["gate-covers-first-step"])

        assert question.ask(violation).answer is smt.Answer.SAT
        plain = call.num_tokens == call.num_tokens_main_model
        assert question.ask(violation, plain).answer is smt.Answer.UNSAT


#: The worker's table of a running request only grows: a column inside it stays as it is.
KEEP_NO_CHECKPOINT_INSIDE_A_TABLE = ("                or blocks[checkpoint_idx].is_null\n", "")
ON_A_LONG_TABLE: tuple[Kind, ...] = (
    ("checkpoint", ("overwide",)),
    ("promoted", ("checkpoint", "overwide")),
    ("own-tail", ("checkpoint", "overwide")),
    ("drafts", ("checkpoint", "overwide")),
)
#: Weaker than `checkpoint-recorded`, which wants one to be kept there.
A_PENDING_CHECKPOINT_HAS_A_BLOCK = replace(
    THEOREMS["checkpoint-recorded"],
    slug="a-pending-checkpoint-has-a-block",
    claim=lambda s, step, pool, need: (
        negation(step.checkpoint_is_pending) | step.checkpoint_block_is_held
    ),
)


def test_no_checkpoint_is_kept_in_a_column_without_a_block(
    copy_tree: CopyTree, lifted_trees: Mapping[str, LiftedTree]
) -> None:
    """The release records one there; a copy that keeps none frees the right column as well."""
    mended = LiftedTree(copy_tree(NEWEST, KEEP_NO_CHECKPOINT_INSIDE_A_TABLE))

    def of_kinds(lifted: LiftedTree, theorem: Theorem) -> dict[Kind, set[Verdict]]:
        return {
            kind: {
                Prover(exploration).settle(theorem).verdict
                for exploration in lifted.explorations_of(*kind)
            }
            for kind in of_all(ON_A_LONG_TABLE)
        }

    released = of_kinds(lifted_trees[NEWEST], A_PENDING_CHECKPOINT_HAS_A_BLOCK)
    with_block = of_kinds(mended, A_PENDING_CHECKPOINT_HAS_A_BLOCK)
    retired = of_kinds(mended, THEOREMS["retirement-recorded"])

    assert all(Verdict.REFUTED in found for found in released.values())
    assert set().union(*with_block.values()) == {Verdict.PROVED}
    assert set().union(*retired.values()) == {Verdict.PROVED}


#: Left where a gate asks for a life: it is no dry run of the step any more.
LEFT_BY_MANAGER = {
    "mamba-align": {"dry-run-parity"},
    "coordinator": {"dry-run-parity", "gate-covers-first-step"},
}
#: Left on long tables: no checkpoint is kept where one could be.
LEFT_ON_A_LONG_TABLE = {"matches-intended", "checkpoint-recorded"}


@pytest.mark.skipif(not ALL, reason="part of make selfcheck")
def test_all_mends_together_leave_what_they_are_said_to_leave(copy_tree: CopyTree) -> None:
    """Every theorem, kind of step and manager, on a copy with each change of this module."""
    root = copy_tree(
        NEWEST,
        *COUNT_THE_LOADED_BLOCK,
        NEVER_LESS_THAN_NOTHING,
        KEEP_NO_CHECKPOINT_INSIDE_A_TABLE,
        ASK_FOR_A_LIFE,
    )
    reserve_a_copy(root)
    lifted = LiftedTree(root)

    refuted: dict[tuple[str, bool], set[str]] = {}
    for o in prove(lifted):
        assert o.verdict in (Verdict.PROVED, Verdict.REFUTED, Verdict.NOT_APPLICABLE), o
        if o.verdict is Verdict.REFUTED:
            is_long = (o.family, o.tags) in ON_A_LONG_TABLE
            refuted.setdefault((o.manager, is_long), set()).add(o.theorem)

    for manager, left in LEFT_BY_MANAGER.items():
        assert refuted[manager, False] == left
        assert refuted[manager, True] - left <= LEFT_ON_A_LONG_TABLE
