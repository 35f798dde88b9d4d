"""The picture of a replayed scenario or life: what is drawn, whatever it is drawn with.

A row per step, a cell per block column, and free blocks as a bar against the estimate. What columns
hold was seen on the real manager (`conformance.layout`); nothing here is predicted. A life has a
picture for each request (`conformance.life_picture`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from conformance.layout import Holds, TableSeen
from conformance.replay import Replay, StepSeen
from conformance.scenario import Scenario, ScenarioStep
from conformance.steps import how_it_ended

#: Columns of the longest table whose columns have a cell each; in longer ones like neighbours share
#: a cell.
MAX_SINGLE_COLUMNS = 32
#: Steps that a picture shows, the last ones.
MAX_ROWS = 40


class Part(str, Enum):
    """What blocks of a step's bar are."""

    DRAWN = "drawn"
    BEYOND = "beyond"
    UNUSED = "unused"
    FREE = "free"
    MISSING = "missing"


#: What a cell or a part of a bar is.
Kind = Holds | Part

#: A letter and words for each.
LEGEND: dict[Kind, tuple[str, str]] = {
    Holds.NULL: (".", "null block"),
    Holds.OLD: ("o", "earlier state"),
    Holds.TO_RETIRE: ("r", "state to be freed next"),
    Holds.CHECKPOINT: ("K", "pending checkpoint"),
    Holds.HIT: ("H", "cached block of the hit"),
    Holds.COPY: ("W", "copy-on-write target"),
    Holds.RUNNING: ("C", "current state"),
    Holds.SPECULATIVE: ("S", "speculative block"),
    Holds.ATTENTION: ("A", "full-attention block"),
    Part.DRAWN: ("#", "drawn"),
    Part.BEYOND: ("!", "drawn, not estimated"),
    Part.UNUSED: ("=", "estimated, not drawn"),
    Part.FREE: ("-", "free"),
    Part.MISSING: ("x", "estimated, not free"),
}


@dataclass(frozen=True)
class Segment:
    """Columns that share a cell, since in every row they hold the same."""

    first: int
    count: int

    @property
    def label(self) -> str:
        """The column, or the first and the last."""
        return str(self.first) if self.count == 1 else f"{self.first}-{self.first + self.count - 1}"


@dataclass(frozen=True)
class Line:
    """One table after a step."""

    group: str
    cells: tuple[Holds | None, ...]
    """By segment; None where the table has no such column."""
    num_copies: int
    """Copy-on-write targets that stand in no column."""


@dataclass(frozen=True)
class Row:
    """One step, or one rule of a life."""

    name: str
    """What it is and its number, from 1."""
    head: str
    """Its name, and what it does, in words."""
    lines: tuple[Line, ...]
    """A line for each group."""
    free: int | None
    """Free blocks that the allocation found."""
    estimate: int | None
    """Blocks."""
    drawn: int | None
    """Blocks."""
    mark: str
    """What is wrong with the step; empty where nothing is."""
    asks_for_blocks: bool = True
    """Whether there is anything that the free blocks are compared with."""

    @property
    def counts(self) -> str:
        """Free, estimated and drawn blocks in words."""
        counts = {"free": self.free}
        if self.asks_for_blocks:
            counts |= {"estimated": self.estimate, "drawn": self.drawn}
        return ", ".join(
            f"{what} -" if count is None else f"{what} {count:,}" for what, count in counts.items()
        )

    def parts(self) -> list[tuple[Part, int]]:
        """Return the bar from left to right: how many blocks are what, empty parts left out."""
        free, estimate, drawn = (
            max(count or 0, 0) for count in (self.free, self.estimate, self.drawn)
        )
        parts = {
            Part.DRAWN: min(drawn, estimate),
            Part.BEYOND: drawn - estimate,
            Part.UNUSED: min(estimate, free) - drawn,
            Part.FREE: free - max(drawn, estimate),
            Part.MISSING: estimate - max(free, drawn),
        }
        return [(part, count) for part, count in parts.items() if count > 0]


@dataclass(frozen=True)
class Picture:
    """Block tables and bars of one request on a target."""

    title: str
    segments: tuple[Segment, ...]
    rows: tuple[Row, ...]
    num_left_out: int
    """Rows before the first that is shown."""
    steps: str = "steps"
    """What the rows are."""

    @property
    def left_out(self) -> str:
        """What is said of rows that are not shown; empty where all are."""
        first = self.num_left_out
        return f"the first {first} {self.steps} are left out" if first else ""


def kinds(pictures: Iterable[Picture]) -> list[Kind]:
    """Return what the cells of pictures hold, for a legend."""
    lines = [line for shown in pictures for row in shown.rows for line in row.lines]
    seen = {cell for line in lines for cell in line.cells}
    seen |= {Holds.COPY for line in lines if line.num_copies}
    return [kind for kind in LEGEND if kind in seen]


def parts(pictures: Iterable[Picture]) -> list[Kind]:
    """Return what the bars of pictures show, for a legend."""
    seen = {part for shown in pictures for row in shown.rows for part, _ in row.parts()}
    return [kind for kind in LEGEND if kind in seen]


def picture(scenario: Scenario, replay: Replay) -> Picture:
    """Return what is drawn of a scenario that was replayed with its tables.

    Args:
        scenario: What was replayed.
        replay: What came of it.
    """
    shown = list(zip(scenario.steps, replay.steps, strict=False))
    first = max(len(shown) - MAX_ROWS, 0)
    segments = segments_of(table for _, seen in shown[first:] for table in seen.tables)
    rows = [
        _row(number, planned, seen, segments, _mark(scenario, replay, seen))
        for number, (planned, seen) in enumerate(shown[first:], start=first + 1)
    ]
    title = f"{scenario.name} on {replay.target}"
    return Picture(title, tuple(segments), tuple(rows), first)


def widths(parts: Sequence[tuple[Part, int]], most: int, width: int) -> list[tuple[Part, int]]:
    """Return how many of `width` places each part of a bar takes, each of them one at least.

    Args:
        parts: Blocks by part.
        most: Blocks of the longest bar, which takes `width` places, or a few more.
        width: Places.
    """
    if most <= width:
        return list(parts)
    return [(part, max(count * width // most, 1)) for part, count in parts]


def longest_bar(pictures: Iterable[Picture]) -> int:
    """Return the blocks of the longest bar of pictures, at least 1."""
    rows = [row for shown in pictures for row in shown.rows]
    return max([sum(count for _, count in row.parts()) for row in rows] + [1])


def tokens_in_words(count: int) -> str:
    """Return a number of tokens as it is read."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def in_words(row: Row, segments: Sequence[Segment]) -> str:
    """Return a step and what the columns hold after it as a text, for who does not see it."""
    tables = []
    for line in row.lines:
        cells = zip(segments, line.cells, strict=True)
        held = [f"{s.label} {LEGEND[cell][1]}" for s, cell in cells if cell is not None]
        if line.num_copies:
            held.append(f"in no column {line.num_copies} {LEGEND[Holds.COPY][1]}")
        tables.append(f"{line.group}: {', '.join(held) or 'no columns'}.")
    mark = f" {row.mark}." if row.mark else ""
    return f"{' '.join([f'{row.head}.', *tables])} Blocks: {row.counts}.{mark}"


def _row(
    number: int, planned: ScenarioStep, seen: StepSeen, segments: Sequence[Segment], mark: str
) -> Row:
    start, end = planned.call.total_computed_tokens, planned.call.num_tokens_main_model
    return Row(
        name=f"step {number}",
        head=f"step {number}: {planned.why}, {start:,} to {end:,} tokens",
        lines=lines_of(seen.tables, segments),
        free=seen.free_found,
        estimate=seen.step.estimate,
        drawn=seen.step.drawn,
        mark=mark,
    )


def lines_of(tables: Iterable[TableSeen], segments: Sequence[Segment]) -> tuple[Line, ...]:
    """Return the lines of a row."""
    return tuple(_line(table, segments) for table in tables)


def _line(table: TableSeen, segments: Sequence[Segment]) -> Line:
    ends = list(accumulate(run.count for run in table.runs))
    at = [bisect_right(ends, segment.first) for segment in segments]
    cells = tuple(table.runs[i].holds if i < len(ends) else None for i in at)
    return Line(table.group, cells, table.num_copies_outside)


def segments_of(tables: Iterable[TableSeen]) -> list[Segment]:
    """Return columns that share a cell: one each in short tables, like neighbours in long ones."""
    tables = list(tables)
    most = max([table.length for table in tables], default=0)
    if most <= MAX_SINGLE_COLUMNS:
        return [Segment(column, 1) for column in range(most)]
    ends = {end for table in tables for end in accumulate(run.count for run in table.runs)}
    return [Segment(first, end - first) for first, end in pairwise(sorted({0, *ends}))]


def _mark(scenario: Scenario, replay: Replay, seen: StepSeen) -> str:
    return "; ".join(_faults(scenario, replay, seen))


def _faults(scenario: Scenario, replay: Replay, seen: StepSeen) -> Iterator[str]:
    if seen.step.raised is not None or seen.step.refused:
        yield how_it_ended(seen.step)
    if seen is not replay.steps[-1] or len(replay.steps) < len(scenario.steps):
        return
    if scenario.theorem is None and replay.violated:
        yield f"breaks {', '.join(replay.violated)}"
    elif replay.theorem_holds is False:
        yield f"breaks {scenario.theorem}"
