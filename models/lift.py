"""A step of a family, run on terms through a tree's own code, along every feasible path.

Every path starts from a sample that no earlier path covers; when the solver says that there is no
such sample, the paths are all there is. That last answer is part of the proof.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from models import smt, term
from models.containers import (
    FIRST_FRESH_ID,
    Block,
    Log,
    Members,
    Pending,
    Pool,
    Table,
    Tables,
    modelled_state,
    state_of_earlier_steps,
)
from models.evaluate import Evaluator
from models.loader import MANAGERS, Core, CoreError, PlaceholderUsed
from models.path import Path, following
from models.rewrite import rewrite
from models.runtime import BUILTINS, call_helper
from models.term import BoolLike, IntLike, Unsupported
from spec.assumptions import (
    ASSUMPTIONS,
    AT_MOST_ONE_CHECKPOINT_BLOCK,
    CHECKPOINT_BLOCKS,
    RELEASE_IS_DENSE,
    SPECULATIVE_BLOCKS,
    TABLE_HOLDS_COMPUTED_STATE,
)
from spec.families import FAMILIES
from spec.logic import cdiv
from spec.theorems import in_obligation
from spec.vocabulary import Call, Geometry, Situation, Step

REQUEST = "request"
#: More paths than any family has by an order of magnitude; beyond it a family is UNSUPPORTED.
MAX_PATHS = 2_000
#: What a term or a modelled container raises where Python's own would.
_RAISED_BY_MODELS = (LookupError, ArithmeticError, ValueError)
#: More likely the lifter's doing than the tree's.
_NO_OUTCOMES = (TypeError, AttributeError, NameError, RecursionError, MemoryError)
#: Per-request state whose content is known in every step of the families, by attribute: the table
#: and the records of a pending checkpoint and of the column to retire are symbolic, a request with
#: a table was allocated blocks, and one without hits (see the families) has no partial hit. Other
#: state may be anything.
_KNOWN_STATE = frozenset(
    {
        "req_to_blocks",
        "_checkpoints",
        "last_state_block_idx",
        "_allocated_block_reqs",
        "_partial_hit_reqs",
    }
)
#: Parts of a manager that are no state of it, or that the situation says.
_NO_STATE = frozenset({"kv_cache_spec", "block_pool", "_null_block", "drop_eagle_checkpoint_block"})


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
    """

    condition: BoolLike
    step: Step
    raised_at: str | None = None
    decisions: tuple[BoolLike, ...] = ()


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
        has_left_over_checkpoint=term.bool_var("has_checkpoint_before"),
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
        if result.answer is smt.Answer.UNKNOWN and paths:
            result = _side_by_side(assumptions, paths)
        if result.answer is smt.Answer.UNSAT:
            return Exploration(
                situation,
                assumptions,
                tuple(paths),
                tuple(samples),
                result.core,
                _built_in(core, situation),
            )
        if result.answer is smt.Answer.UNKNOWN:
            raise MaybeMissingPaths(f"{family}: paths may be missing: {result.reason}")
        if len(paths) == MAX_PATHS:
            raise NotUnderstood(f"{core.file_of(MANAGERS)}: more than {MAX_PATHS} paths")
        summary = _run(core, situation, tuple(assumptions.values()), result.values)
        paths.append(summary)
        samples.append(result.values)
        question.add(term.negation(summary.condition))


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
    core: Core, situation: Situation, family: str, tags: tuple[str, ...]
) -> dict[str, BoolLike]:
    found = {assumption.slug: assumption.holds(situation) for assumption in ASSUMPTIONS}
    found["family"] = FAMILIES[family].holds(situation)
    if family == "first":
        found["family"] = found["family"] & in_obligation(situation, tags)
    if not takes_prefill_end(core):
        found[RELEASE_IS_DENSE.slug] = RELEASE_IS_DENSE.holds(situation)
    if not isinstance(situation.table_length, int):
        held = _tail_is_held(_table_before(situation), situation.geometry.num_speculative_blocks)
        found[TABLE_HOLDS_COMPUTED_STATE.slug] &= held
    if isinstance(situation.geometry.num_prefill_checkpoint_blocks, int):
        del found[AT_MOST_ONE_CHECKPOINT_BLOCK.slug]
    return {slug: formula for slug, formula in found.items() if formula is not True}


def _built_in(core: Core, situation: Situation) -> tuple[str, ...]:
    """Assumptions that hold by how the situation is made; the table's: by its length."""
    has_table = not isinstance(situation.table_length, int)
    return tuple(
        assumption.slug
        for assumption in ASSUMPTIONS
        if assumption.holds(situation) is True
        and (has_table or assumption is not TABLE_HOLDS_COMPUTED_STATE)
    )


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
    try:
        with following(path):
            run = _StepRun(core, situation)
    except CoreError:
        raise
    except (Unsupported, PlaceholderUsed, Exception) as error:
        raise _not_understood(core, error) from error
    try:
        with following(path):
            step, raised_at = run.step(), None
    except (Unsupported, PlaceholderUsed) as error:
        raise _not_understood(core, error) from error
    except Exception as error:
        if not _is_outcome(core, error):
            raise _not_understood(core, error) from error
        step, raised_at = run.failed(error), core.location(error)
    decisions = tuple(path.literals)
    return PathSummary(term.conjunction(decisions), step, raised_at, decisions)


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


class _StepRun:
    """A manager built by its own ``__init__`` on symbolic sizes, and one step of it."""

    def __init__(self, core: Core, situation: Situation) -> None:
        self.situation = situation
        geometry = situation.geometry
        self._with_end = takes_prefill_end(core)
        core.symbol_of_manager("MambaManager", "allocate_new_blocks")
        spec = core.symbol_of("MambaSpec")(
            block_size=geometry.block_size,
            shapes=((1, 1),),
            dtypes=(None,),
            mamba_cache_mode="align",
            num_speculative_blocks=geometry.num_speculative_blocks,
            num_prefill_checkpoint_blocks=geometry.num_prefill_checkpoint_blocks,
            prefill_checkpoint_alignment=geometry.prefill_checkpoint_alignment,
        )
        self.pool = Pool(geometry.hash_block_size)
        self.manager = core.symbol_of("MambaManager")(
            spec,
            block_pool=self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=geometry.block_size,
        )
        parts = vars(self.manager)
        _require(core, parts, "req_to_blocks", "drop_eagle_checkpoint_block")
        self.manager.drop_eagle_checkpoint_block = geometry.drop_eagle_checkpoint_block
        for name, value in parts.items():
            parts[name] = modelled_state(name, value, REQUEST)
        _hide(self.manager, _may_have_changed(core, self.manager))
        self.dry_run: IntLike = 0
        self.estimate: IntLike = 0
        self.dry_run_left_state: BoolLike = True
        self._let_checkpoint_be_any()
        if not isinstance(situation.table_length, int):
            self._give_table()

    def step(self) -> Step:
        """Dry run, estimate, allocation: the manager's part of `KVCacheManager.allocate_slots`."""
        call = self.situation.call
        before = self._state()
        self.dry_run = self._estimate(call, dry=True)
        self.dry_run_left_state = self._state() == before
        self.estimate = self._estimate(call, dry=False)
        retired_before = self._column_to_retire()
        returned = _as_table(
            self.manager.allocate_new_blocks(REQUEST, call.num_tokens, call.num_tokens_main_model)
        )
        table = _as_table(self.manager.req_to_blocks[REQUEST])
        pending, position, column = self._pending_checkpoint()
        return Step(
            dry_run=self.dry_run,
            estimate=self.estimate,
            drawn=self.pool.drawn,
            table_length=table.length,
            dry_run_left_state=self.dry_run_left_state,
            tail_is_held=_tail_is_held(table, self.situation.geometry.num_speculative_blocks),
            checkpoint_is_pending=pending,
            checkpoint_position=position,
            checkpoint_column=column,
            checkpoint_block_is_held=term.disjunction(
                (term.negation(pending), _holds_block(table, column))
            ),
            returned_new_columns=_are_columns(returned, table, self.situation.table_length),
            no_block_is_twice=_no_block_is_twice(self.situation, table),
            column_to_retire_before=retired_before,
            column_to_retire=self._column_to_retire(),
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
        parts = vars(self.manager)
        for name in parts.keys() - _KNOWN_STATE:
            parts[name] = state_of_earlier_steps(name, parts[name])
        self.manager.req_to_blocks[REQUEST] = _table_before(self.situation)
        self._let_checkpoint_be_any()
        if "last_state_block_idx" in parts:
            parts["last_state_block_idx"] = Pending(
                REQUEST,
                term.bool_var("has_column_to_retire_before"),
                term.int_var("column_to_retire_before", 0),
                name="last_state_block_idx",
            )

    def _let_checkpoint_be_any(self) -> None:
        """An estimate whose check fails leaves its checkpoint behind, so even an admission may."""
        if "_checkpoints" in vars(self.manager):
            left_over = term.int_var("checkpoint_before", 1), term.int_var("column_before", 0)
            present = self.situation.has_left_over_checkpoint
            self.manager._checkpoints = Pending(REQUEST, present, left_over)

    def _pending_checkpoint(self) -> tuple[BoolLike, IntLike, IntLike]:
        pending = vars(self.manager).get("_checkpoints")
        if pending is None or pending.present is False:
            return False, 0, 0
        position, column = pending.value
        return pending.present, position, column

    def _column_to_retire(self) -> IntLike:
        record = vars(self.manager).get("last_state_block_idx")
        if record is None or record.present is False:
            return -1
        column: IntLike = term.choose(record.present, record.value, -1)
        return column

    def _state(self) -> Any:
        return _frozen([vars(self.manager), vars(self.pool)])


def _as_table(blocks: Any) -> Table:
    return Table.of(blocks) if isinstance(blocks, list) else blocks


def _holds_block(table: Table, column: IntLike) -> BoolLike:
    inside = term.conjunction((column >= 0, column < table.length))
    return term.conjunction((inside, term.negation(table.column(column).is_null)))


def _are_columns(returned: Table, table: Table, first: IntLike) -> BoolLike:
    """Whether ``returned`` is the table's columns from ``first`` on, at any index."""
    index = term.int_var("some_column", 0)
    same = returned.column(index).is_same_block(table.column(first + index))
    at_index = term.disjunction((index >= returned.length, same))
    return term.conjunction((returned.length == table.length - first, at_index))


def _no_block_is_twice(situation: Situation, table: Table) -> BoolLike:
    """Whether any two columns hold different blocks, if any two of the table before did.

    The premise is said of the columns that the two may come from: themselves, and the speculative
    blocks, which move.
    """
    first, second = term.int_var("first_column", 0), term.int_var("second_column", 0)
    a, b = table.column(first), table.column(second)
    differ = term.disjunction((a.is_null, term.negation(a.is_same_block(b))))
    premise = [first < second, second < table.length, *_distinct_before(situation, first, second)]
    return term.disjunction((term.negation(term.conjunction(premise)), differ))


def _distinct_before(situation: Situation, *columns: IntLike) -> Iterator[BoolLike]:
    if isinstance(situation.table_length, int):
        return
    table = _table_before(situation)
    speculative = range(1, SPECULATIVE_BLOCKS[-1] + 1)
    sources = [*columns, *(situation.table_length - behind for behind in speculative)]
    for source in sources:
        yield table.column(source).block_id < FIRST_FRESH_ID
    for one, other in itertools.combinations(sources, 2):
        a, b = table.column(one), table.column(other)
        yield term.disjunction((one == other, a.is_null, term.negation(a.is_same_block(b))))


def _require(core: Core, parts: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in parts:
            raise CoreError(f"{core.file_of(MANAGERS)}: no MambaManager.{name} here (renamed?)")


def _may_have_changed(core: Core, manager: Any) -> frozenset[str]:
    """Attributes whose value in the middle of serving this model does not know.

    A number or an object that a method changes, or that another part of vLLM sets, is not what
    `__init__` left; containers are modelled one by one.
    """
    plain = (int, str, bytes, float, tuple, frozenset, type, term.Int, term.Bool, type(None))
    modelled = (Pending, Members, Log, Tables)
    parts = vars(manager)
    strange = {name for name, value in parts.items() if not isinstance(value, (*plain, *modelled))}
    return frozenset(
        name
        for name in core.attributes_stored_after_init() | strange
        if name not in _NO_STATE
        and not isinstance(parts.get(name), modelled)
        and not callable(getattr(type(manager), name, None))
        and not isinstance(getattr(type(manager), name, None), property)
    )


def _hide(manager: Any, names: frozenset[str]) -> None:
    """Make reading these attributes Unsupported; storing them stays possible."""

    def hidden(name: str) -> property:
        def read(self: Any) -> Any:
            if term.decide is not None:
                raise Unsupported(f"{name} may have changed since __init__, and is not modelled")
            return vars(self)[name]

        def store(self: Any, value: Any) -> None:
            vars(self)[name] = value

        return property(read, store)

    kind = type(manager)
    manager.__class__ = type(kind.__name__, (kind,), {name: hidden(name) for name in names})


@dataclass(frozen=True)
class _Same:
    """Compares by identity, and keeps what it compares alive, so that identity stays its own."""

    of: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.of is other.of


def _frozen(value: Any) -> Any:
    """A comparable picture of state: an absent key equals an empty table."""
    if isinstance(value, term.Int | term.Bool):
        return value._key
    if isinstance(value, Table):
        return (_frozen(value.length), _Same(value._at)) if value.length != 0 else ()
    if isinstance(value, Pending):
        return () if value.present is False else (_frozen(value.present), _frozen(value.value))
    if isinstance(value, Members):
        return value.is_known, frozenset(set.__iter__(value))
    if isinstance(value, dict):
        pairs = ((key, _frozen(item)) for key, item in dict.items(value))
        return tuple((key, item) for key, item in pairs if item != ())
    if isinstance(value, list):
        return tuple(map(_frozen, list.__iter__(value)))
    if isinstance(value, tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(value)
    return value if isinstance(value, int | str | None) else _Same(value)


def summary_of(exploration: Exploration, values: Mapping[str, Any]) -> PathSummary | None:
    """Return the path that a sample takes, None where it breaks an assumption."""
    evaluator = Evaluator(values)
    if not all(evaluator.truth(formula) for formula in exploration.assumptions.values()):
        return None
    taken = [path for path in exploration.paths if evaluator.truth(path.condition)]
    assert len(taken) == 1, f"{len(taken)} paths for one situation"
    return taken[0]
