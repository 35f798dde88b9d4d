"""The one currency: a Scenario says which steps a request takes and what must be seen.

Solver witnesses, boundary cases, random counterexamples and public bug reports all become
Scenarios; rendering and replay take nothing else. A file holds one scenario object, or
``{"schema": 1, "scenarios": [...]}``. Files come from outside, so every malformed one is refused
with one line that names the file and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from conformance.files import replace_file
from conformance.reading import Field, Malformed, parse_json, read_bytes, shown
from spec.theorems import MAMBA_GROUPS_OF, MANAGERS
from spec.vocabulary import Call, Geometry

SCHEMA = 1


class ScenarioError(Exception):
    """A scenario file is not one; one line naming the file and the field."""


@dataclass(frozen=True)
class Expect:
    """What the intended model says about one step; None where it says nothing."""

    need: int | None = None
    """Blocks that the step needs when own blocks are reused."""
    table_length: int | None = None
    """Columns of the request's block table after the step."""
    checkpoint: tuple[int, int] | None = None
    """Position (tokens) and column of the internal checkpoint that the step keeps; None: none."""
    column_to_retire: int | None = None
    """Column that is recorded after the step as the next to free; -1 is none."""


@dataclass(frozen=True)
class ScenarioStep:
    """One step of the request, and where it came from."""

    why: str
    """One phrase: where the step came from."""
    call: Call
    prefill_length: int
    """Tokens to prefill: `max(num_prompt_tokens, num_tokens - 1)` of the request."""
    expect: Expect = Expect()
    num_hit_blocks: int = 0
    """Columns of the local prefix-cache hit that the step adopts, all null but the last. The hit
    holds the first `call.num_local_computed_tokens` tokens."""
    hit_is_evictable: bool = False
    """Whether nobody references the hit's last block."""
    num_external_tokens: int = 0
    """Tokens that a connector brings: counted in `call.total_computed_tokens`, not as local."""
    loads_asynchronously: bool = False
    """Whether the request is parked while its external tokens arrive, and computes nothing."""
    preempted: bool = False
    """Whether the request loses its blocks before this step, which admits it again."""
    owns_partial_tail: bool = False
    """Whether before this step the request's own block that ends at `call.total_computed_tokens`,
    inside a block, is cached."""
    num_request_tokens: int = 0
    """Tokens that the request has, which the full-sequence gate is asked about before this step,
    which admits it; 0 where nobody asks."""
    num_evictable_attention_hits: int = 0
    """Blocks of the local hit in the full-attention group that nobody references."""
    hit_is_of_this_step: bool = False
    """Whether another request caches the hit's last block in this same step, in all Mamba groups,
    so that it is put off, and what is expected is not asked of it."""
    other_hits_are_evictable: bool = False
    """Whether nobody references the hit's last block in the Mamba groups behind the first."""
    num_in_flight_tokens: int = 0
    """Of the computed tokens, those of earlier steps whose computation has not ended."""


#: Fields of a step that a file may leave out, and does where they have their default.
KIND_DEFAULTS: dict[str, bool | int] = {
    item.name: item.default for item in fields(ScenarioStep) if isinstance(item.default, bool | int)
}


#: Fields that only a step that admits the request can have.
ADMISSION_ONLY = (
    "num_hit_blocks",
    "hit_is_of_this_step",
    "num_external_tokens",
    "loads_asynchronously",
    "num_request_tokens",
    "num_evictable_attention_hits",
    "other_hits_are_evictable",
)


@dataclass(frozen=True)
class Prediction:
    """What the lifted model of one target says about the last step; None where not reached."""

    dry_run: int | None
    """Blocks; negative where the release's arithmetic goes below zero."""
    estimate: int | None
    """Blocks; negative where the release's arithmetic goes below zero."""
    drawn: int | None
    """Blocks asked of the pool."""
    table_length: int | None
    """Columns of the block table after the step."""
    raised: str | None = None
    """Name of the exception type that ends the step, None where it goes through."""
    violates: tuple[str, ...] = ()
    """Slugs of the theorems that the step violates."""
    gate: int | None = None
    """Blocks that the full-sequence gate is told, None where nothing is predicted of it."""
    held_before: int | None = None
    """Blocks that the request holds before the step, None where nothing is predicted of it."""
    held: int | None = None
    """The same after the step, queued copies included."""
    reserved_at_startup: int | None = None
    """Blocks that the start-up sizing reserves for a request; predicted where `held` is."""
    deferred: bool = False
    """Whether the step is told more blocks than the pool has, so that it is put off; how many more
    is not predicted."""


@dataclass(frozen=True)
class Scenario:
    """Steps of one request. The last step is under test; the earlier ones make its state."""

    name: str
    """Slug; becomes a test id."""
    manager: str
    """Slug of the manager kind, one of `MANAGERS`."""
    geometry: Geometry
    num_gpu_blocks: int
    """Pool size in blocks, null block included."""
    steps: tuple[ScenarioStep, ...]
    family: str
    """Slug of the family of the last step."""
    tags: tuple[str, ...] = ()
    theorem: str | None = None
    """For a refutation, the slug of the theorem it refutes."""
    source: str = ""
    """Free text: "witness of ...", "edge of path ...", "CASES.md ..."."""
    predicted: Mapping[str, Prediction] | None = None
    """By target; None and an empty mapping both mean that nothing is predicted."""
    num_mamba_groups: int = 0
    """Mamba groups beside the full-attention group; 0 where one manager is asked by itself."""
    schema: int = SCHEMA


# ---- writing -------------------------------------------------------------------------------------


def to_json(scenario: Scenario) -> dict[str, Any]:
    """Return the JSON object of a scenario."""
    groups = {"num_mamba_groups": scenario.num_mamba_groups} if scenario.num_mamba_groups else {}
    return {
        "schema": scenario.schema,
        "name": scenario.name,
        "manager": scenario.manager,
        **groups,
        "geometry": _geometry_to_json(scenario.geometry),
        "num_gpu_blocks": scenario.num_gpu_blocks,
        "steps": [_step_to_json(step) for step in scenario.steps],
        "family": scenario.family,
        "tags": list(scenario.tags),
        "theorem": scenario.theorem,
        "source": scenario.source,
        "predicted": {
            target: _prediction_to_json(prediction)
            for target, prediction in (scenario.predicted or {}).items()
        },
    }


def dumps(scenarios: Scenario | Iterable[Scenario]) -> str:
    """Return the text of a scenario file: the same scenarios give the same bytes everywhere.

    Args:
        scenarios: One scenario, written as one object, or several, written as a collection.
    """
    if isinstance(scenarios, Scenario):
        content = to_json(scenarios)
    else:
        content = {"schema": SCHEMA, "scenarios": [to_json(scenario) for scenario in scenarios]}
    return json.dumps(content, sort_keys=True, indent=2, allow_nan=False) + "\n"


def dump(scenarios: Scenario | Iterable[Scenario], path: Path) -> None:
    """Write a scenario file; a reader sees the old file or the new one, never half of one."""
    replace_file(Path(path), dumps(scenarios))


def _record_to_json(record: Any) -> dict[str, Any]:
    values = ((field.name, getattr(record, field.name)) for field in fields(record))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


#: Fields of a prediction that a file may leave out, and does where nothing is predicted.
OPTIONALLY_PREDICTED = ("gate", "held_before", "held", "reserved_at_startup")


def _prediction_to_json(prediction: Prediction) -> dict[str, Any]:
    content = _record_to_json(prediction)
    if not prediction.deferred:
        del content["deferred"]
    return {
        name: value
        for name, value in content.items()
        if value is not None or name not in OPTIONALLY_PREDICTED
    }


def _geometry_to_json(geometry: Geometry) -> dict[str, Any]:
    defaults = _optional_sizes(geometry.hash_block_size)
    content = _record_to_json(geometry)
    return {name: value for name, value in content.items() if value != defaults.get(name)}


def _optional_sizes(hash_block_size: int) -> dict[str, int]:
    """Sizes that a file may leave out, and does where they are these."""
    return {"cache_hit_alignment_tokens": hash_block_size, "num_tokens_behind_checkpoint": 1}


def _step_to_json(step: ScenarioStep) -> dict[str, Any]:
    kind = {name: getattr(step, name) for name in KIND_DEFAULTS}
    return {
        "why": step.why,
        **_record_to_json(step.call),
        "prefill_length": step.prefill_length,
        "expect": _record_to_json(step.expect),
        **{name: value for name, value in kind.items() if value != KIND_DEFAULTS[name]},
    }


# ---- reading -------------------------------------------------------------------------------------


def load(path: Path) -> list[Scenario]:
    """Read a scenario file: one scenario object, or a collection of them.

    Raises:
        ScenarioError: The file cannot be read or is not a scenario file.
    """
    try:
        data = read_bytes(path)
    except Malformed as error:
        name = str(path) if str(path).isprintable() else repr(path)
        raise ScenarioError(f"{name}: {error}") from None
    return loads(data, name=str(path))


def loads(data: bytes | str, *, name: str) -> list[Scenario]:
    """Read the content of a scenario file; `name` is what errors call it.

    Raises:
        ScenarioError: The content is not that of a scenario file.
    """
    try:
        return _parse_file(parse_json(data))
    except Malformed as error:
        raise ScenarioError(f"{name}: {error}") from None
    except RecursionError:
        raise ScenarioError(f"{name}: nested too deeply") from None


def _parse_file(file: Field) -> list[Scenario]:
    if not isinstance(file.value, dict) or "scenarios" not in file.value:
        return [_parse_scenario(file)]
    content = file.object(["schema", "scenarios"])
    _check_schema(content["schema"])
    scenarios = [_parse_scenario(item) for item in content["scenarios"].items()]
    seen: set[str] = set()
    for i, scenario in enumerate(scenarios):
        if scenario.name in seen:
            raise Malformed(f"scenarios[{i}].name: {shown(scenario.name)} is used twice")
        seen.add(scenario.name)
    return scenarios


def _parse_scenario(field: Field) -> Scenario:
    _check_schema_first(field)
    content = field.object(
        [item.name for item in fields(Scenario)],
        optional=["tags", "theorem", "source", "predicted", "num_mamba_groups"],
    )
    manager = _parse_manager(content["manager"])
    num_mamba_groups = content.get("num_mamba_groups", Field(0)).integer()
    if num_mamba_groups not in MAMBA_GROUPS_OF[manager]:
        known = " or ".join(map(str, MAMBA_GROUPS_OF[manager]))
        reason = f"{num_mamba_groups} Mamba groups; {manager} has {known}"
        at = f"{field.path}.num_mamba_groups" if field.path else "num_mamba_groups"
        raise Field(num_mamba_groups, at).refuse(reason)
    steps = content["steps"].items()
    if not steps:
        raise content["steps"].refuse("a scenario has at least one step")
    absent = Field(None)
    geometry = parse_geometry(content["geometry"])
    return Scenario(
        name=content["name"].slug(),
        manager=manager,
        geometry=geometry,
        num_gpu_blocks=content["num_gpu_blocks"].integer(least=1),
        steps=tuple(
            _parse_step(step, geometry, num_mamba_groups, is_first=step is steps[0])
            for step in steps
        ),
        family=content["family"].slug(),
        tags=content["tags"].slugs() if "tags" in content else (),
        theorem=content.get("theorem", absent).or_none(content.get("theorem", absent).slug),
        source=content["source"].text() if "source" in content else "",
        predicted=_parse_predicted(content["predicted"]) if "predicted" in content else {},
        num_mamba_groups=num_mamba_groups,
    )


def _check_schema_first(field: Field) -> None:
    """A file of another schema is told so before its fields are called unknown."""
    schema = field.mapping().get("schema")
    if schema is not None:
        _check_schema(schema)


def _check_schema(field: Field) -> None:
    if field.integer(least=None) != SCHEMA:
        raise field.refuse(f"{field.value} is not known; this release reads schema {SCHEMA}")


def _parse_manager(field: Field) -> str:
    manager = field.slug()
    if manager not in MANAGERS:
        known = ", ".join(sorted(MANAGERS))
        raise field.refuse(f"{shown(manager)} is not a known manager ({known})")
    return manager


def parse_geometry(field: Field) -> Geometry:
    """Return the sizes that an object gives.

    Raises:
        Malformed: They are not all there, or not to be built with.
    """
    content = field.object(
        [item.name for item in fields(Geometry)], optional=list(_optional_sizes(0))
    )
    block_size = content["block_size"].integer(least=1)
    hash_block_size = content["hash_block_size"].integer(least=1)
    if block_size % hash_block_size:
        raise content["block_size"].refuse(
            f"{block_size} is not a multiple of hash_block_size {hash_block_size}"
        )
    num_checkpoint_blocks = content["num_prefill_checkpoint_blocks"].integer()
    return Geometry(
        block_size=block_size,
        hash_block_size=hash_block_size,
        num_speculative_blocks=content["num_speculative_blocks"].integer(),
        num_prefill_checkpoint_blocks=num_checkpoint_blocks,
        # Without checkpoint blocks 0 stands for "none", and any alignment will do.
        prefill_checkpoint_alignment=(
            content["prefill_checkpoint_alignment"].integer(least=int(num_checkpoint_blocks > 0))
            or 1
        ),
        drop_eagle_checkpoint_block=content["drop_eagle_checkpoint_block"].boolean(),
        **_parse_optional_sizes(content, hash_block_size),
    )


def _parse_optional_sizes(content: Mapping[str, Field], hash_block_size: int) -> dict[str, int]:
    alignment = content.get("cache_hit_alignment_tokens", Field(hash_block_size))
    num_behind = content.get("num_tokens_behind_checkpoint", Field(1))
    if alignment.integer(least=1) % hash_block_size:
        raise alignment.refuse(
            f"{alignment.value} is not a multiple of hash_block_size {hash_block_size}"
        )
    return {
        "cache_hit_alignment_tokens": alignment.integer(),
        "num_tokens_behind_checkpoint": num_behind.integer(),
    }


def _parse_step(
    field: Field, geometry: Geometry, num_mamba_groups: int, *, is_first: bool
) -> ScenarioStep:
    call_fields = [item.name for item in fields(Call)]
    content = field.object(
        ["why", *call_fields, "prefill_length", "expect", *KIND_DEFAULTS],
        optional=["prefill_end", "expect", *KIND_DEFAULTS],
    )
    step = ScenarioStep(
        why=content["why"].text(),
        call=Call(**{name: content[name].integer() for name in call_fields if name in content}),
        prefill_length=content["prefill_length"].integer(),
        expect=_parse_expect(content["expect"]) if "expect" in content else Expect(),
        **_parse_kind(content),
    )
    objections = _objections(step, geometry, is_first)
    for name, reason in (*objections, *_objections_to_groups(step, geometry, num_mamba_groups)):
        raise Field(None, f"{field.path}.{name}").refuse(reason)
    return step


def _parse_kind(content: Mapping[str, Field]) -> dict[str, Any]:
    return {
        name: content[name].boolean() if isinstance(default, bool) else content[name].integer()
        for name, default in KIND_DEFAULTS.items()
        if name in content
    }


def _objections(
    step: ScenarioStep, geometry: Geometry, is_first: bool
) -> Iterator[tuple[str, str]]:
    """Fields in which a step contradicts itself or its place, each with the reason."""
    if step.preempted and is_first:
        yield "preempted", "the first step finds no blocks to lose"
    if not (is_first or step.preempted):
        for name in ADMISSION_ONLY:
            if getattr(step, name):
                yield name, "only a step that admits the request has it"
    if step.num_in_flight_tokens > step.call.total_computed_tokens:
        yield "num_in_flight_tokens", "more than the computed tokens"
    yield from _objections_to_adoption(step, geometry)
    if step.loads_asynchronously and not step.num_external_tokens:
        yield "loads_asynchronously", "there are no external tokens to load"
    if step.loads_asynchronously and step.call.num_tokens_main_model != (
        step.call.total_computed_tokens
    ):
        yield "num_tokens_main_model", "a parked request computes nothing in this step"
    if step.owns_partial_tail:
        yield from _objections_to_tail(step, geometry, is_first)
    if 0 < step.num_request_tokens < step.call.num_tokens_main_model:
        yield "num_request_tokens", f"the step ends at {step.call.num_tokens_main_model}"


def _objections_to_adoption(step: ScenarioStep, geometry: Geometry) -> Iterator[tuple[str, str]]:
    num_blocks, external = step.num_hit_blocks, step.num_external_tokens
    total, local = step.call.total_computed_tokens, step.call.num_local_computed_tokens
    for name in ("hit_is_evictable", "hit_is_of_this_step"):
        if getattr(step, name) and not num_blocks:
            yield name, "there is no hit"
    columns = -(-local // geometry.block_size)
    if num_blocks > columns or (0 < num_blocks < columns and not external):
        yield "num_hit_blocks", f"{local} local tokens do not end in block {num_blocks} of the hit"
    if num_blocks and local % geometry.hash_block_size:
        yield (
            "num_local_computed_tokens",
            f"a hit of {local} tokens is not a multiple of hash_block_size",
        )
    if external > total:
        yield "num_external_tokens", f"{external} of {total} computed tokens"
    if num_blocks or external or step.preempted:
        if local + external != total:
            yield "total_computed_tokens", f"{total} is not {local} local and {external} external"
        if local and not num_blocks and not external:
            yield "num_local_computed_tokens", f"no hit holds the {local} local tokens"


def _objections_to_groups(
    step: ScenarioStep, geometry: Geometry, num_mamba_groups: int
) -> Iterator[tuple[str, str]]:
    columns = -(-step.call.num_local_computed_tokens // geometry.block_size)
    evictable = step.num_evictable_attention_hits
    if evictable and not num_mamba_groups:
        yield "num_evictable_attention_hits", "there is no full-attention group"
    elif evictable > (columns if step.num_hit_blocks or step.num_external_tokens else 0):
        yield "num_evictable_attention_hits", f"the hit has not {evictable} blocks"
    if step.num_in_flight_tokens and num_mamba_groups:
        yield "num_in_flight_tokens", "only one manager by itself is asked with steps in flight"
    if step.other_hits_are_evictable and not (num_mamba_groups > 1 and step.num_hit_blocks):
        yield "other_hits_are_evictable", "there is no hit in another Mamba group"


def _objections_to_tail(
    step: ScenarioStep, geometry: Geometry, is_first: bool
) -> Iterator[tuple[str, str]]:
    end = step.call.total_computed_tokens
    if is_first or step.preempted:
        yield "owns_partial_tail", "the request has no blocks before this step"
    if end % geometry.block_size == 0:
        yield "owns_partial_tail", f"{end} computed tokens do not end inside a block"
    if end % geometry.hash_block_size:
        yield "owns_partial_tail", f"{end} is not a multiple of hash_block_size"


def _parse_expect(field: Field) -> Expect:
    names = [item.name for item in fields(Expect)]
    content = field.object(names, optional=names)
    checkpoint = content.pop("checkpoint", Field(None))
    to_retire = content.pop("column_to_retire", Field(None))
    numbers = {name: item.or_none(item.integer) for name, item in content.items()}
    return Expect(
        **numbers,
        checkpoint=checkpoint.or_none(lambda: _parse_checkpoint(checkpoint)),
        column_to_retire=_integer_or_none(to_retire, least=-1),
    )


def _parse_checkpoint(field: Field) -> tuple[int, int]:
    items = field.items()
    if len(items) != 2:
        raise field.refuse("expected a position and a column")
    return items[0].integer(), items[1].integer()


def _parse_predicted(field: Field) -> dict[str, Prediction]:
    for target in field.mapping():
        Field(target, f"{field.path} (a target)").text()
    return {target: _parse_prediction(item) for target, item in field.mapping().items()}


def _parse_prediction(field: Field) -> Prediction:
    content = field.object(
        [item.name for item in fields(Prediction)],
        optional=["raised", "violates", "deferred", *OPTIONALLY_PREDICTED],
    )
    raised = content.get("raised", Field(None))
    return Prediction(
        dry_run=_integer_or_none(content["dry_run"], least=None),
        estimate=_integer_or_none(content["estimate"], least=None),
        drawn=_integer_or_none(content["drawn"], least=0),
        table_length=_integer_or_none(content["table_length"], least=0),
        raised=raised.or_none(raised.text),
        violates=content["violates"].slugs() if "violates" in content else (),
        deferred=content.get("deferred", Field(False)).boolean(),
        **{
            name: _integer_or_none(content.get(name, Field(None)), least=None)
            for name in OPTIONALLY_PREDICTED
        },
    )


def _integer_or_none(field: Field, least: int | None) -> int | None:
    return field.or_none(lambda: field.integer(least))
