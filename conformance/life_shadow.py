"""What each physical block holds, as the worker writes it, and what the next step will read.

A Mamba block holds the state after some tokens, a full-attention block the keys and values of some:
either way a function of the tokens up to a position, so a block's content here is its group and
those tokens. Nothing is taken from the manager's word: the worker's own block tables are kept as
it keeps them, filled when a request is scheduled and only ever appended to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from spec.logic import cdiv
from spec.vocabulary import Geometry

ATTENTION_GROUP = 0

Tokens = tuple[int, ...]
#: Group and tokens up to the block's last; None is anything at all.
Content = tuple[int, Tokens] | None


class StateLost(Exception):
    """A block does not hold what it should when it is read; block id and what is wrong."""

    def __init__(self, block: int, detail: str) -> None:
        super().__init__(f"block {block}: {detail}")
        self.block, self.detail = block, detail


@dataclass
class WorkerRow:
    """What the worker keeps of one request that runs."""

    tables: list[list[int]]
    """Block ids by group and column; stale ones stay."""
    state_column: int = -1
    """Column that the last step's end lies in; -1 before the first step."""
    num_accepted: int = 1
    """Tokens that the last step's sampling accepted, the sampled one included."""


@dataclass(frozen=True)
class Chunk:
    """What a step computes of one request, in tokens."""

    row: WorkerRow
    tokens: Tokens
    """All tokens that the request has once the step's output is known."""
    start: int
    end: int
    """Where its tokens end, drafts included."""
    num_drafts: int
    num_accepted_drafts: int
    held: Sequence[frozenset[int]]
    """Block ids by group that the request may read and write."""
    external_start: int = 0
    """Tokens from here to `start` are loaded before the step computes; `start` is none."""
    checkpoint: int = 0
    """Position of the internal checkpoint that the step writes, 0 for none."""


@dataclass
class Shadow:
    """Contents of all blocks.

    Attributes:
        geometry: Sizes.
        num_groups: Full attention and the Mamba groups.
    """

    geometry: Geometry
    num_groups: int
    contents: dict[int, Content] = field(default_factory=dict)

    def read_column(self, row: WorkerRow, start: int) -> tuple[int, int]:
        """Return the column that a row's next step starts from, and how many further on.

        vLLM: `v1/worker/mamba_utils.py`, `preprocess_mamba`.
        """
        column = row.state_column
        if column < 0:
            column = (start - 1) // self.geometry.block_size
        return column, row.num_accepted - 1

    def check_start(
        self, row: WorkerRow, tokens: Tokens, start: int, held: Sequence[frozenset[int]]
    ) -> None:
        """Check that what a step from `start` reads is there, and held by the request.

        Raises:
            StateLost: It is not.
        """
        if start == 0:
            return
        self._check_state(row, tokens, start, held)
        self._check_attention(row, tokens, start, held)

    def _check_state(
        self, row: WorkerRow, tokens: Tokens, start: int, held: Sequence[frozenset[int]]
    ) -> None:
        column, further = self.read_column(row, start)
        for group in range(1, self.num_groups):
            table = row.tables[group]
            # The convolution's window is read from the first column, the state from the other.
            for read in {column, column + further}:
                block = table[read] if read < len(table) else 0
                if block not in held[group]:
                    raise StateLost(block, f"column {read} of group {group} is not held")
            block = table[column + further]
            self._expect(block, (group, tokens[:start]), f"state after {start} tokens")

    def _check_attention(
        self, row: WorkerRow, tokens: Tokens, start: int, held: Sequence[frozenset[int]]
    ) -> None:
        block_size = self.geometry.block_size
        for column in range(cdiv(start, block_size)):
            block, end = row.tables[ATTENTION_GROUP][column], min(start, (column + 1) * block_size)
            if block not in held[ATTENTION_GROUP]:
                raise StateLost(block, f"column {column} of full attention is not held")
            self._expect_prefix(block, ATTENTION_GROUP, tokens[:end])

    def check_cached(self, block: int, group: int, tokens: Tokens) -> None:
        """Check that a block holds what the hash says that finds it.

        Raises:
            StateLost: It does not.
        """
        if group == ATTENTION_GROUP:
            self._expect_prefix(block, group, tokens)
        else:
            self._expect(block, (group, tokens), f"cached state after {len(tokens)} tokens")

    def load(self, table: Sequence[Sequence[int]], tokens: Tokens, start: int, end: int) -> None:
        """Have a connector write what `tokens[start:end]` leave behind."""
        block_size = self.geometry.block_size
        for column in range(start // block_size, cdiv(end, block_size)):
            self._write(table[ATTENTION_GROUP], column, ATTENTION_GROUP, tokens, end)
        for group in range(1, self.num_groups):
            self._write(table[group], cdiv(end, block_size) - 1, group, tokens, end)

    def run(self, copies: Iterable[tuple[int, int]], chunks: Sequence[Chunk]) -> None:
        """Run a step: copies, loads, moves of states, then the forward pass.

        Raises:
            StateLost: Something it reads is not there, or it writes to what is not the request's.
        """
        for source, destination in copies:
            self.contents[destination] = self.contents.get(source)
        for chunk in chunks:
            if chunk.external_start < chunk.start:
                self.load(chunk.row.tables, chunk.tokens, chunk.external_start, chunk.start)
        for chunk in chunks:
            if chunk.start > 0:
                self._check_state(chunk.row, chunk.tokens, chunk.start, chunk.held)
            self._check_targets(chunk)
        for chunk in chunks:
            self._attend(chunk)
        for chunk in chunks:
            # Each layer writes all requests' keys and values before it reads any.
            self._check_attention(chunk.row, chunk.tokens, chunk.start, chunk.held)
            self._compute(chunk)

    def _attend(self, chunk: Chunk) -> None:
        end = chunk.end - chunk.num_drafts + chunk.num_accepted_drafts
        table = chunk.row.tables[ATTENTION_GROUP]
        for i in range(chunk.start // self.geometry.block_size, self._end_column(chunk) + 1):
            self._write(table, i, ATTENTION_GROUP, chunk.tokens, end)

    def _end_column(self, chunk: Chunk) -> int:
        return cdiv(chunk.end, self.geometry.block_size) - 1

    def _check_targets(self, chunk: Chunk) -> None:
        """A step writes to blocks of its own only; the null block takes what nobody needs."""
        block_size, column = self.geometry.block_size, self._end_column(chunk)
        columns = {0: range(chunk.start // block_size, column + 1)}
        for group in range(1, self.num_groups):
            columns[group] = range(column, column + chunk.num_drafts + 1)
        for group, written in columns.items():
            table = chunk.row.tables[group]
            for i in written:
                if i >= len(table) or table[i] not in chunk.held[group]:
                    block = table[i] if i < len(table) else 0
                    detail = f"column {i} of group {group} is written to and not held"
                    raise StateLost(block, detail)
        if chunk.checkpoint:
            for group in range(1, self.num_groups):
                block = chunk.row.tables[group][column - 1]
                if block and block not in chunk.held[group]:
                    raise StateLost(block, f"the checkpoint in column {column - 1} is not held")

    def _compute(self, chunk: Chunk) -> None:
        row, tokens, column = chunk.row, chunk.tokens, self._end_column(chunk)
        running, accepted = chunk.end - chunk.num_drafts, chunk.num_accepted_drafts
        block_size = self.geometry.block_size
        aligned = (running + accepted) // block_size * block_size
        for group in range(1, self.num_groups):
            table = row.tables[group]
            if chunk.checkpoint:
                self._write(table, column - 1, group, tokens, chunk.checkpoint)
            for i in range(chunk.num_drafts + 1):
                known = running + i if i <= accepted else None
                self._write(table, column + i, group, tokens, known)
            if aligned >= running:
                state = self.contents[table[column + aligned - running]]
                destination = table[aligned // block_size - 1]
                if destination:
                    self.contents[destination] = state
        stays = aligned >= running and aligned // block_size - 1 == column
        row.num_accepted = 1 if stays else accepted + 1
        row.state_column = column

    def _write(
        self, table: Sequence[int], column: int, group: int, tokens: Tokens, end: int | None
    ) -> None:
        if not table[column]:
            return
        if group == ATTENTION_GROUP and end is not None:
            end = min(end, (column + 1) * self.geometry.block_size)
        self.contents[table[column]] = None if end is None else (group, tokens[:end])

    def _expect(self, block: int, content: tuple[int, Tokens], what: str) -> None:
        found = self.contents.get(block)
        if found != content:
            raise StateLost(block, f"holds {_shown(found)}, expected {what} of group {content[0]}")

    def _expect_prefix(self, block: int, group: int, tokens: Tokens) -> None:
        found = self.contents.get(block)
        if found is None or found[0] != group or found[1][: len(tokens)] != tokens:
            expected = f"keys and values of {len(tokens)} tokens"
            raise StateLost(block, f"holds {_shown(found)}, expected {expected}")


def _shown(content: Content) -> str:
    if content is None:
        return "nothing known"
    group, tokens = content
    runs = ", ".join(f"{len([*same])} of {token}" for token, same in groupby(tokens))
    return f"{len(tokens)} tokens ({runs}) of group {group}"
