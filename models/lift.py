"""A step of a family, run on terms through a tree's own code, along every feasible path.

Every path starts from a sample that no earlier path covers; when the solver says that there is no
such sample, the paths are all there is. That last answer is part of the proof.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from models import smt, term
from models.containers import Block, Pending, Pool, Table
from models.evaluate import Evaluator
from models.loader import Core, PlaceholderUsed
from models.path import Path, following
from models.rewrite import rewrite
from models.runtime import BUILTINS
from models.term import BoolLike, IntLike, Unsupported
from spec.assumptions import (
    ASSUMPTIONS,
    AT_MOST_ONE_CHECKPOINT_BLOCK,
    CHECKPOINT_BLOCKS,
    SPECULATIVE_BLOCKS,
)
from spec.families import FAMILIES
from spec.logic import cdiv
from spec.theorems import in_obligation
from spec.vocabulary import Call, Geometry, Situation, Step

REQUEST = "request"
#: More paths than any family has by an order of magnitude; beyond it a family is UNSUPPORTED.
MAX_PATHS = 2_000
_OUTCOMES = (AssertionError, ValueError, LookupError, ArithmeticError, RuntimeError)


class NotUnderstood(Exception):
    """The lifter met a construct that it does not understand; one line with file and line."""


@dataclass(frozen=True)
class PathSummary:
    """One way through a step.

    Attributes:
        condition: Holds exactly where the step runs this way, given the assumptions.
        step: What is seen of it, as terms.
        raised_at: `file:line` in the tree where the step raised, None where it did not.
    """

    condition: BoolLike
    step: Step
    raised_at: str | None = None


@dataclass(frozen=True)
class Exploration:
    """All paths of a family.

    Attributes:
        situation: The symbolic situation that every path starts from.
        assumptions: Formula of each assumption in force, by slug; `family` is membership.
        paths: Disjoint, and shown to cover every situation that keeps the assumptions.
        samples: A situation per path, by variable.
        core: Slugs of the assumptions that the proof of completeness used.
    """

    situation: Situation
    assumptions: Mapping[str, BoolLike]
    paths: tuple[PathSummary, ...]
    samples: tuple[Mapping[str, Any], ...]
    core: tuple[str, ...]


def lifted_core(root: FilePath) -> Core:
    """Load a tree so that its functions run on terms.

    Raises:
        CoreError: As :class:`models.loader.Core`.
    """
    return Core(root, rewrite=rewrite, overrides=BUILTINS)


def symbolic_situation(
    family: str, *, eagle: bool, checkpoint_blocks: IntLike | None = None
) -> Situation:
    """Return the situation of all steps of a family: variables, and 0 where it is always 0."""
    low, high = CHECKPOINT_BLOCKS[0], CHECKPOINT_BLOCKS[-1]
    blocks = term.int_var("num_prefill_checkpoint_blocks", low, high)
    geometry = Geometry(
        block_size=term.int_var("block_size", 1),
        hash_block_size=term.int_var("hash_block_size", 1),
        num_speculative_blocks=term.int_var(
            "num_speculative_blocks", SPECULATIVE_BLOCKS[0], SPECULATIVE_BLOCKS[-1]
        ),
        num_prefill_checkpoint_blocks=blocks if checkpoint_blocks is None else checkpoint_blocks,
        prefill_checkpoint_alignment=term.int_var("prefill_checkpoint_alignment", 1),
        drop_eagle_checkpoint_block=eagle,
    )
    is_admission = family == "first"
    computed = 0 if is_admission else term.int_var("num_computed_tokens", 1)
    return Situation(
        geometry=geometry,
        call=Call(
            num_tokens=term.int_var("num_tokens", 1),
            num_tokens_main_model=term.int_var("num_tokens_main_model", 1),
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            prefill_end=term.int_var("prefill_end", 0),
        ),
        table_length=0 if is_admission else _table_length(computed, geometry),
        prefill_length=term.int_var("prefill_length", 1),
    )


def _table_length(computed: IntLike, geometry: Geometry) -> IntLike:
    """The one length that the assumption `table-holds-computed-state` leaves."""
    length: IntLike = cdiv(computed, geometry.block_size) + geometry.num_speculative_blocks
    return length


def explore(
    core: Core,
    family: str,
    tags: tuple[str, ...],
    *,
    eagle: bool,
    checkpoint_blocks: IntLike | None = None,
) -> Exploration:
    """Run a family's step along every feasible path.

    Raises:
        NotUnderstood: A construct is not understood, or the solver cannot say whether paths are
            missing.
        CoreError: A symbol that the step needs is missing in the tree.
    """
    situation = symbolic_situation(family, eagle=eagle, checkpoint_blocks=checkpoint_blocks)
    assumptions = _assumptions(core, situation, family, tags)
    question = smt.Question(assumptions)
    paths: list[PathSummary] = []
    samples: list[Mapping[str, Any]] = []
    while True:
        result = question.ask()
        if result.answer is smt.Answer.UNSAT:
            return Exploration(
                situation, assumptions, tuple(paths), tuple(samples), result.core
            )
        if result.answer is smt.Answer.UNKNOWN or len(paths) == MAX_PATHS:
            raise NotUnderstood(f"{family}: paths may be missing: {result.reason or MAX_PATHS}")
        summary = _run(core, situation, tuple(assumptions.values()), result.values)
        paths.append(summary)
        samples.append(result.values)
        question.add(term.negation(summary.condition))


def _assumptions(
    core: Core, situation: Situation, family: str, tags: tuple[str, ...]
) -> dict[str, BoolLike]:
    found = {assumption.slug: assumption.holds(situation) for assumption in ASSUMPTIONS}
    found["family"] = FAMILIES[family].holds(situation)
    if family == "first":
        found["family"] = found["family"] & in_obligation(situation, tags)
    if not takes_prefill_end(core):
        found["release-is-dense"] = situation.call.prefill_end == 0
    found.update(_tail_is_held_before(situation))
    if isinstance(situation.geometry.num_prefill_checkpoint_blocks, int):
        del found[AT_MOST_ONE_CHECKPOINT_BLOCK.slug]
    return {slug: formula for slug, formula in found.items() if formula is not True}


def _tail_is_held_before(situation: Situation) -> dict[str, BoolLike]:
    if isinstance(situation.table_length, int):
        return {}
    table = _table_before(situation)
    return {"table-tail-is-held": _tail_is_held(table, situation.geometry.num_speculative_blocks)}


def _tail_is_held(table: Table, num_speculative_blocks: IntLike) -> BoolLike:
    """The last 1 + S blocks are not null; the last S, which hold drafts, can be moved."""
    column_of_state = table.length - 1 - num_speculative_blocks
    parts = []
    for ahead in range(SPECULATIVE_BLOCKS[-1] + 1):
        block = table.column(column_of_state + ahead)
        beyond = num_speculative_blocks < ahead
        parts.append(beyond | term.negation(block.is_null))
        if ahead:
            parts.append(beyond | block.writable)
    return term.conjunction(parts)


def _table_before(situation: Situation) -> Table:
    return Table(
        situation.table_length,
        lambda column: Block(
            term.cell("block_table", column), term.cell("block_is_movable", column) == 1
        ),
    )


def takes_prefill_end(core: Core) -> bool:
    """Whether this release's estimator is told where the prefill ends."""
    estimator = core.symbol_of_manager("MambaManager", "get_num_blocks_to_allocate")
    return "prefill_end" in inspect.signature(estimator).parameters


def _run(
    core: Core,
    situation: Situation,
    assumptions: tuple[BoolLike, ...],
    sample: Mapping[str, Any],
) -> PathSummary:
    path = Path(sample, assumptions)
    with following(path):
        try:
            run = _StepRun(core, situation)
        except _OUTCOMES as error:
            raise NotUnderstood(f"{core.location(error)}: building the state: {error!r}") from error
        except (Unsupported, PlaceholderUsed, TypeError, AttributeError) as error:
            raise NotUnderstood(f"{core.location(error)}: {error}") from error
        try:
            step, raised_at = run.step(), None
        except (Unsupported, PlaceholderUsed, TypeError, AttributeError) as error:
            raise NotUnderstood(f"{core.location(error)}: {error}") from error
        except _OUTCOMES as error:
            step, raised_at = run.failed(error), core.location(error)
        return PathSummary(term.conjunction(path.literals), step, raised_at)


class _StepRun:
    """A manager built by its own ``__init__`` on symbolic sizes, and one step of it."""

    def __init__(self, core: Core, situation: Situation) -> None:
        self.situation = situation
        geometry = situation.geometry
        self._with_end = takes_prefill_end(core)
        spec = core.symbol_of("MambaSpec")(
            block_size=geometry.block_size,
            shapes=((1, 1),),
            dtypes=(None,),
            mamba_cache_mode="align",
            num_speculative_blocks=geometry.num_speculative_blocks,
            num_prefill_checkpoint_blocks=geometry.num_prefill_checkpoint_blocks,
            prefill_checkpoint_alignment=geometry.prefill_checkpoint_alignment,
        )
        self.pool = Pool(geometry.hash_block_size, term.int_var("num_gpu_blocks", 1))
        self.manager = core.symbol_of("MambaManager")(
            spec,
            block_pool=self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=geometry.block_size,
        )
        self.manager.drop_eagle_checkpoint_block = geometry.drop_eagle_checkpoint_block
        self.manager.req_to_blocks = _Tables()
        self.dry_run: IntLike = 0
        self.estimate: IntLike = 0
        self.dry_run_left_state: BoolLike = True
        if not isinstance(situation.table_length, int):
            self._give_table()

    def step(self) -> Step:
        """Dry run, estimate, allocation: the manager's part of `KVCacheManager.allocate_slots`."""
        call = self.situation.call
        before = self._state()
        self.dry_run = self._estimate(call, dry=True)
        self.dry_run_left_state = self._state() == before
        self.estimate = self._estimate(call, dry=False)
        self.manager.allocate_new_blocks(REQUEST, call.num_tokens, call.num_tokens_main_model)
        table = self.manager.req_to_blocks[REQUEST]
        return Step(
            dry_run=self.dry_run,
            estimate=self.estimate,
            drawn=self.pool.drawn,
            table_length=table.length,
            dry_run_left_state=self.dry_run_left_state,
            tail_is_held=_tail_is_held(table, self.situation.geometry.num_speculative_blocks),
        )

    def failed(self, error: Exception) -> Step:
        """What was seen until ``error`` ended the step."""
        return Step(
            dry_run=self.dry_run,
            estimate=self.estimate,
            drawn=self.pool.drawn,
            table_length=self.situation.table_length,
            dry_run_left_state=self.dry_run_left_state,
            raised=type(error).__name__,
        )

    def _estimate(self, call: Call, *, dry: bool) -> IntLike:
        end = {"prefill_end": call.prefill_end} if self._with_end else {}
        estimate: IntLike = self.manager.get_num_blocks_to_allocate(
            REQUEST,
            call.num_tokens,
            [],
            call.total_computed_tokens,
            call.num_local_computed_tokens,
            call.num_tokens_main_model,
            apply_admission_cap=dry,
            **end,
        )
        return estimate

    def _give_table(self) -> None:
        """Admit one token by the release's own code, then let table and checkpoint be any."""
        self._estimate(Call(1, 1, 0, 0), dry=False)
        self.manager.allocate_new_blocks(REQUEST, 1, 1)
        self.pool.drawn = 0
        self.manager.req_to_blocks[REQUEST] = _table_before(self.situation)
        if hasattr(self.manager, "_checkpoints"):
            left_over = term.int_var("checkpoint_before", 1), term.int_var("column_before", 0)
            present = term.bool_var("has_checkpoint_before")
            self.manager._checkpoints = Pending(REQUEST, present, left_over)

    def _state(self) -> Any:
        return _frozen({**vars(self.manager), "drawn": self.pool.drawn})


class _Tables(dict[str, Table]):
    """`req_to_blocks`: an absent request has an empty table."""

    def __missing__(self, key: str) -> Table:
        return self.setdefault(key, Table())


def _frozen(value: Any) -> Any:
    """A comparable picture of state: an absent key equals an empty table."""
    if isinstance(value, term.Int | term.Bool):
        return value._key
    if isinstance(value, Table):
        return (_frozen(value.length), id(value._at)) if value.length != 0 else ()
    if isinstance(value, Pending):
        return _frozen(value.present), _frozen(value.value)
    if isinstance(value, dict):
        pairs = ((key, _frozen(item)) for key, item in value.items())
        return tuple((key, item) for key, item in pairs if item != ())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(value)
    return value if isinstance(value, int | str | None) else id(value)


def summary_of(exploration: Exploration, values: Mapping[str, Any]) -> PathSummary | None:
    """Return the path that a sample takes, None where it breaks an assumption."""
    evaluator = Evaluator(values)
    if not all(evaluator.truth(formula) for formula in exploration.assumptions.values()):
        return None
    taken = [path for path in exploration.paths if evaluator.truth(path.condition)]
    assert len(taken) == 1, f"{len(taken)} paths for one situation"
    return taken[0]

