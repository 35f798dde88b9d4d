"""What a step reads, writes and copies, as plain data.

A Mamba block holds the state after some tokens, with the window of the convolution before it; a
full-attention block holds the keys and values of some tokens. Either way a function of the tokens
up to a position. `life_planner` says which column is read and written; who keeps contents executes
it: `life_shadow.Shadow` as Python values, `kv_memory.KVMemory` in a release's KV-cache tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

ATTENTION_GROUP = 0

Tokens = tuple[int, ...]


class StateLost(Exception):
    """A block does not hold what it should when it is read. Subclasses say why.

    Args:
        request: Who reads or writes; empty where a hash alone finds the block.
        block: Block id.
        detail: What is wrong.
    """

    def __init__(self, request: str, block: int, detail: str) -> None:
        super().__init__(f"block {block}: {detail}")
        self.request, self.block, self.detail = request, block, detail


class WrongOwner(StateLost):
    """It holds what other tokens, or those of another group or layer, leave behind."""


class StalePosition(StateLost):
    """It holds what the right tokens leave behind at another position, or a rejected draft."""


class WrittenByTwo(StateLost):
    """Two write to it."""


class ReadAfterFree(StateLost):
    """The worker's table lists it, and the request does not hold it any more."""


class WrittenAfterFree(StateLost):
    """The same, written to."""


class NeverWritten(StateLost):
    """Nobody has written to it."""


class CopiedTooEarly(StateLost):
    """It is a copy of a block that somebody fills in the same step, after copies have run."""


@dataclass
class WorkerRow:
    """What the worker keeps of one request that runs."""

    tables: list[list[int]]
    """Block ids by group and column; stale ones stay."""
    state_column: int = -1
    """Column that the last step's end lies in; -1 before the first step."""
    num_accepted: int = 1
    """Tokens that the last step's sampling accepted, the sampled one included."""


@dataclass(frozen=True)
class Chunk:
    """What a step computes of one request, in tokens."""

    request: str
    row: WorkerRow
    tokens: Tokens
    """All tokens that the request has once the step's output is known."""
    start: int
    end: int
    """Where its tokens end, drafts included."""
    num_drafts: int
    num_accepted_drafts: int
    held: Sequence[frozenset[int]]
    """Block ids by group that the request may read and write."""
    external_start: int = 0
    """Tokens from here to `start` are loaded before the step computes; `start` is none."""
    checkpoint: int = 0
    """Position of the internal checkpoint that the step writes, 0 for none."""


@dataclass(frozen=True)
class Reading:
    """Somebody relies on a block: it holds what `tokens` leave behind."""

    request: str
    """Empty where a hash finds the block."""
    group: int
    block: int
    tokens: Tokens
    window: int = 0
    """Block that holds the convolution's window of a state."""
    offset: int = 0
    """Slots that the window begins further on: drafts accepted since it was written."""
    source: int = 0
    """Block that the step moved the state from; the fault is that one's."""

    @property
    def blamed(self) -> int:
        """The block that a loss is reported of."""
        return self.source or self.block

    @property
    def what(self) -> str:
        """What is expected, in words."""
        if self.group == ATTENTION_GROUP:
            return f"keys and values of {len(self.tokens)} tokens"
        cached = "" if self.request else "cached "
        return f"{cached}state after {len(self.tokens)} tokens of group {self.group}"


@dataclass(frozen=True)
class Writing:
    """A step or a connector writes to a block.

    Of a Mamba group: the state after `end` tokens. Of full attention: keys and values of the
    tokens from `start` to `end`.
    """

    request: str
    group: int
    block: int
    tokens: Tokens
    """Tokens of the request."""
    known: int
    """Tokens that stay; those behind are drafts that sampling rejected."""
    start: int
    end: int
    window: int = -1
    """Drafts behind the state that the convolution's window takes in; -1 writes no window."""


@dataclass(frozen=True)
class Moving:
    """A state is copied from one column of its request to another."""

    group: int
    window: int
    """Block that the convolution's window is copied from."""
    state: int
    """Block that the state is copied from."""
    target: int
    offset: int
    """Slots that the window moves to the front by."""


@dataclass(frozen=True)
class BatchRow:
    """What the worker's own copy functions read of a request before the step, and say after it."""

    request: str
    tables: Sequence[Sequence[int]]
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_draft_tokens: int
    num_accepted_drafts: int
    state_column: int
    num_accepted: int
    end_column: int
    """`state_column` after the step."""
    num_accepted_after: int


@dataclass
class StepPlan:
    """A step, in the order in which it happens."""

    step: int
    """Steps run before."""
    copies: Sequence[tuple[int, int]]
    """Copies on write: source and destination."""
    zeroed: Sequence[int] = ()
    """Block ids that are cleared before anything else: those that full attention has drawn."""
    batch: list[BatchRow] = field(default_factory=list)
    loads: list[Writing] = field(default_factory=list)
    moves_before: list[Moving] = field(default_factory=list)
    """States, to the columns of the step's end."""
    attended: list[Writing] = field(default_factory=list)
    """Keys and values: each layer writes all requests' before it reads any."""
    readings: list[Reading] = field(default_factory=list)
    writings: list[Writing] = field(default_factory=list)
    """States."""
    moves_after: list[Moving] = field(default_factory=list)
    """States at block boundaries that accepted drafts reach."""
    lost: list[StateLost] = field(default_factory=list)
    """What is wrong whatever the blocks hold. Such a step is not run."""


class LifeShadow(Protocol):
    """Keeps what blocks hold over a life."""

    def load(self, writings: Sequence[Writing], step: int) -> None:
        """Have a connector write."""

    def run(self, plan: StepPlan) -> Sequence[StateLost]:
        """Run a step; return what it read and was not there, or leave it to `check`."""

    def check(self, readings: Sequence[Reading]) -> Sequence[StateLost]:
        """Return which of the readings are not there, in their order."""
