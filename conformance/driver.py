"""The one place that touches vLLM: build a real manager, apply a step, observe its effects.

The same code drives both tiers. In the core tier the modules come from `models.loader.Core`, with
nothing installed and many trees in one process; in the vllm tier they are real imports, one tree
per process. What releases call things is found by `conformance.bindings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from conformance.bindings import (
    COLUMN_TO_RETIRE,
    PENDING_CHECKPOINTS,
    BindingError,
    Bindings,
    DriverError,
    Modules,
    bind,
    import_vllm,
)
from models.loader import Core, CoreError, PlaceholderUsed
from spec.vocabulary import Call, Geometry, Situation, Step

__all__ = [
    "BindingError",
    "Driver",
    "DriverError",
    "LimitError",
    "Observation",
    "RequestUnderTest",
    "core_driver",
    "vllm_driver",
]

REQUEST_ID = "request"

#: Blocks in the largest pool that is built; one block costs about 150 bytes.
MAX_POOL_BLOCKS = 2**22

#: Columns of the longest block table that a step may ask for; one column costs 8 bytes.
MAX_TABLE_COLUMNS = 2**24

#: Blocks in all pools together that are kept for later requests, and specs likewise.
_MAX_IDLE_BLOCKS = 2**18
_MAX_SPECS = 4096

_block_id = attrgetter("block_id")
_is_null = attrgetter("is_null")
_ref_cnt = attrgetter("ref_cnt")
_block_hash = attrgetter("block_hash")
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
    """Distinct non-null blocks of the table."""
    table: tuple[int, ...]
    """Block ids by column; 0 is the null block."""


class Driver:
    """Builds requests on the real manager of one tree.

    Args:
        modules: A `models.loader.Core`, or what `import_vllm` returns.

    Raises:
        BindingError: The tree lacks something that the driver needs.
    """

    def __init__(self, modules: Modules) -> None:
        self.bindings = bind(modules)
        self.location = str(getattr(modules, "location", None) or getattr(modules, "root", "?"))
        self._specs: dict[Geometry, Any] = {}
        self._pools = _PoolShelf(self.bindings)

    def request(self, geometry: Geometry, num_gpu_blocks: int) -> RequestUnderTest:
        """Return a request without a block table, on a pool and a manager of its own.

        Args:
            geometry: Sizes, as plain ints.
            num_gpu_blocks: Pool size in blocks, null block included.

        Raises:
            BindingError: The release has no such feature as the geometry asks for.
            LimitError: The pool is larger than the driver builds.
        """
        if num_gpu_blocks > MAX_POOL_BLOCKS:
            raise LimitError(
                f"a pool of {num_gpu_blocks} blocks: at most {MAX_POOL_BLOCKS} are built"
            )
        pool = self._pools.take(num_gpu_blocks, geometry.hash_block_size)
        manager = self.bindings.new_manager(geometry, self._spec(geometry), pool)
        return RequestUnderTest(self.bindings, geometry, manager, pool, self._pools)

    def _spec(self, geometry: Geometry) -> Any:
        spec = self._specs.get(geometry)
        if spec is None:
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            spec = self._specs[geometry] = self.bindings.new_spec(geometry)
        return spec


class RequestUnderTest:
    """One request on the real manager; `apply` steps and `observe` what they did."""

    def __init__(
        self,
        bindings: Bindings,
        geometry: Geometry,
        manager: Any,
        pool: Any,
        shelf: _PoolShelf,
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
        self._least_free = pool.get_num_free_blocks()

    def apply(
        self,
        call: Call,
        *,
        free_blocks: int | None = None,
        exactly_the_estimate: bool = False,
        watch_dry_run: bool = True,
    ) -> Step:
        """Perform one step, in the order of `KVCacheManager.allocate_slots`.

        Args:
            call: Arguments of the step, in tokens.
            free_blocks: Free blocks that the allocation finds; None leaves the pool as it is.
            exactly_the_estimate: The allocation finds as many free blocks as the estimate says,
                the least pool that passes the check.
            watch_dry_run: Whether to compare state around the dry run, which takes time in
                proportion to the pool and the table. `Step.dry_run_left_state` is None without.

        Returns:
            What was seen; None for what was not reached before an exception, which then is in
            `exception`. Blocks drawn are those that left the free list.

        Raises:
            DriverError: The step cannot be run, or not on a pool of this size.
        """
        self._check_size(call)
        self.exception = self.free_at_allocation = None
        manager, pool = self.manager, self.pool
        arguments = {name: getattr(call, name) for name in self._bindings.estimator_call_fields}
        dry_run = estimate = drawn = left_state = None
        retired_before, is_new_columns = self._column_to_retire(), False
        try:
            manager.remove_skipped_blocks(REQUEST_ID, call.total_computed_tokens)
            num_columns = len(self._table())
            before = self._watched_state() if watch_dry_run else None
            try:
                dry_run = self._estimate(arguments, is_dry_run=True)
            finally:
                if watch_dry_run:
                    left_state = self._watched_state() == before
            estimate = self._estimate(arguments, is_dry_run=False)
            occupied = self._occupy(estimate if exactly_the_estimate else free_blocks)
            self.free_at_allocation = pool.get_num_free_blocks()
            retired_before = self._column_to_retire()
            try:
                returned = [*map(_block_id, self._allocate(call))]
                is_new_columns = returned == [*map(_block_id, self._table()[num_columns:])]
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
            raised=None if self.exception is None else type(self.exception).__name__,
        )

    def observe(self) -> Observation:
        """Return the public effects so far."""
        table = tuple(map(_block_id, self._table()))
        return Observation(
            free=self.pool.get_num_free_blocks(),
            table_length=len(table),
            held=len(set(table) - {self.pool.null_block.block_id}),
            table=table,
        )

    def situation(self, call: Call, prefill_length: int) -> Situation:
        """Return what decides the family of a step that is about to be applied."""
        return Situation(
            geometry=self.geometry,
            call=call,
            table_length=len(self._table()),
            prefill_length=prefill_length,
        )

    def finish(self) -> bool:
        """Free the request's blocks; return whether the pool is as it was before the request.

        Such a pool is handed to later requests of its size, so block ids do not depend on what
        ran before. The request is not to be used afterwards.
        """
        self.manager.free(REQUEST_ID)
        return self._shelf.put_back(self.pool, self._least_free)

    def _estimate(self, arguments: dict[str, int], *, is_dry_run: bool) -> Any:
        return self.manager.get_num_blocks_to_allocate(
            request_id=REQUEST_ID,
            new_computed_blocks=(),
            apply_admission_cap=is_dry_run,
            **arguments,
        )

    def _allocate(self, call: Call) -> Sequence[Any]:
        names = self._bindings.allocator_call_fields
        new_blocks: Sequence[Any] = self.manager.allocate_new_blocks(
            request_id=REQUEST_ID, **{name: getattr(call, name) for name in names}
        )
        return new_blocks

    def _pending_checkpoint(self) -> dict[str, Any]:
        """The pending checkpoint's fields of a `Step`; 0.29.0 keeps a count, not a position."""
        pending = getattr(self.manager, PENDING_CHECKPOINTS[0], {}).get(REQUEST_ID)
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

    def _occupy(self, free_blocks: int | None) -> list[Any]:
        """Take blocks from the pool until `free_blocks` are free (0 where that is negative)."""
        if free_blocks is None:
            return []
        wanted, free = max(free_blocks, 0), self.pool.get_num_free_blocks()
        if wanted > free:
            raise LimitError(f"the pool has {free} free blocks, {wanted} are to be free")
        occupied: list[Any] = self.pool.get_new_blocks(free - wanted)
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
        """What a dry run must leave: pool, hash map, tables, the manager's other attributes.

        Blocks are told apart by identity or id, since comparing them as records would follow the
        free list. The order of that list is in the links of its blocks.
        """
        blocks = self.pool.blocks
        tables = self.manager.req_to_blocks
        return (
            self.pool.get_num_free_blocks(),
            [*map(id, map(_next_free_block, blocks))],
            [*map(_ref_cnt, blocks)],
            _hash_map_ids(self.pool),
            # An absent key equals an empty table.
            {key: [*map(_block_id, table)] for key, table in tables.items() if table},
            *_other_attributes(vars(self.manager)),
        )

    def _check_size(self, call: Call) -> None:
        tokens = max(call.num_tokens, call.num_tokens_main_model, call.total_computed_tokens)
        columns = tokens // self.geometry.block_size + self.geometry.num_speculative_blocks
        if columns > MAX_TABLE_COLUMNS:
            raise LimitError(f"a table of {columns} columns: at most {MAX_TABLE_COLUMNS} are made")


class _PoolShelf:
    """Pools that finished requests left exactly as they found them, kept for the next one."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._idle: dict[tuple[int, int], Any] = {}
        self._idle_blocks = 0
        self._sorting_restores_order = self._probe()

    def take(self, num_gpu_blocks: int, hash_block_size: int) -> Any:
        pool = self._idle.pop((num_gpu_blocks, hash_block_size), None)
        if pool is not None:
            self._idle_blocks -= num_gpu_blocks
            return pool
        return self._bindings.new_pool(num_gpu_blocks, hash_block_size)

    def put_back(self, pool: Any, least_free: int) -> bool:
        """Restore the order of the free list and keep the pool, if nothing else changed.

        Args:
            pool: A pool on which nobody holds a block.
            least_free: The fewest free blocks it had meanwhile. Blocks are drawn from the front,
                so only that many at the front can have changed places.
        """
        num_usable = pool.num_gpu_blocks - 1
        if pool.get_num_free_blocks() != num_usable or len(_hash_map_ids(pool)):
            return False
        drawn = sorted(pool.get_new_blocks(num_usable - least_free), key=_block_id)
        pool.free_blocks(drawn)
        are_first = all(block.block_id == i for i, block in enumerate(drawn, start=1))
        are_clean = not any(map(_ref_cnt, drawn)) and not any(map(_block_hash, drawn))
        if are_first and are_clean and self._sorting_restores_order:
            self._keep(pool)
        return are_first and are_clean

    def _keep(self, pool: Any) -> None:
        key = (pool.num_gpu_blocks, pool.hash_block_size)
        if key in self._idle or pool.num_gpu_blocks > _MAX_IDLE_BLOCKS:
            return
        if self._idle_blocks + pool.num_gpu_blocks > _MAX_IDLE_BLOCKS:
            self._idle.clear()
            self._idle_blocks = 0
        self._idle[key] = pool
        self._idle_blocks += pool.num_gpu_blocks

    def _probe(self) -> bool:
        """Whether this tree's pool puts freed blocks back in front, in the order given."""
        pool = self.take(6, 1)
        drawn = pool.get_new_blocks(3)
        pool.free_blocks(drawn[1:2])
        pool.free_blocks([drawn[2], drawn[0]])
        pool.free_blocks(sorted(pool.get_new_blocks(3), key=_block_id))
        return [*map(_block_id, pool.free_block_queue.get_all_free_blocks())] == [1, 2, 3, 4, 5]


def core_driver(root: Path) -> Driver:
    """Return a driver for a tree's own managers under placeholders: the core tier.

    Raises:
        BindingError: The tree has no KV-cache core that can be loaded and driven.
    """
    try:
        return Driver(Core(Path(root)))
    except CoreError as error:
        raise BindingError(str(error)) from error


def vllm_driver(root: Path | None = None) -> Driver:
    """Return a driver for the vLLM that this process imports: the vllm tier.

    Raises:
        BindingError: It cannot be imported, lies outside `root`, or cannot be driven.
    """
    return Driver(import_vllm(root))


_WATCHED_ALREADY = "req_to_blocks"
_NUMBERS_AND_TEXTS = frozenset({bool, int, str})


def _other_attributes(attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A manager's numbers, and what its containers hold; an empty one is as good as none."""
    numbers = {n: v for n, v in attributes.items() if v.__class__ in _NUMBERS_AND_TEXTS}
    containers = {
        name: value
        for name, value in attributes.items()
        if isinstance(value, dict | list | set) and value and name != _WATCHED_ALREADY
    }
    return numbers, {name: plain for name, v in containers.items() if (plain := _plain(v))}


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


def _hash_map_ids(pool: Any) -> dict[Any, list[int]]:
    """Block ids by hash, whatever the release keeps them in."""
    hash_map = pool.cached_block_hash_to_block
    content = getattr(hash_map, "_cache", hash_map)
    return {
        key: sorted(found) if isinstance(found, dict) else [found.block_id]
        for key, found in content.items()
    }
