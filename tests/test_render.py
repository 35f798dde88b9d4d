"""Rendered files say what their scenarios say, in straight lines, and nothing else."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.render import MARKER, RELATIONS, render
from conformance.replay import PROJECT_ROOT
from conformance.scenario import Expect, Prediction, Scenario, ScenarioStep, dumps, loads
from spec.families import FAMILIES
from spec.theorems import THEOREMS, Need, Pool
from spec.vocabulary import Call, Geometry, Situation, Step

OLD, NEW = "vllm==0.30.0", "vllm==0.31.0"
GENERATED = PROJECT_ROOT / "generated_tests"
VERDICTS = {
    target: {"checkpoint": dict.fromkeys(THEOREMS, "PROVED"), "first": {}} for target in (OLD, NEW)
}
OVERCOUNTED = ("exact-estimate", "bounded-demand", "matches-intended")
#: Four tokens in four blocks of one: the least step that 0.30.0 overcounts.
SCENARIO = Scenario(
    name="four-tokens",
    manager="mamba-align",
    geometry=Geometry(1, 1, 0, 1, 1, False),
    num_gpu_blocks=17,
    steps=(
        ScenarioStep("admission", Call(1, 1, 0, 0), 1, Expect(1, 1, None, -1)),
        ScenarioStep("a chunk", Call(4, 4, 1, 1), 4, Expect(2, 4, (3, 2), 0)),
    ),
    family="checkpoint",
    predicted={OLD: Prediction(3, 3, 2, 4, None, OVERCOUNTED), NEW: Prediction(2, 2, 2, 4)},
)


def changed(name: str, **fields: Any) -> Scenario:
    return replace(SCENARIO, name=name, **fields)


def expecting(name: str, **fields: Any) -> Scenario:
    first, last = SCENARIO.steps
    return changed(name, steps=(first, replace(last, expect=replace(last.expect, **fields))))


def calling(name: str, **fields: int) -> Scenario:
    first, last = SCENARIO.steps
    return changed(name, steps=(first, replace(last, call=replace(last.call, **fields))))


def violating(name: str, target: str, *slugs: str) -> Scenario:
    prediction = replace(SCENARIO.predicted[target], violates=slugs)
    return changed(name, predicted={**SCENARIO.predicted, target: prediction})


#: One field each is wrong, and the theorems whose tests must fail for it.
WRONG: dict[str, tuple[Scenario, set[str]]] = {
    scenario.name: (scenario, theorems)
    for scenario, theorems in (
        (expecting("need-one-more", need=3), {"matches-intended"}),
        (expecting("need-one-less", need=1), {"matches-intended"}),
        (expecting("table-one-longer", table_length=5), {"state-invariant"}),
        (expecting("table-one-shorter", table_length=3), {"state-invariant"}),
        (expecting("position-one-less", checkpoint=(2, 2)), {"checkpoint-recorded"}),
        (expecting("column-one-less", checkpoint=(3, 1)), {"checkpoint-recorded"}),
        (expecting("no-checkpoint", checkpoint=None), {"checkpoint-recorded"}),
        (expecting("another-column-to-retire", column_to_retire=1), {"retirement-recorded"}),
        (
            violating("violation-forgotten", OLD, *OVERCOUNTED[1:]),
            {"exact-estimate"},
        ),
        (violating("violation-invented", NEW, "no-undercount"), {"no-undercount"}),
        (
            violating("violations-swapped", OLD, *OVERCOUNTED[:2], "dry-run-parity"),
            {"matches-intended", "dry-run-parity"},
        ),
        (changed("pool-too-small", num_gpu_blocks=2), set(THEOREMS)),
        (
            calling("one-token-more", num_tokens=5, num_tokens_main_model=5),
            {"state-invariant", "checkpoint-recorded"},
        ),
    )
}


# ---- running what was rendered -------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(
    trees: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, str], str]:
    """What pytest says of each rendered test, by theorem, target and scenario; one run for all."""
    folder = tmp_path_factory.mktemp("rendered")
    scenarios = [SCENARIO, *(scenario for scenario, _ in WRONG.values())]
    for path, text in render({"checkpoint": scenarios}, VERDICTS, "5").items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    results = folder / "results.xml"
    options = [f"--capproof-target={target}" for target in (OLD, NEW)]
    options += [f"--junitxml={results}", "-c", str(PROJECT_ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
    )
    assert results.is_file(), done.stdout + done.stderr
    return {_key(case): _outcome(case) for case in ElementTree.parse(results).iter("testcase")}


def _key(case: ElementTree.Element) -> tuple[str, str, str]:
    found = re.fullmatch(r"test_\w+\[(vllm==[\d.]+)-(.+)\]", case.attrib["name"])
    assert found is not None, case.attrib["name"]
    folder = case.attrib["classname"].split(".")[-2]
    return folder.replace("_", "-"), found[1], found[2]


def _outcome(case: ElementTree.Element) -> str:
    children = [child.tag for child in case]
    return children[0] if children else "passed"


def test_a_rendered_scenario_passes_on_the_real_manager(
    outcomes: dict[tuple[str, str, str], str],
) -> None:
    """Every theorem's test holds, or fails as predicted, on the fault and on its fix."""
    found = {
        (theorem, target): outcome
        for (theorem, target, name), outcome in outcomes.items()
        if name == SCENARIO.name
    }

    assert found == {
        (theorem, target): "skipped" if target == OLD and theorem in OVERCOUNTED else "passed"
        for theorem in THEOREMS
        for target in (OLD, NEW)
    }


@pytest.mark.parametrize("name", WRONG)
def test_every_expected_field_is_asserted(
    outcomes: dict[tuple[str, str, str], str], name: str
) -> None:
    """One wrong field makes the tests fail that read it: the tests themselves are tested."""
    _, theorems = WRONG[name]

    failed = {
        theorem
        for (theorem, _, scenario), outcome in outcomes.items()
        if scenario == name and outcome == "failure"
    }

    assert failed >= theorems
    if name != "pool-too-small" and name != "one-token-more":
        assert failed == theorems


# ---- what the files are --------------------------------------------------------------------------


def rendered_files() -> list[Path]:
    return sorted(GENERATED.glob("*/test_*.py"))


def function_in(file: Path) -> tuple[ast.Module, ast.FunctionDef]:
    module = ast.parse(file.read_text())
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef))
    return module, function


def test_there_is_a_file_per_theorem_and_family() -> None:
    """Folders are theorems, files are families."""
    families = {"first", "running", "checkpoint"}

    assert {(file.parent.name, file.stem) for file in rendered_files()} == {
        (folder, f"test_{folder}_in_{family}")
        for folder in (slug.replace("-", "_") for slug in THEOREMS)
        for family in families
    }


@pytest.mark.parametrize("file", rendered_files(), ids=lambda file: file.stem)
def test_a_rendered_file_is_straight_lines(file: Path) -> None:
    """A table and one test: earlier chunks, the chunk under test, the assertions; no branches."""
    module, function = function_in(file)

    assert [type(node).__name__ for node in module.body] == [
        *("Import", "ImportFrom", "Assign", "Assign", "FunctionDef")
    ]
    for node in ast.walk(function):
        assert not isinstance(
            node,
            ast.If
            | ast.IfExp
            | ast.While
            | ast.Try
            | ast.With
            | ast.Lambda
            | ast.comprehension
            | ast.BoolOp
            | ast.Import,
        )
    assert sum(isinstance(node, ast.For) for node in ast.walk(function)) == 1
    assert isinstance(function.body[-1], ast.Assert)
    imported = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imported] == ["spec.vocabulary"]


@pytest.mark.parametrize("file", rendered_files(), ids=lambda file: file.stem)
def test_a_rendered_file_says_what_it_is(file: Path) -> None:
    """Header, name and docstring tell theorem, family, verdicts and solver, and no time."""
    header, _, _ = file.read_text().partition("\nimport pytest\n")
    _, function = function_in(file)
    slug, family = re.fullmatch(r"test_(\w+)_in_(\w+)", file.stem).groups()
    theorem, family = THEOREMS[slug.replace("_", "-")], family.replace("_", "-")

    assert header.startswith(f"{MARKER} Do not edit")
    assert f"# Theorem {theorem.slug}: {theorem.sentence}\n" in header
    assert f"# Family {family}: {FAMILIES[family].sentence}\n" in header
    assert re.search(r"Solver: z3 \d+\.\d+\.\d+", header)
    assert re.search(rf"^# {NEW}, {family}: [A-Z]+$", header, re.MULTILINE)
    assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d", header)
    assert function.name.count("_") >= 4, "a name is a sentence"
    assert " ".join((ast.get_docstring(function) or "").split()) == theorem.sentence


def test_every_theorem_has_a_relation_and_every_relation_a_theorem() -> None:
    """A theorem without a rendered test is not tested on the real managers."""
    assert list(RELATIONS) == list(THEOREMS)
    assert len({relation.test_name for relation in RELATIONS.values()}) == len(RELATIONS)


NUMBERS = (-1, 0, 1, 2, 3)
STEPS = [
    Step(dry_run, estimate, drawn, length, pure, held)
    for dry_run, estimate, drawn, length, pure, held in itertools.product(
        NUMBERS, NUMBERS, NUMBERS[1:], (3, 4), (True, False), (True, False)
    )
]
STEPS += [
    Step(
        *(2, 2, 2, 4, True),
        checkpoint_is_pending=pending,
        checkpoint_position=position,
        checkpoint_column=column,
        checkpoint_block_is_held=held,
        returned_new_columns=returned,
        no_block_is_twice=once,
        column_to_retire=to_retire,
    )
    for pending, held, returned, once in itertools.product((True, False), repeat=4)
    for position, column, to_retire in itertools.product((2, 3), (1, 2), (-1, 0, 1))
]
#: What a rendered test knows of `SCENARIO`.
KNOWN = {
    "geometry": SCENARIO.geometry,
    "need": 2,
    "table_length": 4,
    "checkpoint": (3, 2),
    "column_to_retire": 0,
}


@pytest.mark.parametrize("slug", THEOREMS)
def test_a_relation_asserts_what_the_theorem_claims(slug: str) -> None:
    """What a rendered test asserts of a step is the claim that was proved, word for word."""
    situation = Situation(SCENARIO.geometry, SCENARIO.steps[-1].call, 1, 4)
    lines = compile("\n".join(RELATIONS[slug].assertions), slug, "exec")

    for step in STEPS:
        if slug == "allocation-succeeds" and step.drawn > max(step.estimate, 0):
            continue  # on a pool of exactly the estimate this raises, and cannot be seen
        names = {"step": step, **KNOWN}
        try:
            exec(lines, names)
            is_asserted = True
        except AssertionError:
            is_asserted = False
        claim = THEOREMS[slug].claim(situation, step, Pool(max(step.estimate, 0), 0, 0), Need(2))
        assert is_asserted == bool(claim), step


@pytest.mark.parametrize("slug", THEOREMS)
def test_a_step_that_raised_passes_no_test(slug: str) -> None:
    """Whatever was seen of it, a step that ended in an exception shows nothing."""
    step = Step(2, 2, 2, 4, True, True, raised="ValueError")
    names = {"step": step, **KNOWN}

    with pytest.raises(AssertionError):
        exec("\n".join(RELATIONS[slug].assertions), names)


# ---- hostile text --------------------------------------------------------------------------------

HOSTILE = [
    'vllm"; import os; x = "',
    "it's",
    "back\\slash\\",
    "{{ 7 * 7 }}{% raw %}",
    '"""',
    "# comment",
    "ümläut 😀",
    "path:/a b/{x}%s",
]


def marks_in(text: str) -> list[dict[str, Any]]:
    """The keyword arguments of every mark in a rendered file."""
    return [
        {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg != "raises"}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("refuted", "not_applicable")
    ]


@pytest.mark.parametrize("target", HOSTILE)
def test_a_target_cannot_break_out_of_its_string(target: str) -> None:
    """Targets come from the command line and from files; they stay the strings they are."""
    scenario = replace(SCENARIO, predicted={target: SCENARIO.predicted[OLD]})
    verdicts = {target: {"checkpoint": dict.fromkeys(THEOREMS, "REFUTED")}}
    (scenario,) = loads(dumps(scenario), name="written")

    files = render({"checkpoint": [scenario]}, verdicts, "5")

    text = files["exact_estimate/test_exact_estimate_in_checkpoint.py"]
    (mark,) = marks_in(text)
    assert mark == {
        "theorem": "exact-estimate",
        "targets": {target: "estimates 3, draws 2, needs 2"},
    }
    expected = ["Import", "ImportFrom", "Assign", "Assign", "FunctionDef"]
    assert [type(node).__name__ for node in ast.parse(text).body] == expected
    assert f"# {target}, checkpoint: REFUTED\n" in text


@pytest.mark.parametrize("raised", HOSTILE)
def test_an_exceptions_name_cannot_break_out_of_its_string(raised: str) -> None:
    """What a scenario file calls an exception is text."""
    prediction = Prediction(2, 2, 0, 1, raised, ("exact-estimate",))
    (scenario,) = loads(dumps(replace(SCENARIO, predicted={OLD: prediction})), name="written")

    files = render({"checkpoint": [scenario]}, {OLD: {}}, "5")

    (mark,) = marks_in(files["exact_estimate/test_exact_estimate_in_checkpoint.py"])
    assert mark["targets"] == {OLD: f"raises {raised}"}


def test_the_source_of_a_scenario_is_not_code() -> None:
    """Free text of a scenario reaches no rendered file."""
    hostile = "'''\"\"\"; import os #"
    step = replace(SCENARIO.steps[0], why=hostile)
    scenario = replace(SCENARIO, source=hostile, steps=(step, SCENARIO.steps[1]))

    for text in render({"checkpoint": [scenario]}, VERDICTS, "5").values():
        assert "import os" not in text


def test_what_a_release_cannot_be_asked_is_marked() -> None:
    """A target without a prediction is not applicable there, with the reason."""
    scenario = replace(SCENARIO, predicted={NEW: SCENARIO.predicted[NEW]})

    files = render({"checkpoint": [scenario]}, VERDICTS, "5")

    (mark,) = marks_in(files["no_undercount/test_no_undercount_in_checkpoint.py"])
    assert mark == {"targets": {OLD: "this release is not told where the prefill ends"}}
