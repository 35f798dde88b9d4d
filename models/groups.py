"""One step of several KV-cache groups: `KVCacheManager.allocate_slots` and its coordinator.

Both run on terms as they stand in the tree. The groups' managers are stood in for by what is known
of them already: the full-attention manager and the align-mode manager are explored each by itself,
and a stand-in answers with a variable for each of their answers, after which the paths of all are
put together. What that rests on is checked: that the coordinator asks every manager exactly what
its exploration was about, in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any

from models import smt, term
from models.containers import Block, Pending, Table
from models.evaluate import Evaluator
from models.lift import Exploration, Found, NotUnderstood, PathSummary, all_paths, run_along
from models.loader import COORDINATOR, Core
from models.slots import ANSWERS, SlotsRun, names_of_groups
from models.step import REQUEST, ManagerRun
from models.substitute import Substitution
from models.term import BoolLike, IntLike
from models.traits import Traits
from spec.assumptions import (
    COMPUTED_TOKENS_ARE_LOCAL_OR_EXTERNAL,
    GROUPS_SHARE_BLOCK_SIZE,
    HIT_ENDS_WITH_LOCAL_TOKENS,
    HITS_ARE_WHOLE_BLOCKS,
    LOOKAHEAD_ADDS_TOKENS,
    MAMBA_GROUPS_AGREE,
    NULL_BLOCK_IS_NOT_FREE,
    OF_GROUPS,
    OF_THE_COORDINATOR,
    OF_THE_GATE,
    PROMPT_HAS_TOKENS,
    RELEASE_IS_DENSE,
    RETENTION_DECIDES_PREFILL_END,
    RETENTION_IS_OF_COORDINATOR,
    STEP_COMPUTES_TOKENS,
    TOKENS_FIT_MODEL,
)
from spec.logic import cdiv
from spec.theorems import Asks
from spec.vocabulary import Situation, Step

#: Blocks in a pool that refuses nothing.
LARGE_POOL = 2**60
#: Variables of a Mamba group that may differ in the ones behind the first.
_OF_OTHER_GROUPS: Mapping[str, Callable[[], Any]] = {
    "hit_is_evictable": partial(term.bool_var, "other_hits_are_evictable"),
    "hit_ref_cnt": partial(term.int_var, "other_hit_ref_cnt", 1),
}


class AttentionRun(ManagerRun):
    """One step of the full-attention manager, given what the Mamba groups are asked."""

    def __init__(
        self, core: Core, traits: Traits, situation: Situation, *, asks_gate: bool = False
    ) -> None:
        spec = core.symbol_of("FullAttentionSpec")(
            block_size=situation.geometry.block_size, num_kv_heads=1, head_size=1, dtype=None
        )
        kind = "FullAttentionManager"
        super().__init__(core, traits, situation, kind=kind, spec=spec, asks_gate=asks_gate)
        self._is_admission = isinstance(situation.table_length, int)
        if not self._is_admission:
            columns = situation.attention_table_length
            self.manager.req_to_blocks[REQUEST] = Table(columns, lambda column: _OWN_BLOCK)
            num_cached = term.int_var("num_cached_attention_blocks", 0)
            name = "num_cached_block"
            vars(self.manager)[name] = Pending(REQUEST, True, num_cached, name=name)

    def step(self) -> Step:
        """Gate, dry run, estimate, adoption, allocation."""
        hits = self._hits()
        self.ask(hits)
        self.adopt(hits)
        self.allocate()
        return Step(
            gate=self.gate,
            dry_run=self.dry_run,
            estimate=self.estimate,
            drawn=self.pool.drawn + self.pool.touched,
            table_length=self.table().length,
            dry_run_left_state=self.dry_run_left_state,
        )

    def _has_hits(self) -> bool:
        s = self.situation
        return self._is_admission and bool(s.call.num_local_computed_tokens > 0)

    def _hits(self) -> Table:
        """Blocks that somebody references, then those that nobody does."""
        if not self._has_hits():
            return Table.of_runs()
        situation = self.situation
        evictable = situation.num_evictable_attention_hits
        columns = cdiv(situation.call.num_local_computed_tokens, situation.geometry.block_size)
        last_is_evictable = evictable > 0
        num_before = evictable - term.int_of(last_is_evictable)
        refs = term.int_var("attention_hit_ref_cnt", 1)
        return Table.of_runs(
            (columns - 1 - num_before, Block(_HIT_IDS[0], False, refs)),
            (num_before, Block(_HIT_IDS[1], False, 0)),
            (1, Block(_HIT_IDS[2], False, term.choose(last_is_evictable, 0, refs))),
        )


#: No answer depends on which block of the full-attention table is which.
_OWN_BLOCK = Block(1, True, 1, None)
_HIT_IDS = (2, 3, 4)


def with_groups(situation: Situation, num_mamba_groups: int) -> Situation:
    """Return a symbolic situation of one Mamba manager as that of several groups."""
    if isinstance(situation.table_length, int):
        has_hits = not isinstance(situation.num_hit_blocks, int)
        columns: IntLike = 0
    else:
        has_hits = False
        excess = term.int_var("num_excess_attention_columns", 0)
        speculative = situation.geometry.num_speculative_blocks
        columns = situation.table_length - speculative + excess
    evictable = term.int_var("num_evictable_attention_hits", 0) if has_hits else 0
    others = term.bool_var("other_hits_are_evictable")
    return replace(
        situation,
        num_mamba_groups=num_mamba_groups,
        attention_table_length=columns,
        num_evictable_attention_hits=evictable,
        other_hits_are_evictable=others if has_hits and num_mamba_groups > 1 else False,
    )


def explore_groups(
    core: Core,
    traits: Traits,
    mamba: Exploration,
    num_mamba_groups: int,
    *,
    asks: Asks = Asks.STEP,
    known: dict[Any, Found],
) -> Exploration:
    """Put together the paths of several groups and of what adds them up.

    Args:
        core: The tree.
        traits: What its align-mode manager knows.
        mamba: All paths of the align-mode manager in a kind of step.
        num_mamba_groups: How many groups it manages.
        asks: What is done with the request, there as here.
        known: Paths of the full-attention group and of `allocate_slots` that are known already;
            they do not depend on the setting, and what is found is added.

    Raises:
        NotUnderstood: A construct is not understood, or the groups are not asked what their
            explorations are about.
        CoreError: A symbol that the step needs is missing in the tree.
    """
    asks_gate = asks is Asks.GATE
    situation = with_groups(mamba.situation, num_mamba_groups)
    put = Substitution({name: variable() for name, variable in _OF_OTHER_GROUPS.items()})
    assumptions = {
        slug: term.conjunction((formula, put.truth(formula)))
        for slug, formula in mamba.assumptions.items()
    }
    assumptions |= _assumptions(situation, traits, asks_gate=asks_gate)
    of_call = {slug: one for slug, one in assumptions.items() if slug in _ABOUT_THE_CALL}
    key = asks, *_what_is_asked(situation)
    if key not in known:
        make = partial(AttentionRun, core, traits, situation, asks_gate=asks_gate)
        run = partial(run_along, core, make, AttentionRun.step)
        known[key] = all_paths(core, run, situation, of_call, "the full-attention group")
    attention = known[key]
    of_slots = (num_mamba_groups, *key)
    if of_slots not in known:
        found = _explore_slots(core, situation, of_call, num_mamba_groups, asks_gate=asks_gate)
        known[of_slots] = found
    slots = known[of_slots]
    have_hits = not isinstance(situation.num_hit_blocks, int)
    of_another = _put(put, mamba.paths) if have_hits and num_mamba_groups > 1 else mamba.paths
    others = [of_another] * (num_mamba_groups - 1)
    admitted = [path for path in slots.paths if path.step.refused is False]
    joined = [
        path
        for slot in _merged(admitted)
        for path in _joined(slot, (_merged(attention.paths), mamba.paths, *others))
    ]
    # The paths of each part cover all there is, so what is on none of these was refused.
    refused = term.negation(term.disjunction(path.condition for path in joined))
    nothing = Step(0, 0, 0, situation.table_length, True, refused=True)
    return Exploration(
        situation,
        assumptions,
        (*joined, PathSummary(refused, nothing)),
        tuple({**sample, **on_a_large_pool(situation, sample)} for sample in mamba.samples),
        tuple(dict.fromkeys((*mamba.core, *attention.core, *slots.core))),
        (*mamba.built_in, *_built_in(situation)),
    )


#: Assumptions that the full-attention group and `allocate_slots` are explored under: those that no
#: setting changes, and not which family it is.
_ABOUT_THE_CALL = frozenset(
    assumption.slug
    for assumption in (
        *(STEP_COMPUTES_TOKENS, LOOKAHEAD_ADDS_TOKENS, COMPUTED_TOKENS_ARE_LOCAL_OR_EXTERNAL),
        *(HIT_ENDS_WITH_LOCAL_TOKENS, RETENTION_DECIDES_PREFILL_END, PROMPT_HAS_TOKENS),
        *(RELEASE_IS_DENSE, HITS_ARE_WHOLE_BLOCKS, *OF_THE_GATE),
        *(*OF_GROUPS, *OF_THE_COORDINATOR),
    )
)


def _what_is_asked(situation: Situation) -> tuple[Any, ...]:
    """All of a situation that its full-attention group and `allocate_slots` can see."""
    seen = (
        *vars(situation.call).values(),
        situation.geometry.block_size,
        *(getattr(situation, field.name) for field in fields(situation)[2:]),
    )
    return tuple(one._key if isinstance(one, term.Int | term.Bool) else one for one in seen)


def _explore_slots(
    core: Core,
    situation: Situation,
    assumptions: Mapping[str, BoolLike],
    num_mamba_groups: int,
    *,
    asks_gate: bool,
) -> Found:
    """All paths of `allocate_slots`, whatever its groups answer."""

    def make() -> SlotsRun:
        return SlotsRun(core, situation, num_mamba_groups, asks_gate=asks_gate)

    run = partial(run_along, core, make, SlotsRun.step)
    found = all_paths(core, run, situation, assumptions, "allocate_slots")
    question = smt.Question(assumptions)
    through = (path for path in found.paths if path.step.raised is None)
    result = question.ask(term.disjunction(map(_asked_otherwise, through)))
    if result.answer is not smt.Answer.UNSAT:
        file = core.file_of(COORDINATOR)
        raise NotUnderstood(f"{file}: groups may be asked something else than the step's numbers")
    return found


def _asked_otherwise(path: PathSummary) -> BoolLike:
    """Where a path is taken and a group is asked something else than the step's numbers."""
    assert isinstance(path.run, SlotsRun)
    return term.conjunction((path.condition, path.run.mismatches()))


def _assumptions(situation: Situation, traits: Traits, *, asks_gate: bool) -> dict[str, BoolLike]:
    found = {assumption.slug: assumption.holds(situation) for assumption in OF_GROUPS}
    call, most = situation.call, term.int_var("max_model_len", 1)
    fits = [call.num_tokens <= most]
    if asks_gate:
        fits.append(situation.num_request_tokens <= most)
    found[TOKENS_FIT_MODEL.slug] = term.conjunction(fits)
    free, blocks = term.int_var("free_blocks", 0), term.int_var("num_gpu_blocks", 1)
    found[NULL_BLOCK_IS_NOT_FREE.slug] = free < blocks
    if traits.takes_prefill_end:
        is_sparse = term.int_var("retention_interval", 0) == 0
        end = term.choose(is_sparse, situation.prefill_length, 0)
        found[RETENTION_IS_OF_COORDINATOR.slug] = call.prefill_end == end
    return {slug: formula for slug, formula in found.items() if formula is not True}


def on_a_large_pool(situation: Situation, sample: Mapping[str, Any] = {}) -> Mapping[str, int]:
    """Return the coordinator's variables in a step that is not refused, by name.

    Args:
        situation: What is asked: in numbers, or as terms of the sample.
        sample: Value by variable.
    """
    number, call = Evaluator(sample).number, situation.call
    return {
        "free_blocks": LARGE_POOL - 1,
        "num_gpu_blocks": LARGE_POOL,
        "max_model_len": max(number(call.num_tokens), number(situation.num_request_tokens)),
        "retention_interval": int(number(call.prefill_end) == 0),
    }


def _built_in(situation: Situation) -> Iterator[str]:
    """Assumptions that hold by how several groups are made here."""
    yield from (GROUPS_SHARE_BLOCK_SIZE.slug, MAMBA_GROUPS_AGREE.slug)
    yield from (a.slug for a in OF_GROUPS if a.holds(situation) is True)


def _put(put: Substitution, paths: Sequence[PathSummary]) -> tuple[PathSummary, ...]:
    """The paths of a Mamba group behind the first, where a hit of its own can be another."""
    return tuple(
        replace(path, condition=put.truth(path.condition), step=put.record(path.step))
        for path in paths
    )


def _merged(paths: Sequence[PathSummary]) -> tuple[PathSummary, ...]:
    """Paths that go through as one, whose numbers are chosen by their conditions."""
    through = [path for path in paths if path.step.raised is None]
    if not through:
        return tuple(paths)
    *others, last = through
    step = last.step
    for path in others:
        numbers = {
            name: term.choose(path.condition, getattr(path.step, name), getattr(step, name))
            for name in (*ANSWERS, "table_length")
        }
        left = term.conjunction((path.step.dry_run_left_state, step.dry_run_left_state))
        step = replace(step, **numbers, dry_run_left_state=left)
    where = term.disjunction(path.condition for path in through)
    failed = (path for path in paths if path.step.raised is not None)
    return (PathSummary(where, step), *failed)


def _joined(slot: PathSummary, groups: Sequence[Sequence[PathSummary]]) -> Iterator[PathSummary]:
    """Yield the ways through `allocate_slots` by the ways through each of its groups."""
    names = names_of_groups(len(groups) - 1)
    for parts in product(*groups):
        where = term.conjunction(part.condition for part in parts)
        if where is False:
            continue
        put = Substitution(
            {
                f"{name}_{answer}": getattr(part.step, answer)
                for name, part in zip(names, parts, strict=True)
                for answer in ANSWERS
            }
        )
        condition = term.conjunction((put.truth(slot.condition), where))
        if condition is not False:
            yield _path(condition, replace(slot, step=put.record(slot.step)), parts)


def _path(condition: BoolLike, slot: PathSummary, parts: Sequence[PathSummary]) -> PathSummary:
    attention, mamba, *_ = (part.step for part in parts)
    ended = (one for one in (*parts, slot) if one.step.raised is not None)
    raised, sums = next(ended, None), slot.step
    step = replace(
        mamba,
        gate=sums.gate,
        dry_run=sums.dry_run,
        estimate=sums.estimate,
        drawn=sums.drawn,
        dry_run_left_state=term.conjunction(part.step.dry_run_left_state for part in parts),
        attention_table_length=attention.table_length,
        deferred=term.disjunction(part.step.deferred for part in parts),
        raised=None if raised is None else raised.step.raised,
    )
    return PathSummary(condition, step, None if raised is None else raised.raised_at)
