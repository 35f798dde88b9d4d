"""A step of a family, run on terms through a tree's own code, along every feasible path.

Every path starts from a sample that no earlier path covers; when the solver says that there is no
such sample, the paths are all there is. That last answer is part of the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path as FilePath
from typing import Any, Protocol, TypeVar

from models import smt, term
from models.evaluate import Evaluator
from models.loader import MANAGERS, Core, CoreError, PlaceholderUsed
from models.path import Path, following
from models.rewrite import rewrite
from models.runtime import BUILTINS, call_helper
from models.step import StepRun, forgets_parked, partial_tail, table_before, tail_is_held
from models.term import BoolLike, IntLike, Unsupported
from models.traits import Traits, traits_of
from spec.assumptions import (
    ASSUMPTIONS,
    AT_MOST_ONE_CHECKPOINT_BLOCK,
    CHECKPOINT_BLOCKS,
    HASH_LOOKAHEAD_TOKENS,
    OF_THE_GATE,
    SPECULATIVE_BLOCKS,
    TABLE_HOLDS_COMPUTED_STATE,
    TAIL_ENDS_INSIDE_BLOCK,
    Assumption,
)
from spec.families import FAMILIES
from spec.logic import cdiv
from spec.theorems import ADMISSIONS, Asks, in_obligation
from spec.vocabulary import Call, Geometry, Situation, Step

#: Families whose requests may have external tokens.
_WITH_EXTERNAL = ("external-sync", "external-async", "resumed")
#: Tokens in a block, and blocks in a hit, of the samples that are looked for first.
_SMALL_SIZE = 6
#: More paths than any family has by an order of magnitude; beyond it a family is UNSUPPORTED.
MAX_PATHS = 2_000
#: What a term or a modelled container raises where Python's own would.
_RAISED_BY_MODELS = (LookupError, ArithmeticError, ValueError)
#: More likely the lifter's doing than the tree's.
_NO_OUTCOMES = (TypeError, AttributeError, NameError, RecursionError, MemoryError)


R = TypeVar("R", bound="Run")


class Run(Protocol):
    """A step that is made ready to be performed."""

    def failed(self, error: Exception) -> Step:
        """What was seen until an error ended the step."""


class NotUnderstood(Exception):
    """The lifter met a construct that it does not understand; one line with file and line."""


class MaybeMissingPaths(NotUnderstood):
    """The solver cannot say whether paths are missing; one line with its reason and budget."""


@dataclass(frozen=True, eq=False)
class PathSummary:
    """One way through a step.

    Attributes:
        condition: Holds exactly where the step runs this way, given the assumptions.
        step: What is seen of it, as terms.
        raised_at: `file:line` in the tree where the step raised, None where it did not.
        decisions: The parts of the condition, in the order in which the code asked.
        taken: Whether each decision was for what the code asked, or against.
        run: What performed the step, as it left the tree's objects; None where paths were put
            together.
    """

    condition: BoolLike
    step: Step
    raised_at: str | None = None
    decisions: tuple[BoolLike, ...] = ()
    taken: tuple[bool, ...] = ()
    run: Run | None = None


@dataclass(frozen=True, eq=False)
class Exploration:
    """All paths of a family.

    Attributes:
        situation: The symbolic situation that every path starts from.
        assumptions: Formula of each assumption in force, by slug; `family` is membership.
        paths: Disjoint, and shown to cover every situation that keeps the assumptions.
        samples: A situation per path, by variable.
        core: Slugs of the assumptions that the proof of completeness used.
        built_in: Slugs of the assumptions that every value of the variables keeps, since the
            situation is made so; nothing about it can do without them.
    """

    situation: Situation
    assumptions: Mapping[str, BoolLike]
    paths: tuple[PathSummary, ...]
    samples: tuple[Mapping[str, Any], ...]
    core: tuple[str, ...]
    built_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A setting that is explored by itself, since the questions are easier so.

    Attributes:
        eagle: Whether checkpoints lie one unit lower.
        whole_blocks: Whether hits, and so checkpoints, end at multiples of whole blocks only.
        looks_ahead: Whether hashes cover more than one token behind their own.
    """

    eagle: bool = False
    whole_blocks: bool = False
    looks_ahead: bool = False


def variants_of(traits: Traits, family: str) -> tuple[Variant, ...]:
    """Return the variants that together are all of a family's steps on a tree."""
    settings = [Variant()]
    if traits.has_eagle_drop:
        settings.append(Variant(eagle=True))
    if traits.hashes_look_ahead:
        settings.append(Variant(looks_ahead=True))
    # A hit ends inside a block only where hits need not end at whole blocks.
    if traits.aligns_checkpoints_with_hits and family != "hit-partial":
        settings += [replace(variant, whole_blocks=True) for variant in settings]
    return tuple(settings)


def lifted_core(root: FilePath) -> Core:
    """Load a tree so that its functions run on terms.

    Raises:
        CoreError: As :class:`models.loader.Core`.
    """
    return Core(root, rewrite=rewrite, overrides=BUILTINS)


def symbolic_situation(
    family: str,
    tags: tuple[str, ...] = (),
    *,
    traits: Traits,
    variant: Variant,
    asks_gate: bool = False,
    checkpoint_blocks: IntLike | None = None,
) -> Situation:
    """Return the situation of all steps of a family: variables, and 0 where it is always 0."""
    geometry = _geometry(traits, variant, checkpoint_blocks)
    make = _admission if family in ADMISSIONS else _with_table
    situation = make(family, tags, geometry)
    keeps_checkpoints = geometry.num_prefill_checkpoint_blocks != 0
    left_over = term.bool_var("has_checkpoint_before") if keeps_checkpoints is not False else False
    request_tokens = term.int_var("num_request_tokens", 1) if asks_gate else 0
    return replace(situation, has_left_over_checkpoint=left_over, num_request_tokens=request_tokens)


def _geometry(traits: Traits, variant: Variant, checkpoint_blocks: IntLike | None) -> Geometry:
    low, high = CHECKPOINT_BLOCKS[0], CHECKPOINT_BLOCKS[-1]
    if not traits.has_checkpoint_blocks:
        checkpoint_blocks = 0
    elif checkpoint_blocks is None:
        checkpoint_blocks = term.int_var("num_prefill_checkpoint_blocks", low, high)
    block_size = term.int_var("block_size", 1)
    at_blocks = traits.keeps_checkpoints_at_blocks
    hash_block_size = block_size if at_blocks else term.int_var("hash_block_size", 1)
    unit = hash_block_size
    if variant.whole_blocks:
        unit = block_size * term.int_var("num_blocks_per_hit_unit", 1)
    return Geometry(
        block_size=block_size,
        hash_block_size=hash_block_size,
        num_speculative_blocks=term.int_var(
            "num_speculative_blocks", SPECULATIVE_BLOCKS[0], SPECULATIVE_BLOCKS[-1]
        ),
        num_prefill_checkpoint_blocks=checkpoint_blocks,
        prefill_checkpoint_alignment=(
            1 if at_blocks else term.int_var("prefill_checkpoint_alignment", 1)
        ),
        drop_eagle_checkpoint_block=variant.eagle,
        cache_hit_alignment_tokens=unit,
        num_tokens_behind_checkpoint=_tokens_behind_checkpoint(traits, variant),
    )


def _tokens_behind_checkpoint(traits: Traits, variant: Variant) -> IntLike:
    if traits.keeps_checkpoints_at_blocks:
        return 0
    if variant.looks_ahead:
        return term.int_var("num_tokens_behind_checkpoint", 2, HASH_LOOKAHEAD_TOKENS)
    return 0 if variant.eagle and traits.eagle_drop_leaves_tokens else 1


def _admission(family: str, tags: tuple[str, ...], geometry: Geometry) -> Situation:
    """A request without a table: it starts from its hits and from what a connector brings."""
    has_hits, has_external = family != "first", family in _WITH_EXTERNAL
    hits: IntLike = term.int_var("num_hit_blocks", 0) if has_hits else 0
    local: IntLike = term.int_var("num_local_computed_tokens", 0) if has_hits else 0
    if family == "hit-full":
        local = hits * geometry.block_size
    external = term.int_var("num_external_tokens", 0) if has_external else 0
    return Situation(
        geometry=geometry,
        call=_call(local + external, local, parks=family == "external-async"),
        table_length=0,
        prefill_length=term.int_var("prefill_length", 1),
        num_hit_blocks=hits,
        hit_is_evictable=term.bool_var("hit_is_evictable") if has_hits else False,
        hit_is_of_this_step=term.bool_var("hit_is_of_this_step") if has_hits else False,
        num_external_tokens=external,
        loads_asynchronously=family == "external-async",
        preempted=family == "resumed",
    )


def _with_table(family: str, tags: tuple[str, ...], geometry: Geometry) -> Situation:
    """A request with a table as long as its computed tokens require, or longer."""
    computed = term.int_var("num_computed_tokens", 1)
    columns = cdiv(computed, geometry.block_size) + geometry.num_speculative_blocks
    excess = term.int_var("num_excess_columns", 1) if "overwide" in tags else 0
    return Situation(
        geometry=geometry,
        call=_call(computed, computed, parks=False),
        table_length=columns + excess,
        prefill_length=term.int_var("prefill_length", 1),
        parked=family == "promoted",
        owns_partial_tail=family == "own-tail" or "own-tail" in tags,
    )


def _call(computed: IntLike, local: IntLike, *, parks: bool) -> Call:
    return Call(
        num_tokens=term.int_var("num_tokens", 1),
        num_tokens_main_model=computed if parks else term.int_var("num_tokens_main_model", 1),
        total_computed_tokens=computed,
        num_local_computed_tokens=local,
        prefill_end=term.int_var("prefill_end", 0),
    )


def explore(
    core: Core,
    family: str,
    tags: tuple[str, ...],
    variant: Variant = Variant(),
    *,
    asks: Asks = Asks.STEP,
    checkpoint_blocks: IntLike | None = None,
    seeds: Sequence[Mapping[str, Any]] = (),
) -> Exploration:
    """Run a family's step along every feasible path.

    Args:
        core: The tree, loaded by :func:`lifted_core`.
        family: Slug.
        tags: Which of its steps.
        variant: In which setting.
        asks: What is done with the request.
        checkpoint_blocks: K, where it is not to be any.
        seeds: Values that may be samples, of another setting say; they spare questions.

    Raises:
        NotUnderstood: A construct is not understood, or the solver cannot say whether paths are
            missing.
        CoreError: A symbol that the step needs is missing in the tree.
    """
    traits, asks_gate = traits_of(core), asks in (Asks.GATE, Asks.LIFETIME)
    situation = symbolic_situation(
        family,
        tags,
        traits=traits,
        variant=variant,
        asks_gate=asks_gate,
        checkpoint_blocks=checkpoint_blocks,
    )
    if asks is Asks.REMOVAL:
        situation = replace(
            situation,
            num_in_flight_tokens=term.int_var("num_in_flight_tokens", 0),
            num_just_ended_tokens=term.int_var("num_just_ended_tokens", 0),
        )
    if asks is not Asks.LIFETIME and _has_own_table(situation) and _forgets_parked(core, traits):
        situation = replace(situation, was_parked=term.bool_var("was_parked"))
    extra = (*traits.assumptions(), *(OF_THE_GATE if asks_gate else ()))
    assumptions = _assumptions(situation, family, tags, extra)
    run = {Asks.REMOVAL: StepRun.removal, Asks.LIFETIME: StepRun.later_step}.get(asks, StepRun.step)
    make = partial(StepRun, core, traits, situation, asks_gate=asks is Asks.GATE)
    along = partial(run_along, core, make, run)
    found = all_paths(core, along, situation, assumptions, family, seeds)
    return Exploration(
        situation,
        assumptions,
        found.paths,
        found.samples,
        found.core,
        _built_in(situation, extra),
    )


@dataclass(frozen=True)
class Found:
    """All paths of a run, a sample of each, and the assumptions that completeness needs."""

    paths: tuple[PathSummary, ...]
    samples: tuple[Mapping[str, Any], ...]
    core: tuple[str, ...]


def all_paths(
    core: Core,
    run: Callable[[Sequence[BoolLike], Mapping[str, Any]], PathSummary],
    situation: Situation,
    assumptions: Mapping[str, BoolLike],
    what: str,
    seeds: Sequence[Mapping[str, Any]] = (),
) -> Found:
    """Run along every feasible path.

    Paths come in the order of what they decided, whichever the solver found first.

    Args:
        core: The tree.
        run: Runs along the path of a sample, given what may be assumed.
        situation: What every path starts from.
        assumptions: Formula of each assumption, by slug.
        what: Is run, for messages.
        seeds: Values that may be samples; they are looked at before the solver is asked.

    Raises:
        NotUnderstood: As :func:`explore`.
    """
    question = smt.Question(assumptions)
    small = tuple(_small(situation))
    found: list[tuple[PathSummary, Mapping[str, Any]]] = []
    new = _on_no_path(assumptions, seeds, found)
    while True:
        sample = next(new, None)
        if sample is None:
            result = question.ask(*small)
            if result.answer is not smt.Answer.SAT:
                result = question.ask()
            if result.answer is smt.Answer.UNKNOWN and found:
                result = _side_by_side(assumptions, [path for path, _ in found])
            if result.answer is smt.Answer.UNSAT:
                found.sort(key=lambda each: each[0].taken)
                paths = tuple(path for path, _ in found)
                return Found(paths, tuple(sample for _, sample in found), result.core)
            if result.answer is smt.Answer.UNKNOWN:
                raise MaybeMissingPaths(f"{what}: paths may be missing: {result.reason}")
            sample = result.values
        if len(found) == MAX_PATHS:
            raise NotUnderstood(f"{core.file_of(MANAGERS)}: more than {MAX_PATHS} paths")
        summary = run(tuple(assumptions.values()), sample)
        found.append((summary, sample))
        question.add(term.negation(summary.condition))


def _on_no_path(
    assumptions: Mapping[str, BoolLike],
    seeds: Sequence[Mapping[str, Any]],
    found: Sequence[tuple[PathSummary, Mapping[str, Any]]],
) -> Iterator[Mapping[str, Any]]:
    """Yield the seeds that keep the assumptions and lie on none of the paths found so far."""
    for seed in seeds:
        evaluator = Evaluator(seed)
        if all(map(evaluator.truth, assumptions.values())) and not any(
            evaluator.truth(path.condition) for path, _ in found
        ):
            yield seed


def _small(situation: Situation) -> Iterator[BoolLike]:
    """Sizes among which a sample is found sooner, where there is one."""
    for name in ("block_size", "hash_block_size", "prefill_checkpoint_alignment"):
        yield getattr(situation.geometry, name) <= _SMALL_SIZE
    yield situation.call.num_tokens_main_model <= _SMALL_SIZE**2
    yield situation.num_hit_blocks <= _SMALL_SIZE


def _forgets_parked(core: Core, traits: Traits) -> bool:
    try:
        return forgets_parked(core, traits)
    except CoreError:
        raise
    except (Unsupported, PlaceholderUsed, Exception) as error:
        raise _not_understood(core, error) from error


def _has_own_table(situation: Situation) -> bool:
    """Whether earlier computed steps left the table, whatever the request began with."""
    return not isinstance(situation.table_length, int) and situation.parked is not True


def _side_by_side(assumptions: Mapping[str, BoolLike], paths: Sequence[PathSummary]) -> smt.Result:
    """Ask whether paths are missing decision by decision, where asking at once was too hard.

    Code decides alike after equal decisions, so whatever lies on no path lies on the side of some
    decision that no path took; each such side is a question of its own. That needs a path.
    """
    prefixes = [path.decisions[: i + 1] for path in paths for i in range(len(path.decisions))]
    taken = {_ids(prefix) for prefix in prefixes}
    untaken = [(*before, term.negation(last)) for *before, last in prefixes]
    question = smt.Question(assumptions)
    core: dict[str, None] = {}
    for side in {_ids(side): side for side in untaken if _ids(side) not in taken}.values():
        result = question.ask(*side)
        if result.answer is not smt.Answer.UNSAT:
            return result
        core.update(dict.fromkeys(result.core))
    return smt.Result(smt.Answer.UNSAT, core=tuple(core))


def _ids(decisions: Sequence[BoolLike]) -> tuple[int, ...]:
    """Terms are interned: equal ones are one object."""
    return tuple(map(id, decisions))


def _assumptions(
    situation: Situation, family: str, tags: tuple[str, ...], extra: Sequence[Assumption]
) -> dict[str, BoolLike]:
    found = {assumption.slug: assumption.holds(situation) for assumption in (*ASSUMPTIONS, *extra)}
    found["family"] = FAMILIES[family].holds(situation) & in_obligation(situation, family, tags)
    if not isinstance(situation.table_length, int):
        held = tail_is_held(table_before(situation), situation.geometry.num_speculative_blocks)
        found[TABLE_HOLDS_COMPUTED_STATE.slug] &= held
    if situation.owns_partial_tail is True:
        found[TAIL_ENDS_INSIDE_BLOCK.slug] &= term.negation(partial_tail(situation)[1].is_null)
    if isinstance(situation.geometry.num_prefill_checkpoint_blocks, int):
        del found[AT_MOST_ONE_CHECKPOINT_BLOCK.slug]
    return {slug: formula for slug, formula in found.items() if formula is not True}


def _built_in(situation: Situation, extra: Sequence[Assumption]) -> tuple[str, ...]:
    """Assumptions that hold by how the situation is made; the table's: by its length."""
    has_table = not isinstance(situation.table_length, int)
    return tuple(
        assumption.slug
        for assumption in (*ASSUMPTIONS, *extra)
        if assumption.holds(situation) is True
        and (has_table or assumption is not TABLE_HOLDS_COMPUTED_STATE)
    )


def run_along(
    core: Core,
    make: Callable[[], R],
    perform: Callable[[R], Step],
    assumptions: Sequence[BoolLike],
    sample: Mapping[str, Any],
) -> PathSummary:
    """Make a run and perform its step, along the path of a sample.

    Raises:
        NotUnderstood: A construct is not understood.
        CoreError: A symbol that the step needs is missing in the tree.
    """
    path = Path(sample, tuple(assumptions))
    try:
        with following(path):
            run = make()
    except CoreError:
        raise
    except (Unsupported, PlaceholderUsed, Exception) as error:
        raise _not_understood(core, error) from error
    try:
        with following(path):
            step, raised_at = perform(run), None
    except (Unsupported, PlaceholderUsed) as error:
        raise _not_understood(core, error) from error
    except Exception as error:
        if not _is_outcome(core, error):
            raise _not_understood(core, error) from error
        step, raised_at = run.failed(error), core.location(error)
    decisions = tuple(path.literals)
    condition = term.conjunction(decisions)
    return PathSummary(condition, step, raised_at, decisions, tuple(path.taken), run)


def _not_understood(core: Core, error: BaseException) -> NotUnderstood:
    kind = "" if isinstance(error, Unsupported | PlaceholderUsed) else f"{type(error).__name__}: "
    return NotUnderstood(f"{core.location(error) or core.file_of(MANAGERS)}: {kind}{error}")


def _is_outcome(core: Core, error: Exception) -> bool:
    """Whether the tree's own code would have raised this on numbers."""
    if isinstance(error, _NO_OUTCOMES):
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback is not None
    innermost = traceback.tb_frame.f_code
    was_called_by_tree = innermost is call_helper.__code__
    return (
        was_called_by_tree
        or FilePath(innermost.co_filename).is_relative_to(core.root)
        or isinstance(error, _RAISED_BY_MODELS)
    )


def summary_of(exploration: Exploration, values: Mapping[str, Any]) -> PathSummary | None:
    """Return the path that a sample takes, None where it breaks an assumption."""
    evaluator = Evaluator(values)
    if not all(evaluator.truth(formula) for formula in exploration.assumptions.values()):
        return None
    taken = [path for path in exploration.paths if evaluator.truth(path.condition)]
    assert len(taken) == 1, f"{len(taken)} paths for one situation"
    return taken[0]
