"""Which blocks a request on real managers holds around a step, and where its states stand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.bindings import QUEUED_COPIES
from spec.families import adopts_hit, adopts_partial_hit
from spec.states import column_read, may_be_held, running_column
from spec.vocabulary import Situation


def held_by_column(table: Iterable[Any]) -> dict[int, Any]:
    """Return the blocks of a table that are not null."""
    return {column: block for column, block in enumerate(table) if not block.is_null}


@dataclass(frozen=True)
class Kept:
    """The distinct blocks that tables list, or queued copies keep.

    Attributes:
        blocks: By id.
        times: How often each is listed or kept, by id.
    """

    blocks: Mapping[int, Any]
    times: Mapping[int, int]

    def is_referenced(self) -> bool:
        """Whether each block is referenced as often as it is listed and kept, at least."""
        return all(block.ref_cnt >= self.times[i] for i, block in self.blocks.items())


def kept_by(tables: Iterable[Iterable[Any]], managers: Iterable[Any]) -> Kept:
    """Return the blocks that tables list or queued copies of managers keep."""
    found = [block for table in tables for block in table if not block.is_null]
    for manager in managers:
        found += itertools.chain.from_iterable(getattr(manager, QUEUED_COPIES, ()))
    ids = [block.block_id for block in found]
    return Kept(dict(zip(ids, found, strict=True)), Counter(ids))


@dataclass(frozen=True)
class Found:
    """What a step finds once skipped blocks are removed.

    Attributes:
        situation: What it is asked.
        by_column: Blocks of the table that are not null.
        kept: What the request keeps, in all its tables.
        hit: The last block of the local hit, None without one.
        in_use: Ids of the hit's blocks that somebody references, in all groups.
    """

    situation: Situation
    by_column: Mapping[int, Any]
    kept: Kept
    hit: Any | None
    in_use: frozenset[int]

    def after(
        self,
        table: Sequence[Any],
        copies: Collection[tuple[Any, Any]],
        kept: Kept,
        num_drawn: int,
    ) -> dict[str, Any]:
        """Return what is seen of the step, as fields of `spec.vocabulary.Step`.

        Args:
            table: The table afterwards.
            copies: Copies on write of this manager that are queued then.
            kept: What the request keeps then, in all its tables.
            num_drawn: Blocks that left the free list.
        """
        drawn = kept.blocks.keys() - self.kept.blocks.keys() - self.in_use
        has_lost = any(block.ref_cnt < 1 for block in self.kept.blocks.values())
        by_column = held_by_column(table)
        return {
            "state_is_in_place": self._state_is_in_place(table, by_column, copies),
            "only_states_are_held": all(
                may_be_held(self.situation, column, len(table)) for column in by_column
            ),
            "drawn_are_held": (len(drawn) == num_drawn and not has_lost and kept.is_referenced()),
            "held_before": len(self.kept.blocks),
            "held": len(kept.blocks),
        }

    def _state_is_in_place(
        self, table: Sequence[Any], by_column: Mapping[int, Any], copies: Sequence[tuple[Any, Any]]
    ) -> bool:
        situation, column = self.situation, column_read(self.situation)
        if column < 0:
            return True
        block = by_column.get(column)
        if situation.table_length > 0:
            found = self.by_column.get(column)
            stays = block is found or (situation.parked and _is_copied(found, block, copies))
            return stays and self._drafts_stay(table)
        if block is None or self.hit is None or not adopts_hit(situation):
            return block is not None
        if not adopts_partial_hit(situation):
            return block is self.hit
        return _is_copied(self.hit, block, copies)

    def _drafts_stay(self, table: Sequence[Any]) -> bool:
        running = running_column(self.situation)
        drafts = [block for column, block in self.by_column.items() if column > running]
        listed = {id(block) for block in table[max(running, 0) :]}
        return all(id(block) in listed for block in drafts)


def _is_copied(source: Any, target: Any, copies: Collection[tuple[Any, Any]]) -> bool:
    """Compare by identity: blocks compared as records follow the free list."""
    return any(one is source and other is target for one, other in copies)
