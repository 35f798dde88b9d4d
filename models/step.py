"""One step of a manager on terms: the state it starts from, the calls, and what is seen of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from models import term
from models.containers import (
    FIRST_FRESH_ID,
    NULL_BLOCK,
    Block,
    BlockHash,
    Log,
    Members,
    Pending,
    Pool,
    Table,
    Tables,
    modelled_state,
    state_of_earlier_steps,
)
from models.held import (
    SOME_COLUMN,
    Copy,
    drawn_are_held,
    held_before,
    only_states_are_held,
    removal_freed_ended,
    removal_freed_skipped,
    state_is_in_place,
)
from models.loader import MANAGERS, Core, CoreError
from models.path import Path, following
from models.runtime import current_path
from models.sizing import reserved_at_startup
from models.term import BoolLike, IntLike, Unsupported
from models.traits import Traits
from spec.assumptions import SPECULATIVE_BLOCKS
from spec.logic import cdiv, greatest
from spec.vocabulary import Call, Geometry, Situation, Step

REQUEST = "request"
#: Per-request state whose content is known in every step of the families, by attribute: the table
#: and the records of a pending checkpoint and of the column to retire are symbolic, a request with
#: a table was allocated blocks, and one without hits (see the families) has no partial hit. Other
#: state may be anything.
_KNOWN_STATE = frozenset(
    {
        "req_to_blocks",
        "_checkpoints",
        "_num_checkpoint_blocks",
        "last_state_block_idx",
        "_num_retired_blocks",
        "_allocated_block_reqs",
        "_partial_hit_reqs",
    }
)
#: Parts of a manager that are no state of it, or that the situation says.
_NO_STATE = frozenset({"kv_cache_spec", "block_pool", "_null_block"})
#: Attributes that `KVCacheCoordinator` sets after it has built its managers, by geometry.
_SET_BY_COORDINATOR = frozenset({"drop_eagle_checkpoint_block", "cache_hit_alignment_tokens"})
#: 0.29.0 keeps how many blocks a pending checkpoint takes, and not where it lies.
_COUNT = "_num_checkpoint_blocks"


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


def partial_tail(situation: Situation) -> tuple[IntLike, Block]:
    """Return the column that the computed tokens end in, and the block that is there before."""
    column = cdiv(situation.call.total_computed_tokens, situation.geometry.block_size) - 1
    return column, table_before(situation).column(column)


class ManagerRun:
    """A manager built by its own ``__init__`` on symbolic sizes, alone on a pool.

    Args:
        core: The tree.
        traits: What its align-mode manager knows.
        situation: What a step is asked, and the state that it starts from.
        kind: Class of the manager.
        spec: What it is built with.
        asks_gate: Whether the full-sequence gate is asked before.
    """

    def __init__(
        self,
        core: Core,
        traits: Traits,
        situation: Situation,
        *,
        kind: str,
        spec: Any,
        asks_gate: bool,
    ) -> None:
        self.situation = situation
        self._traits, self._asks_gate = traits, asks_gate
        self._with_local = takes_local_computed_tokens(core)
        geometry = situation.geometry
        behind = geometry.num_tokens_behind_checkpoint
        lookahead = behind if traits.hashes_look_ahead and not isinstance(behind, int) else 0
        self.pool = Pool(geometry.hash_block_size, lookahead)
        self.manager = core.symbol_of(kind)(
            spec,
            block_pool=self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=geometry.block_size,
        )
        parts = vars(self.manager)
        if "req_to_blocks" not in parts:
            file = core.file_of(MANAGERS)
            raise CoreError(f"{file}: no {kind}.req_to_blocks here (renamed?)")
        for name in _SET_BY_COORDINATOR & parts.keys():
            setattr(self.manager, name, getattr(geometry, name))
        for name, value in parts.items():
            parts[name] = modelled_state(name, value, REQUEST)
        hide(self.manager, _may_have_changed(core, self.manager))
        self.gate: IntLike = 0
        self.dry_run: IntLike = 0
        self.estimate: IntLike = 0
        self.dry_run_left_state: BoolLike = True

    def ask(self, hits: Any) -> None:
        """Ask the gate, where it is asked, the dry run and the estimate."""
        call, request = self.situation.call, self.situation.num_request_tokens
        if self._asks_gate:
            whole = replace(call, num_tokens=request, num_tokens_main_model=request)
            self.gate = self._estimate(whole, hits, dry=True)
        before = self._state()
        self.dry_run = self._estimate(call, hits, dry=True)
        self.dry_run_left_state = self._state() == before
        self.estimate = self._estimate(call, hits, dry=False)

    def adopt(self, hits: Any) -> None:
        """`KVCacheCoordinator.allocate_new_computed_blocks`, for the one group."""
        external = self.situation.num_external_tokens
        if self._has_hits() or external > 0:
            local = self.situation.call.num_local_computed_tokens
            self.manager.add_local_computed_blocks(REQUEST, hits, local, external)
            if external > 0:
                self.manager.allocate_external_computed_blocks(REQUEST, local, external)

    def allocate(self) -> Table:
        """Allocate the step's blocks, and return what the manager returns."""
        call = self.situation.call
        return _as_table(
            self.manager.allocate_new_blocks(REQUEST, call.num_tokens, call.num_tokens_main_model)
        )

    def table(self) -> Table:
        """Return the request's block table."""
        return _as_table(self.manager.req_to_blocks[REQUEST])

    def failed(self, error: Exception) -> Step:
        """What was seen until ``error`` ended the step."""
        return Step(
            gate=self.gate,
            dry_run=self.dry_run,
            estimate=self.estimate,
            drawn=self.pool.drawn + self.pool.touched,
            table_length=self.situation.table_length,
            dry_run_left_state=self.dry_run_left_state,
            raised=type(error).__name__,
        )

    def _has_hits(self) -> bool:
        return bool(self.situation.num_hit_blocks > 0)

    def _estimate(self, call: Call, hits: Any, *, dry: bool) -> IntLike:
        local = (call.num_local_computed_tokens,) if self._with_local else ()
        end = {"prefill_end": call.prefill_end} if self._traits.takes_prefill_end else {}
        estimate: IntLike = self.manager.get_num_blocks_to_allocate(
            REQUEST,
            call.num_tokens,
            hits,
            call.total_computed_tokens,
            *local,
            call.num_tokens_main_model,
            apply_admission_cap=dry,
            **end,
        )
        return estimate

    def _state(self) -> Any:
        return _frozen([vars(self.manager), vars(self.pool)])


class StepRun(ManagerRun):
    """One step of the align-mode manager.

    Args:
        core: The tree.
        traits: What its manager knows.
        situation: What the step is asked, and the state that it starts from.
        asks_gate: Whether the full-sequence gate is asked before.
    """

    def __init__(
        self,
        core: Core,
        traits: Traits,
        situation: Situation,
        *,
        asks_gate: bool = False,
    ) -> None:
        self._core = core
        self._found_hit: Block | None = None
        spec = _spec(core, situation.geometry)
        super().__init__(
            core, traits, situation, kind="MambaManager", spec=spec, asks_gate=asks_gate
        )
        if situation.preempted is True:
            self._admit(parked=False)
            self.manager.free(REQUEST)
        elif not isinstance(situation.table_length, int):
            self._admit(parked=situation.parked is True)
            self.manager.req_to_blocks[REQUEST] = table_before(situation)
            if situation.was_parked is not False:
                self._may_be_forgotten()
        self._let_checkpoint_be_any()
        if situation.owns_partial_tail is True:
            self._own_partial_tail()
        self.pool.drawn, self.pool.has_taken_back = 0, False

    def knows_request(self) -> bool:
        """Whether the manager knows that the request was allocated blocks."""
        return REQUEST in self.manager._allocated_block_reqs

    def step(self) -> Step:
        """The manager's part of `KVCacheManager.allocate_slots`.

        Gate, dry run, estimate, adoption of hits, external allocation, allocation.
        """
        hits = self._hits()
        self.ask(hits)
        if self._is_deferred():
            return self._deferred()
        retired_before = self._column_to_retire()
        self.adopt(hits)
        returned, table = self.allocate(), self.table()
        pending, position, column = self._pending_checkpoint()
        situation, copies = self.situation, self._queued_copies()
        before = table_before(situation)
        kept = held_before(situation, before)
        return Step(
            gate=self.gate,
            dry_run=self.dry_run,
            estimate=self.estimate,
            drawn=self.pool.drawn + self.pool.touched,
            table_length=table.length,
            dry_run_left_state=self.dry_run_left_state,
            tail_is_held=tail_is_held(table, self.situation.geometry.num_speculative_blocks),
            checkpoint_is_pending=pending,
            checkpoint_position=position,
            checkpoint_column=column,
            checkpoint_block_is_held=term.disjunction(
                (term.negation(pending), _holds_block(table, column))
            ),
            returned_new_columns=self._returned_new_columns(returned, table),
            no_block_is_twice=_no_block_is_twice(self.situation, table),
            column_to_retire_before=retired_before,
            column_to_retire=self._column_to_retire(),
            state_is_in_place=state_is_in_place(situation, before, table, self._found_hit, copies),
            only_states_are_held=only_states_are_held(situation, before, table),
            drawn_are_held=drawn_are_held(situation, before, table, self.pool, copies),
            held_before=kept,
            held=kept + self.pool.drawn + self.pool.adopted,
            reserved_at_startup=reserved_at_startup(self.manager.kv_cache_spec),
        )

    def later_step(self) -> Step:
        """A step of a request about which the gate was asked when it was admitted, without a hit.

        A manager that knows nothing of it is asked then.
        """
        s = self.situation
        whole = Call(s.num_request_tokens, s.num_request_tokens, 0, 0, s.call.prefill_end)
        unknown = Situation(s.geometry, whole, table_length=0, prefill_length=s.prefill_length)
        gate = StepRun(self._core, self._traits, unknown)._estimate(
            whole, Table.of_runs(), dry=True
        )
        return replace(self.step(), gate=gate)

    def removal(self) -> Step:
        """`remove_skipped_blocks`, which comes before the estimate of every step.

        It may not ask for what differs between settings, so that one setting stands for all.
        """
        hide(self.manager, _SET_BY_COORDINATOR & vars(self.manager).keys())
        in_flight = self.situation.num_in_flight_tokens
        processed = greatest(0, self.situation.call.total_computed_tokens - in_flight)
        self.pool.has_taken_back = False
        recorded, num_retired = self._column_to_retire(), self._num_retired()
        self.manager.remove_skipped_blocks(REQUEST, processed)
        table, path = self.table(), current_path()
        if len(path.swept) > 1:
            raise Unsupported("a removal that goes over the table twice")
        column = path.swept[0] if path.swept else term.int_var(SOME_COLUMN, 0)
        before = table_before(self.situation)
        freed_skipped, freed_ended = (
            path.is_impossible
            or freed(
                self.situation, before, table, column, recorded=recorded, num_retired=num_retired
            )
            for freed in (removal_freed_skipped, removal_freed_ended)
        )
        held = tail_is_held(table, self.situation.geometry.num_speculative_blocks)
        to_retire = self._column_to_retire()
        return Step(
            dry_run=0,
            estimate=0,
            drawn=self.pool.drawn,
            table_length=table.length,
            dry_run_left_state=True,
            tail_is_held=held,
            column_to_retire_before=to_retire,
            column_to_retire=to_retire,
            removal_kept_state=held & (table.length == self.situation.table_length),
            removal_freed_skipped=freed_skipped,
            removal_freed_ended=freed_ended,
            removed_blocks=self.pool.has_taken_back,
        )

    def _is_deferred(self) -> bool:
        """Whether the estimate is one more than the pool has, whatever the pool."""
        beyond = self.estimate - self.pool.num_gpu_blocks
        return isinstance(beyond, int) and beyond == 1

    def _deferred(self) -> Step:
        to_retire = self._column_to_retire()
        return Step(
            gate=self.gate,
            dry_run=self.dry_run,
            estimate=self.estimate,
            drawn=0,
            table_length=self.situation.table_length,
            dry_run_left_state=self.dry_run_left_state,
            column_to_retire_before=to_retire,
            column_to_retire=to_retire,
            deferred=True,
        )

    def _hits(self) -> Any:
        """The local hit as align mode finds it: null blocks, then the block it ends in."""
        number = self.situation.num_hit_blocks
        if not number > 0:
            return Table.of_runs()
        self._found_hit = self._hit()
        return Table.of_runs((number - 1, NULL_BLOCK), (1, self._found_hit))

    def _hit(self) -> Block:
        s = self.situation
        refs = term.choose(s.hit_is_evictable, 0, term.int_var("hit_ref_cnt", 1))
        block_id = term.int_var("hit_block_id", 1, FIRST_FRESH_ID - 1)
        return Block(block_id, False, refs, BlockHash(s.hit_is_of_this_step))

    def _admit(self, *, parked: bool) -> None:
        """Admit, or park, one token by the release's own code, then let what it left be any."""
        external = 1 if parked else 0
        self._estimate(Call(1, 1, external, 0), [], dry=False)
        if parked:
            self.manager.add_local_computed_blocks(REQUEST, [], 0, external)
            self.manager.allocate_external_computed_blocks(REQUEST, 0, external)
        self.manager.allocate_new_blocks(REQUEST, 1, 1)
        parts = vars(self.manager)
        for name in parts.keys() - _KNOWN_STATE:
            parts[name] = state_of_earlier_steps(name, parts[name])
        self._let_checkpoint_be_any()
        if "_num_retired_blocks" in parts:
            retired = term.int_var("num_retired_blocks_before", 0)
            name = "_num_retired_blocks"
            parts[name] = Pending(REQUEST, True, retired, name=name)
        if "last_state_block_idx" in parts:
            parts["last_state_block_idx"] = Pending(
                REQUEST,
                term.bool_var("has_column_to_retire_before"),
                term.int_var("column_to_retire_before", 0),
                name="last_state_block_idx",
            )

    def _own_partial_tail(self) -> None:
        """What `_cache_partial_tail_block` records of the block that the computed tokens end in."""
        computed = self.situation.call.total_computed_tokens
        column, found = partial_tail(self.situation)
        tail = Block(found.block_id, False, term.int_var("tail_ref_cnt", 1), BlockHash())
        parts = vars(self.manager)
        parts["_partial_hit_reqs"] = Pending(
            REQUEST, True, (column, tail), name="_partial_hit_reqs"
        )
        if self._traits.producer_tail_is_recorded:
            name = "_producer_partial_tail_reqs"
            record = (tail, computed) if self._traits.producer_tail_has_block else computed
            parts[name] = Pending(REQUEST, True, record, name=name)

    def _num_retired(self) -> IntLike | None:
        """Columns that the release knows to be freed; None where it does not count them."""
        record = vars(self.manager).get("_num_retired_blocks")
        return None if record is None else record.value

    def _queued_copies(self) -> list[Copy]:
        """Copies on write that the step asked for."""
        return [*list.__iter__(vars(self.manager).get("_pending_cow_copies", Log("none")))]

    def _returned_new_columns(self, returned: Table, table: Table) -> BoolLike:
        adopts = self.situation.num_hit_blocks > 0 or self.situation.num_external_tokens > 0
        return True if adopts else _are_columns(returned, table, self.situation.table_length)

    def _may_be_forgotten(self) -> None:
        """A parked request without speculative blocks is not known to have blocks yet."""
        without_drafts = self.situation.geometry.num_speculative_blocks == 0
        if without_drafts and self.situation.was_parked:
            self.manager._allocated_block_reqs.discard(REQUEST)

    def _let_checkpoint_be_any(self) -> None:
        """An estimate whose check fails leaves its checkpoint behind, so even an admission may."""
        parts, present = vars(self.manager), self.situation.has_left_over_checkpoint
        if "_checkpoints" in parts:
            left_over = term.int_var("checkpoint_before", 1), term.int_var("column_before", 0)
            parts["_checkpoints"] = Pending(REQUEST, present, left_over)
        elif _COUNT in parts:
            parts[_COUNT] = Pending(REQUEST, True, term.choose(present, 1, 0), name=_COUNT)

    def _pending_checkpoint(self) -> tuple[BoolLike, IntLike, IntLike]:
        parts = vars(self.manager)
        if _COUNT in parts:
            record = parts[_COUNT]
            return term.conjunction((record.present, record.value > 0)), 0, 0
        pending = parts.get("_checkpoints")
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


def forgets_parked(core: Core, traits: Traits) -> bool:
    """Whether a request without speculative blocks is not known to have blocks once it is parked.

    So before 0.28.0: `MambaManager.allocate_new_blocks` returns early where a load covers it all.
    """
    geometry = Geometry(1, 1, 0, 0, 1, False)
    parked = Situation(geometry, Call(2, 2, 1, 1), term.int_var("any_length", 1), 2, parked=True)
    with following(Path({"any_length": 1}, ())):
        return not StepRun(core, traits, parked).knows_request()


def takes_local_computed_tokens(core: Core) -> bool:
    """Whether this release's estimator is told apart what of the computed tokens is local."""
    estimator = core.symbol_of_manager("MambaManager", "get_num_blocks_to_allocate")
    return "num_local_computed_tokens" in inspect.signature(estimator).parameters


def _spec(core: Core, geometry: Geometry) -> Any:
    kind = core.symbol_of("MambaSpec")
    checkpoints = {
        "num_prefill_checkpoint_blocks": geometry.num_prefill_checkpoint_blocks,
        "prefill_checkpoint_alignment": geometry.prefill_checkpoint_alignment,
    }
    known = inspect.signature(kind).parameters
    return kind(
        block_size=geometry.block_size,
        shapes=((1, 1),),
        dtypes=(None,),
        mamba_cache_mode="align",
        num_speculative_blocks=geometry.num_speculative_blocks,
        **{name: value for name, value in checkpoints.items() if name in known},
    )


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
    """Whether any two columns hold different blocks, if any two of the table before did."""
    first, second = term.int_var("first_column", 0), term.int_var("second_column", 0)
    a, b = table.column(first), table.column(second)
    differ = term.disjunction((a.is_null, term.negation(a.is_same_block(b))))
    premise = [first < second, second < table.length, *_distinct_before(situation, first, second)]
    return term.disjunction((term.negation(term.conjunction(premise)), differ))


def _distinct_before(situation: Situation, *columns: IntLike) -> Iterator[BoolLike]:
    """Say that blocks of the table before stand in one column each: a block has *the* column of it.

    It is said of the columns that ``columns`` may come from: themselves, and the speculative
    blocks, which move.
    """
    if isinstance(situation.table_length, int):
        return
    table = table_before(situation)
    speculative = range(1, SPECULATIVE_BLOCKS[-1] + 1)
    for source in (*columns, *(situation.table_length - behind for behind in speculative)):
        block = table.column(source)
        yield block.block_id < FIRST_FRESH_ID
        yield term.disjunction(
            (block.is_null, term.cell("column_of_block", block.block_id) == source)
        )


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
        if name not in _NO_STATE | _SET_BY_COORDINATOR
        and not isinstance(parts.get(name), modelled)
        and not callable(getattr(type(manager), name, None))
        and not isinstance(getattr(type(manager), name, None), property)
    )


def hide(manager: Any, names: frozenset[str]) -> None:
    """Make reading these attributes Unsupported; storing them stays possible."""

    def hidden(name: str) -> property:
        def read(self: Any) -> Any:
            if term.decide is not None:
                raise Unsupported(f"{name} is not what __init__ left, and is not modelled here")
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
