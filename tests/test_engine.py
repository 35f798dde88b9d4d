from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conformance import cli
from conformance.engine import Answer, Progress, run_in
from conformance.targets import resolve
from conformance.workload import Workload, differences, known_workloads, to_json

#: `make selfcheck` tries the others too.
RELEASES = ("0.30.0", "0.31.0", "0.33.0")
if os.environ.get("CAPPROOF_ALL_RELEASES"):
    RELEASES = ("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")


@pytest.mark.parametrize("release", RELEASES)
def test_the_real_scheduler_does_what_is_expected(release: str) -> None:
    """Each workload ends on each release as `workloads.toml` says; one process per release."""
    pytest.importorskip("torch")
    target = f"vllm=={release}"
    workloads = [workload for workload in known_workloads() if target in workload.expected]

    answers = run_in(resolve(target).root, workloads)

    assert workloads
    wrong = {
        workload.name: answer.reason or found
        for workload, answer in zip(workloads, answers, strict=True)
        if (found := _differences(workload, answer, target)) is None or found
    }
    assert wrong == {}


def _differences(workload: Workload, answer: Answer, target: str) -> list[str] | None:
    if answer.outcome is None:
        return None
    return differences(answer.outcome, workload.expected[target])


def test_steps_that_bring_nothing_new_are_a_stall() -> None:
    """The number of steps decides, and no clock."""
    progress = Progress(stall_after=3)

    for state in ("a", "b", "b", "b"):
        progress.step(state)
        assert not progress.has_stalled
    progress.step("b")

    assert progress.has_stalled
    assert progress.last_new_step == 2


def test_a_scheduler_that_goes_round_in_circles_has_stalled() -> None:
    """A request that is preempted and admitted again for ever computes, and gets nowhere."""
    progress = Progress(stall_after=4)

    for state in "abcabca":
        progress.step(state)

    assert progress.has_stalled


def test_something_new_ends_the_wait() -> None:
    """Steps without progress count only in a row."""
    progress = Progress(stall_after=2)

    for state in "aabbccdd":
        progress.step(state)
        assert not progress.has_stalled


def test_a_tree_that_cannot_be_imported_answers_with_a_reason(tmp_path: Path) -> None:
    """No answer is an answer; the reason is one line."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('not today')\n")

    answers = run_in(tmp_path, known_workloads()[:2])

    assert [answer.outcome for answer in answers] == [None, None]
    assert all("vllm tier" in answer.reason for answer in answers)


def test_a_workload_is_not_replayed_in_the_core_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler needs everything imported for real; the line says what to add."""
    file = tmp_path / "w.json"
    file.write_text(json.dumps(to_json(known_workloads()[0])))

    assert cli.run(["replay", str(file)]) == 2
    assert "--tier vllm" in capsys.readouterr().err


def test_a_workload_that_ends_otherwise_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says what was expected and what was seen; expectations of others do not matter."""
    pytest.importorskip("torch")
    target = "vllm==0.30.0"
    (stalls,) = (known for known in known_workloads() if known.name == "promoted-prompt-25-blocks")
    content = to_json(stalls)
    content["expected"] = {target: {"end": "finished"}}
    file = tmp_path / "w.json"
    file.write_text(json.dumps(content))

    assert cli.run(["replay", str(file), "--tier", "vllm"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{target} {stalls.name} (end: expected finished, saw stalled): stalled")
    assert "gate 22, step not asked, 13 blocks free" in line


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the file to look into."""
    assert cli.run(["workloads", "--name", "no-such"]) == 2
    assert "conformance/workloads.toml" in capsys.readouterr().err
