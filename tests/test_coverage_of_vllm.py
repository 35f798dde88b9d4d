from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from models.traits import Traits
from scripts.branches import Arc, Branch, BranchError, branches_of
from scripts.coverage_of_vllm import (
    FUNCTIONS,
    CoverageError,
    OfFunction,
    Reason,
    Standing,
    load_reasons,
    of_release,
    page,
    problems,
)
from scripts.lifted_branches import FILES, Kind, explored
from spec.theorems import Asks

MODULE = """\
class Counter:
    def count(self, numbers, is_odd, *, mode="align"):
        total = 0
        for number in numbers:
            if (
                number > 2
                and number < 9
            ):
                total += 1
            elif number < 0:
                if is_odd:
                    total -= 1
                total -= 1
        if mode != "align":
            total = 0
        return total


def double(number):
    if number:
        return 2 * number
    return 0
"""
#: What "the tests" ask of it: nothing below zero, and no other mode.
CALLS = "import tallies; tallies.Counter().count([1, 3], False); tallies.double(1)"
FOR, INSIDE, NEGATIVE, ODD, MODE = 4, 5, 10, 11, 14
LOWER, FURTHER = (NEGATIVE, ODD), (NEGATIVE, FOR)
FUNCTIONS_HERE = {"tallies": ("Counter.count", "double", "Counter.of_a_later_release")}


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    """The module's folder, and coverage.py's own report of a run."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "tallies.py").write_text(MODULE)
    (folder / "calls.py").write_text(CALLS)
    for arguments in (["run", "--branch", "calls.py"], ["json", "-q", "-o", "report.json"]):
        command = [sys.executable, "-m", "coverage", *arguments]
        subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL)
    report = json.loads((folder / "report.json").read_text())
    report["files"] = {str(folder / name): found for name, found in report["files"].items()}
    return folder, report


def lifted(
    taken: Sequence[Arc] = (), *, asked: Sequence[int] = (), gave_up: bool = False
) -> Mapping[str, Any]:
    """What lifted runs that come to every line say."""
    of_file = {
        "lines": list(range(1, MODULE.count("\n") + 1)),
        "asked": list(asked),
        "taken": [[*arc, ["running"]] for arc in taken],
    }
    return {"files": {"tallies.py": of_file}, "gave_up": {"running": "why"} if gave_up else {}}


def count_of(
    tests: tuple[Path, Mapping[str, Any]], found: Mapping[str, Any], reasons: Sequence[Reason] = ()
) -> OfFunction:
    """`Counter.count`, judged."""
    root, report = tests
    return of_release(root, report, found, reasons, FUNCTIONS_HERE)[0]


def standings(function: OfFunction) -> Mapping[tuple[str, str], Standing]:
    return {
        (judged.branch.condition, judged.branch.way): judged.standing for judged in function.missing
    }


def test_branches_are_named_by_condition_and_way() -> None:
    """A condition over several lines is one; what leads to a nested one is known."""
    found = branches_of(MODULE, "Counter.count", [(FOR, INSIDE), (FOR, MODE), LOWER, (ODD, 13)])

    assert found == {
        (FOR, INSIDE): Branch("Counter.count", "numbers", "round", FOR),
        (FOR, MODE): Branch("Counter.count", "numbers", "end", FOR),
        LOWER: Branch(
            "Counter.count", "number < 0", "true", NEGATIVE, ((INSIDE, "false"), (FOR, "round"))
        ),
        (ODD, 13): Branch(
            *("Counter.count", "is_odd", "false", ODD),
            ((NEGATIVE, "true"), (INSIDE, "false"), (FOR, "round")),
        ),
    }


def test_branches_of_another_function_are_left_out() -> None:
    """Only the function's own lines count."""
    assert branches_of(MODULE, "double", [(FOR, INSIDE)]) == {}


def test_a_branch_of_an_unknown_statement_is_refused() -> None:
    """A statement that decides and is not understood may not be passed over."""
    with pytest.raises(BranchError, match="line 3 decides"):
        branches_of(MODULE, "Counter.count", [(3, 4)])


def test_taken_branches_are_counted_by_coverage(
    tests: tuple[Path, Mapping[str, Any]],
) -> None:
    """Of the ten branches six are taken; a function that the release lacks is left out."""
    root, report = tests

    count, double = of_release(root, report, lifted(), [], FUNCTIONS_HERE)

    assert (count.num_taken, count.num_all) == (6, 10)
    assert (double.num_taken, double.num_all) == (1, 2)
    assert set(standings(count)) == {
        *(("number < 0", "true"), ("is_odd", "true"), ("is_odd", "false")),
        ("mode != 'align'", "true"),
    }


def test_a_branch_that_no_path_takes_is_judged_by_the_solver(
    tests: tuple[Path, Mapping[str, Any]],
) -> None:
    """Where its condition is asked of terms; what lies behind it is judged with it."""
    found = standings(count_of(tests, lifted(asked=[NEGATIVE])))

    assert found["number < 0", "true"] is Standing.NO_PATH
    assert found["is_odd", "true"] is Standing.BEHIND
    assert found["is_odd", "false"] is Standing.BEHIND


def test_what_the_set_up_settles_is_not_judged_by_the_solver(
    tests: tuple[Path, Mapping[str, Any]],
) -> None:
    """A mode that is the same in all runs says nothing of another one."""
    found = count_of(tests, lifted(asked=[NEGATIVE]))

    assert standings(found)["mode != 'align'", "true"] is Standing.OPEN
    assert any("how lifted runs are set up" in judged.judgement for judged in found.missing)


def test_a_branch_that_a_path_takes_is_a_gap(tests: tuple[Path, Mapping[str, Any]]) -> None:
    """The solver has a sample of it, so nothing but a written reason can judge it."""
    found = count_of(tests, lifted([LOWER], asked=[NEGATIVE]))

    assert standings(found)["number < 0", "true"] is Standing.OPEN
    assert "lifted runs take it: running" in {judged.judgement for judged in found.missing}


def test_nothing_is_shown_by_paths_that_may_be_missing(
    tests: tuple[Path, Mapping[str, Any]],
) -> None:
    """Where the solver gave up on one kind, no branch is said to be taken by none."""
    found = count_of(tests, lifted(asked=[NEGATIVE], gave_up=True))

    assert set(standings(found).values()) == {Standing.OPEN}


def test_a_written_reason_comes_first(tests: tuple[Path, Mapping[str, Any]]) -> None:
    """It judges the branch, and what lies behind; a gap is said to be one."""
    reasons = [
        Reason("Counter.count", "number < 0", "true", "not negative", gap=True),
        Reason("Counter.count", "mode != 'align'", "true", "another mode"),
    ]

    found = count_of(tests, lifted([LOWER], asked=[NEGATIVE]), reasons)

    assert standings(found) == {
        ("number < 0", "true"): Standing.GAP,
        ("is_odd", "true"): Standing.GAP,
        ("is_odd", "false"): Standing.GAP,
        ("mode != 'align'", "true"): Standing.WRITTEN,
    }
    assert problems(reasons, {"this": [found]}) == []


def test_an_open_branch_and_an_idle_reason_are_to_be_seen_to(
    tests: tuple[Path, Mapping[str, Any]],
) -> None:
    """Neither a branch without judgement nor a judgement of nothing goes unseen."""
    reasons = [
        Reason("Counter.count", "number < 0", "true", "not negative"),
        Reason("Counter.count", "numbers", "end", "all loops end"),
    ]
    found = count_of(tests, lifted(), reasons)

    first, second = problems(reasons, {"this": [found]})

    assert first.startswith(f"this: tallies.py:{MODE}: Counter.count: `mode != 'align'` true: ")
    assert second == "unreached_branches.toml: Counter.count `numbers` end: judges nothing"


def test_a_file_that_nobody_imported_is_refused(tests: tuple[Path, Mapping[str, Any]]) -> None:
    """No branch is counted as there being none."""
    root, _ = tests
    with pytest.raises(CoverageError, match=r"tallies\.py"):
        of_release(root, {"files": {}}, lifted(), [], FUNCTIONS_HERE)


def test_the_page_names_each_branch_that_is_not_taken(
    tests: tuple[Path, Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With line, file, condition, way and judgement; like ones of several releases in one row."""
    monkeypatch.setattr("scripts.coverage_of_vllm.FUNCTIONS", FUNCTIONS_HERE)
    found = count_of(tests, lifted(asked=[NEGATIVE]))

    text = page({"this": [found], "that": [found]}, {"this": 3, "that": 4})

    assert "| `Counter.count` | 6 / 10 | 6 / 10 |" in text
    place = f"tallies.py:{NEGATIVE}"
    assert (
        f"| `Counter.count` | `number < 0` | true | {place} | {place} | "
        "**No path**: no path takes it, in any kind of step; the paths are shown to be all |"
    ) in text


def test_every_written_reason_is_about_a_function_that_is_looked_at() -> None:
    """A misspelt name would judge nothing for ever."""
    names = {name for of_module in FUNCTIONS.values() for name in of_module}
    reasons = load_reasons()
    assert reasons
    assert {reason.function for reason in reasons} <= names


def test_an_unknown_key_of_a_reason_is_refused(tmp_path: Path) -> None:
    """A misspelt `gap` may not make a gap a reason."""
    file = tmp_path / "reasons.toml"
    file.write_text(
        '[[branch]]\nfunction = "f"\ncondition = "c"\nway = "true"\nreason = "r"\ngapp = true\n'
    )
    with pytest.raises(CoverageError, match="gapp"):
        load_reasons(file)


def test_lifted_runs_take_the_branches_of_the_tree(
    trees: Mapping[str, Path], tmp_path: Path
) -> None:
    """A first step goes through the estimate by the align side, and terms are asked there."""

    def only_first(traits: Traits) -> Iterator[Kind]:
        yield "mamba-align", "first", (), Asks.STEP

    root, name = trees["0.31.0"], "MambaManager.get_num_blocks_to_allocate"
    found = explored(root, tmp_path / "data", only_first)

    file = next(file for file in FILES if file.endswith("single_type_kv_cache_manager.py"))
    of_file, source = found["files"][file], (root / file).read_text(encoding="utf-8")
    taken = {(first, then): kinds for first, then, kinds in of_file["taken"]}
    deciding = branches_of(source, name, [arc for arc in taken if arc[0] in if_lines(source)])
    ways = {(b.condition, b.way): taken[arc] for arc, b in deciding.items()}
    lines = {branch.condition: branch.line for branch in deciding.values()}
    assert found["paths"] > 1
    assert found["gave_up"] == {}
    assert ways["self.mamba_cache_mode != 'align'", "false"] == ["mamba-align first"]
    assert ("self.mamba_cache_mode != 'align'", "true") not in ways
    assert lines["self.mamba_cache_mode != 'align'"] not in of_file["asked"]
    assert set(lines.values()) & set(of_file["asked"])


def if_lines(source: str) -> set[int]:
    """Lines of a file that begin an `if`."""
    lines = enumerate(source.splitlines(), start=1)
    return {number for number, line in lines if line.lstrip().startswith(("if ", "elif "))}
