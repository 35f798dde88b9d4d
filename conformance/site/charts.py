"""Charts of the site as SVG texts: drawn by pygal, without its scripts, in the site's own colours.

Colours are CSS variables of the page, so that a chart follows the reader's colour scheme. What a
chart shows is said in its title and description, and stands beside it as a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from conformance.driver import Driver, DriverError
from conformance.obligations import NOT_APPLICABLE, Row
from conformance.site import names
from conformance.steps import chunk, last_of
from spec.families import FAMILIES
from spec.vocabulary import Geometry

#: Sizes of vLLM #57050, in tokens unless said otherwise: `conformance/cases.toml`.
GEOMETRY = Geometry(
    block_size=896,
    hash_block_size=128,
    num_speculative_blocks=0,
    num_prefill_checkpoint_blocks=1,
    prefill_checkpoint_alignment=64,
    drop_eagle_checkpoint_block=False,
)
#: Tokens that the request has computed before the step.
COMPUTED = 23_040
#: Lengths of the prompt, in tokens, up to vLLM #57050's `--max-model-len`; 704,547 was reported.
LENGTHS = (25_121, *(131_072 * n for n in range(1, 6)), 704_547, 786_432, 917_504, 1_048_576)
#: Blocks, more than any of these steps is told that it needs.
_POOL = 4096
_VERDICTS = ("PROVED", "REFUTED", NOT_APPLICABLE)
_WIDTH = 760
#: Colours of series that the style sheet has.
_NUM_COLOURS = 10


@dataclass(frozen=True)
class Chart:
    """A chart with its numbers.

    Attributes:
        slug: Its place on the page.
        title: What it shows.
        text: A sentence or two on how to read it.
        svg: The picture.
        head: Headings of the table with its numbers.
        lines: That table; the first column names the row.
        legend: What the colours are: a variable of the style sheet, and a name.
    """

    slug: str
    title: str
    text: str
    svg: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    legend: tuple[tuple[str, str], ...]


def estimate_by_length(drivers: Mapping[str, Driver | str]) -> Chart | None:
    """Return estimate and drawn of a checkpoint step against the prompt's length.

    Args:
        drivers: By target, what builds its managers; those that cannot take the step are left out.

    Returns:
        None where no target can take it.
    """
    estimates: dict[tuple[int, ...], list[str]] = {}
    draws: dict[tuple[int, ...], list[str]] = {}
    for target, driver in drivers.items():
        seen = None if isinstance(driver, str) else _seen(driver)
        if seen is not None:
            estimates.setdefault(seen[0], []).append(target)
            draws.setdefault(seen[1], []).append(target)
    series = {
        f"{what}, {names.listed(targets)}": values
        for what, found in (("estimate", estimates), ("drawn", draws))
        for values, targets in sorted(found.items(), key=_last_first)
    }
    if not series:
        return None
    colours = [colour for colour, _ in _legend(series)]
    chart = _new("XY", colours=colours, height=340, **_ABOUT_LENGTH)
    for name, values in series.items():
        chart.add(name, list(zip(LENGTHS, values, strict=True)))
    chart.x_labels = [262_144 * n for n in range(5)]
    title = "Blocks that a checkpoint step is told and takes, by length of the prompt"
    said = "; ".join(
        f"{name}: {values[0]:,} blocks at {LENGTHS[0]:,} tokens, {values[-1]:,} at {LENGTHS[-1]:,}"
        for name, values in series.items()
    )
    return Chart(
        "estimate-by-length",
        title,
        f"Asked of the real managers. {COMPUTED:,} tokens are computed, and one step computes the "
        "rest of the prompt and keeps a checkpoint: B 896, H 128, S 0, K 1, the sizes of vLLM "
        "#57050. A line that takes off is a request that may never be admitted.",
        _drawn(chart, "estimate-by-length", title, said),
        ("tokens", *series),
        tuple(
            (f"{length:,}", *(f"{values[i]:,}" for values in series.values()))
            for i, length in enumerate(LENGTHS)
        ),
        _legend(series),
    )


def time_by_family(rows: Sequence[Row]) -> Chart:
    """Return seconds of proof by family and target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    families = [slug for slug in FAMILIES if any(row["family"] == slug for row in rows)]
    seconds = {
        target: [
            sum(
                row["seconds"]
                for row in rows
                if row["target"] == target and row["family"] == family
            )
            for family in families
        ]
        for target in targets
    }
    height = 60 + len(families) * (10 + 9 * len(targets))
    legend = _legend(map(names.short, targets), "--ramp" if len(targets) > 3 else "--chart")
    colours = [colour for colour, _ in legend]
    chart = _new("HorizontalBar", colours=colours, height=height, x_title="seconds")
    chart.x_labels = families[::-1]
    for target, values in seconds.items():
        chart.add(names.short(target), [round(value, 1) for value in reversed(values)])
    title = "Time of the proofs, by family of steps"
    said = "; ".join(
        f"{names.short(t)}: {sum(values):.0f} seconds" for t, values in seconds.items()
    )
    return Chart(
        "time-by-family",
        title,
        "Seconds of one processor, added up over theorems, managers and tags of a family.",
        _drawn(chart, "time-by-family", title, f"Altogether {said}."),
        ("family", *map(names.short, targets)),
        tuple(
            (family, *(f"{seconds[target][i]:.1f}" for target in targets))
            for i, family in enumerate(families)
        ),
        legend,
    )


def verdicts_by_target(rows: Sequence[Row]) -> Chart:
    """Return how many verdicts of each sort a target has."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    verdicts = dict.fromkeys((*_VERDICTS, *(row["verdict"] for row in rows)))
    counts = {
        verdict: [
            sum(row["target"] == target and row["verdict"] == verdict for row in rows)
            for target in targets
        ]
        for verdict in verdicts
    }
    colours = ("--proved", "--refuted", "--quiet", *(["--odd"] * (len(counts) - len(_VERDICTS))))
    chart = _new(
        "HorizontalStackedBar",
        colours=colours,
        height=70 + 34 * len(targets),
        x_title="verdicts",
    )
    chart.x_labels = [names.short(target) for target in reversed(targets)]
    for verdict, values in counts.items():
        chart.add(_in_words(verdict), values[::-1])
    title = "Verdicts by release"
    said = "; ".join(
        f"{names.short(target)}: {', '.join(f'{values[i]} {v}' for v, values in counts.items())}"
        for i, target in enumerate(targets)
    )
    return Chart(
        "verdicts-by-release",
        title,
        "A verdict for each claim, manager and kind of step.",
        _drawn(chart, "verdicts-by-release", title, said),
        ("release", *map(_in_words, counts)),
        tuple(
            (names.short(target), *(str(values[i]) for values in counts.values()))
            for i, target in enumerate(targets)
        ),
        tuple(zip(colours, map(_in_words, counts), strict=True)),
    )


def _last_first(found: tuple[tuple[int, ...], list[str]]) -> int:
    """Sorts series by their last number, so that one that takes off has the first colour."""
    return -found[0][-1]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


_ABOUT_LENGTH: dict[str, Any] = {
    "x_title": "tokens of the prompt",
    "y_title": "blocks",
    "dots_size": 3,
    "x_value_formatter": _whole,
    "margin_right": 36,
    "include_x_axis": True,
}


def _seen(driver: Driver) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Estimate and drawn of the last step by length, None where the release has no such step."""
    try:
        steps = [
            last_of(driver.request(GEOMETRY, _POOL), [chunk(0, COMPUTED), chunk(COMPUTED, length)])
            for length in LENGTHS
        ]
    except DriverError:
        return None
    return tuple(step.estimate for step in steps), tuple(step.drawn for step in steps)


def _in_words(verdict: str) -> str:
    return verdict.lower().replace("_", " ")


# ---- drawing -------------------------------------------------------------------------------------


def _legend(series: Iterable[str], colours: str = "--chart") -> tuple[tuple[str, str], ...]:
    """Names with the colours of series: apart from each other, or one hue that grows stronger."""
    return tuple((f"{colours}-{i % _NUM_COLOURS}", name) for i, name in enumerate(series))


def _pygal() -> Any:
    """The library, without what it does to imports of others, and with one way of writing XML."""
    import pygal
    from pygal.etree import etree

    # A finder of plug-ins, by a protocol that Python no longer has.
    sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != "pygal"]
    etree.to_etree()  # whatever else is installed, the same text comes out
    return pygal


def _new(kind: str, *, colours: Sequence[str], height: int, **options: Any) -> Any:
    pygal = _pygal()
    from pygal.style import Style

    style = Style(
        background="transparent",
        plot_background="transparent",
        foreground="var(--ink)",
        foreground_strong="var(--ink)",
        foreground_subtle="var(--line)",
        guide_stroke_color="var(--line)",
        major_guide_stroke_color="var(--line)",
        opacity=".9",
        opacity_hover="1",
        transition="0s",
        colors=tuple(f"var({name})" for name in colours),
        font_family="inherit",
        label_font_size=12,
        major_label_font_size=12,
        title_font_size=13,
    )
    return getattr(pygal, kind)(
        js=[],
        style=style,
        width=_WIDTH,
        height=height,
        show_legend=False,  # it stands beside the picture, where there is room for names
        value_formatter=_whole,
        margin=8,
        spacing=8,
        **options,
    )


def _drawn(chart: Any, slug: str, title: str, description: str) -> str:
    """A chart as one `svg` element, with nothing in it that runs or that is fetched."""
    chart.uuid = slug
    root: Element = chart.render_tree()
    _without(root, lambda one: one.tag in ("script", "title", "desc") or not _is_element(one))
    for one in root.iter():
        one.attrib.pop("onload", None)
    heads = []
    for tag, text in (("title", title), ("desc", description)):
        head = Element(tag, {"id": f"{slug}-{tag}"})
        head.text = text
        heads.append(head)
    root[:0] = heads
    root.set("role", "img")
    root.set("aria-labelledby", f"{slug}-title {slug}-desc")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _is_element(node: Any) -> bool:
    """Whether a node is no comment."""
    return isinstance(node.tag, str)


def _without(node: Element, is_unwanted: Callable[[Any], bool]) -> None:
    for child in list(node):
        if is_unwanted(child):
            node.remove(child)
        else:
            _without(child, is_unwanted)
