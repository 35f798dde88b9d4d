"""What a life on a shared pool is made of: plans, rules, and what each request has become."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conformance.life_plan import (
    Tokens,
    WorkerRow,
)
from spec.vocabulary import Geometry

#: Bytes that stand for one hash; that of a block ends with that of its last hash unit.
_HASH_BYTES = 8


@dataclass(frozen=True)
class Plan:
    """One request: how many tokens it brings, how many it makes, and which of them others have."""

    num_prompt_tokens: int
    max_tokens: int = 1
    """Output tokens after which it is finished."""
    num_shared_tokens: int = 0
    """The first so many tokens, outputs included, are the same as every other request's."""


@dataclass(frozen=True)
class Setting:
    """What is fixed over a life."""

    geometry: Geometry
    num_gpu_blocks: int
    """Pool size in blocks, null block included."""
    plans: tuple[Plan, ...]
    num_mamba_groups: int = 1
    max_num_scheduled_tokens: int = 64
    """Tokens that one step may compute."""
    num_lookahead_tokens: int = 0
    """Tokens behind a step's end that get slots, for a draft model."""
    full_sequence_must_fit: bool = True
    """Whether an admission asks the full-sequence gate."""
    num_steps_in_flight: int = 0
    """Steps whose outputs are not known yet when the next one is scheduled: 1 is asynchronous
    scheduling. Without drafts and without a connector only."""


@dataclass(frozen=True)
class Rule:
    """One rule applied: its name, and what it is given. Fields that a rule does not use are 0."""

    name: str
    request: int = 0
    num_tokens: int = 0
    """Tokens that the step has left for the request."""
    num_external_tokens: int = 0
    loads_asynchronously: bool = False
    num_accepted: int = 0
    """Drafts accepted, of those scheduled."""


@dataclass(frozen=True)
class Life:
    """A setting and the rules applied; plain data, replays without anything else."""

    setting: Setting
    rules: tuple[Rule, ...]


class Stage(str, Enum):
    """Where a request stands, in the scheduler's words."""

    WAITING = "waiting"
    LOADING = "loading"
    ARRIVED = "arrived"
    RUNNING = "running"
    PREEMPTED = "preempted"
    LEAVING = "leaving"
    ENDED = "ended"


#: Stages in which `admit` applies: no tokens computed, no blocks.
ADMITTED_FROM = (Stage.WAITING, Stage.PREEMPTED)


@dataclass(eq=False)
class Request:
    """Stands in for vLLM's `Request`, and remembers what the harness needs of it."""

    request_id: str
    plan: Plan
    number: int
    hasher: Hasher
    status: Any = None
    stage: Stage = Stage.WAITING
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    """Draft tokens that wait to be judged."""
    num_preemptions: int = 0
    shared_prefix_boundary: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    row: WorkerRow | None = None
    adopted_blocks: frozenset[int] = frozenset()
    """Ids of the blocks that its last admission found in the prefix cache."""
    external_start: int = 0
    """Where the tokens begin that are being loaded."""
    num_in_flight_tokens: int = 0
    """Tokens that steps in flight compute, stale ones included."""
    num_stale_output_tokens: int = 0
    """Of these, the ones from before a preemption."""
    num_output_placeholders: int = 0
    """Output tokens that steps in flight sample."""
    # What vLLM reads besides, and what it is here.
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    mm_features: tuple[Any, ...] = ()
    cache_salt: str | None = None
    all_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.update_hashes()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.plan.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens so far, outputs included."""
        return self.plan.num_prompt_tokens + self.num_output_tokens

    @property
    def prefill_length(self) -> int:
        """Tokens to prefill. vLLM: `KVCacheManager.allocate_slots`, `prefill_end`."""
        return max(self.num_prompt_tokens, self.num_tokens - 1)

    @property
    def samples_its_last(self) -> bool:
        """Whether a step in flight brings as many output tokens as the request makes."""
        made = self.num_output_tokens + self.num_output_placeholders
        return self.num_output_placeholders > 0 and made >= self.plan.max_tokens

    @property
    def waits_for_output(self) -> bool:
        """Whether it is not scheduled before a step in flight has ended."""
        return self.samples_its_last or self.num_stale_output_tokens > 0

    def tokens(self, end: int) -> Tokens:
        """The first tokens; those not made yet are what they will be."""
        shared = min(end, self.plan.num_shared_tokens)
        return (0,) * shared + (self.number + 1,) * (end - shared)

    def update_hashes(self) -> None:
        """Hash the units that are full. vLLM: `Request.update_block_hashes`."""
        self.hasher.extend(self)


class Hasher:
    """Hashes of prefixes, numbered as they are met, so that a hash tells its tokens."""

    def __init__(self, hash_block_size: int) -> None:
        self._unit = hash_block_size
        self._numbers: dict[Tokens, bytes] = {}
        self._prefixes: dict[bytes, Tokens] = {}

    def extend(self, request: Request) -> None:
        """Hash the units that a request has filled since."""
        for i in range(len(request.block_hashes), request.num_tokens // self._unit):
            prefix = request.tokens((i + 1) * self._unit)
            number = self._numbers.get(prefix)
            if number is None:
                number = (len(self._numbers) + 1).to_bytes(_HASH_BYTES, "big")
                self._numbers[prefix], self._prefixes[number] = number, prefix
            request.block_hashes.append(number)

    def tokens(self, block_hash: bytes) -> Tokens:
        """Return the tokens that a block's hash covers."""
        return self._prefixes[bytes(block_hash[-_HASH_BYTES:])]
