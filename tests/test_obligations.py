"""Verdicts as rows, and the store that spares proving again what has not changed."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import obligations
from conformance.expectations import expected, where
from conformance.explain import explanation
from conformance.obligations import (
    Row,
    Selection,
    compare,
    compared_by_kind,
    document,
    is_as_expected,
    keep_comparison,
    settle,
    settled_before,
    settled_by_part,
    summary,
)
from conformance.replay import Outcome, replay_in
from conformance.scenario import Scenario, loads
from conformance.targets import CORE_FILE, Tree, resolve
from models.loader import CoreError
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS

OLD, NEW = "vllm==0.30.0", "vllm==0.31.0"
CopyTree = Callable[..., Path]
#: Kinds of step that are fast to settle.
KINDS = (("first", ()), ("first", ("checkpoint",)), ("running", ()), ("checkpoint", ()))
SOME = Selection(kinds=KINDS)
#: Two obligations, of which 0.30.0 breaks one.
ONE_MANAGER = ("mamba-align",)
FEW = Selection(
    theorems=("no-undercount", "exact-estimate"),
    kinds=(("checkpoint", ()),),
    managers=ONE_MANAGER,
)
ONE = replace(FEW, theorems=("exact-estimate",))


@pytest.fixture(scope="module")
def settled(trees: Mapping[str, Path]) -> dict[str, list[Row]]:
    """Rows of the two releases, proved here."""
    return {target: settle(resolve(target), SOME, use_cache=False) for target in (OLD, NEW)}


def verdict_of(rows: list[Row], family: str, theorem: str) -> str:
    (verdict,) = (
        row["verdict"]
        for row in rows
        if (row["manager"], where(row["family"], row["tags"]), row["theorem"])
        == (*ONE_MANAGER, family, theorem)
    )
    return str(verdict)


def scenario_of(rows: list[Row], family: str, theorem: str) -> Scenario:
    (content,) = (
        row["scenario"]
        for row in rows
        if (row["manager"], row["family"], row["theorem"]) == (*ONE_MANAGER, family, theorem)
    )
    (scenario,) = loads(json.dumps(content), name="row")
    return scenario


def local(root: Path) -> Tree:
    return Tree(f"path:{root}", root, None)


# ---- what the issue names ------------------------------------------------------------------------


@pytest.mark.parametrize("theorem", ["exact-estimate", "bounded-demand"])
def test_the_fault_of_57050_is_refuted(settled: dict[str, list[Row]], theorem: str) -> None:
    """0.30.0 overcounts a checkpoint step without bound, and nothing else."""
    assert verdict_of(settled[OLD], "checkpoint", theorem) == "REFUTED"
    for family in ("first", "first+checkpoint", "running"):
        assert verdict_of(settled[OLD], family, theorem) == "PROVED"


@pytest.mark.parametrize(
    "theorem",
    [
        "no-undercount",
        "exact-estimate",
        "bounded-demand",
        "dry-run-parity",
        "allocation-succeeds",
    ],
)
@pytest.mark.parametrize("family", ["first", "first+checkpoint", "running", "checkpoint"])
def test_the_fix_is_proved(settled: dict[str, list[Row]], family: str, theorem: str) -> None:
    """0.31.0's capped estimate is what its allocator draws, for all sizes."""
    assert verdict_of(settled[NEW], family, theorem) == "PROVED"


def test_the_fix_still_draws_more_than_is_needed(settled: dict[str, list[Row]]) -> None:
    """On checkpoint steps with speculative blocks 0.31.0 differs from the intended model."""
    scenario = scenario_of(settled[NEW], "checkpoint", "matches-intended")

    assert verdict_of(settled[NEW], "checkpoint", "matches-intended") == "REFUTED"
    assert scenario.geometry.num_speculative_blocks > 0


def test_every_counterexample_replays_as_reproduced(
    settled: dict[str, list[Row]], trees: Mapping[str, Path]
) -> None:
    """A counterexample counts when the real code shows it."""
    for target, rows in settled.items():
        scenarios = [
            scenario
            for row in rows
            for column in ("scenario", "scenario_at_production_sizes")
            if row[column] is not None
            for scenario in loads(json.dumps(row[column]), name=row["theorem"])
        ]
        assert scenarios
        root = trees[target.removeprefix("vllm==")]
        for result in replay_in(root, "core", scenarios, target=target):
            assert (result.outcome, result.theorem_holds) == (Outcome.REPRODUCED, False)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [OLD, NEW])
def test_there_is_a_row_per_obligation(settled: dict[str, list[Row]], target: str) -> None:
    """Nothing of the catalogue is left out, and nothing is said twice."""
    rows = [
        (row["manager"], row["family"], tuple(row["tags"]), row["theorem"])
        for row in settled[target]
    ]

    assert len(set(rows)) == len(rows)
    assert set(rows) == {
        (manager, *of, slug)
        for of in KINDS
        for slug, theorem in THEOREMS.items()
        for manager in theorem.managers
    }


@pytest.mark.parametrize("target", [OLD, NEW])
def test_a_row_holds_what_the_contract_says(settled: dict[str, list[Row]], target: str) -> None:
    """DESIGN.md names the keys and what stands under each."""
    for row in settled[target]:
        assert row.keys() == {
            *("target", "manager", "family", "tags", "theorem", "verdict", "expected", "scope"),
            *("params", "seconds", "assumptions", "scenario", "reason"),
            *("scenario_at_production_sizes", "replay"),  # additions
        }
        assert row["target"] == target
        assert row["manager"] in THEOREMS[row["theorem"]].managers
        assert row["verdict"] in {"PROVED", "REFUTED", "NOT_APPLICABLE"}
        assert row["expected"] == expected(
            target, row["manager"], where(row["family"], row["tags"]), row["theorem"]
        )
        assert is_as_expected(row)
        assert row["params"] == {"S": [0, 1, 2, 3, 4, 5, 6, 7, 8], "K": [0, 1]}
        is_applicable = row["verdict"] != "NOT_APPLICABLE"
        assert ("unbounded" in row["scope"]) == is_applicable
        assert (row["seconds"] > 0) == is_applicable
        assert (row["reason"] is None) == is_applicable
        assert (row["scenario"] is not None) == (row["verdict"] == "REFUTED")
        assert row["replay"] == ("reproduced" if row["verdict"] == "REFUTED" else None)


@pytest.mark.parametrize("target", [OLD, NEW])
def test_a_rows_assumptions_can_be_explained(settled: dict[str, list[Row]], target: str) -> None:
    """What a proof rests on is a named object, and there is something to rest on."""
    for row in settled[target]:
        assert bool(row["assumptions"]) == (row["verdict"] != "NOT_APPLICABLE")
        for slug in row["assumptions"]:
            assert explanation(slug) is not None, slug


def test_the_document_names_versions(settled: dict[str, list[Row]]) -> None:
    """A verdict is reproducible only with the solver that gave it."""
    content = document(settled[NEW])

    assert content.keys() == {"schema", "versions", "obligations"}
    assert content["schema"] == 1
    assert content["versions"].keys() == {"capproof", "z3", "python"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", content["versions"]["z3"])
    assert json.loads(json.dumps(content)) == content
    assert document([], [{"comparison": "EQUAL"}])["differences"] == [{"comparison": "EQUAL"}]


@pytest.mark.parametrize(
    ("verdict", "wanted", "as_expected"),
    [
        ("PROVED", None, True),
        ("REFUTED", None, False),
        ("NOT_APPLICABLE", None, True),
        ("UNKNOWN", None, False),
        ("REFUTED", "REFUTED", True),
        ("PROVED", "REFUTED", False),
        ("NOT_APPLICABLE", "NOT_APPLICABLE", True),
        ("NOT_APPLICABLE", "PROVED", False),
        ("PROVED", "NOT_APPLICABLE", False),
        ("UNKNOWN", "UNKNOWN", False),
        ("UNSUPPORTED", "UNSUPPORTED", False),
        ("VACUOUS", "VACUOUS", False),
    ],
)
def test_only_what_can_be_expected_is_as_expected(
    verdict: str, wanted: str | None, as_expected: bool
) -> None:
    """UNKNOWN, UNSUPPORTED and VACUOUS are a surprise even where another target has them too."""
    assert is_as_expected({"verdict": verdict, "expected": wanted}) is as_expected


#: Theorems, one that is about two managers counted twice.
NUM_CLAIMS = sum(len(theorem.managers) for theorem in THEOREMS.values())


@pytest.mark.parametrize(
    ("selection", "number"),
    [
        (Selection(), len(OBLIGATIONS) * NUM_CLAIMS),
        (Selection(families=("first",)), 2 * NUM_CLAIMS),
        (Selection(theorems=("exact-estimate",)), 2 * len(OBLIGATIONS)),
        (Selection(("first", "running"), ("exact-estimate", "no-undercount")), 16),
        (Selection(("first",), ("no-undercount",), KINDS, ONE_MANAGER), 2),
        (Selection(("first",), ("bounded-demand",), KINDS), 2),
        (Selection(("first",), ("bounded-demand",), KINDS, ("coordinator",)), 0),
        (Selection(("drafts",), kinds=KINDS), 0),
    ],
)
def test_a_selection_is_by_family_theorem_and_manager(selection: Selection, number: int) -> None:
    """A family is chosen with all its tags; an empty choice means all that is about a manager."""
    assert len(list(selection.obligations())) == number


def test_a_selection_falls_into_kinds_of_step() -> None:
    """The parts are the whole, in the same order; this is how work is spread over processes."""
    selection = Selection(("promoted", "first"), ("exact-estimate",))

    parts = list(selection.by_kind())

    assert [part.kinds for part in parts] == [
        (of,) for of in OBLIGATIONS if of[0] in ("promoted", "first")
    ]
    assert [one for part in parts for one in part.obligations()] == list(selection.obligations())


def test_theorems_about_the_gate_are_a_part_of_their_own() -> None:
    """They are about steps that are explored anew, with the gate asked before."""
    first, gate, running, later = Selection(kinds=(KINDS[0], KINDS[2])).parts()

    assert (first.kinds, gate.kinds) == (KINDS[:1], KINDS[:1])
    assert (running.kinds, later.kinds) == (KINDS[2:3], KINDS[2:3])
    assert gate.theorems == ("admission-fits-whole", "gate-covers-first-step")
    assert later.theorems == ("gate-covers-lifetime",)
    assert set(first.theorems + gate.theorems) == set(THEOREMS)
    assert set(running.theorems + later.theorems) == set(THEOREMS)
    assert first.managers == gate.managers == tuple(MANAGERS)


def test_what_is_not_applicable_is_counted_apart() -> None:
    """A summary says how much is proved, and nothing else passes for it."""
    verdicts = ["PROVED", "PROVED", "REFUTED", "UNKNOWN", "NOT_APPLICABLE"]
    rows = [{"verdict": verdict, "expected": None} for verdict in verdicts]

    assert summary(rows[:3]) == "3 obligations: 2 proved, 1 not; 1 not as expected"
    assert summary(rows) == ("5 obligations: 2 proved, 2 not, 1 not applicable; 2 not as expected")


def test_a_kind_of_step_that_a_tree_lacks_is_not_applicable(copy_tree: CopyTree) -> None:
    """Nobody asks the solver about it, nothing is expected of it, and it says why."""
    selection = Selection(("checkpoint",), ("no-undercount",))

    for row in settle(local(copy_tree("0.24.0")), selection, use_cache=False):
        assert (row["verdict"], row["expected"]) == ("NOT_APPLICABLE", None)
        assert row["reason"] == "there are no checkpoint blocks before 0.29.0"
        assert is_as_expected(row)


# ---- two targets ---------------------------------------------------------------------------------


def test_estimators_that_differ_do_so_in_a_least_step() -> None:
    """The fix of vLLM 57050 changed what a checkpoint step is estimated to take."""
    (row,) = compared(resolve(NEW), resolve(OLD), ONE)

    assert (row["target"], row["baseline"]) == (NEW, OLD)
    assert (row["comparison"], row["estimates"]) == ("DIFFER", [2, 3])
    call = row["situation"]["call"]
    assert (call["total_computed_tokens"], call["num_tokens_main_model"]) == (1, 4)


def test_estimators_are_equal_where_no_step_tells_them_apart() -> None:
    """The fix changed nothing for admissions."""
    rows = compared(resolve(NEW), resolve(OLD), Selection(kinds=KINDS[:2]))

    assert [row["comparison"] for row in rows] == ["EQUAL", "EQUAL"]


def test_a_kind_of_step_that_one_target_lacks_is_not_compared(trees: Mapping[str, Path]) -> None:
    """The reason is that of the target that lacks it."""
    (row,) = compared(resolve(NEW), resolve("vllm==0.24.0"), ONE)

    assert (row["comparison"], row["situation"]) == ("NOT_COMPARABLE", None)
    assert row["reason"] == "there are no checkpoint blocks before 0.29.0"


@pytest.mark.usefixtures("own_cache")
def test_a_comparison_is_read_again_until_either_target_changes(copy_tree: CopyTree) -> None:
    """It depends on the text of both."""
    ours, theirs = resolve(NEW), local(copy_tree("0.30.0"))
    assert list(compared_by_kind(ours, theirs, ONE).values()) == [None]

    rows = [compare(ours, part, theirs) for part in ONE.by_kind()]
    for part, row in zip(ONE.by_kind(), rows, strict=True):
        keep_comparison(ours, part, theirs, row)

    assert list(compared_by_kind(ours, theirs, ONE).values()) == rows
    assert list(compared_by_kind(theirs, ours, ONE).values()) == [None]
    (theirs.root / CORE_FILE).write_text((theirs.root / CORE_FILE).read_text() + "# edited\n")
    assert list(compared_by_kind(ours, theirs, ONE).values()) == [None]


def compared(tree: Tree, baseline: Tree, selection: Selection) -> list[Row]:
    return [compare(tree, part, baseline) for part in selection.by_kind()]


# ---- trees that cannot be judged -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["get_num_blocks_to_allocate", "allocate_new_blocks"])
def test_an_inherited_method_is_not_judged_instead(copy_tree: CopyTree, method: str) -> None:
    """A manager that lost its own method would count by the rule of another kind of manager."""
    root = copy_tree("0.31.0", (f"def {method}", "def renamed"))

    with pytest.raises(CoreError, match=rf"no MambaManager\.{method} here \(renamed\?\)"):
        settle(local(root), FEW, use_cache=False)


def test_what_is_not_understood_is_unsupported_with_its_place(copy_tree: CopyTree) -> None:
    """A construct that the lifter does not know ends as UNSUPPORTED with file and line."""
    line = "num_new_blocks = (\n                num_required_blocks"
    root = copy_tree("0.31.0", (line, f"num_tokens = num_tokens >> 0\n            {line}"))
    place = (root / CORE_FILE).read_text().split(">> 0")[0].count("\n") + 1

    for row in settle(local(root), FEW, use_cache=False):
        assert row["verdict"] == "UNSUPPORTED"
        assert f"{CORE_FILE}:{place}: " in row["reason"]
        assert "\n" not in row["reason"]
        assert (row["scenario"], row["expected"]) == (None, None)
        assert not is_as_expected(row)


@pytest.mark.parametrize(
    "name", ["UPPER case", "dots.and_underscores", "ümläut", "very-" * 30 + "long"]
)
def test_a_counterexample_has_a_name_whatever_the_folder_is_called(
    copy_tree: CopyTree, name: str
) -> None:
    """Scenario names are slugs, and paths are not."""
    rows = settle(local(copy_tree("0.30.0", name=name)), FEW, use_cache=False)

    scenario = scenario_of(rows, "checkpoint", "exact-estimate")
    assert scenario.name.startswith("exact-estimate-checkpoint-path-")
    assert list(scenario.predicted) == [rows[0]["target"]]


def test_counterexamples_of_two_folders_have_two_names(copy_tree: CopyTree) -> None:
    """What replays one tree's fault is not overwritten by another's."""
    names = {
        scenario_of(settle(local(root), FEW, use_cache=False), "checkpoint", "exact-estimate").name
        for root in (copy_tree("0.30.0", name="a-b"), copy_tree("0.30.0", name="a.b"))
    }

    assert len(names) == 2


# ---- the store -----------------------------------------------------------------------------------


@pytest.fixture
def already_proved(settled: dict[str, list[Row]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Proving takes no time: the rows are those of the release that a tree was copied from."""

    def prove(tree: Tree, selection: Selection, on_progress: object) -> Iterator[Row]:
        wanted = set(selection.obligations())
        for row in settled[tree.target if tree.release else NEW]:
            of = row["manager"], row["family"], tuple(row["tags"]), row["theorem"]
            if of in wanted:
                yield {k: v for k, v in row.items() if k not in ("target", "expected")}

    monkeypatch.setattr(obligations, "_prove", prove)


@pytest.mark.usefixtures("own_cache", "already_proved")
def test_what_was_settled_is_read_again() -> None:
    """A second run needs no solver, and says the same."""
    tree = resolve(OLD)
    assert settled_before(tree, FEW) is None

    rows = settle(tree, FEW)

    assert settled_before(tree, FEW) == rows
    assert settled_before(tree, ONE) == rows[1:]
    assert settled_before(tree, Selection(kinds=FEW.kinds)) is None


@pytest.mark.usefixtures("own_cache")
def test_what_was_settled_before_a_failure_is_kept(
    settled: dict[str, list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run is taken up at the kind of step where it was left."""
    tree = resolve(OLD)
    rows = {
        row["family"]: row
        for row in settled[OLD]
        if (row["manager"], row["theorem"]) == (*ONE_MANAGER, "gate-covers-first-step")
    }

    def prove(tree: Tree, selection: Selection, on_progress: object) -> Iterator[Row]:
        ((family, _),) = selection.kinds
        if family == "checkpoint":
            raise KeyboardInterrupt
        yield {k: v for k, v in rows[family].items() if k not in ("target", "expected")}

    monkeypatch.setattr(obligations, "_prove", prove)
    selection = Selection(
        theorems=("gate-covers-first-step",), kinds=KINDS[2:], managers=ONE_MANAGER
    )
    with pytest.raises(KeyboardInterrupt):
        settle(tree, selection)

    kept = settled_by_part(tree, selection).values()
    assert [rows is not None for rows in kept] == [True, False]


@pytest.mark.usefixtures("own_cache", "already_proved")
def test_expectations_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed expectation counts at once."""
    tree = resolve(OLD)
    settle(tree, FEW)
    monkeypatch.setattr(obligations, "expected", lambda *arguments: "NOT_APPLICABLE")

    assert {row["expected"] for row in settled_before(tree, FEW) or ()} == {"NOT_APPLICABLE"}


def test_two_targets_with_the_same_text_share_nothing(own_cache: Path, copy_tree: CopyTree) -> None:
    """A row names its target, and so does the scenario in it."""
    settle(resolve(OLD), FEW)
    tree = local(copy_tree("0.30.0"))

    assert settled_before(tree, FEW) is None
    rows = settle(tree, FEW)
    assert list(scenario_of(rows, "checkpoint", "exact-estimate").predicted) == [tree.target]


@pytest.mark.usefixtures("already_proved")
@pytest.mark.parametrize(
    "file", [CORE_FILE, "vllm/v1/kv_cache_interface.py", "vllm/utils/math_utils.py"]
)
def test_an_edited_tree_is_proved_again(own_cache: Path, copy_tree: CopyTree, file: str) -> None:
    """Every module that is executed counts, and its absence does."""
    tree = local(copy_tree("0.31.0"))
    rows = settle(tree, FEW)
    text = (tree.root / file).read_text()

    (tree.root / file).write_text(f"{text}# edited\n")
    assert settled_before(tree, FEW) is None
    (tree.root / file).unlink()
    assert settled_before(tree, FEW) is None
    (tree.root / file).write_text("")
    assert settled_before(tree, FEW) is None
    (tree.root / file).write_text(text)
    assert settled_before(tree, FEW) == rows


@pytest.mark.usefixtures("already_proved")
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"no database" * 100),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
        lambda file: file.write_bytes(file.read_bytes()[:5000]),
        lambda file: _execute(file, "update Cache set value = 'x'"),
        lambda file: _execute(file, "drop table Cache"),
    ],
)
def test_a_damaged_store_costs_time_only(own_cache: Path, damage: Callable[[Path], object]) -> None:
    """A store that cannot be read is proved around, and made anew where that is possible."""
    tree = resolve(OLD)
    verdicts = [row["verdict"] for row in settle(tree, FEW)]
    damage(own_cache / "verdicts" / "cache.db")

    assert settled_before(tree, FEW) is None
    assert [row["verdict"] for row in settle(tree, FEW)] == verdicts
    again = settled_before(tree, FEW)
    assert again is not None
    assert [row["verdict"] for row in again] == verdicts


def _execute(file: Path, statement: str) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.usefixtures("already_proved")
def test_a_damaged_store_is_made_anew_once(own_cache: Path) -> None:
    """What another process kept after it had made the store anew is not lost."""
    ours, theirs = resolve(OLD), resolve(NEW)
    settle(ours, FEW)
    (own_cache / "verdicts" / "cache.db").write_bytes(b"no database" * 100)
    settle(theirs, FEW)
    obligations._Store(ours)._remove_damaged()

    assert settled_before(theirs, FEW) is not None


@pytest.mark.usefixtures("already_proved")
def test_a_cache_that_cannot_be_written_is_no_failure(own_cache: Path) -> None:
    """The store only saves time."""
    (own_cache / "verdicts").write_text("a file stands here")

    rows = settle(resolve(OLD), FEW)

    assert [row["verdict"] for row in rows] == ["PROVED", "REFUTED"]
    assert settled_before(resolve(OLD), FEW) is None


@pytest.mark.usefixtures("own_cache", "already_proved")
def test_nothing_is_kept_unless_asked() -> None:
    """--no-cache neither reads nor writes."""
    settle(resolve(OLD), FEW, use_cache=False)

    assert settled_before(resolve(OLD), FEW) is None


@pytest.mark.usefixtures("own_cache", "already_proved")
def test_unknown_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run may get further than the solver did in this one."""
    tree = resolve(OLD)
    proved, refuted = settle(tree, FEW, use_cache=False)
    unknown = {**proved, "verdict": "UNKNOWN", "reason": "canceled"}
    monkeypatch.setattr(obligations, "_prove", lambda *arguments: iter([unknown, refuted]))

    assert settle(tree, FEW)[0]["verdict"] == "UNKNOWN"
    assert settled_before(tree, FEW) is None
    assert settled_before(tree, ONE) is not None
