"""Rendered files say what their scenarios say, in straight lines, and nothing else."""

from __future__ import annotations

import ast
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.driver import core_driver
from conformance.render import MARKER, RELATIONS, in_words, obligation_of, path_of, render
from conformance.replay import PROJECT_ROOT, theorem_holds
from conformance.scenario import Expect, Prediction, Scenario, ScenarioStep, dumps, loads
from conformance.steps import (
    Applied,
    applied,
    chunk,
    greatest_demand,
    hit,
    last_of,
    load,
    own_tail,
    park,
    preempted,
)
from models import intended
from spec.families import (
    FAMILIES,
    checkpoint_column,
    checkpoint_position,
    family_of,
    reserves_checkpoint,
    tags_of,
)
from spec.theorems import OBLIGATIONS, THEOREMS, Asks, Need, Pool
from spec.vocabulary import Call, Geometry, Situation, Step

OLD, NEW = "vllm==0.30.0", "vllm==0.31.0"
FILE = path_of("checkpoint")
#: Theorems whose test a step of the family `checkpoint` has: nobody asks the gate there.
OF_ONE = {slug: t for slug, t in THEOREMS.items() if "mamba-align" in t.managers}
TESTED = [
    slug
    for slug, theorem in OF_ONE.items()
    if theorem.why_not("checkpoint") is None and not theorem.asks_gate
]
BY_TEST_NAME = {relation.test_name: slug for slug, relation in RELATIONS.items()}
VERDICTS = {
    target: {"checkpoint": dict.fromkeys(OF_ONE, "PROVED"), "first": {}} for target in (OLD, NEW)
}
OVERCOUNTED = ("exact-estimate", "bounded-demand", "matches-intended", "eventually-admitted")
#: The same with what is said of each.
OVERCOUNTS = {
    **dict.fromkeys(OVERCOUNTED, "estimates 3, draws 2, needs 2"),
    "eventually-admitted": "more is held and asked for than start-up reserves",
}
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
            {"matches-intended", "dry-run-parity", "eventually-admitted"},
        ),
        (changed("pool-too-small", num_gpu_blocks=2), set(TESTED)),
        (
            calling("one-token-more", num_tokens=5, num_tokens_main_model=5),
            {"state-invariant", "checkpoint-recorded"},
        ),
    )
}


# ---- a step of every family ----------------------------------------------------------------------

PLAIN = Geometry(16, 4, 2, 0, 4, False)
KEEPS = Geometry(16, 4, 2, 1, 4, False)
#: Requests whose last step is of each family, on blocks of 16 tokens and hash units of 4.
LIVES: dict[str, tuple[Geometry, list[ScenarioStep]]] = {
    "first": (PLAIN, [chunk(0, 40)]),
    "first-keeping": (KEEPS, [chunk(0, 40, lookahead=2, gate=200)]),
    "hit-full": (PLAIN, [hit(32, 100, blocks=2, gate=120)]),
    "hit-partial": (PLAIN, [hit(24, 28, blocks=2, evictable=True)]),
    "external-sync": (PLAIN, [load(external=40, end=100)]),
    "external-sync-behind": (PLAIN, [load(local=24, external=40, end=100, blocks=2)]),
    "external-async": (PLAIN, [park(local=32, external=24, blocks=2, evictable=True, gate=200)]),
    "resumed": (PLAIN, [chunk(0, 40), preempted(hit(32, 40, blocks=2, gate=41))]),
    "promoted": (PLAIN, [park(external=40), chunk(40, 100)]),
    "promoted-tail": (PLAIN, [park(external=40), own_tail(chunk(40, 100))]),
    "own-tail": (PLAIN, [chunk(0, 40), own_tail(chunk(40, 100))]),
    "running": (PLAIN, [chunk(0, 40, gate=44), chunk(40, 44)]),
    "checkpoint": (KEEPS, [chunk(0, 40), chunk(40, 100)]),
    "drafts": (PLAIN, [replace(chunk(a, b), prefill_length=90) for a, b in ((0, 95), (95, 99))]),
    "drafts-rejected": (
        PLAIN,
        [replace(chunk(a, b), prefill_length=90) for a, b in ((0, 95), (95, 99), (95, 96))],
    ),
}


@pytest.fixture(scope="module")
def shown(trees: Mapping[str, Path]) -> dict[tuple[str, str], list[Applied]]:
    """What the steps of each life show, by its name and target."""
    drivers = {target: core_driver(trees[target.removeprefix("vllm==")]) for target in (OLD, NEW)}
    return {
        (name, target): list(applied(driver.request(geometry, 64), steps))
        for name, (geometry, steps) in LIVES.items()
        for target, driver in drivers.items()
    }


def holds(slug: str, last: Applied) -> bool | None:
    """Whether a theorem holds in a step, on the pool of exactly its estimate."""
    need = int(intended.need(last.situation))
    pool = Pool(max(last.step.estimate, 0), 0, 0)
    return theorem_holds(slug, last.situation, last.step, pool, need)


def prediction(last: Applied) -> Prediction:
    step = last.step
    violates = tuple(slug for slug in THEOREMS if holds(slug, last) is False)
    gate = step.gate if last.situation.num_request_tokens else None
    counts = (step.dry_run, step.estimate, step.drawn, step.table_length)
    return Prediction(*counts, step.raised, violates, gate)


def expectation(lived: Sequence[Applied]) -> Expect:
    """What the intended model says of the last of some steps."""
    to_retire = -1
    for one in lived:
        before = -1 if one.planned.preempted else to_retire
        to_retire = int(intended.column_to_retire(one.situation, before))
    s = lived[-1].situation
    at = (int(checkpoint_position(s)), int(checkpoint_column(s)))
    return Expect(
        int(intended.need(s)),
        int(intended.table_length(s)),
        at if reserves_checkpoint(s) else None,
        to_retire,
    )


@pytest.fixture(scope="module")
def lives(shown: dict[tuple[str, str], list[Applied]]) -> dict[str, list[Scenario]]:
    """A scenario of each life, by family."""
    found: dict[str, list[Scenario]] = {}
    for name, (geometry, steps) in LIVES.items():
        last = replace(steps[-1], expect=expectation(shown[name, NEW]))
        situation = shown[name, NEW][-1].situation
        scenario = Scenario(
            name=name,
            manager="mamba-align",
            geometry=geometry,
            num_gpu_blocks=64,
            steps=(*steps[:-1], last),
            family=family_of(situation),
            tags=tags_of(situation),
            predicted={target: prediction(shown[name, target][-1]) for target in (OLD, NEW)},
        )
        found.setdefault(scenario.family, []).append(scenario)
    return found


@pytest.fixture(scope="module")
def files(lives: dict[str, list[Scenario]]) -> dict[str, str]:
    """What they are rendered to."""
    verdicts = {
        target: {
            "+".join((family, *tags)): dict.fromkeys(THEOREMS, "PROVED")
            for family, tags in OBLIGATIONS
        }
        for target in (OLD, NEW)
    }
    return render(lives, verdicts, "5.4.1")


def test_every_family_has_a_life_here(lives: dict[str, list[Scenario]]) -> None:
    """A family that is added to the catalogue is rendered, too."""
    assert lives.keys() == FAMILIES.keys()


# ---- running what was rendered -------------------------------------------------------------------

#: Outcome by theorem, target and scenario.
Outcomes = dict[tuple[str, str, str], str]


def outcomes_of(folder: Path, files: Mapping[str, str]) -> Outcomes:
    for path, text in files.items():
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
    found = re.fullmatch(r"test_(\w+)\[(vllm==[\d.]+)-(.+)\]", case.attrib["name"])
    assert found is not None, case.attrib["name"]
    return BY_TEST_NAME[found[1]], found[2], found[3]


def _outcome(case: ElementTree.Element) -> str:
    children = [child.tag for child in case]
    return children[0] if children else "passed"


@pytest.fixture(scope="module")
def outcomes(trees: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What pytest says of each test of `SCENARIO` and of what is wrong; one run for all."""
    scenarios = [SCENARIO, *(scenario for scenario, _ in WRONG.values())]
    files = render({"checkpoint": scenarios}, VERDICTS, "5")
    return outcomes_of(tmp_path_factory.mktemp("rendered"), files)


def test_a_rendered_scenario_passes_on_the_real_manager(outcomes: Outcomes) -> None:
    """Every theorem's test holds, or fails as predicted, on the fault and on its fix."""
    found = {
        (theorem, target): outcome
        for (theorem, target, name), outcome in outcomes.items()
        if name == SCENARIO.name
    }

    assert found == {
        (theorem, target): "skipped" if target == OLD and theorem in OVERCOUNTED else "passed"
        for theorem in TESTED
        for target in (OLD, NEW)
    }


@pytest.mark.parametrize("name", WRONG)
def test_every_expected_field_is_asserted(outcomes: Outcomes, name: str) -> None:
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


def test_every_family_passes_where_the_theorem_holds_and_only_there(
    tmp_path: Path, files: dict[str, str], shown: dict[tuple[str, str], list[Applied]]
) -> None:
    """Each test of each family says of the real managers what the catalogue says."""
    outcomes = outcomes_of(tmp_path, files)

    words = {True: "passed", False: "skipped"}
    found = {
        (slug, target, name): holds(slug, lived[-1])
        for (name, target), lived in shown.items()
        for slug in THEOREMS
    }
    assert outcomes == {key: words[value] for key, value in found.items() if value is not None}


# ---- what the files are --------------------------------------------------------------------------


def module_of(text: str) -> tuple[ast.Module, list[ast.FunctionDef]]:
    module = ast.parse(text)
    return module, [node for node in module.body if isinstance(node, ast.FunctionDef)]


def theorems_in(text: str) -> list[str]:
    return re.findall(r'^@pytest\.mark\.theorem\("(.+)"\)$', text, re.MULTILINE)


def test_there_is_a_file_per_family(files: dict[str, str]) -> None:
    """The rows of a family stand in one place."""
    assert files.keys() == {"conftest.py", *map(path_of, FAMILIES)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_tests_the_theorems_that_are_about_its_family(
    files: dict[str, str], lives: dict[str, list[Scenario]], family: str
) -> None:
    """One function each; what is left out is said, with the reason."""
    text = files[path_of(family)]
    asked = {
        asks
        for asks, step in ((Asks.GATE, -1), (Asks.LIFETIME, 0))
        if any(scenario.steps[step].num_request_tokens for scenario in lives[family])
    }

    about = [slug for slug, theorem in OF_ONE.items() if theorem.why_not(family) is None]
    gates = {slug for slug in about if THEOREMS[slug].asks_gate}
    tested = [slug for slug in about if slug not in gates or THEOREMS[slug].asks in asked]
    assert theorems_in(text) == tested
    left_out = re.findall(r"^# No test of (.+?): (.+)\.$", text, re.MULTILINE)
    assert dict(left_out) == {
        slug: theorem.why_not(family) or "no row asks the gate"
        for slug, theorem in OF_ONE.items()
        if slug not in tested
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_file_is_straight_lines(files: dict[str, str], family: str) -> None:
    """Rows once, then functions that arrange, act and assert; no branches and no loops."""
    module, functions = module_of(files[path_of(family)])

    kinds = [type(node).__name__ for node in module.body]
    assert kinds[:6] == ["Import", *["ImportFrom"] * 3, *["Assign"] * 2]
    assert set(kinds[6:]) == {"FunctionDef"}
    imported = [node.module for node in module.body if isinstance(node, ast.ImportFrom)]
    assert imported == ["conformance.scenario", "conformance.steps", "spec.vocabulary"]
    for function in functions:
        kinds = [type(node).__name__ for node in function.body]
        assert kinds[:3] == ["Expr", "Assign", "Assign"]
        assert set(kinds[3:]) == {"Assert"}
        assert not any(
            isinstance(node, ast.IfExp | ast.Lambda | ast.comprehension | ast.BoolOp)
            for node in ast.walk(function)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_file_says_what_it_is(files: dict[str, str], family: str) -> None:
    """Header, names and docstrings tell family, theorems, verdicts and solver, and no time."""
    text = files[path_of(family)]
    header, _, _ = text.partition("\nimport pytest\n")
    _, functions = module_of(text)

    assert header.startswith(f"{MARKER} Do not edit")
    assert f"# Family {family}: {FAMILIES[family].sentence}\n" in header
    assert re.search(r"Solver: z3 \d+\.\d+\.\d+", header)
    assert re.search(rf"^# {NEW}, {family}: {len(THEOREMS)} PROVED$", header, re.MULTILINE)
    assert not re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d", header)
    for function, slug in zip(functions, theorems_in(text), strict=True):
        assert function.name == f"test_{RELATIONS[slug].test_name}"
        assert function.name.count("_") >= 4, "a name is a sentence"
        docstring = ast.get_docstring(function) or ""
        assert " ".join(docstring.split()) == THEOREMS[slug].sentence


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_a_rendered_file_is_as_ruff_wants_it(
    files: dict[str, str], family: str, command: list[str]
) -> None:
    """Generated files are checked with all others; only the table of rows has its own form."""
    name = ["--stdin-filename", str(PROJECT_ROOT / "generated_tests" / path_of(family)), "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *name],
        input=files[path_of(family)],
        capture_output=True,
        text=True,
        cwd=PROJECT_ROOT,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_same_scenarios_give_the_same_files(
    lives: dict[str, list[Scenario]], files: dict[str, str]
) -> None:
    """What is read from a scenario file is rendered as what it was written from."""
    read = {family: loads(dumps(group), name=family) for family, group in lives.items()}

    again = render(read, {OLD: {}, NEW: {}}, "5.4.1")

    def without_verdicts(text: str) -> str:
        return re.sub(r"^# vllm==.*\n", "", text, flags=re.MULTILINE)

    assert again == {path: without_verdicts(text) for path, text in files.items()}


def test_verdicts_are_summed_up_in_a_line_per_kind_of_step() -> None:
    """What is proved is counted, the rest is named."""
    verdicts = {
        NEW: {
            "checkpoint": {
                "no-undercount": "PROVED",
                "dry-run-pure": "PROVED",
                "exact-estimate": "REFUTED",
                "bounded-demand": "REFUTED",
                "checkpoint-recorded": "NOT_APPLICABLE",
            },
            "checkpoint+overwide": {"no-undercount": "UNKNOWN"},
            "first": {"no-undercount": "PROVED"},
        }
    }

    text = render({"checkpoint": [SCENARIO]}, verdicts, "5")[FILE]

    assert re.findall(rf"^# {NEW}, (.*)$", text, re.MULTILINE) == [
        "checkpoint: 2 PROVED; REFUTED exact-estimate, bounded-demand; "
        "NOT_APPLICABLE checkpoint-recorded",
        "checkpoint+overwide: 0 PROVED; UNKNOWN no-undercount",
    ]


# ---- steps in words ------------------------------------------------------------------------------

WORDS = {word.__name__: word for word in (chunk, hit, load, park, preempted, own_tail)}
SAID = [
    "chunk(0, 40)",
    "chunk(32, 704_547, prefill_end=704_547)",
    "chunk(40, 100, local=0)",
    "chunk(40, 44, lookahead=2)",
    "hit(32, 40, blocks=2)",
    "hit(24, 28, blocks=2, evictable=True, lookahead=1, prefill_end=30, gate=200)",
    "hit(32, 40, blocks=2, of_this_step=True)",
    "load(external=40, end=100)",
    "load(local=32, external=8, end=48, blocks=2, evictable=True)",
    "park(external=40)",
    "park(local=24, external=40, blocks=2, prefill_end=90, gate=91)",
    "preempted(chunk(0, 40, gate=50))",
    "preempted(load(external=40, end=100))",
    "own_tail(chunk(40, 100, lookahead=3))",
    "own_tail(preempted(chunk(40, 100)))",
]


@pytest.mark.parametrize("said", SAID)
def test_a_step_is_said_as_it_is_made(said: str) -> None:
    """Words leave out what is as usual, and nothing else."""
    assert in_words(eval(said, WORDS)) == said


def test_words_say_all_of_a_step() -> None:
    """Whatever a scenario's step is, the call that is rendered makes it again, or none is."""
    chance, num_said = random.Random(0), 0
    for _ in range(3000):
        step = a_step(chance)
        try:
            said = in_words(step)
        except ValueError:
            continue
        num_said += 1
        made = eval(said, WORDS)
        assert replace(step, why=made.why, prefill_length=made.prefill_length) == made
    assert num_said > 1000


def a_step(chance: random.Random) -> ScenarioStep:
    local, external = chance.randint(0, 40), chance.choice((0, 0, 8, 24))
    is_parked = external > 0 and chance.random() < 0.5
    start = local + external
    end = start if is_parked else start + chance.randint(1, 40)
    return ScenarioStep(
        "a step",
        Call(end + chance.choice((0, 2)), end, start, local, chance.choice((0, end))),
        end,
        num_hit_blocks=chance.choice((0, -(-local // 16))),
        hit_is_evictable=chance.random() < 0.3,
        hit_is_of_this_step=chance.random() < 0.3,
        num_external_tokens=external,
        loads_asynchronously=is_parked,
        preempted=chance.random() < 0.3,
        owns_partial_tail=chance.random() < 0.3,
        num_request_tokens=chance.choice((0, end + 9)),
    )


def test_a_step_that_no_words_say_is_not_rendered() -> None:
    """A row never says something else than its scenario."""
    step = replace(chunk(0, 40), hit_is_evictable=True)

    with pytest.raises(ValueError, match="no words for a step"):
        in_words(step)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((16, 4, 2, 0, 4, False), "Geometry(16, 4, 2, 0, 4, False)"),
        ((16, 4, 2, 1, 4, True, 4, 1), "Geometry(16, 4, 2, 1, 4, True)"),
        ((16, 4, 2, 1, 4, True, 16), "Geometry(16, 4, 2, 1, 4, True, 16)"),
        ((16, 4, 2, 1, 4, False, 4, 3), "Geometry(16, 4, 2, 1, 4, False, 4, 3)"),
    ],
)
def test_sizes_that_are_as_usual_are_left_out(sizes: tuple[Any, ...], said: str) -> None:
    """The two sizes that newer releases added stand there where they say something."""
    scenario = changed("sizes", geometry=Geometry(*sizes))

    assert f"pytest.param({said}, 17, " in render({"checkpoint": [scenario]}, VERDICTS, "5")[FILE]


# ---- what is asserted ----------------------------------------------------------------------------


def test_every_theorem_has_a_relation_and_every_relation_a_theorem() -> None:
    """A theorem without a rendered test is not tested on the real managers."""
    assert list(RELATIONS) == list(THEOREMS)
    assert len(BY_TEST_NAME) == len(RELATIONS)


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
STEPS += [Step(2, 2, 2, 4, True, removal_kept_state=kept) for kept in (True, False)]
STEPS += [Step(2, 2, drawn, 4, True, gate=gate) for drawn in NUMBERS[1:] for gate in NUMBERS]
#: What a rendered test knows of `SCENARIO`.
KNOWN = {
    "geometry": SCENARIO.geometry,
    "steps": SCENARIO.steps,
    "expect": SCENARIO.steps[-1].expect,
    "greatest_demand": greatest_demand,
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
        beside = 4 if slug == "admission-fits-whole" else 0
        pool = Pool(max(step.estimate, 0) + beside, 0, 0)
        claim = THEOREMS[slug].claim(situation, step, pool, Need(2))
        assert is_asserted == bool(claim), step


def test_the_greatest_demand_is_the_bound_that_was_proved() -> None:
    """Whatever a step adopts, one block more breaks the theorem, and that many do not."""
    chance, claim = random.Random(0), THEOREMS["bounded-demand"].claim
    for _ in range(2000):
        planned = a_step(chance)
        geometry = Geometry(16, 4, chance.randint(0, 3), chance.randint(0, 2), 4, False)
        kind = {
            name: getattr(planned, name)
            for name in ("num_hit_blocks", "hit_is_evictable", "num_external_tokens")
        }
        situation = Situation(
            geometry, planned.call, 0, 0, **kind, owns_partial_tail=planned.owns_partial_tail
        )
        bound = greatest_demand(geometry, planned)
        for estimate, is_within in ((bound, True), (bound + 1, False)):
            step = Step(estimate, estimate, estimate, 1, True)
            assert bool(claim(situation, step, Pool(9, 0, 0), Need(1))) is is_within, planned


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

    text = render({"checkpoint": [scenario]}, verdicts, "5")[FILE]

    assert marks_in(text) == [
        {"theorem": slug, "targets": {target: reason}} for slug, reason in OVERCOUNTS.items()
    ]
    assert len(module_of(text)[1]) == len(theorems_in(text)) == len(TESTED)
    assert f"# {target}, checkpoint: 0 PROVED; REFUTED no-undercount, " in text


@pytest.mark.parametrize("raised", HOSTILE)
def test_an_exceptions_name_cannot_break_out_of_its_string(raised: str) -> None:
    """What a scenario file calls an exception is text."""
    raising = Prediction(2, 2, 0, 1, raised, ("allocation-succeeds",))
    (scenario,) = loads(dumps(replace(SCENARIO, predicted={OLD: raising})), name="written")

    refuted, silent = marks_in(render({"checkpoint": [scenario]}, {OLD: {}}, "5")[FILE])

    assert refuted == {"theorem": "allocation-succeeds", "targets": {OLD: f"raises {raised}"}}
    assert silent["targets"] == {OLD: f"the step raises {raised}"}


def test_the_source_of_a_scenario_is_not_code() -> None:
    """Free text of a scenario reaches no rendered file."""
    hostile = "'''\"\"\"; import os #"
    step = replace(SCENARIO.steps[0], why=hostile)
    scenario = replace(SCENARIO, source=hostile, steps=(step, SCENARIO.steps[1]))

    for text in render({"checkpoint": [scenario]}, VERDICTS, "5").values():
        assert "import os" not in text


# ---- marks ---------------------------------------------------------------------------------------


def marks_of(*scenarios: Scenario, targets: Sequence[str] = (OLD, NEW)) -> list[dict[str, Any]]:
    return marks_in(
        render({"checkpoint": scenarios}, {target: {} for target in targets}, "5")[FILE]
    )


def test_a_row_is_marked_for_each_theorem_that_it_breaks() -> None:
    """Several targets of one theorem share a mark; a theorem that is not expected has none."""
    scenario = violating("both", NEW, "exact-estimate")

    marks = marks_in(
        render(
            {"checkpoint": [scenario]},
            VERDICTS,
            "5",
            lambda target, scenario, slug: slug != "bounded-demand",
        )[FILE]
    )

    old, new = "estimates 3, draws 2, needs 2", "estimates 2, draws 2, needs 2"
    assert marks == [
        {"theorem": "exact-estimate", "targets": {OLD: old, NEW: new}},
        {"theorem": "matches-intended", "targets": {OLD: old}},
        {
            "theorem": "eventually-admitted",
            "targets": {OLD: OVERCOUNTS["eventually-admitted"]},
        },
    ]


def test_a_refuted_gate_says_what_it_asked_for() -> None:
    """The reason names what was compared."""
    too_low = Prediction(3, 3, 3, 5, None, ("gate-covers-first-step",), gate=2)
    scenario = replace(
        SCENARIO, steps=(chunk(0, 40, gate=50),), family="first", predicted={NEW: too_low}
    )

    (mark,) = marks_in(render({"first": [scenario]}, {NEW: {}}, "5")[path_of("first")])

    assert mark["targets"] == {NEW: "the gate asks for 2, the step draws 3"}


def test_a_step_that_raises_says_nothing_of_other_theorems() -> None:
    """A predicted exception is the failure of one theorem, and the others are left out."""
    raising = Prediction(2, 2, None, 4, "ValueError", ("allocation-succeeds",))
    scenario = changed("raising", predicted={NEW: raising})

    refuted, silent = marks_of(scenario, targets=[NEW])

    assert refuted["theorem"] == "allocation-succeeds"
    assert silent["theorems"] == [slug for slug in TESTED if slug != "allocation-succeeds"]


EAGLE = replace(SCENARIO.geometry, drop_eagle_checkpoint_block=True)
WITHOUT = replace(SCENARIO.geometry, num_prefill_checkpoint_blocks=0)
ONLY_NEW = {NEW: Prediction(2, 2, 2, 4)}
#: A row that OLD cannot be asked, one that it can, and the reason that remains.
REASONS: dict[str, tuple[Scenario, Scenario]] = {
    "this release is not told where the prefill ends": (
        calling("asked", prefill_end=4),
        changed("plain"),
    ),
    "no hit and no own tail of this release ends inside a block": (
        changed("asked", geometry=PLAIN, steps=(hit(24, 40, blocks=2),)),
        changed("plain", geometry=PLAIN, steps=(hit(32, 40, blocks=2),)),
    ),
    "this release has no checkpoint blocks": (
        changed("asked"),
        changed("plain", geometry=WITHOUT),
    ),
    "this release lowers no checkpoint under EAGLE": (
        changed("asked", geometry=EAGLE),
        changed("plain"),
    ),
    "this release places checkpoints by another rule": (
        changed("asked", geometry=replace(EAGLE, num_tokens_behind_checkpoint=0)),
        changed("plain", geometry=EAGLE),
    ),
    "this release cannot be asked this step": (
        changed("asked", geometry=WITHOUT),
        changed("plain", geometry=WITHOUT),
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_a_release_cannot_be_asked_is_marked(reason: str) -> None:
    """The reason is a feature of the row that no scenario shows on the target, if there is one."""
    asked, plain = REASONS[reason]
    asked = replace(asked, predicted=ONLY_NEW)
    plain = replace(plain, predicted={OLD: ONLY_NEW[NEW], **ONLY_NEW})

    assert marks_of(asked, plain) == [{"targets": {OLD: reason}}]


def test_a_theorem_that_is_not_about_a_release_is_marked() -> None:
    """On the test where it is about no row, on the rows where it is about others."""
    silent = {"checkpoint-recorded": "NOT_APPLICABLE"}
    overwide = replace(SCENARIO, name="overwide", tags=("overwide", "sparse"))
    rows = {"checkpoint": [replace(row, predicted=ONLY_NEW) for row in (SCENARIO, overwide)]}
    everywhere = {NEW: {"checkpoint": silent, "checkpoint+overwide": silent}}
    somewhere = {
        NEW: {"checkpoint": {"checkpoint-recorded": "PROVED"}, "checkpoint+overwide": silent}
    }

    (of_test,), (of_row,) = (
        marks_in(render(rows, verdicts, "5")[FILE]) for verdicts in (everywhere, somewhere)
    )

    targets = {NEW: "the theorem is not about this release"}
    assert of_test == {"targets": targets}
    assert of_row == {"theorems": ["checkpoint-recorded"], "targets": targets}


def test_every_row_is_listed_under_an_obligation(lives: dict[str, list[Scenario]]) -> None:
    """Tags that are not told apart are left out, as in the list of verdicts."""
    listed = {"+".join((family, *tags)) for family, tags in OBLIGATIONS}
    found = [obligation_of(scenario) for group in lives.values() for scenario in group]

    assert set(found) <= listed
    assert obligation_of(replace(SCENARIO, tags=("eagle", "overwide"))) == "checkpoint+overwide"
    assert "promoted+own-tail" in found


# ---- applying steps ------------------------------------------------------------------------------


def test_the_last_step_is_what_is_shown(trees: Mapping[str, Path]) -> None:
    """Earlier steps make the state, and the request gives back its blocks."""
    driver = core_driver(trees["0.31.0"])
    request = driver.request(PLAIN, 64)

    step = last_of(request, [chunk(0, 40), chunk(40, 100)])

    assert (step.drawn, step.table_length) == (1, 9)
    assert step.dry_run_left_state is None
    assert request.observe().table == ()


def test_a_load_that_ends_at_no_token_has_words() -> None:
    """A scenario from outside may ask for it; a word is not short of its argument then."""
    step = replace(load(external=1, end=2), call=Call(2, 0, 1, 0), num_request_tokens=2)

    assert in_words(step) == "load(external=1, end=0, lookahead=2, gate=2)"
