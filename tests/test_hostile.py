"""Scenario files from anyone: refused in one line, or harmless in whatever is made of them."""

from __future__ import annotations

import ast
import copy
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from rich.console import Console

from conformance import cli
from conformance.drawing import draw
from conformance.driver import Driver, core_driver
from conformance.picture import picture
from conformance.render import render
from conformance.replay import PROJECT_ROOT, replay
from conformance.scenario import (
    KIND_DEFAULTS,
    Expect,
    Prediction,
    Scenario,
    ScenarioError,
    ScenarioStep,
    loads,
)
from conformance.standalone import StandaloneError, standalone
from conformance.svg import svg
from conformance.targets import resolve
from spec.vocabulary import Call, Geometry

Output = pytest.CaptureFixture[str]

TARGET = "vllm==0.33.0"
SCENARIOS = PROJECT_ROOT / "generated_tests" / "scenarios"
REAL = [
    json.loads((SCENARIOS / "refutations" / f"{name}.json").read_text())
    for name in (
        "exact-estimate-checkpoint-vllm-0-30-0",
        "no-undercount-coordinator-resumed-vllm-0-33-0",
        "exact-estimate-hit-partial-vllm-0-30-0",
        "eventually-admitted-own-tail-vllm-0-33-0",
        "gate-covers-first-step-external-sync-vllm-0-33-0",
        "estimate-nonnegative-drafts-overwide-vllm-0-33-0",
    )
]
KNOWN = {
    *(
        item.name
        for cls in (Scenario, ScenarioStep, Call, Geometry, Expect, Prediction)
        for item in fields(cls)
    ),
    *KIND_DEFAULTS,
    "scenarios",
}
MARKUP = (
    "</title></svg><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "[bold red]x[/] [link=file:///etc/passwd]y[/link]",
    '"""\\',
    "{{ 7 * 7 }} {% raw %}",
    "../../../etc/passwd",
    "javascript:alert(1)",
    "\u202etxt.exe",
    "\x1b]0;title\x07",
)
#: Tables and pools of so many columns and blocks are drawn here; larger ones take a while.
MOST = 20_000
HOSTILE_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.integers(),
    st.sampled_from([2**53, 2**53 - 1, -(2**63), 10**400]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(MARKUP),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
JSON_TREES = st.recursive(
    HOSTILE_VALUES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(sorted(KNOWN)), inner, max_size=8)
    ),
    max_leaves=30,
)


def places(content: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = content.items() if isinstance(content, dict) else ()
    if isinstance(content, list):
        items = enumerate(content)
    return [
        place for key, value in items for place in ((*prefix, key), *places(value, (*prefix, key)))
    ]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Any, list[str]]:
    """A real scenario with some places changed, and the names of the fields they stand in."""
    content, touched = copy.deepcopy(draw(st.sampled_from(REAL))), []
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(content)))
        at = content
        for key in place[:-1]:
            at = at[key]
        touched += [str(key) for key in place if isinstance(key, str)]
        what = draw(st.sampled_from(["nudge"] * 5 + ["change", "drop", "add", "repeat"]))
        value = at[place[-1]]
        if what == "nudge" and isinstance(value, int) and not isinstance(value, bool):
            at[place[-1]] = value + draw(st.integers(-2, 3))
        elif what == "nudge" and place[-1] in ("why", "source"):
            at[place[-1]] = draw(st.sampled_from(MARKUP))
        elif what == "nudge" and isinstance(value, str | bool):
            continue
        elif what == "drop":
            del at[place[-1]]
        elif what == "add" and isinstance(at, dict):
            at[draw(st.sampled_from(MARKUP))] = draw(HOSTILE_VALUES)
        elif what == "repeat" and isinstance(at, list):
            at.append(copy.deepcopy(value))
        else:
            at[place[-1]] = draw(HOSTILE_VALUES)
        if not places(content):
            break
    return content, touched


@pytest.fixture(scope="module")
def driver() -> Driver:
    return core_driver(resolve(TARGET).root)


def read_or_refused(text: str) -> list[Scenario]:
    """What a text holds; a refusal is one short printable line that names the file and a field."""
    try:
        return loads(text, name="some.json")
    except ScenarioError as error:
        said = str(error)
        assert said.startswith("some.json: ")
        assert said.isprintable(), said
        assert len(said) < 1000
        is_about_all = any(w in said for w in ("not JSON", "expected an object", "not a number"))
        assert is_about_all or any(name in said for name in (*KNOWN, "unknown field")), said
        return []


@given(JSON_TREES)
def test_any_json_is_refused_in_one_line_or_read(tree: Any) -> None:
    """A random tree is hardly ever a scenario, and never an exception of another kind."""
    read_or_refused(json.dumps(tree))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(data: bytes) -> None:
    """Nor are bytes that are no JSON."""
    with pytest.raises(ScenarioError) as refused:
        loads(data, name="some.json")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("field", ["name", "steps", "geometry", "predicted", "tags", "source"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_in_any_field_is_one_line(field: str, opening: str) -> None:
    """A nesting bomb is no recursion error, wherever it stands."""
    text = json.dumps({**REAL[0], field: "BOMB"}).replace('"BOMB"', opening * 100_000)

    with pytest.raises(ScenarioError, match=r"^some\.json: (nested too deeply|not JSON)"):
        loads(text, name="some.json")


def _is_small(scenario: Scenario) -> bool:
    tokens = max(max(vars(step.call).values()) for step in scenario.steps)
    columns = tokens // scenario.geometry.block_size + scenario.geometry.num_speculative_blocks
    return columns <= MOST and scenario.num_gpu_blocks <= MOST


@settings(max_examples=300)
@given(mutated())
def test_what_is_made_of_an_accepted_scenario_is_harmless(
    driver: Driver, mutation: tuple[Any, list[str]]
) -> None:
    """Replayed, drawn and rendered, its texts stay texts, and nothing but an outcome comes back."""
    content, _ = mutation
    for scenario in read_or_refused(json.dumps(content)):
        if not _is_small(scenario):
            continue
        result = replay(scenario, driver, TARGET, with_tables=True)
        shown = picture(scenario, result)
        _check_svg(svg(shown))
        console = Console(file=io.StringIO(), width=100)
        draw(console, shown)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert "\x1b" not in printed
        for step in scenario.steps[: len(result.steps)]:
            assert step.why == "" or step.why in svg_texts(svg(shown))
        _check_rendered(scenario, driver)


def test_the_mutations_reach_what_is_made_of_scenarios() -> None:
    """Some are accepted with markup in them, or the property above would be empty."""
    mutation = find(
        mutated(),
        lambda found: "<script>" in json.dumps(found[0]) and bool(_accepted(found[0])),
        settings=settings(max_examples=20_000, database=None),
    )

    (scenario,) = _accepted(mutation[0])
    assert "<script>" in scenario.source + "".join(step.why for step in scenario.steps)


def _accepted(content: Any) -> list[Scenario]:
    try:
        return loads(json.dumps(content), name="some.json")
    except ScenarioError:
        return []


def test_a_field_that_is_left_out_is_named_for_the_coordinator() -> None:
    """How many groups there are has no default there."""
    content = {key: value for key, value in REAL[1].items() if key != "num_mamba_groups"}

    with pytest.raises(ScenarioError, match=r"^some\.json: num_mamba_groups: 0 Mamba groups"):
        loads(json.dumps(content), name="some.json")


def test_no_alignment_without_checkpoint_blocks_is_replayed(driver: Driver) -> None:
    """0 may stand for none, and is no division by zero."""
    content = copy.deepcopy(REAL[2])
    content["geometry"] |= {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": 0}
    (scenario,) = loads(json.dumps(content), name="some.json")

    result = replay(scenario, driver, TARGET)

    assert scenario.geometry.prefill_checkpoint_alignment == 1
    assert len(result.steps) == len(scenario.steps)


def svg_texts(text: str) -> str:
    return "".join(ElementTree.fromstring(text).itertext())


def _check_svg(text: str) -> None:
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert tags <= {"svg", "title", "desc", "style", "rect", "text", "tspan", "g"}
    names = {name for e in ElementTree.fromstring(text).iter() for name in e.attrib}
    assert not {name for name in names if name.startswith("on") or "href" in name}


def _check_rendered(scenario: Scenario, driver: Driver) -> None:
    """Rendered files hold the imports and definitions of the template, and nothing else."""
    with suppress(ValueError, KeyError):  # no such family, or a step without words
        files = render({"first": [scenario]}, {TARGET: {}}, "1")
        _check_code(files["test_first.py"], {"pytest", "conformance", "spec"})
    with suppress(StandaloneError):
        text = standalone([scenario], driver.bindings, TARGET)
        _check_code(text, {"types", "pytest", "torch", "vllm"})


def _check_code(text: str, allowed: set[str]) -> None:
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign)
    for node in ast.parse(text).body:
        assert isinstance(node, kinds), ast.dump(node)
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] in allowed


@pytest.mark.parametrize("field", ["why", "source", "predicted", "name", "family", "tags"])
@pytest.mark.parametrize("markup", MARKUP, ids=range(len(MARKUP)))
def test_markup_writes_no_file_beside_the_one_that_is_asked_for(
    tmp_path: Path, capsys: Output, field: str, markup: str
) -> None:
    """Whatever a scenario calls itself, a picture and a test go where the command line says."""
    content = copy.deepcopy(REAL[0])
    values: Mapping[str, Any] = {
        "predicted": {markup: content["predicted"][TARGET]},
        "tags": [markup],
    }
    if field == "why":
        content["steps"][0]["why"] = markup
    else:
        content[field] = values.get(field, markup)
    folder, file = tmp_path / "out", tmp_path / "some.json"
    folder.mkdir()
    file.write_text(json.dumps(content))

    drawn = ["replay", str(file), "--target", TARGET, "--draw-svg", str(folder / "x.svg"), "--draw"]
    written = ["gen-tests", "--standalone", str(file), "--out", str(folder / "test_x.py")]
    statuses = [cli.run(drawn), cli.run(written)]

    out, err = capsys.readouterr()
    assert set(statuses) <= {0, 2}
    assert err.count("\n") == statuses.count(2)
    assert "\x1b" not in out + err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "some.json"]
    assert {path.name for path in folder.iterdir()} <= {"x.svg", "test_x.py"}
    if statuses == [0, 0]:
        _check_svg((folder / "x.svg").read_text())
        _check_code((folder / "test_x.py").read_text(), {"types", "pytest", "torch", "vllm"})
