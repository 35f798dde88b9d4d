"""What must hold after every rule of a life, and which faults of releases are known.

Each check looks at a `SharedPool` and returns what it found, never raises; a violation is one line
with request, step and block. Which of them releases are known to show is data: `KNOWN`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance import life_plan
from conformance.life_plan import Reading, StateLost
from conformance.pools import hash_map_ids
from models.intended import need
from spec.families import (
    adopts_hit,
    family_of,
    hits_inside_a_block,
    is_overwide,
    reserves_checkpoint,
    tags_of,
)
from spec.vocabulary import Situation

if TYPE_CHECKING:
    from conformance.life import Rule
    from conformance.lives import SharedPool


@dataclass(frozen=True)
class StepSeen:
    """What one call of `allocate_slots` showed, in blocks; None for what was not reached."""

    request: str
    situation: Situation
    gate: int | None
    estimate: int | None
    drawn: int | None
    """None where it was refused, or raised."""
    free: int
    """Free blocks when the estimate was compared."""
    reserved: int
    """Blocks left for others."""
    raised: str | None
    num_steps_in_flight: int = 0
    """Steps whose outputs are not known when the next one is scheduled."""

    @property
    def told(self) -> str:
        """What the request was told that it needs."""
        gate = "" if self.gate is None else f"gate {self.gate}, "
        return f"{gate}estimate {self.estimate}, reserved {self.reserved}"


@dataclass(frozen=True)
class Violation:
    """Something does not hold. Subclasses say what."""

    request: str
    """Empty where it is of no request."""
    step: int
    """Steps run before."""
    block: int
    """Block id; 0 where it is of no block."""
    detail: str
    seen: StepSeen | None = None

    theorem = ""

    def __str__(self) -> str:
        """One line."""
        of = "".join(
            f" {name} {value}"
            for name, value in (("request", self.request), ("block", self.block))
            if value
        )
        kind = ""
        if self.seen is not None:
            kind = ", ".join([family_of(self.seen.situation), *tags_of(self.seen.situation)])
            kind = f" ({kind})"
        return f"{self.theorem} [{type(self).__name__}] step {self.step}{of}{kind}: {self.detail}"


class NotConserved(Violation):
    """Blocks were lost, or are counted twice."""

    theorem = "conservation"


class LiveStateLost(Violation):
    """A state that the next step reads, or a cached one, is not where it is looked for."""

    theorem = "live-state-kept"


class WrongOwner(LiveStateLost):
    """The block holds what other tokens, or those of another group, leave behind."""


class StalePosition(LiveStateLost):
    """The block holds the right tokens at another position, or a rejected draft."""


class WrittenByTwo(LiveStateLost):
    """Two write to the block."""


class ReadAfterFree(LiveStateLost):
    """The worker reads the block, and the request does not hold it any more."""


class WrittenAfterFree(LiveStateLost):
    """The same, written to."""


class NeverWritten(LiveStateLost):
    """The block is read, and nobody has written to it."""


class CopiedTooEarly(LiveStateLost):
    """The block is a copy of one that somebody fills in the same step, after copies have run."""


_LOST = {
    life_plan.CopiedTooEarly: CopiedTooEarly,
    life_plan.WrongOwner: WrongOwner,
    life_plan.StalePosition: StalePosition,
    life_plan.WrittenByTwo: WrittenByTwo,
    life_plan.ReadAfterFree: ReadAfterFree,
    life_plan.WrittenAfterFree: WrittenAfterFree,
    life_plan.NeverWritten: NeverWritten,
}


def state_lost(lost: StateLost, step: int, seen: StepSeen | None) -> LiveStateLost:
    """Return the violation that a lost state is.

    Args:
        lost: What was lost.
        step: Steps run before.
        seen: The last step of a request that held the block.
    """
    request = lost.request or ("" if seen is None else seen.request)
    return _LOST[type(lost)](request, step, lost.block, lost.detail, seen)


class Undercounted(Violation):
    """A step drew more than was estimated."""

    theorem = "no-undercount"


class NotExact(Violation):
    """A step drew less than was estimated."""

    theorem = "exact-estimate"


class NotAsIntended(Violation):
    """A step drew other than it needs."""

    theorem = "matches-intended"


class PoolRanDry(Violation):
    """`allocate_slots` raised: the engine ends."""

    theorem = "allocation-succeeds"


class NeverAdmitted(Violation):
    """A request that would fit a pool of its own is refused though nobody else holds a block."""

    theorem = "eventually-admitted"


class HoldsTooMany(Violation):
    """A request holds more blocks of a Mamba group than the startup sizing reserves."""

    theorem = "peak-within-sizing"


Check = Callable[["SharedPool", "Rule"], Sequence[Violation]]


# ---- conservation --------------------------------------------------------------------------------


def conservation(pool: SharedPool, rule: Rule) -> list[Violation]:
    """Free blocks, held blocks and the null block are all there are, and counted right."""
    problems = list(_not_conserved(pool))
    return [NotConserved(request, pool.num_steps, block, d) for request, block, d in problems]


def _not_conserved(pool: SharedPool) -> Iterator[tuple[str, int, str]]:
    """Request, block and what is wrong."""
    listed: Counter[int] = Counter()
    for group, manager in enumerate(pool.managers):
        for request, table in manager.req_to_blocks.items():
            ids = [block.block_id for block in table if not block.is_null]
            if len(set(ids)) < len(ids):
                twice = next(i for i, n in Counter(ids).items() if n > 1)
                yield request, twice, f"stands twice in the table of group {group}"
            listed.update(ids)
    for pair in pool.pending_copies():
        listed.update(block.block_id for block in pair)
    queue = pool.pool.free_block_queue
    free = [block.block_id for block in queue.get_all_free_blocks()]
    if len(free) != pool.pool.get_num_free_blocks():
        counter = pool.pool.get_num_free_blocks()
        yield "", 0, f"the free list has {len(free)} blocks, its counter says {counter}"
    in_list = set(free)
    if len(in_list) < len(free):
        twice = next(i for i, n in Counter(free).items() if n > 1)
        yield "", twice, "stands twice in the free list"
    for block in pool.pool.blocks:
        i = block.block_id
        if block.is_null:
            if i in in_list:
                yield "", i, "the null block is in the free list"
        elif block.ref_cnt != listed[i]:
            yield "", i, f"ref_cnt {block.ref_cnt}, listed {listed[i]} times"
        elif (block.ref_cnt > 0) == (i in in_list):
            yield (
                "",
                i,
                f"ref_cnt {block.ref_cnt}, {'' if i in in_list else 'not '}in the free list",
            )
    num_held = sum(block.ref_cnt > 0 for block in pool.pool.blocks[1:])
    if len(in_list) + num_held + 1 != pool.pool.num_gpu_blocks:
        total = pool.pool.num_gpu_blocks
        yield "", 0, f"{len(in_list)} free, {num_held} held and the null block are not {total}"


# ---- live states ---------------------------------------------------------------------------------


def live_state(pool: SharedPool, rule: Rule) -> list[Violation]:
    """What the next steps read is there: states, keys and values, cached blocks, copy sources."""
    lost: list[StateLost] = []
    readings: list[Reading] = []
    for request in pool.requests:
        if request.row is None or request.stage.value in ("loading", "leaving", "arrived"):
            continue
        if request.number in pool.scheduled:
            continue  # What it reads is checked when the step runs.
        computed = request.num_computed_tokens
        unheld, found = pool.planner.at_start(
            request.request_id,
            request.row,
            request.tokens(computed),
            computed,
            pool.held(request),
        )
        lost += unheld
        readings += found
    if not pool.is_open:
        for key, ids in hash_map_ids(pool.pool).items():
            group, tokens = int.from_bytes(key[-4:], "big"), pool.hasher.tokens(key[:-4])
            readings += (Reading("", group, block, tokens, window=block) for block in ids)
    lost += pool.shadow.check(readings)
    return [
        state_lost(one, pool.num_steps, pool.step_of_block.get(one.block))
        for one in _first_of_each(lost)
    ]


def _first_of_each(lost: Sequence[StateLost]) -> Iterator[StateLost]:
    """The first of each request, and all of cached blocks: a loss seldom comes alone."""
    met: set[str] = set()
    for one in lost:
        if one.request not in met:
            yield one
        met |= {one.request} - {""}


# ---- estimates -----------------------------------------------------------------------------------


def estimates(pool: SharedPool, rule: Rule) -> list[Violation]:
    """The step drew what was estimated, and what it needs."""
    seen = pool.seen
    if seen is None or seen.estimate is None or seen.estimate > pool.pool.num_gpu_blocks:
        return []  # Deferred by design: a hit that was cached in this same step.
    step, found = pool.num_steps, list[Violation]()
    drawn = seen.drawn
    if drawn is not None:
        numbers = f"estimate {seen.estimate}, drawn {drawn}"
        if drawn > seen.estimate:
            found.append(Undercounted(seen.request, step, 0, numbers, seen))
        elif drawn < seen.estimate:
            found.append(NotExact(seen.request, step, 0, numbers, seen))
    needed = need(seen.situation)
    if seen.estimate != needed or (drawn is not None and drawn != needed):
        numbers = f"estimate {seen.estimate}, drawn {drawn}, needed {needed}"
        found.append(NotAsIntended(seen.request, step, 0, numbers, seen))
    return found


def peak(pool: SharedPool, rule: Rule) -> list[Violation]:
    """A request's tables, and copies queued for them, hold no more than the release reserves.

    A step in flight reads the state that it started from, and may write a checkpoint: that much
    more is held for each.
    """
    per_step = 1 + (pool.geometry.num_prefill_checkpoint_blocks > 0)
    num_steps = pool.setting.num_steps_in_flight
    most = pool.reserved_at_startup + num_steps * per_step
    in_flight = f", with what {num_steps} steps in flight keep" if num_steps else ""
    return [
        HoldsTooMany(
            request.request_id,
            pool.num_steps,
            0,
            f"holds {len(held)} blocks of group {group}, {most} are reserved{in_flight}",
            pool.last_seen.get(request.request_id),
        )
        for request in pool.requests
        for group, held in enumerate(_kept(pool, pool.held(request)))
        if group > 0 and len(held) > most
    ]


def _kept(pool: SharedPool, tables: Sequence[frozenset[int]]) -> Iterator[frozenset[int]]:
    """Block ids that a request's tables list, and what copies queued for it keep, by group.

    A copy is for whoever lists its target; that of an own tail is listed by nobody, and its source
    is.
    """
    copies = [tuple(block.block_id for block in pair) for pair in pool.pending_copies()]
    if not copies:
        yield from tables
        return
    everywhere = frozenset().union(*(t for other in pool.requests for t in pool.held(other)))
    for listed in tables:
        mine = (
            (source, target)
            for source, target in copies
            if target in listed or (source in listed and target not in everywhere)
        )
        yield listed.union(*mine)


CHECKS: tuple[Check, ...] = (conservation, live_state, estimates, peak)


# ---- what is known -------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownFault:
    """A fault of releases that `docs/findings.md` describes."""

    name: str
    first: str
    """The first release that has it."""
    last: str
    theorems: tuple[str, ...]
    holds: Callable[[Situation], Any]
    """Whether a step may show it."""
    needs_step_in_flight: bool = False
    """Whether only requests with steps in flight show it."""
    violation: type[Violation] = Violation
    """What it shows as."""


_ESTIMATE = ("no-undercount", "exact-estimate", "matches-intended")


def _runs_past_a_boundary(s: Situation) -> bool:
    """Whether the chunk starts inside a block and does not stop where that block ends."""
    start, block_size = s.call.total_computed_tokens, s.geometry.block_size
    boundary = (start // block_size + 1) * block_size
    return bool(start % block_size and s.call.num_tokens_main_model > boundary)


KNOWN = (
    KnownFault(
        "external-block-not-estimated",
        "0.24.0",
        "0.33.0",
        (*_ESTIMATE, "allocation-succeeds"),
        lambda s: s.num_external_tokens > 0 and not adopts_hit(s),
    ),
    KnownFault(
        "table-longer-than-required",
        "0.24.0",
        "0.33.0",
        (*_ESTIMATE, "allocation-succeeds"),
        is_overwide,
    ),
    KnownFault(
        "estimate-grows-with-the-prompt (vLLM #57050)",
        "0.30.0",
        "0.30.0",
        ("exact-estimate", "matches-intended", "eventually-admitted"),
        lambda s: s.table_length > 0 and reserves_checkpoint(s),
    ),
    KnownFault(
        "state-cached-for-a-later-position",
        "0.30.0",
        "0.33.0",
        ("live-state-kept",),
        lambda s: s.geometry.num_prefill_checkpoint_blocks > 0 and _runs_past_a_boundary(s),
    ),
    KnownFault(
        "gate-counts-a-checkpoint-that-no-chunk-keeps",
        "0.30.0",
        "0.33.0",
        ("eventually-admitted",),
        lambda s: (
            s.table_length > 0
            and s.geometry.num_prefill_checkpoint_blocks > 0
            and s.num_request_tokens > s.call.num_tokens_main_model
        ),
    ),
    KnownFault(
        "hit-takes-more-than-it-saves",
        "0.24.0",
        "0.33.0",
        ("eventually-admitted",),
        lambda s: s.num_hit_blocks > 0,
    ),
    KnownFault(
        "draft-blocks-cached-as-states",
        "0.30.0",
        "0.31.0",
        ("live-state-kept",),
        lambda s: (
            s.geometry.num_speculative_blocks > 0
            and s.table_length > 0
            and bool(reserves_checkpoint(s))
        ),
    ),
    KnownFault(
        "tail-in-its-own-block",
        "0.26.0",
        "0.30.0",
        ("exact-estimate", "matches-intended", "eventually-admitted"),
        lambda s: s.owns_partial_tail | hits_inside_a_block(s),
    ),
    KnownFault(
        "checkpoint-takes-draft-blocks",
        "0.30.0",
        "0.31.0",
        ("matches-intended", "peak-within-sizing"),
        lambda s: s.geometry.num_speculative_blocks > 0 and reserves_checkpoint(s),
    ),
    KnownFault(
        "no-block-is-reserved-for-a-copy",
        "0.26.0",
        "0.33.0",
        ("peak-within-sizing", "eventually-admitted"),
        lambda s: s.owns_partial_tail | hits_inside_a_block(s),
    ),
    KnownFault(
        "states-in-flight-are-not-freed",
        "0.26.0",
        "0.29.0",
        ("peak-within-sizing",),
        lambda s: s.table_length > 0,
        needs_step_in_flight=True,
    ),
    KnownFault(
        "tail-cached-while-a-step-in-flight-writes-it",
        "0.26.0",
        "0.31.0",
        ("live-state-kept",),
        lambda s: s.table_length > 0 and s.call.total_computed_tokens >= s.prefill_length,
        needs_step_in_flight=True,
    ),
    KnownFault(
        "copied-before-it-is-filled",
        "0.28.0",
        "0.33.0",
        ("live-state-kept",),
        hits_inside_a_block,
        violation=CopiedTooEarly,
    ),
    KnownFault(
        "checkpoint-of-a-hit",
        "0.29.0",
        "0.29.0",
        ("exact-estimate", "matches-intended"),
        lambda s: s.geometry.num_prefill_checkpoint_blocks > 0,
    ),
)


def known_fault(
    violation: Violation, target: str, faults: Sequence[KnownFault] = KNOWN
) -> KnownFault | None:
    """Return the known fault of a target that a violation may be; None for an unknown one.

    Args:
        violation: What was found.
        target: `vllm==X.Y.Z`, or anything else, of which nothing is known.
        faults: Those to look among.
    """
    if violation.seen is None or not target.startswith("vllm=="):
        return None
    release = _numbers(target.removeprefix("vllm=="))
    for fault in faults:
        if (
            violation.theorem in fault.theorems
            and (violation.seen.num_steps_in_flight or not fault.needs_step_in_flight)
            and isinstance(violation, fault.violation)
            and _numbers(fault.first) <= release <= _numbers(fault.last)
            and bool(fault.holds(violation.seen.situation))
        ):
            return fault
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())
