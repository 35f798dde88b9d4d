"""What the block tables of a life's requests hold after each rule, as the real managers show it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from conformance.bindings import QUEUED_COPIES
from conformance.layout import (
    MAMBA,
    Names,
    TableSeen,
    attention_table,
    mamba_table,
    tables_from_json,
)
from conformance.life import Request, Rule, Stage
from conformance.life_checks import StepSeen, Violation, known_fault
from conformance.lives import FIRST_MAMBA_GROUP, SharedPool
from conformance.picture import MAX_ROWS, tokens_in_words


@dataclass(frozen=True)
class RuleSeen:
    """A rule that touched a request, and what it left it with."""

    number: str
    """Its number in the life, from 1; of a rule that `alone` applies, that of `alone` and its
    own."""
    words: str
    """The rule, in words."""
    start: int
    """Tokens computed before."""
    end: int
    """Tokens computed after."""
    stage: str
    """Where the request stands after it."""
    tables: tuple[TableSeen, ...]
    """A table for each group."""
    free: int
    """Free blocks: those that `allocate_slots` found, or those that are left where it was not
    called for the request."""
    asked: bool
    """Whether it was called."""
    estimate: int | None
    """Blocks; where the full-sequence gate refused, what the gate was told."""
    drawn: int | None
    """Blocks."""
    broken: tuple[str, ...]
    """Theorems that do not hold, each with the known fault that it may be."""


@dataclass
class RequestWatched:
    """The last rules that touched a request."""

    request: str
    words: str
    """What it brings."""
    num_left_out: int = 0
    """Rules before the first that is kept."""
    rules: deque[RuleSeen] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))

    def add(self, seen: RuleSeen) -> None:
        """Keep one more rule."""
        self.num_left_out += len(self.rules) == MAX_ROWS
        self.rules.append(seen)

    def to_json(self) -> dict[str, Any]:
        """Return what passes between processes, as `dataclasses.asdict` does for its parts."""
        return {**asdict(self), "rules": [asdict(seen) for seen in self.rules]}


def watched_from_json(content: Iterable[Mapping[str, Any]]) -> tuple[RequestWatched, ...]:
    """Return requests that passed between processes as JSON objects."""
    return tuple(
        RequestWatched(**{**one, "rules": deque(map(_rule_from_json, one["rules"]), MAX_ROWS)})
        for one in content
    )


def _rule_from_json(content: Mapping[str, Any]) -> RuleSeen:
    tables, broken = tables_from_json(content["tables"]), tuple(content["broken"])
    return RuleSeen(**{**content, "tables": tables, "broken": broken})


class Watcher:
    """Looks at the tables of a pool after each of its rules.

    Args:
        pool: Whose rules are seen from here on.
        target: Whose known faults are named.
    """

    def __init__(self, pool: SharedPool, target: str) -> None:
        self._pool, self._target = pool, target
        self._number = self._part = self._num_violations = 0
        self._before = [_state(pool, request) for request in pool.requests]
        self.requests = tuple(
            RequestWatched(request.request_id, _plan_in_words(request)) for request in pool.requests
        )
        pool.after_rule = self._after

    def next_rule(self, number: int) -> None:
        """Say which rule of the life is applied next."""
        self._number, self._part = number, 0

    def _after(self, rule: Rule, is_part: bool) -> None:
        self._part += is_part
        found = self._pool.violations[self._num_violations :]
        self._num_violations += len(found)
        touched = [r for r in self._pool.requests if self._is_touched(r, rule, found)]
        for request in touched or (self._pool.requests if found else ()):
            self.requests[request.number].add(self._seen(request, rule, found, is_part))
        self._before = [_state(self._pool, request) for request in self._pool.requests]

    def _is_touched(self, request: Request, rule: Rule, found: Sequence[Violation]) -> bool:
        return (
            _is_of(rule, request)
            or _state(self._pool, request) != self._before[request.number]
            or any(violation.request == request.request_id for violation in found)
        )

    def _named(self, request: Request, rule: Rule, is_part: bool) -> tuple[str, str]:
        """Number and words of a rule; what else `alone` does to a request is to end it."""
        if is_part and rule.name != "step" and not _is_of(rule, request):
            return str(self._number), f"alone, of r{rule.request}"
        number = f"{self._number}.{self._part}" if is_part else str(self._number)
        return number, rule_in_words(rule)

    def _seen(
        self, request: Request, rule: Rule, found: Sequence[Violation], is_part: bool
    ) -> RuleSeen:
        number, words = self._named(request, rule, is_part)
        of_it = [v for v in found if v.request in ("", request.request_id)]
        asked = self._asked(request, rule, of_it)
        free = self._pool.pool.get_num_free_blocks()
        return RuleSeen(
            number=number,
            words=words,
            start=self._before[request.number][1],
            end=request.num_computed_tokens,
            stage=request.stage.value,
            tables=tables_of(self._pool, request),
            free=asked.free if asked else free,
            asked=asked is not None,
            estimate=_estimate(asked) if asked else None,
            drawn=asked.drawn if asked else None,
            broken=tuple(dict.fromkeys(map(self._broken, of_it))),
        )

    def _asked(self, request: Request, rule: Rule, found: Sequence[Violation]) -> StepSeen | None:
        if rule.name == "alone":
            return self._pool.last_seen.get(request.request_id) if found else None
        seen = self._pool.seen
        is_told = seen is not None and seen.request == request.request_id
        return seen if is_told and _estimate(seen) is not None else None

    def _broken(self, violation: Violation) -> str:
        fault = known_fault(violation, self._target)
        return violation.theorem + (f" (known: {fault.name})" if fault else "")


def _is_of(rule: Rule, request: Request) -> bool:
    return rule.name not in ("step", "reset") and rule.request == request.number


def _estimate(seen: StepSeen) -> int | None:
    return seen.gate if seen.estimate is None else seen.estimate


def _state(pool: SharedPool, request: Request) -> tuple[Stage, int, list[frozenset[int]]]:
    return request.stage, request.num_computed_tokens, pool.held(request)


def tables_of(pool: SharedPool, request: Request) -> tuple[TableSeen, ...]:
    """Return what the columns of a request's tables hold, a table for each group."""
    names = Names(request.request_id, pool.geometry.num_speculative_blocks, request.adopted_blocks)
    several = pool.setting.num_mamba_groups > 1
    attention, *mamba = pool.managers
    tables = [attention_table(attention, names)]
    for i, manager in enumerate(mamba, start=FIRST_MAMBA_GROUP):
        tables.append(mamba_table(manager, names, f"{MAMBA} {i}" if several else MAMBA))
    held = {block for other in pool.requests for ids in pool.held(other) for block in ids}
    outside = [_num_outside(manager, names, held) for manager in pool.managers]
    return tuple(
        replace(table, num_copies_outside=count)
        for table, count in zip(tables, outside, strict=True)
    )


def _num_outside(manager: Any, names: Names, held: set[int]) -> int:
    """Copies of a request's blocks whose targets stand in no table."""
    own = {block.block_id for block in manager.req_to_blocks.get(names.request_id, ())}
    pairs = getattr(manager, QUEUED_COPIES, ())
    return sum(s.block_id in own and t.block_id not in held for s, t in pairs)


def rule_in_words(rule: Rule) -> str:
    """Return a rule as it is read: its name, and what it is given."""
    given = []
    if rule.num_tokens and rule.name in ("admit", "promote", "run"):
        given.append(f"up to {tokens_in_words(rule.num_tokens)}")
    if rule.num_external_tokens:
        how = " later" if rule.loads_asynchronously else ""
        given.append(f"{rule.num_external_tokens:,} external{how}")
    if rule.num_accepted and rule.name in ("run", "alone"):
        given.append(f"{rule.num_accepted} drafts accepted")
    return f"{rule.name} ({', '.join(given)})" if given else rule.name


def _plan_in_words(request: Request) -> str:
    plan = request.plan
    shared = min(plan.num_shared_tokens, plan.num_prompt_tokens + plan.max_tokens)
    prompt = tokens_in_words(plan.num_prompt_tokens)
    words = f"a prompt of {prompt}, {plan.max_tokens:,} to make"
    return f"{words}, the first {shared:,} shared" if shared else words
