"""Pictures of scenarios and lives on a terminal: letters, coloured where there are colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from conformance.layout import Holds
from conformance.picture import (
    LEGEND,
    Kind,
    Part,
    Picture,
    Row,
    Segment,
    kinds,
    longest_bar,
    parts,
    widths,
)

#: Characters of the longest bar.
BAR_WIDTH = 40
#: Characters of the narrowest console that is drawn on.
_LEAST_WIDTH = 40

_STYLES: dict[Kind, str] = {
    Holds.NULL: "dim",
    Holds.OLD: "black on yellow",
    Holds.TO_RETIRE: "black on bright_yellow",
    Holds.CHECKPOINT: "black on magenta",
    Holds.HIT: "black on cyan",
    Holds.COPY: "black on bright_red",
    Holds.RUNNING: "black on green",
    Holds.SPECULATIVE: "white on blue",
    Holds.ATTENTION: "black on white",
    Part.DRAWN: "green",
    Part.BEYOND: "bold red",
    Part.UNUSED: "yellow",
    Part.FREE: "dim",
    Part.MISSING: "red",
}


def draw(console: Console, shown: Picture) -> None:
    """Print a picture: the tables, as many columns at a time as fit, and then the bars."""
    lines = _lines(shown, max(console.width, _LEAST_WIDTH), longest_bar([shown]))
    for line in (*lines, *_legend([shown])):
        console.print(line, soft_wrap=True)


def draw_all(console: Console, pictures: Sequence[Picture]) -> None:
    """Print pictures below each other, each with its title; one legend and one scale for all."""
    most = longest_bar(pictures)
    for shown in pictures:
        console.print(Text(f"  {shown.title}", style="bold"), soft_wrap=True)
        for row in shown.rows:
            console.print(Text(f"  {row.head}"), soft_wrap=True)
        for line in _lines(shown, max(console.width, _LEAST_WIDTH), most):
            console.print(line, soft_wrap=True)
    for line in _legend(pictures):
        console.print(line, soft_wrap=True)


def _lines(shown: Picture, width: int, most: int) -> Iterator[Text]:
    if shown.left_out:
        yield Text(f"  {shown.left_out}")
    names = [name for row in shown.rows for name in (row.name, *_names(row))]
    margin = 2 + max(map(len, names), default=0)
    for first, last in _bands(shown.segments, width - margin):
        yield from _band(shown, first, last, margin)
    if shown.rows:
        yield Text("  blocks")
        for row in shown.rows:
            yield _bar(row, most, margin)


def _names(row: Row) -> list[str]:
    """The names of a row's lines."""
    if len(row.lines) == 1:
        return [row.name]
    return [f"{row.name} {line.group}" for line in row.lines]


def _bands(segments: Sequence[Segment], width: int) -> Iterator[tuple[int, int]]:
    """Ranges of segments that fit beside each other, at least one in each."""
    first = used = 0
    for i, segment in enumerate(segments):
        needed = 1 + _cell_width(segment)
        if i > first and used + needed > width:
            yield first, i
            first, used = i, 0
        used += needed
    if first < len(segments):
        yield first, len(segments)


def _cell_width(segment: Segment) -> int:
    return max(len(segment.label), len(_cell_text(Holds.NULL, segment)))


def _cell_text(cell: Holds | None, segment: Segment) -> str:
    return _counted(cell, segment.count) if cell else ""


def _counted(cell: Holds, count: int) -> str:
    letter = LEGEND[cell][0]
    return letter if count == 1 else f"{letter} x{count}"


def _band(shown: Picture, first: int, last: int, margin: int) -> Iterator[Text]:
    segments = shown.segments[first:last]
    header = Text("  column".ljust(margin), style="dim")
    for segment in segments:
        header.append(" " + segment.label.ljust(_cell_width(segment)))
    header.rstrip()
    yield header
    for row in shown.rows:
        for i, (name, line) in enumerate(zip(_names(row), row.lines, strict=True)):
            text = Text(f"  {name}".ljust(margin))
            for segment, cell in zip(segments, line.cells[first:last], strict=True):
                padded = _cell_text(cell, segment).ljust(_cell_width(segment))
                text.append(" ").append(padded, _STYLES[cell] if cell else "")
            text.rstrip()
            if line.num_copies and last == len(shown.segments):
                text.append(" + ").append(
                    _counted(Holds.COPY, line.num_copies), _STYLES[Holds.COPY]
                )
            yield text if i else _marked(text, row)


def _bar(row: Row, most: int, margin: int) -> Text:
    text = Text(f"  {row.name}".ljust(margin) + " ")
    for part, count in widths(row.parts(), most, BAR_WIDTH):
        text.append(LEGEND[part][0] * count, _STYLES[part])
    text.append(f"  {row.counts}")
    return _marked(text, row)


def _marked(text: Text, row: Row) -> Text:
    return text.append(f"  <-- {row.mark}", "bold red") if row.mark else text


def _legend(pictures: Sequence[Picture]) -> Iterator[Text]:
    for shown in (kinds(pictures), parts(pictures)):
        if shown:
            text = Text("  ")
            for i, kind in enumerate(shown):
                letter, words = LEGEND[kind]
                text.append(", " if i else "").append(letter, _STYLES[kind]).append(f" {words}")
            yield text
