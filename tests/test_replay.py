from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance import replay as replay_module
from conformance.driver import Driver, core_driver
from conformance.replay import (
    PROJECT_ROOT,
    Outcome,
    Replay,
    replay,
    replay_in,
    theorem_holds,
    why_no_answer,
)
from conformance.scenario import (
    Expect,
    Prediction,
    Scenario,
    ScenarioStep,
    dumps,
    loads,
    to_json,
)
from conformance.steps import applied
from conformance.targets import resolve
from spec.families import FAMILIES, family_of
from spec.theorems import Pool
from spec.vocabulary import Call, Geometry, Situation, Step

OLD, NEW = "vllm==0.30.0", "vllm==0.31.0"

PREDICTED_OLD = Prediction(761, 761, 3, 788, None, ("exact-estimate", "bounded-demand"))
PREDICTED_NEW = Prediction(3, 3, 3, 788)

LONG_PROMPT = Scenario(
    name="long-prompt",
    manager="mamba-align",
    geometry=Geometry(896, 128, 1, 1, 64, False),
    num_gpu_blocks=1024,
    steps=(
        ScenarioStep("already computed", Call(23_040, 23_040, 0, 0), 704_547),
        ScenarioStep("the rest", Call(704_547, 704_547, 23_040, 23_040), 704_547, Expect(2, 788)),
    ),
    family="checkpoint",
    theorem="exact-estimate",
    source="CASES.md, vLLM #57050",
    predicted={OLD: PREDICTED_OLD, NEW: PREDICTED_NEW},
)


#: A step of each family that `LONG_PROMPT` has not, on blocks of 16 tokens and hash units of 4.
OTHER_FAMILIES: dict[str, tuple[ScenarioStep, ...]] = {
    "first": (ScenarioStep("first", Call(40, 40, 0, 0), 200),),
    "hit-full": (ScenarioStep("hit", Call(100, 100, 32, 32), 200, num_hit_blocks=2),),
    "hit-partial": (
        ScenarioStep("hit", Call(28, 28, 24, 24), 200, num_hit_blocks=2, hit_is_evictable=True),
    ),
    "external-sync": (
        ScenarioStep("external", Call(100, 100, 40, 0), 200, num_external_tokens=40),
    ),
    "external-async": (
        ScenarioStep(
            "external",
            Call(40, 40, 40, 0),
            200,
            num_external_tokens=40,
            loads_asynchronously=True,
        ),
    ),
}
OTHER_FAMILIES |= {
    "promoted": (
        *OTHER_FAMILIES["external-async"],
        ScenarioStep("promoted", Call(100, 100, 40, 40), 200),
    ),
    "resumed": (
        *OTHER_FAMILIES["first"],
        ScenarioStep("again", Call(40, 40, 32, 32), 200, num_hit_blocks=2, preempted=True),
    ),
    "own-tail": (
        *OTHER_FAMILIES["first"],
        ScenarioStep("its tail", Call(100, 100, 40, 40), 200, owns_partial_tail=True),
    ),
    "running": (
        *OTHER_FAMILIES["first"],
        ScenarioStep("a chunk", Call(44, 44, 40, 40), 200),
    ),
    "drafts": (
        ScenarioStep("first", Call(95, 95, 0, 0), 90),
        ScenarioStep("drafts", Call(99, 99, 95, 95), 90),
        ScenarioStep("without", Call(96, 96, 95, 95), 90),
    ),
}
SCENARIOS_OF_FAMILIES = [
    Scenario(
        name=f"a-step-of-{family}",
        manager="mamba-align",
        geometry=Geometry(16, 4, 2, 0, 4, False),
        num_gpu_blocks=32,
        steps=steps,
        family=family,
        predicted={},
    )
    for family, steps in OTHER_FAMILIES.items()
]

#: Estimate and drawn blocks of the last step from 0.31.0; 0.30.0 reserves one more for a hit that
#: ends inside the block that the chunk ends in.
COUNTS = {
    "first": (3, 3),
    "hit-full": (3, 3),
    "hit-partial": (4, 4),
    "external-sync": (3, 4),
    "external-async": (3, 3),
    "promoted": (1, 1),
    "resumed": (3, 3),
    "own-tail": (2, 2),
    "running": (0, 0),
    "drafts": (-1, 0),
}


@pytest.fixture(scope="module")
def drivers(trees: Mapping[str, Path]) -> dict[str, Driver]:
    return {f"vllm=={release}": core_driver(root) for release, root in trees.items()}


def changed(**fields: Any) -> Scenario:
    return dataclasses.replace(LONG_PROMPT, **fields)


@pytest.mark.parametrize(("target", "holds"), [(OLD, False), (NEW, True)])
def test_what_was_predicted_is_reproduced(
    drivers: dict[str, Driver], target: str, holds: bool
) -> None:
    """The real code shows what the model says, for the fault and for its fix."""
    result = replay(LONG_PROMPT, drivers[target], target)

    assert (result.outcome, result.differences) == (Outcome.REPRODUCED, ())
    assert result.theorem_holds is holds
    assert [seen.why for seen in result.steps] == ["already computed", "the rest"]
    assert [seen.table_length_before for seen in result.steps] == [0, 27]
    assert (result.steps[-1].held, result.steps[-1].free) == (5, 1018)


@pytest.mark.parametrize("scenario", SCENARIOS_OF_FAMILIES, ids=lambda scenario: scenario.family)
@pytest.mark.parametrize("target", [OLD, NEW])
def test_a_step_of_every_family_is_replayed(
    drivers: dict[str, Driver], target: str, scenario: Scenario
) -> None:
    """The last step is of the family that the scenario names, and shows the counts of the code."""
    request = drivers[target].request(scenario.geometry, scenario.num_gpu_blocks)
    *_, last = applied(request, scenario.steps)
    result = replay(scenario, drivers[target], target)

    estimate, drawn = COUNTS[scenario.family]
    estimate += target == OLD and scenario.family == "hit-partial"
    step = result.steps[-1].step
    assert family_of(last.situation) == scenario.family
    assert (step.dry_run, step.estimate, step.drawn) == (estimate, estimate, drawn)
    assert ("exact-estimate" in result.violated) is (estimate != drawn)
    assert loads(dumps(scenario), name=scenario.name) == [scenario]


def test_every_family_has_a_step_here() -> None:
    """A family that is added to the catalogue is replayed, too."""
    assert {*OTHER_FAMILIES, LONG_PROMPT.family} == FAMILIES.keys()


def test_a_step_that_cannot_be_brought_about_could_not_be_run(drivers: dict[str, Driver]) -> None:
    """A tail that the release does not cache is no verdict on the step behind it."""
    steps = OTHER_FAMILIES["own-tail"]
    scenario = changed(geometry=Geometry(16, 4, 2, 1, 4, False), steps=steps, predicted={})

    result = replay(scenario, drivers[NEW], NEW)

    assert result.outcome is Outcome.COULD_NOT_RUN
    assert result.detail.endswith("caches the pending checkpoint instead")


def test_a_release_without_positions_says_nothing_of_where_a_checkpoint_is() -> None:
    """0.29.0 keeps a count, from which only whether a checkpoint is pending is known."""
    target = "vllm==0.29.0"
    driver = core_driver(resolve(target).root)
    first = LONG_PROMPT.steps[:1]
    scenario = changed(theorem="checkpoint-recorded", steps=first, predicted={})

    result = replay(scenario, driver, target)

    step = result.steps[-1].step
    assert (step.checkpoint_is_pending, step.checkpoint_position) == (True, None)
    assert result.theorem_holds is None
    assert "checkpoint-recorded" not in result.violated


#: An admission before which the gate is asked about a request of 200 tokens.
ASKING = changed(
    geometry=Geometry(16, 4, 2, 0, 4, False),
    steps=(ScenarioStep("first", Call(40, 40, 0, 0), 199, num_request_tokens=200),),
    family="first",
    theorem="gate-covers-first-step",
    predicted={},
)


@pytest.mark.parametrize("gate", [None, 3, 2])
def test_what_the_gate_is_told_is_compared_where_it_is_predicted(
    drivers: dict[str, Driver], gate: int | None
) -> None:
    """A prediction without it says nothing of it."""
    result = replay(
        dataclasses.replace(ASKING, predicted={NEW: Prediction(3, 3, 3, 5, gate=gate)}),
        drivers[NEW],
        NEW,
    )

    assert result.steps[-1].step.gate == 3
    assert result.theorem_holds is True
    assert result.differences == (("gate: predicted 2, saw 3",) if gate == 2 else ())


def test_a_gate_that_asks_for_less_than_the_step_draws_is_seen(trees: Mapping[str, Path]) -> None:
    """Estimates that leave out all but the first chunk would admit too much."""
    driver = core_driver(trees["0.31.0"])
    estimate = driver.bindings.manager_class.get_num_blocks_to_allocate
    driver.bindings.manager_class.get_num_blocks_to_allocate = lambda self, **arguments: (
        estimate(self, **arguments) - (arguments["num_tokens"] == 200)
    )

    result = replay(ASKING, driver, NEW)

    assert (result.theorem_holds, result.violated) == (False, ("gate-covers-first-step",))


def test_theorems_say_nothing_where_nobody_asked_or_of_other_families(
    drivers: dict[str, Driver],
) -> None:
    """A claim about the gate needs its answer; one about some families is not about others."""
    step = dataclasses.replace(ASKING.steps[0], num_request_tokens=0)
    unasked = dataclasses.replace(ASKING, steps=(step,))
    promoted = dataclasses.replace(
        ASKING, steps=OTHER_FAMILIES["promoted"], theorem="new-columns-returned"
    )

    for scenario in (unasked, promoted):
        result = replay(scenario, drivers[NEW], NEW)
        assert (result.outcome, result.theorem_holds) == (Outcome.NOT_PREDICTED, None)


def test_a_claim_is_not_about_a_step_that_was_put_off() -> None:
    """The deliberate estimate of more than the pool has is no overcount."""
    call = Call(40, 40, 32, 32)
    situation = Situation(Geometry(16, 4, 2, 0, 4, False), call, 0, 200, num_hit_blocks=2)
    step = Step(65, 65, 0, 0, True, deferred=True)

    holds = {
        slug: theorem_holds(slug, situation, step, Pool(64, 0, 0), 3)
        for slug in ("exact-estimate", "bounded-demand", "dry-run-parity")
    }

    assert holds == dict.fromkeys(holds, True)
    put_on = dataclasses.replace(step, deferred=False)
    assert theorem_holds("exact-estimate", situation, put_on, Pool(64, 0, 0), 3) is False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dry_run", 760),
        ("estimate", 762),
        ("drawn", 2),
        ("table_length", 787),
        ("raised", "AssertionError"),
        ("estimate", None),
        ("violates", ("exact-estimate", "no-undercount")),
    ],
)
def test_each_field_of_a_prediction_counts(
    drivers: dict[str, Driver], field: str, value: Any
) -> None:
    """One wrong field is enough to disagree, and it is the one that is listed."""
    wrong = dataclasses.replace(PREDICTED_OLD, **{field: value})

    result = replay(changed(predicted={OLD: wrong}), drivers[OLD], OLD)

    assert result.outcome is Outcome.DISAGREES
    (difference,) = result.differences
    assert difference.startswith("no-undercount" if field == "violates" else f"{field}: ")
    assert result.detail == difference


def test_without_a_prediction_the_steps_and_the_theorem_are_reported(
    drivers: dict[str, Driver],
) -> None:
    """A target that a scenario says nothing about is neither reproduced nor in disagreement."""
    result = replay(LONG_PROMPT, drivers[OLD], "path:elsewhere")

    assert (result.outcome, result.theorem_holds) == (Outcome.NOT_PREDICTED, False)
    assert result.detail == "dry run 761, estimate 761, drawn 3, table 788"


def test_an_earlier_step_that_raises_is_a_disagreement(drivers: dict[str, Driver]) -> None:
    """Steps that make the state are predicted to go through."""
    result = replay(changed(num_gpu_blocks=2), drivers[NEW], NEW)

    assert result.outcome is Outcome.DISAGREES
    assert result.detail == "step 1 (already computed) already raised ValueError"
    assert len(result.steps) == 1


def test_a_theorem_about_the_pool_is_replayed_on_a_pool_that_just_passes(
    drivers: dict[str, Driver],
) -> None:
    """`allocation-succeeds` gets exactly the estimated blocks, other theorems the whole pool."""
    scenario = changed(theorem="allocation-succeeds", num_gpu_blocks=700)

    old, new = (replay(scenario, drivers[target], target) for target in (OLD, NEW))

    assert old.outcome is Outcome.COULD_NOT_RUN
    assert old.detail == "the pool has 697 free blocks, 761 are to be free"
    assert (new.outcome, new.theorem_holds) == (Outcome.REPRODUCED, True)


def test_an_undercount_is_seen_by_the_theorem_about_the_pool(
    trees: Mapping[str, Path],
) -> None:
    """An estimate one block short makes the allocation raise on the pool that passes the check."""
    driver = core_driver(trees["0.31.0"])
    estimate = driver.bindings.manager_class.get_num_blocks_to_allocate
    driver.bindings.manager_class.get_num_blocks_to_allocate = lambda self, **arguments: (
        estimate(self, **arguments) - 1
    )

    result = replay(changed(theorem="allocation-succeeds", predicted={}), driver, NEW)

    assert result.steps[-1].step.raised == "ValueError"
    assert result.theorem_holds is False
    assert "allocation-succeeds" in result.violated


def test_a_tree_that_cannot_be_driven_says_why(tmp_path: Path) -> None:
    """Nothing is learned from a broken tree, and each scenario says so."""
    (result,) = replay_in(tmp_path, "core", [LONG_PROMPT], target=NEW)

    assert result.outcome is Outcome.COULD_NOT_RUN
    assert "no KV-cache core here" in result.detail


def test_a_scenario_out_of_reach_could_not_be_run(drivers: dict[str, Driver]) -> None:
    """A scenario that would fill the memory is not run, which is neither of the other outcomes."""
    result = replay(changed(num_gpu_blocks=2**53), drivers[NEW], NEW)

    assert result.outcome is Outcome.COULD_NOT_RUN


# ---- the process of the vllm tier ---------------------------------------------------------------


def test_a_replay_survives_the_way_between_processes(drivers: dict[str, Driver]) -> None:
    """What a process answers is what was replayed there."""
    result = replay(LONG_PROMPT, drivers[OLD], OLD)

    line = json.dumps(replay_module._to_json(result))

    assert replay_module._from_json(json.loads(line)) == result


def test_the_process_answers_one_line_per_scenario(
    trees: Mapping[str, Path], drivers: dict[str, Driver]
) -> None:
    """The protocol works in either tier, and nothing else reaches its standard output."""
    scenarios = [LONG_PROMPT, changed(name="another", predicted={})]

    options = ["--tier", "core", "--target", OLD, "--root", str(trees["0.30.0"])]
    done = subprocess.run(
        [sys.executable, "-m", "conformance.replay", *options],
        input="".join(json.dumps(to_json(scenario)) + "\n" for scenario in scenarios),
        capture_output=True,
        text=True,
        cwd=PROJECT_ROOT,
    )

    assert done.returncode == 0, done.stderr
    answers = [replay_module._from_json(json.loads(line)) for line in done.stdout.splitlines()]
    assert answers == [replay(scenario, drivers[OLD], OLD) for scenario in scenarios]


def test_a_process_that_cannot_import_vllm_says_why(tmp_path: Path) -> None:
    """Without vLLM, or without torch, each scenario could not be run, with the reason."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("print('noise'); raise ImportError('no such')")

    results = replay_in(tmp_path, "vllm", [LONG_PROMPT, changed(name="another")], target=NEW)

    assert [result.scenario for result in results] == ["long-prompt", "another"]
    for result in results:
        assert result.outcome is Outcome.COULD_NOT_RUN
        assert "Error: " in result.detail
        assert "exit status 2" in result.detail


def test_a_process_that_answers_nothing_in_time_could_not_run(
    trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that hangs is ended, and is no verdict."""
    monkeypatch.setattr(replay_module, "PROCESS_TIMEOUT_S", 0.01)

    (result,) = replay_in(trees["0.31.0"], "vllm", [LONG_PROMPT], target=NEW)

    assert result.outcome is Outcome.COULD_NOT_RUN
    assert "no answer within" in result.detail


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the vllm tier needs torch")
@pytest.mark.parametrize("target", [OLD, NEW])
def test_both_tiers_see_the_same(trees: Mapping[str, Path], target: str) -> None:
    """Placeholders change nothing: real imports show the very same steps."""
    root = trees[target.removeprefix("vllm==")]

    core, vllm = (
        replay_in(
            root,
            tier,
            [LONG_PROMPT, changed(num_gpu_blocks=2), *SCENARIOS_OF_FAMILIES],
            target=target,
        )
        for tier in ("core", "vllm")
    )

    assert core[0].outcome is Outcome.REPRODUCED
    assert vllm == core


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the vllm tier needs torch")
@pytest.mark.parametrize("target", ["vllm==0.24.0", "vllm==0.33.0"])
def test_both_tiers_see_the_same_of_every_family(target: str) -> None:
    """The oldest release and the newest differ most in what the driver calls, in either tier."""
    root = resolve(target).root

    core, vllm = (
        replay_in(root, tier, SCENARIOS_OF_FAMILIES, target=target) for tier in ("core", "vllm")
    )

    assert vllm == core
    could_not = {seen.scenario for seen in core if seen.outcome is Outcome.COULD_NOT_RUN}
    without = {"a-step-of-hit-partial", "a-step-of-own-tail"}
    assert could_not == (without if target == "vllm==0.24.0" else set())


def test_outcomes_have_stable_names() -> None:
    """The names are read by other programs."""
    assert {outcome.value for outcome in Outcome} == {
        "reproduced",
        "disagrees",
        "could-not-run",
        "not-predicted",
    }
    assert Replay("a", NEW, Outcome.REPRODUCED).steps == ()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "vllm tier: ModuleNotFoundError: No module named 'torch'\n",
            "vllm tier: ModuleNotFoundError: No module named 'torch' (exit status 2); "
            "run make setup-test",
        ),
        ("noise\nImportError: no\n", "vllm tier: ImportError: no (exit status 2)"),
        ("", "vllm tier: the process ended without a word (exit status 2)"),
    ],
)
def test_a_process_that_ends_says_why_once_and_what_to_do(said: str, reason: str) -> None:
    """What is missing is named with the command that installs it."""
    assert why_no_answer(said, 2) == reason
