"""Make a scenario smaller that breaks a theorem, with the real manager as the judge.

Greedy and deterministic: candidates come in a fixed order, and the first that is smaller and still
breaks the same theorem, in a step of the same kind, takes the place of the scenario. A candidate
keeps every assumption that the scenario kept, so that it is no counterexample of another world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from conformance.driver import Driver, DriverError
from conformance.reading import MAX_SLUG_LENGTH
from conformance.replay import NEED_EXACT_POOL, theorem_holds
from conformance.scenario import Expect, Scenario, ScenarioError, ScenarioStep, dumps, load, loads
from conformance.steps import Applied, applied
from models import intended
from spec.assumptions import ASSUMPTIONS, OF_GROUPS, OF_SOME_RELEASES, OF_THE_COORDINATOR
from spec.families import (
    checkpoint_column,
    checkpoint_position,
    family_of,
    reserves_checkpoint,
    tags_of,
)
from spec.logic import cdiv
from spec.theorems import OBLIGATIONS, THEOREMS, least_pool
from spec.vocabulary import Call, Geometry, Situation

#: Candidates that are judged at most: a count and not a time, so that machines agree.
MAX_CANDIDATES = 20_000
SOURCE = "shrunk from "

_KEPT = (*ASSUMPTIONS, *OF_SOME_RELEASES, *OF_GROUPS, *OF_THE_COORDINATOR)
_TOKENS_OF_CALL = tuple(item.name for item in fields(Call))
_TOKENS_OF_STEP = ("prefill_length", "num_request_tokens")
_SIZES_OF_STEP = ("num_evictable_attention_hits",)
_AT_LEAST_ONE = (
    "block_size",
    "hash_block_size",
    "prefill_checkpoint_alignment",
    "cache_hit_alignment_tokens",
)
_FLAGS = (
    "hit_is_evictable",
    "hit_is_of_this_step",
    "other_hits_are_evictable",
    "owns_partial_tail",
    "preempted",
)


class NothingToShrink(Exception):
    """The scenario breaks nothing on the target; one line."""


@dataclass(frozen=True)
class Shrunk:
    """A smaller scenario, and what it took."""

    scenario: Scenario
    num_candidates: int
    """Candidates that were judged."""
    is_least: bool
    """Whether no candidate of it is smaller and breaks the theorem; else the count ran out."""


def shrink(scenario: Scenario, driver: Driver, target: str) -> Shrunk:
    """Return a smaller scenario that still breaks the theorem.

    Args:
        scenario: Breaks its theorem on the target.
        driver: Builds the target's real manager.
        target: Name of the target, for objections.

    Raises:
        NothingToShrink: It names no theorem, cannot be run there, or breaks nothing there.
    """
    if scenario.theorem not in THEOREMS:
        raise NothingToShrink(f"{scenario.name}: names no theorem that could be broken")
    judge = _Judge(scenario, driver, target)
    is_least = False
    while not is_least and judge.num_candidates < MAX_CANDIDATES:
        smaller = next(filter(judge.accepts, _candidates(judge.scenario)), None)
        is_least = smaller is None and judge.num_candidates < MAX_CANDIDATES
        if smaller is None:
            break
    name = f"{scenario.name[: MAX_SLUG_LENGTH - 7].rstrip('-')}-shrunk"
    named = replace(judge.scenario, name=name, source=SOURCE + scenario.name, predicted={})
    return Shrunk(named, judge.num_candidates, is_least)


def is_ours(file: Path) -> bool:
    """Return whether a file holds one scenario that `shrink` made."""
    try:
        (scenario,) = load(file)
    except (ScenarioError, ValueError):
        return False
    return scenario.source.startswith(SOURCE)


class _Judge:
    """Accepts candidates that are smaller than the scenario accepted before, and break as much."""

    def __init__(self, scenario: Scenario, driver: Driver, target: str) -> None:
        self.scenario = scenario
        self.num_candidates = 0
        self._driver = driver
        self._slug = scenario.theorem or ""
        steps = self._broken(scenario)
        if steps is None:
            raise NothingToShrink(f"{scenario.name}: {self._slug} is not broken on {target}")
        self._kind = _kind(steps[-1].situation)
        self._kept = [one for one in _KEPT if _keeps(one.holds, steps)]
        self.scenario = _described(scenario, steps)

    def accepts(self, candidate: Scenario) -> bool:
        """Whether a candidate takes the scenario's place; if so it does."""
        if self.num_candidates >= MAX_CANDIDATES:
            return False
        self.num_candidates += 1
        try:
            (candidate,) = loads(dumps(candidate), name="candidate")
        except ScenarioError:
            return False
        if _size(candidate) >= _size(self.scenario):
            return False
        steps = self._broken(candidate)
        if steps is None or _kind(steps[-1].situation) != self._kind:
            return False
        if not all(_keeps(one.holds, steps) for one in self._kept):
            return False
        self.scenario = _described(candidate, steps)
        return True

    def _broken(self, scenario: Scenario) -> list[Applied] | None:
        """The steps on the real manager, None where the last does not break the theorem."""
        try:
            request = self._driver.request(
                scenario.geometry, scenario.num_gpu_blocks, scenario.num_mamba_groups
            )
            steps = list(
                applied(
                    request,
                    scenario.steps,
                    exactly_the_estimate=self._slug in NEED_EXACT_POOL,
                    reserved_blocks=NEED_EXACT_POOL.get(self._slug, 0),
                    watch_dry_run=self._slug == "dry-run-pure",
                )
            )
        except DriverError:
            return None
        if request.exception is None:
            request.finish()
        if len(steps) < len(scenario.steps):
            return None
        situation, step = steps[-1].situation, steps[-1].step
        pool, need = least_pool(THEOREMS[self._slug], step), intended.need(situation)
        is_broken = theorem_holds(self._slug, situation, step, pool, need) is False
        return steps if is_broken else None


def _keeps(holds: Callable[[Situation], Any], steps: list[Applied]) -> bool:
    return all(bool(holds(step.situation)) for step in steps)


def _kind(situation: Situation) -> tuple[str, tuple[str, ...]]:
    """Family and the tags that obligations tell apart: another kind would be another fault."""
    family = family_of(situation)
    told_apart = {tag for slug, tags in OBLIGATIONS if slug == family for tag in tags}
    return family, tuple(tag for tag in tags_of(situation) if tag in told_apart)


def _described(scenario: Scenario, steps: list[Applied]) -> Scenario:
    """The scenario with the intended model's expectations, and the family of its last step."""
    planned, to_retire = [], -1
    for step, seen in zip(scenario.steps, steps, strict=True):
        situation = seen.situation
        lost = -1 if situation.preempted else to_retire
        to_retire = intended.column_to_retire(situation, lost)
        checkpoint = (checkpoint_position(situation), checkpoint_column(situation))
        expect = Expect(
            need=intended.need(situation),
            table_length=intended.table_length(situation),
            checkpoint=checkpoint if reserves_checkpoint(situation) else None,
            column_to_retire=to_retire,
        )
        planned.append(replace(step, expect=expect))
    last = steps[-1].situation
    return replace(scenario, steps=tuple(planned), family=family_of(last), tags=tags_of(last))


# ---- what is smaller -----------------------------------------------------------------------------


def _size(scenario: Scenario) -> tuple[int, ...]:
    """What is compared, the first number first: no list of smaller ones goes on for ever."""
    geometry, steps = scenario.geometry, scenario.steps
    tokens = [value for step in steps for value in _tokens(step)]
    others = [int(getattr(step, name)) for step in steps for name in (*_SIZES_OF_STEP, *_FLAGS)]
    return (
        len(steps),
        max(tokens),
        scenario.num_mamba_groups,
        *(int(getattr(geometry, item.name)) for item in fields(Geometry)),
        sum(tokens),
        sum(others),
        scenario.num_gpu_blocks,
    )


def _tokens(step: ScenarioStep) -> list[int]:
    of_call = [getattr(step.call, name) for name in _TOKENS_OF_CALL]
    return of_call + [getattr(step, name) for name in _TOKENS_OF_STEP]


# ---- candidates ----------------------------------------------------------------------------------


def _candidates(scenario: Scenario) -> Iterator[Scenario]:
    yield from _without_a_step(scenario)
    yield from _scaled(scenario)
    yield from _with_fewer_tokens(scenario)
    yield from _with_smaller_sizes(scenario)
    yield from _with_smaller_fields(scenario)
    for num_blocks in _below(scenario.num_gpu_blocks, _roomy(scenario)):
        yield replace(scenario, num_gpu_blocks=num_blocks)


def _roomy(scenario: Scenario) -> int:
    """Blocks of a pool in which other releases have room for the same steps, too."""
    geometry, num_groups = scenario.geometry, 1 + scenario.num_mamba_groups
    most = max(value for step in scenario.steps for value in _tokens(step))
    columns: int = cdiv(most, geometry.block_size) + geometry.num_speculative_blocks + 2
    return 16 + 2 * num_groups * columns


def _below(value: int, least: int) -> Iterator[int]:
    """Smaller values, the smallest first and the nearest last."""
    distance = value - least
    while distance > 0:
        yield value - distance
        distance //= 2


def _without_a_step(scenario: Scenario) -> Iterator[Scenario]:
    for i in range(len(scenario.steps) - 1):
        yield replace(scenario, steps=scenario.steps[:i] + scenario.steps[i + 1 :])


def _scaled(scenario: Scenario) -> Iterator[Scenario]:
    """All tokens in proportion to a smaller block."""
    geometry = scenario.geometry
    for block_size in _below(geometry.block_size, 1):
        scale = _scale(geometry.block_size, block_size)
        hash_size = scale(geometry.hash_block_size, 0)
        while block_size % hash_size:
            hash_size -= 1
        is_usual = geometry.cache_hit_alignment_tokens == geometry.hash_block_size
        alignment = scale(geometry.cache_hit_alignment_tokens, 0)
        sizes = replace(
            geometry,
            block_size=block_size,
            hash_block_size=hash_size,
            prefill_checkpoint_alignment=scale(geometry.prefill_checkpoint_alignment, 0),
            cache_hit_alignment_tokens=hash_size if is_usual else alignment,
        )
        yield _mapped(replace(scenario, geometry=sizes), scenario, scale)


def _with_fewer_tokens(scenario: Scenario) -> Iterator[Scenario]:
    """All positions from one on moved down, or one of them alone."""
    positions = sorted({value for step in scenario.steps for value in _tokens(step)} - {0})
    for before, position in zip([0, *positions], positions, strict=False):
        for smaller in _below(position, before):
            yield _mapped(scenario, scenario, _from_on(position, position - smaller))
        for smaller in _below(position, 0):
            yield _mapped(scenario, scenario, {position: smaller}.get)


def _from_on(position: int, distance: int) -> Callable[[int, int], int]:
    return lambda value, unmoved: value - distance if value >= position else unmoved


def _scale(old: int, new: int) -> Callable[[int, int], int]:
    return lambda value, unmoved: cdiv(value * new, old)


def _mapped(
    made: Scenario, original: Scenario, moved: Callable[[int, int], int | None]
) -> Scenario:
    """The scenario with all its positions moved; what follows from them follows."""
    old, new = original.geometry.block_size, made.geometry.block_size
    steps = []
    for step in made.steps:
        tokens = [getattr(step.call, name) for name in _TOKENS_OF_CALL]
        call = Call(*(moved(value, value) for value in tokens))
        lengths = {name: getattr(step, name) for name in _TOKENS_OF_STEP}
        others: dict[str, Any] = {name: moved(value, value) for name, value in lengths.items()}
        local, columns = call.num_local_computed_tokens, step.num_hit_blocks
        if columns == cdiv(step.call.num_local_computed_tokens, old):
            columns = cdiv(local, new)
        if step.num_external_tokens:
            others["num_external_tokens"] = max(call.total_computed_tokens - local, 0)
        if step.num_hit_blocks:
            others["num_hit_blocks"] = columns
        steps.append(replace(step, call=call, **others))
    return replace(made, steps=tuple(steps))


def _with_smaller_sizes(scenario: Scenario) -> Iterator[Scenario]:
    geometry = scenario.geometry
    for num_groups in _below(scenario.num_mamba_groups, 1):
        yield replace(scenario, num_mamba_groups=num_groups)
    for item in fields(Geometry):
        value = getattr(geometry, item.name)
        for smaller in _below(int(value), int(item.name in _AT_LEAST_ONE)):
            sizes = replace(geometry, **{item.name: type(value)(smaller)})
            if item.name == "hash_block_size" and (
                geometry.cache_hit_alignment_tokens == geometry.hash_block_size
            ):
                sizes = replace(sizes, cache_hit_alignment_tokens=smaller)
            yield replace(scenario, geometry=sizes)


def _with_smaller_fields(scenario: Scenario) -> Iterator[Scenario]:
    """One field of one step."""
    for i, step in enumerate(scenario.steps):
        for name in ("num_request_tokens", *_SIZES_OF_STEP, *_FLAGS):
            value = getattr(step, name)
            for smaller in _below(int(value), 0):
                yield _with_step(scenario, i, replace(step, **{name: type(value)(smaller)}))
        for name in ("num_tokens", "prefill_end"):
            for smaller in _below(getattr(step.call, name), 0):
                call = replace(step.call, **{name: smaller})
                yield _with_step(scenario, i, replace(step, call=call))


def _with_step(scenario: Scenario, i: int, step: ScenarioStep) -> Scenario:
    return replace(scenario, steps=(*scenario.steps[:i], step, *scenario.steps[i + 1 :]))
