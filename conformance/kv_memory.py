"""What blocks hold, kept in the KV-cache tensors of a release on a device (vllm tier).

All that a step writes is one scatter, all that it reads one gather and one comparison, and states
are moved and blocks copied by one gather and one scatter per tensor. Whether a comparison failed
is asked of the device once, in `check`; what was found is fetched only then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from conformance.kv_cache import GroupPlaces, KVCache, Lanes
from conformance.kv_signs import (
    ATTENTION,
    NUM_WORDS,
    STATE,
    WINDOW,
    Slots,
    Writers,
    kinds_of,
    prefix_signs,
    rejected,
    rejected_sign,
    sign_at,
    written_by,
)
from conformance.life_plan import ATTENTION_GROUP, Moving, Reading, StateLost, StepPlan, Writing


@dataclass
class Counts:
    """What was done, so that nothing found is known to be something looked for."""

    steps: int = 0
    pages_written: int = 0
    """Pages of one layer."""
    pages_read: int = 0
    slots_compared: int = 0
    blocks_zeroed: int = 0
    blocks_copied: int = 0
    states_moved: int = 0
    comparisons: int = 0
    """Times that the device was waited for."""


@dataclass
class _Compared:
    """A comparison on the device whose outcome nobody has asked for yet."""

    readings: Sequence[Reading]
    slots: Any
    expected: Any
    found: Any
    differs: Any


class KVMemory:
    """Contents of all blocks, in memory.

    Args:
        cache: Allocated by the release; it is cleared.
        counts: Added to.
        around: Told of each part of a step that copies, and runs it; None runs it.
    """

    def __init__(self, cache: KVCache, counts: Counts, around: Around | None = None) -> None:
        self._torch = importlib.import_module("torch")
        self.cache, self.counts = cache, counts
        self.words = cache.words
        self.words.zero_()
        self._around = around or _just
        self._kinds = [kinds_of(group, at) for group, at in enumerate(cache.groups)]
        self._writers = Writers()
        self._num_rejected = 0
        self._pending: list[_Compared] = []
        self._verified: set[Reading] = set()
        self._block_size = cache.config.kv_cache_groups[ATTENTION_GROUP].kv_cache_spec.block_size
        pages = (cache.num_blocks, cache.page_words), (cache.block_stride, 1)
        self._pages = self._view(cache.layer_bases, *pages)

    # ---- a life's shadow -------------------------------------------------------------------------

    def load(self, writings: Sequence[Writing], step: int) -> None:
        """Have a connector write."""
        self._verified.clear()
        self._write(writings, step)

    def run(self, plan: StepPlan) -> Sequence[StateLost]:
        """Run a step; what it read and was not there is said by the next `check`."""
        self._verified.clear()
        self.counts.steps += 1
        if plan.zeroed:
            self._around("clearing", plan, lambda: self._zero(plan.zeroed))
        if plan.copies:
            self._around("copies", plan, lambda: self._copy(plan.copies))
        self._write([*plan.loads, *plan.attended], plan.step)
        self._around("moves before", plan, lambda: self._move(plan.moves_before))
        self._read(plan.readings)
        self._write(plan.writings, plan.step)
        self._around("moves after", plan, lambda: self._move(plan.moves_after))
        return ()

    def check(self, readings: Sequence[Reading]) -> list[StateLost]:
        """Return which readings, those of the last step among them, are not there."""
        new = [reading for reading in readings if reading not in self._verified]
        self._read(new)
        self._verified.update(new)
        if not self._pending:
            return []
        pending, self._pending = self._pending, []
        self.counts.comparisons += 1
        differ = pending[0].differs.any()
        for compared in pending[1:]:
            differ = differ | compared.differs.any()
        if not bool(differ):  # The one point at which the host waits for the device.
            return []
        return [lost for compared in pending for lost in self._lost(compared)]

    # ---- what is done on the device --------------------------------------------------------------

    def _zero(self, blocks: Sequence[int]) -> None:
        """Clear whole blocks. vLLM: `v1/worker/utils.py`, `KVBlockZeroer`."""
        (ids,) = self._sent(np.array(blocks, dtype=np.int64))
        self._pages.index_fill_(1, ids, 0)
        self.counts.blocks_zeroed += len(blocks)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks. vLLM: `v1/worker/utils.py`, `copy_kv_cache_blocks_inplace`."""
        (blocks,) = self._sent(np.array(copies, dtype=np.int64).T)
        self._pages.index_copy_(1, blocks[1], self._pages.index_select(1, blocks[0]))
        self.counts.blocks_copied += len(copies)

    def _move(self, moves: Sequence[Moving]) -> None:
        """Move states. vLLM: `v1/worker/mamba_utils.py`, `preprocess_mamba` and its kernels."""
        for places, moved in _by_places(self.cache.groups, moves):
            self.counts.states_moved += len(moved)
            window, state = places.window, places.state
            assert window is not None
            assert state is not None
            rows = [
                (m.window, slot + m.offset, m.target, slot)
                for m in moved
                for slot in range(window.num_slots - m.offset)
            ]
            blocks, slots = self._sent(
                np.array([(m.state, m.target) for m in moved], dtype=np.int64).T,
                np.array(rows, dtype=np.int64).T,
            )
            states, windows = self._lane_view(state), self._lane_view(window)
            kept = states.index_select(1, blocks[0]), windows[:, slots[0], slots[1]]
            states.index_copy_(1, blocks[1], kept[0])
            windows[:, slots[2], slots[3]] = kept[1]

    def _write(self, writings: Iterable[Writing], step: int) -> None:
        slots = Slots(self._kinds)
        for writing in writings:
            self._add_writing(slots, writing, step)
        if len(slots):
            places, values = self._sent(*slots.built())
            self.words.index_copy_(0, places.view(-1), values.view(-1))

    def _add_writing(self, slots: Slots, w: Writing, step: int) -> None:
        signs = prefix_signs(w.tokens)
        by = written_by(self._writers.number(w.request, w.tokens), step)
        self.counts.pages_written += self._num_layers(w.group)

        def add(code: int, slot: int, position: int) -> None:
            if position <= w.known:
                sign, said = sign_at(signs, position), position
            else:
                self._num_rejected += 1
                sign, said = rejected_sign(self._num_rejected), rejected(position)
            slots.add(w.group, code, w.block, slot, sign, said, by)

        if w.group == ATTENTION_GROUP:
            for token in range(w.start, w.end):
                add(ATTENTION, token % self._block_size, token + 1)
            return
        add(STATE, 0, w.end)
        if w.window >= 0:
            for slot in range(self.cache.num_window_tokens + w.window):
                add(WINDOW, slot, w.end - self.cache.num_window_tokens + 1 + slot)

    def _read(self, readings: Sequence[Reading]) -> None:
        """Gather and compare; nobody waits for it."""
        slots = Slots(self._kinds)
        for i, reading in enumerate(readings):
            self._add_reading(slots, reading, i)
            self.counts.pages_read += self._num_layers(reading.group)
        if not len(slots):
            return
        places, values = slots.built()
        self.counts.slots_compared += values.shape[1]
        at, expected = self._sent(places, values)
        found = self.words.index_select(0, at.view(-1)).view(NUM_WORDS, -1)
        differs = (found[0] != expected[0]) | (found[4] != expected[4])
        self._pending.append(_Compared(readings, values, expected, found, differs))

    def _add_reading(self, slots: Slots, r: Reading, number: int) -> None:
        position, signs = len(r.tokens), prefix_signs(r.tokens)
        if r.group == ATTENTION_GROUP:
            first = (position - 1) // self._block_size * self._block_size
            for token in range(first, position):
                sign = sign_at(signs, token + 1)
                slots.add(
                    r.group, ATTENTION, r.block, token % self._block_size, sign, token + 1, number
                )
            return
        slots.add(r.group, STATE, r.block, 0, sign_at(signs, position), position, number)
        num_tokens = self.cache.num_window_tokens
        for slot in range(num_tokens):
            token = position - num_tokens + 1 + slot
            sign = sign_at(signs, token)
            slots.add(r.group, WINDOW, r.window, slot + r.offset, sign, token, number)

    def _lost(self, compared: _Compared) -> list[StateLost]:
        """Fetch what was found where a comparison failed; the first of each reading."""
        (wrong,) = np.nonzero(compared.differs.cpu().numpy())
        found = compared.found[:, wrong.tolist()].cpu().numpy() if len(wrong) else ()
        lost: dict[int, StateLost] = {}
        for i, slot in enumerate(wrong):
            expected = [int(word) for word in compared.slots[:, slot]]
            if expected[2] not in lost:
                words = [int(word) for word in found[:, i]]
                reading = compared.readings[expected[2]]
                lost[expected[2]] = self._writers.lost(reading, words, expected)
        return [lost[number] for number in sorted(lost)]

    # ---- places ----------------------------------------------------------------------------------

    def _num_layers(self, group: int) -> int:
        return len(self.cache.config.kv_cache_groups[group].layer_names)

    def _lane_view(self, lanes: Lanes) -> Any:
        """`[layers, blocks, slots, words]`."""
        sizes = (self.cache.num_blocks, lanes.num_slots, lanes.slot_words)
        return self._view(lanes.bases, sizes, (lanes.block_stride, lanes.slot_stride, 1))

    def _view(self, bases: Sequence[int], sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        (between,) = {after - before for before, after in pairwise(bases)} or {1}
        return self.words.as_strided((len(bases), *sizes), (between, *strides), bases[0])

    def _sent(self, *arrays: Any) -> list[Any]:
        """Send arrays to the device in one transfer that nobody waits for."""
        sizes = [array.size for array in arrays]
        host = self._torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        if self.words.is_cuda:
            host = host.pin_memory().to(self.words.device, non_blocking=True)
        parts = host.split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


#: Runs a part of a step; its name, the plan, and what does it.
Around = Callable[[str, StepPlan, Callable[[], None]], None]


def _just(name: str, plan: StepPlan, do: Callable[[], None]) -> None:
    do()


def _by_places(
    groups: Sequence[GroupPlaces], moves: Iterable[Moving]
) -> list[tuple[GroupPlaces, list[Moving]]]:
    """Moves of the groups that overlay each other, together."""
    found: dict[GroupPlaces, list[Moving]] = {}
    for moving in moves:
        found.setdefault(groups[moving.group], []).append(moving)
    return [*found.items()]
