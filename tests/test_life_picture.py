"""Pictures of lives: what the real managers hold for each request, rule by rule."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from conformance import cli
from conformance.drawing import draw_all
from conformance.driver import core_driver
from conformance.explore import Bounds, random_life, small_setting, tight
from conformance.layout import Holds
from conformance.life import Life, Plan, Rule, Setting, Stage
from conformance.life_files import dumps, load, replay_lives, run_life
from conformance.life_picture import life_pictures
from conformance.life_tables import Watcher
from conformance.lives import NotPossible
from conformance.picture import LEGEND, MAX_ROWS, Part, Picture
from conformance.replay import PROJECT_ROOT
from conformance.svg import svg_of_all
from spec.vocabulary import Geometry

Output = pytest.CaptureFixture[str]

OLD, NEWEST = "vllm==0.30.0", "vllm==0.33.0"
SMALL = Geometry(2, 1, 0, 1, 1, False)
#: A load behind which a chunk runs past a block's end: its state is cached for too many tokens.
LOST = Life(
    Setting(SMALL, 16, (Plan(8, 1), Plan(3, 1))),
    (
        Rule("admit", 0, 64, 3, True),
        Rule("step"),
        Rule("arrive"),
        Rule("promote", 0, 64),
        Rule("admit", 1, 64),
        Rule("step"),
    ),
)
#: A second request is refused, and then served alone behind the first one's prefix.
EXAMPLE = PROJECT_ROOT / "docs" / "examples" / "life.json"
ALONE = load(EXAMPLE)


def drawn(life: Life, root: Path, target: str = NEWEST) -> list[Picture]:
    return life_pictures(run_life(core_driver(root), life, target, with_tables=True).requests)


def letters(shown: Picture) -> dict[str, list[str]]:
    """What the tables hold after each rule, a letter a cell."""
    return {
        row.name: ["".join(LEGEND[cell][0] for cell in line.cells if cell) for line in row.lines]
        for row in shown.rows
    }


def test_each_request_has_a_row_for_each_rule_that_touched_it(
    release_trees: Mapping[str, Path],
) -> None:
    """A step touches all that it computes; who has no blocks has no columns."""
    first, second = drawn(LOST, release_trees["0.33.0"])

    assert first.title == "request r0: a prompt of 8 tokens, 1 to make"
    assert letters(first) == {
        "rule 1": ["AA", ".C"],
        "rule 3": ["AA", ".C"],
        "rule 4": ["AAAA", ".rKC"],
        "rule 6": [],
    }
    assert letters(second) == {"rule 5": ["AA", "KC"], "rule 6": []}
    assert [row.head for row in first.rows][:3] == [
        "rule 1: admit (up to 64 tokens, 3 external later); 0 to 3 tokens, loading",
        "rule 3: arrive; 3 tokens, arrived",
        "rule 4: promote (up to 64 tokens); 3 tokens, running",
    ]


def test_the_rule_that_breaks_a_check_is_marked(release_trees: Mapping[str, Path]) -> None:
    """In the rows of the request that it is about, with the known fault."""
    first, second = drawn(LOST, release_trees["0.33.0"])

    mark = "breaks live-state-kept (known: state-cached-for-a-later-position)"
    assert [row.mark for row in first.rows] == ["", "", "", mark]
    assert [row.mark for row in second.rows] == ["", ""]


def test_free_blocks_are_compared_where_blocks_were_asked_for(
    release_trees: Mapping[str, Path],
) -> None:
    """Elsewhere the bar is what is left; of who is refused, what was told."""
    first, second = drawn(ALONE, release_trees["0.30.0"], OLD)

    assert [row.counts for row in first.rows] == [
        "free 15, estimated 8, drawn 8",
        "free 7",
        "free 9, estimated 12, drawn -",
        "free 0",
    ]
    assert second.rows[0].parts() == [(Part.UNUSED, 9), (Part.MISSING, 2)]


def test_rules_that_alone_applies_are_numbered_below_it(
    release_trees: Mapping[str, Path],
) -> None:
    """Who is ended for it is ended by it."""
    first, second = drawn(ALONE, release_trees["0.30.0"], OLD)

    assert [row.name for row in second.rows] == [
        *("rule 5", "rule 7.1", "rule 7.2", "rule 7.3", "rule 7.4", "rule 7")
    ]
    assert first.rows[-1].head == "rule 7: alone, of r1; 4 tokens, ended"


def test_hits_are_drawn_for_who_adopted_them(release_trees: Mapping[str, Path]) -> None:
    """The first request's blocks are its own, and the second one's are those of a hit."""
    _, second = drawn(ALONE, release_trees["0.30.0"], OLD)

    assert letters(second)["rule 7.1"] == ["HHAAAAA", ".H...KCS", ".H...KCS"]


def test_a_request_that_waits_for_ever_is_marked(release_trees: Mapping[str, Path]) -> None:
    """The row of `alone` says what was told and what is free."""
    setting = Setting(SMALL, 6, (Plan(6, 1),), max_num_scheduled_tokens=2)
    rules = (Rule("admit", 0, 2, 1, True), Rule("step"), Rule("arrive"), Rule("alone"))

    (shown,) = drawn(Life(setting, rules), release_trees["0.33.0"])

    last = shown.rows[-1]
    assert (last.name, last.counts) == ("rule 4", "free 3, estimated 4, drawn -")
    assert last.mark.startswith("breaks eventually-admitted (known: ")


def test_what_is_drawn_is_what_is_held(release_trees: Mapping[str, Path]) -> None:
    """In random lives the last row of a request has a cell for each block that it holds."""
    driver, chance = core_driver(release_trees["0.33.0"]), random.Random(0)
    checked = 0
    for _ in range(30):
        life = random_life(driver, tight(driver, small_setting(0, 3, True)), Bounds(12), chance)
        pool = driver.shared_pool(life.setting)
        watcher = Watcher(pool, NEWEST)
        for number, rule in enumerate(life.rules, start=1):
            watcher.next_rule(number)
            try:
                pool.apply(rule)
            except NotPossible:
                continue
        for request, watched in zip(pool.requests, watcher.requests, strict=True):
            if watched.rules and request.stage is not Stage.ENDED:
                tables = watched.rules[-1].tables
                shown = [sum(r.count for r in t.runs if r.holds is not Holds.NULL) for t in tables]
                assert shown == [len(ids) for ids in pool.held(request)]
                checked += 1
    assert checked > 10


def test_looking_changes_nothing(release_trees: Mapping[str, Path]) -> None:
    """A life shows the same violations with pictures and without; without, nobody looks."""
    driver = core_driver(release_trees["0.30.0"])

    plain, looked = (run_life(driver, ALONE, OLD, with_tables=looks) for looks in (False, True))

    assert plain.requests == ()
    assert replace(looked, requests=()) == plain


def test_both_tiers_draw_the_same_life(release_trees: Mapping[str, Path]) -> None:
    """What tables hold passes between processes unchanged."""
    pytest.importorskip("torch")
    root = release_trees["0.33.0"]

    core, real = (
        replay_lives(root, tier, [LOST, ALONE], NEWEST, with_tables=True)
        for tier in ("core", "vllm")
    )

    assert core == real
    assert all(request.rules for seen in core for request in seen.requests)


def test_of_very_many_rules_the_last_are_drawn(release_trees: Mapping[str, Path]) -> None:
    """A picture stays a picture; what is left out is said."""
    setting = Setting(SMALL, 64, (Plan(50, 5),), max_num_scheduled_tokens=2)

    (shown,) = drawn(Life(setting, (Rule("alone"),)), release_trees["0.33.0"])

    assert (len(shown.rows), shown.rows[-1].name) == (MAX_ROWS, "rule 1")
    assert re.fullmatch(r"the first \d+ rules are left out", shown.left_out)


def test_a_life_is_drawn_on_a_terminal_and_as_svg(tmp_path: Path, capsys: Output) -> None:
    """Heads, tables and bars of each request, one legend; the SVG says all of it in words."""
    life, file = tmp_path / "life.json", tmp_path / "life.svg"
    life.write_text(dumps(LOST))
    command = ["replay", str(life), "--target", NEWEST, "--draw", "--draw-svg", str(file)]

    assert cli.run(command) == 0

    out = capsys.readouterr().out
    assert "  request r1: a prompt of 3 tokens, 1 to make\n  rule 5: admit (up to 64" in out
    assert "  rule 4 mamba          . r K C\n" in out
    assert out.count("  # drawn, - free") == 1
    root = ElementTree.fromstring(file.read_text())
    title, desc = (root.findtext(f"{{http://www.w3.org/2000/svg}}{n}") for n in ("title", "desc"))
    assert title == (
        "Blocks of life.json on vllm==0.33.0: "
        "rule 6 breaks live-state-kept (known: state-cached-for-a-later-position)"
    )
    assert desc is not None
    assert "request r0: a prompt of 8 tokens, 1 to make. rule 1: admit" in desc
    assert "2 state to be freed next" not in desc
    assert "1 state to be freed next, 2 pending checkpoint, 3 current state" in desc


def test_no_two_rows_of_an_svg_overlap(release_trees: Mapping[str, Path]) -> None:
    """Texts of the left edge, a row without columns among them, have their own lines."""
    text = svg_of_all("a life", drawn(ALONE, release_trees["0.30.0"], OLD))

    found = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
    at = [float(element.attrib["y"]) for element in found if element.attrib["x"] == "8"]
    assert at == sorted(at)
    assert min(b - a for a, b in pairwise(at)) >= 13


def test_a_life_without_rules_is_an_empty_picture(release_trees: Mapping[str, Path]) -> None:
    """Nothing was touched, so that there is nothing to draw."""
    shown = drawn(Life(LOST.setting, ()), release_trees["0.33.0"])
    console = Console(file=io.StringIO())
    draw_all(console, shown)

    assert shown == []
    assert svg_of_all("nothing", shown).startswith("<svg ")


def test_a_picture_of_a_life_replaces_no_file_of_somebody_else(
    tmp_path: Path, capsys: Output
) -> None:
    """What is not a picture of ours is left alone, before anything is lived."""
    life, file = tmp_path / "life.json", tmp_path / "notes.svg"
    life.write_text(dumps(LOST))
    file.write_text("notes")

    assert cli.run(["replay", str(life), "--draw-svg", str(file)]) == 2

    assert file.read_text() == "notes"
    assert "is no picture of capproof's" in capsys.readouterr().err


def test_the_example_shows_what_is_said_of_it(capsys: Output) -> None:
    """On 0.30.0 the estimate has grown with the prompt, and on the newest release it has not."""
    assert cli.run(["replay", str(EXAMPLE), "--target", OLD, "--target", NEWEST, "--draw"]) == 0

    old, newest = capsys.readouterr().out.split(f"{NEWEST}: ")
    assert "estimated 12, drawn -  <-- breaks matches-intended (known: estimate-grows-with" in old
    assert "breaks" not in newest
