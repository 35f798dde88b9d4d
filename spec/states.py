"""Where a request's states stand in its block table, and which columns a step may leave them in.

A column counts from 0; what is said of a column -1 is said of none.
"""

from __future__ import annotations

from spec.families import checkpoint_column, is_overwide, reserves_checkpoint
from spec.logic import choose, negation
from spec.vocabulary import BoolLike, IntLike, Situation


def column_of_last_token(s: Situation) -> IntLike:
    """Return the column of the last computed token, -1 where nothing is computed."""
    return (s.call.total_computed_tokens - 1) // s.geometry.block_size


def column_of_last_ended_token(s: Situation) -> IntLike:
    """Return the column of the last token whose step has ended: the oldest step in flight reads it.

    Source: `vllm/v1/core/kv_cache_manager.py`, `KVCacheManager.allocate_slots`:
    `num_in_flight_tokens`.
    """
    return (s.call.total_computed_tokens - s.num_in_flight_tokens - 1) // s.geometry.block_size


def column_just_read(s: Situation) -> IntLike:
    """Return the column of the state that the step that ended last started from."""
    before = s.call.total_computed_tokens - s.num_in_flight_tokens - s.num_just_ended_tokens
    return (before - 1) // s.geometry.block_size


def running_column(s: Situation) -> IntLike:
    """Return the column of the running state that the step finds; negative without a table."""
    return s.table_length - 1 - s.geometry.num_speculative_blocks


def column_read(s: Situation) -> IntLike:
    """Return the column of the block that the step's computation starts from, -1 for none.

    The worker goes on from where the step before put the running state, which tokens that were
    taken back do not move. A request that the worker has not seen, and a tail of the request's own,
    are looked for at the last computed token.
    Source: `vllm/v1/worker/mamba_utils.py`, `preprocess_mamba`: `prev_state_idx`;
    `MambaManager._cache_partial_tail_block`: `block_idx`.
    """
    goes_on = (s.table_length > 0) & negation(s.parked | s.owns_partial_tail)
    return choose(goes_on, running_column(s), column_of_last_token(s))


def columns_kept(s: Situation) -> tuple[IntLike, ...]:
    """Return the columns before the new running state that a step may leave a block in.

    Those of the state it starts from, of its own checkpoint, and, where tokens were taken back, of
    the running state and the checkpoint before these.
    """
    keeps = reserves_checkpoint(s)
    return (
        column_of_last_token(s),
        running_column(s),
        choose(is_overwide(s), running_column(s) - 1, -1),
        choose(keeps, checkpoint_column(s), -1),
    )


def may_be_held(s: Situation, column: IntLike, table_length: IntLike) -> BoolLike:
    """Return whether a step that leaves a table of so many columns may leave a block in one."""
    found = column >= table_length - 1 - s.geometry.num_speculative_blocks
    for kept in columns_kept(s):
        found = found | (column == kept)
    return found
