from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from models.lift import Variant
from models.loader import CORE_MODULES
from models.predict import LiftedTree
from models.prove import prove
from scripts import mutant_runs
from scripts.mutant_proofs import (
    Case,
    Judgement,
    Lifted,
    Outcome,
    Refutation,
    Shown,
    cases_of,
    judge,
    judge_all,
)
from scripts.mutant_runs import BY, Run, run_all
from scripts.mutants import (
    LIVES,
    PROOFS,
    TESTS,
    Result,
    counts,
    kill_matrix,
    page,
    plain_lines,
    sections_of,
)
from scripts.mutations import DATA, KINDS, Mutant, MutantError, load, mutated, mutated_tree
from scripts.same_steps import difference, is_same
from spec.theorems import OBLIGATIONS, Asks

MUTANTS = load()
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

FIRST = Case("first", (), Variant())
CHECKPOINT = Case("checkpoint", (), Variant())
HIT_PARTIAL = Case("hit-partial", (), Variant())
GATE_OF_THREE = Case("hit-partial", (), Variant(), Asks.GATE, num_mamba_groups=2)
REMOVAL = Case("running", (), Variant(), Asks.REMOVAL)


@pytest.fixture(scope="module")
def release(trees: Mapping[str, Path]) -> Path:
    return trees["0.31.0"]


def test_there_are_enough_mutants_of_every_kind() -> None:
    """At least thirty, and each kind of change is tried more than once."""
    assert len(MUTANTS) >= 30
    assert all(sum(m.kind == kind for m in MUTANTS) > 1 for kind in KINDS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_its_function(release: Path, mutant: Mutant) -> None:
    """`before` occurs exactly once in the function, and the changed file is another program."""
    source = (release / mutant.file).read_text(encoding="utf-8")

    changed = mutated(source, mutant)

    assert function_text(changed, mutant) != function_text(source, mutant)
    assert mutant.breaks


def function_text(source: str, mutant: Mutant) -> str:
    """The function that a mutant changes, as Python reads it: no comments, no layout."""
    body = ast.parse(source).body
    for name in mutant.function.split("."):
        function = next(node for node in body if getattr(node, "name", None) == name)
        body = getattr(function, "body", [])
    return ast.unparse(function)


def test_no_two_mutants_are_the_same_change() -> None:
    """A change counted twice would make the counts say more than they should."""
    changes = {(m.file, m.function, m.before, m.after) for m in MUTANTS}

    assert len(changes) == len(MUTANTS)


def test_no_more_of_the_source_is_kept_than_a_line() -> None:
    """The data is a list of changes, not a copy of vLLM."""
    assert all(m.before.strip().count("\n") <= 1 and len(m.before) <= 60 for m in MUTANTS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"before": "num_tokens"}, "times, not once"),
        ({"before": "no such tokens"}, "0 times, not once"),
        ({"function": "MambaManager.no_such_method"}, "has no function"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(
    release: Path, change: dict[str, str], complaint: str
) -> None:
    """A mutant must never be a change somewhere else, or none."""
    mutant = dataclasses.replace(BY_NAME["estimate-cap-is-a-floor"], **change)
    source = (release / mutant.file).read_text(encoding="utf-8")

    with pytest.raises(MutantError, match=complaint):
        mutated(source, mutant)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (("kind = ", "sort = "), "missing or unknown: kind, sort"),
        (('kind = "sign"', 'kind = "typo"'), "unknown kind 'typo'"),
        (("", ""), "more than once: position-counts-the-end-twice"),
    ],
)
def test_malformed_data_is_refused(tmp_path: Path, damage: tuple[str, str], complaint: str) -> None:
    """A record with a wrong key or kind, or a second one of a name, is named."""
    record = "[[mutant]]" + DATA.read_text(encoding="utf-8").split("[[mutant]]")[1]
    file = tmp_path / "mutants.toml"
    file.write_text(record.replace(*damage) * (1 + (damage == ("", ""))), encoding="utf-8")

    with pytest.raises(MutantError, match=complaint):
        load(file)


@pytest.mark.parametrize(
    "name",
    [
        "position-at-the-end",
        "estimate-cap-is-a-floor",
        "allocate-draws-one-more",
        "relocate-keeps-both",
        "adopt-without-nulls",
        "copy-of-null-blocks-only",
        "evictable-held-blocks",
        "external-no-block",
        "retire-the-state-in-use",
        "attention-loses-blocks",
        "sum-is-the-last-group",
        "slots-without-reserve",
    ],
)
def test_a_change_with_effect_is_refuted(release: Path, name: str) -> None:
    """A change of whatever a step goes through is noticed, by more than the project's model."""
    found = judge(BY_NAME[name], release)

    assert found.outcome is Outcome.REFUTED, found.notes
    assert found.refutation is not None
    assert found.refutation.theorem != "matches-intended"


@pytest.mark.parametrize("name", ["allocate-draws-one-more", "evictable-held-blocks"])
def test_the_changed_code_shows_what_refutes_it(release: Path, name: str) -> None:
    """The counterexample is a step that the changed code takes, in the numbers predicted."""
    refutation = judge(BY_NAME[name], release).refutation

    assert refutation is not None
    assert refutation.shown is Shown.AS_PREDICTED
    assert refutation.history.partition("B ")[0] in ("", "2 groups, ", "3 groups, ")


def test_what_is_refuted_for_the_release_as_well_tells_nothing(release: Path) -> None:
    """Theorems that the release itself breaks notice no change."""
    lifted = Lifted(release)

    assert lifted.is_refuted(Case("external-sync", (), Variant()), "no-undercount")
    assert not lifted.is_refuted(FIRST, "no-undercount")


def test_a_change_without_effect_is_proved_equivalent(release: Path) -> None:
    """An empty range of columns, looked at or not, is shown to be the same for every removal."""
    found = judge(BY_NAME["range-of-nothing-too"], release)

    assert (found.outcome, found.refutation, found.notes) == (Outcome.EQUIVALENT, None, ())


def test_a_change_that_no_theorem_sees_survives(release: Path) -> None:
    """What blocks are given back is compared, and no theorem speaks of it: a hole is said so."""
    found = judge(BY_NAME["retire-frees-nothing"], release)

    assert found.outcome is Outcome.SURVIVED
    assert any("leaves other freed blocks" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "case", "difference_found"),
    [
        ("estimate-cap-is-a-floor", FIRST, "another step"),
        ("allocate-reports-no-blocks", FIRST, "leaves other returned blocks"),
        ("estimate-records-running-column", CHECKPOINT, "leaves other _checkpoints"),
        ("copy-is-not-retained", HIT_PARTIAL, "leaves other req_to_blocks"),
        ("retire-frees-nothing", REMOVAL, "leaves other freed blocks"),
        ("slots-gate-without-watermark", GATE_OF_THREE, "another step"),
    ],
)
def test_a_change_with_effect_is_not_proved_equivalent(
    release: Path, name: str, case: Case, difference_found: str
) -> None:
    """A difference in the step, in what it returns, or in what it leaves, is a difference."""
    with mutated_tree(release, BY_NAME[name]) as tree:
        pair = Lifted(release).behaviour(case), Lifted(tree).behaviour(case)

    assert not is_same(*pair)
    differences = difference(*pair)
    assert any(text.startswith(difference_found) for text in differences), differences


@pytest.mark.parametrize(
    "case",
    [
        Case("first", ("checkpoint",), Variant(eagle=True)),
        CHECKPOINT,
        HIT_PARTIAL,
        REMOVAL,
        GATE_OF_THREE,
    ],
    ids=lambda case: f"{case.label} {case.asks.value}",
)
def test_an_unchanged_tree_is_equivalent_to_itself(release: Path, case: Case) -> None:
    """The comparison finds no difference where there is none."""
    pair = Lifted(release).behaviour(case), Lifted(release).behaviour(case)

    assert is_same(*pair)
    assert difference(*pair) == []


def test_what_the_lifter_refuses_is_said_to_be_so(release: Path) -> None:
    """Groups that are asked something else make the verdict UNSUPPORTED; nothing is proved."""
    found = judge(BY_NAME["slots-gate-asked-otherwise"], release)

    assert (found.outcome, found.refutation) == (Outcome.NOT_UNDERSTOOD, None)
    assert any("coordinator:first" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("allocate-draws-one-more", {0}),
        ("position-at-the-end", {0}),
        ("adopt-untouched", {0, 1, 2}),
        ("attention-loses-blocks", {1, 2}),
        ("sum-subtracts", {1, 2}),
        ("slots-without-reserve", {1, 2}),
    ],
)
def test_a_change_is_tried_on_the_managers_that_run_it(
    release: Path, name: str, numbers: set[int]
) -> None:
    """A function of full attention does not disturb the align-mode manager, nor the reverse."""
    cases = list(cases_of(Lifted(release).traits, BY_NAME[name]))

    assert {case.num_mamba_groups for case in cases} == numbers
    assert {case.asks for case in cases if case.num_mamba_groups} <= {Asks.STEP, Asks.GATE}


def test_a_change_that_a_release_has_no_place_for_is_not_judged(release: Path) -> None:
    """It is listed and counted, and is no survivor."""
    mutant = dataclasses.replace(MUTANTS[0], before="no such tokens")

    (judged,) = judge_all([mutant], release, jobs=1)

    assert judged.outcome is Outcome.DOES_NOT_FIT
    unfit = Result(judged, {})
    assert counts([unfit])["do not fit the release"] == 1
    assert counts([unfit])["noticed by none"] == 0
    assert f"### Does not fit 0.33.0\n\n`{mutant.name}`\n" in page({"0.33.0": [unfit]})


def test_a_function_of_every_step_is_tried_in_every_kind_of_step(release: Path) -> None:
    """Whatever is tried first, nothing is left out."""
    traits = Lifted(release).traits
    tried = {
        (case.family, case.tags) for case in cases_of(traits, BY_NAME["allocate-draws-one-more"])
    }

    assert tried == {kind for kind in OBLIGATIONS if traits.why_not(*kind) is None}


def test_a_mutated_tree_is_gone_afterwards(release: Path) -> None:
    """The changed copy holds core and scheduler alone, and leaves nothing behind."""
    with mutated_tree(release, BY_NAME["estimate-cap-is-a-floor"]) as tree:
        proved = prove(LiftedTree(tree), families=["first"], theorems=["bounded-demand"])
        assert next(proved).counterexample
        files = [path for path in tree.rglob("*") if path.is_file()]

    assert 4 <= len(files) <= len(CORE_MODULES) + 1
    assert not tree.exists()


def test_the_page_lists_survivors_with_what_they_change() -> None:
    """What the theorems do not see is said first, and counted."""
    mutant = dataclasses.replace(MUTANTS[0], judgement="nobody looks")
    notes = ("running: leaves another table",)
    survivor = Result(Judgement(mutant, Outcome.SURVIVED, notes=notes), {})
    known = Result(Judgement(MUTANTS[1], Outcome.EQUIVALENT), {})

    text = page({"0.31.0": [survivor, known]})

    assert text.index("### Survivors") < text.index("### All")
    assert f"- `{mutant.name}`: {mutant.breaks}." in text
    assert "**Judgement:** nobody looks." in text
    assert "running: leaves another table" in text
    assert counts([survivor, known])["survived the proofs"] == 1
    assert any("running: leaves another table" in line for line in plain_lines([survivor]))
    assert "### Survivors" not in page({"0.31.0": [known]})


def test_the_sections_of_releases_that_were_not_run_stay() -> None:
    """A page of two releases is the same, whichever is run anew."""
    one, two = (Result(Judgement(mutant, Outcome.EQUIVALENT), {}) for mutant in MUTANTS[:2])
    both = page({"0.31.0": [one], "0.33.0": [two]})

    assert page({"0.31.0": [one]}, both) == page({"0.33.0": [two]}, both) == both
    assert page({"0.33.0": [two]}, page({"0.31.0": [one]})) == both
    assert list(sections_of(page({"0.31.0": [two]}, both))) == ["0.31.0", "0.33.0"]
    assert page({"0.31.0": [two]}, both) != both


def test_a_row_names_what_refutes_it() -> None:
    """The theorem, its kind of step, and the steps that show it on the changed code."""
    refutation = Refutation("no-undercount", "first", Shown.AS_PREDICTED, "B=1: 0→1")
    judged = Judgement(MUTANTS[0], Outcome.REFUTED, refutation)

    text = page({"0.31.0": [Result(judged, {})]})

    assert "| refuted | no-undercount (first) | as predicted: B=1: 0→1 |" in text


NOTICED, NOT_NOTICED = Run("test_first.py::test_step[path:the copy] - assert 1 == 2"), Run("")


@pytest.mark.parametrize(
    ("outcome", "tests", "lives", "noticed_by"),
    [
        (Outcome.REFUTED, NOT_NOTICED, NOT_NOTICED, {PROOFS}),
        (Outcome.NOT_UNDERSTOOD, NOTICED, NOT_NOTICED, {PROOFS, TESTS}),
        (Outcome.SURVIVED, NOTICED, NOTICED, {TESTS, LIVES}),
        (Outcome.SURVIVED, NOT_NOTICED, NOT_NOTICED, set()),
    ],
)
def test_it_is_said_which_of_the_three_notice_a_mutant(
    outcome: Outcome, tests: Run, lives: Run, noticed_by: set[str]
) -> None:
    """A survivor of the proofs may be seen by what runs the code; one that is not is counted."""
    found = Result(Judgement(MUTANTS[0], outcome), {TESTS: tests, LIVES: lives})

    assert found.noticed_by == noticed_by
    assert counts([found])["noticed by none"] == (not noticed_by)
    assert kill_matrix([found]) == {tuple(b for b in (PROOFS, TESTS, LIVES) if b in noticed_by): 1}


def test_the_generated_tests_and_lives_notice_a_mutant_and_say_what_failed(release: Path) -> None:
    """Both run the changed code itself; what failed first is named without the copy's folder."""
    mutant = BY_NAME["estimate-cap-is-a-floor"]

    ran = {
        by: run for by, _, run in run_all([(by, mutant) for by in BY], release, "0.31.0", jobs=1)
    }

    assert re.match(r"test_first\.py::\w+\[path:the copy-\S+\] - assert", ran[TESTS].noticed)
    assert re.match(r"AssertionError: [a-z-]+ \[", ran[LIVES].noticed)


def test_a_copy_that_cannot_be_set_up_is_noticed(release: Path) -> None:
    """A change that leaves no manager to drive fails every test, and says so."""
    function = "MambaManager.get_num_blocks_to_allocate"
    gone = dataclasses.replace(
        BY_NAME["estimate-cap-is-a-floor"],
        function=function,
        before="def get_num_blocks_to_allocate(",
        after="def get_num_of_blocks_to_allocate(",
    )

    for run in (judged(gone, release, "0.31.0") for judged in BY.values()):
        assert run.noticed
        assert "/tmp" not in run.noticed


def test_a_run_that_does_not_end_is_noticed(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change may make a loop that never ends."""
    monkeypatch.setattr(mutant_runs, "PATIENCE", 0.1)

    assert mutant_runs.lived_on(None, release, "0.31.0").noticed == mutant_runs.NEVER_ENDS
