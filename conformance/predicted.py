"""Make the scenario of a request: expected by the intended model, predicted by the lifted code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformance.expectations import suite_of
from conformance.made_request import Request
from conformance.scenario import Expect, Prediction, Scenario, ScenarioStep
from models import intended
from models.predict import LiftedTree, obligation_of, violated
from models.traits import Traits
from spec.families import (
    checkpoint_column,
    checkpoint_position,
    family_of,
    reserves_checkpoint,
    tags_of,
)
from spec.logic import cdiv
from spec.theorems import ABOUT_HELD, manager_of
from spec.vocabulary import Situation, Step

#: Blocks in a scenario's pool beyond what estimate and steps can take.
SPARE_BLOCKS = 8


def scenario_of(
    request: Request,
    *,
    trees: Mapping[str, LiftedTree],
    source: str,
    name: str | None = None,
    theorem: str | None = None,
) -> Scenario:
    """Return the scenario of a request, with what its last step is predicted to do."""
    situations = list(request.situations())
    last = situations[-1]
    predicted = {}
    for target, tree in trees.items():
        checkpoint_before = len(situations) > 1 and bool(reserves_checkpoint(situations[-2]))
        before = {
            "checkpoint_before": checkpoint_before,
            "column_to_retire_before": _to_retire_after(situations[:-1]),
        }
        step = tree.predict(last, **before)
        if step is None:
            continue
        prediction = _prediction(last, step, tree.traits, theorem)
        if last.num_in_flight_tokens:
            prediction = replace(prediction, violates=tree.broken_removals(last, **before))
        predicted[target] = prediction
    return Scenario(
        name=name or request.name,
        manager=manager_of(last),
        num_mamba_groups=request.num_mamba_groups,
        geometry=request.geometry,
        num_gpu_blocks=_pool_size(situations, predicted.values()),
        steps=tuple(_steps(situations)),
        family=obligation_of(last)[0],
        tags=tags_of(last),
        theorem=theorem,
        source=source,
        predicted=predicted,
    )


def _prediction(
    situation: Situation, step: Step, traits: Traits, theorem: str | None
) -> Prediction:
    held = ("held_before", "held", "reserved_at_startup") if theorem in ABOUT_HELD else ()
    # vLLM: what is put off is told one block more than the pool has, however large.
    is_put_off = bool(step.deferred | step.refused)
    return Prediction(
        dry_run=None if is_put_off else step.dry_run,
        estimate=None if is_put_off else step.estimate,
        drawn=step.drawn,
        table_length=step.table_length,
        raised=step.raised,
        gate=step.gate if situation.num_request_tokens else None,
        violates=violated(situation, step, traits),
        deferred=is_put_off,
        **{name: getattr(step, name) for name in held if step.raised is None},
    )


def _steps(situations: Sequence[Situation]) -> Iterator[ScenarioStep]:
    for number, situation in enumerate(situations, start=1):
        yield _step(situation, _to_retire_after(situations[:number]))


def _to_retire_after(situations: Iterable[Situation]) -> int:
    """Column that is recorded as the next to free after these steps; -1 is none."""
    to_retire = -1
    for situation in situations:
        lost = -1 if situation.preempted else to_retire
        to_retire = intended.column_to_retire(situation, lost)
    return to_retire


def _step(situation: Situation, column_to_retire: int) -> ScenarioStep:
    return ScenarioStep(
        why=_why(situation),
        call=situation.call,
        prefill_length=situation.prefill_length,
        expect=Expect(
            need=intended.need(situation),
            table_length=intended.table_length(situation),
            checkpoint=(
                (checkpoint_position(situation), checkpoint_column(situation))
                if reserves_checkpoint(situation)
                else None
            ),
            column_to_retire=column_to_retire,
        ),
        num_request_tokens=0 if situation.table_length else situation.num_request_tokens,
        **{name: getattr(situation, name) for name in _OF_THE_STEP},
    )


#: Fields that a situation and a scenario's step share.
_OF_THE_STEP = (
    "num_hit_blocks",
    "hit_is_evictable",
    "hit_is_of_this_step",
    "num_external_tokens",
    "loads_asynchronously",
    "preempted",
    "owns_partial_tail",
    "num_evictable_attention_hits",
    "other_hits_are_evictable",
    "num_in_flight_tokens",
)
_WHY = {
    "first": "admission of the first chunk",
    "hit-full": "admission with a local hit that ends on a block boundary",
    "hit-partial": "admission with a local hit that ends inside a block",
    "external-sync": "admission with external tokens",
    "external-async": "parked while external tokens are loaded",
    "resumed": "admission after a preemption",
    "promoted": "the first computed step of a parked request",
    "own-tail": "a step that writes into the request's own cached tail",
    "running": "a prefill chunk",
    "checkpoint": "a prefill chunk",
    "drafts": "a decoding step",
}


def _why(situation: Situation) -> str:
    family = family_of(situation)
    keeps = " that keeps an internal checkpoint" if reserves_checkpoint(situation) else ""
    return _WHY[family] + (keeps if family != "first" else "")


def _pool_size(situations: Sequence[Situation], predictions: Iterable[Prediction]) -> int:
    """A pool large enough for anything: for the estimates, and for all that the steps draw."""
    most = max((abs(p.estimate or 0) for p in predictions), default=0)
    first, last = situations[0], situations[-1]
    per_step = 4 + first.geometry.num_speculative_blocks
    attention = cdiv(last.call.num_tokens, last.geometry.block_size) if last.num_mamba_groups else 0
    groups = max(last.num_mamba_groups, 1)
    return most + groups * per_step * len(situations) + attention + SPARE_BLOCKS


def by_suite(scenarios: Iterable[Scenario]) -> dict[str, list[Scenario]]:
    """Return scenarios by suite, sorted by size, without steps that no target can be asked."""
    kept = sorted((s for s in scenarios if s.predicted), key=_size)
    return {suite: list(group) for suite, group in itertools.groupby(kept, _suite)}


def _suite(scenario: Scenario) -> str:
    return suite_of(scenario.manager, scenario.family)


def _size(scenario: Scenario) -> tuple[Any, ...]:
    geometry, steps = scenario.geometry, scenario.steps
    sizes = tuple(int(value) for value in vars(geometry).values())
    return _suite(scenario), sizes, tuple(step.call.num_tokens for step in steps), scenario.name
