"""What each physical block holds, as Python values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from conformance.life_plan import (
    ATTENTION_GROUP,
    Moving,
    NeverWritten,
    Reading,
    StalePosition,
    StateLost,
    StepPlan,
    Tokens,
    Writing,
    WrongOwner,
)

#: Group and tokens up to the block's last; None is anything at all.
Content = tuple[int, Tokens] | None


@dataclass
class Shadow:
    """Contents of all blocks."""

    contents: dict[int, Content] = field(default_factory=dict)

    def load(self, writings: Iterable[Writing], step: int = 0) -> None:
        """Have a connector write."""
        for writing in writings:
            self.contents[writing.block] = _content(writing)

    def run(self, plan: StepPlan) -> Sequence[StateLost]:
        """Run a step: clearing, copies, loads, moves of states, then the forward pass."""
        for block in plan.zeroed:
            self.contents.pop(block, None)
        for source, destination in plan.copies:
            self.contents[destination] = self.contents.get(source)
        self.load(plan.loads)
        self._move(plan.moves_before)
        self.load(plan.attended)
        lost = self.check(plan.readings)
        self.load(plan.writings)
        self._move(plan.moves_after)
        return lost

    def check(self, readings: Sequence[Reading]) -> list[StateLost]:
        """Return which of the readings are not there."""
        found = ((reading, self.contents.get(reading.block)) for reading in readings)
        return [self._lost(reading, at) for reading, at in found if not _holds(reading, at)]

    def _move(self, moves: Sequence[Moving]) -> None:
        states = [self.contents.get(moving.state) for moving in moves]
        self.contents.update(zip((moving.target for moving in moves), states, strict=True))

    def _lost(self, reading: Reading, found: Content) -> StateLost:
        detail = f"holds {_shown(found)}, expected {reading.what}"
        cls: type[StateLost] = WrongOwner
        if found is None:
            # What is known to be something else was written: a draft that was rejected.
            cls = StalePosition if reading.block in self.contents else NeverWritten
        elif found[0] == reading.group:
            length = min(len(found[1]), len(reading.tokens))
            if found[1][:length] == reading.tokens[:length]:
                cls = StalePosition
        return cls(reading.request, reading.blamed, detail)


def _content(writing: Writing) -> Content:
    if writing.group == ATTENTION_GROUP:
        return writing.group, writing.tokens[: min(writing.end, writing.known)]
    return (writing.group, writing.tokens[: writing.end]) if writing.end <= writing.known else None


def _holds(reading: Reading, found: Content) -> bool:
    if found is None or found[0] != reading.group:
        return False
    if reading.group == ATTENTION_GROUP:
        return found[1][: len(reading.tokens)] == reading.tokens
    return found[1] == reading.tokens


def _shown(content: Content) -> str:
    if content is None:
        return "nothing known"
    group, tokens = content
    runs = ", ".join(f"{len([*same])} of {token}" for token, same in groupby(tokens))
    return f"{len(tokens)} tokens ({runs}) of group {group}"
