"""The catalogue: what is claimed of every step.

Each docstring-like `unsat_iff` says how a solver's answer reads: no model, no such step. Slugs are
permanent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from spec.assumptions import (
    A_STEP_IS_IN_FLIGHT,
    DECODING_STAYS_IN_A_BLOCK,
    MAMBA_GROUPS,
    SKIPPED_COLUMNS_ARE_NULL,
    STATES_ARE_RECORDED,
    STATES_IN_FLIGHT_ARE_RECORDED,
    Assumption,
)
from spec.families import (
    FAMILIES,
    adopts_partial_hit,
    checkpoint_column,
    checkpoint_position,
    hits_inside_a_block,
    is_overwide,
    reserves_checkpoint,
    waits_for_hit,
)
from spec.logic import cdiv, choose, count, greatest, implies, negation
from spec.vocabulary import BoolLike, IntLike, Situation, Step

#: Kinds of step that obligations are listed for: families, with the tags that are told apart.
OBLIGATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("first", ()),
    ("first", ("checkpoint",)),
    ("hit-full", ()),
    ("hit-full", ("checkpoint",)),
    ("hit-partial", ()),
    ("hit-partial", ("checkpoint",)),
    ("external-sync", ()),
    ("external-sync", ("checkpoint",)),
    ("external-async", ()),
    ("resumed", ()),
    ("resumed", ("checkpoint",)),
    ("promoted", ()),
    ("promoted", ("checkpoint",)),
    ("promoted", ("overwide",)),
    ("promoted", ("checkpoint", "overwide")),
    ("promoted", ("own-tail",)),
    ("promoted", ("checkpoint", "own-tail")),
    ("running", ()),
    ("running", ("overwide",)),
    ("checkpoint", ()),
    ("checkpoint", ("overwide",)),
    ("own-tail", ()),
    ("own-tail", ("checkpoint",)),
    ("own-tail", ("overwide",)),
    ("own-tail", ("checkpoint", "overwide")),
    ("drafts", ()),
    ("drafts", ("checkpoint",)),
    ("drafts", ("overwide",)),
    ("drafts", ("checkpoint", "overwide")),
)
#: Families of requests that have no table yet.
ADMISSIONS = ("first", "hit-full", "hit-partial", "external-sync", "external-async", "resumed")
#: Families of prefill steps behind the one that admits a request.
LATER_PREFILLS = ("running", "checkpoint")
_GATE_IS_FOR_WAITING = (
    "v1/core/sched/scheduler.py, Scheduler.schedule asks the gate about waiting requests only"
)
#: Families of requests that the worker knows the table of.
_KNOWN_TO_WORKER = ("running", "checkpoint", "own-tail", "drafts")
_OF_THE_SIZING = (SKIPPED_COLUMNS_ARE_NULL, DECODING_STAYS_IN_A_BLOCK)
_NOTHING_IS_TAKEN_BACK = "tokens of a prefill are taken back only where a load failed"
_NOT_IN_LIVES = {
    ("drafts", "checkpoint"): "a decoding step that a block holds reaches no checkpoint",
    ("running", "overwide"): _NOTHING_IS_TAKEN_BACK,
    ("checkpoint", "overwide"): _NOTHING_IS_TAKEN_BACK,
    ("own-tail", "overwide"): _NOTHING_IS_TAKEN_BACK,
}
#: Families that keep an internal checkpoint, whatever their tags.
_ALWAYS_CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Pool:
    """Free capacity that the check compares with, in blocks.

    Source: `v1/core/kv_cache_manager.py`, `KVCacheManager.allocate_slots`.
    """

    num_free_blocks: IntLike
    watermark_blocks: IntLike
    reserved_blocks: IntLike


@dataclass(frozen=True)
class Need:
    """Blocks that the step must newly hold, by the intended model."""

    blocks: IntLike


class Asks(Enum):
    """What is done with a request, and looked at."""

    STEP = "step"
    """One step: estimate and allocation."""
    GATE = "gate"
    """The full-sequence gate, and then the step."""
    LIFETIME = "lifetime"
    """The full-sequence gate before the request is admitted without a hit, and a later step."""
    REMOVAL = "removal"
    """The removal of skipped blocks, which comes before a step, alone."""


#: What is asked for blocks, by slug.
MANAGERS: dict[str, str] = {
    "mamba-align": "The align-mode manager of one Mamba group, by itself.",
    "coordinator": "KVCacheManager.allocate_slots over a full-attention group and one or two Mamba "
    "groups that share a pool.",
}
#: Mamba groups beside a full-attention group, by manager; one that is asked by itself has none.
MAMBA_GROUPS_OF: dict[str, tuple[int, ...]] = {"mamba-align": (0,), "coordinator": MAMBA_GROUPS}
_EACH_MANAGER = tuple(MANAGERS)


def manager_of(s: Situation) -> str:
    """Return the manager whose step a situation is."""
    return "coordinator" if s.num_mamba_groups else "mamba-align"


@dataclass(frozen=True)
class Theorem:
    """One claim about every step of a family.

    Attributes:
        slug: Name on the command line; permanent.
        sentence: The claim in English.
        unsat_iff: What the absence of a model means, and what a model is.
        claim: The formula, of (situation, step, pool, need).
        witness: The interesting case; a proof whose witness cannot occur is VACUOUS.
        source: Where the claim comes from.
        survives_exception: Whether a step that raised still falls under the claim.
        covers_deferred: Whether a step that was deliberately put off, or refused, falls under the
            claim.
        asks: What is done with the request.
        managers: Slugs of the managers that it is about.
        families: The families that it is about; empty means all.
        not_elsewhere: Why it is not about the others.
        premises: Assumptions that the claim itself makes, beside those in force for the step.
        not_with: Why it is not about steps of a family that have a tag.
        each_s_apart: Whether solvers are asked about one number of speculative blocks at a time,
            which spares work where a claim is about many columns and asked about all paths at once.
    """

    slug: str
    sentence: str
    unsat_iff: str
    claim: Callable[[Situation, Step, Pool, Need], BoolLike]
    witness: Callable[[Situation, Step], BoolLike]
    source: str
    survives_exception: bool = False
    covers_deferred: bool = False
    asks: Asks = Asks.STEP
    managers: tuple[str, ...] = ("mamba-align",)
    families: tuple[str, ...] = ()
    not_elsewhere: str = ""
    premises: tuple[Assumption, ...] = ()
    not_with: Mapping[tuple[str, str], str] = field(default_factory=dict)
    each_s_apart: bool = False

    @property
    def asks_gate(self) -> bool:
        """Whether it is about what the full-sequence gate was told."""
        return self.asks in (Asks.GATE, Asks.LIFETIME)

    @property
    def asks_removal(self) -> bool:
        """Whether it is about the removal of skipped blocks, which then is all that is done."""
        return self.asks is Asks.REMOVAL

    def why_not(self, family: str, tags: tuple[str, ...] = ()) -> str | None:
        """Return why the claim is not about steps of a family with tags, None where it is."""
        if self.families and family not in self.families:
            return self.not_elsewhere
        found = (self.not_with.get((family, tag)) for tag in tags)
        return next(filter(None, found), None)

    def shows(self, s: Situation, step: Step) -> BoolLike:
        """Return whether a step is the interesting case, and keeps the claim's own assumptions."""
        return self._supposed(s) & self.witness(s, step)

    def _supposed(self, s: Situation) -> BoolLike:
        supposed: BoolLike = True
        for assumption in self.premises:
            supposed = supposed & assumption.holds(s)
        return supposed

    def holds(self, s: Situation, step: Step, pool: Pool, need: Need) -> BoolLike:
        """Return whether the claim holds of a step, or is not about it since nothing was done."""
        claim = implies(self._supposed(s), self.claim(s, step, pool, need))
        return claim if self.covers_deferred else step.deferred | step.refused | claim


def _matches_intended(s: Situation, step: Step, pool: Pool, need: Need) -> BoolLike:
    matches = (step.estimate == need.blocks) & (step.drawn == need.blocks)
    return step.refused | choose(waits_for_hit(s), step.deferred, negation(step.deferred) & matches)


def _draws(situation: Situation, step: Step) -> BoolLike:
    return step.drawn >= 1


def _estimates(situation: Situation, step: Step) -> BoolLike:
    return step.estimate >= 1


def _bound(s: Situation, step: Step) -> IntLike:
    g = s.geometry
    return (
        1
        + g.num_speculative_blocks
        + count(g.num_prefill_checkpoint_blocks > 0)
        + count(s.owns_partial_tail | hits_inside_a_block(s))
        + count(s.num_external_tokens > 0)
        + count((s.num_hit_blocks > 0) & s.hit_is_evictable)
    )


def _check_passes(step: Step, pool: Pool) -> BoolLike:
    return step.estimate + pool.watermark_blocks <= pool.num_free_blocks - pool.reserved_blocks


def _checkpoint_is_recorded(s: Situation, step: Step) -> BoolLike:
    reserved = reserves_checkpoint(s)
    as_reserved = (
        (step.checkpoint_position == checkpoint_position(s))
        & (step.checkpoint_column == checkpoint_column(s))
        & step.checkpoint_block_is_held
    )
    return (negation(reserved) & negation(step.checkpoint_is_pending)) | (
        reserved & step.checkpoint_is_pending & as_reserved
    )


def _retirement_is_recorded(s: Situation, step: Step) -> BoolLike:
    adopted = cdiv(s.call.total_computed_tokens, s.geometry.block_size)
    has_table = s.table_length > 0
    before = choose(has_table, s.table_length, adopted)
    column = choose(has_table, before - 1 - s.geometry.num_speculative_blocks, before - 1)
    copies = s.owns_partial_tail | adopts_partial_hit(s)
    moves_on = ((step.table_length > before) | copies) & (column >= 0)
    recorded = choose(moves_on, column, step.column_to_retire_before)
    return step.column_to_retire == recorded


def _waits(s: Situation) -> BoolLike:
    return (s.table_length == 0) | s.parked


def _state_is_kept(s: Situation, step: Step) -> BoolLike:
    columns = cdiv(s.call.num_tokens_main_model, s.geometry.block_size)
    length = greatest(columns + s.geometry.num_speculative_blocks, s.table_length)
    attention = step.attention_table_length + s.geometry.num_speculative_blocks
    is_covered = (s.num_mamba_groups == 0) | (attention >= step.table_length)
    return (step.table_length == length) & step.tail_is_held & is_covered


THEOREMS: dict[str, Theorem] = {
    theorem.slug: theorem
    for theorem in (
        Theorem(
            "no-undercount",
            "A step draws no more blocks than were estimated.",
            "Unsat iff drawn <= estimate in every step; a model is a step that draws more.",
            lambda s, step, pool, need: step.drawn <= step.estimate,
            _draws,
            "vLLM issue 41282: the pool ran dry in the middle of allocate_slots",
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "dry-run-parity",
            "The dry run and the allocation estimate, other arguments equal, are the same number.",
            "Unsat iff dry run == estimate in every step; a model is a step where they differ.",
            lambda s, step, pool, need: step.dry_run == step.estimate,
            _estimates,
            "vLLM PR 57050: one function serves admission and allocation",
            covers_deferred=True,
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "dry-run-pure",
            "A dry run changes nothing that can be observed.",
            "Unsat iff pool, tables and pending checkpoints are equal before and after the dry run "
            "of every step; a model is a step whose dry run leaves a trace.",
            lambda s, step, pool, need: step.dry_run_left_state,
            _estimates,
            "v1/core/single_type_kv_cache_manager.py: admission estimates write no checkpoint",
            covers_deferred=True,
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "exact-estimate",
            "The estimate is the number of blocks that the step draws.",
            "Unsat iff estimate == drawn in every step; a model is a step where they differ.",
            lambda s, step, pool, need: step.estimate == step.drawn,
            _draws,
            "vLLM PR 57050, test_mamba_checkpoint_admission_matches_allocation",
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "bounded-demand",
            "The estimate is bounded by 1 + S + [K > 0] + [partial hit] + [external tokens] + "
            "evictable hits, whatever the token count.",
            "Unsat iff no estimate exceeds the bound; a model is a step that asks for more.",
            lambda s, step, pool, need: step.estimate <= _bound(s, step),
            _estimates,
            "vLLM PR 57050: 761 blocks asked for 704,547 tokens, 2 to 6 taken",
        ),
        Theorem(
            "estimate-nonnegative",
            "The estimate is not negative, so that no group's estimate cancels another's.",
            "Unsat iff estimate >= 0 in every step; a model is a step with a negative estimate.",
            lambda s, step, pool, need: step.estimate >= 0,
            _estimates,
            "v1/core/kv_cache_coordinator.py: estimates of groups are added up",
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "allocation-succeeds",
            "On a pool that passes the check, the step raises nothing and no assertion fails.",
            "Unsat iff no step raises where estimate + watermark <= free - reserved; a model is a "
            "step that raises, asks the pool for more than it has, or for less than nothing.",
            lambda s, step, pool, need: (
                implies(
                    _check_passes(step, pool),
                    (step.drawn >= 0) & (step.drawn <= pool.num_free_blocks),
                )
                if step.raised is None
                else False
            ),
            _draws,
            "v1/core/block_pool.py, BlockPool.get_new_blocks raises ValueError on a short pool",
            survives_exception=True,
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "matches-intended",
            "Estimate and drawn are what the intended model says the step needs, and it is put off "
            "exactly where its hit is written in the same step.",
            "Unsat iff estimate == need and drawn == need in every step, and those are put off "
            "whose hit is written in the same step; a model is a step where the release differs "
            "from the intended model.",
            _matches_intended,
            _draws,
            "models/intended.py; MambaManager.get_num_blocks_to_allocate: cached_blocks_this_step",
            covers_deferred=True,
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "state-invariant",
            "After the step the table ends with the running state and the speculative blocks, as "
            "the next step assumes.",
            "Unsat iff every step leaves a table of cdiv(tokens, B) + S columns, or as long as it "
            "was, whose last 1 + S blocks are not null and whose last S are movable; a model is a "
            "step that breaks the assumption table-holds-computed-state for the next.",
            lambda s, step, pool, need: _state_is_kept(s, step),
            _draws,
            "induction for the assumption table-holds-computed-state",
            managers=_EACH_MANAGER,
        ),
        Theorem(
            "checkpoint-recorded",
            "A checkpoint is pending exactly after a step that keeps one, at its position, in the "
            "column before the running state, which holds a block.",
            "Unsat iff the pending checkpoint of every step is the intended one; a model is a step "
            "that records another, or one too many, or none.",
            lambda s, step, pool, need: _checkpoint_is_recorded(s, step),
            _draws,
            "v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block reads "
            "what the estimator recorded",
        ),
        Theorem(
            "new-columns-returned",
            "A step returns the blocks of exactly the columns that it adds.",
            "Unsat iff what every step returns is its new columns; a model is a step after which "
            "the worker's table differs from the manager's.",
            lambda s, step, pool, need: step.returned_new_columns,
            _draws,
            "v1/core/sched/scheduler.py: the worker appends what allocate_slots returns",
            families=("first", *_KNOWN_TO_WORKER),
            not_elsewhere="the worker is handed the whole table of a request that was waiting: "
            "v1/core/sched/scheduler.py, Scheduler.schedule: req_to_new_blocks",
        ),
        Theorem(
            "no-block-twice",
            "No block stands in two columns of the request's table.",
            "Unsat iff every step leaves a table without a block in two columns, if it found one "
            "so; a model is a step that lists a block twice.",
            lambda s, step, pool, need: step.no_block_is_twice,
            _draws,
            "v1/core/single_type_kv_cache_manager.py, MambaManager._relocate_speculative_block: "
            "freeing a request frees every column",
            each_s_apart=True,
        ),
        Theorem(
            "retirement-recorded",
            "A step that adds columns, or copies a partial tail, records the column of the state "
            "that it started from as the next to free, and no other step changes the record.",
            "Unsat iff the record after every step is that column, or the one before; a model is a "
            "step after which another block would be freed, or none.",
            lambda s, step, pool, need: _retirement_is_recorded(s, step),
            _draws,
            "v1/core/single_type_kv_cache_manager.py, MambaManager.remove_skipped_blocks frees the "
            "recorded column",
        ),
        Theorem(
            "removal-keeps-state",
            "Removing skipped blocks before a step leaves its running state and its speculative "
            "blocks in place.",
            "Unsat iff the table's length and its last 1 + S blocks are the same after every "
            "removal; a model is a request whose state is freed before it is read.",
            lambda s, step, pool, need: step.removal_kept_state,
            lambda s, step: step.removed_blocks,
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots removes skipped blocks "
            "before it estimates",
            asks=Asks.REMOVAL,
            families=("promoted", *_KNOWN_TO_WORKER),
            not_elsewhere="a request without a table has no blocks to remove",
        ),
        Theorem(
            "live-state-kept",
            "What a step's computation starts from stays where the worker looks for it: the block "
            "in its column, the copy of a hit that the step writes into, and the draft blocks.",
            "Unsat iff after every step that starts from computed tokens that block stands in its "
            "column, and any draft block in its own or among the last S; a model is a step whose "
            "state is moved, freed or not copied before it is read.",
            lambda s, step, pool, need: step.state_is_in_place,
            lambda s, step: (s.call.total_computed_tokens >= 1) & (step.drawn >= 1),
            "v1/worker/mamba_utils.py, preprocess_mamba copies the state from the column before; "
            "v1/core/single_type_kv_cache_manager.py, MambaManager.allocate_new_blocks: the "
            "worker's table of a running request is append-only",
            families=tuple(slug for slug in FAMILIES if slug != "first"),
            not_elsewhere="a request that starts without computed tokens reads no state",
        ),
        Theorem(
            "only-states-are-held",
            "After a step blocks stand only in the columns of states: the one that it started "
            "from, its checkpoint, the running state and the drafts behind it.",
            "Unsat iff every other column is null after every step, if none but the same of the "
            "step before held a block; a model is a step that leaves a block that nobody looks "
            "for.",
            lambda s, step, pool, need: step.only_states_are_held,
            _draws,
            "induction for the assumption skipped-columns-are-null",
            premises=(SKIPPED_COLUMNS_ARE_NULL,),
        ),
        Theorem(
            "removal-frees-skipped",
            "Where nothing is in flight, removing skipped blocks leaves none before the running "
            "state.",
            "Unsat iff every column before the last computed token's is null after every removal; "
            "a model is a request that keeps a state that no step reads.",
            lambda s, step, pool, need: step.removal_freed_skipped,
            lambda s, step: step.removed_blocks,
            "v1/core/single_type_kv_cache_manager.py, MambaManager.get_num_skipped_tokens: only "
            "the state of the last computed token is needed",
            asks=Asks.REMOVAL,
            families=("promoted", *_KNOWN_TO_WORKER),
            not_elsewhere="a request without a table has no blocks to remove",
            premises=(STATES_ARE_RECORDED,),
        ),
        Theorem(
            "removal-frees-ended",
            "Whatever is in flight, removing skipped blocks leaves none before the state of the "
            "last token whose step has ended.",
            "Unsat iff every column before that token's is null after every removal; a model is a "
            "request that keeps a state that no step reads any more, and keeps it to its end.",
            lambda s, step, pool, need: step.removal_freed_ended,
            lambda s, step: step.removed_blocks,
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: num_in_flight_tokens",
            asks=Asks.REMOVAL,
            families=("running",),
            not_elsewhere="the removal is the same before any other step of a request that runs",
            premises=(A_STEP_IS_IN_FLIGHT, STATES_IN_FLIGHT_ARE_RECORDED),
            not_with={("running", "overwide"): _NOTHING_IS_TAKEN_BACK},
        ),
        Theorem(
            "conservation",
            "Every block that a step draws stands in the request's table or waits to be copied to, "
            "and none of those that it found is given back.",
            "Unsat iff the blocks drawn in every step are not less than none, each stands in a "
            "column or is the target of a queued copy, and nothing is freed; a model is a step "
            "that loses a block, or gives one back that is still listed.",
            lambda s, step, pool, need: step.drawn_are_held,
            _draws,
            "v1/core/block_pool.py, BlockPool.free_blocks: what no table lists is never freed",
        ),
        Theorem(
            "peak-within-sizing",
            "A request holds no more blocks than the start-up sizing reserves for it.",
            "Unsat iff after every step the distinct blocks of table and queued copies are at most "
            "the release's own sizing; a model is a step that holds more.",
            lambda s, step, pool, need: step.held <= step.reserved_at_startup,
            lambda s, step: step.held >= 1,
            "v1/kv_cache_interface.py, MambaSpec.max_memory_usage_bytes",
            premises=_OF_THE_SIZING,
            not_with=_NOT_IN_LIVES,
        ),
        Theorem(
            "gate-covers-lifetime",
            "What the full-sequence gate asked for covers what the request holds until its prefill "
            "ends.",
            "Unsat iff after every prefill step of a request that was admitted without a hit table "
            "and queued copies hold at most the gate's estimate for its whole length; a model is a "
            "step that holds more.",
            lambda s, step, pool, need: step.held <= step.gate,
            _draws,
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: full_sequence_must_fit",
            asks=Asks.LIFETIME,
            families=LATER_PREFILLS,
            not_elsewhere="it is about the prefill steps behind an admission without a hit",
            premises=(SKIPPED_COLUMNS_ARE_NULL,),
            not_with=_NOT_IN_LIVES,
        ),
        Theorem(
            "eventually-admitted",
            "A request that has to itself what the start-up sizing reserves is let pass: what it "
            "holds and what it is told that it needs are together no more.",
            "Unsat iff held + estimate is at most the release's own sizing before every step; a "
            "model is a request that is refused on such a pool, and since nobody else will free a "
            "block, for ever.",
            lambda s, step, pool, need: (
                step.held_before + step.estimate <= step.reserved_at_startup
            ),
            lambda s, step: step.held_before + step.estimate >= 1,
            "vLLM PR 57050: a request that is never promoted; "
            "v1/core/kv_cache_utils.py, check_enough_kv_cache_memory",
            premises=_OF_THE_SIZING,
            not_with=_NOT_IN_LIVES,
        ),
        Theorem(
            "admission-keeps-reserve",
            "A step that takes blocks leaves free what is reserved, and the watermark where the "
            "request was waiting.",
            "Unsat iff drawn + watermark <= free - reserved in every step that allocate_slots lets "
            "pass; a model is a step that eats into what others were promised.",
            lambda s, step, pool, need: (
                (step.drawn <= 0)
                | (
                    step.drawn + choose(_waits(s), pool.watermark_blocks, 0)
                    <= pool.num_free_blocks - pool.reserved_blocks
                )
            ),
            _draws,
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: reserved_blocks, "
            "watermark_blocks",
            managers=("coordinator",),
        ),
        Theorem(
            "admission-fits-whole",
            "A waiting request is let pass only where the gate's estimate is free, beside the "
            "watermark.",
            "Unsat iff gate + watermark <= free in every admission that allocate_slots lets pass; "
            "a model is a request that is started although the whole of it does not fit.",
            lambda s, step, pool, need: step.gate + pool.watermark_blocks <= pool.num_free_blocks,
            _draws,
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: full_sequence_must_fit",
            asks=Asks.GATE,
            managers=("coordinator",),
            families=ADMISSIONS,
            not_elsewhere=_GATE_IS_FOR_WAITING,
        ),
        Theorem(
            "gate-covers-first-step",
            "What the full-sequence gate asked for covers the step that follows it.",
            "Unsat iff every admission draws at most the gate's estimate for the whole request; a "
            "model is an admission whose first step takes more.",
            lambda s, step, pool, need: step.drawn <= step.gate,
            _draws,
            "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: full_sequence_must_fit",
            asks=Asks.GATE,
            managers=_EACH_MANAGER,
            families=ADMISSIONS,
            not_elsewhere=_GATE_IS_FOR_WAITING,
        ),
    )
}


#: Theorems about how many blocks a request holds.
ABOUT_HELD = ("peak-within-sizing", "gate-covers-lifetime", "eventually-admitted")


def least_pool(theorem: Theorem, step: Step) -> Pool:
    """Return the least pool that lets a step made of numbers pass what a theorem has it asked."""
    gate = step.gate if theorem.asks is Asks.GATE else 0
    return Pool(max(step.estimate or 0, gate, 0), watermark_blocks=0, reserved_blocks=0)


def in_obligation(s: Situation, family: str, tags: tuple[str, ...]) -> BoolLike:
    """Return whether a step of a family has exactly these tags, of those that are told apart."""
    wants_checkpoint = "checkpoint" in tags or family == _ALWAYS_CHECKPOINT
    found = _exactly(reserves_checkpoint(s), wants_checkpoint)
    found = found & _exactly(is_overwide(s), "overwide" in tags)
    if family == "promoted":
        found = found & _exactly(s.owns_partial_tail, "own-tail" in tags)
    return found


def _exactly(holds: BoolLike, wanted: bool) -> BoolLike:
    return holds if wanted else negation(holds)
