"""Which states the steps of `made_request.request_of` leave behind, as conditions on terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from models import term
from models.lift import Exploration
from models.term import IntLike
from spec.families import (
    checkpoint_column,
    is_overwide,
    reserves_checkpoint,
)
from spec.logic import cdiv, choose, count, negation
from spec.states import column_just_read, column_of_last_ended_token, running_column
from spec.vocabulary import Situation


def is_reached(exploration: Exploration) -> Any:
    """The steps that `request_of` finds leave the state, pending checkpoint included.

    No estimate of theirs fails its check, so an admission finds no checkpoint pending, and neither
    does what follows a parked load.
    """
    situation = exploration.situation
    if isinstance(situation.table_length, int):
        return _pending_is_left(situation) & ends_at_hash_unit(situation)
    speculative = situation.geometry.num_speculative_blocks
    excess = situation.attention_table_length - (situation.table_length - speculative)
    return term.conjunction(
        (
            situation.num_mamba_groups == 0 or excess == 0,
            _pending_is_left(situation),
            ends_at_hash_unit(situation),
            _checkpoint_column_is_left(situation),
            _record_is_left(situation),
        )
    )


def is_left_by_chunks(situation: Situation) -> bool:
    """Whether what a removal starts from is made by steps behind each other, from nothing.

    It frees what earlier steps left behind, and one step leaves nothing.
    """
    is_of_removal = not isinstance(situation.num_just_ended_tokens, int)
    return is_of_removal and not (situation.parked is True or situation.owns_partial_tail is True)


def is_reached_by_chunks(exploration: Exploration, columns: Iterable[IntLike]) -> Any:
    """The chunks of `_in_chunks` leave the state, where none of them keeps a checkpoint.

    Each begins a column. Before the running state the columns hold what the step that has just
    ended read, and the state of the next one; the record is what the last step read.

    Args:
        exploration: Of removals.
        columns: Those that the claim looks at.
    """
    situation = exploration.situation
    running, ended = running_column(situation), column_of_last_ended_token(situation)
    in_flight, just_ended = situation.num_in_flight_tokens, situation.num_just_ended_tokens
    read = column_just_read(situation)
    has_record = term.bool_var("has_column_to_retire_before")
    recorded = term.int_var("column_to_retire_before", 0)
    found = [
        situation.geometry.num_prefill_checkpoint_blocks == 0,
        negation(situation.has_left_over_checkpoint),
        negation(situation.was_parked),
        negation(is_overwide(situation)),
        just_ended >= 1,
        in_flight + just_ended < situation.call.total_computed_tokens,
        read < ended,
        (in_flight == 0) | (ended < running),
        has_record & (recorded == choose(in_flight == 0, read, ended)),
        term.int_var("num_retired_blocks_before", 0) == read,
    ]
    for column in columns:
        is_null = term.cell("block_table", column) == 0
        is_held = (column == read) | (column == ended)
        is_as_left = choose(is_held, negation(is_null), is_null)
        found.append((column < 0) | (column >= running) | is_as_left)
    return term.conjunction(found)


def _checkpoint_column_is_left(situation: Situation) -> Any:
    """Of the columns before the running state the last steps hold a checkpoint and a tail only."""
    geometry, column = situation.geometry, checkpoint_column(situation)
    held = column >= running_column(situation) - count(situation.has_left_over_checkpoint)
    if situation.owns_partial_tail is True:
        tail = cdiv(situation.call.total_computed_tokens, geometry.block_size) - 1
        held = held | (column == tail)
    is_null = term.cell("block_table", column) == 0
    return choose(held, negation(is_null), is_null)


def _record_is_left(situation: Situation) -> Any:
    """A first step records no column to free; a load does, and so does one step after another."""
    has_record = term.bool_var("has_column_to_retire_before")
    column = term.int_var("column_to_retire_before", 0)
    if situation.parked is True:
        recorded = situation.geometry.num_speculative_blocks > 0
        where = running_column(situation)
    else:
        recorded = is_overwide(situation) & situation.owns_partial_tail
        where = cdiv(situation.call.total_computed_tokens, situation.geometry.block_size) - 1
    return choose(recorded, has_record & (column == where), negation(has_record))


def ends_at_hash_unit(situation: Situation) -> Any:
    """A hit, and an own tail, end at a hash unit; which one matters with checkpoint blocks only."""
    g, call = situation.geometry, situation.call
    tail = call.total_computed_tokens if situation.owns_partial_tail is True else 0
    is_admission = isinstance(situation.table_length, int)
    some_group_hits = situation.num_mamba_groups > 0 and is_admission
    has_hit = (situation.num_hit_blocks > 0) | some_group_hits
    hit = choose(has_hit, call.num_local_computed_tokens, 0)
    at_unit = (tail % g.hash_block_size == 0) & (hit % g.hash_block_size == 0)
    return at_unit | (g.num_prefill_checkpoint_blocks == 0)


def _pending_is_left(situation: Situation) -> Any:
    pending = situation.has_left_over_checkpoint
    if isinstance(situation.table_length, int) or situation.parked is True:
        return negation(pending)
    if isinstance(situation.was_parked, term.Bool):
        return _kept_by_first_step(situation, pending) & _can_have_been_parked(situation)
    return _kept_by_first_step(situation, pending)


def _can_have_been_parked(situation: Situation) -> Any:
    """A parked request whose column is as long as a load made it has computed a token since."""
    behind_first = negation((_covered(situation) - 1) % situation.geometry.block_size == 0)
    return negation(situation.was_parked) | (behind_first & negation(is_overwide(situation)))


def _kept_by_first_step(situation: Situation, pending: Any) -> Any:
    covered = _covered(situation)
    # Two steps make a table that is too long and holds a tail; the first one caches the tail.
    start = situation.call.total_computed_tokens if situation.owns_partial_tail is True else 0
    start = choose(is_overwide(situation), start, 0)
    call = replace(
        situation.call,
        num_tokens=covered,
        num_tokens_main_model=covered,
        total_computed_tokens=start,
        num_local_computed_tokens=start,
    )
    kept = reserves_checkpoint(replace(situation, call=call, table_length=0))
    if situation.owns_partial_tail is True:
        return negation(pending) & negation(kept)  # a pending checkpoint keeps a tail from it
    return (pending & kept) | (negation(pending) & negation(kept))


def _covered(situation: Situation) -> Any:
    """Tokens of a first step that gives the table its length."""
    computed, geometry = situation.call.total_computed_tokens, situation.geometry
    columns = situation.table_length - geometry.num_speculative_blocks
    least = (columns - 1) * geometry.block_size + 1
    return choose(columns > cdiv(computed, geometry.block_size), least, computed)
