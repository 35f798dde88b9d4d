"""The published JSON schema of scenario files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from conformance import schema
from conformance.replay import PROJECT_ROOT
from conformance.scenario import ScenarioError, loads

PUBLISHED = PROJECT_ROOT / "docs" / "scenario.schema.json"
SCENARIOS = PROJECT_ROOT / "generated_tests" / "scenarios"
VALIDATOR = Draft202012Validator(json.loads(PUBLISHED.read_text()))
#: A scenario of one manager, one of several groups, and a collection.
SAMPLES = [
    json.loads((SCENARIOS / file).read_text())
    for file in (
        "refutations/exact-estimate-checkpoint-vllm-0-30-0.json",
        "refutations/no-undercount-coordinator-resumed-vllm-0-33-0.json",
        "own-tail.json",
    )
]
# Two scenarios are a collection as well, and are read in less time.
SAMPLES[-1]["scenarios"] = SAMPLES[-1]["scenarios"][:2]

Path_ = tuple[str | int, ...]


def paths(content: Any, prefix: Path_ = ()) -> list[Path_]:
    """The places in a JSON value, but for those inside of lists longer than two."""
    if isinstance(content, dict):
        items: list[tuple[str | int, Any]] = list(content.items())
    elif isinstance(content, list):
        items = list(enumerate(content[:2]))
    else:
        return []
    found = [(*prefix, key) for key, _ in items]
    return found + [path for key, value in items for path in paths(value, (*prefix, key))]


def changed(content: Any, path: Path_, value: Any) -> Any:
    """A copy with another value at a place; `...` takes the place away."""
    made = copy.deepcopy(content)
    at = made
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


def objection(content: Any) -> str | None:
    """What the reader says against a content, None where it reads it."""
    try:
        loads(json.dumps(content), name="some.json")
    except ScenarioError as error:
        return str(error)
    return None


def is_read(content: Any) -> bool:
    return objection(content) is None


def test_the_published_schema_is_current_and_is_a_schema() -> None:
    """What stands in docs/ is what the records say now."""
    Draft202012Validator.check_schema(schema.schema())
    assert PUBLISHED.read_text() == schema.text()


@pytest.mark.parametrize("folder", ["scenarios", "scenarios/refutations"])
def test_every_committed_scenario_is_valid(folder: str) -> None:
    """Whoever has the schema alone accepts every file that the project publishes."""
    files = [
        file
        for file in sorted((SCENARIOS.parent / folder).glob("*.json"))
        if file.name != "verdicts.json"
    ]

    invalid = [file.name for file in files if not VALIDATOR.is_valid(_content(file))]

    assert len(files) > 20
    assert invalid == []


def _content(file: Path) -> Any:
    return json.loads(file.read_text())


#: Values that no place of a scenario takes.
NOWHERE = [[None], {"x": 1}, 2**60, "a\nb", 1.5]


@pytest.mark.parametrize("sample", SAMPLES, ids=["one", "groups", "collection"])
@pytest.mark.parametrize("value", NOWHERE, ids=repr)
def test_a_mutated_scenario_is_not_valid(sample: Any, value: Any) -> None:
    """A value of the wrong kind is refused wherever it stands, by schema and reader alike."""
    for path in paths(sample):
        made = changed(sample, path, value)
        assert not VALIDATOR.is_valid(made), path
        assert not is_read(made), path


@pytest.mark.parametrize("sample", SAMPLES, ids=["one", "groups", "collection"])
def test_the_schema_requires_what_the_reader_requires(sample: Any) -> None:
    """A field may be left out for both or for neither; no other field may be added."""
    for path in paths(sample):
        if not isinstance(path[-1], str):
            continue
        without = changed(sample, path, ...)
        said = objection(without) or ""
        # The reader also refuses numbers that contradict each other without the field.
        is_missed = "is missing" in said or "Mamba groups" in said
        assert VALIDATOR.is_valid(without) is not is_missed, path
        added = changed(sample, (*path[:-1], "surprise"), 0)
        if "predicted" not in path[-2:-1]:
            assert not VALIDATOR.is_valid(added), path
            assert not is_read(added), path


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**53, 2**53 + 1, -(2**53), 10**40]),
    st.text(max_size=8),
    st.sampled_from(["<script>", "mamba-align", "coordinator", "a--b", "x" * 130, "no-such"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(st.data())
def test_what_the_reader_accepts_is_valid(data: st.DataObject) -> None:
    """The schema never refuses a scenario that can be replayed."""
    content = data.draw(st.sampled_from(SAMPLES))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(content)))
        content = changed(content, path, data.draw(HOSTILE | st.just(...)))

    if is_read(content):
        assert VALIDATOR.is_valid(content)


def test_how_many_groups_there_are_depends_on_the_manager() -> None:
    """One manager by itself has none beside it; the coordinator says how many."""
    one, groups, _ = SAMPLES

    for content in (
        {**one, "num_mamba_groups": 1},
        {**groups, "num_mamba_groups": 3},
        {key: value for key, value in groups.items() if key != "num_mamba_groups"},
    ):
        assert not VALIDATOR.is_valid(content)
        assert not is_read(content)
