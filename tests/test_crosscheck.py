"""Verdicts are checked another way: proofs by cvc5, counterexamples on the real code."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import cli
from conformance.commands import prove
from conformance.crosscheck import AGREES, DISAGREES, UNDECIDED, crosscheck
from conformance.obligations import Row, Selection, settle
from conformance.targets import Tree, resolve
from models import second_solver
from spec.theorems import THEOREMS

OLD = "vllm==0.30.0"
CopyTree = Callable[..., Path]
FEW = Selection(
    theorems=("no-undercount", "exact-estimate"),
    kinds=(("checkpoint", ()),),
    managers=("mamba-align",),
)
ASKED = ("prove", "--target", OLD, "--family", "checkpoint")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cvc5") is None, reason="the second solver is in the full set-up"
)


@pytest.fixture(scope="module")
def tree() -> Tree:
    return resolve(OLD)


@pytest.fixture(scope="module")
def settled(tree: Tree) -> list[Row]:
    return settle(tree, FEW, use_cache=False)


@pytest.fixture
def rows(settled: list[Row]) -> tuple[Row, Row]:
    """A proved row and a refuted one, to be changed."""
    proved, refuted = copy.deepcopy(settled)
    assert (proved["verdict"], refuted["verdict"]) == ("PROVED", "REFUTED")
    return proved, refuted


@pytest.fixture(autouse=True)
def nothing_asked_before() -> Iterator[None]:
    """Answers are kept by question; none may reach another test."""
    ask = second_solver.ask
    ask.cache_clear()
    yield
    ask.cache_clear()


@pytest.fixture
def no_second_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvc5", None)


def said(tree: Tree, row: Row) -> str | None:
    (checked,) = crosscheck(tree, [row])
    assert {key: checked[key] for key in row} == row
    result: str | None = checked["crosscheck"]
    return result


def test_both_kinds_of_verdict_are_confirmed(tree: Tree, rows: tuple[Row, Row]) -> None:
    """cvc5 finds no model either, and the real manager shows the counterexample."""
    assert [row["crosscheck"] for row in crosscheck(tree, rows)] == [AGREES, AGREES]


@pytest.mark.parametrize("field", ["estimate", "drawn", "dry_run", "table_length"])
def test_a_wrong_number_disagrees(tree: Tree, rows: tuple[Row, Row], field: str) -> None:
    """A counterexample whose numbers the real manager does not show is not confirmed."""
    _, refuted = rows
    refuted["scenario"]["predicted"][OLD][field] += 1

    assert said(tree, refuted) == DISAGREES


def test_a_step_that_breaks_nothing_disagrees(tree: Tree, rows: tuple[Row, Row]) -> None:
    """A scenario that replays as predicted refutes a theorem only if it breaks that one."""
    _, refuted = rows
    refuted["theorem"] = "no-undercount"

    assert said(tree, refuted) == DISAGREES


def test_a_false_proof_disagrees(
    tree: Tree, rows: tuple[Row, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cvc5 finds the step that breaks a claim which is called proved."""
    proved, _ = rows
    false = replace(
        THEOREMS["no-undercount"], claim=lambda s, step, pool, need: step.drawn < step.estimate
    )
    monkeypatch.setitem(THEOREMS, "no-undercount", false)

    assert said(tree, {**proved, "family": "first"}) == DISAGREES


def test_a_proof_of_another_theorem_is_not_confirmed(
    tree: Tree, rows: tuple[Row, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refuted theorem that is called proved is denied, or at least left undecided."""
    monkeypatch.setattr(second_solver, "ATTEMPTS", (({}, 0.3),))
    proved, _ = rows

    assert said(tree, {**proved, "theorem": "exact-estimate"}) in (DISAGREES, UNDECIDED)


def test_an_undercount_is_shown_by_every_theorem_that_it_breaks(copy_tree: CopyTree) -> None:
    """A checkpoint left pending by the chunk before makes a step draw more than was estimated."""
    forgets_nothing = ("self._checkpoints.pop(request_id, None)", "pass")
    root = copy_tree("0.31.0", forgets_nothing)
    tree = Tree(f"path:{root}", root, None)
    theorems = ("no-undercount", "exact-estimate", "allocation-succeeds")
    rows = settle(tree, Selection((), theorems, (("running", ()),)), use_cache=False)

    assert [row["verdict"] for row in rows] == ["REFUTED"] * 6
    assert [row["crosscheck"] for row in crosscheck(tree, rows)] == [AGREES] * 6
    for row in rows:
        prediction = row["scenario"]["predicted"][tree.target]
        assert prediction["drawn"] > prediction["estimate"]
        assert set(prediction["violates"]) >= set(theorems)


def test_an_undecided_second_solver_confirms_nothing(
    tree: Tree, rows: tuple[Row, Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running out of time is neither agreement nor disagreement."""
    monkeypatch.setattr(second_solver, "ask", lambda script: second_solver.Answer.UNKNOWN)

    assert said(tree, rows[0]) == UNDECIDED


def test_what_cannot_be_run_confirms_nothing(
    tree: Tree, rows: tuple[Row, Row], tmp_path: Path
) -> None:
    """A pool larger than the driver builds shows nothing."""
    _, refuted = rows
    refuted["scenario"]["num_gpu_blocks"] = 2**40

    assert said(tree, refuted) == UNDECIDED


@pytest.mark.parametrize("verdict", ["UNKNOWN", "UNSUPPORTED", "VACUOUS"])
def test_no_verdict_has_nothing_to_check(tree: Tree, rows: tuple[Row, Row], verdict: str) -> None:
    """Only PROVED and REFUTED are checked."""
    assert said(tree, {**rows[0], "verdict": verdict}) is None


# ---- on the command line -------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_prove_crosscheck_confirms_a_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--crosscheck says how many verdicts were confirmed, and in --json which."""
    file = tmp_path / "out.json"

    first = ("prove", "--target", OLD, "--family", "first")
    assert cli.run([*first, "--crosscheck", "--json", str(file)]) == 0

    rows = json.loads(file.read_text())["obligations"]
    assert {row["crosscheck"] for row in rows if row["verdict"] != "NOT_APPLICABLE"} == {AGREES}
    assert capsys.readouterr().out.splitlines()[-1] == "crosscheck: 58 of 58 verdicts confirmed"


@pytest.mark.usefixtures("own_cache")
def test_an_unconfirmed_verdict_is_exit_status_1(
    rows: tuple[Row, Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict that is as expected, and that the second check denies, is named."""
    proved, refuted = rows
    refuted["scenario"]["predicted"][OLD]["drawn"] += 1
    monkeypatch.setattr(prove, "settle_all", lambda *args, **options: [proved, refuted])

    assert cli.run([*ASKED, "--crosscheck"]) == 1

    *_, named, counted, advice = capsys.readouterr().out.splitlines()
    assert named.startswith(f"CROSSCHECK disagrees: {OLD} mamba-align checkpoint exact-estimate")
    assert counted == "crosscheck: 1 of 2 verdicts confirmed"
    assert advice.startswith("what to do: exact-estimate in checkpoint")


@pytest.mark.usefixtures("own_cache", "no_second_solver")
def test_a_missing_second_solver_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Without cvc5 nothing is called checked."""
    assert cli.run([*ASKED, "--crosscheck"]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("capproof: --crosscheck needs a second solver: pip install cvc5")
