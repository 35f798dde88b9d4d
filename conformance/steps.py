"""Steps in a few words, and the one way of applying them to a request.

Every word makes a `ScenarioStep`; together they say all that a step can be. All of them are in
tokens, count from the request's start, and take `lookahead` (tokens for drafts behind `end`) and
`prefill_end` (where the prefill ends, under sparse retention) as well; those that admit a request
take `gate`, the tokens that it has, where the full-sequence gate is asked about it first. A hit of
several KV-cache groups says how many blocks of the full-attention hit nobody references, its last
ones (`attention_evictable`), and whether nobody references the hit's last block in the Mamba groups
behind the first (`others_evictable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.groups import GroupsUnderTest
from conformance.request import RequestUnderTest
from conformance.scenario import ScenarioStep
from spec.vocabulary import Call, Geometry, Situation, Step


def chunk(start: int, end: int, *, local: int | None = None, **others: int) -> ScenarioStep:
    """A step that computes the tokens from `start` to `end` and adopts nothing.

    A request that has no table yet is admitted with it.

    Args:
        start: Tokens computed before.
        end: Where the chunk ends.
        local: Of the tokens before, those that no connector brought; None is all.
        others: `lookahead`, `prefill_end`; in an admission `gate`.
    """
    return _step("a chunk", start, start if local is None else local, end, **others)


def hit(
    start: int,
    end: int,
    *,
    blocks: int,
    evictable: bool = False,
    of_this_step: bool = False,
    attention_evictable: int = 0,
    others_evictable: bool = False,
    **others: int,
) -> ScenarioStep:
    """An admission with a local hit of `start` tokens in `blocks` columns, of which one is held.

    Args:
        start: Tokens of the hit.
        end: Where the chunk behind it ends.
        blocks: Columns of the hit, all null but the last.
        evictable: Whether nobody references the last one.
        of_this_step: Whether another request caches it in this same step.
        attention_evictable: Blocks.
        others_evictable: See above.
        others: `lookahead`, `prefill_end`, `gate`.
    """
    found = _step("a hit", start, start, end, **others)
    return replace(
        found,
        num_hit_blocks=blocks,
        hit_is_evictable=evictable,
        hit_is_of_this_step=of_this_step,
        num_evictable_attention_hits=attention_evictable,
        other_hits_are_evictable=others_evictable,
    )


def load(
    *,
    external: int,
    end: int,
    local: int = 0,
    blocks: int = 0,
    evictable: bool = False,
    of_this_step: bool = False,
    attention_evictable: int = 0,
    others_evictable: bool = False,
    **others: int,
) -> ScenarioStep:
    """An admission with tokens that a connector brings, which computes a chunk in the same step.

    Args:
        external: Tokens of the connector, behind the local ones.
        end: Where the chunk behind them ends.
        local: Tokens of a local hit before them.
        blocks: Columns of that hit.
        evictable: Whether nobody references its last block.
        of_this_step: Whether another request caches it in this same step.
        attention_evictable: Blocks.
        others_evictable: See above.
        others: `lookahead`, `prefill_end`, `gate`.
    """
    found = _step("external tokens", local + external, local, end, **others)
    return replace(
        found,
        num_external_tokens=external,
        num_hit_blocks=blocks,
        hit_is_evictable=evictable,
        hit_is_of_this_step=of_this_step,
        num_evictable_attention_hits=attention_evictable,
        other_hits_are_evictable=others_evictable,
    )


def park(*, external: int, local: int = 0, **others: Any) -> ScenarioStep:
    """An admission that computes nothing: the request waits while a connector loads its tokens.

    Arguments are those of `load`.
    """
    found = load(external=external, end=local + external, local=local, **others)
    return replace(found, loads_asynchronously=True)


def preempted(step: ScenarioStep) -> ScenarioStep:
    """The same step, of a request that loses its blocks first and is admitted with it again."""
    return replace(step, preempted=True)


def own_tail(step: ScenarioStep) -> ScenarioStep:
    """The same step, of a request whose own block that ends inside a block is cached before it."""
    return replace(step, owns_partial_tail=True)


def in_flight(num_tokens: int, step: ScenarioStep) -> ScenarioStep:
    """The same step, while earlier ones that compute so many tokens have not ended."""
    return replace(step, num_in_flight_tokens=num_tokens)


def _step(
    why: str,
    start: int,
    local: int,
    end: int,
    *,
    lookahead: int = 0,
    prefill_end: int = 0,
    gate: int = 0,
) -> ScenarioStep:
    call = Call(end + lookahead, end, start, local, prefill_end)
    return ScenarioStep(why, call, prefill_length=end, num_request_tokens=gate)


# ---- applying them -------------------------------------------------------------------------------


class EarlierStepError(Exception):
    """A step that makes the state for the one under test raised, was refused, or put off."""


@dataclass(frozen=True)
class Applied:
    """A step that was applied."""

    planned: ScenarioStep
    situation: Situation
    """What decided its family."""
    step: Step
    """What was seen."""


def applied(
    request: RequestUnderTest,
    steps: Sequence[ScenarioStep],
    *,
    exactly_the_estimate: bool = False,
    reserved_blocks: int = 0,
    full_sequence_must_fit: bool = False,
    watch_dry_run: bool = True,
) -> Iterator[Applied]:
    """Apply steps to a request one by one, up to the first that raises, is refused or put off.

    Args:
        request: A request without a block table.
        steps: What to apply. All but the last are on the pool as it is, and their dry runs are
            not watched.
        exactly_the_estimate: Whether the last finds as many free blocks as its estimate says, and
            those reserved.
        reserved_blocks: Free blocks that the last has to leave for others.
        full_sequence_must_fit: Whether the last is refused where the gate asks for more than is
            free; only several groups are.
        watch_dry_run: Whether to look for traces of the last one's dry run.

    Raises:
        DriverError: A step cannot be brought about.
    """
    for i, planned in enumerate(steps):
        is_last = i == len(steps) - 1
        if planned.preempted:
            request.preempt()
        if planned.owns_partial_tail:
            request.cache_own_partial_tail(planned.call.total_computed_tokens)
        kind, of_request = _kind(planned), {}
        if isinstance(request, GroupsUnderTest):
            kind |= {name: getattr(planned, name) for name in _OF_GROUPS}
            of_request = {
                "prefill_length": planned.prefill_length,
                "full_sequence_must_fit": is_last and full_sequence_must_fit,
            }
        situation = request.situation(planned.call, planned.prefill_length, **kind)
        step = request.apply(
            planned.call,
            **kind,
            **of_request,
            exactly_the_estimate=is_last and exactly_the_estimate,
            reserved_blocks=reserved_blocks if is_last else 0,
            watch_dry_run=is_last and watch_dry_run,
        )
        yield Applied(planned, situation, step)
        if step.raised is not None or step.refused or step.deferred:
            return


#: What a step of several KV-cache groups adopts besides.
_OF_GROUPS = ("num_evictable_attention_hits", "other_hits_are_evictable")


def _kind(planned: ScenarioStep) -> dict[str, Any]:
    """What a step adopts and asks, beside its call."""
    return {
        "num_hit_blocks": planned.num_hit_blocks,
        "hit_is_evictable": planned.hit_is_evictable,
        "hit_is_of_this_step": planned.hit_is_of_this_step,
        "num_external_tokens": planned.num_external_tokens,
        "loads_asynchronously": planned.loads_asynchronously,
        "num_request_tokens": planned.num_request_tokens,
        "num_in_flight_tokens": planned.num_in_flight_tokens,
    }


def how_it_ended(step: Step) -> str:
    """Say in words how a step ended that did not go through."""
    if step.deferred:
        return "was put off"
    return "was refused" if step.refused else f"raised {step.raised}"


def last_of(
    request: RequestUnderTest,
    steps: Sequence[ScenarioStep],
    *,
    exactly_the_estimate: bool = False,
    reserved_blocks: int = 0,
    full_sequence_must_fit: bool = False,
    watch_dry_run: bool = False,
) -> Step:
    """Apply steps to a request, end it, and return what the last of them showed.

    Arguments are those of `applied`.

    Raises:
        EarlierStepError: A step before the last raised, was refused or put off, so that nothing is
            known of the last.
        DriverError: A step cannot be brought about.
    """
    *_, last = applied(
        request,
        steps,
        exactly_the_estimate=exactly_the_estimate,
        reserved_blocks=reserved_blocks,
        full_sequence_must_fit=full_sequence_must_fit,
        watch_dry_run=watch_dry_run,
    )
    if last.planned is not steps[-1]:
        raise EarlierStepError(f"{last.planned.call} {how_it_ended(last.step)}")
    if request.exception is None:
        request.finish()
    return last.step


# ---- what rendered tests compare with ------------------------------------------------------------


def greatest_demand(geometry: Geometry, last: ScenarioStep) -> int:
    """Blocks that a step may ask for, whatever its token count."""
    has_hit = last.num_hit_blocks > 0
    starts_inside = last.call.num_local_computed_tokens % geometry.block_size > 0
    return (
        1
        + geometry.num_speculative_blocks
        + (geometry.num_prefill_checkpoint_blocks > 0)
        + (last.owns_partial_tail or (has_hit and starts_inside))
        + (last.num_external_tokens > 0)
        + (has_hit and last.hit_is_evictable)
    )


def admitted_by_gate(rows: Iterable[Any]) -> list[Any]:
    """Those whose first step asks the gate, and whose last is a later one."""
    return [
        row for row in rows if len(row.values[-2]) > 1 and row.values[-2][0].num_request_tokens > 0
    ]


def with_nothing_in_flight(rows: Iterable[Any]) -> list[Any]:
    """Those whose last step finds all earlier ones ended."""
    return [row for row in rows if not row.values[-2][-1].num_in_flight_tokens]


def performed(rows: Iterable[Any]) -> list[Any]:
    """Those of the parameter sets of a rendered file whose last step is not put off."""
    return [row for row in rows if not row.values[-2][-1].hit_is_of_this_step]


def asking_gate(rows: Iterable[Any]) -> list[Any]:
    """Those of the parameter sets of a rendered file whose last step asks the gate."""
    return [row for row in rows if row.values[-2][-1].num_request_tokens > 0]
