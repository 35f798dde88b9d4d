"""The page of releases by theorem and kind of step."""

from __future__ import annotations

import re

from conformance.expectations import expectations
from conformance.matrix import page, traits_in, verdicts_of
from conformance.replay import PROJECT_ROOT
from conformance.targets import KNOWN_RELEASES, resolve
from models.traits import Traits
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS

PAGE = PROJECT_ROOT / "docs" / "matrix.md"
TARGETS = [f"vllm=={release}" for release in KNOWN_RELEASES]
KNOWS_NOTHING = Traits(*[False] * 11)


def test_the_committed_page_says_what_is_expected() -> None:
    """It is the page that all releases give whose verdicts are as expected."""
    traits = {target: traits_in(resolve(target).root) for target in TARGETS}

    assert PAGE.read_text(encoding="utf-8") == page(expectations(), traits), "run `make matrix`"


def test_there_is_a_table_per_theorem_and_a_row_per_kind_of_step() -> None:
    """Columns are releases, in the order that they are given in."""
    verdicts = {
        (target, "mamba-align", "first", "no-undercount"): verdict
        for target, verdict in zip(TARGETS, ["PROVED", "REFUTED", "NOT_APPLICABLE"], strict=False)
    }

    text = page(verdicts, dict.fromkeys(TARGETS[:3], KNOWS_NOTHING))

    assert re.findall("^## (.*)", text, re.MULTILINE)[2:] == ["no-undercount"]
    (row,) = re.findall(r"^\| `first` .*", text, re.MULTILINE)
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["`first`", "P", "R", "-"]
    (counts,) = re.findall(r"^\| P  .*", text, re.MULTILINE)
    assert re.findall(r"\d+", counts) == ["1", "0", "0"]


def test_each_manager_has_its_own_tables() -> None:
    """What is proved of one manager is told apart from what is proved of the sum."""
    verdicts = {
        (TARGETS[0], manager, "first", "no-undercount"): verdict
        for manager, verdict in (("mamba-align", "PROVED"), ("coordinator", "REFUTED"))
    }

    text = page(verdicts, {TARGETS[0]: KNOWS_NOTHING})

    assert re.findall("^# (.*)", text, re.MULTILINE)[1:] == ["mamba-align", "coordinator"]
    assert re.findall(r"^\| `first` \| (.)", text, re.MULTILINE) == ["P", "R"]


def test_what_is_undecided_stands_out() -> None:
    """UNKNOWN, UNSUPPORTED and VACUOUS pass for neither."""
    verdicts = {(TARGETS[0], "mamba-align", "first", "no-undercount"): "UNKNOWN"}

    assert "| **UNKNOWN** |" in page(verdicts, {TARGETS[0]: KNOWS_NOTHING})


def test_every_kind_of_step_has_its_own_row() -> None:
    """Tags are told apart as everywhere."""
    rows = [
        {"target": "t", "manager": manager, "family": family, "tags": list(tags)}
        | {"theorem": theorem, "verdict": "P"}
        for manager in MANAGERS
        for family, tags in OBLIGATIONS
        for theorem in THEOREMS
    ]

    assert len(verdicts_of(rows)) == len(rows)


def test_a_trait_is_read_from_the_tree() -> None:
    """What a manager knows is told apart release by release."""
    old, new = (traits_in(resolve(target).root) for target in (TARGETS[0], TARGETS[-1]))

    assert old == KNOWS_NOTHING
    assert new == Traits(*[True] * 11)
