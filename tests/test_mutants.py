from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from models.prove import prove
from scripts.mutants import (
    DATA,
    KINDS,
    Judgement,
    Lifted,
    Mutant,
    MutantError,
    Outcome,
    Shown,
    counts,
    difference,
    judge,
    load,
    mutated,
    mutated_tree,
    page,
    plain_lines,
    refuted_obligations,
    sample,
)

MUTANTS = load()
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

Refuted = frozenset[tuple[str, tuple[str, ...], str]]


@pytest.fixture(scope="module")
def release(trees: Mapping[str, Path]) -> Path:
    return trees["0.31.0"]


@pytest.fixture(scope="module")
def refuted_before(release: Path) -> Refuted:
    return refuted_obligations(release)


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


def test_a_sample_is_deterministic_and_of_all_kinds() -> None:
    """A small sample has one mutant of each kind, and is the same every time."""
    chosen = sample(MUTANTS, 8)

    assert len(chosen) == 8
    assert {mutant.kind for mutant in chosen} == set(KINDS)
    assert chosen == sample(list(MUTANTS), 8)


@pytest.mark.parametrize("mutant", sample(MUTANTS, 8), ids=lambda mutant: mutant.name)
def test_a_sample_is_refuted_or_equivalent(
    release: Path, refuted_before: Refuted, mutant: Mutant
) -> None:
    """No change of the sample goes unnoticed, and what refutes it is seen on the changed code."""
    found = judge(mutant, release, refuted_before)

    assert found.outcome is not Outcome.SURVIVED, found.notes
    if found.outcome is not Outcome.EQUIVALENT:
        assert any(refutation.shown is not Shown.NOT for refutation in found.refutations)


def test_a_change_without_effect_is_proved_equivalent(
    release: Path, refuted_before: Refuted
) -> None:
    """A condition that another one implies may go: the solver shows it for every step."""
    found = judge(BY_NAME["valid-from-the-start"], release, refuted_before)

    assert (found.outcome, found.refutations, found.notes) == (Outcome.EQUIVALENT, (), ())


@pytest.mark.parametrize(
    ("name", "kind", "difference_found"),
    [
        ("estimate-cap-is-a-floor", "first", "another step"),
        ("allocate-reports-no-blocks", "first", "leaves another `returned blocks`"),
        ("estimate-records-running-column", "checkpoint", "leaves another `_checkpoints`"),
    ],
)
def test_a_change_with_effect_is_not_proved_equivalent(
    release: Path, name: str, kind: str, difference_found: str
) -> None:
    """A difference in the step, in what it returns, or in what it leaves, is a difference."""
    with mutated_tree(release, BY_NAME[name]) as tree:
        pairs = zip(
            Lifted(release).behaviours((kind, ())), Lifted(tree).behaviours((kind, ())), strict=True
        )
        differences = [text for pair in pairs for text in difference(*pair)]

    assert any(text.startswith(difference_found) for text in differences), differences


def test_an_unchanged_tree_is_equivalent_to_itself(release: Path) -> None:
    """The comparison finds no difference where there is none."""
    for kind in (("first", ("checkpoint",)), ("checkpoint", ())):
        pairs = zip(Lifted(release).behaviours(kind), Lifted(release).behaviours(kind), strict=True)
        assert [text for pair in pairs for text in difference(*pair)] == []


def test_a_mutated_tree_is_gone_afterwards(release: Path) -> None:
    """The changed copy holds the core alone, and leaves nothing behind."""
    with mutated_tree(release, BY_NAME["estimate-cap-is-a-floor"]) as tree:
        assert next(prove(tree, families=["first"], theorems=["bounded-demand"])).counterexample
        files = [path for path in tree.rglob("*") if path.is_file()]

    assert 4 <= len(files) <= 10
    assert not tree.exists()


def test_the_page_lists_survivors_with_what_they_change() -> None:
    """What the theorems do not see is said first, and counted."""
    mutant = MUTANTS[0]
    survivor = Judgement(mutant, Outcome.SURVIVED, notes=("running: leaves another table",))
    known = Judgement(MUTANTS[1], Outcome.EQUIVALENT)

    text = page([survivor, known], "0.31.0")

    assert text.index("## Survivors") < text.index("## All")
    assert f"- `{mutant.name}`: {mutant.breaks}." in text
    assert "running: leaves another table" in text
    assert counts([survivor, known])["survived"] == 1
    assert any("running: leaves another table" in line for line in plain_lines([survivor]))
    assert "## Survivors" not in page([known], "0.31.0")
