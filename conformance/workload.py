"""Whole runs of the engine as plain data: a Workload says which requests arrive, and what is seen.

A Scenario is about one step of one request on a manager; a Workload is about what becomes of it in
vLLM's own scheduler.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from conformance.reading import Field, Malformed, headed, read_bytes, record, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA, KIND = 1, "workload"
#: Connectors of vLLM's that need neither a network nor a device, and no worker but what is easily
#: stood in for.
SHIPPED_CONNECTORS = ("DecodeBenchConnector", "SimpleCPUOffloadConnector")
WORKLOADS_FILE = Path(__file__).with_name("workloads.toml")


class WorkloadError(Exception):
    """A file holds no workload; one line naming the file and the field."""


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
    num_steps_in_flight: int = 0
    """Steps whose outputs are not known yet when the next one is scheduled, by the scheduler that
    the release takes for it: 1 is asynchronous scheduling, which vLLM turns on where it can."""
    has_connector: bool = True
    """Whether there is a KV connector. With one, blocks that a step in flight may still write are
    not freed by a preemption."""
    shipped_connector: str = ""
    """Name of a connector that vLLM ships, in place of ours: what it serves is its own affair."""


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
    least_num_gpu_blocks: int | None = None
    """Blocks that vLLM's start-up check demands for one request of `max_model_len` tokens, null
    block included; an engine with fewer would not start. None where the configuration is
    refused."""


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at an engine, and what is expected to become of them."""

    name: str
    """Slug; becomes a test id."""
    engine: Engine
    arrivals: tuple[Arrival, ...]
    stall_after: int = 16
    """Steps without progress after which the engine counts as stalled."""
    expected: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By target, fields of its `Outcome`; those not given are not compared."""
    source: str = ""
    """Free text: the public report, or the finding."""


def differences(outcome: Outcome, expected: Mapping[str, Any]) -> list[str]:
    """Return one entry per expected field that was not seen; of an error, a part is given."""
    found = []
    for name, value in expected.items():
        seen = getattr(outcome, name)
        if name == "error" and seen is not None and value in seen:
            continue
        if seen != value:
            found.append(f"{name}: expected {_word(value)}, saw {_word(seen)}")
    return found


def summary(outcome: Outcome) -> str:
    """Return what was seen, on one line."""
    made = f"{outcome.end.value} after {outcome.steps} steps"
    if outcome.end is End.STALLED:
        gate = "not asked" if outcome.gate is None else f"{outcome.gate}"
        estimate = "not asked" if outcome.estimate is None else f"{outcome.estimate}"
        return (
            f"{made}: {outcome.request} is {outcome.status} with {outcome.num_computed_tokens} "
            f"tokens computed; gate {gate}, step {estimate}, {outcome.free} blocks free"
        )
    return f"{made}: {outcome.error}" if outcome.error else made


def _word(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


# ---- reading and writing -------------------------------------------------------------------------


def known_workloads() -> tuple[Workload, ...]:
    """Return the workloads of `workloads.toml`, in its order."""
    return tuple(load_toml(WORKLOADS_FILE))


def load_toml(path: Path) -> list[Workload]:
    """Read a file of workloads, each of which may have rows that change its engine.

    Raises:
        WorkloadError: The file cannot be read, or holds something else.
    """
    try:
        try:
            content = tomllib.loads(read_bytes(path).decode("utf-8"))
        except ValueError as error:
            raise Malformed(f"not TOML: {error}") from None
        listed = Field(content).object(["workload"])["workload"].items()
        workloads = [workload for item in listed for workload in _rows(item)]
        names = [workload.name for workload in workloads]
        for name in names:
            if names.count(name) > 1:
                raise Malformed(f"workload: {shown(name)} is used twice")
        return workloads
    except Malformed as error:
        raise WorkloadError(f"{path}: {error}") from None


def load(path: Path) -> Workload:
    """Read a JSON file that holds one workload.

    Raises:
        WorkloadError: The file cannot be read, or holds something else.
    """
    try:
        return loads(read_bytes(path), name=str(path))
    except Malformed as error:
        raise WorkloadError(f"{path}: {error}") from None


def loads(data: bytes | str, *, name: str) -> Workload:
    """Read the content of a JSON file that holds one workload; errors call it `name`.

    Raises:
        WorkloadError: It holds something else.
    """
    try:
        return _workload(headed(data, KIND, SCHEMA))
    except Malformed as error:
        raise WorkloadError(f"{name}: {error}") from None


def to_json(workload: Workload) -> dict[str, Any]:
    """Return the JSON object of a workload."""
    content = {"schema": SCHEMA, "kind": KIND, **asdict(workload)}
    content["arrivals"] = list(content["arrivals"])
    content["expected"] = {
        target: {name: _word(v) if isinstance(v, Enum) else v for name, v in outcome.items()}
        for target, outcome in workload.expected.items()
    }
    return content


def _rows(item: Field) -> list[Workload]:
    """The workloads of a table: itself, or one for each of its rows."""
    content = item.mapping()
    rows = content.pop("rows", None)
    base = _workload(Field({key: value.value for key, value in content.items()}, item.path))
    if rows is None:
        return [base]
    found = []
    for row in rows.items():
        changes = row.mapping()
        own = changes.pop("expected", Field({}, f"{row.path}.expected"))
        sizes = {name: value.value for name, value in changes.items()}
        engine = record(Engine, Field({**asdict(base.engine), **sizes}, row.path))
        _check_engine(engine, row)
        ends = "-".join(f"{value}-{_SHORT.get(name, name)}" for name, value in sizes.items())
        name = Field(f"{base.name}-{ends}".replace("_", "-"), row.path).slug()
        expected = {**base.expected, **_expected(own)}
        found.append(replace(base, name=name, engine=engine, expected=expected))
    return found


#: How rows are named after what they change.
_SHORT = {"num_gpu_blocks": "blocks"}


def _workload(item: Field) -> Workload:
    names = [part.name for part in fields(Workload)]
    content = item.object(names, optional=["stall_after", "expected", "source"])
    engine = record(Engine, content["engine"])
    _check_engine(engine, content["engine"])
    arrivals = content["arrivals"].items()
    if not arrivals:
        raise content["arrivals"].refuse("a workload has at least one arrival")
    return Workload(
        name=content["name"].slug(),
        engine=engine,
        arrivals=_arrivals(arrivals, engine),
        stall_after=content.get("stall_after", Field(16)).integer(least=2),
        expected=_expected(content.get("expected", Field({}))),
        source=content.get("source", Field("")).text(),
    )


def _arrivals(items: list[Field], engine: Engine) -> tuple[Arrival, ...]:
    found: list[Arrival] = []
    for item in items:
        arrival = record(Arrival, item)
        for name, reason in _objections(arrival, [other.name for other in found], engine):
            raise Field(None, f"{item.path}.{name}").refuse(reason)
        found.append(arrival)
    return tuple(found)


def _objections(arrival: Arrival, earlier: list[str], engine: Engine) -> list[tuple[str, str]]:
    """Fields in which an arrival contradicts itself or its engine, each with the reason."""
    found = []
    if Field(arrival.name).slug() in earlier:
        found.append(("name", f"{shown(arrival.name)} is used twice"))
    if arrival.num_prompt_tokens < 1 or arrival.max_tokens < 1:
        found.append(("num_prompt_tokens", "a request has a prompt, and a token to sample"))
    if arrival.num_prompt_tokens + arrival.max_tokens > engine.max_model_len:
        found.append(("num_prompt_tokens", f"beyond max_model_len {engine.max_model_len}"))
    if arrival.num_external_tokens and (not engine.has_connector or engine.shipped_connector):
        whose = f"{engine.shipped_connector} serves what it has" if engine.shipped_connector else ""
        reason = whose or "the engine has no connector to load them"
        found.append(("num_external_tokens", reason))
    if arrival.num_external_tokens > arrival.num_prompt_tokens:
        found.append(("num_external_tokens", "more than the prompt has"))
    if arrival.loads_asynchronously and not arrival.num_external_tokens:
        found.append(("loads_asynchronously", "there are no external tokens to load"))
    if arrival.num_accepted_tokens > engine.num_speculative_tokens:
        found.append(("num_accepted_tokens", f"{engine.num_speculative_tokens} drafts are made"))
    if arrival.after and arrival.after not in earlier:
        found.append(("after", f"{shown(arrival.after)} is no earlier arrival"))
    return found


def _check_engine(engine: Engine, item: Field) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(engine, name) < 1:
            raise item.refuse(f"{name} {getattr(engine, name)} is below 1")
    if engine.block_size % engine.hash_block_size:
        raise item.refuse(
            f"block_size {engine.block_size} is not a multiple of hash_block_size "
            f"{engine.hash_block_size}"
        )
    if engine.shipped_connector not in ("", *SHIPPED_CONNECTORS):
        reason = f"is none of {', '.join(SHIPPED_CONNECTORS)}"
        raise item.refuse(f"shipped_connector {shown(engine.shipped_connector)} {reason}")
    if engine.shipped_connector and not engine.has_connector:
        raise item.refuse("shipped_connector: the engine has no connector")
    if engine.num_steps_in_flight and engine.num_speculative_tokens:
        raise item.refuse("num_steps_in_flight: drafts of an n-gram proposer wait for each output")


_AT_LEAST_ONE = (
    "block_size",
    "hash_block_size",
    "num_gpu_blocks",
    "max_model_len",
    "max_num_batched_tokens",
    "num_mamba_groups",
    "prefill_checkpoint_alignment",
    "max_num_seqs",
)


def _expected(item: Field) -> dict[str, dict[str, Any]]:
    names = [part.name for part in fields(Outcome)]
    found = {}
    for target, outcome in item.mapping().items():
        content = outcome.object(names, optional=[name for name in names if name != "end"])
        end = content.pop("end")
        if end.text() not in [known.value for known in End]:
            raise end.refuse(f"{shown(end.text())} is none of {', '.join(k.value for k in End)}")
        found[target] = {"end": End(end.text())} | {
            name: value.value for name, value in content.items()
        }
    return found
