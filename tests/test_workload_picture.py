"""Pictures of workloads: what vLLM's own scheduler told each request, and what was free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance import cli
from conformance.engine import Allocation, Answer, run_in
from conformance.picture import MAX_ROWS, Part
from conformance.targets import resolve
from conformance.workload import End, Outcome, Workload, known_workloads
from conformance.workload_picture import workload_pictures

Output = pytest.CaptureFixture[str]

OLD = "vllm==0.30.0"
STALLS = "promoted-prompt-25-blocks"
#: A load that is given blocks, and a step that the gate refuses.
GIVEN = Allocation(1, "long", 0, 0, free=24, gate=23, estimate=11, drawn=11)
REFUSED = Allocation(2, "long", 160, 171, free=13, gate=22)


def named(name: str) -> Workload:
    (found,) = (workload for workload in known_workloads() if workload.name == name)
    return found


def answer(*allocations: Allocation, end: End = End.FINISHED, **outcome: object) -> Answer:
    return Answer(Outcome(end, 3, **outcome), allocations=allocations)  # type: ignore[arg-type]


def test_a_row_says_what_was_told_and_what_came_of_it() -> None:
    """Where the gate refuses, what it was told stands against the free blocks."""
    (shown,) = workload_pictures(named(STALLS), answer(GIVEN, REFUSED))

    assert shown.title == "request long: a prompt of 331 tokens, 2 to make"
    assert [row.head for row in shown.rows] == [
        "step 1: a load behind 0, gate 23",
        "step 2: 171 tokens behind 160, gate 22, no blocks given",
    ]
    assert shown.rows[0].parts() == [(Part.DRAWN, 11), (Part.FREE, 13)]
    assert shown.rows[1].parts() == [(Part.UNUSED, 13), (Part.MISSING, 9)]


def test_steps_with_the_same_answer_share_a_row() -> None:
    """A request that waits is one row, however long it waits; another answer is another row."""
    waits = [replace(REFUSED, step=step) for step in range(2, 19)]
    (shown,) = workload_pictures(named(STALLS), answer(GIVEN, *waits, replace(GIVEN, step=19)))

    assert [row.name for row in shown.rows] == ["step 1", "steps 2 to 18", "step 19"]


def test_of_very_many_rows_the_last_are_drawn() -> None:
    """A picture stays a picture; what is left out is said."""
    steps = [replace(GIVEN, step=step, free=step) for step in range(1, MAX_ROWS + 4)]
    (shown,) = workload_pictures(named(STALLS), answer(*steps))

    assert len(shown.rows) == MAX_ROWS
    assert shown.left_out == "the first 3 rows are left out"


@pytest.mark.parametrize(
    ("outcome", "marks"),
    [
        ({"end": End.FINISHED}, ["", ""]),
        ({"end": End.STALLED, "request": "request", "status": "WAITING"}, ["", "stalled, WAITING"]),
        ({"end": End.RAISED, "error": "ValueError: no"}, ["", "raised ValueError: no"]),
    ],
)
def test_the_row_that_a_workload_ends_with_is_marked(
    outcome: dict[str, object], marks: list[str]
) -> None:
    """That of the request that waits for ever, or of the one that the exception left."""
    workload = named("external-prefix-beside-another-11-blocks")
    asked = [replace(GIVEN, request=arrival.name) for arrival in workload.arrivals]

    pictures = workload_pictures(workload, answer(*asked, **outcome))  # type: ignore[arg-type]

    assert [shown.rows[-1].mark for shown in pictures] == marks


def test_a_request_that_asked_for_nothing_has_no_picture() -> None:
    """Nor has a workload whose configuration was refused."""
    assert workload_pictures(named(STALLS), answer(end=End.REFUSED)) == []


def test_what_is_drawn_was_seen_on_the_scheduler() -> None:
    """Blocks drawn and free add up from step to step; nobody looks unless asked."""
    pytest.importorskip("torch")
    workload = named(STALLS)

    plain, seen = (
        run_in(resolve(OLD).root, [workload], with_allocations=asks)[0] for asks in (False, True)
    )

    assert plain == replace(seen, allocations=())
    assert seen.allocations[:2] == (GIVEN, REFUSED)
    assert {replace(one, step=2) for one in seen.allocations[1:]} == {REFUSED}


def test_a_workload_is_drawn_on_a_terminal_and_as_svg(tmp_path: Path, capsys: Output) -> None:
    """The stall is marked where the gate is told more than is free."""
    pytest.importorskip("torch")
    file = tmp_path / "w.svg"
    command = ["workloads", "--target", OLD, "--name", STALLS]

    assert cli.run([*command, "--draw", "--draw-svg", str(file)]) == 0

    out = capsys.readouterr().out
    assert "  free 13, estimated 22, drawn -  <-- stalled, WAITING\n" in out
    assert (
        f"Blocks of {STALLS} on {OLD}: steps 2 to 18 stalled, WAITING</title>" in file.read_text()
    )
