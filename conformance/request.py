"""One request on a real manager: apply steps to it, and see what they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, is_
from types import SimpleNamespace
from typing import Any

from conformance.bindings import (
    CACHE_PARTIAL_TAIL,
    CACHED_THIS_STEP,
    COLUMN_TO_RETIRE,
    HAS_PARTIAL_HIT,
    PARTIAL_HITS,
    PENDING_CHECKPOINTS,
    PROCESSED_TOKENS,
    QUEUED_COPIES,
    BindingError,
    Bindings,
    DriverError,
)
from conformance.held import Found, held_by_column, kept_by
from conformance.layout import Names, TableSeen, mamba_table
from conformance.pools import PoolShelf, block_id, hash_map_ids, ref_cnt
from models.loader import PlaceholderUsed
from spec.vocabulary import Call, Geometry, Situation, Step

REQUEST_ID = "request"

#: What is seen of a removal that was not reached.
_NOT_REMOVED = dict.fromkeys(
    ("removal_kept_state", "removal_freed_skipped", "removal_freed_ended", "removed_blocks"), None
)

#: The only KV-cache group.
GROUP_ID = 0

#: Columns of the longest block table that a step may ask for; one column costs 8 bytes.
MAX_TABLE_COLUMNS = 2**24

_is_null = attrgetter("is_null")
_next_free_block = attrgetter("next_free_block")


class LimitError(DriverError):
    """The sizes are out of the driver's reach, or the pool has too few blocks for the request."""


@dataclass(frozen=True)
class Observation:
    """Public effects after a step, in blocks."""

    free: int
    """Free blocks in the pool, evictable ones included."""
    table_length: int
    """Columns of the request's block table."""
    held: int
    """Distinct non-null blocks of the request, in all its tables."""
    table: tuple[int, ...]
    """Block ids by column; 0 is the null block."""


class RequestUnderTest:
    """One request on the real manager; `apply` steps and `observe` what they did.

    Subclasses that ask a coordinator of several managers see the steps of one of them, and count
    the blocks of all.
    """

    def __init__(
        self,
        bindings: Bindings,
        geometry: Geometry,
        manager: Any,
        pool: Any,
        shelf: PoolShelf,
        reserved_at_startup: int,
    ) -> None:
        self.geometry = geometry
        self.manager = manager
        self.pool = pool
        self.exception: Exception | None = None
        """What ended the last step, None where it went through."""
        self.free_at_allocation: int | None = None
        """Free blocks that the last step's allocation found, None where it was not reached."""
        self._bindings = bindings
        self._shelf = shelf
        self._asked = manager
        """What is asked for estimates, removals and frees."""
        self._managers: tuple[Any, ...] = (manager,)
        """All that hold blocks of the request."""
        self._mamba: tuple[Any, ...] = (manager,)
        """Those of them that copy an own partial tail."""
        self._reserved_at_startup = reserved_at_startup
        self._least_free = pool.get_num_free_blocks()
        self._is_parked = self._was_preempted = self._owns_partial_tail = False
        self._num_hits = self._gate = self._num_tokens_asked = 0
        self._chunks: list[int] = []
        """Tokens that each step since the request was admitted computes."""
        self._held_by_another: list[Any] = []
        self._hashes: set[Any] = set()
        self._adopted: frozenset[int] = frozenset()

    def apply(
        self,
        call: Call,
        *,
        num_hit_blocks: int = 0,
        hit_is_evictable: bool = False,
        hit_is_of_this_step: bool = False,
        num_external_tokens: int = 0,
        loads_asynchronously: bool = False,
        num_request_tokens: int = 0,
        num_in_flight_tokens: int = 0,
        free_blocks: int | None = None,
        exactly_the_estimate: bool = False,
        reserved_blocks: int = 0,
        watch_dry_run: bool = True,
    ) -> Step:
        """Perform one step, in the order of `KVCacheManager.allocate_slots`.

        Args:
            call: Arguments of the step, in tokens.
            num_hit_blocks: Columns of the local hit that the step adopts, all null but the last.
            hit_is_evictable: Whether nobody references the hit's last block; else another does.
            hit_is_of_this_step: Whether another request caches that block in this same step.
            num_external_tokens: Tokens that a connector brings.
            loads_asynchronously: Whether they arrive later, and the request is parked.
            num_request_tokens: Tokens that the full-sequence gate is asked about first; 0 asks
                nothing.
            num_in_flight_tokens: Of the computed tokens, those of steps that have not ended.
            free_blocks: Free blocks that the allocation finds; None leaves the pool as it is.
            exactly_the_estimate: The allocation finds as many free blocks as the estimate says,
                and those reserved: the least pool that passes the check.
            reserved_blocks: Free blocks that are for others; only several groups are told.
            watch_dry_run: Whether to compare state around the dry run, which takes time in
                proportion to the pool and the table. `Step.dry_run_left_state` is None without.

        Returns:
            What was seen; None for what was not reached before an exception, which then is in
            `exception`. Blocks drawn are those that left the free list.

        Raises:
            DriverError: The step cannot be run, or not on a pool of this size.
        """
        self._check_size(call)
        self._end_last_step()
        adopts = num_hit_blocks > 0 or num_external_tokens > 0
        if adopts:
            self._check_adoption(call, num_hit_blocks, num_external_tokens)
        hit = self._hit(call.num_local_computed_tokens, num_hit_blocks, hit_is_evictable)
        if hit_is_of_this_step:
            self._note_as_of_this_step(hit)
        evictable = self._evictable(hit)
        self._adopted |= {b.block_id for b in self._blocks_of(hit) if not b.is_null}
        self.exception = self.free_at_allocation = None
        pool = self.pool
        arguments = self._arguments(call)
        dry_run = estimate = drawn = left_state = None
        refused = deferred = False
        gate, removal, found = (None if num_request_tokens else self._gate), _NOT_REMOVED, None
        retired_before, is_new_columns = self._column_to_retire(), False
        try:
            if num_request_tokens:
                gate = self._gate = self._ask_gate(arguments, hit, num_request_tokens)
                self._num_tokens_asked = num_request_tokens
            removal = self._remove_skipped_blocks(call.total_computed_tokens, num_in_flight_tokens)
            num_columns = len(self._table())
            found = self._found(call, hit, num_hit_blocks, num_external_tokens)
            before = self._watched_state() if watch_dry_run else None
            try:
                dry_run = self._estimate(arguments, hit, is_dry_run=True)
            finally:
                if watch_dry_run:
                    left_state = self._watched_state() == before
            estimate = self._estimate(arguments, hit, is_dry_run=False)
            deferred = hit_is_of_this_step and estimate > pool.num_gpu_blocks
            least = estimate + reserved_blocks
            if exactly_the_estimate and not deferred:
                free_blocks = least
            occupied = self._occupy(free_blocks, evictable)
            self.free_at_allocation = pool.get_num_free_blocks()
            retired_before = self._column_to_retire()
            try:
                if deferred:
                    self._defer(call, hit, num_external_tokens, loads_asynchronously)
                    blocks = None
                else:
                    blocks = self._act(call, hit, num_external_tokens, loads_asynchronously)
                    refused = blocks is None
                returned = [*map(block_id, blocks or ())]
                new_columns = [*map(block_id, self._table()[num_columns:])]
                # vLLM: a request that the worker has not seen is handed over with its whole table.
                is_new_columns = adopts or self._is_parked or returned == new_columns
            finally:
                free = pool.get_num_free_blocks()
                drawn = self.free_at_allocation - free
                self._least_free = min(self._least_free, free)
                if occupied:
                    pool.free_blocks(occupied)
        except PlaceholderUsed as error:
            raise BindingError(f"core tier: {error}") from error
        except DriverError:
            raise
        except Exception as error:
            self.exception = error
        if not (refused or deferred):
            self._chunks.append(call.num_tokens_main_model - call.total_computed_tokens)
            self._is_parked = loads_asynchronously
            self._was_preempted = self._owns_partial_tail = False
        return Step(
            dry_run=dry_run,
            estimate=estimate,
            drawn=drawn,
            table_length=len(self._table()),
            dry_run_left_state=left_state,
            tail_is_held=self._tail_is_held(),
            **self._pending_checkpoint(),
            returned_new_columns=is_new_columns,
            no_block_is_twice=self._no_block_is_twice(),
            column_to_retire_before=retired_before,
            column_to_retire=self._column_to_retire(),
            gate=gate,
            **removal,
            **({} if found is None else self._held_after(found, drawn or 0)),
            reserved_at_startup=self._reserved_at_startup,
            raised=None if self.exception is None else type(self.exception).__name__,
            refused=refused,
            deferred=deferred,
        )

    def preempt(self) -> None:
        """Take the request's blocks away; the next step admits it again.

        Raises:
            DriverError: It has none.
        """
        if not self._table():
            raise DriverError("a request without a table is not preempted")
        self._end_last_step()
        self._asked.free(REQUEST_ID)
        self._adopted = frozenset()
        self._gate = self._num_tokens_asked = 0
        self._was_preempted, self._is_parked, self._owns_partial_tail = True, False, False
        self._chunks.clear()

    def cache_own_partial_tail(self, num_tokens: int) -> None:
        """Have the tree cache the request's own block that ends inside a block.

        Args:
            num_tokens: Tokens computed so far, where the block ends. The prompt is taken to end
                where the release caches the tail there.

        Raises:
            BindingError: The release has no partial tails.
            DriverError: It cached none there.
        """
        self._bindings.need(CACHE_PARTIAL_TAIL, self.manager)
        self._end_last_step()
        # How much prompt lies behind its last cached tail differs by release and EAGLE drop.
        geometry = self.geometry
        for num_behind in (geometry.num_tokens_behind_checkpoint, 0, geometry.hash_block_size):
            request = self._stand_in(REQUEST_ID, num_tokens, num_tokens + num_behind)
            self._cache_computed(request, num_tokens)
            if self._tail_is_cached(num_tokens):
                self._owns_partial_tail = True
                return
        reason = self._why_no_tail(num_tokens)
        raise DriverError(f"no partial tail is cached at {num_tokens} tokens: {reason}")

    def observe(self) -> Observation:
        """Return the public effects so far."""
        table = tuple(map(block_id, self._table()))
        held = {id(block) for found in self._tables() for block in found if not block.is_null}
        return Observation(
            free=self.pool.get_num_free_blocks(),
            table_length=len(table),
            held=len(held),
            table=table,
        )

    def tables(self) -> tuple[TableSeen, ...]:
        """Return what each column of the request's tables holds, a table for each group."""
        return (mamba_table(self.manager, self._names()),)

    def situation(
        self,
        call: Call,
        prefill_length: int,
        *,
        num_hit_blocks: int = 0,
        hit_is_evictable: bool = False,
        hit_is_of_this_step: bool = False,
        num_external_tokens: int = 0,
        loads_asynchronously: bool = False,
        num_request_tokens: int = 0,
        num_in_flight_tokens: int = 0,
    ) -> Situation:
        """Return what decides the family of a step that is about to be applied so."""
        return Situation(
            geometry=self.geometry,
            call=call,
            table_length=len(self._table()),
            prefill_length=prefill_length,
            num_request_tokens=num_request_tokens or self._num_tokens_asked,
            num_hit_blocks=num_hit_blocks,
            hit_is_evictable=hit_is_evictable,
            hit_is_of_this_step=hit_is_of_this_step,
            num_external_tokens=num_external_tokens,
            loads_asynchronously=loads_asynchronously,
            parked=self._is_parked,
            preempted=self._was_preempted,
            owns_partial_tail=self._owns_partial_tail,
            num_in_flight_tokens=num_in_flight_tokens,
            num_just_ended_tokens=self._just_ended(num_in_flight_tokens),
        )

    def _just_ended(self, num_in_flight_tokens: int) -> int:
        """Tokens of the step before those in flight; 0 where nothing is, or none is known."""
        if not num_in_flight_tokens:
            return 0
        for chunk in reversed(self._chunks):
            if num_in_flight_tokens <= 0:
                return chunk
            num_in_flight_tokens -= chunk
        return 0

    def finish(self) -> bool:
        """Free the request's blocks; return whether the pool is as it was before the request.

        Such a pool is handed to later requests of its size, so block ids do not depend on what
        ran before. The request is not to be used afterwards.
        """
        self._end_last_step()
        self._asked.free(REQUEST_ID)
        self.pool.free_blocks(self._held_by_another)
        if not self._hashes:
            return self._shelf.put_back(self.pool, self._least_free)
        self._drop_hashes()
        # A block that is freed with a hash goes to the end of the free list.
        return self._shelf.put_back(self.pool, least_free=0)

    def _end_last_step(self) -> None:
        """Do what the scheduler does between steps: the copies on write of the last one have run.

        Each of them keeps both its blocks until then.
        """
        for manager in self._managers:
            take_copies = getattr(manager, "take_pending_cow_copies", tuple)
            for copied in take_copies():
                self.pool.free_blocks(copied)
        self._asked.new_step_starts()

    def _hit(self, num_tokens: int, num_blocks: int, is_evictable: bool) -> Any:
        """The blocks of a hit of `num_tokens`, of which another request has cached the last.

        Fewer blocks than these tokens fill are a hit of whole blocks.
        """
        num_tokens = min(num_tokens, num_blocks * self.geometry.block_size)
        return self._cached_blocks(GROUP_ID, num_tokens, num_blocks, 1, int(is_evictable))

    def _cached_blocks(
        self, group_id: int, num_tokens: int, num_columns: int, num_blocks: int, num_evictable: int
    ) -> list[Any]:
        """Have another request of `num_tokens` cache the last blocks of its table.

        Args:
            group_id: The KV-cache group.
            num_tokens: Where the table ends.
            num_columns: Columns of the table; those before the cached blocks are null.
            num_blocks: Blocks that are cached, the last of them.
            num_evictable: The last so many of these are free again; the others stay held.
        """
        if num_columns == 0:
            return []
        pool, block_size = self.pool, self.geometry.block_size
        if pool.get_num_free_blocks() < num_blocks:
            reason = "no free block" if num_blocks == 1 else f"fewer than {num_blocks} free blocks"
            raise LimitError(f"the pool has {reason} for the hit")
        cached = pool.get_new_blocks(num_blocks)
        blocks: list[Any] = [pool.null_block] * (num_columns - num_blocks) + cached
        num_null, num_full = num_columns - num_blocks, num_tokens // block_size
        self._num_hits += 1
        another = self._stand_in(f"another-{self._num_hits}", num_tokens, num_tokens)
        values = {"request": another, "kv_cache_group_id": group_id, "block_size": block_size}
        if num_full > num_null:
            full = {"blocks": blocks, "num_full_blocks": num_full, "num_cached_blocks": num_null}
            self._cache(pool, "cache_full_blocks", values | full)
        if num_full < num_columns:
            self._bindings.need(HAS_PARTIAL_HIT, self.manager)
            tail = {"block": cached[-1], "num_tokens": num_tokens}
            self._cache(pool, "cache_partial_block", values | tail)
        num_held = num_blocks - num_evictable
        self._held_by_another += cached[:num_held]
        pool.free_blocks(cached[num_held:])
        return blocks

    def _note_as_of_this_step(self, hit: Any) -> None:
        for manager in self._mamba:
            self._bindings.need(CACHED_THIS_STEP, manager)
            block = self._hit_of(manager, hit)[-1]
            getattr(manager, CACHED_THIS_STEP).add(block.block_hash)

    def _hit_of(self, manager: Any, hit: Any) -> Sequence[Any]:
        """A manager's part of a hit."""
        blocks: Sequence[Any] = hit
        return blocks

    def _defer(
        self, call: Call, hit: Any, num_external_tokens: int, loads_asynchronously: bool
    ) -> None:
        """Do what happens where the estimate is more than the pool has: here, nothing."""

    def _evictable(self, hit: Any) -> list[Any]:
        return [b for b in self._blocks_of(hit) if b.ref_cnt == 0 and not b.is_null]

    def _blocks_of(self, hit: Any) -> Iterable[Any]:
        """The blocks of a hit, in all groups."""
        blocks: Iterable[Any] = hit
        return blocks

    def _act(
        self, call: Call, hit: Any, num_external_tokens: int, loads_asynchronously: bool
    ) -> Sequence[Any] | None:
        """Adopt and allocate; return the blocks that this returned, None where it was refused."""
        if hit or num_external_tokens > 0:
            self._adopt(call, hit, num_external_tokens, loads_asynchronously)
        return self._allocate(call)

    def _adopt(
        self, call: Call, hit: list[Any], num_external_tokens: int, loads_asynchronously: bool
    ) -> None:
        """Make the hit and the external tokens the request's, as the coordinator does."""
        num_tokens = {
            "request_id": REQUEST_ID,
            "num_local_computed_tokens": call.num_local_computed_tokens,
            "num_external_computed_tokens": num_external_tokens,
        }
        self._bindings.call(
            self.manager, "add_local_computed_blocks", {**num_tokens, "new_computed_blocks": hit}
        )
        if num_external_tokens > 0:
            self._bindings.call(
                self.manager,
                "allocate_external_computed_blocks",
                {**num_tokens, "record_for_zeroing": not loads_asynchronously},
                optional=["record_for_zeroing"],
            )

    def _cache_computed(self, request: Any, num_tokens: int) -> None:
        """Have the tree cache the blocks of the request's computed tokens."""
        values = {"request": request, "num_tokens": num_tokens, "replay_boundaries": ()}
        self._cache(self.manager, "cache_blocks", values, optional=["replay_boundaries"])

    def _cache(
        self, owner: Any, method: str, values: dict[str, Any], optional: Sequence[str] = ()
    ) -> None:
        """Have a manager or a pool cache blocks, and remember the hashes that this adds.

        Raises:
            DriverError: It raised, which is not the doing of the step under test.
        """
        before = hash_map_ids(self.pool).keys()
        try:
            self._bindings.call(owner, method, values, optional)
        except PlaceholderUsed as error:
            raise BindingError(f"core tier: {error}") from error
        except DriverError:
            raise
        except Exception as error:
            raise DriverError(f"{method} raised {type(error).__name__}: {error}") from error
        self._hashes |= hash_map_ids(self.pool).keys() - before

    def _stand_in(self, request_id: str, num_tokens: int, num_prompt_tokens: int) -> Any:
        """What the caching functions read of a `Request` that has computed `num_tokens`."""
        return SimpleNamespace(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=max(num_tokens, num_prompt_tokens),
            num_computed_tokens=num_tokens,
            block_hashes=_Hashes(request_id, num_tokens // self.geometry.hash_block_size),
            all_token_ids=(),
            shared_prefix_boundary=0,
        )

    def _drop_hashes(self) -> None:
        found = hash_map_ids(self.pool)
        ids = {i for block_hash in self._hashes & found.keys() for i in found[block_hash]}
        blocks = [self.pool.blocks[i] for i in ids]
        self.pool.touch(blocks)
        self.pool.evict_blocks(ids)
        self.pool.free_blocks(blocks)

    def _tail_is_cached(self, num_tokens: int) -> bool:
        tails = (getattr(m, PARTIAL_HITS).get(REQUEST_ID, (-1, None)) for m in self._mamba)
        here = num_tokens // self.geometry.block_size
        return all(column == here and block is not None for column, block in tails)

    def _why_no_tail(self, num_tokens: int) -> str:
        column, table = num_tokens // self.geometry.block_size, self._table()
        if num_tokens % self.geometry.block_size == 0:
            return "a block ends there"
        if num_tokens % self.geometry.hash_block_size:
            return "no hash unit ends there"
        if column >= len(table) or table[column].is_null:
            return f"the request has no block in column {column}"
        if self._pending_checkpoint()["checkpoint_is_pending"]:
            return "the release caches the pending checkpoint instead"
        return f"{self._bindings.file}, {CACHE_PARTIAL_TAIL} refuses it"

    def _arguments(self, call: Call) -> dict[str, int]:
        """What the estimator is asked, beside the hit."""
        return {name: getattr(call, name) for name in self._bindings.estimator_call_fields}

    def _estimate(self, arguments: dict[str, int], hit: Any, *, is_dry_run: bool) -> Any:
        return self._asked.get_num_blocks_to_allocate(
            request_id=REQUEST_ID,
            new_computed_blocks=hit,
            apply_admission_cap=is_dry_run,
            **arguments,
        )

    def _remove_skipped_blocks(
        self, num_computed_tokens: int, num_in_flight_tokens: int
    ) -> dict[str, bool]:
        """Have the tree remove them; return what is seen of it, as fields of a `Step`."""
        if num_in_flight_tokens:
            removal = self.manager.remove_skipped_blocks
            self._bindings.need_argument(PROCESSED_TOKENS, removal)
        before, num_last = [*self._table()], 1 + self.geometry.num_speculative_blocks
        num_ended = max(num_computed_tokens - num_in_flight_tokens, 0)
        self._asked.remove_skipped_blocks(REQUEST_ID, num_ended)
        after = self._table()
        stays = len(after) == len(before) and all(map(is_, before, after))
        num_skipped = max(num_ended - 1, 0) // self.geometry.block_size
        freed = all(map(_is_null, after[:num_skipped]))
        return {
            "removal_kept_state": stays
            or (len(after) == len(before) and all(map(is_, before[-num_last:], after[-num_last:]))),
            "removal_freed_skipped": freed or num_in_flight_tokens > 0,
            "removal_freed_ended": freed,
            "removed_blocks": not stays,
        }

    def _found(self, call: Call, hit: Any, num_hit_blocks: int, num_external_tokens: int) -> Found:
        situation = self.situation(
            call,
            call.num_tokens_main_model,
            num_hit_blocks=num_hit_blocks,
            num_external_tokens=num_external_tokens,
        )
        blocks = self._hit_of(self.manager, hit)
        return Found(
            situation,
            held_by_column(self._table()),
            kept_by(self._tables(), self._managers),
            blocks[-1] if blocks else None,
            frozenset(b.block_id for b in self._blocks_of(hit) if b.ref_cnt > 0),
        )

    def _held_after(self, found: Found, num_drawn: int) -> dict[str, Any]:
        copies = getattr(self.manager, QUEUED_COPIES, ())
        kept = kept_by(self._tables(), self._managers)
        return found.after(self._table(), copies, kept, num_drawn)

    def _names(self) -> Names:
        return Names(REQUEST_ID, self.geometry.num_speculative_blocks, self._adopted)

    def _tables(self) -> list[Sequence[Any]]:
        """The request's tables, in all managers."""
        return [manager.req_to_blocks.get(REQUEST_ID, ()) for manager in self._managers]

    def _ask_gate(self, arguments: dict[str, int], hit: Any, num_tokens: int) -> Any:
        """The dry run for a request of so many tokens, as `full_sequence_must_fit` has it."""
        whole = dict.fromkeys(("num_tokens", "num_tokens_main_model"), num_tokens)
        return self._estimate({**arguments, **whole}, hit, is_dry_run=True)

    def _allocate(self, call: Call) -> Sequence[Any]:
        names = self._bindings.allocator_call_fields
        new_blocks: Sequence[Any] = self.manager.allocate_new_blocks(
            request_id=REQUEST_ID, **{name: getattr(call, name) for name in names}
        )
        return new_blocks

    def _pending_checkpoint(self) -> dict[str, Any]:
        """The pending checkpoint's fields of a `Step`; 0.29.0 keeps a count, not a position."""
        positions, counts = PENDING_CHECKPOINTS
        if hasattr(self.manager, counts):
            return {
                "checkpoint_is_pending": getattr(self.manager, counts).get(REQUEST_ID, 0) > 0,
                "checkpoint_position": None,
                "checkpoint_column": None,
            }
        pending = getattr(self.manager, positions, {}).get(REQUEST_ID)
        if pending is None:
            return {"checkpoint_is_pending": False}
        (position, column), table = pending, self._table()
        return {
            "checkpoint_is_pending": True,
            "checkpoint_position": position,
            "checkpoint_column": column,
            "checkpoint_block_is_held": 0 <= column < len(table) and not table[column].is_null,
        }

    def _column_to_retire(self) -> int:
        column: int = getattr(self.manager, COLUMN_TO_RETIRE, {}).get(REQUEST_ID, -1)
        return column

    def _no_block_is_twice(self) -> bool:
        ids = [block.block_id for block in self._table() if not block.is_null]
        return len(ids) == len(set(ids))

    def _occupy(self, free_blocks: int | None, evictable: Sequence[Any]) -> list[Any]:
        """Take blocks from the pool until `free_blocks` are free (0 where that is negative).

        Args:
            free_blocks: Blocks to leave free, `evictable` included; None takes none.
            evictable: Free blocks that are not taken, since the step adopts them.
        """
        if free_blocks is None:
            return []
        wanted, free = max(free_blocks, 0), self.pool.get_num_free_blocks()
        if wanted > free:
            raise LimitError(f"the pool has {free} free blocks, {wanted} are to be free")
        if wanted < len(evictable):
            raise LimitError(f"{wanted} blocks are to be free, the hit alone is {len(evictable)}")
        self.pool.touch(evictable)
        occupied: list[Any] = self.pool.get_new_blocks(free - wanted)
        self.pool.free_blocks(evictable)
        return occupied

    def _table(self) -> Sequence[Any]:
        table: Sequence[Any] = self.manager.req_to_blocks.get(REQUEST_ID, ())
        return table

    def _tail_is_held(self) -> bool:
        """Whether the running state and the speculative blocks end the table, the latter movable.

        Movable is what `BlockPool.is_block_writable` says: held by nobody else, and unhashed.
        """
        num_speculative = self.geometry.num_speculative_blocks
        tail = self._table()[-1 - num_speculative :]
        return (
            len(tail) == 1 + num_speculative
            and not any(map(_is_null, tail))
            and all(block.ref_cnt == 1 and block.block_hash is None for block in tail[1:])
        )

    def _watched_state(self) -> tuple[Any, ...]:
        """What a dry run must leave: pool, hash map, tables, the managers' other attributes.

        Blocks are told apart by identity or id, since comparing them as records would follow the
        free list. The order of that list is in the links of its blocks.
        """
        blocks = self.pool.blocks
        return (
            self.pool.get_num_free_blocks(),
            [*map(id, map(_next_free_block, blocks))],
            [*map(ref_cnt, blocks)],
            hash_map_ids(self.pool),
            # An absent key equals an empty table.
            [
                {key: [*map(block_id, table)] for key, table in m.req_to_blocks.items() if table}
                for m in self._managers
            ],
            [_other_attributes(vars(manager)) for manager in self._managers],
        )

    def _check_adoption(self, call: Call, num_hit_blocks: int, num_external_tokens: int) -> None:
        num_local = call.num_local_computed_tokens
        if self._table():
            raise DriverError("a request that has a table adopts no hit and no external tokens")
        columns = -(-num_local // self.geometry.block_size)
        # With external tokens another group may have found more than this one.
        least = 0 if num_external_tokens else columns
        if num_hit_blocks and not least <= num_hit_blocks <= columns:
            raise DriverError(f"a hit of {num_local} tokens has not {num_hit_blocks} blocks")
        if num_local + num_external_tokens != call.total_computed_tokens:
            raise DriverError(
                f"{num_local} local and {num_external_tokens} external tokens are not "
                f"{call.total_computed_tokens}"
            )

    def _check_size(self, call: Call) -> None:
        tokens = max(call.num_tokens, call.num_tokens_main_model, call.total_computed_tokens)
        columns = tokens // self.geometry.block_size + self.geometry.num_speculative_blocks
        if columns > MAX_TABLE_COLUMNS:
            raise LimitError(f"a table of {columns} columns: at most {MAX_TABLE_COLUMNS} are made")


class _Hashes(Sequence[bytes]):
    """Hashes of a request's tokens, by hash unit; no other request has the same."""

    def __init__(self, request_id: str, num_units: int) -> None:
        self._request_id = request_id
        self._units = range(num_units)

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in self._units[index]]
        return f"{self._request_id} {self._units[index]}".encode()


_WATCHED_ALREADY = "req_to_blocks"
_NUMBERS_AND_TEXTS = frozenset({bool, int, str})


@cache
def _is_container(kind: type) -> bool:
    return issubclass(kind, dict | list | set)


def _other_attributes(attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A manager's numbers, and what its containers hold; an empty one is as good as none."""
    numbers, containers = {}, {}
    for name, value in attributes.items():
        kind = value.__class__
        if kind in _NUMBERS_AND_TEXTS:
            numbers[name] = value
        elif _is_container(kind) and value and name != _WATCHED_ALREADY:
            plain = _plain(value)
            if plain:
                containers[name] = plain
    return numbers, containers


def _plain(value: Any) -> Any:
    """A value of a manager's attribute to compare with later: blocks by id, no empty containers."""
    if isinstance(value, dict):
        plain = ((key, _plain(item)) for key, item in value.items())
        return {key: item for key, item in plain if item not in ({}, [], set())}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set):
        return set(value)
    if isinstance(value, int | str):
        return value
    return getattr(value, "block_id", id(value))
