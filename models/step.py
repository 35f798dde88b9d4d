"""One step of a manager on terms: the state it starts from, the calls, and what is seen of it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models import term
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
from models.loader import MANAGERS, Core, CoreError
from models.term import BoolLike, IntLike, Unsupported
from spec.assumptions import SPECULATIVE_BLOCKS
from spec.vocabulary import Call, Situation, Step

REQUEST = "request"
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


def tail_is_held(table: Table, num_speculative_blocks: IntLike) -> BoolLike:
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


def table_before(situation: Situation) -> Table:
    """Return the table that the step finds: any blocks, of the situation's length."""
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


class StepRun:
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
            tail_is_held=tail_is_held(table, self.situation.geometry.num_speculative_blocks),
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
        self.manager.req_to_blocks[REQUEST] = table_before(self.situation)
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
    table = table_before(situation)
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
