from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.scenario import (
    KIND_DEFAULTS,
    Expect,
    Prediction,
    Scenario,
    ScenarioError,
    ScenarioStep,
    dump,
    dumps,
    load,
    loads,
)
from spec.vocabulary import Call, Geometry

LONG_PROMPT = Scenario(
    name="long-prompt-at-a-checkpoint",
    manager="mamba-align",
    geometry=Geometry(896, 128, 1, 1, 64, False),
    num_gpu_blocks=1024,
    steps=(
        ScenarioStep("already computed", Call(23_040, 23_040, 0, 0), 704_547, Expect(3, 27)),
        ScenarioStep("the rest", Call(704_547, 704_547, 23_040, 23_040), 704_547, Expect(2, 788)),
    ),
    family="checkpoint",
    tags=("eagle", "sparse"),
    theorem="exact-estimate",
    source="CASES.md, vLLM #57050",
    predicted={
        "vllm==0.30.0": Prediction(761, 761, 3, 788, None, ("exact-estimate", "bounded-demand")),
        "vllm==0.31.0": Prediction(None, None, None, None, "AssertionError"),
    },
)
JSON = json.loads(dumps(LONG_PROMPT))

#: A life with every field that a file may leave out.
EVENTFUL = Scenario(
    name="an-eventful-life",
    manager="mamba-align",
    geometry=Geometry(16, 4, 2, 1, 4, False, 16, 3),
    num_gpu_blocks=64,
    steps=(
        ScenarioStep(
            "parked behind a hit",
            Call(60, 60, 60, 24),
            200,
            num_hit_blocks=2,
            hit_is_evictable=True,
            num_external_tokens=36,
            loads_asynchronously=True,
        ),
        ScenarioStep("promoted", Call(72, 72, 60, 60), 200),
        ScenarioStep("its tail is cached", Call(80, 80, 72, 72), 200, owns_partial_tail=True),
        ScenarioStep("resumed", Call(40, 40, 0, 0), 200, preempted=True, num_request_tokens=201),
    ),
    family="resumed",
    predicted={"vllm==0.33.0": Prediction(3, 3, 3, 5, gate=-1)},
)


def test_a_scenario_survives_writing_and_reading(tmp_path: Path) -> None:
    """What was dumped is loaded again, alone or in a collection."""
    another = Scenario(**{**vars(LONG_PROMPT), "name": "another", "predicted": {}})
    dump(LONG_PROMPT, tmp_path / "one.json")
    dump([LONG_PROMPT, another], tmp_path / "two.json")

    assert load(tmp_path / "one.json") == [LONG_PROMPT]
    assert load(tmp_path / "two.json") == [LONG_PROMPT, another]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]


def test_every_kind_of_step_survives_writing_and_reading() -> None:
    """Fields are written where they say something, and only there."""
    content = json.loads(dumps(EVENTFUL))

    assert loads(dumps(EVENTFUL), name="eventful") == [EVENTFUL]
    assert [sorted(step.keys() & KIND_DEFAULTS.keys()) for step in content["steps"]] == [
        ["hit_is_evictable", "loads_asynchronously", "num_external_tokens", "num_hit_blocks"],
        [],
        ["owns_partial_tail"],
        ["num_request_tokens", "preempted"],
    ]
    assert [prediction["gate"] for prediction in content["predicted"].values()] == [-1]
    assert content["geometry"]["cache_hit_alignment_tokens"] == 16
    assert content["geometry"]["num_tokens_behind_checkpoint"] == 3


def test_a_step_that_is_put_off_survives_writing_and_reading() -> None:
    """What is put off is predicted without numbers of blocks; elsewhere nothing is said of it."""
    waits = replace(EVENTFUL.steps[0], hit_is_of_this_step=True)
    put_off = Prediction(None, None, 0, 0, deferred=True)
    predicted = {"vllm==0.33.0": put_off, "vllm==0.30.0": Prediction(3, 3, 3, 5)}
    scenario = replace(EVENTFUL, steps=(waits,), predicted=predicted)

    content = json.loads(dumps(scenario))

    assert loads(dumps(scenario), name="waits") == [scenario]
    assert content["steps"][0]["hit_is_of_this_step"] is True
    assert content["predicted"]["vllm==0.33.0"]["deferred"] is True
    assert "deferred" not in content["predicted"]["vllm==0.30.0"]


def test_a_plain_scenario_is_written_as_ever() -> None:
    """Fields that came later leave the bytes of older files alone."""
    later = {"cache_hit_alignment_tokens", "num_tokens_behind_checkpoint", *KIND_DEFAULTS}

    assert not later & JSON["geometry"].keys()
    assert not any(later & step.keys() for step in JSON["steps"])
    assert loads(json.dumps(JSON), name="plain")[0].geometry.cache_hit_alignment_tokens == 128


def test_the_same_scenarios_give_the_same_bytes() -> None:
    """The order in which fields were given does not reach the file."""
    backwards = json.dumps(dict(reversed(JSON.items())))

    text = dumps(loads(backwards, name="backwards"))

    assert text == dumps([LONG_PROMPT])
    assert text.endswith("\n}\n")
    assert text.isascii()


def test_fields_that_say_nothing_may_be_left_out() -> None:
    """A hand-written scenario needs no predictions, tags, theorem, source, or expectations."""
    content = copy.deepcopy(JSON)
    for name in ("predicted", "tags", "theorem", "source"):
        del content[name]
    for step in content["steps"]:
        del step["expect"], step["prefill_end"]

    (scenario,) = loads(json.dumps(content), name="by hand")

    assert (scenario.predicted, scenario.tags, scenario.theorem) == ({}, (), None)
    assert scenario.steps[0].expect == Expect(None, None)
    assert scenario.steps[0].call.prefill_end == 0


MALFORMED: list[tuple[str, Any, str]] = [
    ("schema", 2, "schema: 2 is not known"),
    ("schema", True, "schema: expected an integer, got true"),
    ("surprise", 1, 'unknown field "surprise"'),
    ("name", "Not A Slug", 'name: "Not A Slug" is not a slug'),
    ("name", "a" * 121, "is not a slug"),
    ("name", "-a", "is not a slug"),
    ("name", 7, "name: expected a string, got an integer"),
    ("manager", "full-attention", 'manager: "full-attention" is not a known manager'),
    ("num_gpu_blocks", 0, "num_gpu_blocks: 0 is below 1"),
    ("num_gpu_blocks", 12.0, "num_gpu_blocks: expected an integer, got a float"),
    ("num_gpu_blocks", 2**53 + 1, "num_gpu_blocks: beyond 2**53"),
    ("geometry", [], "geometry: expected an object, got a list"),
    ("geometry.block_size", 0, "geometry.block_size: 0 is below 1"),
    ("geometry.block_size", 900, "geometry.block_size: 900 is not a multiple"),
    ("geometry.hash_block_size", -128, "geometry.hash_block_size: -128 is below 1"),
    ("geometry.num_speculative_blocks", -1, "geometry.num_speculative_blocks: -1 is below 0"),
    ("geometry.prefill_checkpoint_alignment", 0, "prefill_checkpoint_alignment: 0 is below 1"),
    ("geometry.drop_eagle_checkpoint_block", 1, "expected true or false, got an integer"),
    ("geometry.cache_hit_alignment_tokens", 0, "cache_hit_alignment_tokens: 0 is below 1"),
    ("geometry.cache_hit_alignment_tokens", 64, "64 is not a multiple of hash_block_size 128"),
    ("geometry.num_tokens_behind_checkpoint", -1, "num_tokens_behind_checkpoint: -1 is below 0"),
    ("steps", [], "steps: a scenario has at least one step"),
    ("steps", {}, "steps: expected a list, got an object"),
    ("steps.1", None, "steps[1]: expected an object, got null"),
    ("steps.1.num_tokens", True, "steps[1].num_tokens: expected an integer, got true"),
    ("steps.1.num_tokens", "9", "steps[1].num_tokens: expected an integer, got a string"),
    ("steps.1.prefill_length", -1, "steps[1].prefill_length: -1 is below 0"),
    ("steps.1.num_hit_blocks", -1, "steps[1].num_hit_blocks: -1 is below 0"),
    ("steps.1.hit_is_evictable", 0, "steps[1].hit_is_evictable: expected true or false"),
    ("steps.1.num_external_tokens", None, "num_external_tokens: expected an integer, got null"),
    ("steps.1.loads_asynchronously", "", "steps[1].loads_asynchronously: expected true or false"),
    ("steps.1.preempted", {}, "steps[1].preempted: expected true or false, got an object"),
    ("steps.1.owns_partial_tail", [], "steps[1].owns_partial_tail: expected true or false"),
    ("steps.0.why", "a\nb", "steps[0].why: holds a line break"),
    ("steps.0.expect.need", -1, "steps[0].expect.need: -1 is below 0"),
    ("steps.0.expect.wish", 1, 'steps[0].expect: unknown field "wish"'),
    ("family", None, "family: expected a string, got null"),
    ("tags", "eagle", "tags: expected a list, got a string"),
    ("tags", ["eagle", "eagle"], "tags: names one slug twice"),
    ("theorem", "Exact", "theorem: "),
    ("source", "a\x1b[2J", "source: holds a line break or another unprintable character"),
    ("predicted", [], "predicted: expected an object, got a list"),
    ("predicted.vllm==0.30.0.drawn", -1, 'predicted."vllm==0.30.0".drawn: -1 is below 0'),
    ("predicted.vllm==0.30.0.violates", [""], "violates[0]: "),
]


def changed(path: str, value: Any) -> bytes:
    """The JSON of a valid scenario with one field set to another value."""
    content = copy.deepcopy(JSON)
    at: Any = content
    # The dots of a release do not part the path.
    *parents, last = [
        part.replace(":", ".") for part in path.replace("0.30.0", "0:30:0").split(".")
    ]
    for spot in parents:
        at = at[int(spot)] if isinstance(at, list) else at[spot]
    at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED)
def test_a_malformed_field_is_named_in_one_line(path: str, value: Any, message: str) -> None:
    """Each malformed field is refused, with the file and the field in a single line."""
    with pytest.raises(ScenarioError) as refused:
        loads(changed(path, value), name="some.json")

    assert str(refused.value).startswith("some.json: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


#: Steps of `EVENTFUL` that contradict themselves: the step, what is changed, and the refusal.
CONTRADICTIONS: list[tuple[int, dict[str, Any], str]] = [
    (0, {"num_hit_blocks": 3}, "num_hit_blocks: 24 local tokens do not end in block 3"),
    (0, {"num_hit_blocks": 0}, "hit_is_evictable: there is no hit"),
    (
        3,
        {"hit_is_of_this_step": True},
        "hit_is_of_this_step: there is no hit",
    ),
    (1, {"hit_is_of_this_step": True}, "hit_is_of_this_step: only a step that admits"),
    (
        0,
        {"num_local_computed_tokens": 26, "num_external_tokens": 34},
        "num_local_computed_tokens: a hit of 26 tokens is not a multiple of hash_block_size",
    ),
    (0, {"num_external_tokens": 61}, "num_external_tokens: 61 of 60 computed tokens"),
    (0, {"num_external_tokens": 35}, "total_computed_tokens: 60 is not 24 local and 35 external"),
    (
        0,
        {"num_external_tokens": 0, "num_local_computed_tokens": 60, "num_hit_blocks": 4},
        "loads_asynchronously: there are no external tokens",
    ),
    (0, {"num_tokens_main_model": 61}, "num_tokens_main_model: a parked request computes nothing"),
    (0, {"preempted": True}, "preempted: the first step finds no blocks to lose"),
    (0, {"owns_partial_tail": True}, "owns_partial_tail: the request has no blocks"),
    (1, {"num_hit_blocks": 4}, "num_hit_blocks: only a step that admits the request"),
    (1, {"num_external_tokens": 1}, "num_external_tokens: only a step that admits the request"),
    (1, {"loads_asynchronously": True}, "loads_asynchronously: only a step that admits"),
    (2, {"total_computed_tokens": 80}, "owns_partial_tail: 80 computed tokens do not end inside"),
    (2, {"total_computed_tokens": 73}, "owns_partial_tail: 73 is not a multiple of hash_block"),
    (3, {"owns_partial_tail": True}, "owns_partial_tail: the request has no blocks"),
    (3, {"num_external_tokens": 8}, "num_external_tokens: 8 of 0 computed tokens"),
    (3, {"total_computed_tokens": 8}, "total_computed_tokens: 8 is not 0 local and 0 external"),
    (1, {"num_request_tokens": 99}, "num_request_tokens: only a step that admits the request"),
    (3, {"num_request_tokens": 39}, "num_request_tokens: the step ends at 40"),
]


@pytest.mark.parametrize(("i", "changes", "message"), CONTRADICTIONS)
def test_a_step_that_makes_no_sense_is_refused(
    i: int, changes: dict[str, Any], message: str
) -> None:
    """What no scheduler would do is refused, with the step and the field."""
    content = json.loads(dumps(EVENTFUL))
    content["steps"][i].update(changes)

    with pytest.raises(ScenarioError) as refused:
        loads(json.dumps(content), name="some.json")

    assert str(refused.value).startswith(f"some.json: steps[{i}].{message}")


@pytest.mark.parametrize("path", [*JSON, *(f"geometry.{name}" for name in JSON["geometry"])])
def test_a_missing_field_is_named(path: str) -> None:
    """Without a default, an absent field is an error rather than a guess."""
    content = copy.deepcopy(JSON)
    at, last = (content["geometry"], path[9:]) if path.startswith("geometry.") else (content, path)
    del at[last]
    if path in ("tags", "theorem", "source", "predicted"):
        assert loads(json.dumps(content), name="some.json")
        return

    with pytest.raises(ScenarioError, match=f'field "{last}" is missing'):
        loads(json.dumps(content), name="some.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "expected an object, got a list"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"1" * 10_000, "not JSON"),
        (b'{"schema": NaN}', "NaN is not a number here"),
        (b'{"schema": 1, "schema": 1}', "schema: the field is given twice"),
        (b'{"schema": 1, "scenarios": 3}', "scenarios: expected a list"),
        (b'{"schema": 1, "scenarios": [], "more": 0}', 'unknown field "more"'),
        (b'{"scenarios": []}', 'field "schema" is missing'),
        (b'{"schema": 1, "scenarios": [{"schema": 9}]}', "scenarios[0].schema: 9 is not known"),
    ],
)
def test_what_is_no_scenario_file_is_refused_in_one_line(content: bytes, message: str) -> None:
    """Not JSON, another schema, a nesting bomb: one line, never another exception."""
    with pytest.raises(ScenarioError) as refused:
        loads(content, name="some.json")

    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_scenarios_of_one_name_are_refused() -> None:
    """Names become test ids, so one file cannot use one twice."""
    with pytest.raises(ScenarioError, match=r"scenarios\[1\]\.name: .* is used twice"):
        loads(dumps([LONG_PROMPT, LONG_PROMPT]), name="some.json")


@pytest.mark.parametrize("path", ["absent.json", ".", "nul\0.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, path: str) -> None:
    """An absent file and a folder end in the same kind of error as a malformed one."""
    with pytest.raises(ScenarioError, match="cannot be read"):
        load(tmp_path / path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
PATHS = [path for path, _, _ in MALFORMED if not path.startswith(("surprise", "predicted."))]


@given(st.sampled_from(PATHS), JSON_VALUES)
def test_any_json_in_any_field_is_read_or_refused(path: str, value: Any) -> None:
    """Nothing but a ScenarioError leaves the reader, and what it reads it can write again."""
    try:
        scenarios = loads(changed(path, value), name="some.json")
    except ScenarioError:
        return
    assert loads(dumps(scenarios), name="again") == scenarios
