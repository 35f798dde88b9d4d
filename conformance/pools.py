"""Block pools, kept for later requests where finished ones left them as they found them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from conformance.bindings import Bindings

#: Blocks in all pools together that are kept for later requests.
_MAX_IDLE_BLOCKS = 2**18

block_id = attrgetter("block_id")
ref_cnt = attrgetter("ref_cnt")
_block_hash = attrgetter("block_hash")


class PoolShelf:
    """Pools that finished requests left exactly as they found them, kept for the next one."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._idle: dict[tuple[int, int, int], Any] = {}
        self._idle_blocks = 0
        self._sorting_restores_order = self._probe()

    def take(self, num_gpu_blocks: int, hash_block_size: int, num_lookahead: int = 0) -> Any:
        """Return a pool that is as good as new; arguments are those of `Bindings.new_pool`."""
        pool = self._idle.pop((num_gpu_blocks, hash_block_size, num_lookahead), None)
        if pool is not None:
            self._idle_blocks -= num_gpu_blocks
            return pool
        return self._bindings.new_pool(num_gpu_blocks, hash_block_size, num_lookahead)

    def put_back(self, pool: Any, least_free: int) -> bool:
        """Restore the order of the free list and keep the pool, if nothing else changed.

        Args:
            pool: A pool on which nobody holds a block.
            least_free: The fewest free blocks it had meanwhile. Blocks are drawn from the front,
                so only that many at the front can have changed places.
        """
        num_usable = pool.num_gpu_blocks - 1
        if pool.get_num_free_blocks() != num_usable or len(hash_map_ids(pool)):
            return False
        try:
            drawn = sorted(pool.get_new_blocks(num_usable - least_free), key=block_id)
            pool.free_blocks(drawn)
        except Exception:  # a step of a faulty tree has freed a block twice, or lost one
            return False
        are_first = all(block.block_id == i for i, block in enumerate(drawn, start=1))
        are_clean = not any(map(ref_cnt, drawn)) and not any(map(_block_hash, drawn))
        if are_first and are_clean and self._sorting_restores_order:
            self._keep(pool)
        return are_first and are_clean

    def _keep(self, pool: Any) -> None:
        num_lookahead = getattr(pool, "num_hash_lookahead_tokens", 0)
        key = (pool.num_gpu_blocks, pool.hash_block_size, num_lookahead)
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
        pool.free_blocks(sorted(pool.get_new_blocks(3), key=block_id))
        return [*map(block_id, pool.free_block_queue.get_all_free_blocks())] == [1, 2, 3, 4, 5]


def hash_map_ids(pool: Any) -> dict[Any, list[int]]:
    """Block ids by hash, whatever the release keeps them in."""
    hash_map = pool.cached_block_hash_to_block
    content = getattr(hash_map, "_cache", hash_map)
    return {
        key: sorted(found) if isinstance(found, dict) else [found.block_id]
        for key, found in content.items()
    }
