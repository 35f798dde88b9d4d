"""Kinds of step, as predicates: every step belongs to exactly one family.

The predicates are decided in a fixed order, each excluding the ones before it, so they are disjoint
and cover everything by construction; a test has the solver confirm both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spec.logic import cdiv, choose, greatest, negation
from spec.vocabulary import BoolLike, IntLike, Situation


@dataclass(frozen=True)
class Family:
    """One kind of step.

    Attributes:
        slug: Name on the command line; permanent.
        sentence: What the step is, in one English sentence.
        holds: Membership, for numbers and terms.
    """

    slug: str
    sentence: str
    holds: Callable[[Situation], BoolLike]


def checkpoint_position(s: Situation) -> IntLike:
    """Return the token position of the step's reusable internal checkpoint; 0 is none.

    The greatest position where a hit may end that leaves enough tokens behind it, one unit lower
    under EAGLE.
    Source: `vllm/v1/kv_cache_interface.py`, `get_mamba_prefill_checkpoint_position`.
    """
    unit = s.geometry.cache_hit_alignment_tokens
    limit = s.call.num_tokens_main_model - s.geometry.num_tokens_behind_checkpoint
    drop = choose(s.geometry.drop_eagle_checkpoint_block, unit, 0)
    return greatest(limit // unit * unit - drop, 0)


def checkpoint_column(s: Situation) -> IntLike:
    """Return the table column of the step's internal checkpoint: the one before the running state.

    Source: `MambaManager.get_num_blocks_to_allocate`, `checkpoint_idx`.
    """
    return cdiv(s.call.num_tokens_main_model, s.geometry.block_size) - 2


def waits_for_hit(s: Situation) -> BoolLike:
    """Return whether the step must be put off: the state that it hits is written in this same step.

    Source: `MambaManager.get_num_blocks_to_allocate`, `cached_blocks_this_step`.
    """
    return (s.num_hit_blocks > 0) & s.hit_is_of_this_step


def reserves_checkpoint(s: Situation) -> BoolLike:
    """Return whether the step keeps the state at its checkpoint position in a block of its own.

    The position must be reachable by the backend's export from the chunk's start, and the column
    before the running state must lie behind the state that the chunk starts from.
    Source: `vllm/v1/kv_cache_interface.py`, `is_mamba_prefill_checkpoint_valid`;
    `MambaManager._needs_internal_checkpoint`.
    """
    g, start, end = s.geometry, s.call.total_computed_tokens, s.call.num_tokens_main_model
    position = checkpoint_position(s)
    column = checkpoint_column(s)
    column_of_initial_state = (start - 1) // g.block_size
    return (
        (g.num_prefill_checkpoint_blocks > 0)
        & (end >= s.call.prefill_end)
        & (start % g.hash_block_size == 0)
        & (start + g.hash_block_size <= position)
        & (position < end)
        & ((position - start) % g.prefill_checkpoint_alignment == 0)
        & (column > column_of_initial_state)
        & (column >= 0)
    )


def is_overwide(s: Situation) -> BoolLike:
    """Return whether the table is longer than the computed tokens require.

    Rejected drafts, and a parked load of which not everything counts, leave such tables.
    Source: `vllm/v1/core/sched/scheduler.py`, `Scheduler.update_from_output`,
    `Scheduler._update_waiting_for_remote_kv`.
    """
    columns = cdiv(s.call.total_computed_tokens, s.geometry.block_size)
    return _has_table(s) & (s.table_length > columns + s.geometry.num_speculative_blocks)


def adopts_partial_hit(s: Situation) -> BoolLike:
    """Return whether the step adopts a hit block that it will write into.

    Tokens of a connector may reach beyond the hit's block, which then is not adopted.
    Source: `SingleTypeKVCacheManager.add_local_computed_blocks`, `num_skipped_blocks`.
    """
    return hits_inside_a_block(s) & adopts_hit(s)


def adopts_hit(s: Situation) -> BoolLike:
    """Return whether the hit's last block holds the state that the step starts from."""
    columns = cdiv(s.call.total_computed_tokens, s.geometry.block_size)
    return (s.num_hit_blocks > 0) & (s.num_hit_blocks == columns)


def hits_inside_a_block(s: Situation) -> BoolLike:
    """Return whether there is a local hit and its tokens end inside a block."""
    inside = negation(s.call.num_local_computed_tokens % s.geometry.block_size == 0)
    return (s.num_hit_blocks > 0) & inside


def _has_table(s: Situation) -> BoolLike:
    return s.table_length > 0


def _is_prefill(s: Situation) -> BoolLike:
    return s.call.total_computed_tokens < s.prefill_length


def is_decoding(s: Situation) -> BoolLike:
    """Return whether the prefill has ended before the step."""
    return negation(_is_prefill(s))


def _admission(s: Situation) -> BoolLike:
    return negation(_has_table(s)) & negation(s.preempted)


def _without_external(s: Situation) -> BoolLike:
    return _admission(s) & negation(s.num_external_tokens > 0)


def _own_chunk(s: Situation) -> BoolLike:
    return _has_table(s) & negation(s.parked) & negation(s.owns_partial_tail)


FAMILIES: dict[str, Family] = {
    family.slug: family
    for family in (
        Family(
            "first",
            "A waiting request is admitted with no prefix-cache hit and no external tokens.",
            lambda s: _without_external(s) & negation(s.num_hit_blocks > 0),
        ),
        Family(
            "hit-full",
            "A waiting request is admitted with a local hit that ends on a block boundary.",
            lambda s: (
                _without_external(s) & (s.num_hit_blocks > 0) & negation(hits_inside_a_block(s))
            ),
        ),
        Family(
            "hit-partial",
            "A waiting request is admitted with a local hit that ends inside a block.",
            lambda s: _without_external(s) & hits_inside_a_block(s),
        ),
        Family(
            "external-sync",
            "A waiting request is admitted with external tokens, and computes in the same step.",
            lambda s: (
                _admission(s) & (s.num_external_tokens > 0) & negation(s.loads_asynchronously)
            ),
        ),
        Family(
            "external-async",
            "A waiting request is parked while a connector loads its tokens.",
            lambda s: _admission(s) & (s.num_external_tokens > 0) & s.loads_asynchronously,
        ),
        Family(
            "resumed",
            "A preempted request, which lost its blocks, is admitted again.",
            lambda s: negation(_has_table(s)) & s.preempted,
        ),
        Family(
            "promoted",
            "A parked request computes for the first time.",
            lambda s: _has_table(s) & s.parked,
        ),
        Family(
            "own-tail",
            "A running request's own partial tail block is cached and is copied on write.",
            lambda s: _has_table(s) & negation(s.parked) & s.owns_partial_tail,
        ),
        Family(
            "running",
            "A running request computes a prefill chunk and keeps no internal checkpoint.",
            lambda s: _own_chunk(s) & _is_prefill(s) & negation(reserves_checkpoint(s)),
        ),
        Family(
            "checkpoint",
            "A running request computes a prefill chunk and keeps an internal checkpoint.",
            lambda s: _own_chunk(s) & _is_prefill(s) & reserves_checkpoint(s),
        ),
        Family(
            "drafts",
            "A running request decodes, drafts included.",
            lambda s: _own_chunk(s) & is_decoding(s),
        ),
    )
}


def family_of(s: Situation) -> str:
    """Return the family of a situation made of numbers."""
    return next(slug for slug, family in FAMILIES.items() if family.holds(s))


def tags_of(s: Situation) -> tuple[str, ...]:
    """Return the tags of a situation made of numbers: circumstances beside its family."""
    found = []
    if reserves_checkpoint(s) and family_of(s) != "checkpoint":
        found.append("checkpoint")
    if s.geometry.drop_eagle_checkpoint_block:
        found.append("eagle")
    if s.call.prefill_end > 0:
        found.append("sparse")
    if is_overwide(s):
        found.append("overwide")
    if s.owns_partial_tail and family_of(s) != "own-tail":
        found.append("own-tail")
    return tuple(found)
