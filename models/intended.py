"""How many blocks a step needs when a request's own blocks are reused. The same for all releases.

Pure functions for numbers and terms. They say what a careful allocator would newly take, and why;
where a release differs, the theorem `matches-intended` is refuted for it.
"""

from __future__ import annotations

from spec.families import adopts_hit, adopts_partial_hit, reserves_checkpoint
from spec.logic import cdiv, choose, count, greatest, negation
from spec.vocabulary import BoolLike, IntLike, Situation


def state_columns(num_tokens: IntLike, block_size: IntLike) -> IntLike:
    """Return the table columns up to and with the running state after ``num_tokens`` tokens.

    Columns are positions: column i stands for the state after (i + 1) * block_size tokens.
    vLLM: `MambaManager.allocate_new_blocks`, `cdiv(num_tokens, self.block_size)`.
    """
    return cdiv(num_tokens, block_size)


def table_length(s: Situation) -> IntLike:
    """Return the table's columns after the step: states, then the speculative blocks.

    A table that is longer already stays: the worker's copy of it only grows.

    vLLM: `MambaManager.allocate_new_blocks`, `num_required_blocks`.
    """
    columns = state_columns(s.call.num_tokens_main_model, s.geometry.block_size)
    return greatest(columns + s.geometry.num_speculative_blocks, s.table_length)


def column_of_start(s: Situation) -> IntLike:
    """Return the column that holds the running state before the step's tokens; -1 is none.

    A table keeps it before its speculative blocks; an admission finds it where its computed
    tokens end.
    vLLM: `MambaManager.allocate_new_blocks`, `last_state_block_idx`.
    """
    of_table = s.table_length - 1 - s.geometry.num_speculative_blocks
    of_admission = state_columns(s.call.total_computed_tokens, s.geometry.block_size) - 1
    return choose(s.table_length > 0, of_table, of_admission)


def column_to_retire(s: Situation, before: IntLike) -> IntLike:
    """Return the column recorded after the step as the next to free; -1 is none.

    A step that adds columns, or copies a partial tail, leaves the state it started from behind,
    which is read once more, by the step itself; any other step leaves the record as it was.
    vLLM: `MambaManager.allocate_new_blocks`, `MambaManager.remove_skipped_blocks`.
    """
    leaves = adds_columns(s) | s.owns_partial_tail | adopts_partial_hit(s)
    return choose(leaves & (column_of_start(s) >= 0), column_of_start(s), before)


def adds_columns(s: Situation) -> BoolLike:
    """Return whether the table grows beyond the state that the step starts from."""
    adopted = state_columns(s.call.total_computed_tokens, s.geometry.block_size)
    return table_length(s) > choose(s.table_length > 0, s.table_length, adopted)


def need_of_admission(s: Situation) -> IntLike:
    """Return the blocks needed by a request that has none.

    One for its running state if that lies in a later block than the state it starts from, one per
    draft position (each draft's state is kept until the draft is judged), one for the internal
    checkpoint if the step keeps one. The state that it starts from is a hit's block, taken from the
    free list if nobody references it, and copied if the request will write into it; or a block
    that a connector fills. Columns before them are null.
    vLLM: `MambaManager.allocate_new_blocks`, the case `not blocks_allocated`;
    `SingleTypeKVCacheManager.add_local_computed_blocks`, `allocate_external_computed_blocks`.
    """
    block_size = s.geometry.block_size
    start = state_columns(s.call.total_computed_tokens, block_size)
    end = state_columns(s.call.num_tokens_main_model, block_size)
    starts_from_connector = (s.num_external_tokens > 0) & negation(adopts_hit(s))
    return (
        count(end > start)
        + count(starts_from_connector)
        + count(adopts_partial_hit(s))
        + count(adopts_hit(s) & s.hit_is_evictable)
        + s.geometry.num_speculative_blocks
        + count(reserves_checkpoint(s))
    )


def need_of_running(s: Situation) -> IntLike:
    """Return the blocks newly needed by a request that has a table.

    A step that ends in the column of its running state, or before, advances that state in place:
    nothing. One that ends further on needs a block for the new state, since the old one is read
    while the new one is written; its speculative blocks hold nothing between steps and move along.
    The internal checkpoint, if the step keeps one, is a further block, and so is the copy of a
    partial tail that is cached and will be written into.
    vLLM: `MambaManager.allocate_new_blocks`, `_relocate_speculative_block`.
    """
    end = state_columns(s.call.num_tokens_main_model, s.geometry.block_size)
    return (
        count(end > column_of_start(s) + 1)
        + count(reserves_checkpoint(s))
        + count(s.owns_partial_tail)
    )


def need_of_attention(s: Situation) -> IntLike:
    """Return the blocks newly needed in a full-attention group.

    One for every column that has a token, the lookahead's included, and has no block yet. An
    admission has those of its local hit, of which the ones that nobody references are taken from
    the free list, and the last is copied if the request will write into it.
    vLLM: `SingleTypeKVCacheManager.allocate_new_blocks`, `add_local_computed_blocks`,
    `allocate_external_computed_blocks`.
    """
    local, block_size = s.call.num_local_computed_tokens, s.geometry.block_size
    columns, is_admission = cdiv(s.call.num_tokens, block_size), s.table_length == 0
    has = choose(is_admission, cdiv(local, block_size), s.attention_table_length)
    copies = is_admission & negation(local % block_size == 0)
    return greatest(columns - has, 0) + s.num_evictable_attention_hits + count(copies)


def need(s: Situation) -> IntLike:
    """Return the blocks that a step newly needs, in all groups where there are several."""
    of_one = choose(s.table_length > 0, need_of_running(s), need_of_admission(s))
    if isinstance(s.num_mamba_groups, int) and s.num_mamba_groups == 0:
        return of_one
    others = s.num_mamba_groups - 1
    differ = count(s.other_hits_are_evictable) - count(s.hit_is_evictable)
    of_others = others * (of_one + choose(adopts_hit(s), differ, 0))
    return of_one + of_others + need_of_attention(s)
