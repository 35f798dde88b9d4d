"""Render scenarios into one pytest file that needs vLLM and pytest alone, for a vLLM branch.

The steps become plain calls of the align-mode manager, in the order of
`KVCacheManager.allocate_slots`. Releases differ in what these calls take: the file is written for
one target, whose signatures are read from its source (`conformance.bindings`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conformance.bindings import Bindings
from conformance.render import MARKER, template_of
from conformance.scenario import Scenario, ScenarioStep
from conformance.steps import greatest_demand
from spec.theorems import THEOREMS
from spec.vocabulary import Geometry

#: What vLLM's ruff is set to.
LINE_LENGTH = 88


class StandaloneError(Exception):
    """A scenario cannot be said in a standalone test; one line with the scenario and why."""


@dataclass(frozen=True)
class Claim:
    """How a theorem is asserted behind the last step.

    Attributes:
        assertions: Lines, for a scenario.
        before: Lines between the estimate and the allocation.
        has_dry_run: Whether the dry run is asked before the estimate.
        has_gate: Whether the full-sequence gate is asked first.
        watches_removal: Whether the table around the removal of skipped blocks is kept.
    """

    assertions: Callable[[Scenario], list[str]]
    before: Callable[[Scenario], list[str]] = lambda scenario: []
    has_dry_run: bool = False
    has_gate: bool = False
    watches_removal: bool = False


def _expected(name: str) -> Callable[[Scenario], object]:
    def of(scenario: Scenario) -> object:
        value = getattr(scenario.steps[-1].expect, name)
        if value is None and name != "checkpoint":
            raise StandaloneError(f"{scenario.name}: no expected {name} is given")
        return value

    return of


_NEED, _LENGTH, _TO_RETIRE, _CHECKPOINT = map(
    _expected, ("need", "table_length", "column_to_retire", "checkpoint")
)
_TABLE = "manager.req_to_blocks[REQUEST_ID]"


def _occupied(scenario: Scenario) -> list[str]:
    """Leave the least pool that passes the check; what the step adopts is not taken away."""
    is_evictable = scenario.steps[-1].hit_is_evictable
    hold, free = (
        ([f"block_pool.{method}(hit[-1:])"] if is_evictable else [])
        for method in ("touch", "free_blocks")
    )
    least = "max(estimate, 0) - 1" if is_evictable else "max(estimate, 0)"
    return [
        "# Leave exactly the estimate free.",
        *hold,
        f"num_to_hold = block_pool.get_num_free_blocks() - ({least})",
        "block_pool.get_new_blocks(num_to_hold)",
        *free,
    ]


#: Theorems that a standalone test has words for.
CLAIMS: dict[str, Claim] = {
    "no-undercount": Claim(lambda s: ["assert drawn <= estimate"]),
    "dry-run-parity": Claim(lambda s: ["assert dry_run == estimate"], has_dry_run=True),
    "exact-estimate": Claim(lambda s: ["assert estimate == drawn"]),
    "bounded-demand": Claim(
        lambda s: [
            "# A bound that knows no token count.",
            f"assert estimate <= {greatest_demand(s.geometry, s.steps[-1])}",
        ]
    ),
    "estimate-nonnegative": Claim(lambda s: ["assert estimate >= 0"]),
    "allocation-succeeds": Claim(
        lambda s: ["# It has raised nothing.", "assert drawn <= max(estimate, 0)"], before=_occupied
    ),
    "matches-intended": Claim(
        lambda s: [f"assert estimate == {_NEED(s)}", f"assert drawn == {_NEED(s)}"]
    ),
    "state-invariant": Claim(lambda s: [f"assert len({_TABLE}) == {_LENGTH(s)}"]),
    "checkpoint-recorded": Claim(
        lambda s: (
            [f"assert manager._checkpoints.get(REQUEST_ID) == {_CHECKPOINT(s)}"]
            + (
                [f"assert not {_TABLE}[{s.steps[-1].expect.checkpoint[1]}].is_null"]
                if s.steps[-1].expect.checkpoint
                else []
            )
        )
    ),
    "no-block-twice": Claim(
        lambda s: [
            f"block_ids = [b.block_id for b in {_TABLE} if not b.is_null]",
            "assert len(block_ids) == len(set(block_ids))",
        ]
    ),
    "retirement-recorded": Claim(
        lambda s: [f"assert manager.last_state_block_idx.get(REQUEST_ID, -1) == {_TO_RETIRE(s)}"]
    ),
    "removal-keeps-state": Claim(
        lambda s: [
            f"num_kept = {1 + s.geometry.num_speculative_blocks}",
            "assert after_removal[-num_kept:] == before_removal[-num_kept:]",
        ],
        watches_removal=True,
    ),
    "gate-covers-first-step": Claim(lambda s: ["assert drawn <= gate"], has_gate=True),
}


def standalone(scenarios: Sequence[Scenario], bindings: Bindings, target: str) -> str:
    """Return the text of a test file.

    Args:
        scenarios: A test each.
        bindings: What calls of the target take.
        target: The target, for the header.

    Raises:
        StandaloneError: A scenario has no theorem, or needs what the file has no words for.
    """
    tests = [_test(scenario, bindings, target) for scenario in scenarios]
    lines = [line for test in tests for line in test.lines]
    return template_of("standalone.py.jinja").render(
        marker=MARKER,
        target=target,
        has_copies=hasattr(bindings.manager_class, "take_pending_cow_copies"),
        has_hits=any(line.startswith("hit = ") for line in lines),
        manager_arguments=[
            (name, value)
            for name, value in _MANAGER_ARGUMENTS
            if name in bindings.manager_arguments
        ],
        names=_names(scenarios),
        tests=tests,
    )


#: Arguments of a manager beside its spec and its pool; a release takes those it knows.
_MANAGER_ARGUMENTS = (
    ("enable_caching", "True"),
    ("kv_cache_group_id", "0"),
    ("scheduler_block_size", "block_size"),
)


@dataclass(frozen=True)
class _Test:
    docstring: str
    lines: list[str]


def _names(scenarios: Sequence[Scenario]) -> list[str]:
    """Names of tests: those of the scenarios, without a release where that tells none apart."""
    short = [re.sub(r"-vllm(-[0-9]+)+$", "", scenario.name) for scenario in scenarios]
    return [
        (name if short.count(name) == 1 else scenario.name).replace("-", "_")
        for name, scenario in zip(short, scenarios, strict=True)
    ]


def _test(scenario: Scenario, bindings: Bindings, target: str) -> _Test:
    claim = _claim(scenario)
    for objection in _objections(scenario, bindings):
        raise StandaloneError(f"{scenario.name}: a standalone test for {target} {objection}")
    sentence = THEOREMS[scenario.theorem or ""].sentence
    docstring = "\n    ".join(textwrap.wrap(sentence, LINE_LENGTH - 12))
    lines = [*_said(scenario), "", *_set_up(scenario, bindings)]
    *earlier, last = scenario.steps
    for number, step in enumerate(earlier, start=1):
        lines += ["", *_step(number, step, scenario.geometry, Claim(_nothing), scenario)]
    lines += ["", *_step(len(scenario.steps), last, scenario.geometry, claim, scenario)]
    lines += ["", f"# What {scenario.theorem} says of the last step.", *claim.assertions(scenario)]
    return _Test(docstring, lines)


def _nothing(scenario: Scenario) -> list[str]:
    return []


def _claim(scenario: Scenario) -> Claim:
    if scenario.theorem is None:
        raise StandaloneError(f"{scenario.name}: names no theorem, so there is nothing to assert")
    if scenario.theorem not in CLAIMS:
        known = ", ".join(CLAIMS)
        reason = f"no words for {scenario.theorem} without capproof; there are for {known}"
        raise StandaloneError(f"{scenario.name}: {reason}")
    return CLAIMS[scenario.theorem]


def _objections(scenario: Scenario, bindings: Bindings) -> Iterator[str]:
    """What a scenario needs that a standalone test has no words for, on a target."""
    geometry, steps, given = scenario.geometry, scenario.steps, bindings.spec_arguments
    if scenario.num_mamba_groups:
        yield "asks one manager by itself, not several groups"
    if any(step.owns_partial_tail for step in steps):
        yield "has no words for a request's own partial tail"
    if any(step.hit_is_of_this_step for step in steps):
        yield "has no words for a hit that another request caches in the same step"
    if geometry.num_prefill_checkpoint_blocks and "num_prefill_checkpoint_blocks" not in given:
        yield "has no checkpoint blocks to give"
    if _num_lookahead(geometry) and "num_hash_lookahead_tokens" not in bindings.pool_arguments:
        yield "has no hashes that look ahead"
    if any(s.call.prefill_end for s in steps) and (
        "prefill_end" not in bindings.estimator_call_fields
    ):
        yield "cannot say where the prefill ends"
    if CLAIMS[scenario.theorem or ""].has_gate and not steps[-1].num_request_tokens:
        yield "needs the tokens that the gate is asked about in its last step"


def _said(scenario: Scenario) -> list[str]:
    """Where the scenario came from, and what is predicted for which target."""
    lines = [f"# {scenario.source}"] if scenario.source else []
    for target, seen in (scenario.predicted or {}).items():
        ends = f"raises {seen.raised}" if seen.raised else f"draws {seen.drawn}"
        breaks = " (broken)" if scenario.theorem in seen.violates else ""
        lines.append(f"# {target}: estimates {seen.estimate}, {ends}{breaks}")
    wrapped = (textwrap.wrap(line, LINE_LENGTH - 4, subsequent_indent="# ") for line in lines)
    return [part for parts in wrapped for part in parts]


def _set_up(scenario: Scenario, bindings: Bindings) -> Iterator[str]:
    geometry = scenario.geometry
    pool = {
        "num_gpu_blocks": scenario.num_gpu_blocks,
        "enable_caching": True,
        "hash_block_size": geometry.hash_block_size,
    }
    if _num_lookahead(geometry):
        pool["num_hash_lookahead_tokens"] = _num_lookahead(geometry)
    yield from _call("block_pool = BlockPool", [], pool)
    sizes = {
        "block_size": geometry.block_size,
        "alignment": geometry.cache_hit_alignment_tokens,
        "num_speculative_blocks": geometry.num_speculative_blocks,
    }
    if geometry.num_prefill_checkpoint_blocks:
        sizes["num_prefill_checkpoint_blocks"] = geometry.num_prefill_checkpoint_blocks
        if "prefill_checkpoint_alignment" in bindings.spec_arguments:
            sizes["prefill_checkpoint_alignment"] = geometry.prefill_checkpoint_alignment
    yield from _call("manager = get_mamba_manager", ["block_pool"], sizes)
    if geometry.drop_eagle_checkpoint_block:
        yield "manager.drop_eagle_checkpoint_block = True"


def _num_lookahead(geometry: Geometry) -> int:
    # vLLM: one token behind the checkpoint is left without any lookahead.
    num_behind = geometry.num_tokens_behind_checkpoint
    return num_behind if num_behind > 1 else 0


def _step(
    number: int, step: ScenarioStep, geometry: Geometry, claim: Claim, scenario: Scenario
) -> Iterator[str]:
    call = step.call
    start, end = call.total_computed_tokens, call.num_tokens_main_model
    comment = f"Step {number}: {step.why}, {start:,} to {end:,} tokens."
    yield from textwrap.wrap(comment, LINE_LENGTH - 4, initial_indent="# ", subsequent_indent="# ")
    yield "start_step(manager, block_pool)"
    if step.preempted:
        yield "manager.free(REQUEST_ID)"
    if step.num_hit_blocks:
        yield from _hit(number, step, geometry)
    hit = "hit" if step.num_hit_blocks else "[]"
    used = " ".join([*claim.before(scenario), *claim.assertions(scenario)])
    if claim.has_gate:
        whole = dict.fromkeys(("num_tokens", "num_tokens_main_model"), step.num_request_tokens)
        yield from _estimate("gate = ", {**_asked(step, hit), **whole, "apply_admission_cap": True})
    if claim.watches_removal:
        yield f"before_removal = list({_TABLE})"
    ended = start - step.num_in_flight_tokens
    yield f"manager.remove_skipped_blocks(REQUEST_ID, {_literal(ended)})"
    if claim.watches_removal:
        yield f"after_removal = list({_TABLE})"
    if claim.has_dry_run:
        yield from _estimate("dry_run = ", {**_asked(step, hit), "apply_admission_cap": True})
    yield from _estimate("estimate = " if "estimate" in used else "", _asked(step, hit))
    yield from claim.before(scenario)
    if "drawn" in used:
        yield "num_free = block_pool.get_num_free_blocks()"
    yield from _adopt(step, hit)
    yield from _call(
        "manager.allocate_new_blocks",
        ["REQUEST_ID"],
        {"num_tokens": call.num_tokens, "num_tokens_main_model": call.num_tokens_main_model},
    )
    if "drawn" in used:
        yield "drawn = num_free - block_pool.get_num_free_blocks()"


def _asked(step: ScenarioStep, hit: str) -> dict[str, object]:
    """Arguments of the estimator, by name."""
    call = step.call
    asked: dict[str, object] = {
        "num_tokens": call.num_tokens,
        "new_computed_blocks": _Code(hit),
        "total_computed_tokens": call.total_computed_tokens,
        "num_local_computed_tokens": call.num_local_computed_tokens,
        "num_tokens_main_model": call.num_tokens_main_model,
    }
    return {**asked, "prefill_end": call.prefill_end} if call.prefill_end else asked


def _estimate(result: str, asked: Mapping[str, object]) -> Iterator[str]:
    yield from _call(f"{result}manager.get_num_blocks_to_allocate", ["REQUEST_ID"], asked)


def _hit(number: int, step: ScenarioStep, geometry: Geometry) -> Iterator[str]:
    num_tokens = step.call.num_local_computed_tokens
    named = {
        # A hit that tokens of a connector reach beyond may be shorter than the local tokens.
        "num_tokens": min(num_tokens, step.num_hit_blocks * geometry.block_size),
        "num_blocks": step.num_hit_blocks,
        "block_size": geometry.block_size,
        "is_evictable": step.hit_is_evictable,
    }
    yield from _call("hit = cache_hit", ["block_pool", f'"another-{number}"'], named)


def _adopt(step: ScenarioStep, hit: str) -> Iterator[str]:
    if not (step.num_hit_blocks or step.num_external_tokens):
        return
    num_tokens = {
        "num_local_computed_tokens": step.call.num_local_computed_tokens,
        "num_external_computed_tokens": step.num_external_tokens,
    }
    yield from _call("manager.add_local_computed_blocks", ["REQUEST_ID", hit], num_tokens)
    if step.num_external_tokens:
        yield from _call("manager.allocate_external_computed_blocks", ["REQUEST_ID"], num_tokens)


class _Code(str):
    """A text that stands as it is."""


def _call(function: str, arguments: Iterable[str], named: Mapping[str, object]) -> list[str]:
    """A call on one line, or where that is too long an argument a line."""
    given = [*arguments, *(f"{name}={_literal(value)}" for name, value in named.items())]
    line = f"{function}({', '.join(given)})"
    if len(line) <= LINE_LENGTH - 4:
        return [line]
    return [f"{function}(", *(f"    {argument}," for argument in given), ")"]


def _literal(value: object) -> str:
    """A Python literal, long integers with underscores."""
    if isinstance(value, _Code):
        return value
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)
