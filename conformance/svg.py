"""The picture of a replayed scenario as SVG: one text, with everything that it needs in it.

Built as a tree of elements, so that no text of a scenario can become markup. Colours are CSS
variables of the class `capproof-picture`, which follow the reader's colour scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from conformance.layout import Holds
from conformance.picture import (
    LEGEND,
    Kind,
    Line,
    Part,
    Picture,
    Row,
    Segment,
    in_words,
    longest_bar,
    widths,
)

#: How every picture begins; a file that begins otherwise is not ours.
MARKER = '<svg xmlns="http://www.w3.org/2000/svg" class="capproof-picture"'

_LINE, _GAP, _CHARACTER, _TOP = 24, 30, 8, 64
_CELL, _PLUS = 26, 16
_BAR = 200
#: Fill by kind, in a light and in a dark scheme.
_FILLS: dict[Kind, tuple[str, str]] = {
    Holds.NULL: ("#f2f2f2", "#2b2b2b"),
    Holds.OLD: ("#e8d9a8", "#6b5a1e"),
    Holds.TO_RETIRE: ("#f0c040", "#9a7200"),
    Holds.CHECKPOINT: ("#dcb4ee", "#7a3f96"),
    Holds.HIT: ("#a8dcec", "#1f6f86"),
    Holds.COPY: ("#f4b09c", "#9c4127"),
    Holds.RUNNING: ("#a6dba0", "#2f7a3a"),
    Holds.SPECULATIVE: ("#b4c8f0", "#35549c"),
    Holds.ATTENTION: ("#d0d0d0", "#5c5c5c"),
    Part.DRAWN: ("#5aae61", "#5aae61"),
    Part.BEYOND: ("#c0281c", "#ff6a5c"),
    Part.UNUSED: ("#f0c040", "#c79a1c"),
    Part.FREE: ("#e6e6e6", "#3a3a3a"),
    Part.MISSING: ("#e79a8f", "#8c3226"),
}
_MARK = ("#b3261e", "#ff8a80")


def svg(shown: Picture) -> str:
    """Return a picture as SVG.

    Args:
        shown: What is drawn.

    Returns:
        One `svg` element, with a line break behind it; `<title>` and `<desc>` say what it shows.
    """
    drawing = _Drawing(shown)
    ElementTree.indent(drawing.root, space="")
    return ElementTree.tostring(drawing.root, encoding="unicode") + "\n"


class _Drawing:
    """The elements of a picture, from top to bottom."""

    def __init__(self, shown: Picture) -> None:
        self._shown = shown
        self._margin = 16 + _CHARACTER * max(
            [len(name) for row in shown.rows for name in _names(row)], default=6
        )
        self._cell_widths = [_cell_width(segment) for segment in shown.segments]
        lines = [line for row in shown.rows for line in row.lines]
        copies = [_counted(Holds.COPY, line.num_copies) for line in lines if line.num_copies]
        outside = max([_PLUS + _width_of(text) for text in copies], default=0)
        self._bars_at = self._margin + sum(self._cell_widths) + outside + 32
        self._y = _TOP
        name = "capproof-" + re.sub(r"[^a-z0-9]+", "-", shown.title.lower()).strip("-")
        self.root = Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "class": "capproof-picture",
                "role": "img",
                "aria-labelledby": f"{name}-title {name}-desc",
            },
        )
        SubElement(self.root, "title", {"id": f"{name}-title"}).text = _plain(self._title())
        SubElement(self.root, "desc", {"id": f"{name}-desc"}).text = _plain(self._description())
        SubElement(self.root, "style").text = _style()
        paper = {"class": "capproof-paper", "width": "100%", "height": "100%"}
        SubElement(self.root, "rect", paper)
        self._draw()
        self.root.set("viewBox", f"0 0 {self._width()} {self._y}")
        # A picture keeps its size where there is room, and shrinks where there is none.
        self.root.set("style", f"max-width:{self._width()}px;width:100%")

    def _title(self) -> str:
        marks = [row for row in self._shown.rows if row.mark]
        found = "; ".join(f"step {row.number} {row.mark}" for row in marks)
        return f"Block table of {self._shown.title}" + (f": {found}" if found else "")

    def _description(self) -> str:
        rows = [in_words(row, self._shown.segments) for row in self._shown.rows]
        return " ".join([*self._left_out(), *rows])

    def _left_out(self) -> Iterator[str]:
        if self._shown.num_left_out:
            yield f"The first {self._shown.num_left_out} steps are left out."

    def _width(self) -> int:
        texts = [_CHARACTER * (len(row.head) + 3 + len(row.mark)) for row in self._shown.rows]
        texts += [_CHARACTER * len(self._shown.title)]
        counts = [_CHARACTER * len(row.counts) for row in self._shown.rows]
        bars = self._bars_at + max([_BAR + 16, *counts])
        return max([bars, 480, *texts]) + 16

    def _draw(self) -> None:
        self._text(8, 22, self._shown.title, "capproof-head")
        for text in self._left_out():
            self._text(8, 40, text, "capproof-note")
        self._header()
        most = longest_bar(self._shown)
        for row in self._shown.rows:
            self._row(row, most)
        self._legend()

    def _header(self) -> None:
        x = self._margin
        for segment, width in zip(self._shown.segments, self._cell_widths, strict=True):
            self._text(x + width / 2, _TOP - 8, segment.label, "capproof-note capproof-middle")
            x += width

    def _row(self, row: Row, most: int) -> None:
        group = SubElement(self.root, "g", {"class": "capproof-row"})
        SubElement(group, "title").text = _plain(in_words(row, self._shown.segments))
        height = _LINE * max(len(row.lines), 1)
        if row.mark:
            box = {"class": "capproof-marked", "x": "2", "y": str(self._y - 2), "rx": "4"}
            width = self._width() - 4
            size = {"width": str(width), "height": str(height + _GAP + 16)}
            SubElement(group, "rect", box | size)
        head = self._text(8, self._y + 14, row.head, "capproof-note", group)
        if row.mark:
            mark = f"\N{BLACK LEFT-POINTING TRIANGLE} {row.mark}"
            SubElement(head, "tspan", {"class": "capproof-mark", "dx": "8"}).text = _plain(mark)
        self._y += 22
        self._bar(row, most, group)
        for name, line in zip(_names(row), row.lines, strict=True):
            self._text(8, self._y + 17, name, "capproof-name", group)
            self._cells(line, group)
            self._y += _LINE
        self._y += _GAP

    def _cells(self, line: Line, group: Element) -> None:
        x = self._margin
        for i, (width, cell) in enumerate(zip(self._cell_widths, line.cells, strict=True)):
            if cell is not None:
                text = _counted(cell, self._shown.segments[i].count)
                self._cell(x, width, cell, text, group)
            x += width
        if line.num_copies:
            text = _counted(Holds.COPY, line.num_copies)
            self._text(x + _PLUS / 2, self._y + 17, "+", "capproof-middle", group)
            self._cell(x + _PLUS, _width_of(text), Holds.COPY, text, group)

    def _cell(self, x: float, width: float, cell: Holds, text: str, group: Element) -> None:
        self._box(x, self._y, width, _LINE, _class(cell), group)
        self._text(x + width / 2, self._y + 17, text, "capproof-middle", group)

    def _bar(self, row: Row, most: int, group: Element) -> None:
        x = float(self._bars_at)
        for part, count in widths(row.parts(), most, _BAR):
            width = count * _BAR / most if most <= _BAR else count
            self._box(x, self._y + 4, width, _LINE - 8, _class(part), group)
            x += width
        self._text(self._bars_at, self._y + _LINE + 12, row.counts, "capproof-note", group)

    def _legend(self) -> None:
        for kind in (*self._shown.kinds, *self._shown.parts):
            letter, words = LEGEND[kind]
            self._box(8, self._y, _CELL, 18, _class(kind), self.root)
            if isinstance(kind, Holds):
                self._text(8 + _CELL / 2, self._y + 13, letter, "capproof-middle")
            self._text(16 + _CELL, self._y + 13, words, "capproof-note")
            self._y += 22

    def _box(self, x: float, y: float, width: float, height: float, kind: str, to: Element) -> None:
        sizes = {"x": x, "y": y, "width": width, "height": height}
        SubElement(to, "rect", {"class": kind, **{k: f"{v:g}" for k, v in sizes.items()}})

    def _text(self, x: float, y: float, text: str, kind: str, to: Element | None = None) -> Element:
        to = self.root if to is None else to
        element = SubElement(to, "text", {"class": kind, "x": f"{x:g}", "y": f"{y:g}"})
        element.text = _plain(text)
        return element


def _names(row: Row) -> list[str]:
    return [line.group for line in row.lines]


def _cell_width(segment: Segment) -> int:
    return max(_width_of(segment.label), _width_of(_counted(Holds.NULL, segment.count)))


def _width_of(text: str) -> int:
    return max(_CELL, 8 + _CHARACTER * len(text))


def _counted(cell: Holds, count: int) -> str:
    letter = LEGEND[cell][0]
    return letter if count == 1 else f"{letter} \N{MULTIPLICATION SIGN}{count}"


def _plain(text: str) -> str:
    """A text without what XML cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _class(kind: Kind) -> str:
    cell = "capproof-cell " if isinstance(kind, Holds) else ""
    return f"{cell}capproof-{_variable(kind)}"


def _style() -> str:
    light, dark = (_variables(scheme) for scheme in (0, 1))
    fills = [f".capproof-{name}{{fill:var(--capproof-{name})}}" for name in map(_variable, LEGEND)]
    return "".join(
        (
            f".capproof-picture{{{light}}}",
            # Apart from the variables, which simple renderers do not read.
            ".capproof-picture{color:var(--capproof-ink);font-family:ui-monospace,monospace;font-size:13px}",
            f"@media (prefers-color-scheme:dark){{.capproof-picture{{{dark}}}}}",
            ".capproof-paper{fill:var(--capproof-paper)}",
            ".capproof-picture text{fill:currentColor}",
            ".capproof-cell{stroke:currentColor;stroke-width:.5}",
            ".capproof-head{font-weight:bold}.capproof-middle{text-anchor:middle}",
            ".capproof-note{font-size:12px}",
            ".capproof-picture .capproof-mark{fill:var(--capproof-mark);font-weight:bold}",
            ".capproof-marked{fill:none;stroke:var(--capproof-mark);stroke-width:1.5}",
            *fills,
        )
    )


def _variables(scheme: int) -> str:
    named = {_variable(kind): fills[scheme] for kind, fills in _FILLS.items()}
    named |= {"mark": _MARK[scheme], "ink": ("#1a1a1a", "#ededed")[scheme]}
    named["paper"] = ("#ffffff", "#161616")[scheme]
    return "".join(f"--capproof-{name}:{colour};" for name, colour in named.items())


def _variable(kind: Kind) -> str:
    return f"bar-{kind.value}" if isinstance(kind, Part) else kind.value
