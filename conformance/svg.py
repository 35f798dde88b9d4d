"""Pictures of scenarios and lives as SVG: one text, with everything that it needs in it.

Built as a tree of elements, so that no text of a scenario can become markup. Colours are CSS
variables of the class `capproof-picture`, which follow the reader's colour scheme.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    kinds,
    longest_bar,
    parts,
    widths,
)

#: How every picture begins; a file that begins otherwise is not ours.
MARKER = '<svg xmlns="http://www.w3.org/2000/svg" class="capproof-picture"'

_LINE, _GAP, _CHARACTER, _TOP, _HEADER = 24, 30, 8, 30, 34
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
    return _text_of(_Drawing(shown.title, [shown]))


def svg_of_all(title: str, pictures: Sequence[Picture]) -> str:
    """Return pictures below each other as one SVG, each with its title; as `svg` otherwise."""
    return _text_of(_Drawing(title, pictures, with_titles=True))


def _text_of(drawing: _Drawing) -> str:
    ElementTree.indent(drawing.root, space="")
    return ElementTree.tostring(drawing.root, encoding="unicode") + "\n"


class _Drawing:
    """The elements of pictures, from top to bottom."""

    def __init__(self, title: str, pictures: Sequence[Picture], with_titles: bool = False) -> None:
        self._head, self._pictures, self._with_titles = title, pictures, with_titles
        self._rows = [row for shown in pictures for row in shown.rows]
        self._margin = 16 + _CHARACTER * max(
            [len(name) for row in self._rows for name in _names(row)], default=6
        )
        lines = [line for row in self._rows for line in row.lines]
        copies = [_counted(Holds.COPY, line.num_copies) for line in lines if line.num_copies]
        outside = max([_PLUS + _width_of(text) for text in copies], default=0)
        tables = max([sum(map(_cell_width, shown.segments)) for shown in pictures], default=0)
        self._bars_at = self._margin + tables + outside + 32
        self._y = _TOP
        name = "capproof-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
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
        found = "; ".join(f"{row.name} {row.mark}" for row in self._rows if row.mark)
        what = "Blocks" if self._with_titles else "Block table"
        return f"{what} of {self._head}" + (f": {found}" if found else "")

    def _description(self) -> str:
        return " ".join(words for shown in self._pictures for words in self._said(shown))

    def _said(self, shown: Picture) -> list[str]:
        title = [f"{shown.title}."] if self._with_titles else []
        rows = [in_words(row, shown.segments) for row in shown.rows]
        return [*title, *_left_out(shown), *rows]

    def _width(self) -> int:
        texts = [_CHARACTER * (len(row.head) + 3 + len(row.mark)) for row in self._rows]
        texts += [_CHARACTER * len(self._head)]
        texts += [_CHARACTER * len(shown.title) for shown in self._pictures]
        counts = [_CHARACTER * len(row.counts) for row in self._rows]
        bars = self._bars_at + max([_BAR + 16, *counts])
        return max([bars, 480, *texts]) + 16

    def _draw(self) -> None:
        self._text(8, 22, self._head, "capproof-head")
        most = longest_bar(self._pictures)
        for shown in self._pictures:
            self._picture(shown, most)
        self._legend()

    def _picture(self, shown: Picture, most: int) -> None:
        if self._with_titles:
            self._text(8, self._y + 16, shown.title, "capproof-head")
            self._y += _LINE
        for text in _left_out(shown):
            self._text(8, self._y + 10, text, "capproof-note")
        self._header(shown.segments)
        for row in shown.rows:
            self._row(row, shown.segments, most)

    def _header(self, segments: Sequence[Segment]) -> None:
        x, y = self._margin, self._y + _HEADER - 8
        for segment in segments:
            width = _cell_width(segment)
            self._text(x + width / 2, y, segment.label, "capproof-note capproof-middle")
            x += width
        self._y += _HEADER

    def _row(self, row: Row, segments: Sequence[Segment], most: int) -> None:
        group = SubElement(self.root, "g", {"class": "capproof-row"})
        SubElement(group, "title").text = _plain(in_words(row, segments))
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
            self._cells(line, segments, group)
            self._y += _LINE
        self._y += _GAP + (0 if row.lines else _LINE)

    def _cells(self, line: Line, segments: Sequence[Segment], group: Element) -> None:
        x = self._margin
        for segment, cell in zip(segments, line.cells, strict=True):
            width = _cell_width(segment)
            if cell is not None:
                self._cell(x, width, cell, _counted(cell, segment.count), group)
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
        for kind in (*kinds(self._pictures), *parts(self._pictures)):
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


def _left_out(shown: Picture) -> list[str]:
    return [f"{shown.left_out.capitalize()}."] if shown.left_out else []


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
