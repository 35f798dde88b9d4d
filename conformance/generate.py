"""Make scenarios: a witness per refutation, each feasible path, the edges of each, public cases.

Every scenario is one request admitted with its first chunk and taken on by the next ones; the last
chunk is the step under test. Expected numbers come from the intended model, predictions from the
lifted code.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.cases import Case
from conformance.expectations import suite_of
from conformance.reading import MAX_SLUG_LENGTH
from conformance.scenario import Expect, Prediction, Scenario, ScenarioStep
from models import intended, smt, term
from models.evaluate import Evaluator
from models.lift import Exploration, PathSummary, Variant, variants_of
from models.predict import LiftedTree, after, obligation_of, violated
from models.prove import (
    Counterexample,
    Obligation,
    Prover,
    explorations_for,
    in_numbers,
)
from models.term import BoolLike, IntLike
from models.traits import Traits
from spec.assumptions import MAMBA_GROUPS, SPECULATIVE_BLOCKS
from spec.families import (
    checkpoint_column,
    checkpoint_position,
    family_of,
    is_overwide,
    reserves_checkpoint,
    tags_of,
    waits_for_hit,
)
from spec.logic import cdiv, choose, count, negation
from spec.states import column_just_read, column_of_last_ended_token, running_column
from spec.theorems import ABOUT_HELD, THEOREMS, manager_of
from spec.vocabulary import Call, Geometry, Situation, Step

#: The longest prompt that edges go up to, in tokens: vLLM #57050's `--max-model-len`.
MAX_TOKENS = 1_048_576
#: Sizes at which the edges of a path are taken, in tokens: those of the stall in CASES 57050.
EDGE_SIZES = {"block_size": 16, "hash_block_size": 4, "prefill_checkpoint_alignment": 4}
#: Sizes of a model in production, in tokens: those of vLLM #57050.
PRODUCTION_SIZES = {
    "block_size": 896,
    "hash_block_size": 128,
    "prefill_checkpoint_alignment": 64,
}
#: Blocks in a scenario's pool beyond what estimate and steps can take.
SPARE_BLOCKS = 8
#: What a canonical scenario makes least, the first one first.
_ORDER = (
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "hit_is_evictable",
    "other_hits_are_evictable",
    "num_evictable_attention_hits",
    "num_blocks_per_hit_unit",
    "num_tokens_behind_checkpoint",
    "prefill_end",
    "num_excess_columns",
    "num_excess_attention_columns",
    "num_external_tokens",
    "num_hit_blocks",
    "num_local_computed_tokens",
    "num_computed_tokens",
    "num_tokens_main_model",
    "num_tokens",
    "prefill_length",
    "num_request_tokens",
    "num_in_flight_tokens",
    "num_just_ended_tokens",
)
#: The same for a scenario that no size is given for.
_SIZES_FIRST = ("block_size", "hash_block_size", "prefill_checkpoint_alignment", *_ORDER)
#: The same for the longest prompt.
_LONGEST = (
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "hit_is_evictable",
    "other_hits_are_evictable",
    "num_evictable_attention_hits",
    "num_blocks_per_hit_unit",
    "num_tokens_behind_checkpoint",
    "tokens_left",
    "prefill_end",
    "num_excess_columns",
    "num_excess_attention_columns",
    "num_external_tokens",
    "num_hit_blocks",
    "num_local_computed_tokens",
    "num_computed_tokens",
    "prefill_length",
    "num_request_tokens",
)


@dataclass(frozen=True)
class Origin:
    """Where a request's first blocks come from, in tokens unless said otherwise."""

    num_local_tokens: int = 0
    """Tokens of the local hit."""
    num_hit_blocks: int = 0
    """Blocks of the local hit in this group."""
    hit_is_evictable: bool = False
    hit_is_of_this_step: bool = False
    num_evictable_attention_hits: int = 0
    other_hits_are_evictable: bool = False
    num_external_tokens: int = 0
    loads_asynchronously: bool = False
    preempted: bool = False
    """Whether the request had blocks before, and lost them."""

    @property
    def name(self) -> str:
        """A part of a slug."""
        parts = ["preempted"] if self.preempted else []
        if self.num_local_tokens:
            parts.append(f"hit-{self.num_local_tokens}-in-{self.num_hit_blocks}")
        parts += ["evictable"] if self.hit_is_evictable else []
        parts += ["of-this-step"] if self.hit_is_of_this_step else []
        parts += ["others-evictable"] if self.other_hits_are_evictable else []
        if self.num_evictable_attention_hits:
            parts.append(f"attention-evictable-{self.num_evictable_attention_hits}")
        if self.num_external_tokens:
            parts.append("async" if self.loads_asynchronously else "sync")
            parts.append(str(self.num_external_tokens))
        return "-".join(parts)


@dataclass(frozen=True)
class Request:
    """A request in numbers: all that a scenario is made from."""

    geometry: Geometry
    chunks: tuple[int, ...]
    """Tokens that have a slot after each step; the last one is under test."""
    lookahead: int = 0
    """Tokens of lookahead in the last step."""
    prefill_length: int = 0
    """Tokens to prefill; 0 is the last of `chunks`."""
    is_sparse: bool = False
    origin: Origin = Origin()
    num_computed_tokens: int = 0
    """Tokens computed before the last step, where fewer than had a slot; 0 is all of them."""
    owns_partial_tail: bool = False
    """Whether the last step finds the request's own partial tail cached."""
    num_request_tokens: int = 0
    """Tokens that the full-sequence gate is asked about before the request is admitted; 0: it is
    not."""
    num_mamba_groups: int = 0
    """Mamba groups beside a full-attention group; 0 is one Mamba manager by itself."""
    has_step_in_flight: bool = False
    """Whether each step behind the first is scheduled while the one before it has not ended."""

    def situations(self) -> Iterator[Situation]:
        """Yield what decides the family of each step."""
        length = self.prefill_length or self.chunks[-1]
        end_of_prefill = length if self.is_sparse else 0
        if self.origin.preempted:
            call = Call(1, 1, 0, 0, end_of_prefill)
            yield Situation(
                self.geometry,
                call,
                table_length=0,
                prefill_length=length,
                num_mamba_groups=self.num_mamba_groups,
            )
        situation = self._admission(length, end_of_prefill)
        sizes = [end - start for start, end in itertools.pairwise((0, *self.chunks))]
        for i, end in enumerate(self.chunks):
            if i:
                situation = after(situation, num_tokens=end, prefill_length=length)
            if i and self.has_step_in_flight:
                just_ended = sizes[i - 2] if i > 1 else 0
                situation = replace(
                    situation,
                    num_in_flight_tokens=sizes[i - 1],
                    num_just_ended_tokens=just_ended,
                )
            yield self._under_test(situation) if i == len(self.chunks) - 1 else situation

    def _admission(self, length: int, end_of_prefill: int) -> Situation:
        origin, end = self.origin, self.chunks[0]
        computed = origin.num_local_tokens + origin.num_external_tokens
        return Situation(
            geometry=self.geometry,
            call=Call(end, end, computed, origin.num_local_tokens, end_of_prefill),
            table_length=0,
            prefill_length=length,
            num_hit_blocks=origin.num_hit_blocks,
            hit_is_evictable=origin.hit_is_evictable,
            hit_is_of_this_step=origin.hit_is_of_this_step,
            num_evictable_attention_hits=origin.num_evictable_attention_hits,
            other_hits_are_evictable=origin.other_hits_are_evictable,
            num_external_tokens=origin.num_external_tokens,
            loads_asynchronously=origin.loads_asynchronously,
            preempted=origin.preempted,
            num_request_tokens=self.num_request_tokens,
            num_mamba_groups=self.num_mamba_groups,
        )

    def _under_test(self, situation: Situation) -> Situation:
        call = situation.call
        call = replace(call, num_tokens=call.num_tokens + self.lookahead)
        if self.num_computed_tokens:
            call = replace(
                call,
                total_computed_tokens=self.num_computed_tokens,
                num_local_computed_tokens=self.num_computed_tokens,
            )
        return replace(situation, call=call, owns_partial_tail=self.owns_partial_tail)

    @property
    def name(self) -> str:
        """A slug that tells the request."""
        g = self.geometry
        parts = [f"groups-{1 + self.num_mamba_groups}"] if self.num_mamba_groups else []
        parts.append(f"b{g.block_size}-h{g.hash_block_size}-s{g.num_speculative_blocks}")
        parts.append(f"k{g.num_prefill_checkpoint_blocks}-a{g.prefill_checkpoint_alignment}")
        if g.cache_hit_alignment_tokens != g.hash_block_size:
            parts.append(f"u{g.cache_hit_alignment_tokens}")
        if g.num_tokens_behind_checkpoint != 1:
            parts.append(f"behind-{g.num_tokens_behind_checkpoint}")
        parts += ["eagle"] if g.drop_eagle_checkpoint_block else []
        parts += [self.origin.name] if self.origin.name else []
        parts.append("tokens-" + "-".join(map(str, self.chunks)))
        parts += [f"back-to-{self.num_computed_tokens}"] if self.num_computed_tokens else []
        parts += ["in-flight"] if self.has_step_in_flight else []
        parts += ["own-tail"] if self.owns_partial_tail else []
        parts += [f"lookahead-{self.lookahead}"] if self.lookahead else []
        length = self.prefill_length or self.chunks[-1]
        kind = "sparse" if self.is_sparse else "of"
        parts += [f"{kind}-{length}"] if self.is_sparse or length != self.chunks[-1] else []
        parts += [f"gate-{self.num_request_tokens}"] if self.num_request_tokens else []
        return "-".join(parts)


def request_of(situation: Situation) -> Request:
    """Return the request that gets into a situation of numbers in the fewest steps.

    Under dense retention nothing asks where the prefill ends; the last chunk then ends it, unless
    the step lies behind it.
    """
    call = situation.call
    is_sparse = call.prefill_end > 0
    decodes, asks_gate = family_of(situation) == "drafts", situation.num_request_tokens > 0
    make = _with_table if situation.table_length else _admitted
    return replace(
        make(situation),
        geometry=_with_hash_unit(situation),
        lookahead=call.num_tokens - call.num_tokens_main_model,
        prefill_length=situation.prefill_length if is_sparse or decodes or asks_gate else 0,
        is_sparse=is_sparse,
        num_request_tokens=situation.num_request_tokens,
        num_mamba_groups=situation.num_mamba_groups,
    )


def _admitted(situation: Situation) -> Request:
    origin = Origin(
        situation.call.num_local_computed_tokens,
        situation.num_hit_blocks,
        bool(situation.hit_is_evictable) and situation.num_hit_blocks > 0,
        bool(waits_for_hit(situation)),
        situation.num_evictable_attention_hits,
        bool(situation.other_hits_are_evictable) and situation.num_hit_blocks > 0,
        situation.num_external_tokens,
        situation.loads_asynchronously,
        situation.preempted,
    )
    return Request(situation.geometry, (situation.call.num_tokens_main_model,), origin=origin)


def _with_table(situation: Situation) -> Request:
    """One step gives the table its length, and where that is too long, tokens are taken back."""
    geometry, call = situation.geometry, situation.call
    if situation.num_just_ended_tokens:
        return _in_chunks(situation)
    computed = covered = call.total_computed_tokens
    if is_overwide(situation):
        columns = situation.table_length - geometry.num_speculative_blocks
        covered = (columns - 1) * geometry.block_size + 1
    loaded = (covered - 1) // geometry.block_size * geometry.block_size + 1
    origin = Origin(
        num_external_tokens=loaded if situation.was_parked else covered, loads_asynchronously=True
    )
    if situation.was_parked:  # loaded up to the first token of its last column, then computed
        return Request(
            geometry,
            (loaded, covered, call.num_tokens_main_model),
            origin=origin,
            num_computed_tokens=computed if covered != computed else 0,
            owns_partial_tail=situation.owns_partial_tail,
        )
    # A tail lies in a block of its own, which the step that made the table longer left behind.
    has_both = situation.owns_partial_tail and covered != computed
    return Request(
        geometry,
        (*((computed,) if has_both else ()), covered, call.num_tokens_main_model),
        origin=origin if situation.parked else Origin(),
        num_computed_tokens=computed if covered != computed else 0,
        owns_partial_tail=situation.owns_partial_tail,
    )


def _in_chunks(situation: Situation) -> Request:
    """A chunk, the one that has just ended, the one in flight if there is one, and the step."""
    call, in_flight = situation.call, situation.num_in_flight_tokens
    ended = call.total_computed_tokens - in_flight
    ends = (ended, call.total_computed_tokens) if in_flight else (ended,)
    chunks = (ended - situation.num_just_ended_tokens, *ends, call.num_tokens_main_model)
    return Request(situation.geometry, chunks, has_step_in_flight=in_flight > 0)


def _with_hash_unit(situation: Situation) -> Geometry:
    """Sizes in which the hit, or the own tail, ends at a hash unit, as it does for real.

    Without checkpoint blocks nothing that is estimated depends on the unit.
    """
    geometry, call = situation.geometry, situation.call
    ends = call.total_computed_tokens if situation.owns_partial_tail else 0
    # Where the Mamba groups found nothing, full attention may have.
    is_admission = situation.table_length == 0
    has_hit = situation.num_hit_blocks or (situation.num_mamba_groups and is_admission)
    ends = ends or (call.num_local_computed_tokens if has_hit else 0)
    if ends % geometry.hash_block_size == 0 or geometry.num_prefill_checkpoint_blocks:
        return geometry
    unit = math.gcd(ends, geometry.block_size)
    return replace(geometry, hash_block_size=unit, cache_hit_alignment_tokens=unit)


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


# ---- where requests come from --------------------------------------------------------------------


def refutation(
    target: str,
    obligation: Obligation,
    counterexample: Counterexample,
    trees: Mapping[str, LiftedTree],
) -> Scenario:
    """Return a counterexample as a scenario that names the theorem it refutes.

    Where the state that the counterexample starts from has more to it than two chunks bring about,
    such as a checkpoint left pending or a hit that ends inside a hash unit, the least one that they
    do bring about is taken instead.
    """
    where = _where(obligation)

    def scenario(situation: Situation) -> Scenario:
        return scenario_of(
            request_of(situation),
            trees=trees,
            source=f"least counterexample of {obligation.theorem} in {where} for {target}",
            name=_name(f"{obligation.theorem}-{where}", target),
            theorem=obligation.theorem,
        )

    found = scenario(counterexample.situation)
    begins = replace(counterexample.situation, geometry=found.geometry)
    if not (_shows(found, target) and _ends_at_hash_unit(begins)):
        reachable = _least_reachable(obligation, trees[target])
        if reachable is not None:
            return scenario(reachable)
    return found


def _where(obligation: Obligation) -> str:
    of_groups = () if obligation.manager == "mamba-align" else (obligation.manager,)
    return "-".join((*of_groups, obligation.family, *obligation.tags))


def _shows(scenario: Scenario, target: str) -> bool:
    prediction = (scenario.predicted or {}).get(target)
    return prediction is not None and scenario.theorem in prediction.violates


def _least_reachable(obligation: Obligation, tree: LiftedTree) -> Situation | None:
    for exploration in _explorations_of(obligation, tree):
        violation = Prover(exploration).violation(THEOREMS[obligation.theorem])
        question = smt.Question()
        question.add(*exploration.assumptions.values(), violation)
        if _is_left_by_chunks(exploration.situation):
            question.add(_is_reached_by_chunks(exploration, [*question.cells("block_table")]))
        else:
            question.add(_is_reached(exploration))
        found = question.ask()
        if found.answer is smt.Answer.SAT:
            values = question.minimize(found.values, _variables(_SIZES_FIRST))
            return in_numbers(exploration.situation, Evaluator(values))
    return None


def _explorations_of(obligation: Obligation, tree: LiftedTree) -> Iterable[Exploration]:
    theorem = THEOREMS[obligation.theorem]
    kind = obligation.manager, obligation.family, obligation.tags
    return explorations_for(tree, *kind, theorem)


def refutation_at_production_sizes(
    target: str, obligation: Obligation, trees: Mapping[str, LiftedTree]
) -> Scenario | None:
    """Return the longest prompt that breaks a refuted theorem at sizes that people run.

    None where the theorem is not refuted at these sizes.
    """
    theorem = THEOREMS[obligation.theorem]
    for exploration in _explorations_of(obligation, trees[target]):
        question = smt.Question()
        question.add(*exploration.assumptions.values(), Prover(exploration).violation(theorem))
        question.add(*_of_sizes(exploration, PRODUCTION_SIZES), *_within_limit(exploration))
        question.add(_is_reached(exploration))
        found = question.ask()
        if found.answer is smt.Answer.SAT:
            values = question.minimize(found.values, _variables(_LONGEST))
            where = _where(obligation)
            return scenario_of(
                _request(exploration, values),
                trees=trees,
                source=f"longest prompt that breaks {obligation.theorem} in {where} for {target} "
                "at production sizes",
                name=_name(f"{obligation.theorem}-{where}-at-production-sizes", target),
                theorem=obligation.theorem,
            )
    return None


def request_in(scenario: Scenario) -> Request:
    """Return the request that a scenario of ours was made from."""
    *before, last = scenario.steps
    if last.preempted:
        before = []
    first, call = (before or [last])[0], last.call
    is_sparse, decodes = call.prefill_end > 0, last.prefill_length < call.num_tokens_main_model
    asks_gate = first.num_request_tokens > 0
    covered = before[-1].call.num_tokens_main_model if before else 0
    computed = call.total_computed_tokens if before else 0
    return Request(
        scenario.geometry,
        tuple(step.call.num_tokens_main_model for step in (*before, last)),
        lookahead=call.num_tokens - call.num_tokens_main_model,
        prefill_length=last.prefill_length if is_sparse or decodes or asks_gate else 0,
        is_sparse=is_sparse,
        origin=Origin(
            first.call.num_local_computed_tokens,
            first.num_hit_blocks,
            first.hit_is_evictable,
            first.hit_is_of_this_step,
            first.num_evictable_attention_hits,
            first.other_hits_are_evictable,
            first.num_external_tokens,
            first.loads_asynchronously,
            last.preempted,
        ),
        num_computed_tokens=computed if computed != covered else 0,
        owns_partial_tail=last.owns_partial_tail,
        num_request_tokens=first.num_request_tokens,
        num_mamba_groups=scenario.num_mamba_groups,
        has_step_in_flight=last.num_in_flight_tokens > 0,
    )


def _name(what: str, target: str) -> str:
    """Lower-case letters, digits and single hyphens, no longer than a name may be.

    Releases differ in these; of other targets, which may not, a digest keeps them apart.
    """
    slug = re.sub("[^a-z0-9]+", "-", f"{what}-{target}".lower()).strip("-")
    if target.startswith("vllm=="):
        return slug
    digest = hashlib.sha256(target.encode()).hexdigest()[:8]
    return f"{slug[: MAX_SLUG_LENGTH - 9].strip('-')}-{digest}"


def paths_and_edges(
    target: str, tree: LiftedTree, kinds: Iterable[tuple[str, tuple[str, ...]]]
) -> dict[Request, str]:
    """Return a request for each feasible path of kinds of step and for its edges, with sources.

    Where a coordinator adds up groups, the paths are those of one Mamba group, and of two where
    they differ: in what references a hit.

    What a setting changes is where a checkpoint lies, so others than the plain one are taken for
    the kinds of step of `_IN_ALL_SETTINGS` only. Edges are those of the families of
    `_WITH_EDGES`, in the plain setting, for tables as long as required. Of paths that differ in how
    many speculative blocks are moved, some stand for all (`_SPECULATIVE_BLOCKS`), but in those
    families.

    Nothing about a step that is put off depends on its numbers, so its path has no edges, and of
    the coordinator the same request is asked.
    """
    found: dict[Request, str] = {}

    def take(exploration: Exploration, where: str, *, with_edges: bool) -> None:
        for number, path in enumerate(exploration.paths, start=1):
            if path.step.refused is not True and path.step.deferred is not True:
                for request, edge in of_path(exploration, path, with_edges=with_edges):
                    found.setdefault(request, f"{edge} of path {number} of {where}")

    def take_put_off(exploration: Exploration, where: str) -> None:
        for number, path in enumerate(exploration.paths, start=1):
            if path.step.deferred is True:
                for request, edge in of_path(exploration, path, with_edges=False):
                    for groups in (0, MAMBA_GROUPS[0]):
                        of_groups = replace(request, num_mamba_groups=groups)
                        found.setdefault(of_groups, f"{edge} of path {number} of {where}")

    for family, tags in kinds:
        for variant in variants_of(tree.traits, family):
            is_plain = variant == Variant()
            if not is_plain and (family, tags) not in _IN_ALL_SETTINGS:
                continue
            with_edges = is_plain and family in _WITH_EDGES and "overwide" not in tags
            where = f"{'-'.join((family, *tags))} in {target}"
            exploration = tree.exploration(family, tags, variant)
            take(exploration, f"{where}{_setting(variant)}", with_edges=with_edges)
            if is_plain:
                take_put_off(exploration, where)
            has_hits = not isinstance(exploration.situation.num_hit_blocks, int)
            for groups in (MAMBA_GROUPS if has_hits else MAMBA_GROUPS[:1]) if is_plain else ():
                joined = tree.exploration(family, tags, variant, num_mamba_groups=groups)
                of_groups = f"{where} with {1 + groups} groups"
                take(joined, of_groups, with_edges=False)
    return found


#: Kinds of step whose paths are taken in every setting.
_IN_ALL_SETTINGS = (("first", ("checkpoint",)), ("hit-full", ("checkpoint",)), ("checkpoint", ()))
#: Families whose paths are taken with their edges.
_WITH_EDGES = ("first", "hit-full", "hit-partial", "external-sync", "running", "checkpoint")
#: S of the paths that stand for the others.
_SPECULATIVE_BLOCKS = (0, 1, 2, SPECULATIVE_BLOCKS[-1])


def stands_for_others(exploration: Exploration, path: PathSummary) -> BoolLike:
    """Return where a path is taken with as many speculative blocks as stand for other numbers."""
    number = exploration.situation.geometry.num_speculative_blocks
    some = term.disjunction(number == one for one in _SPECULATIVE_BLOCKS)
    return term.conjunction((path.condition, some))


def _setting(variant: Variant) -> str:
    drop = " with EAGLE drop" if variant.eagle else ""
    units = " with hits at whole blocks" if variant.whole_blocks else ""
    return drop + units + (" with hashes that look ahead" if variant.looks_ahead else "")


def of_path(
    exploration: Exploration, path: PathSummary, *, with_edges: bool
) -> Iterator[tuple[Request, str]]:
    """Yield a request that takes a path in the fewest tokens, and its edges, with words for each.

    None where no request gets there in a few steps.
    """
    taken = path.condition if with_edges else stands_for_others(exploration, path)
    on_path = (*exploration.assumptions.values(), taken, _is_reached(exploration))
    is_put_off = path.step.deferred is True
    if not is_put_off and isinstance(exploration.situation.hit_is_of_this_step, term.Bool):
        on_path = (*on_path, negation(exploration.situation.hit_is_of_this_step))
    question = smt.Question()
    question.add(*on_path, *_of_sizes(exploration, EDGE_SIZES))
    least = question.ask()
    is_ordinary = least.answer is smt.Answer.SAT
    if not is_ordinary:
        question = smt.Question()
        question.add(*on_path)
        least = question.ask()
    if least.answer is not smt.Answer.SAT:
        return
    names = _ORDER if is_ordinary else _SIZES_FIRST
    values = question.minimize(least.values, _variables(names))
    request = _request(exploration, values)
    yield request, "least tokens"
    if not (with_edges and is_ordinary) or values.get("has_checkpoint_before"):
        return
    greatest = _greatest(exploration, question, values)
    if greatest is not None:
        yield _request(exploration, greatest), "greatest tokens"
    for edge in _around_boundaries(request):
        yield edge, "block or hash boundary near the least tokens"
    for edge in _around_prefill_end(request):
        yield edge, "end of the prefill near the least tokens"


def _is_reached(exploration: Exploration) -> Any:
    """The steps that `request_of` finds leave the state, pending checkpoint included.

    No estimate of theirs fails its check, so an admission finds no checkpoint pending, and neither
    does what follows a parked load.
    """
    situation = exploration.situation
    if isinstance(situation.table_length, int):
        return _pending_is_left(situation) & _ends_at_hash_unit(situation)
    speculative = situation.geometry.num_speculative_blocks
    excess = situation.attention_table_length - (situation.table_length - speculative)
    return term.conjunction(
        (
            situation.num_mamba_groups == 0 or excess == 0,
            _pending_is_left(situation),
            _ends_at_hash_unit(situation),
            _checkpoint_column_is_left(situation),
            _record_is_left(situation),
        )
    )


def _is_left_by_chunks(situation: Situation) -> bool:
    """Whether what a removal starts from is made by steps behind each other, from nothing.

    It frees what earlier steps left behind, and one step leaves nothing.
    """
    is_of_removal = not isinstance(situation.num_just_ended_tokens, int)
    return is_of_removal and not (situation.parked is True or situation.owns_partial_tail is True)


def _is_reached_by_chunks(exploration: Exploration, columns: Iterable[IntLike]) -> Any:
    """The chunks of `_in_chunks` leave the state, where none of them keeps a checkpoint.

    Each begins a column. Before the running state the columns hold what the step that has just
    ended read, and the state of the next one; the record is what the last step read.

    Args:
        exploration: Of removals.
        columns: Those that the claim looks at.
    """
    situation = exploration.situation
    running, ended = running_column(situation), column_of_last_ended_token(situation)
    in_flight, just_ended = situation.num_in_flight_tokens, situation.num_just_ended_tokens
    read = column_just_read(situation)
    has_record = term.bool_var("has_column_to_retire_before")
    recorded = term.int_var("column_to_retire_before", 0)
    found = [
        situation.geometry.num_prefill_checkpoint_blocks == 0,
        negation(situation.has_left_over_checkpoint),
        negation(situation.was_parked),
        negation(is_overwide(situation)),
        just_ended >= 1,
        in_flight + just_ended < situation.call.total_computed_tokens,
        read < ended,
        (in_flight == 0) | (ended < running),
        has_record & (recorded == choose(in_flight == 0, read, ended)),
        term.int_var("num_retired_blocks_before", 0) == read,
    ]
    for column in columns:
        is_null = term.cell("block_table", column) == 0
        is_held = (column == read) | (column == ended)
        is_as_left = choose(is_held, negation(is_null), is_null)
        found.append((column < 0) | (column >= running) | is_as_left)
    return term.conjunction(found)


def _checkpoint_column_is_left(situation: Situation) -> Any:
    """Of the columns before the running state the last steps hold a checkpoint and a tail only."""
    geometry, column = situation.geometry, checkpoint_column(situation)
    held = column >= running_column(situation) - count(situation.has_left_over_checkpoint)
    if situation.owns_partial_tail is True:
        tail = cdiv(situation.call.total_computed_tokens, geometry.block_size) - 1
        held = held | (column == tail)
    is_null = term.cell("block_table", column) == 0
    return choose(held, negation(is_null), is_null)


def _record_is_left(situation: Situation) -> Any:
    """A first step records no column to free; a load does, and so does one step after another."""
    has_record = term.bool_var("has_column_to_retire_before")
    column = term.int_var("column_to_retire_before", 0)
    if situation.parked is True:
        recorded = situation.geometry.num_speculative_blocks > 0
        where = running_column(situation)
    else:
        recorded = is_overwide(situation) & situation.owns_partial_tail
        where = cdiv(situation.call.total_computed_tokens, situation.geometry.block_size) - 1
    return choose(recorded, has_record & (column == where), negation(has_record))


def _ends_at_hash_unit(situation: Situation) -> Any:
    """A hit, and an own tail, end at a hash unit; which one matters with checkpoint blocks only."""
    g, call = situation.geometry, situation.call
    tail = call.total_computed_tokens if situation.owns_partial_tail is True else 0
    is_admission = isinstance(situation.table_length, int)
    some_group_hits = situation.num_mamba_groups > 0 and is_admission
    has_hit = (situation.num_hit_blocks > 0) | some_group_hits
    hit = choose(has_hit, call.num_local_computed_tokens, 0)
    at_unit = (tail % g.hash_block_size == 0) & (hit % g.hash_block_size == 0)
    return at_unit | (g.num_prefill_checkpoint_blocks == 0)


def _pending_is_left(situation: Situation) -> Any:
    pending = situation.has_left_over_checkpoint
    if isinstance(situation.table_length, int) or situation.parked is True:
        return negation(pending)
    if isinstance(situation.was_parked, term.Bool):
        return _kept_by_first_step(situation, pending) & _can_have_been_parked(situation)
    return _kept_by_first_step(situation, pending)


def _can_have_been_parked(situation: Situation) -> Any:
    """A parked request whose column is as long as a load made it has computed a token since."""
    behind_first = negation((_covered(situation) - 1) % situation.geometry.block_size == 0)
    return negation(situation.was_parked) | (behind_first & negation(is_overwide(situation)))


def _kept_by_first_step(situation: Situation, pending: Any) -> Any:
    covered = _covered(situation)
    # Two steps make a table that is too long and holds a tail; the first one caches the tail.
    start = situation.call.total_computed_tokens if situation.owns_partial_tail is True else 0
    start = choose(is_overwide(situation), start, 0)
    call = replace(
        situation.call,
        num_tokens=covered,
        num_tokens_main_model=covered,
        total_computed_tokens=start,
        num_local_computed_tokens=start,
    )
    kept = reserves_checkpoint(replace(situation, call=call, table_length=0))
    if situation.owns_partial_tail is True:
        return negation(pending) & negation(kept)  # a pending checkpoint keeps a tail from it
    return (pending & kept) | (negation(pending) & negation(kept))


def _covered(situation: Situation) -> Any:
    """Tokens of a first step that gives the table its length."""
    computed, geometry = situation.call.total_computed_tokens, situation.geometry
    columns = situation.table_length - geometry.num_speculative_blocks
    least = (columns - 1) * geometry.block_size + 1
    return choose(columns > cdiv(computed, geometry.block_size), least, computed)


def _of_sizes(exploration: Exploration, sizes: Mapping[str, int]) -> Iterator[Any]:
    """Sizes as given; hash units are blocks, and any alignment does, where a tree says so."""
    geometry = exploration.situation.geometry
    for name, size in sizes.items():
        if isinstance(geometry.prefill_checkpoint_alignment, int) and name != "block_size":
            continue
        yield getattr(geometry, name) == size


def _within_limit(exploration: Exploration) -> Iterator[Any]:
    """The prompt has `MAX_TOKENS` but for `tokens_left`, and there is no lookahead."""
    call = exploration.situation.call
    yield call.num_tokens_main_model + term.int_var("tokens_left", 0) == MAX_TOKENS
    yield call.num_tokens == call.num_tokens_main_model
    yield exploration.situation.num_request_tokens <= MAX_TOKENS


#: What a step starts from, but for its table.
_START = (
    "num_computed_tokens",
    "num_local_computed_tokens",
    "num_external_tokens",
    "num_hit_blocks",
    "hit_is_evictable",
)


def _greatest(
    exploration: Exploration, question: smt.Question, values: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The model with the most tokens within `MAX_TOKENS` that starts as the request does."""
    evaluator = Evaluator(values)
    pins = list(_within_limit(exploration))
    pins += [v == evaluator.number(v) for v in _variables(_START)]
    found = question.ask(*pins)
    if found.answer is not smt.Answer.SAT:
        return None
    return question.minimize(found.values, _variables(_LONGEST), *pins)


def _around_boundaries(request: Request) -> Iterator[Request]:
    """Requests that end at, one below and one above the next block and hash boundaries."""
    if request.origin.loads_asynchronously and len(request.chunks) == 1:
        return  # nothing is computed, so it ends where the load does
    *_, last = request.situations()
    geometry, end = request.geometry, request.chunks[-1]
    for unit in (geometry.block_size, geometry.hash_block_size):
        boundary = -(-end // unit) * unit
        for near in (boundary - 1, boundary, boundary + 1):
            if near > last.call.total_computed_tokens:
                length = near if request.is_sparse else request.prefill_length
                yield replace(request, chunks=(*request.chunks[:-1], near), prefill_length=length)


def _around_prefill_end(request: Request) -> Iterator[Request]:
    """Under sparse retention: the chunk ends the prefill, or stops one token short of it."""
    *_, last = request.situations()
    if reserves_checkpoint(last) and family_of(last) != "drafts":
        for missing in (0, 1):
            length = request.chunks[-1] + missing
            yield replace(request, is_sparse=True, prefill_length=length)


def _request(exploration: Exploration, values: Mapping[str, Any]) -> Request:
    return request_of(in_numbers(exploration.situation, Evaluator(values)))


def _variables(names: Iterable[str]) -> list[term.IntLike]:
    declared = {atom.args[0]: atom for atom in term.ATOMS if atom.kind == "var"}
    found: list[term.IntLike] = []
    for name in names:
        if name in declared:
            found.append(term.int_var(name, declared[name].low, declared[name].high))
        elif name.startswith(("hit_is_", "other_hits_")):
            found.append(term.int_of(term.bool_var(name)))
    return found


def cases(known: Iterable[Case]) -> dict[Request, str]:
    """Return the requests of public reports, with their sources."""
    return {request_of_case(case): case.source for case in known}


def request_of_case(case: Case) -> Request:
    """Return the request of a row of a public report."""
    loads = case.num_external_tokens > 0
    return Request(
        case.geometry,
        case.chunks,
        prefill_length=case.num_prompt_tokens,
        origin=Origin(num_external_tokens=case.num_external_tokens, loads_asynchronously=loads),
        num_computed_tokens=case.num_computed_tokens,
        owns_partial_tail=case.owns_partial_tail,
        has_step_in_flight=case.has_step_in_flight,
    )


def by_suite(scenarios: Iterable[Scenario]) -> dict[str, list[Scenario]]:
    """Return scenarios by suite, sorted by size, without steps that no target can be asked."""
    kept = sorted((s for s in scenarios if s.predicted), key=_size)
    return {suite: list(group) for suite, group in itertools.groupby(kept, _suite)}


def _suite(scenario: Scenario) -> str:
    return suite_of(scenario.manager, scenario.family)


def family_of_request(request: Request) -> str:
    """Return the family of a request's last step."""
    *_, last = request.situations()
    return family_of(last)


def _size(scenario: Scenario) -> tuple[Any, ...]:
    geometry, steps = scenario.geometry, scenario.steps
    sizes = tuple(int(value) for value in vars(geometry).values())
    return _suite(scenario), sizes, tuple(step.call.num_tokens for step in steps), scenario.name
