"""What each column of a request's block tables holds, as the real managers show it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from conformance.bindings import COLUMN_TO_RETIRE, PENDING_CHECKPOINTS, QUEUED_COPIES

ATTENTION = "full attention"
MAMBA = "mamba"


class Holds(str, Enum):
    """What a column of a block table holds."""

    NULL = "null"
    """The null block: the column's state was freed, or never kept."""
    OLD = "old"
    """A state before the running one."""
    TO_RETIRE = "to-retire"
    """The state that is recorded as the next to free."""
    CHECKPOINT = "checkpoint"
    """The block that the pending internal checkpoint is written to."""
    HIT = "hit"
    """A cached block of the local prefix-cache hit that the request adopted."""
    COPY = "copy"
    """The target of a queued copy on write."""
    RUNNING = "running"
    """The block of the running state."""
    SPECULATIVE = "speculative"
    """A block for draft states, behind the running state."""
    ATTENTION = "attention"
    """A block of the full-attention group."""


@dataclass(frozen=True)
class Run:
    """Neighbouring columns that hold the same."""

    holds: Holds
    count: int
    """Columns, at least 1."""


@dataclass(frozen=True)
class TableSeen:
    """One block table of the request, after a step."""

    group: str
    """What the table is of; `ATTENTION`, or `MAMBA` and where there are several a number."""
    runs: tuple[Run, ...]
    """What its columns hold, from column 0 on."""
    num_copies_outside: int = 0
    """Targets of queued copies that stand in no column: cached contents move there, and the step
    writes on in the block that held them."""

    @property
    def length(self) -> int:
        """Columns."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class Names:
    """What a manager calls the request whose tables are looked at."""

    request_id: str
    num_speculative_blocks: int
    """S, blocks behind the running state."""
    adopted: frozenset[int]
    """Ids of the blocks that the request's local hits brought."""


def tables_from_json(content: Iterable[Mapping[str, Any]]) -> tuple[TableSeen, ...]:
    """Return tables that passed between processes as JSON objects."""
    return tuple(
        TableSeen(
            table["group"],
            tuple(Run(Holds(run["holds"]), run["count"]) for run in table["runs"]),
            table["num_copies_outside"],
        )
        for table in content
    )


def attention_table(manager: Any, names: Names) -> TableSeen:
    """Return what the columns of a full-attention manager's table hold."""
    table, copies = _table(manager, names), _copied_to(manager)
    runs = _runs(_attention_block(block, names, copies) for block in table)
    return TableSeen(ATTENTION, runs, _num_outside(table, copies))


def mamba_table(manager: Any, names: Names, group: str = MAMBA) -> TableSeen:
    """Return what the columns of a Mamba manager's table hold.

    The running state is the block before the speculative ones that end the table; checkpoint,
    queued copies and the column to free next are what the manager has recorded.
    Source: `v1/core/single_type_kv_cache_manager.py`, `MambaManager`.
    """
    table, recorded = _table(manager, names), _recorded(manager, names)
    runs = _runs(_columns(table, recorded))
    return TableSeen(group, runs, _num_outside(table, recorded.copies))


@dataclass(frozen=True)
class _Recorded:
    """Where the manager's records point to."""

    names: Names
    checkpoint: int
    """Column of the pending checkpoint, -1 for none, and in 0.29.0, which records no column."""
    to_retire: int
    """Column that is freed next, -1 for none."""
    copies: Collection[int]
    """Ids of the targets of queued copies."""


def _recorded(manager: Any, names: Names) -> _Recorded:
    pending: Mapping[str, Any] = getattr(manager, PENDING_CHECKPOINTS[0], {})
    _, checkpoint = pending.get(names.request_id, (0, -1))
    return _Recorded(
        names,
        checkpoint,
        getattr(manager, COLUMN_TO_RETIRE, {}).get(names.request_id, -1),
        _copied_to(manager),
    )


def _num_outside(table: Sequence[Any], copies: Collection[int]) -> int:
    return len(set(copies).difference(block.block_id for block in table)) if copies else 0


def _copied_to(manager: Any) -> Collection[int]:
    return {target.block_id for _, target in getattr(manager, QUEUED_COPIES, ())}


def _columns(table: Sequence[Any], recorded: _Recorded) -> Iterator[Holds]:
    running = len(table) - 1 - recorded.names.num_speculative_blocks
    for column, block in enumerate(table):
        yield Holds.NULL if block.is_null else _held(column, block, running, recorded)


def _held(column: int, block: Any, running: int, recorded: _Recorded) -> Holds:
    """What a column holds that is not null: the first that is true of it."""
    if block.block_id in recorded.copies:
        return Holds.COPY
    if column == recorded.checkpoint:
        return Holds.CHECKPOINT
    if _is_of_hit(block, recorded.names):
        return Holds.HIT
    if column >= running:
        return Holds.RUNNING if column == running else Holds.SPECULATIVE
    return Holds.TO_RETIRE if column == recorded.to_retire else Holds.OLD


def _attention_block(block: Any, names: Names, copies: Collection[int]) -> Holds:
    if block.is_null:
        return Holds.NULL
    if block.block_id in copies:
        return Holds.COPY
    return Holds.HIT if _is_of_hit(block, names) else Holds.ATTENTION


def _is_of_hit(block: Any, names: Names) -> bool:
    """Whether a block came with a hit; one that was evicted and drawn again has lost its hash."""
    return block.block_id in names.adopted and block.block_hash is not None


def _runs(held: Iterator[Holds]) -> tuple[Run, ...]:
    return tuple(Run(holds, sum(1 for _ in same)) for holds, same in itertools.groupby(held))


def _table(manager: Any, names: Names) -> Sequence[Any]:
    table: Sequence[Any] = manager.req_to_blocks.get(names.request_id, ())
    return table
