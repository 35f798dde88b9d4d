from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance import expectations as module
from conformance.expectations import EXPECTABLE, expectations, expected, missed_by, where
from conformance.matrix import traits_in
from conformance.targets import KNOWN_RELEASES, resolve
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS

#: A table that lacks its verdict.
TABLE = """
[[expect]]
targets = ["vllm==0.24.0"]
manager = "mamba-align"
families = ["first"]
theorems = ["no-undercount"]
"""


def test_only_what_can_be_expected_is_expected() -> None:
    """UNKNOWN, UNSUPPORTED and VACUOUS are never as expected."""
    assert set(expectations().values()) <= {"PROVED", "REFUTED", "NOT_APPLICABLE"}
    assert set(EXPECTABLE) == {"PROVED", "REFUTED", "NOT_APPLICABLE"}


def test_expectations_are_about_obligations_that_exist() -> None:
    """A misspelt family or theorem would expect nothing of anything."""
    families = {where(family, tags) for family, tags in OBLIGATIONS}

    for target, manager, family, theorem in expectations():
        assert target.removeprefix("vllm==") in KNOWN_RELEASES
        assert manager in THEOREMS[theorem].managers
        assert family in families


def test_what_a_theorem_or_a_release_is_not_about_is_expected_to_be_so() -> None:
    """The file says itself what is not applicable; here it is compared with the trees."""
    for release in KNOWN_RELEASES:
        traits = traits_in(resolve(f"vllm=={release}").root)
        for family, tags in OBLIGATIONS:
            for slug, theorem in THEOREMS.items():
                reason = theorem.why_not(family, tags) or traits.why_not(family, tags, slug)
                for manager in theorem.managers:
                    verdict = expected(f"vllm=={release}", manager, where(family, tags), slug)
                    is_said = verdict == "NOT_APPLICABLE"
                    assert is_said == (reason is not None), (release, manager, family)


@pytest.mark.parametrize("release", KNOWN_RELEASES)
def test_every_obligation_of_a_known_release_is_expected_to_come_to_something(
    release: str,
) -> None:
    """A new theorem or family is not left without an expectation."""
    for family, tags in OBLIGATIONS:
        for slug, theorem in THEOREMS.items():
            for manager in MANAGERS:
                verdict = expected(f"vllm=={release}", manager, where(family, tags), slug)
                assert (verdict is not None) == (manager in theorem.managers)


def test_the_fault_and_its_fix_are_expected() -> None:
    """What vLLM PR 57050 changed is among what the two releases differ in."""
    differing = {
        (family, theorem)
        for (target, _, family, theorem), verdict in expectations().items()
        if target == "vllm==0.30.0"
        and verdict != expected("vllm==0.31.0", "mamba-align", family, theorem)
    }

    assert {("checkpoint", "exact-estimate"), ("checkpoint", "bounded-demand")} <= differing


def test_a_path_has_no_expectations() -> None:
    """Nothing is known in advance of a tree on this machine."""
    assert expected("path:/somewhere", "mamba-align", "first", "no-undercount") is None


@pytest.mark.parametrize("verdict", ["UNKNOWN", "UNSUPPORTED", "VACUOUS", "proved"])
def test_a_verdict_that_cannot_be_expected_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    """The file itself cannot turn a missing verdict into a pass."""
    file = tmp_path / "expectations.toml"
    file.write_text(f'{TABLE}verdict = "{verdict}"\n')
    monkeypatch.setattr(module, "EXPECTATIONS_FILE", file)

    with pytest.raises(ValueError, match="cannot be expected"):
        expectations.__wrapped__()


def test_later_tables_override_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is stated first and its exceptions after it."""
    file = tmp_path / "expectations.toml"
    file.write_text(f'{TABLE}verdict = "PROVED"\n{TABLE}verdict = "REFUTED"\n')
    monkeypatch.setattr(module, "EXPECTATIONS_FILE", file)

    assert expectations.__wrapped__() == {
        ("vllm==0.24.0", "mamba-align", "first", "no-undercount"): "REFUTED"
    }


def test_a_star_stands_for_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families with a tag, and all releases, can be named together."""
    file = tmp_path / "expectations.toml"
    table = TABLE.replace('"first"', '"*+own-tail", "running*"').replace('"vllm==0.24.0"', '"*"')
    file.write_text(f'{table}verdict = "PROVED"\n')
    monkeypatch.setattr(module, "EXPECTATIONS_FILE", file)

    found = expectations.__wrapped__()

    assert {target for target, *_ in found} == {f"vllm=={release}" for release in KNOWN_RELEASES}
    assert {family for _, _, family, _ in found} == {
        "promoted+own-tail",
        "promoted+checkpoint+own-tail",
        "running",
        "running+overwide",
    }


@pytest.mark.parametrize("name", ["vllm==0.24.0", "mamba-align", "first", "no-undercount"])
def test_a_misspelt_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A pattern that matches nothing would expect nothing."""
    file = tmp_path / "expectations.toml"
    file.write_text(TABLE.replace(name, f"{name}s") + 'verdict = "PROVED"\n')
    monkeypatch.setattr(module, "EXPECTATIONS_FILE", file)

    with pytest.raises(ValueError, match=f"nothing is called '{name}s'"):
        expectations.__wrapped__()


def test_a_family_with_tags_is_one_word() -> None:
    """Families with and without tags are told apart in expectations and output."""
    assert where("first", ()) == "first"
    assert where("first", ["checkpoint"]) == "first+checkpoint"


def test_what_earlier_checks_missed_is_said_of_causes_that_exist() -> None:
    """A cause that is worded anew takes what is said of it along, and one word says it."""
    content = module._content()
    causes = {entry.get("report") for entry in content["expect"]}
    said = [cause for entry in content["missed"] for cause in entry["reports"]]

    assert set(said) <= causes
    assert len(set(said)) == len(said)
    assert missed_by(said[0]) == content["missed"][0]["by"]
    assert missed_by("a cause that nobody has looked at") is None


def test_what_earlier_checks_missed_names_a_file_and_a_commit() -> None:
    """It can be looked up."""
    for entry in module._content()["missed"]:
        assert re.search(r"tests/v1/[\w/]+\.py", entry["by"])
        assert re.search(r"read at commit [0-9a-f]{11}", entry["by"])
