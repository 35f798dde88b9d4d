"""Which blocks a step reads, writes and copies: as the worker decides it, from tables of its own.

Nothing is taken from the manager's word: the worker's own block tables are kept as it keeps them,
filled when a request is scheduled and only ever appended to. The rules are those of
`life_scheduler.CALLERS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from conformance.life_plan import (
    ATTENTION_GROUP,
    BatchRow,
    Chunk,
    CopiedTooEarly,
    Moving,
    ReadAfterFree,
    Reading,
    StateLost,
    StepPlan,
    Tokens,
    WorkerRow,
    Writing,
    WrittenAfterFree,
    WrittenByTwo,
)
from spec.logic import cdiv
from spec.vocabulary import Geometry


@dataclass(frozen=True)
class Planner:
    """Says which blocks a step reads and writes.

    Attributes:
        geometry: Sizes.
        num_groups: Full attention and the Mamba groups.
    """

    geometry: Geometry
    num_groups: int

    def read_column(self, row: WorkerRow, start: int) -> tuple[int, int]:
        """Return the column that a row's next step starts from, and how many further on.

        vLLM: `v1/worker/mamba_utils.py`, `preprocess_mamba`.
        """
        column = row.state_column
        if column < 0:
            column = (start - 1) // self.geometry.block_size
        return column, row.num_accepted - 1

    def at_start(
        self,
        request: str,
        row: WorkerRow,
        tokens: Tokens,
        start: int,
        held: Sequence[frozenset[int]],
    ) -> tuple[list[StateLost], list[Reading]]:
        """Return what a step from `start` reads, where it stands before the step."""
        if start == 0:
            return [], []
        lost = [*self._unheld_states(request, row, start, held)]
        lost += self._unheld_attention(request, row, start, held)
        if lost:
            return lost, []
        return [], [
            *self._state_readings(request, row, tokens, start),
            *self._attention_readings(request, row, tokens, start),
        ]

    def loaded(
        self,
        request: str,
        tables: Sequence[Sequence[int]],
        tokens: Tokens,
        start: int,
        end: int,
    ) -> list[Writing]:
        """Return what a connector writes that loads `tokens[start:end]`."""
        block_size, last = self.geometry.block_size, cdiv(end, self.geometry.block_size) - 1
        columns = range(start // block_size, last + 1)
        found = [*self._attention_writings(request, tables[0], columns, tokens, end, start, end)]
        for group in range(1, self.num_groups):
            block = tables[group][last]
            if block:
                found.append(Writing(request, group, block, tokens, end, end, end, 0))
        return found

    def step(
        self,
        step: int,
        copies: Iterable[tuple[int, int]],
        chunks: Sequence[Chunk],
        holders: frozenset[int],
        zeroed: Sequence[int] = (),
    ) -> StepPlan:
        """Plan a step, and note in the workers' rows where it leaves the states.

        Args:
            step: Steps run before.
            copies: Copies on write that are queued.
            chunks: What is computed.
            holders: Block ids that any request holds.
            zeroed: Block ids that are cleared first.
        """
        plan = StepPlan(step, [*copies], zeroed)
        written: set[int] = set()
        for chunk in chunks:
            if chunk.start > 0:
                plan.lost += self._unheld_states(chunk.request, chunk.row, chunk.start, chunk.held)
            plan.lost += self._wrong_targets(chunk, holders, written)
            plan.lost += self._unheld_attention(chunk.request, chunk.row, chunk.start, chunk.held)
        plan.lost += self._copied_too_early(plan.copies, chunks)
        if not plan.lost:
            for chunk in chunks:
                self._plan_chunk(plan, chunk)
        return plan

    # ---- one chunk -------------------------------------------------------------------------------

    def _plan_chunk(self, plan: StepPlan, chunk: Chunk) -> None:
        row, tables, block_size = chunk.row, chunk.row.tables, self.geometry.block_size
        end_column, known = self._end_column(chunk), self._known(chunk)
        before = row.state_column, row.num_accepted
        if chunk.external_start < chunk.start:
            loaded = chunk.external_start, chunk.start
            plan.loads += self.loaded(chunk.request, tables, chunk.tokens, *loaded)
        columns = range(chunk.start // block_size, end_column + 1)
        plan.attended += self._attention_writings(
            chunk.request, tables[0], columns, chunk.tokens, known, chunk.start, chunk.end
        )
        if chunk.start > 0:
            self._plan_state_read(plan, chunk, end_column)
            plan.readings += self._attention_readings(chunk.request, row, chunk.tokens, chunk.start)
        self._plan_states(plan, chunk, end_column, known)
        plan.batch.append(
            BatchRow(
                chunk.request,
                tables,
                chunk.start,
                chunk.end - chunk.start,
                chunk.num_drafts,
                chunk.num_accepted_drafts,
                *before,
                row.state_column,
                row.num_accepted,
            )
        )

    def _plan_state_read(self, plan: StepPlan, chunk: Chunk, end_column: int) -> None:
        """Move the state to the column of the step's end, and read it there."""
        column, further = self.read_column(chunk.row, chunk.start)
        for reading in self._state_readings(
            chunk.request, chunk.row, chunk.tokens[: chunk.start], chunk.start
        ):
            if column == end_column:
                plan.readings.append(reading)
                continue
            target = chunk.row.tables[reading.group][end_column]
            plan.moves_before.append(
                Moving(reading.group, reading.window, reading.block, target, further)
            )
            plan.readings.append(
                Reading(
                    chunk.request,
                    reading.group,
                    target,
                    reading.tokens,
                    window=target,
                    source=reading.block,
                )
            )

    def _plan_states(self, plan: StepPlan, chunk: Chunk, column: int, known: int) -> None:
        row, tokens, block_size = chunk.row, chunk.tokens, self.geometry.block_size
        running = chunk.end - chunk.num_drafts
        aligned = known // block_size * block_size
        for group in range(1, self.num_groups):
            table = row.tables[group]
            checkpoint = table[column - 1] if chunk.checkpoint else 0
            if checkpoint:
                at = chunk.checkpoint
                plan.writings.append(
                    Writing(chunk.request, group, checkpoint, tokens, known, at, at, 0)
                )
            for i in range(chunk.num_drafts + 1):
                window = chunk.num_drafts if i == 0 else -1
                at = running + i
                plan.writings.append(
                    Writing(chunk.request, group, table[column + i], tokens, known, at, at, window)
                )
            if aligned >= running:
                offset, target = aligned - running, table[aligned // block_size - 1]
                if target and (offset or target != table[column]):
                    state = table[column + offset]
                    plan.moves_after.append(Moving(group, table[column], state, target, offset))
        stays = aligned >= running and aligned // block_size - 1 == column
        row.num_accepted = 1 if stays else chunk.num_accepted_drafts + 1
        row.state_column = column

    def _end_column(self, chunk: Chunk) -> int:
        return cdiv(chunk.end, self.geometry.block_size) - 1

    def _known(self, chunk: Chunk) -> int:
        return chunk.end - chunk.num_drafts + chunk.num_accepted_drafts

    # ---- what is read and written ----------------------------------------------------------------

    def _state_readings(
        self, request: str, row: WorkerRow, tokens: Tokens, start: int
    ) -> Iterator[Reading]:
        column, further = self.read_column(row, start)
        for group in range(1, self.num_groups):
            table = row.tables[group]
            yield Reading(
                request, group, table[column + further], tokens[:start], table[column], further
            )

    def _attention_readings(
        self, request: str, row: WorkerRow, tokens: Tokens, start: int
    ) -> Iterator[Reading]:
        block_size = self.geometry.block_size
        for column in range(cdiv(start, block_size)):
            block, end = row.tables[ATTENTION_GROUP][column], min(start, (column + 1) * block_size)
            yield Reading(request, ATTENTION_GROUP, block, tokens[:end])

    def _attention_writings(
        self,
        request: str,
        table: Sequence[int],
        columns: Iterable[int],
        tokens: Tokens,
        known: int,
        start: int,
        end: int,
    ) -> Iterator[Writing]:
        block_size = self.geometry.block_size
        for column in columns:
            if table[column]:
                first = max(start, column * block_size)
                last = min(end, (column + 1) * block_size)
                yield Writing(request, ATTENTION_GROUP, table[column], tokens, known, first, last)

    # ---- what is wrong whatever blocks hold ------------------------------------------------------

    def _unheld_states(
        self, request: str, row: WorkerRow, start: int, held: Sequence[frozenset[int]]
    ) -> Iterator[StateLost]:
        column, further = self.read_column(row, start)
        for group in range(1, self.num_groups):
            table = row.tables[group]
            # The convolution's window is read from the first column, the state from the other.
            for read in sorted({column, column + further}):
                block = table[read] if read < len(table) else 0
                if block not in held[group]:
                    detail = f"column {read} of group {group} is not held"
                    yield ReadAfterFree(request, block, detail)

    def _unheld_attention(
        self, request: str, row: WorkerRow, start: int, held: Sequence[frozenset[int]]
    ) -> Iterator[StateLost]:
        for column in range(cdiv(start, self.geometry.block_size)):
            block = row.tables[ATTENTION_GROUP][column]
            if block not in held[ATTENTION_GROUP]:
                detail = f"column {column} of full attention is not held"
                yield ReadAfterFree(request, block, detail)

    def _wrong_targets(
        self, chunk: Chunk, holders: frozenset[int], written: set[int]
    ) -> Iterator[StateLost]:
        """A step writes to blocks of its own only; the null block takes what nobody needs."""
        for group, column, may_be_null in self._targets(chunk):
            table = chunk.row.tables[group]
            block = table[column] if column < len(table) else 0
            if may_be_null and not block:
                continue
            where = f"column {column} of group {group} is written to"
            if block not in chunk.held[group]:
                cls = WrittenByTwo if block in holders else WrittenAfterFree
                yield cls(chunk.request, block, f"{where} and not held")
            elif block in written:
                yield WrittenByTwo(chunk.request, block, f"{where}, by another request as well")
            written.add(block)

    def _copied_too_early(
        self, copies: Sequence[tuple[int, int]], chunks: Sequence[Chunk]
    ) -> Iterator[StateLost]:
        """A hit that ends inside a block of full attention copies what is there before the step."""
        filled = [
            writing
            for chunk in chunks
            for writing in self._attention_writings(
                chunk.request,
                chunk.row.tables[ATTENTION_GROUP],
                range(
                    min(chunk.external_start, chunk.start) // self.geometry.block_size,
                    self._end_column(chunk) + 1,
                ),
                chunk.tokens,
                chunk.end,
                min(chunk.external_start, chunk.start),
                chunk.end,
            )
        ]
        sources = {target: source for source, target in copies}
        for chunk in chunks:
            column = (chunk.start - 1) // self.geometry.block_size
            block = chunk.row.tables[ATTENTION_GROUP][column] if chunk.start > 0 else 0
            for writing in filled:
                if writing.block == sources.get(block) and writing.start < chunk.start:
                    detail = (
                        f"is a copy of block {writing.block}, which {writing.request} fills from "
                        f"token {writing.start} on in the same step"
                    )
                    yield CopiedTooEarly(chunk.request, block, detail)

    def _targets(self, chunk: Chunk) -> Iterator[tuple[int, int, bool]]:
        """Group, column, and whether it may be the null block."""
        column = self._end_column(chunk)
        for i in range(chunk.start // self.geometry.block_size, column + 1):
            yield ATTENTION_GROUP, i, False
        for group in range(1, self.num_groups):
            for i in range(chunk.num_drafts + 1):
                yield group, column + i, False
            if chunk.checkpoint:
                yield group, column - 1, True
