from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.cases import Case, known_cases
from conformance.driver import Driver, core_driver
from conformance.made_request import cases, request_of_case
from conformance.predicted import scenario_of
from conformance.scenario import dumps, loads
from conformance.steps import last_of
from models import intended
from models.predict import LiftedTree
from spec.families import checkpoint_position, family_of, reserves_checkpoint, tags_of
from spec.vocabulary import Situation

#: CASES.md, vLLM #57050: blocks that each release says and draws, by B, S and prompt.
LONG, SHORT = 704_547, 25_121
TABLE = {
    **{(896, s, LONG): {"0.30.0": (761, d), "0.31.0": (d, d)} for s, d in ((0, 2), (1, 3), (4, 6))},
    **{
        (1536, s, LONG): {"0.30.0": (444, d), "0.31.0": (d, d)} for s, d in ((0, 2), (1, 3), (4, 6))
    },
    (896, 0, SHORT): {"0.30.0": (3, 2), "0.31.0": (2, 2)},
    **{(896, s, SHORT): {"0.30.0": (3, 3), "0.31.0": (3, 3)} for s in (1, 4)},
    **{(1536, s, SHORT): {"0.30.0": (2, 2), "0.31.0": (2, 2)} for s in (0, 1, 4)},
}


@pytest.fixture(scope="module")
def drivers(trees: Mapping[str, Path]) -> dict[str, Driver]:
    return {release: core_driver(root) for release, root in trees.items()}


def named(case: Case) -> str:
    g = case.geometry
    return f"{case.id}-b{g.block_size}-s{g.num_speculative_blocks}-{case.chunks[-1]}"


def last_situation(case: Case) -> Situation:
    *_, last = request_of_case(case).situations()
    return last


def of_57050() -> list[Case]:
    return [case for case in known_cases() if case.id == "vllm-57050"]


def test_the_twelve_rows_of_the_report_are_there() -> None:
    """Every row of vLLM #57050's table is a case, with the figures of the report."""
    rows = {
        (c.geometry.block_size, c.geometry.num_speculative_blocks, c.chunks[-1]): dict(c.seen)
        for c in of_57050()
    }

    assert len(of_57050()) == 12
    assert rows == TABLE
    for case in of_57050():
        geometry = case.geometry
        assert case.chunks[0] == 23_040
        assert geometry.hash_block_size == 128
        assert geometry.prefill_checkpoint_alignment == 64
        assert geometry.num_prefill_checkpoint_blocks == 1


@pytest.mark.parametrize("release", ["0.30.0", "0.31.0"])
@pytest.mark.parametrize("case", known_cases(), ids=named)
def test_the_real_manager_gives_the_recorded_figures(
    drivers: dict[str, Driver], case: Case, release: str
) -> None:
    """What a report saw is what the release's own manager says and draws."""
    scenario = scenario_of(request_of_case(case), trees={}, source=case.source)

    step = last_of(drivers[release].request(case.geometry, 1024), scenario.steps)

    assert step.raised is None
    assert (step.estimate, step.drawn) == case.seen[release]
    assert step.dry_run == step.estimate


@pytest.mark.parametrize("case", known_cases(), ids=named)
def test_every_case_says_what_was_seen_of_both_releases(case: Case) -> None:
    """The fault and its fix are compared on the same inputs."""
    assert set(case.seen) == {"0.30.0", "0.31.0"}


def test_the_right_value_is_the_intended_need() -> None:
    """Of the report's rows, a checkpoint step needs a state and a checkpoint, whatever S is."""
    for case in of_57050():
        situation = last_situation(case)
        state_moves_on = situation.call.num_tokens_main_model > 23_040
        assert intended.need(situation) == state_moves_on + reserves_checkpoint(situation)
        assert intended.need(situation) == 2


def test_a_checkpoint_step_with_drafts_needs_two_and_draws_five() -> None:
    """CASES.md: with three speculative blocks both releases draw 5 where 2 are needed."""
    (case,) = (c for c in known_cases() if c.id == "checkpoint-step-with-drafts")

    assert case.geometry.num_speculative_blocks == 3
    assert family_of(last_situation(case)) == "checkpoint"
    assert intended.need(last_situation(case)) == 2
    assert {drawn for _, drawn in case.seen.values()} == {5}


def test_the_steps_of_the_eagle_review_keep_no_checkpoint() -> None:
    """88 is no multiple of 16, and a checkpoint never takes the initial state's column."""
    reviewed = {c.chunks: last_situation(c) for c in known_cases() if c.id == "vllm-53614-review"}

    assert set(reviewed) == {(100,), (16, 100)}
    kept_without_drop = {}
    for chunks, situation in reviewed.items():
        assert checkpoint_position(situation) == 88
        assert not reserves_checkpoint(situation)
        geometry = replace(situation.geometry, drop_eagle_checkpoint_block=False)
        kept_without_drop[chunks] = reserves_checkpoint(replace(situation, geometry=geometry))
    assert kept_without_drop == {(100,): True, (16, 100): False}


@pytest.mark.parametrize(
    ("id", "family", "tags", "needs"),
    [
        ("vllm-39562", "drafts", ("overwide",), [0]),
        ("vllm-51766", "own-tail", (), [1, 1]),
        ("vllm-46384-review", "own-tail", (), [1, 2]),
    ],
)
def test_reports_of_tails_and_drafts_draw_what_is_needed(
    id: str, family: str, tags: tuple[str, ...], needs: list[int]
) -> None:
    """A table of 18 columns draws nothing for 17; a tail is copied, in its block or into a next."""
    found = [case for case in known_cases() if case.id == id]
    situations = [last_situation(case) for case in found]

    assert [(family_of(s), tags_of(s)) for s in situations] == [(family, tags)] * len(needs)
    assert [intended.need(s) for s in situations] == needs
    for case, need in zip(found, needs, strict=True):
        assert {drawn for _, drawn in case.seen.values()} == {need}


def test_cases_become_scenarios_that_predict_what_was_seen(trees: Mapping[str, Path]) -> None:
    """The lifted code of a release says of a report what its manager did."""
    lifted = {release: LiftedTree(root) for release, root in trees.items()}
    seen = {request_of_case(case): case.seen for case in known_cases()}

    for request, source in cases(known_cases()).items():
        scenario = scenario_of(request, trees=lifted, source=source)
        assert loads(dumps(scenario), name="written") == [scenario]
        predicted = {t: (p.estimate, p.drawn) for t, p in scenario.predicted.items()}
        assert predicted == seen[request]
