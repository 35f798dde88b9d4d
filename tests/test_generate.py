"""Scenarios: one per refutation, per feasible path and per edge of it, and the public cases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cases import known_cases
from conformance.driver import Driver, core_driver
from conformance.expectations import suite_of
from conformance.generate import (
    _IN_ALL_SETTINGS,
    _WITH_EDGES,
    EDGE_SIZES,
    MAX_TOKENS,
    paths_and_edges,
    stands_for_others,
)
from conformance.made_request import Request, cases, request_in, request_of
from conformance.predicted import by_suite, scenario_of
from conformance.reached import is_reached
from conformance.replay import NEED_EXACT_POOL, PROJECT_ROOT, Outcome, replay
from conformance.scenario import Scenario, dumps, load, loads
from conformance.targets import DEFAULT_TARGETS, resolve
from models import intended, smt, term
from models.evaluate import Evaluator
from models.lift import Exploration, PathSummary, Variant
from models.predict import LiftedTree, _Columns, _variant_of, obligation_of, values_of
from spec.families import family_of, tags_of
from spec.logic import negation
from spec.theorems import OBLIGATIONS, THEOREMS
from spec.vocabulary import Geometry, Situation

OLD, NEW, NEWEST = "vllm==0.30.0", "vllm==0.31.0", "vllm==0.33.0"
SCENARIOS = PROJECT_ROOT / "generated_tests" / "scenarios"
B16 = Geometry(16, 4, 2, 1, 4, False)

COMMITTED = [
    scenario
    for file in sorted(SCENARIOS.glob("*.json"))
    if file.name != "verdicts.json"
    for scenario in load(file)
]
REFUTATIONS = [load(file)[0] for file in sorted((SCENARIOS / "refutations").glob("*.json"))]


@pytest.fixture(scope="module")
def lifted() -> Mapping[str, LiftedTree]:
    return {target: LiftedTree(resolve(target).root) for target in DEFAULT_TARGETS}


@pytest.fixture(scope="module")
def drivers() -> dict[str, Driver]:
    return {target: core_driver(resolve(target).root) for target in DEFAULT_TARGETS}


# ---- requests ------------------------------------------------------------------------------------


def geometries() -> st.SearchStrategy[Geometry]:
    def make(hash_size: int, factor: int, *rest: int) -> Geometry:
        return Geometry(hash_size * factor, hash_size, *rest)

    sizes = st.integers(1, 8)
    return st.builds(make, sizes, sizes, st.integers(0, 8), st.integers(0, 1), sizes, st.booleans())


@st.composite
def requests(draw: st.DrawFn) -> Request:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
    chunks = tuple(sum(lengths[: i + 1]) for i in range(len(lengths)))
    is_sparse = draw(st.booleans())
    return Request(
        draw(geometries()),
        chunks,
        lookahead=draw(st.integers(0, 3)),
        prefill_length=draw(st.integers(1, 90)) if is_sparse else 0,
        is_sparse=is_sparse,
    )


@settings(deadline=None)
@given(requests())
def test_a_request_is_found_again_in_its_situation_and_in_its_scenario(request_: Request) -> None:
    """Nothing that a step depends on is lost on the way into a scenario and back."""
    *_, last = request_.situations()
    scenario = scenario_of(request_, trees={}, source="a test")

    assert request_of(last) == request_
    assert request_in(scenario) == request_
    assert loads(dumps(scenario), name="written") == [scenario]


@settings(deadline=None)
@given(requests(), requests())
def test_two_requests_have_two_names(one: Request, other: Request) -> None:
    """A name tells the whole request, since it is the test's id."""
    assert (one.name == other.name) == (one == other)


def test_steps_follow_from_each_other() -> None:
    """Each chunk starts where the last one ended, on the table that the model says it left."""
    first, second, third = Request(B16, (4, 33, 70), lookahead=3).situations()

    assert (first.table_length, first.call.total_computed_tokens) == (0, 0)
    assert (second.table_length, second.call.total_computed_tokens) == (1 + 2, 4)
    assert (third.table_length, third.call.total_computed_tokens) == (3 + 2, 33)
    assert [s.call.num_tokens for s in (first, second, third)] == [4, 33, 73]
    assert [s.call.num_tokens_main_model for s in (first, second, third)] == [4, 33, 70]


# ---- the committed scenarios ---------------------------------------------------------------------


def situation_of(scenario: Scenario) -> object:
    *_, last = request_in(scenario).situations()
    return last


def test_names_are_told_apart() -> None:
    """A test id names one scenario."""
    names = [scenario.name for scenario in (*COMMITTED, *REFUTATIONS)]

    assert len(names) == len(set(names))


def test_scenarios_say_what_the_intended_model_says() -> None:
    """Absolute numbers, family and tags come from spec and intended model, for every step."""
    for scenario in (*COMMITTED, *REFUTATIONS):
        situations = list(request_in(scenario).situations())
        assert [step.call for step in scenario.steps] == [s.call for s in situations]
        for step, situation in zip(scenario.steps, situations, strict=True):
            assert step.expect.need == intended.need(situation)
            assert step.expect.table_length == intended.table_length(situation)
        assert (scenario.family, scenario.tags) == (
            family_of(situations[-1]),
            tags_of(situations[-1]),
        )


@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_the_real_manager_shows_what_is_predicted(drivers: dict[str, Driver], target: str) -> None:
    """Lifted summaries and the real function agree on every committed scenario."""
    for scenario in (*COMMITTED, *REFUTATIONS):
        result = replay(scenario, drivers[target], target)
        if target in scenario.predicted:
            assert result.outcome is Outcome.REPRODUCED, (scenario.name, result.detail)
            broken, seen = set(scenario.predicted[target].violates), set(result.violated)
            if scenario.theorem in NEED_EXACT_POOL:  # on that pool the step may end early
                about = broken & {scenario.theorem}
                assert about <= seen <= broken, scenario.name
            else:
                assert seen == broken, scenario.name


def is_out_of_reach(
    exploration: Exploration, path: PathSummary, *, all_of_it: bool, is_plain: bool
) -> bool:
    """Whether no life from an empty pool takes a path: neither it nor another request leads there.

    Steps that wait for their hit are shown in the plain setting; what an earlier load changes needs
    a longer life.
    """
    taken = path.condition if all_of_it else stands_for_others(exploration, path)
    on_path = (*exploration.assumptions.values(), taken, is_reached(exploration))
    question = smt.Question()
    question.add(*on_path)
    if not is_plain:
        question.add(negation(exploration.situation.hit_is_of_this_step))
    question.add(negation(term.bool_var("was_parked")))
    return question.ask().answer is smt.Answer.UNSAT


def untaken(target: str, tree: LiftedTree, situations: Sequence[Situation]) -> list[object]:
    """Paths of a target that none of the situations takes, and that some life does.

    Others than those that stand for them, and for other settings, are not counted.
    """
    found = []
    for family, tags, variant, exploration in tree.explorations():
        is_plain = variant == Variant()
        if not is_plain and (family, tags) not in _IN_ALL_SETTINGS:
            continue
        stands_for_itself = is_plain and family in _WITH_EDGES and "overwide" not in tags
        values = [
            {
                **values_of(last),
                "has_checkpoint_before": kept,
                "block_table": _Columns(last, checkpoint_before=kept),
            }
            for last in situations
            for kept in (False, True)
            if obligation_of(last) == (family, tags) and _variant_of(last) == variant
        ]
        evaluators = [Evaluator(v) for v in values]
        asked = [e for e in evaluators if all(map(e.truth, exploration.assumptions.values()))]
        found += [
            (target, family, tags, variant, number)
            for number, path in enumerate(exploration.paths, start=1)
            if not any(e.truth(path.condition) for e in asked)
            and not is_out_of_reach(
                exploration, path, all_of_it=stands_for_itself, is_plain=is_plain
            )
        ]
    return found


#: Targets whose paths are gone through; `make selfcheck` takes the newest release as well.
GONE_THROUGH = DEFAULT_TARGETS if os.environ.get("CAPPROOF_ALL_RELEASES") else DEFAULT_TARGETS[:2]


def test_every_feasible_path_has_a_scenario(lifted: Mapping[str, LiftedTree]) -> None:
    """Each way through a release's step is taken by a committed scenario."""
    scenarios = (*COMMITTED, *REFUTATIONS)
    situations = [list(request_in(scenario).situations())[-1] for scenario in scenarios]

    for target in GONE_THROUGH:
        assert untaken(target, lifted[target], situations) == []


def test_requests_for_paths_do_on_the_real_manager_what_is_predicted(
    lifted_trees: Mapping[str, LiftedTree], release_trees: Mapping[str, Path]
) -> None:
    """A life from an empty pool takes every path that is in reach, of every family."""
    release, target = "0.24.0", "vllm==0.24.0"
    tree, driver = lifted_trees[release], core_driver(release_trees[release])
    kinds = [kind for kind in OBLIGATIONS if tree.traits.why_not(*kind) is None]
    found = paths_and_edges(target, tree, kinds)
    scenarios = [
        scenario_of(request_, trees={target: tree}, source=source)
        for request_, source in found.items()
    ]

    for scenario in scenarios:
        result = replay(scenario, driver, target)
        assert result.outcome is Outcome.REPRODUCED, (scenario.name, result.detail)
    assert untaken(target, tree, [list(r.situations())[-1] for r in found]) == []
    assert {s.family for s in scenarios} == {family for family, _ in kinds}


@pytest.mark.parametrize("family", ["first", "running", "checkpoint"])
@pytest.mark.parametrize("unit", ["block_size", "hash_block_size"])
def test_edges_are_tried_around_boundaries(family: str, unit: str) -> None:
    """Chunks end on a block and on a hash boundary, one token below it and one above it."""
    ends = {
        scenario.steps[-1].call.num_tokens_main_model
        for scenario in COMMITTED
        if scenario.family == family
        and {name: getattr(scenario.geometry, name) for name in EDGE_SIZES} == EDGE_SIZES
    }
    size = EDGE_SIZES[unit]

    assert any(
        {boundary - 1, boundary, boundary + 1} <= ends for boundary in range(size, 65 * size, size)
    )


@pytest.mark.parametrize("family", ["first", "running", "checkpoint"])
def test_the_longest_prompt_is_tried(family: str) -> None:
    """The greatest token count is that of the report, and nothing is beyond it."""
    ends = {s.steps[-1].call.num_tokens for s in COMMITTED if s.family == family}

    assert max(ends) == MAX_TOKENS


def test_public_cases_are_among_the_scenarios() -> None:
    """Every case of cases.toml is rendered, with its source."""
    committed = {request_in(scenario): scenario for scenario in COMMITTED}

    for request_, source in cases(known_cases()).items():
        assert committed[request_].source == source


def test_each_scenario_says_where_it_came_from() -> None:
    """No scenario is without a source, and no step without a reason."""
    for scenario in (*COMMITTED, *REFUTATIONS):
        assert scenario.source
        assert all(step.why for step in scenario.steps)


def test_refutations_break_the_theorem_they_name() -> None:
    """A refutation's name tells theorem, family and target, and its prediction shows it."""
    for scenario in REFUTATIONS:
        assert scenario.theorem in THEOREMS
        (target,) = (
            t
            for t in DEFAULT_TARGETS
            if scenario.name.endswith(t.replace("==", "-").replace(".", "-"))
        )
        suite = suite_of(scenario.manager, scenario.family)
        assert scenario.name.startswith(f"{scenario.theorem}-{suite}")
        assert scenario.theorem in scenario.predicted[target].violates


def test_the_least_counterexample_of_57050_is_small() -> None:
    """The canonical counterexample is the one a person can follow on paper."""
    (least,) = (s for s in REFUTATIONS if s.name == "exact-estimate-checkpoint-vllm-0-30-0")

    assert least.geometry == Geometry(1, 1, 0, 1, 1, False)
    assert [step.call.num_tokens for step in least.steps] == [1, 4]
    assert least.predicted[OLD].estimate == 3
    assert least.predicted[OLD].drawn == least.steps[-1].expect.need == 2


# ---- suites --------------------------------------------------------------------------------------


def in_suites(
    asked: Mapping[Request, str], trees: Mapping[str, LiftedTree]
) -> dict[str, list[Scenario]]:
    return by_suite(scenario_of(r, trees=trees, source=source) for r, source in asked.items())


def test_what_no_target_can_be_asked_is_left_out(lifted: Mapping[str, LiftedTree]) -> None:
    """A release that is not told where the prefill ends gets no sparse scenario."""
    sparse = Request(B16, (4, 33), prefill_length=33, is_sparse=True)
    dense = Request(B16, (4, 33))
    asked = {sparse: "sparse", dense: "dense"}

    only_old = in_suites(asked, {OLD: lifted[OLD]})
    both = in_suites(asked, lifted)

    assert [s.source for group in only_old.values() for s in group] == ["dense"]
    assert {s.source: set(s.predicted) for group in both.values() for s in group} == {
        "dense": {OLD, NEW, NEWEST},
        "sparse": {NEW, NEWEST},
    }


def test_the_order_of_requests_does_not_reach_the_scenarios(
    lifted: Mapping[str, LiftedTree],
) -> None:
    """Scenarios are sorted by size, whatever order they were found in."""
    found = {
        Request(replace(B16, num_speculative_blocks=s), (4, end)): f"{s} {end}"
        for s in (0, 2)
        for end in (8, 9, 33)
    }

    backwards = dict(reversed(found.items()))

    assert in_suites(found, lifted) == in_suites(backwards, lifted)
