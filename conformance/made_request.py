"""A request in numbers, of which a scenario is made, and which one gets into a situation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from conformance.cases import Case
from conformance.scenario import Scenario
from models.predict import after
from spec.families import (
    family_of,
    is_overwide,
    waits_for_hit,
)
from spec.vocabulary import Call, Geometry, Situation


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


def family_of_request(request: Request) -> str:
    """Return the family of a request's last step."""
    *_, last = request.situations()
    return family_of(last)
