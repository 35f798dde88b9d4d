"""Which blocks a request holds around a step, and whether the states that are read are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from models import term
from models.containers import FIRST_FRESH_ID, Block, Pool, Table
from models.term import BoolLike, IntLike
from spec.assumptions import SPECULATIVE_BLOCKS
from spec.families import (
    adopts_hit,
    adopts_partial_hit,
    checkpoint_column,
    is_decoding,
    reserves_checkpoint,
)
from spec.states import (
    column_just_read,
    column_of_last_ended_token,
    column_of_last_token,
    column_read,
    may_be_held,
    running_column,
)
from spec.vocabulary import Situation

#: Variables that stand for any column of a table, any draft block (from 1) and any block drawn.
SOME_COLUMN, SOME_DRAFT, SOME_DRAWN = "some_old_column", "some_draft", "some_drawn_block"
#: A queued copy on write: source and target.
Copy = tuple[Block, Block]


def held_before(situation: Situation, before: Table) -> IntLike:
    """Return the distinct blocks of a table whose skipped blocks were removed.

    The running state and those of drafts; and the block of the last computed token, where it is
    another: the state before, of which rejected drafts left something.
    """
    if isinstance(situation.table_length, int):
        return 0
    last = column_of_last_token(situation)
    is_another = term.conjunction((last < running_column(situation), _stands(before, last)))
    stays = term.conjunction((is_another, is_decoding(situation)))
    held: IntLike = 1 + situation.geometry.num_speculative_blocks + term.choose(stays, 1, 0)
    return held


def only_states_are_held(situation: Situation, before: Table, table: Table) -> BoolLike:
    """Whether any column that holds a block is one of a state, if so before the step."""
    column = term.int_var(SOME_COLUMN, 0)
    parts = [column >= table.length, table.column(column).is_null]
    parts.append(may_be_held(situation, column, table.length))
    if not isinstance(situation.table_length, int):
        stood = term.conjunction((column < situation.table_length, _stands(before, column)))
        parts.append(term.conjunction((stood, term.negation(_stood_well(situation, column)))))
    return term.disjunction(parts)


def _stands(table: Table, column: IntLike) -> BoolLike:
    return term.negation(table.column(column).is_null)


def _stood_well(situation: Situation, column: IntLike) -> BoolLike:
    """Whether a column may hold a block before a step, skipped blocks removed."""
    running, last = running_column(situation), column_of_last_token(situation)
    of_checkpoint = term.conjunction((column == running - 1, column > last))
    return term.disjunction((column == last, of_checkpoint, column >= running))


def state_is_in_place(
    situation: Situation, before: Table, table: Table, hit: Block | None, copies: Sequence[Copy]
) -> BoolLike:
    """Whether what the step reads stands where the worker looks for it.

    The worker's table of a running request only grows: its state stays in its column. Of a request
    that the worker does not know yet a copy may take the place of a block that is written into.
    """
    column = column_read(situation)
    block = table.column(column)
    if not isinstance(situation.table_length, int):
        found = before.column(column)
        stays = block.is_same_block(found)
        if situation.parked is True:
            stays = term.disjunction((stays, _is_copied(found, block, copies)))
        return term.conjunction((stays, _drafts_stay(situation, before, table)))
    stands = [column < table.length, term.negation(block.is_null)]
    if hit is not None:
        is_hit = block.is_same_block(hit)
        copied = term.conjunction((_is_copied(hit, block, copies), term.negation(is_hit)))
        adopted = term.choose(adopts_partial_hit(situation), copied, is_hit)
        stands.append(term.disjunction((term.negation(adopts_hit(situation)), adopted)))
    return term.disjunction((column < 0, term.conjunction(stands)))


def _is_copied(source: Block, target: Block, copies: Sequence[Copy]) -> BoolLike:
    return term.disjunction(
        term.conjunction((one.is_same_block(source), other.is_same_block(target)))
        for one, other in copies
    )


def _drafts_stay(situation: Situation, before: Table, table: Table) -> BoolLike:
    """Whether any draft block stands where it stood, or where this step's computation writes.

    It is read before, for the copy of the state into the block that the computation goes on in.
    """
    speculative = situation.geometry.num_speculative_blocks
    keeps, of_checkpoint = reserves_checkpoint(situation), checkpoint_column(situation)
    ahead = term.int_var(SOME_DRAFT, 1)
    column = running_column(situation) + ahead
    block = before.column(column)
    stands = [ahead > speculative, table.column(column).is_same_block(block)]
    for behind in range(1, SPECULATIVE_BLOCKS[-1] + 2):
        is_last, now = behind <= speculative + 1, table.column(table.length - behind)
        stands.append(term.conjunction((is_last, now.is_same_block(block))))
    stands.append(term.conjunction((keeps, table.column(of_checkpoint).is_same_block(block))))
    return term.disjunction(stands)


def removal_freed_skipped(
    situation: Situation,
    before: Table,
    table: Table,
    column: IntLike,
    *,
    recorded: IntLike,
    num_retired: IntLike | None,
) -> BoolLike:
    """Whether a column before the last computed token's is null after a removal, if it should be.

    Where anything is in flight nothing is claimed.

    Args:
        situation: What the removal starts from.
        before: The table before.
        table: The table after.
        column: Any column.
        recorded: The column recorded as the next to free; -1 is none.
        num_retired: Columns that were freed before, and hold no block; None where the release does
            not count them, and relies on the recorded column instead.
    """
    running = running_column(situation)
    if num_retired is None:
        stood_well = term.disjunction((column == recorded, column >= running - 1))
    else:
        stood_well = column >= num_retired
    is_freed = _is_freed(before, table, column, column_of_last_token(situation), stood_well)
    return term.disjunction((situation.num_in_flight_tokens > 0, is_freed))


def removal_freed_ended(
    situation: Situation,
    before: Table,
    table: Table,
    column: IntLike,
    *,
    recorded: IntLike,
    num_retired: IntLike | None,
) -> BoolLike:
    """Whether a column before the last ended token's is null after a removal, if it should be.

    Arguments are those of `removal_freed_skipped`.
    """
    ended, read = column_of_last_ended_token(situation), column_just_read(situation)
    if num_retired is None:
        stood_well = term.disjunction((column == read, column == ended - 1))
        is_recorded = term.disjunction((recorded == read, recorded >= ended))
    else:
        stood_well, is_recorded = column >= num_retired, True
    is_freed = _is_freed(before, table, column, ended, stood_well)
    return term.disjunction((term.negation(is_recorded), is_freed))


def _is_freed(
    before: Table, table: Table, column: IntLike, end: IntLike, stood_well: BoolLike
) -> BoolLike:
    """Whether a column before `end` is null, or held a block before that it should not."""
    stood_badly = term.conjunction((_stands(before, column), term.negation(stood_well)))
    return term.disjunction((column < 0, column >= end, stood_badly, table.column(column).is_null))


def drawn_are_held(
    situation: Situation, before: Table, table: Table, pool: Pool, copies: Sequence[Copy]
) -> BoolLike:
    """Whether any block that was drawn stands in the table or is copied to, and none was freed."""
    if pool.has_taken_back:
        return False
    some = term.int_var(SOME_DRAWN, 0)
    columns = [*_columns_of_new_blocks(situation, table)]
    found = [
        term.conjunction((column >= 0, column < table.length, _is_drawn(table, column, some)))
        for column in columns
    ]
    found += [target.block_id == FIRST_FRESH_ID + some for _, target in copies]
    known = (before.column(column).block_id < FIRST_FRESH_ID for column in columns)
    premise = term.conjunction((some < pool.drawn, *known, *_drafts_are_known(situation, before)))
    none_returned = pool.drawn >= 0
    return term.conjunction((none_returned, term.disjunction((term.negation(premise), *found))))


def _is_drawn(table: Table, column: IntLike, some: IntLike) -> BoolLike:
    return table.column(column).block_id == FIRST_FRESH_ID + some


def _columns_of_new_blocks(situation: Situation, table: Table) -> Iterator[IntLike]:
    yield column_of_last_token(situation)
    yield checkpoint_column(situation)
    for behind in range(1, SPECULATIVE_BLOCKS[-1] + 2):
        yield table.length - behind


def _drafts_are_known(situation: Situation, before: Table) -> Iterator[BoolLike]:
    if not isinstance(situation.table_length, int):
        for behind in range(1, SPECULATIVE_BLOCKS[-1] + 1):
            yield before.column(situation.table_length - behind).block_id < FIRST_FRESH_ID
