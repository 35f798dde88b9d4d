"""Shrinking: the same theorem, broken in the same kind of step, with smaller numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import cli
from conformance import shrink as shrink_module
from conformance.driver import core_driver
from conformance.replay import PROJECT_ROOT, replay
from conformance.scenario import Scenario, dumps, load, loads
from conformance.shrink import NothingToShrink, shrink
from conformance.targets import resolve

Output = pytest.CaptureFixture[str]

OLD, NEW, NEWEST = "vllm==0.30.0", "vllm==0.31.0", "vllm==0.33.0"
REFUTATIONS = PROJECT_ROOT / "generated_tests" / "scenarios" / "refutations"
LONG = REFUTATIONS / "exact-estimate-checkpoint-at-production-sizes-vllm-0-30-0.json"


def counterexample(name: str) -> Scenario:
    return load(REFUTATIONS / f"{name}.json")[0]


@pytest.mark.parametrize(
    ("what", "release"),
    [
        ("exact-estimate-checkpoint", "0.30.0"),
        ("matches-intended-checkpoint", "0.31.0"),
        ("no-undercount-external-sync", "0.33.0"),
        ("allocation-succeeds-resumed", "0.33.0"),
        ("eventually-admitted-hit-partial", "0.33.0"),
        ("no-undercount-coordinator-resumed", "0.33.0"),
    ],
)
def test_a_counterexample_at_production_sizes_shrinks_to_the_solvers_least(
    what: str, release: str
) -> None:
    """The real manager alone leads to the numbers that the solver found to be the least."""
    suffix = release.replace(".", "-")
    least = counterexample(f"{what}-vllm-{suffix}")
    target = f"vllm=={release}"
    driver = core_driver(resolve(target).root)

    found = shrink(counterexample(f"{what}-at-production-sizes-vllm-{suffix}"), driver, target)

    made = found.scenario
    assert found.is_least
    assert made.geometry == least.geometry
    assert [replace(step, why="") for step in made.steps] == [
        replace(step, why="") for step in least.steps
    ]
    assert (made.family, made.tags, made.theorem) == (least.family, least.tags, least.theorem)
    result = replay(made, driver, target)
    assert result.theorem_holds is False
    assert loads(dumps(made), name="again") == [made]


def test_the_same_scenario_shrinks_to_the_same_bytes() -> None:
    """Nothing is left to chance, and what is least already stays as it is."""
    driver = core_driver(resolve(OLD).root)

    first, second = (shrink(load(LONG)[0], driver, OLD) for _ in range(2))
    again = shrink(first.scenario, driver, OLD)

    assert first == second
    assert replace(again.scenario, name="", source="") == replace(
        first.scenario, name="", source=""
    )


def test_a_long_detour_is_left_out() -> None:
    """Steps that have nothing to do with the fault go, and no assumption is given up for it."""
    scenario = counterexample("exact-estimate-own-tail-checkpoint-at-production-sizes-vllm-0-30-0")
    driver = core_driver(resolve(OLD).root)

    found = shrink(scenario, driver, OLD)

    assert (found.scenario.family, "checkpoint" in found.scenario.tags) == ("own-tail", True)
    assert len(found.scenario.steps) <= len(scenario.steps)
    assert max(step.call.num_tokens for step in found.scenario.steps) < 20


def test_a_shrunk_scenario_keeps_the_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the search ends in steps that no scheduler asks for."""
    scenario = counterexample("admission-keeps-reserve-coordinator-drafts-overwide-vllm-0-33-0")
    driver = core_driver(resolve(NEWEST).root)
    kept = shrink(scenario, driver, NEWEST).scenario
    monkeypatch.setattr(shrink_module, "_KEPT", ())
    free = shrink(scenario, driver, NEWEST).scenario

    # lookahead-adds-tokens: slots for all tokens that are computed, at least.
    covered = [
        all(step.call.num_tokens >= step.call.num_tokens_main_model for step in made.steps)
        for made in (kept, free)
    ]
    assert covered == [True, False]


def test_the_count_of_candidates_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does, the result is smaller, and is not called the least."""
    monkeypatch.setattr(shrink_module, "MAX_CANDIDATES", 40)

    found = shrink(load(LONG)[0], core_driver(resolve(OLD).root), OLD)

    assert (found.num_candidates, found.is_least) == (40, False)
    assert found.scenario.geometry.block_size < 896


@pytest.mark.parametrize(
    ("target", "theorem", "message"),
    [
        (NEW, "exact-estimate", "exact-estimate is not broken on vllm==0.31.0"),
        (OLD, None, "names no theorem"),
        (OLD, "no-such", "names no theorem"),
        ("vllm==0.28.0", "exact-estimate", "is not broken on vllm==0.28.0"),
    ],
)
def test_what_breaks_nothing_is_not_shrunk(target: str, theorem: str | None, message: str) -> None:
    """A target without the fault, and one that cannot run it, say so."""
    with pytest.raises(NothingToShrink, match=message):
        shrink(replace(load(LONG)[0], theorem=theorem), core_driver(resolve(target).root), target)


def test_the_command_says_where_the_shrunk_scenario_reproduces(
    tmp_path: Path, capsys: Output
) -> None:
    """It is written, replayed on every target that is given, and can be replayed by anyone."""
    saved = tmp_path / "small.json"
    command = ["replay", str(LONG), "--target", NEW, "--target", OLD]

    assert cli.run([*command, "--shrink", "--save", str(saved)]) == 0

    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"shrunk on {OLD}: ")
    assert out[-1] == f"reproduces on {OLD}; not on {NEW}"
    assert json.loads(saved.read_text())["geometry"]["block_size"] == 1
    assert cli.run(["replay", str(saved), "--target", OLD]) == 1
    assert cli.run(["replay", str(saved), "--target", NEW]) == 0
    assert cli.run([*command, "--shrink", "--save", str(saved)]) == 0


def test_no_scenario_of_somebody_else_is_replaced(tmp_path: Path, capsys: Output) -> None:
    """Neither the file that is shrunk nor any other that --shrink has not written."""
    mine, notes = tmp_path / "mine.json", tmp_path / "notes.txt"
    mine.write_text(LONG.read_text())
    notes.write_text("notes")
    several = str(PROJECT_ROOT / "generated_tests" / "scenarios" / "first.json")
    shrinking = ["replay", str(mine), "--target", OLD, "--shrink", "--save"]

    assert cli.run([*shrinking, str(mine)]) == 2
    assert cli.run([*shrinking, str(notes)]) == 2
    assert cli.run(["replay", str(mine), "--save", str(tmp_path / "x.json")]) == 2
    assert cli.run(["replay", several, "--shrink"]) == 2
    assert cli.run(["replay", str(mine), "--target", NEW, "--shrink"]) == 2

    said = capsys.readouterr().err.splitlines()
    assert ["was not written by --shrink" in line for line in said] == [True, True] + [False] * 3
    assert "without --shrink" in said[2]
    assert "--shrink takes one" in said[3]
    assert "is not broken on vllm==0.31.0" in said[4]
    assert (mine.read_text(), notes.read_text()) == (LONG.read_text(), "notes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "notes.txt"]
