"""Standalone tests: files that need vLLM and pytest alone, and fail where the claim is broken."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from in_core import outcomes_in_core

from conformance import cli
from conformance.driver import core_driver
from conformance.replay import PROJECT_ROOT, tier_environment
from conformance.scenario import Scenario, dumps, load
from conformance.standalone import CLAIMS, StandaloneError, standalone
from conformance.targets import DEFAULT_TARGETS, resolve
from spec.families import FAMILIES
from spec.theorems import THEOREMS

Output = pytest.CaptureFixture[str]

OLD, NEW, NEWEST = DEFAULT_TARGETS
REFUTATIONS = PROJECT_ROOT / "generated_tests" / "scenarios" / "refutations"
SHOWN = REFUTATIONS / "exact-estimate-checkpoint-vllm-0-30-0.json"
#: Scenarios with all that the file has words for: hits of whole blocks and of parts, evictable or
#: not, external tokens, preemption, several steps, and a pool of exactly the estimate.
SAMPLE = (
    "exact-estimate-checkpoint-vllm-0-30-0",
    "bounded-demand-promoted-checkpoint-vllm-0-30-0",
    "exact-estimate-hit-partial-vllm-0-30-0",
    "matches-intended-checkpoint-vllm-0-31-0",
    "no-undercount-external-sync-vllm-0-33-0",
    "allocation-succeeds-resumed-vllm-0-33-0",
    "estimate-nonnegative-drafts-overwide-vllm-0-33-0",
    "gate-covers-first-step-external-sync-vllm-0-33-0",
)


def scenarios() -> list[Scenario]:
    """The committed least counterexamples of one manager, and some scenarios that show nothing."""
    found = [
        scenario
        for file in sorted(REFUTATIONS.glob("*.json"))
        if "coordinator" not in file.stem and "production" not in file.stem
        for scenario in load(file)
    ]
    for family in FAMILIES:
        rows = load(PROJECT_ROOT / "generated_tests" / "scenarios" / f"{family}.json")
        slugs = ["exact-estimate", "retirement-recorded", "checkpoint-recorded", "dry-run-parity"]
        slugs += ["state-invariant", "no-block-twice", "removal-keeps-state"]
        found += [
            replace(row, name=f"{slug}-{row.name}"[:110].rstrip("-"), theorem=slug)
            for row, slug in zip(rows, slugs * 3, strict=False)
        ]
    return found


def sayable(target: str, root: Path) -> Iterator[Scenario]:
    bindings = core_driver(root).bindings
    for scenario in scenarios():
        try:
            standalone([scenario], bindings, target)
        except StandaloneError:
            continue
        if target in (scenario.predicted or {}):
            yield scenario


def holds(scenario: Scenario, target: str) -> bool:
    seen = (scenario.predicted or {})[target]
    return scenario.theorem not in seen.violates and seen.raised is None


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_a_test_fails_exactly_where_its_claim_is_broken(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Of hundreds of scenarios each fails where it is predicted to, and passes elsewhere."""
    root = resolve(target).root
    chosen = list(sayable(target, root))
    text = standalone(chosen, core_driver(root).bindings, target)

    outcomes = outcomes_in_core(text, root, monkeypatch)

    assert len(outcomes) == len(chosen) > 150
    wrong = [
        scenario.name
        for scenario, passes in zip(chosen, outcomes.values(), strict=True)
        if passes != holds(scenario, target)
    ]
    assert wrong == []
    assert {scenario.theorem for scenario in chosen} == CLAIMS.keys()
    assert {holds(scenario, target) for scenario in chosen} == {True, False}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the vllm tier")
@pytest.mark.parametrize("target", [OLD, NEW])
def test_a_file_in_a_releases_test_folder_runs_with_vllm_and_pytest_alone(
    tmp_path: Path, target: str
) -> None:
    """In an unpacked tree, without capproof on the path: the fault fails, the fix passes."""
    chosen = [load(REFUTATIONS / f"{name}.json")[0] for name in SAMPLE]
    root, tests = tmp_path / "tree", tmp_path / "tree" / "tests" / "v1" / "core"
    tests.mkdir(parents=True)
    (root / "vllm").symlink_to(resolve(target).root / "vllm")
    files = [str(REFUTATIONS / f"{name}.json") for name in SAMPLE]
    out = tests / "test_block_estimate.py"
    assert cli.run(["gen-tests", "--standalone", *files, "--out", str(out)]) == 0
    environment = {**tier_environment(root), "PYTHONPATH": str(root)}

    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--rootdir",
                str(root),
            ),
            *("--tb=line", "-W", "ignore", f"--junitxml={tmp_path}/x", str(out)),
        ],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    cases = list(ElementTree.parse(tmp_path / "x").iter("testcase"))
    assert len(cases) == len(chosen), done.stdout + done.stderr
    passed = [case.find("failure") is None and case.find("error") is None for case in cases]
    assert passed == [holds(scenario, target) for scenario in chosen], done.stdout
    assert passed[0] is (target == NEW)
    if target == OLD:
        failure = cases[0].find("failure")
        assert failure is not None
        assert failure.attrib["message"].startswith("assert 3 == 2")
    assert not (tests / "__init__.py").exists()


def test_the_file_looks_like_vllms_own() -> None:
    """Its imports are vLLM's, pytest's and torch's; it is formatted, and says its source."""
    chosen = [load(REFUTATIONS / f"{name}.json")[0] for name in SAMPLE]
    text = standalone(chosen, core_driver(resolve(NEWEST).root).bindings, NEWEST)

    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"types", "pytest", "torch", "vllm"}
    head = text.splitlines()[:5]
    assert head[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert f"Written for {NEWEST}" in head[3]
    assert "def test_exact_estimate_checkpoint():" in text
    assert "# vllm==0.30.0: estimates 3, draws 2 (broken)" in text
    for scenario in chosen:
        assert THEOREMS[scenario.theorem or ""].sentence[:40] in text
        for step in scenario.steps:
            assert step.why[:40] in text
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():
        options = ["--line-length", "88", "--isolated", "--stdin-filename", "x.py", "-"]
        ours = ["--config", 'lint.isort.known-first-party=["vllm"]']
        for command in (["format", "--check"], ["check", "--select", "E,F,I", *ours]):
            done = subprocess.run(
                [ruff, *command, *options], input=text, text=True, capture_output=True
            )
            assert done.returncode == 0, done.stdout


def test_two_runs_write_the_same_bytes(tmp_path: Path, capsys: Output) -> None:
    """A second run replaces the file of the first with itself; the line says what fails there."""
    out = tmp_path / "test_x.py"
    command = ["gen-tests", "--standalone", str(SHOWN), "--out", str(out), "--target", OLD]

    assert cli.run(command) == 0
    first = out.read_text()
    assert cli.run(command) == 0

    assert out.read_text() == first
    assert f"# Written for {OLD}" in first
    line = f"{out}: 1 tests, of which 1 fail on {OLD}"
    assert capsys.readouterr().out.splitlines() == [line, line]


HOSTILE = '"""; import os #<b> \\'


def test_texts_of_a_scenario_stay_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phrases and names of targets cannot become code, however they look."""
    (scenario,) = load(SHOWN)
    steps = tuple(replace(step, why=HOSTILE * 9) for step in scenario.steps)
    predicted = {HOSTILE: next(iter((scenario.predicted or {}).values()))}
    hostile = replace(scenario, steps=steps, source=HOSTILE, predicted=predicted)
    root = resolve(NEW).root

    text = standalone([hostile], core_driver(root).bindings, NEW)

    plain = standalone(
        [replace(scenario, source="", predicted={})], core_driver(root).bindings, NEW
    )
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(plain))
    assert outcomes_in_core(text, root, monkeypatch) == {"test_exact_estimate_checkpoint": True}


def _written(tmp_path: Path, **changes: object) -> Path:
    file = tmp_path / "some.json"
    file.write_text(dumps(replace(load(SHOWN)[0], **changes)))
    return file


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"theorem": None}, [], "names no theorem"),
        ({"theorem": "eventually-admitted"}, [], "no words for eventually-admitted"),
        ({"theorem": "no-such"}, [], "no words for no-such"),
        ({"theorem": "gate-covers-first-step"}, [], "needs the tokens that the gate is asked"),
        ({}, ["--target", "vllm==0.28.0"], "has no checkpoint blocks to give"),
        ({}, ["--target", OLD, "--target", NEW], "for one target"),
        ({}, ["--check"], "goes with --target and --out only"),
        ({"num_gpu_blocks": 1}, [], "already raised ValueError"),
    ],
)
def test_what_cannot_be_said_is_one_line(
    tmp_path: Path, capsys: Output, changes: dict[str, object], options: list[str], message: str
) -> None:
    """Nothing is written then, and the exit status is 2."""
    out = tmp_path / "test_x.py"
    file = _written(tmp_path, **changes)

    assert cli.run(["gen-tests", "--standalone", str(file), "--out", str(out), *options]) == 2

    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own-tail", "own partial tail"),
        ("coordinator-first", "not several groups"),
        ("hit-full put off", "another request caches in the same step"),
    ],
)
def test_steps_without_words_are_refused(
    tmp_path: Path, capsys: Output, name: str, message: str
) -> None:
    """A request's own tail, several groups, and a hit of the same step are not said yet."""
    suite = name.removesuffix(" put off")
    scenarios = load(PROJECT_ROOT / "generated_tests" / "scenarios" / f"{suite}.json")
    is_put_off = suite != name
    scenario = next(s for s in scenarios if s.steps[-1].hit_is_of_this_step is is_put_off)
    file, out = tmp_path / "some.json", tmp_path / "test_x.py"
    file.write_text(dumps(replace(scenario, theorem="exact-estimate")))

    assert cli.run(["gen-tests", "--standalone", str(file), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_no_file_of_somebody_else_is_replaced(tmp_path: Path, capsys: Output) -> None:
    """VLLM's own tests are safe, and so is a folder."""
    mine = tmp_path / "test_mine.py"
    mine.write_text("# mine\n")
    command = ["gen-tests", "--standalone", str(SHOWN), "--out"]

    assert cli.run([*command, str(mine)]) == 2
    assert cli.run([*command, str(tmp_path)]) == 2
    assert cli.run(command[:-1]) == 2
    assert cli.run(["gen-tests", "--standalone", "--out", str(tmp_path / "x.py")]) == 2
    assert cli.run(["gen-tests", str(SHOWN)]) == 2

    assert mine.read_text() == "# mine\n"
    said = capsys.readouterr().err.splitlines()
    assert "was not generated by capproof" in said[0]
    assert "a folder is there" in said[1]
    assert "with --out FILE" in said[2]
    assert "name a scenario file" in said[3]
    assert "with --standalone only" in said[4]
