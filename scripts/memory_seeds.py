"""Faults of a release's manager, of the worker and of the layout, as data.

A manager's fault is an edit of the release's text; a worker's is a planner that decides otherwise;
a layout's puts layers elsewhere. `memory_faults.py` sees them caught.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.kv_cache import LAYERS_PER_GROUP, GroupPlaces, KVCache, Lanes
from conformance.life_plan import Chunk, StepPlan, Tokens, Writing
from conformance.life_planner import Planner
from models.loader import CORE_MODULES

CORE = Path("vllm/v1/core")
MANAGERS, POOL = CORE / "single_type_kv_cache_manager.py", CORE / "block_pool.py"
SCHEDULER = CORE / "sched/scheduler.py"
#: What a manager's edits are made to.
RELEASE = "0.33.0"

CacheFault = Callable[[KVCache], KVCache]


@dataclass(frozen=True)
class MemoryFault:
    """One thing that goes wrong.

    Attributes:
        name: What does.
        error: Name of the error that it must be caught as.
        edits: File, text that comes before the place, text, and what it becomes.
        planner: What plans the worker's steps instead.
        layout: What becomes of a cache.
    """

    name: str
    error: str
    edits: tuple[tuple[Path, str, str, str], ...] = ()
    planner: type[Planner] = Planner
    layout: CacheFault | None = None


# ---- faults of the worker ------------------------------------------------------------------------


class _CopiesSkipped(Planner):
    def step(self, *arguments: object) -> StepPlan:
        return replace(super().step(*arguments), copies=[])  # type: ignore[arg-type]


class _CopiesReversed(Planner):
    def step(self, *arguments: object) -> StepPlan:
        plan = super().step(*arguments)  # type: ignore[arg-type]
        return replace(plan, copies=[(target, source) for source, target in plan.copies])


class _MovesSkipped(Planner):
    def step(self, *arguments: object) -> StepPlan:
        return replace(super().step(*arguments), moves_before=[])  # type: ignore[arg-type]


class _WindowNotShifted(Planner):
    def step(self, *arguments: object) -> StepPlan:
        plan = super().step(*arguments)  # type: ignore[arg-type]
        return replace(plan, moves_before=[replace(m, offset=0) for m in plan.moves_before])


class _DraftsNotMoved(Planner):
    def step(self, *arguments: object) -> StepPlan:
        plan = super().step(*arguments)  # type: ignore[arg-type]
        moves = [replace(m, state=m.window) for m in plan.moves_before]
        return replace(plan, moves_before=moves)


class _BoundaryNotKept(Planner):
    def step(self, *arguments: object) -> StepPlan:
        return replace(super().step(*arguments), moves_after=[])  # type: ignore[arg-type]


class _CheckpointNotWritten(Planner):
    def _plan_chunk(self, plan: StepPlan, chunk: Chunk) -> None:
        super()._plan_chunk(plan, replace(chunk, checkpoint=0))


class _CheckpointOneUnitEarly(Planner):
    def _plan_chunk(self, plan: StepPlan, chunk: Chunk) -> None:
        early = chunk.checkpoint - self.geometry.hash_block_size
        super()._plan_chunk(plan, replace(chunk, checkpoint=max(early, 0)))


class _LoadOneColumnLow(Planner):
    def loaded(
        self,
        request: str,
        tables: Sequence[Sequence[int]],
        tokens: Tokens,
        start: int,
        end: int,
    ) -> list[Writing]:
        last = -(-end // self.geometry.block_size) - 1
        low = [[*table] for table in tables]
        for table in low[1:]:
            table[last] = table[last - 1]
        return super().loaded(request, low, tokens, start, end)


class _LoadEndsEarly(Planner):
    def loaded(
        self,
        request: str,
        tables: Sequence[Sequence[int]],
        tokens: Tokens,
        start: int,
        end: int,
    ) -> list[Writing]:
        return super().loaded(request, tables, tokens, start, max(end - 1, start))


class _GroupsMixedUp(Planner):
    """The first Mamba group's states are written through full attention's table."""

    def _plan_states(self, plan: StepPlan, chunk: Chunk, column: int, known: int) -> None:
        tables = chunk.row.tables
        other = tables[0]
        mixed = [other, [*other[: column + 1], *tables[1][column + 1 :]], *tables[2:]]
        row = replace(chunk.row, tables=mixed)
        super()._plan_states(plan, replace(chunk, row=row), column, known)
        chunk.row.num_accepted, chunk.row.state_column = row.num_accepted, row.state_column


# ---- faults of the layout ------------------------------------------------------------------------


def _layers_overlap(cache: KVCache) -> KVCache:
    """The second layer begins half a page too low."""
    first, second = cache.layer_bases
    back = cache.page_words // 2 + (cache.block_stride if second - first > cache.page_words else 0)

    def moved(lanes: Lanes | None) -> Lanes | None:
        if lanes is None:
            return None
        half = len(lanes.bases) // LAYERS_PER_GROUP
        bases = lanes.bases[:half] + tuple(base - back for base in lanes.bases[half:])
        return replace(lanes, bases=bases)

    groups = (
        GroupPlaces(moved(at.attention), moved(at.window), moved(at.state)) for at in cache.groups
    )
    return replace(cache, groups=tuple(groups))


# ---- faults of the manager, and the list ---------------------------------------------------------

_FREES_EARLY = (
    MANAGERS,
    "class MambaManager",
    "< cdiv(processed_computed_tokens, self.block_size) - 1",
    "< cdiv(processed_computed_tokens, self.block_size)",
)
FAULTS = (
    MemoryFault("a state is freed one step early", "ReadAfterFree", (_FREES_EARLY,)),
    MemoryFault(
        "a page is freed while the step reads it",
        "ReadAfterFree",
        (
            (
                MANAGERS,
                "def get_num_skipped_tokens",
                "        return 0",
                "        return num_computed_tokens // 2",
            ),
        ),
    ),
    MemoryFault(
        "two requests get one page",
        "WrittenByTwo",
        (
            (
                POOL,
                "def get_new_blocks",
                "self.free_block_queue.popleft_n(num_blocks)",
                "self.free_block_queue.popleft_n(num_blocks)\n"
                "        if num_blocks == 1:\n"
                "            held = [b for b in self.blocks[1:] if b.ref_cnt == 1]\n"
                "            if held:\n"
                "                self.free_block_queue.append_n(ret)\n"
                "                held[-1].ref_cnt += 1\n"
                "                return held[-1:]",
            ),
        ),
    ),
    MemoryFault(
        "a hit's references are not counted",
        "WrongOwner",
        (
            (
                POOL,
                "def touch",
                "            block.ref_cnt += 1\n",
                "            block.ref_cnt += block.ref_cnt == 0\n",
            ),
        ),
    ),
    MemoryFault(
        "a hit cached in the same step is taken",
        "NeverWritten",
        (
            (
                MANAGERS,
                "class MambaManager",
                "return self.block_pool.num_gpu_blocks + 1",
                "pass",
            ),
        ),
    ),
    MemoryFault(
        "a hit ends one hash unit further than its state",
        "StalePosition",
        (
            (
                MANAGERS,
                "class MambaManager",
                "block_hash = block_hashes[fine_idx]",
                "block_hash = block_hashes[max(fine_idx - 1, 0)]",
            ),
        ),
    ),
    MemoryFault(
        "blocks are cleared again in the next step",
        "NeverWritten",
        (
            (
                MANAGERS,
                "def take_new_block_ids",
                "        self.new_block_ids = []",
                "        self.new_block_ids = self.new_block_ids[-1:]",
            ),
        ),
    ),
    MemoryFault(
        "a copy on write goes to the wrong page",
        "NeverWritten",
        (
            (
                MANAGERS,
                "def _apply_cow",
                "self._pending_cow_copies.append((source_block, cow_block))",
                "self._pending_cow_copies.append((source_block, self.block_pool.blocks[0]))",
            ),
        ),
    ),
    MemoryFault(
        "a copy on write is not queued",
        "WrongOwner",
        (
            (
                MANAGERS,
                "class MambaManager",
                "self._pending_cow_copies.append((source_block, cow_block))\n"
                + " " * 24
                + "source_block.ref_cnt += 1",
                "self.block_pool.free_blocks([cow_block])",
            ),
        ),
    ),
    MemoryFault(
        "a pinned page is relocated",
        "StalePosition",
        (
            (
                MANAGERS,
                "if blocks_allocated:\n                    # Relocate",
                "prev_block_len - self.num_speculative_blocks, prev_block_len",
                "prev_block_len - self.num_speculative_blocks - 1, prev_block_len",
            ),
            (
                MANAGERS,
                "def _relocate_speculative_block",
                "assert self.block_pool.is_block_writable(block), (",
                "assert True, (",
            ),
        ),
    ),
    MemoryFault(
        "draft blocks are not relocated",
        "WrittenAfterFree",
        (
            (
                MANAGERS,
                "class MambaManager",
                "self._relocate_speculative_block(req_blocks, block_idx)",
                "req_blocks.append(self._null_block)",
            ),
        ),
    ),
    MemoryFault(
        "a checkpoint is recorded one column too low",
        "StalePosition",
        (
            (
                MANAGERS,
                "if checkpoint_position > 0:",
                "checkpoint_idx = cdiv(num_tokens, self.block_size) - 2",
                "checkpoint_idx = max(cdiv(num_tokens, self.block_size) - 3, 0)",
            ),
        ),
    ),
    MemoryFault(
        "the worker skips copies on write",
        "WrongOwner",
        planner=_CopiesSkipped,
    ),
    MemoryFault(
        "the worker copies back to front",
        "WrongOwner",
        planner=_CopiesReversed,
    ),
    MemoryFault(
        "the state stays in the column of the last step",
        "NeverWritten",
        planner=_MovesSkipped,
    ),
    MemoryFault(
        "the window is not shifted by accepted drafts",
        "StalePosition",
        planner=_WindowNotShifted,
    ),
    MemoryFault(
        "the state of an accepted draft is not moved", "StalePosition", planner=_DraftsNotMoved
    ),
    MemoryFault(
        "the state at a block boundary is not kept",
        "StalePosition",
        planner=_BoundaryNotKept,
    ),
    MemoryFault(
        "a checkpoint is not written",
        "NeverWritten",
        planner=_CheckpointNotWritten,
    ),
    MemoryFault(
        "a checkpoint is of an earlier position",
        "StalePosition",
        planner=_CheckpointOneUnitEarly,
    ),
    MemoryFault(
        "a load goes into the wrong column",
        "NeverWritten",
        planner=_LoadOneColumnLow,
    ),
    MemoryFault(
        "a load ends a token early",
        "NeverWritten",
        planner=_LoadEndsEarly,
    ),
    MemoryFault(
        "a state is written through another group's table",
        "NeverWritten",
        planner=_GroupsMixedUp,
    ),
    MemoryFault("two layers overlap", "WrittenByTwo", layout=_layers_overlap),
)


def edited(root: Path, fault: MemoryFault, target: Path) -> Path:
    """Write a copy of a release's KV-cache core with the fault."""
    for module in CORE_MODULES:
        file = Path(module.replace(".", "/") + ".py")
        if (root / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / file, target / file)
    (target / SCHEDULER).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(root / SCHEDULER, target / SCHEDULER)
    for file, inside, old, new in fault.edits:
        text = (target / file).read_text()
        before, at, after = text.partition(inside)
        if old not in after:
            raise SystemExit(f"{fault.name}: {file} has changed")
        (target / file).write_text(before + at + after.replace(old, new, 1))
    return target
