"""The words the theorems are said in: what a step is asked, and what is seen of it.

Every record holds Python ints and bools when a real step is described, and terms of the same names
when all steps are. Nothing here knows which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: An int or a term that stands for one; bools likewise. `spec` imports no term library.
IntLike = Any
BoolLike = Any


@dataclass(frozen=True)
class Geometry:
    """Sizes that a manager is built with (vLLM: `MambaSpec`, `BlockPool`, coordinator)."""

    block_size: IntLike
    """B, tokens per block, at least 1."""
    hash_block_size: IntLike
    """H, tokens per hash unit; divides `block_size`."""
    num_speculative_blocks: IntLike
    """S, blocks kept for draft states behind the running state; 0 without drafts."""
    num_prefill_checkpoint_blocks: IntLike
    """K; the code asks only whether it is above 0."""
    prefill_checkpoint_alignment: IntLike
    """Tokens; an exported checkpoint lies a multiple of this behind the chunk's start."""
    drop_eagle_checkpoint_block: BoolLike
    """Whether the checkpoint lies one unit lower (EAGLE drops the last matching unit)."""
    cache_hit_alignment_tokens: IntLike = None
    """Tokens; a checkpoint lies at a multiple of this. `hash_block_size` before 0.32.0, and where
    None is given."""
    num_tokens_behind_checkpoint: IntLike = 1
    """Tokens of a chunk that lie behind its checkpoint, at least, before the EAGLE drop. 1 leaves
    one to compute anew; from 0.32.0 it is 0 with the drop, from 0.33.0 the hash lookahead if that
    is more."""

    def __post_init__(self) -> None:
        if self.cache_hit_alignment_tokens is None:
            object.__setattr__(self, "cache_hit_alignment_tokens", self.hash_block_size)


@dataclass(frozen=True)
class Call:
    """Arguments of one step, in tokens, as `KVCacheManager.allocate_slots` passes them on."""

    num_tokens: IntLike
    """Tokens that need a slot after the step, lookahead included."""
    num_tokens_main_model: IntLike
    """The same without lookahead; what align mode counts."""
    total_computed_tokens: IntLike
    """Tokens computed before the step, local and external."""
    num_local_computed_tokens: IntLike
    """Of these, the ones this engine computed or found in its own prefix cache."""
    prefill_end: IntLike = 0
    """Where the prefill ends, under sparse retention; 0 under dense retention."""


@dataclass(frozen=True)
class Situation:
    """Everything that decides which family a step belongs to."""

    geometry: Geometry
    call: Call
    table_length: IntLike
    """Columns of the request's block table before the step; 0 before admission."""
    prefill_length: IntLike
    """Tokens to prefill: `max(num_prompt_tokens, num_tokens - 1)` of the request."""
    num_request_tokens: IntLike = 0
    """Tokens that the request has, which the gate asks for, or asked for when the request was
    admitted; 0 where nobody asks the gate."""
    num_hit_blocks: IntLike = 0
    """Blocks of the local prefix-cache hit being adopted."""
    hit_is_evictable: BoolLike = False
    """Whether nobody references the hit's last block, so that adopting it takes a free block."""
    hit_is_of_this_step: BoolLike = False
    """Whether another request cached the hit's last block in this same step."""
    num_external_tokens: IntLike = 0
    """Tokens that a KV connector brings."""
    loads_asynchronously: BoolLike = False
    """Whether the external tokens arrive in a later step."""
    parked: BoolLike = False
    """Whether the table was made by an asynchronous load and nothing is computed yet."""
    was_parked: BoolLike = False
    """Whether an asynchronous load made the table and no step has added a column since; only some
    releases can tell."""
    preempted: BoolLike = False
    """Whether the request ran before and lost its blocks."""
    has_left_over_checkpoint: BoolLike = False
    """Whether an earlier estimate of the request left a checkpoint pending."""
    owns_partial_tail: BoolLike = False
    """Whether the request's own partial tail block is cached and must be copied on write."""
    num_mamba_groups: IntLike = 0
    """Mamba groups that share a pool with one full-attention group, all as this situation says; 0
    where one manager is asked by itself."""
    attention_table_length: IntLike = 0
    """Columns of the request's block table in the full-attention group; 0 before admission."""
    num_evictable_attention_hits: IntLike = 0
    """Blocks of the local hit in the full-attention group that nobody references."""
    other_hits_are_evictable: BoolLike = False
    """Whether nobody references the hit's last block in the Mamba groups behind the first."""
    num_in_flight_tokens: IntLike = 0
    """Of the computed tokens, those of steps that are scheduled and have not ended."""
    num_just_ended_tokens: IntLike = 0
    """Of the computed tokens, those of the step that ended last; 0 where nothing is in flight."""


@dataclass(frozen=True)
class Step:
    """What is seen of one step, in blocks unless said otherwise."""

    dry_run: IntLike
    """`get_num_blocks_to_allocate(..., apply_admission_cap=True)`."""
    estimate: IntLike
    """`get_num_blocks_to_allocate(..., apply_admission_cap=False)`."""
    drawn: IntLike
    """Blocks asked of the pool, plus evictable hits touched."""
    table_length: IntLike
    """Columns of the request's block table after the step."""
    dry_run_left_state: BoolLike
    """Whether pool, hash map, tables and pending checkpoints were the same after the dry run."""
    tail_is_held: BoolLike = True
    """Whether the table's last 1 + S blocks are not null and its last S can be moved."""
    checkpoint_is_pending: BoolLike = False
    """Whether the step left an internal checkpoint to be written by its forward pass."""
    checkpoint_position: IntLike = 0
    """Tokens after which the pending checkpoint's state is taken; of no meaning without one."""
    checkpoint_column: IntLike = 0
    """Column that the pending checkpoint is written to; of no meaning without one."""
    checkpoint_block_is_held: BoolLike = True
    """Whether that column exists and its block is not null."""
    returned_new_columns: BoolLike = True
    """Whether the step returned the blocks of the columns that it added, in their order."""
    no_block_is_twice: BoolLike = True
    """Whether no block stands in two columns of the table, if none did before."""
    column_to_retire_before: IntLike = -1
    """Column recorded before the step as the one to free once the running state has moved on;
    -1 is none."""
    column_to_retire: IntLike = -1
    """The same after the step."""
    state_is_in_place: BoolLike = True
    """Whether the block that the step's computation starts from stands in its column afterwards,
    or the copy of it that was asked for where the step adopted a hit that it writes into, and
    draft blocks stay in the table."""
    only_states_are_held: BoolLike = True
    """Whether blocks stand only in columns of states: the one started from, the checkpoint's, the
    running state's and those behind it; if so before, skipped blocks removed."""
    drawn_are_held: BoolLike = True
    """Whether every block that the step drew stands in the table or waits to be copied to, and
    none that it found was given back."""
    held_before: IntLike = 0
    """Distinct blocks of the request's table before the step, skipped blocks removed."""
    held: IntLike = 0
    """Distinct blocks that the request's table or a queued copy keeps after the step."""
    reserved_at_startup: IntLike = 0
    """Blocks that the start-up sizing reserves for one request in one group."""
    gate: IntLike = 0
    """What the full-sequence gate was told before the step, or when the request was admitted: the
    dry run for the request's whole length. Of no meaning where nobody asked."""
    removal_kept_state: BoolLike = True
    """Whether removing skipped blocks, before anything else, left the table's length and its last
    1 + S blocks as they were."""
    removal_freed_skipped: BoolLike = True
    """Whether, where nothing is in flight, it left no block in a column before the running
    state's."""
    removal_freed_ended: BoolLike = True
    """Whether, whatever is in flight, it left no block in a column before that of the last token
    whose step has ended."""
    removed_blocks: BoolLike = False
    """Whether that removed any block."""
    raised: str | None = None
    """Name of the exception type that ended the step, None where it went through."""
    attention_table_length: IntLike = 0
    """Columns of the request's block table in the full-attention group after the step; 0 where
    there is none."""
    deferred: BoolLike = False
    """Whether the estimate is the deliberate `num_gpu_blocks + 1`."""
    refused: BoolLike = False
    """Whether `KVCacheManager.allocate_slots` found too few free blocks, so that nothing was
    done."""

    @property
    def pending_checkpoint(self) -> tuple[int, int] | None:
        """Position (tokens) and column of the pending checkpoint of a step made of numbers."""
        is_pending = bool(self.checkpoint_is_pending)
        return (self.checkpoint_position, self.checkpoint_column) if is_pending else None
