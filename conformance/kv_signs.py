"""Signatures: what is written into a slot of a KV cache, and what is made of one that is found.

A slot is a token's keys and values of one head, a token of a convolution's window, or a temporal
state, each in one layer. It holds five words: at its start a *sign* of what it holds, the position
in tokens, who wrote it in which step, and where it was meant for; at its end the sign again, so
that a slot that was overwritten in part is known. The sign is made of the tokens up to the
position, of the layer and the head: requests that share a prefix may read what either wrote, and
nobody else's. Who wrote it is for the error alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from conformance.kv_cache import GroupPlaces, Lanes
from conformance.life_plan import (
    NeverWritten,
    Reading,
    StalePosition,
    StateLost,
    Tokens,
    WrittenByTwo,
    WrongOwner,
)

#: Words of a signature, the last of them at the slot's end.
NUM_WORDS = 5
ATTENTION, WINDOW, STATE = 1, 2, 3
_REJECTED = 1 << 40
_STEP_BITS = 32
_WORD = (1 << 64) - 1
#: What signs of different things begin with.
_OF_PREFIXES, _BEFORE, _OF_DRAFTS = 1, 2, 3
Words = "np.ndarray[Any, np.dtype[np.int64]]"


def mixed(value: int) -> int:
    """Return 64 bits in which each bit of the value tells (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def signed(word: int) -> int:
    """Return 64 bits as torch has them."""
    return word - (1 << 64) if word >> 63 else word


@lru_cache(maxsize=4096)
def prefix_signs(tokens: Tokens) -> list[int]:
    """Return a sign of each prefix, from the empty one to the whole."""
    found = [mixed(_OF_PREFIXES)]
    for token in tokens:
        found.append(mixed(found[-1] ^ mixed(token + 2)))
    return [signed(word) for word in found]


def rejected_sign(number: int) -> int:
    """Return a sign that no prefix has: that of the draft of so many that was rejected."""
    return signed(mixed(mixed(_OF_DRAFTS) ^ number))


def sign_at(signs: Sequence[int], position: int) -> int:
    """Return the sign of a prefix; before the first token there is nothing but the position."""
    return signs[position] if position > 0 else signed(mixed(mixed(_BEFORE) ^ -position))


@dataclass(frozen=True)
class Kind:
    """Slots of one kind in one group."""

    code: int
    group: int
    lanes: Lanes

    @cached_property
    def bases(self) -> Words:
        """First word of block 0, by lane."""
        return np.asarray(self.lanes.bases, dtype=np.int64)

    @cached_property
    def offsets(self) -> Words:
        """Where in a slot the words of a signature stand."""
        return np.array([0, 1, 2, 3, self.lanes.slot_words - 1], dtype=np.int64)[:, None, None]

    @cached_property
    def places(self) -> Words:
        """Where each lane was meant for: group, kind and lane in one word."""
        lane = np.arange(len(self.lanes.bases), dtype=np.int64)
        return (self.group << 32) + (self.code << 16) + lane + 1

    @cached_property
    def salts(self) -> Words:
        """What tells the signs of lanes apart."""
        return np.array([signed(mixed(int(place) << 1)) for place in self.places], dtype=np.int64)


def kinds_of(group: int, places: GroupPlaces) -> dict[int, Kind]:
    """Return the kinds of slots that a group has, by code."""
    lanes = {ATTENTION: places.attention, WINDOW: places.window, STATE: places.state}
    return {code: Kind(code, group, at) for code, at in lanes.items() if at is not None}


@dataclass
class Slots:
    """Slots of several kinds, as they are met: what each holds, or should.

    Attributes:
        kinds: Per group, by code.
    """

    kinds: Sequence[dict[int, Kind]]
    _rows: dict[tuple[int, int], list[tuple[int, int, int, int]]] = field(default_factory=dict)

    def add(
        self, group: int, code: int, block: int, slot: int, sign: int, position: int, by: int
    ) -> None:
        """Add one slot of all lanes.

        Args:
            group: KV-cache group.
            code: Kind.
            block: Block id.
            slot: Slot of the block.
            sign: What it holds.
            position: In tokens.
            by: For a slot that is written, who does; for one that is read, which reading it is.
        """
        lanes = self.kinds[group][code].lanes
        start = block * lanes.block_stride + slot * lanes.slot_stride
        self._rows.setdefault((group, code), []).append((start, sign, position, by))

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def built(self) -> tuple[Words, Words]:
        """Return where the words stand, and what they are: both `[NUM_WORDS, slots]`."""
        columns: list[Words] = []
        values: list[Words] = []
        for (group, code), rows in self._rows.items():
            kind = self.kinds[group][code]
            starts, signs, positions, by = np.array(rows, dtype=np.int64).T[:, :, None]
            at = np.empty((NUM_WORDS, len(rows), len(kind.bases)), dtype=np.int64)
            at[:] = starts + kind.bases
            at += kind.offsets
            held = np.empty_like(at)
            held[0] = held[4] = signs ^ kind.salts
            held[1], held[2], held[3] = positions, by, kind.places
            columns.append(at.reshape(NUM_WORDS, -1))
            values.append(held.reshape(NUM_WORDS, -1))
        return np.concatenate(columns, axis=1), np.concatenate(values, axis=1)


def written_by(number: int, step: int) -> int:
    """Return the word that says who wrote a slot."""
    return ((number + 1) << _STEP_BITS) + step


def rejected(position: int) -> int:
    """Return the position of a draft that sampling rejected, so that it is known for one."""
    return position | _REJECTED


@dataclass
class Writers:
    """Who writes: numbers of requests, and the tokens that each has."""

    names: list[str] = field(default_factory=list)
    tokens: dict[str, Tokens] = field(default_factory=dict)

    def number(self, request: str, tokens: Tokens) -> int:
        """Return the number of a request, and remember its tokens."""
        if request not in self.tokens:
            self.names.append(request)
        if len(tokens) >= len(self.tokens.get(request, ())):
            self.tokens[request] = tokens
        return self.names.index(request)

    def lost(self, reading: Reading, found: Sequence[int], expected: Sequence[int]) -> StateLost:
        """Say what is wrong with a slot.

        Args:
            reading: What relies on it.
            found: Its words.
            expected: What they should be; the third is no matter.
        """
        cls, said = self._judged(reading, found, expected)
        detail = f"{said}, expected {reading.what}"
        if len(reading.tokens) != expected[1]:
            detail += f" (at position {expected[1]})"
        return cls(reading.request, reading.blamed, detail)

    def _judged(
        self, reading: Reading, found: Sequence[int], expected: Sequence[int]
    ) -> tuple[type[StateLost], str]:
        sign, position, by, place, last = found
        if not any(found):
            return NeverWritten, "was never written"
        if sign != last:
            return WrittenByTwo, f"begins as {self._shown(found)} wrote it and ends otherwise"
        said = f"holds position {position & ~_REJECTED} of {self._shown(found)}"
        if place != expected[3]:
            return WrongOwner, f"{said}, of group {place >> 32}"
        if position & _REJECTED:
            return StalePosition, f"{said}, a rejected draft"
        theirs = self.tokens.get(self._name(by), ())[: max(position, 0)]
        ours = reading.tokens[: max(expected[1], 0)]
        length = min(len(theirs), len(ours))
        return (StalePosition if theirs[:length] == ours[:length] else WrongOwner), said

    def _name(self, by: int) -> str:
        number = (by >> _STEP_BITS) - 1
        return self.names[number] if 0 <= number < len(self.names) else "nobody known"

    def _shown(self, found: Sequence[int]) -> str:
        return f"{self._name(found[2])} in step {found[2] & ((1 << _STEP_BITS) - 1)}"
