from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.reading import kind_of
from conformance.workload import (
    KIND,
    End,
    Outcome,
    Workload,
    WorkloadError,
    differences,
    known_workloads,
    load,
    load_toml,
    loads,
    summary,
    to_json,
)

ENGINE = {
    "block_size": 16,
    "hash_block_size": 4,
    "num_gpu_blocks": 25,
    "max_model_len": 333,
    "max_num_batched_tokens": 1024,
}
FILE: dict[str, Any] = {
    "schema": 1,
    "kind": "workload",
    "name": "one",
    "engine": ENGINE,
    "arrivals": [{"name": "long", "num_prompt_tokens": 331}],
    "expected": {"vllm==0.30.0": {"end": "stalled", "gate": 22}},
}
STALLED = Outcome(End.STALLED, 2, request="long", status="WAITING", gate=22, free=13)


def test_every_workload_is_written_and_read_back() -> None:
    """The file's workloads survive the way to a process and back."""
    assert known_workloads()
    for workload in known_workloads():
        assert loads(json.dumps(to_json(workload)), name="written") == workload


def test_every_workload_says_where_it_comes_from_and_what_is_expected() -> None:
    """A workload nobody expects anything of would never fail."""
    for workload in known_workloads():
        assert workload.source
        assert {"vllm==0.29.0", "vllm==0.30.0", "vllm==0.31.0", "vllm==0.33.0"} <= set(
            workload.expected
        )


def test_a_row_changes_a_size_and_its_expectations(tmp_path: Path) -> None:
    """A row is a workload of its own, named after what it changes."""
    (tmp_path / "w.toml").write_text(
        """
[[workload]]
name = "pool"
engine.block_size = 16
engine.hash_block_size = 4
engine.num_gpu_blocks = 9
engine.max_model_len = 64
engine.max_num_batched_tokens = 64
arrivals = [{ name = "a", num_prompt_tokens = 20 }]
expected = { "t" = { end = "finished" }, "u" = { end = "finished" } }
rows = [{ num_gpu_blocks = 9 }, { num_gpu_blocks = 3, expected = { "t" = { end = "stalled" } } }]
"""
    )

    large, small = load_toml(tmp_path / "w.toml")

    assert (large.name, small.name) == ("pool-9-blocks", "pool-3-blocks")
    assert small.engine.num_gpu_blocks == 3
    assert small.expected == {"t": {"end": End.STALLED}, "u": {"end": End.FINISHED}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "scenario"}, "w.json: kind: expected 'workload'"),
        ({"schema": 2}, "w.json: schema: expected 1"),
        ({"name": "No Slug"}, "w.json: name: "),
        ({"stall_after": 1}, "w.json: stall_after: 1 is below 2"),
        ({"engine": {**ENGINE, "block_size": 15}}, "w.json: engine: block_size 15 is not"),
        ({"engine": {**ENGINE, "num_gpu_blocks": 0}}, "w.json: engine: num_gpu_blocks 0 is below"),
        ({"engine": {**ENGINE, "blocks": 3}}, 'w.json: engine: unknown field "blocks"'),
        (
            {"engine": {**ENGINE, "num_steps_in_flight": -1}},
            "w.json: engine.num_steps_in_flight: -1",
        ),
        (
            {"engine": {**ENGINE, "num_steps_in_flight": 1, "num_speculative_tokens": 1}},
            "w.json: engine: num_steps_in_flight: drafts",
        ),
        (
            {
                "engine": {**ENGINE, "has_connector": False},
                "arrivals": [{"name": "a", "num_prompt_tokens": 9, "num_external_tokens": 4}],
            },
            "w.json: arrivals[0].num_external_tokens: the engine has no connector",
        ),
        (
            {
                "engine": {**ENGINE, "shipped_connector": "DecodeBenchConnector"},
                "arrivals": [{"name": "a", "num_prompt_tokens": 9, "num_external_tokens": 4}],
            },
            "w.json: arrivals[0].num_external_tokens: DecodeBenchConnector serves what it has",
        ),
        (
            {"engine": {**ENGINE, "shipped_connector": "NixlConnector"}},
            'w.json: engine: shipped_connector "NixlConnector" is none of DecodeBenchConnector',
        ),
        (
            {
                "engine": {
                    **ENGINE,
                    "shipped_connector": "DecodeBenchConnector",
                    "has_connector": False,
                }
            },
            "w.json: engine: shipped_connector: the engine has no connector",
        ),
        ({"arrivals": []}, "w.json: arrivals: a workload has at least one arrival"),
        (
            {"arrivals": [{"name": "a", "num_prompt_tokens": 400}]},
            "w.json: arrivals[0].num_prompt_tokens: beyond max_model_len 333",
        ),
        (
            {"arrivals": [{"name": "a", "num_prompt_tokens": 4, "after": "b"}]},
            'w.json: arrivals[0].after: "b" is no earlier arrival',
        ),
        (
            {"arrivals": [{"name": "a", "num_prompt_tokens": 4, "loads_asynchronously": True}]},
            "w.json: arrivals[0].loads_asynchronously: there are no external tokens",
        ),
        ({"expected": {"t": {"end": "died"}}}, 'w.json: expected.t.end: "died" is none of'),
    ],
)
def test_a_malformed_workload_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """The file and the field are named."""
    file = tmp_path / "w.json"
    file.write_text(json.dumps({**FILE, **change}))

    with pytest.raises(WorkloadError) as error:
        load(file)

    assert f"{tmp_path}/{words}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_says_of_itself_that_it_is_a_workload() -> None:
    """`capproof replay` tells workloads from scenarios by that."""
    assert kind_of(json.dumps(FILE)) == KIND
    assert kind_of('{"schema": 1}') is None
    assert kind_of("no JSON") is None


def test_only_given_fields_are_compared_and_an_error_by_a_part_of_it() -> None:
    """A workload may leave open what differs between releases."""
    raised = Outcome(End.RAISED, 1, error="ValueError: Cannot get 1 free blocks from the pool")

    assert differences(STALLED, {"end": End.STALLED, "gate": 22}) == []
    assert differences(STALLED, {"end": End.FINISHED}) == ["end: expected finished, saw stalled"]
    assert differences(raised, {"end": End.RAISED, "error": "Cannot get 1 free"}) == []
    assert differences(raised, {"error": "KeyError"}) != []


def test_a_stall_is_told_with_gate_and_step_apart() -> None:
    """Which of the two checks refuses is what a stall is about."""
    assert "gate 22, step not asked, 13 blocks free" in summary(STALLED)
    assert isinstance(known_workloads()[0], Workload)
