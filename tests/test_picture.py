"""Pictures of block tables: what the real manager shows, in letters and as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conformance import cli
from conformance.drawing import draw
from conformance.driver import core_driver
from conformance.layout import Holds, Run, TableSeen
from conformance.picture import (
    LEGEND,
    MAX_ROWS,
    MAX_SINGLE_COLUMNS,
    Part,
    Picture,
    Row,
    picture,
    widths,
)
from conformance.replay import PROJECT_ROOT, Outcome, Replay, StepSeen, replay, replay_in
from conformance.scenario import Scenario, ScenarioStep, dumps, load
from conformance.steps import chunk, hit, own_tail, park, preempted
from conformance.svg import svg
from spec.vocabulary import Geometry, Step

Output = pytest.CaptureFixture[str]

OLD, NEWEST = "vllm==0.30.0", "vllm==0.33.0"
REFUTATIONS = PROJECT_ROOT / "generated_tests" / "scenarios" / "refutations"
SHOWN = REFUTATIONS / "exact-estimate-checkpoint-vllm-0-30-0.json"
LONG = REFUTATIONS / "exact-estimate-checkpoint-at-production-sizes-vllm-0-30-0.json"
NAMESPACE = "{http://www.w3.org/2000/svg}"


def scenario_of(*steps: ScenarioStep, groups: int = 0, **sizes: int) -> Scenario:
    values = {"num_speculative_blocks": 2, "num_prefill_checkpoint_blocks": 0, **sizes}
    return Scenario(
        name="drawn",
        manager="coordinator" if groups else "mamba-align",
        geometry=Geometry(
            16, 4, **values, prefill_checkpoint_alignment=4, drop_eagle_checkpoint_block=False
        ),
        num_gpu_blocks=64,
        steps=steps,
        family="first",
        num_mamba_groups=groups,
    )


def drawn(scenario: Scenario, root: Path, target: str = NEWEST) -> Picture:
    result = replay(scenario, core_driver(root), target, with_tables=True)
    assert result.steps, result.detail
    return picture(scenario, result)


def letters(shown: Picture) -> list[str]:
    """What the tables hold after each step, a letter a cell."""
    return [
        "".join(LEGEND[cell][0] for cell in line.cells if cell) + " +W" * line.num_copies
        for row in shown.rows
        for line in row.lines
    ]


def printed(shown: Picture, width: int = 120, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, **options)  # type: ignore[arg-type]
    draw(console, shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---- what columns hold ---------------------------------------------------------------------------

#: Steps on blocks of 16 tokens and hash units of 4, with two speculative blocks and no checkpoint
#: blocks, and what 0.33.0's table holds after each.
TABLES: dict[str, tuple[tuple[ScenarioStep, ...], list[str]]] = {
    "chunks": (
        (chunk(0, 40), chunk(40, 90), chunk(90, 91)),
        ["..CSS", "..r..CSS", ".....CSS"],
    ),
    "hit-full": ((hit(32, 100, blocks=2),), [".H....CSS"]),
    "hit-partial": ((hit(24, 100, blocks=2),), [".W....CSS"]),
    "parked": ((park(external=40), chunk(40, 100)), ["..CSS", "..r...CSS"]),
    "own-tail": ((chunk(0, 40), own_tail(chunk(40, 100))), ["..CSS", "..r...CSS +W"]),
    "preempted": (
        (chunk(0, 40), preempted(hit(32, 40, blocks=2))),
        ["..CSS", ".HCSS"],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_picture_shows_what_the_manager_has_recorded(
    release_trees: Mapping[str, Path], name: str
) -> None:
    """States, hits, copies and drafts stand where the real table has them."""
    steps, held = TABLES[name]

    assert letters(drawn(scenario_of(*steps), release_trees["0.33.0"])) == held


def test_a_picture_follows_the_manager_and_not_the_prediction(
    release_trees: Mapping[str, Path],
) -> None:
    """A manager that gives up a column's block is drawn so, whatever the scenario predicts."""
    driver = core_driver(release_trees["0.33.0"])
    cls = driver.bindings.manager_class
    allocate = cls.allocate_new_blocks

    def forgetful(self: object, *arguments: object, **named: object) -> object:
        found = allocate(self, *arguments, **named)
        self.req_to_blocks["request"][-1] = self.block_pool.null_block  # type: ignore[attr-defined]
        return found

    cls.allocate_new_blocks = forgetful
    try:
        result = replay(scenario_of(chunk(0, 40)), driver, NEWEST, with_tables=True)
    finally:
        cls.allocate_new_blocks = allocate

    assert letters(picture(scenario_of(chunk(0, 40)), result)) == ["..CS."]


def test_a_checkpoint_stands_where_it_is_pending(release_trees: Mapping[str, Path]) -> None:
    """The column that the manager has recorded, until the next step has run."""
    shown = drawn(load(SHOWN)[0], release_trees["0.30.0"], OLD)

    assert letters(shown) == ["C", "r.KC"]
    assert [row.mark for row in shown.rows] == ["", "breaks exact-estimate"]
    assert shown.rows[1].parts() == [(Part.DRAWN, 2), (Part.UNUSED, 1), (Part.FREE, 14)]


def test_every_group_of_the_coordinator_has_a_line(release_trees: Mapping[str, Path]) -> None:
    """Full attention keeps all its blocks; each Mamba group shows its own table."""
    scenario = scenario_of(hit(32, 100, blocks=2), groups=2)

    shown = drawn(scenario, release_trees["0.33.0"])

    assert [line.group for line in shown.rows[0].lines] == ["full attention", "mamba 1", "mamba 2"]
    assert letters(shown) == ["HHAAAAA", ".H....CSS", ".H....CSS"]


def test_both_tiers_draw_the_same(trees: Mapping[str, Path]) -> None:
    """What columns hold passes between processes unchanged."""
    pytest.importorskip("torch")
    steps = TABLES["own-tail"][0]
    scenarios = [scenario_of(*steps), scenario_of(hit(32, 100, blocks=2), groups=1)]

    core, real = (
        replay_in(trees["0.31.0"], tier, scenarios, target=NEWEST, with_tables=True)
        for tier in ("core", "vllm")
    )

    assert core == real
    assert all(seen.tables for result in core for seen in result.steps)


def test_nobody_looks_at_tables_unless_asked(release_trees: Mapping[str, Path]) -> None:
    """A replay that is not drawn takes no time for it."""
    result = replay(scenario_of(chunk(0, 40)), core_driver(release_trees["0.33.0"]), NEWEST)

    assert [seen.tables for seen in result.steps] == [()]


def test_a_step_that_raises_is_marked(release_trees: Mapping[str, Path]) -> None:
    """On a pool that is too small the picture ends with the step that found it empty."""
    scenario = replace(scenario_of(chunk(0, 16), chunk(16, 100)), num_gpu_blocks=4)

    shown = drawn(scenario, release_trees["0.33.0"])

    assert [row.mark for row in shown.rows] == ["", "raised ValueError; breaks allocation-succeeds"]


# ---- long tables and bars ------------------------------------------------------------------------


def seen_with(*tables: TableSeen, free: int = 9) -> StepSeen:
    return StepSeen("a step", 0, Step(1, 1, 1, 1, True), free, 1, free, tables)


def replay_of(*steps: StepSeen) -> Replay:
    return Replay("drawn", NEWEST, Outcome.NOT_PREDICTED, steps)


def test_like_columns_of_a_long_table_share_a_cell_in_all_rows() -> None:
    """A cell counts its columns, and no row has a boundary inside it."""
    tables = [
        TableSeen("mamba", (Run(Holds.RUNNING, 1),)),
        TableSeen("mamba", (Run(Holds.OLD, 1), Run(Holds.NULL, 98), Run(Holds.RUNNING, 1))),
        TableSeen("mamba", (Run(Holds.NULL, 100), Run(Holds.RUNNING, 1))),
    ]
    scenario = scenario_of(chunk(0, 1), chunk(1, 2), chunk(2, 3))

    shown = picture(scenario, replay_of(*map(seen_with, tables)))

    assert [(s.first, s.count) for s in shown.segments] == [(0, 1), (1, 98), (99, 1), (100, 1)]
    assert letters(shown) == ["C", "o.C", "...C"]
    assert "  step 2 o . x98 C\n" in printed(shown)


RUNS = st.lists(st.tuples(st.sampled_from(Holds), st.integers(1, 60)), max_size=6)


@given(st.lists(RUNS, min_size=1, max_size=4))
def test_cells_say_of_every_column_what_its_table_holds(
    tables: list[list[tuple[Holds, int]]],
) -> None:
    """However columns are put together, none is lost and none changes."""
    made = [TableSeen("mamba", tuple(Run(holds, n) for holds, n in runs)) for runs in tables]
    scenario = scenario_of(*(chunk(i, i + 1) for i in range(len(made))))

    shown = picture(scenario, replay_of(*map(seen_with, made)))

    most = max(table.length for table in made)
    assert sum(segment.count for segment in shown.segments) == most
    if most <= MAX_SINGLE_COLUMNS:
        assert len(shown.segments) == most
    for table, row in zip(made, shown.rows, strict=True):
        cells = zip(shown.segments, row.lines[0].cells, strict=True)
        columns = [cell for segment, cell in cells for _ in range(segment.count)]
        held = [run.holds for run in table.runs for _ in range(run.count)]
        assert columns == held + [None] * (most - len(held))


def test_of_very_many_steps_the_last_are_drawn() -> None:
    """A picture stays a picture; what is left out is said."""
    steps = [chunk(i, i + 1) for i in range(MAX_ROWS + 3)]
    table = TableSeen("mamba", (Run(Holds.RUNNING, 1),))

    shown = picture(scenario_of(*steps), replay_of(*(seen_with(table) for _ in steps)))

    assert [row.name for row in shown.rows][:: MAX_ROWS - 1] == ["step 4", f"step {MAX_ROWS + 3}"]
    assert "the first 3 steps are left out" in printed(shown)
    assert "The first 3 steps are left out." in svg(shown)


@given(*[st.none() | st.integers(-3, 2000)] * 3)
def test_a_bar_shows_every_block_once(
    free: int | None, estimate: int | None, drawn_blocks: int | None
) -> None:
    """Drawn, estimated and free blocks add up, and no part is too small to be seen."""
    row = Row("step 1", "a step", (), free, estimate, drawn_blocks, "")

    parts = dict(row.parts())
    counts = [max(count or 0, 0) for count in (free, estimate, drawn_blocks)]
    assert sum(parts.values()) == max(counts)
    assert parts.get(Part.DRAWN, 0) + parts.get(Part.BEYOND, 0) == counts[2]
    assert (Part.BEYOND in parts) == (counts[2] > counts[1])
    assert (Part.MISSING in parts) == (counts[1] > max(counts[0], counts[2]))
    places = widths(row.parts(), max(*counts, 1), 40)
    assert [part for part, _ in places] == [part for part, _ in row.parts()]
    assert all(place >= 1 for _, place in places)
    assert sum(place for _, place in places) <= 40 + len(places)


# ---- on a terminal -------------------------------------------------------------------------------


def test_a_pipe_gets_plain_letters_and_a_legend(capsys: Output) -> None:
    """One row a step, the broken claim marked, free blocks against the estimate."""
    assert cli.run(["replay", str(LONG), "--target", OLD, "--draw"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "  column 0 1-1168  1169 1170" in lines
    assert "  step 2 r . x1168 K    C  <-- breaks exact-estimate" in lines
    bar = f"  step 2 #{'=' * 39}-  free 1,184, estimated 1,170, drawn 2  <-- breaks exact-estimate"
    assert bar in lines
    assert "  # drawn, = estimated, not drawn, - free" in lines
    assert not any("\x1b" in line for line in lines)


def test_the_fix_is_drawn_beside_the_fault(capsys: Output) -> None:
    """A picture for each target; where the claim holds nothing is marked."""
    command = ["replay", str(SHOWN), "--target", OLD, "--target", NEWEST, "--draw"]

    assert cli.run(command) == 0

    out = capsys.readouterr().out
    assert out.count("  step 2 r . K C") == 2
    assert out.count("<-- breaks exact-estimate") == 2  # the table and the bar of 0.30.0
    assert out.index("<-- breaks") < out.index(f"on {NEWEST}")


def test_colours_are_an_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal has them, `NO_COLOR` has not, and the letters are the same."""
    shown = _long_picture()
    plain = printed(shown)
    coloured = printed(shown, force_terminal=True, color_system="standard", no_color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    without = printed(shown, force_terminal=True, color_system="standard")

    assert "\x1b[30;42m" in coloured
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]", without)
    assert (
        re.sub(r"\x1b\[[0-9;]*m", "", coloured) == re.sub(r"\x1b\[[0-9;]*m", "", without) == plain
    )


def test_a_copy_that_stands_in_no_column_is_drawn_beside_the_table(
    release_trees: Mapping[str, Path],
) -> None:
    """Every block that a step draws is somewhere in its picture."""
    shown = drawn(scenario_of(*TABLES["own-tail"][0]), release_trees["0.33.0"])

    assert "  step 2 . . r . . . C S S + W  <--" in printed(shown)
    assert "in no column 1 copy-on-write target." in svg(shown)
    drawn_cells = ElementTree.fromstring(svg(shown)).iter(f"{NAMESPACE}rect")
    classes = [rect.attrib["class"] for rect in drawn_cells]
    assert classes.count("capproof-cell capproof-copy") == 2  # the cell, and the legend


def test_a_narrow_terminal_gets_columns_in_bands() -> None:
    """No line of a table is broken; the columns go on below."""
    table = TableSeen("mamba", (Run(Holds.NULL, 29), Run(Holds.RUNNING, 1)))

    out = printed(picture(scenario_of(chunk(0, 1)), replay_of(seen_with(table))), width=40)

    rows = [line for line in out.splitlines() if line.startswith("  step 1 . ")]
    assert "".join(rows).count(".") == 29
    assert len([line for line in out.splitlines() if line.startswith("  column")]) == len(rows) > 1
    assert max(map(len, rows)) <= 40


# ---- as SVG --------------------------------------------------------------------------------------


def _long_picture() -> Picture:
    table = TableSeen("mamba", tuple(Run(holds, 7) for holds in Holds))
    return picture(scenario_of(chunk(0, 40)), replay_of(seen_with(table)))


def test_the_svg_stands_alone_and_says_what_it_shows() -> None:
    """Title and description in words, nothing from elsewhere, both colour schemes."""
    text = svg(_long_picture())

    root = ElementTree.fromstring(text)
    ids = root.attrib["aria-labelledby"].split()
    title, desc = root.find(f"{NAMESPACE}title"), root.find(f"{NAMESPACE}desc")
    assert title is not None
    assert desc is not None
    assert [title.attrib["id"], desc.attrib["id"]] == ids
    for holds in Holds:
        assert LEGEND[holds][1] in (desc.text or "")
    assert (root.tag, root.attrib["role"]) == (f"{NAMESPACE}svg", "img")
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"url\(|href|@import|<script|<image", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_every_kind_has_a_colour_in_both_schemes() -> None:
    """No class of a cell or a bar is left without a fill."""
    text = svg(_long_picture())
    light, dark = (set(re.findall(r"--capproof-([\w-]+):#", part)) for part in text.split("@media"))

    used = set(re.findall(r"var\(--capproof-([\w-]+)\)", text))
    assert used <= light == dark
    assert len(used) == len(LEGEND) + 3


def test_equal_pictures_are_equal_texts() -> None:
    """Committed pictures do not change by themselves."""
    assert svg(_long_picture()) == svg(_long_picture())


HOSTILE = (
    """</title></desc></style></svg><script>alert(1)</script><img src=x onerror="alert('1')">&lt;"""
)


def test_markup_in_a_scenario_stays_text(release_trees: Mapping[str, Path]) -> None:
    """Phrases of a scenario and the name of a target become text, wherever they stand."""
    steps = (replace(chunk(0, 40), why=HOSTILE), replace(chunk(40, 41), why="]]><!--" + HOSTILE))
    shown = drawn(scenario_of(*steps), release_trees["0.33.0"], f"path:{HOSTILE}\x1b[31m")

    text = svg(shown)

    found = {element.tag.removeprefix(NAMESPACE) for element in ElementTree.fromstring(text).iter()}
    assert found == {"svg", "title", "desc", "style", "rect", "text", "g"}
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("</svg>") == 1
    assert "\x1b" not in text
    assert HOSTILE in "".join(ElementTree.fromstring(text).itertext())


def test_the_svg_of_the_first_target_is_written(tmp_path: Path, capsys: Output) -> None:
    """One file, of the target named first; a second run may replace it."""
    file = tmp_path / "picture.svg"
    command = ["replay", str(SHOWN), "--target", OLD, "--target", NEWEST, "--draw-svg", str(file)]

    assert cli.run(command) == 0
    first = file.read_text()
    assert cli.run(command) == 0

    assert file.read_text() == first
    assert f"on {OLD}: step 2 breaks exact-estimate</title>" in first
    assert [path.name for path in tmp_path.iterdir()] == ["picture.svg"]
    assert "<-- breaks" not in capsys.readouterr().out


@pytest.mark.parametrize("content", ["notes", "<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_a_picture_replaces_no_file_of_somebody_else(
    tmp_path: Path, capsys: Output, content: str
) -> None:
    """What is not a picture of ours is left alone, and the command says so."""
    file = tmp_path / "picture.svg"
    file.write_text(content)

    assert cli.run(["replay", str(SHOWN), "--draw-svg", str(file)]) == 2

    assert file.read_text() == content
    assert "is no picture of capproof's" in capsys.readouterr().err


def test_what_has_no_picture_is_refused_in_one_line(tmp_path: Path, capsys: Output) -> None:
    """Several scenarios are not one picture, and nor are several workloads."""
    several = tmp_path / "several.json"
    scenario = load(SHOWN)[0]
    several.write_text(dumps([scenario, replace(scenario, name="another")]))
    svg_file = str(tmp_path / "no.svg")

    assert cli.run(["replay", str(several), "--draw-svg", svg_file]) == 2
    assert cli.run(["workloads", "--draw-svg", svg_file]) == 2
    assert cli.run(["replay", str(SHOWN), "--draw-svg", str(tmp_path / "no" / "x.svg")]) == 2

    several_said, workloads_said, folder_said = capsys.readouterr().err.splitlines()
    assert "2 scenarios, and --draw-svg draws one" in several_said
    assert re.search(r"--name: \d+ workloads, and --draw-svg draws one", workloads_said)
    assert "is no folder" in folder_said
