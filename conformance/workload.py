"""Whole runs of the engine as plain data: a Workload says which requests arrive, and what is seen.

A Scenario is about one step of one request on a manager; a Workload is about what becomes of it in
vLLM's own scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class Engine:
    """Sizes that the scheduler and its KV-cache groups are built with."""

    block_size: int
    """B, tokens per block, in all groups."""
    hash_block_size: int
    """H, tokens per hash unit; divides `block_size`."""
    num_gpu_blocks: int
    """Blocks that the groups share, null block included."""
    max_model_len: int
    """Tokens, those to be sampled included."""
    max_num_batched_tokens: int
    """Tokens that one step may schedule, over all requests."""
    num_mamba_groups: int = 1
    """Mamba groups behind the full-attention group."""
    num_speculative_tokens: int = 0
    """Drafts per step, from an n-gram proposer; each Mamba group keeps as many speculative
    blocks."""
    num_prefill_checkpoint_blocks: int = 0
    """K, of the Mamba groups."""
    prefill_checkpoint_alignment: int = 1
    """Tokens; an exported checkpoint lies a multiple of this behind the chunk's start."""
    max_num_seqs: int = 4
    """Requests that run at a time."""
    long_prefill_token_threshold: int = 0
    """Tokens that one step may schedule of one request; 0 sets no limit."""
    scheduler_reserve_full_isl: bool = True
    """Whether a waiting request must fit as a whole (vLLM's default): the full-sequence gate."""
    watermark: float = 0.0
    """Part of the pool that a waiting request must leave free."""


@dataclass(frozen=True)
class Arrival:
    """One request, when it arrives, and what its connector and its drafts do."""

    name: str
    """Slug; the request's id."""
    num_prompt_tokens: int
    max_tokens: int = 1
    """Tokens to sample, after which the request is finished."""
    num_external_tokens: int = 0
    """Tokens of the prompt's prefix that the connector holds; of these, the ones that the local
    prefix cache holds are not loaded."""
    loads_asynchronously: bool = False
    """Whether the request is parked for a step while they arrive."""
    prompt: str = ""
    """Requests with the same word here begin with the same tokens; empty is the name."""
    num_accepted_tokens: int = 0
    """Drafts of each step that are accepted, where so many were scheduled."""
    after_step: int = 0
    """Steps that were made before the request arrives."""
    after: str = ""
    """Name of a request that must be finished before this one arrives."""
    resets_prefix_cache: bool = False
    """Whether the local prefix cache is cleared just before."""


class End(str, Enum):
    """How a workload ended."""

    FINISHED = "finished"
    """All requests have got their tokens."""
    STALLED = "stalled"
    """Nothing that was not seen before happened in `stall_after` steps, and a request waits."""
    RAISED = "raised"
    """The scheduler raised an exception: the engine ends."""
    REFUSED = "refused"
    """vLLM refused the configuration, or the scheduler to be built with it."""


@dataclass(frozen=True)
class Outcome:
    """What was seen of a workload. Fields that do not belong to its end are None."""

    end: End
    steps: int
    """Steps that were made; of a stall, up to the last that brought something new."""
    request: str | None = None
    """Of a stall: the request that waits, the first of them."""
    status: str | None = None
    """Of a stall: its status, by vLLM's name."""
    gate: int | None = None
    """Of a stall: blocks that the full-sequence gate was told in the last step; None where it was
    not asked."""
    estimate: int | None = None
    """Of a stall: blocks that the check of the step itself was told; None where the gate refused
    before, or the scheduler asked for no blocks at all."""
    free: int | None = None
    """Of a stall: free blocks at that time."""
    num_computed_tokens: int | None = None
    """Of a stall: tokens of the request that are computed."""
    error: str | None = None
    """Type and text of the exception."""
    preemptions: int = 0
    """Times that a request lost its blocks."""


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at an engine, and what is expected to become of them."""

    name: str
    """Slug; becomes a test id."""
    engine: Engine
    arrivals: tuple[Arrival, ...]
    stall_after: int = 16
    """Steps without progress after which the engine counts as stalled."""
    expected: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By target, fields of its `Outcome`; those not given are not compared."""
    source: str = ""
    """Free text: the public report, or the finding."""
