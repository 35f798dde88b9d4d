"""What a person reads: a matrix on a terminal, a line per verdict in a pipe, and commands."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from conformance.replay import Outcome, Replay, StepSeen
from conformance.report import (
    counterexample_line,
    show_differences,
    show_replay,
    show_unproved,
    show_verdicts,
    verdict_line,
)
from conformance.scenario import Expect, Prediction, Scenario, ScenarioStep, to_json
from spec.vocabulary import Call, Geometry, Step

TARGET = "vllm==0.30.0"
SCENARIO = Scenario(
    name="long-prompt",
    manager="mamba-align",
    geometry=Geometry(896, 128, 1, 1, 64, False),
    num_gpu_blocks=1024,
    steps=(
        ScenarioStep("already computed", Call(23_040, 23_040, 0, 0), 704_547),
        ScenarioStep("the rest", Call(704_547, 704_547, 23_040, 23_040), 704_547, Expect(2, 788)),
    ),
    family="checkpoint",
    theorem="exact-estimate",
    predicted={TARGET: Prediction(761, 761, 3, 788, None, ("exact-estimate",))},
)


def row(**changes: Any) -> dict[str, Any]:
    return {
        "target": TARGET,
        "manager": "mamba-align",
        "family": "first",
        "tags": ["checkpoint"],
        "theorem": "no-undercount",
        "verdict": "PROVED",
        "expected": "PROVED",
        "seconds": 0.254,
        "scenario": None,
        "scenario_at_production_sizes": None,
        "replay": None,
        "reason": None,
        **changes,
    }


REFUTED = row(
    family="checkpoint",
    tags=[],
    theorem="exact-estimate",
    verdict="REFUTED",
    expected="REFUTED",
    scenario=to_json(SCENARIO),
    replay="reproduced",
)
UNSUPPORTED = row(
    verdict="UNSUPPORTED", reason="vllm/v1/core/managers.py:100: a blank :smile: [/red]"
)


def shown(show: Any, *arguments: Any, width: int = 200, **options: Any) -> str:
    """The text that a report function prints; in a pipe unless the options say otherwise."""
    file = io.StringIO()
    console = Console(file=file, width=width, emoji=False, **options)
    show(console, *arguments)
    return file.getvalue()


def test_a_verdict_is_one_line_that_grep_finds() -> None:
    """Target, manager, family with tags, theorem and verdict stand in one line, in this order."""
    expected = "vllm==0.30.0 mamba-align first+checkpoint no-undercount PROVED 0.25 s"

    assert verdict_line(row()) == expected
    assert shown(show_verdicts, [row(), REFUTED]).splitlines()[0] == expected


def test_a_pipe_gets_no_line_broken_and_no_escape() -> None:
    """A long target makes a long line, not two."""
    rows = [row(target="path:/" + "long/" * 60), REFUTED]

    text = shown(show_verdicts, rows, width=40)

    assert len(text.splitlines()) == 2
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("verdict", "expected", "note"),
    [
        ("REFUTED", "PROVED", "  expected PROVED"),
        ("PROVED", "REFUTED", "  expected REFUTED"),
        ("REFUTED", None, "  expected PROVED"),
        ("UNKNOWN", None, "  expected PROVED"),
        ("PROVED", None, ""),
        ("NOT_APPLICABLE", None, ""),
        ("NOT_APPLICABLE", "PROVED", "  expected PROVED"),
        ("REFUTED", "REFUTED", ""),
    ],
)
def test_a_surprise_says_what_was_expected(verdict: str, expected: str | None, note: str) -> None:
    """A verdict that is not the expected one says so in its line; the others do not."""
    assert verdict_line(row(verdict=verdict, expected=expected)).endswith(f" 0.25 s{note}")


def test_a_terminal_gets_a_matrix() -> None:
    """A terminal shows theorems by families, a table per target and manager."""
    rows = [
        row(),
        row(family="running", tags=[]),
        row(family="running", tags=[], theorem="exact-estimate", verdict="REFUTED"),
        row(target="vllm==0.31.0"),
    ]

    text = shown(show_verdicts, rows, force_terminal=True, color_system=None)

    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert [line.strip() for line in plain.splitlines() if line.startswith("vllm==")] == [
        "vllm==0.30.0, mamba-align",
        "vllm==0.31.0, mamba-align",
    ]
    (heading,) = (line for line in plain.splitlines() if "running" in line)
    assert re.findall(r"[\w+]+", heading) == ["theorem", "first+checkpoint", "running"]
    (cells,) = (line for line in plain.splitlines() if "exact-estimate" in line)
    assert "REFUTED (expected PROVED)" in cells
    assert len(re.findall("no-undercount", plain)) == 2


def test_a_terminal_too_narrow_for_the_matrix_gets_counts_and_exceptions() -> None:
    """Many kinds of step need many columns; then a line per theorem says what is not proved."""
    rows = [row(family=f"kind-{i}", tags=[]) for i in range(20)]
    rows.append(row(family="hit-full", tags=[], verdict="REFUTED", expected="REFUTED"))
    rows.append(row(family="drafts", tags=[], verdict="REFUTED", expected="PROVED"))
    rows.append(row(family="resumed", tags=[], verdict="NOT_APPLICABLE", expected=None))

    text = shown(show_verdicts, rows, force_terminal=True, color_system=None, width=100)

    assert "kind-0" not in text
    lines = [re.findall(r"[\w+()-]+", line) for line in text.splitlines()]
    assert ["no-undercount", "20", "1", "hit-full", "REFUTED"] in lines
    assert ["drafts", "REFUTED", "(expected", "PROVED)"] in lines
    assert "resumed" not in text


def test_no_color_is_honoured() -> None:
    """With NO_COLOR a terminal gets the matrix without colours."""
    options = {"force_terminal": True, "color_system": "standard"}
    coloured = shown(show_verdicts, [row()], **options, _environ={})
    plain = shown(show_verdicts, [row()], **options, _environ={"NO_COLOR": "1"})

    colour = re.compile("\x1b\\[(?:[0-9;]*;)?3[0-7]m")
    assert colour.search(coloured)
    assert not colour.search(plain)
    assert "PROVED" in plain


def test_a_refutation_is_one_line_with_its_numbers_and_a_command() -> None:
    """Sizes, tokens, estimate, drawn and need stand in one line, and how to replay it below."""
    text = shown(show_unproved, [row(), REFUTED], {(TARGET, "long-prompt"): "long prompt.json"})

    numbers, command = text.splitlines()
    assert numbers == (
        "REFUTED vllm==0.30.0 checkpoint exact-estimate (as expected): B 896, H 128, S 1, K 1, "
        "23,040 tokens computed, then 704,547: estimate 761, drawn 3, needed 2"
    )
    assert shlex.split(command) == [
        *("capproof", "replay", "long prompt.json", "--target", "vllm==0.30.0")
    ]


def test_a_command_is_right_for_a_folder_with_blanks() -> None:
    """What is printed can be pasted into a shell."""
    target = "path:/my tree/$(x)"
    scenario = to_json(replace(SCENARIO, predicted={target: SCENARIO.predicted[TARGET]}))

    paths = {(target, "long-prompt"): "a.json"}
    text = shown(show_unproved, [{**REFUTED, "target": target, "scenario": scenario}], paths)

    assert shlex.split(text.splitlines()[1])[-1] == target


def test_the_same_counterexample_at_production_sizes_is_shown_too() -> None:
    """The least numbers explain a fault, those of a production server say what it costs."""
    text = shown(
        show_unproved, [{**REFUTED, "scenario_at_production_sizes": to_json(SCENARIO)}], {}
    )

    assert text.splitlines()[1].startswith("  at production sizes: B 896, H 128")


def test_a_step_that_raises_says_what() -> None:
    """An exception is the outcome where there are no numbers."""
    raising = Prediction(1, 1, 0, 0, "ValueError", ("allocation-succeeds",))
    scenario = to_json(replace(SCENARIO, predicted={TARGET: raising}))

    assert counterexample_line(scenario, TARGET).endswith("then 704,547: raises ValueError")


def test_a_target_without_prediction_is_not_guessed() -> None:
    """Where nothing is predicted, no numbers are shown for it."""
    assert counterexample_line(to_json(SCENARIO), "path:x").endswith("nothing predicted")


def test_what_is_undecided_says_why_once() -> None:
    """A reason that many obligations share is one line, with file and line as they are."""
    other = {**UNSUPPORTED, "theorem": "exact-estimate"}

    (one,) = shown(show_unproved, [UNSUPPORTED], {}).splitlines()
    (both,) = shown(show_unproved, [UNSUPPORTED, other], {}).splitlines()

    assert one == (
        f"UNSUPPORTED vllm==0.30.0 first+checkpoint no-undercount: {UNSUPPORTED['reason']}"
    )
    assert both.startswith("UNSUPPORTED vllm==0.30.0 2 obligations: vllm/v1/core/managers.py:100:")


def test_what_is_not_applicable_says_why_once() -> None:
    """It is no pass, and a surprise says what was expected."""
    reason = "there are no checkpoint blocks before 0.29.0"
    one = row(verdict="NOT_APPLICABLE", expected=None, reason=reason)
    surprise = {**one, "theorem": "exact-estimate", "expected": "PROVED"}

    assert shown(show_unproved, [one, one, surprise], {}).splitlines() == [
        f"NOT_APPLICABLE vllm==0.30.0 2 obligations: {reason}",
        "NOT_APPLICABLE vllm==0.30.0 first+checkpoint exact-estimate, expected PROVED: " + reason,
    ]


def compared(comparison: str, **changes: Any) -> dict[str, Any]:
    return {
        "target": "path:x",
        "baseline": TARGET,
        "family": "promoted",
        "tags": ["own-tail"],
        "comparison": comparison,
        "situation": None,
        "estimates": None,
        "reason": None,
        **changes,
    }


def test_estimators_that_differ_are_shown_with_their_numbers() -> None:
    """The least step where they differ is one line, and what is not so is counted."""
    situation = {
        "geometry": vars(Geometry(1, 1, 0, 1, 1, False)),
        "call": vars(Call(4, 4, 1, 1)),
    }
    rows = [
        compared("EQUAL"),
        compared("DIFFER", situation=situation, estimates=[3, 2]),
        compared("UNKNOWN", reason="canceled [/x]"),
        compared("NOT_COMPARABLE", reason="no hit ends inside a block before 0.26.0"),
    ]

    head = f"estimates of path:x and {TARGET}"
    assert shown(show_differences, rows).splitlines() == [
        f"DIFFER {head}, promoted+own-tail: B 1, H 1, S 0, K 1, 1 token computed, then 4: 3 and 2",
        f"UNKNOWN {head}, promoted+own-tail: canceled [/x]",
        f"{head}: equal in 1 kinds of step, can differ in 1, undecided in 1, not in both targets 1",
    ]
    assert shown(show_differences, []) == ""


@pytest.mark.parametrize("target", ["path:/[bold]x[/]", "path:/[/x]", "path:/:smile:"])
def test_a_target_is_shown_as_it_is(target: str) -> None:
    """Markup in a folder's name is no markup."""
    rows = [row(target=target)]

    assert target in shown(show_verdicts, rows)
    assert target in shown(show_verdicts, rows, force_terminal=True, color_system=None)


def replayed(outcome: Outcome, holds: bool | None, *, detail: str = "") -> Replay:
    steps = (
        StepSeen("already computed", 0, Step(2, 2, 2, 27, True), 1021, 2),
        StepSeen("the rest", 27, Step(761, 761, 3, 788, True), 1018, 5),
    )
    return Replay("long-prompt", TARGET, outcome, steps, detail, theorem_holds=holds)


def test_a_replay_is_a_numbered_table() -> None:
    """Each step shows tokens, estimate, drawn, need and what is held."""
    text = shown(show_replay, SCENARIO, replayed(Outcome.REPRODUCED, False), "core")

    first, heading, _, second_step, verdict = text.splitlines()
    assert first == "long-prompt on vllm==0.30.0, tier core: reproduced"
    assert heading.split()[:3] == ["step", "what", "tokens"]
    assert re.split(r"\s{2,}", second_step.strip()) == [
        *("2", "the rest", "23040 to 704547", "761", "761", "3", "2", "788", "5", "1018")
    ]
    assert verdict.strip() == "exact-estimate is broken"


def test_hostile_words_of_a_scenario_are_shown_as_they_are() -> None:
    """A scenario file cannot style or break the output."""
    step = replace(SCENARIO.steps[0], why="[/] [bold]not bold[/bold] :smile:")
    scenario = replace(SCENARIO, steps=(step, SCENARIO.steps[1]))

    text = shown(show_replay, scenario, replayed(Outcome.DISAGREES, True, detail="[/x]"), "core")

    assert "[/] [bold]not bold[/bold] :smile:" in text
    assert "[/x]" in text
    assert "exact-estimate holds here" in text


def test_rows_survive_json() -> None:
    """What was written with --json can be reported as it was."""
    again = json.loads(json.dumps([row(), REFUTED]))

    assert shown(show_verdicts, again) == shown(show_verdicts, [row(), REFUTED])
