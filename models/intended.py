"""How many blocks a step needs when a request's own blocks are reused. The same for all releases.

Pure functions for numbers and terms. They say what a careful allocator would newly take, and why;
where a release differs, the theorem `matches-intended` is refuted for it.
"""

from __future__ import annotations

from spec.families import reserves_checkpoint
from spec.logic import cdiv, choose, count
from spec.vocabulary import IntLike, Situation


def state_columns(num_tokens: IntLike, block_size: IntLike) -> IntLike:
    """Return the table columns up to and with the running state after ``num_tokens`` tokens.

    Columns are positions: column i stands for the state after (i + 1) * block_size tokens.
    vLLM: `MambaManager.allocate_new_blocks`, `cdiv(num_tokens, self.block_size)`.
    """
    return cdiv(num_tokens, block_size)


def table_length(s: Situation) -> IntLike:
    """Return the table's columns after the step: states, then the speculative blocks.

    vLLM: `MambaManager.allocate_new_blocks`, `num_required_blocks`.
    """
    columns = state_columns(s.call.num_tokens_main_model, s.geometry.block_size)
    return columns + s.geometry.num_speculative_blocks


def column_to_retire(s: Situation, before: IntLike) -> IntLike:
    """Return the column recorded after the step as the next to free; -1 is none.

    A running request's step that adds columns leaves the state it started from behind, which is
    read once more, by the step itself; any other step leaves the record as it was.
    vLLM: `MambaManager.allocate_new_blocks`, `MambaManager.remove_skipped_blocks`.
    """
    adds_columns = (s.table_length > 0) & (table_length(s) > s.table_length)
    return choose(adds_columns, s.table_length - 1 - s.geometry.num_speculative_blocks, before)


def need_of_admission(s: Situation) -> IntLike:
    """Return the blocks needed by a request that has none.

    One for its running state, one per draft position (each draft's state is kept until the draft is
    judged), one for the internal checkpoint if the step keeps one. Columns before them are null.
    vLLM: `MambaManager.allocate_new_blocks`, the case `not blocks_allocated`.
    """
    return 1 + s.geometry.num_speculative_blocks + count(reserves_checkpoint(s))


def need_of_chunk(s: Situation) -> IntLike:
    """Return the blocks newly needed by a running prefill chunk.

    A chunk that ends in the column it started in advances its state in place: nothing. One that
    ends further on needs a block for the new state, since the old one is read while the new one is
    written; its speculative blocks hold nothing between steps and move along. The internal
    checkpoint, if the step keeps one, is a further block.
    vLLM: `MambaManager.allocate_new_blocks`, `_relocate_speculative_block`.
    """
    block_size = s.geometry.block_size
    start = state_columns(s.call.total_computed_tokens, block_size)
    end = state_columns(s.call.num_tokens_main_model, block_size)
    return count(end > start) + count(reserves_checkpoint(s))


def need(s: Situation) -> IntLike:
    """Return the blocks that a step of `first`, `running` or `checkpoint` newly needs."""
    return choose(s.table_length > 0, need_of_chunk(s), need_of_admission(s))
