"""What the lifted code of a tree does in one situation made of numbers, and what that breaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import intended, smt, term
from models.evaluate import Evaluator
from models.groups import LARGE_POOL, explore_groups, on_a_large_pool
from models.held import SOME_COLUMN
from models.lift import Exploration, Found, Variant, explore, lifted_core, summary_of, variants_of
from models.prove import Prover, in_numbers
from models.traits import Traits, traits_of
from spec.families import family_of, is_overwide, reserves_checkpoint
from spec.logic import cdiv, greatest
from spec.states import (
    column_just_read,
    column_of_last_ended_token,
    column_of_last_token,
    running_column,
)
from spec.theorems import (
    ADMISSIONS,
    LATER_PREFILLS,
    MAMBA_GROUPS_OF,
    OBLIGATIONS,
    THEOREMS,
    Asks,
    Need,
    least_pool,
    manager_of,
)
from spec.vocabulary import Situation, Step

#: Variables of which a request has at least as many tokens.
_TOKENS_OF_A_STEP = ("num_tokens", "num_tokens_main_model")


class LiftedTree:
    """The explored step of a tree, family by family, each explored once.

    Args:
        root: Folder holding `vllm/`.

    Raises:
        CoreError: The tree cannot be loaded.
    """

    def __init__(self, root: Path) -> None:
        self._core = lifted_core(root)
        self.traits = traits_of(self._core)
        self._explored: dict[tuple[Any, ...], Exploration] = {}
        self._parts: dict[Any, Found] = {}

    def exploration(
        self,
        family: str,
        tags: tuple[str, ...],
        variant: Variant,
        *,
        asks: Asks = Asks.STEP,
        num_mamba_groups: int = 0,
    ) -> Exploration:
        """Return all paths of a family in one setting.

        Args:
            family: Slug.
            tags: Which of its steps.
            variant: The setting.
            asks: What is done with the request.
            num_mamba_groups: Mamba groups beside a full-attention group; 0 is one Mamba manager by
                itself.

        Raises:
            NotUnderstood: The lifter does not understand the code.
        """
        key = (family, tags, variant, asks, num_mamba_groups)
        if key not in self._explored:
            if num_mamba_groups:
                one = self.exploration(family, tags, variant, asks=asks)
                found = explore_groups(
                    self._core, self.traits, one, num_mamba_groups, asks=asks, known=self._parts
                )
            else:
                seeds = tuple(self._seeds(family, tags))
                found = explore(self._core, family, tags, variant, asks=asks, seeds=seeds)
            self._explored[key] = found
        return self._explored[key]

    def _seeds(self, family: str, tags: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
        """Yield samples of a kind's other settings, whose paths are much the same."""
        for (its_family, its_tags, *_, num_mamba_groups), exploration in self._explored.items():
            if (its_family, its_tags) == (family, tags) and not num_mamba_groups:
                for sample in exploration.samples:
                    yield from (sample, *_with_request_tokens(sample))

    def explorations_of(
        self,
        family: str,
        tags: tuple[str, ...],
        *,
        asks: Asks = Asks.STEP,
        manager: str = "mamba-align",
    ) -> Iterator[Exploration]:
        """Yield all paths of a family, setting by setting; a removal is the same in each.

        Where a coordinator adds up groups, each number of groups is a setting.

        Raises:
            NotUnderstood: The lifter does not understand the code.
        """
        is_removal = asks is Asks.REMOVAL
        for variant in (Variant(),) if is_removal else variants_of(self.traits, family):
            for number in MAMBA_GROUPS_OF[manager]:
                yield self.exploration(family, tags, variant, asks=asks, num_mamba_groups=number)

    def explorations(self) -> Iterator[tuple[str, tuple[str, ...], Variant, Exploration]]:
        """Yield family, tags, setting and paths of everything that has obligations here."""
        for family, tags in OBLIGATIONS:
            if self.traits.why_not(family, tags) is None:
                for variant in variants_of(self.traits, family):
                    yield family, tags, variant, self.exploration(family, tags, variant)

    def predict(
        self, situation: Situation, *, checkpoint_before: bool, column_to_retire_before: int = -1
    ) -> Step | None:
        """Return what is seen of the step, None where the release cannot be asked this.

        Args:
            situation: Made of numbers.
            checkpoint_before: Whether the step before kept an internal checkpoint.
            column_to_retire_before: Column that is recorded as the next to free; -1 is none.
        """
        family, tags = obligation_of(situation)
        variant = _variant_of(situation)
        is_asked = self.traits.why_not(family, tags) is None and all(
            assumption.holds(situation) for assumption in self.traits.assumptions()
        )
        if not is_asked or variant not in variants_of(self.traits, family):
            return None
        exploration = self.exploration(
            family,
            tags,
            variant,
            asks=_asked(situation, family),
            num_mamba_groups=situation.num_mamba_groups,
        )
        values = _values_before(situation, checkpoint_before, column_to_retire_before)
        path = summary_of(exploration, values)
        if path is None:
            return None
        return step_in_numbers(path.step, values, _columns_that_may_be_left(situation))

    def broken_removals(
        self, situation: Situation, *, checkpoint_before: bool, column_to_retire_before: int = -1
    ) -> tuple[str, ...]:
        """Return the theorems about removals that the one before a step breaks, with one in flight.

        What a loop does in one column depends on others, so that the solver is asked. Arguments are
        those of `predict`.
        """
        family, tags = obligation_of(situation)
        (exploration,) = self.explorations_of(family, tags, asks=Asks.REMOVAL)
        values = _values_before(situation, checkpoint_before, column_to_retire_before)
        question = smt.Question(exploration.assumptions)
        question.add(*_pinned(values, running_column(situation)))
        prover = Prover(exploration)
        return tuple(
            slug
            for slug, theorem in THEOREMS.items()
            if theorem.asks_removal
            and theorem.why_not(family, tags) is None
            and self.traits.why_not(family, tags, slug) is None
            and question.ask(prover.violation(theorem)).answer is smt.Answer.SAT
        )


def _pinned(values: Mapping[str, Any], running: int) -> Iterator[term.BoolLike]:
    """That variables have these values, and that the table's columns hold a block, or do not."""
    for atom in tuple(term.ATOMS):
        if atom.kind == "var" and atom.args[0] in values:
            name = atom.args[0]
            yield term.int_var(name, atom.low, atom.high) == int(values[name])
    for name in ("has_checkpoint_before", "has_column_to_retire_before", "was_parked"):
        yield term.bool_var(name) if values[name] else term.negation(term.bool_var(name))
    for column in range(running + 1):
        is_null = term.cell("block_table", column) == 0
        yield term.negation(is_null) if values["block_table"].get(column) else is_null


def _values_before(
    situation: Situation, checkpoint_before: bool, column_to_retire_before: int
) -> Mapping[str, Any]:
    """A situation's numbers, and what earlier steps left, by variable."""
    return {
        **values_of(situation),
        "has_checkpoint_before": checkpoint_before,
        "has_column_to_retire_before": column_to_retire_before >= 0,
        "column_to_retire_before": column_to_retire_before,
        "num_retired_blocks_before": max(column_just_read(situation), 0),
        "block_table": _Columns(situation, checkpoint_before=checkpoint_before),
    }


def _with_request_tokens(sample: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a sample of a step as samples of what asks the gate as well: no more, and some more."""
    if "num_request_tokens" not in sample:
        step = max(sample.get(name, 1) for name in _TOKENS_OF_A_STEP)
        for tokens in (step, step + 2 * sample.get("block_size", 1)):
            yield {**sample, "num_request_tokens": tokens}


def step_in_numbers(step: Step, values: Mapping[str, Any], columns: Iterable[int]) -> Step:
    """Return a step under an assignment; what is claimed of any column holds in each of these."""
    each = (Evaluator({**values, SOME_COLUMN: column}) for column in columns)
    held_well = all(evaluator.truth(step.only_states_are_held) for evaluator in each)
    return replace(in_numbers(step, Evaluator(values)), only_states_are_held=held_well)


def _columns_that_may_be_left(situation: Situation) -> range:
    """Columns that a claim about any column is looked at in: the others were null before."""
    first = max(running_column(situation) - 1, 0)
    return range(first, max(situation.table_length, first + 1))


def _asked(situation: Situation, family: str) -> Asks:
    """What is done in a situation: the gate is asked about those that wait, or was before."""
    if situation.num_request_tokens > 0 and family in ADMISSIONS:
        return Asks.GATE
    was_asked = situation.num_request_tokens > 0 and not situation.num_mamba_groups
    return Asks.LIFETIME if was_asked and family in LATER_PREFILLS else Asks.STEP


def _variant_of(situation: Situation) -> Variant:
    geometry = situation.geometry
    is_fine = geometry.cache_hit_alignment_tokens == geometry.hash_block_size
    return Variant(
        eagle=bool(geometry.drop_eagle_checkpoint_block),
        whole_blocks=not is_fine,
        looks_ahead=geometry.num_tokens_behind_checkpoint > 1,
    )


def obligation_of(situation: Situation) -> tuple[str, tuple[str, ...]]:
    """Return the family and tags under which a situation's obligations are listed."""
    told_apart = {
        "checkpoint": reserves_checkpoint(situation),
        "overwide": is_overwide(situation),
        "own-tail": situation.owns_partial_tail,
    }
    family = family_of(situation)
    return family, tuple(tag for tag, holds in told_apart.items() if holds and tag != family)


class _Columns(dict[int, int]):
    """Ids of the blocks of a table that one or two steps made: null before its running state.

    A checkpoint that the last of them kept, and a partial tail of the request's own, lie in blocks
    as well.
    """

    def __init__(self, situation: Situation, *, checkpoint_before: bool) -> None:
        super().__init__()
        self._first_held = running_column(situation) - checkpoint_before
        # Steps in flight, and the one that ended last, keep the states that they started from.
        in_flight = situation.num_in_flight_tokens > 0
        kept = {column_of_last_ended_token(situation), column_just_read(situation)}
        self._in_flight = kept if in_flight else set()
        self._tail = column_of_last_token(situation)
        self._has_tail = situation.owns_partial_tail

    def get(self, column: int, default: Any = 1) -> Any:
        """`dict.get`: 0 is the null block."""
        is_tail = self._has_tail and column == self._tail
        is_held = column >= self._first_held or is_tail or column in self._in_flight
        return default if is_held else 0


def values_of(situation: Situation) -> Mapping[str, Any]:
    """Return a situation's numbers by the names of the variables that stand for them."""
    call, geometry = situation.call, situation.geometry
    columns = cdiv(call.total_computed_tokens, geometry.block_size)
    excess = situation.table_length - columns - geometry.num_speculative_blocks
    return {
        **vars(geometry),
        "num_blocks_per_hit_unit": geometry.cache_hit_alignment_tokens // geometry.block_size,
        "num_tokens": call.num_tokens,
        "num_tokens_main_model": call.num_tokens_main_model,
        "num_computed_tokens": call.total_computed_tokens,
        "num_local_computed_tokens": call.num_local_computed_tokens,
        "num_external_tokens": situation.num_external_tokens,
        "num_hit_blocks": situation.num_hit_blocks,
        "hit_is_evictable": situation.hit_is_evictable,
        "hit_is_of_this_step": situation.hit_is_of_this_step,
        "num_gpu_blocks": LARGE_POOL,
        "num_excess_columns": excess if situation.table_length else 0,
        "was_parked": situation.was_parked,
        "num_request_tokens": situation.num_request_tokens,
        **_values_of_groups(situation),
        "prefill_end": call.prefill_end,
        "prefill_length": situation.prefill_length,
        "num_in_flight_tokens": situation.num_in_flight_tokens,
        "num_just_ended_tokens": situation.num_just_ended_tokens,
    }


def _values_of_groups(situation: Situation) -> Mapping[str, Any]:
    if not situation.num_mamba_groups:
        return {}
    speculative = situation.geometry.num_speculative_blocks
    excess = situation.attention_table_length - (situation.table_length - speculative)
    return {
        "num_excess_attention_columns": excess if situation.table_length else 0,
        "num_evictable_attention_hits": situation.num_evictable_attention_hits,
        "other_hits_are_evictable": situation.other_hits_are_evictable,
        **on_a_large_pool(situation),
    }


def violated(situation: Situation, step: Step, traits: Traits) -> tuple[str, ...]:
    """Return the theorems that a step made of numbers breaks, on the least pool that passes."""
    family, tags = obligation_of(situation)
    manager, need = manager_of(situation), Need(intended.need(situation))
    return tuple(
        slug
        for slug, theorem in THEOREMS.items()
        if manager in theorem.managers
        and (step.raised is None or theorem.survives_exception)
        and (situation.num_request_tokens > 0 or not theorem.asks_gate)
        and not theorem.asks_removal
        and theorem.why_not(family, tags) is None
        and traits.why_not(family, tags, slug) is None
        and not theorem.holds(situation, step, least_pool(theorem, step), need)
    )


def _attention_columns_after(situation: Situation) -> int:
    if not situation.num_mamba_groups:
        return 0
    columns = cdiv(situation.call.num_tokens, situation.geometry.block_size)
    return int(greatest(situation.attention_table_length, columns))


def after(situation: Situation, *, num_tokens: int, prefill_length: int) -> Situation:
    """Return the situation of the next step of the same request, up to ``num_tokens``."""
    computed = situation.call.num_tokens_main_model
    call = replace(
        situation.call,
        num_tokens=num_tokens,
        num_tokens_main_model=num_tokens,
        total_computed_tokens=computed,
        num_local_computed_tokens=computed,
    )
    return Situation(
        geometry=situation.geometry,
        call=call,
        table_length=intended.table_length(situation),
        prefill_length=prefill_length,
        num_request_tokens=situation.num_request_tokens,
        num_mamba_groups=situation.num_mamba_groups,
        attention_table_length=_attention_columns_after(situation),
        parked=situation.loads_asynchronously,
        was_parked=(situation.parked or situation.was_parked)
        and not intended.adds_columns(situation),
    )
