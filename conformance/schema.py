"""The JSON schema of scenario files, made from the records that they are read into.

A schema knows less than the reader (`conformance.scenario`), which also refuses numbers that
contradict each other; what the reader accepts, the schema does.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from dataclasses import fields
from typing import Any

from conformance.reading import MAX_INT, MAX_SLUG_LENGTH
from conformance.scenario import (
    KIND_DEFAULTS,
    OPTIONALLY_PREDICTED,
    SCHEMA,
    Expect,
    Prediction,
    Scenario,
    ScenarioStep,
)
from spec.theorems import MAMBA_GROUPS_OF, MANAGERS
from spec.vocabulary import Call, Geometry

JsonObject = dict[str, Any]

_SLUG: JsonObject = {
    "type": "string",
    "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$",
    "maxLength": MAX_SLUG_LENGTH,
}
_SLUGS: JsonObject = {"type": "array", "items": _SLUG, "uniqueItems": True}
_LINE: JsonObject = {"type": "string", "pattern": r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]*$"}
_BOOLEAN: JsonObject = {"type": "boolean"}


def schema() -> JsonObject:
    """Return the JSON schema of a scenario file: one scenario, or a collection of them."""
    collection = _object(
        {"schema": {"const": SCHEMA}, "scenarios": {"type": "array", "items": _ref("scenario")}},
        required=["schema", "scenarios"],
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Scenarios of capproof, schema {SCHEMA}",
        "description": "What `capproof replay` reads. Positions and lengths are in tokens.",
        "if": {"type": "object", "required": ["scenarios"]},
        "then": collection,
        "else": _ref("scenario"),
        "$defs": {
            "scenario": _scenario(),
            "geometry": _geometry(),
            "step": _step(),
            "expect": _expect(),
            "prediction": _prediction(),
        },
    }


def text() -> str:
    """Return the schema as the text of `docs/scenario.schema.json`."""
    return json.dumps(schema(), indent=2) + "\n"


def _scenario() -> JsonObject:
    known = {
        "name": _SLUG,
        "manager": {"enum": list(MANAGERS)},
        "geometry": _ref("geometry"),
        "num_gpu_blocks": _integer(1),
        "steps": {"type": "array", "items": _ref("step"), "minItems": 1},
        "family": _SLUG,
        "tags": _SLUGS,
        "theorem": _or_null(_SLUG),
        "source": _LINE,
        "predicted": {
            "type": "object",
            "propertyNames": _LINE,
            "additionalProperties": _ref("prediction"),
        },
        "num_mamba_groups": _integer(0),
        "schema": {"const": SCHEMA},
    }
    optional = ("tags", "theorem", "source", "predicted", "num_mamba_groups")
    described = _described(Scenario, known)
    found = _object(described, [name for name in described if name not in optional])
    return {**found, "allOf": [_groups_of(manager) for manager in MANAGERS]}


def _groups_of(manager: str) -> JsonObject:
    """How many Mamba groups scenarios of a manager have; left out is 0."""
    groups = list(MAMBA_GROUPS_OF[manager])
    numbers = {"properties": {"num_mamba_groups": {"enum": groups}}}
    required = {} if 0 in groups else {"required": ["num_mamba_groups"]}
    of_manager = {"properties": {"manager": {"const": manager}}, "required": ["manager"]}
    return {"if": of_manager, "then": {**numbers, **required}}


def _geometry() -> JsonObject:
    at_least_one = ("block_size", "hash_block_size", "cache_hit_alignment_tokens")
    known = {
        item.name: _BOOLEAN if item.type == "BoolLike" else _integer(item.name in at_least_one)
        for item in fields(Geometry)
    }
    optional = ("cache_hit_alignment_tokens", "num_tokens_behind_checkpoint")
    required = [name for name in known if name not in optional]
    return _object(_described(Geometry, known), required)


def _step() -> JsonObject:
    of_call = _described(Call, {item.name: _integer(0) for item in fields(Call)})
    kinds = {
        name: {**(_BOOLEAN if isinstance(default, bool) else _integer(0)), "default": default}
        for name, default in KIND_DEFAULTS.items()
    }
    of_step = {"why": _LINE, "prefill_length": _integer(0), "expect": _ref("expect"), **kinds}
    required = ["why", *of_call, "prefill_length"]
    required.remove("prefill_end")
    return _object({**_described(ScenarioStep, of_step), **of_call}, required)


def _expect() -> JsonObject:
    pair = {"type": "array", "items": _integer(0), "minItems": 2, "maxItems": 2}
    known = {
        "need": _or_null(_integer(0)),
        "table_length": _or_null(_integer(0)),
        "checkpoint": _or_null(pair),
        "column_to_retire": _or_null(_integer(-1)),
    }
    return _object(_described(Expect, known), [])


def _prediction() -> JsonObject:
    known = {
        "dry_run": _or_null(_integer(None)),
        "estimate": _or_null(_integer(None)),
        "drawn": _or_null(_integer(0)),
        "table_length": _or_null(_integer(0)),
        "raised": _or_null(_LINE),
        "violates": _SLUGS,
        "deferred": {**_BOOLEAN, "default": False},
        **{name: _or_null(_integer(None)) for name in OPTIONALLY_PREDICTED},
    }
    optional = ("raised", "violates", "deferred", *OPTIONALLY_PREDICTED)
    required = [name for name in known if name not in optional]
    return _object(_described(Prediction, known), required)


def _described(cls: type, known: JsonObject) -> JsonObject:
    """Fields of a record in its order, with what its source says of each.

    Raises:
        ValueError: The record has none of that name.
    """
    words = _words(cls)
    names = [item.name for item in fields(cls)]
    if not known.keys() <= set(names):
        raise ValueError(f"{cls.__name__} has no {sorted(known.keys() - set(names))}")
    return {
        name: {**known[name], **({"description": words[name]} if name in words else {})}
        for name in names
        if name in known
    }


def _words(cls: type) -> dict[str, str]:
    """The texts below the fields of a record, by field."""
    (record,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found, name = {}, None
    for node in record.body if isinstance(record, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
            name = None
    return found


def _object(properties: JsonObject, required: list[str]) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _integer(least: int | None) -> JsonObject:
    return {
        "type": "integer",
        "minimum": -MAX_INT if least is None else int(least),
        "maximum": MAX_INT,
    }


def _or_null(found: JsonObject) -> JsonObject:
    return {"anyOf": [found, {"type": "null"}]}


def _ref(name: str) -> JsonObject:
    return {"$ref": f"#/$defs/{name}"}
