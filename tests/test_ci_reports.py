"""What `capproof prove` writes for CI services: JUnit XML, a Markdown summary and SARIF."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cli
from conformance.commands import prove as prove_command
from conformance.junit import junit
from conformance.markdown_summary import code, markdown_summary
from conformance.outcomes import Outcome, advice, needs_attention, outcome, printable
from conformance.replay import PROJECT_ROOT
from conformance.sarif import line_of, message, sarif
from models.loader import INTERFACE, KV_CACHE_MANAGER, MANAGERS
from spec.theorems import THEOREMS

CopyTree = Callable[..., Path]
Output = pytest.CaptureFixture[str]

TARGET = "vllm==0.30.0"
SHOWN = "generated_tests/scenarios/refutations/exact-estimate-checkpoint-vllm-0-30-0.json"
SCENARIO = json.loads((PROJECT_ROOT / SHOWN).read_text())
#: Scenario's numbers, as every report says them.
NUMBERS = "B 1, H 1, S 0, K 1, 1 token computed, then 4: estimate 3, drawn 2, needed 2"


def row(verdict: str = "PROVED", expected: str | None = "PROVED", **changes: Any) -> dict[str, Any]:
    is_refuted = verdict == "REFUTED"
    return {
        "target": TARGET,
        "manager": "mamba-align",
        "family": "checkpoint",
        "tags": [],
        "theorem": "exact-estimate",
        "verdict": verdict,
        "expected": expected,
        "seconds": 0.25,
        "scenario": SCENARIO if is_refuted else None,
        "scenario_at_production_sizes": None,
        "replay": "reproduced" if is_refuted else None,
        "reason": None if verdict in ("PROVED", "REFUTED") else "some reason",
        **changes,
    }


PLACE = "vllm/v1/core/single_type_kv_cache_manager.py:1700: a bit shift"
UNSUPPORTED = row("UNSUPPORTED", reason=PLACE)
#: A row by what it is to a CI service.
EXAMPLES = [
    (row(), Outcome.PASSED, None),
    (row(expected=None), Outcome.PASSED, None),
    (row("REFUTED", "REFUTED"), Outcome.KNOWN, "skipped"),
    (row("NOT_APPLICABLE", "NOT_APPLICABLE"), Outcome.NOT_ABOUT, "skipped"),
    (row("NOT_APPLICABLE", None), Outcome.NOT_ABOUT, "skipped"),
    (row("REFUTED"), Outcome.FAILED, "failure"),
    (row("REFUTED", None), Outcome.FAILED, "failure"),
    (row("PROVED", "REFUTED"), Outcome.FAILED, "failure"),
    (row("NOT_APPLICABLE", "PROVED"), Outcome.FAILED, "failure"),
    (UNSUPPORTED, Outcome.UNDECIDED, "error"),
    (row("UNKNOWN"), Outcome.UNDECIDED, "error"),
    (row("VACUOUS", "VACUOUS"), Outcome.UNDECIDED, "error"),
    (row(crosscheck="disagrees"), Outcome.UNDECIDED, "error"),
    (row("REFUTED", "REFUTED", crosscheck="agrees"), Outcome.KNOWN, "skipped"),
]
IDS = [f"{row['verdict']}-{row['expected']}-{of.name}" for row, of, _ in EXAMPLES]
HOSTILE = "\x00\x1b[31m]]> <&\"' \ud800 \ufffe ` ``` | @all\nnext"


# ---- what a verdict is ---------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "expected", "element"), EXAMPLES, ids=IDS)
def test_nothing_but_proved_is_a_pass(
    row: dict[str, Any], expected: Outcome, element: str | None
) -> None:
    """JUnit shows PROVED alone without an element, and any other verdict with its name in it."""
    (case,) = ElementTree.fromstring(junit([row])).iter("testcase")

    assert outcome(row) is expected
    assert [child.tag for child in case] == ([element] if element else [])
    for child in case:
        assert child.get("message", "").startswith(row["verdict"])


def test_advice_says_what_to_do() -> None:
    """A new refutation comes first, with a command; what is gone or undecided has its words."""
    name = SCENARIO["name"]
    refuted = advice([row(), UNSUPPORTED, row("REFUTED")], {(TARGET, name): "a file.json"})
    assert refuted is not None
    assert f"`capproof replay --target {TARGET} --draw 'a file.json'`" in refuted

    assert "is PROVED now, no longer REFUTED" in (advice([row("PROVED", "REFUTED")]) or "")
    assert f"{PLACE}; see `capproof explain UNSUPPORTED`" in (advice([UNSUPPORTED]) or "")
    assert advice([row(), row("REFUTED", "REFUTED")]) is None


# ---- JUnit ---------------------------------------------------------------------------------------


def test_junit_has_a_case_per_obligation_and_counts_that_are_right() -> None:
    """Suites count what they hold, and a case is named by target, manager, kind and theorem."""
    rows = [row for row, *_ in EXAMPLES]
    rows += [row(target="path:a b", tags=["overwide"], manager="coordinator")]

    root = ElementTree.fromstring(junit(rows))

    assert root.tag == "testsuites"
    first, second = root
    for suite in (root, first, second):
        cases = list(suite.iter("testcase"))
        assert suite.get("tests") == str(len(cases))
        for element, count in (
            ("failure", "failures"),
            ("error", "errors"),
            ("skipped", "skipped"),
        ):
            assert suite.get(count) == str(len(list(suite.iter(element))))
        total = sum(float(case.get("time", "")) for case in cases)
        assert float(suite.get("time", "")) == pytest.approx(total)
    (case,) = second.iter("testcase")
    assert case.attrib == {
        "classname": "path:a b.coordinator.checkpoint+overwide",
        "name": "exact-estimate",
        "time": "0.250",
    }


def test_a_failure_holds_what_is_needed_to_judge_and_to_repeat_it() -> None:
    """Verdict, numbers, claim, a command, and the whole scenario."""
    (failure,) = ElementTree.fromstring(junit([row("REFUTED")])).iter("failure")

    assert failure.attrib == {
        "type": "REFUTED",
        "message": f"REFUTED, expected PROVED: {NUMBERS}",
    }
    text = failure.text or ""
    assert THEOREMS["exact-estimate"].sentence in text
    assert (
        "again: capproof prove --target vllm==0.30.0 --manager mamba-align --family checkpoint "
        "--theorem exact-estimate\n"
    ) in text
    assert json.loads(text.partition("scenario:")[2]) == SCENARIO


# ---- hostile words -------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_no_text_breaks_a_file(text: str) -> None:
    """Whatever a reason or a target says, XML and JSON can be read, and UTF-8 can say them."""
    rows = [row("UNKNOWN", reason=text, target=f"path:{text}")]

    (error,) = ElementTree.fromstring(junit(rows).encode()).iter("error")
    assert error.get("message") == f"UNKNOWN: {printable(text, kept='')}" or not text
    markdown_summary(rows).encode()
    json.loads(sarif(rows, {f"path:{text}": PROJECT_ROOT}).encode())


def test_words_of_a_tree_are_no_markup() -> None:
    """In Markdown they are neither markup nor a mention, and no code span or row ends early."""
    page = markdown_summary([row("UNKNOWN", reason=HOSTILE, target=f"path:{HOSTILE}")])

    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", page)
    for special in ("@", "\x1b", "\x00", "]]>", "\\ud800"):
        assert special not in outside.replace("\\", "")
    (header,) = (line for line in page.splitlines() if line.startswith("| theorem |"))
    assert header.count("|") - header.count("\\|") == 3


@pytest.mark.parametrize("text", ["", "`", "a ``` b", "plain", "``"])
def test_a_code_span_holds_any_text(text: str) -> None:
    """The fence is longer than any run of backticks inside."""
    span = code(text)
    fence = re.match("`+", span)
    assert fence is not None
    inside = span[len(fence[0]) : -len(fence[0])] if text else ""
    assert fence[0] not in inside.strip(" ") or not text


# ---- Markdown ------------------------------------------------------------------------------------


def test_the_summary_begins_with_what_to_do() -> None:
    """Result, then what to do, then what is not as expected, then counts."""
    page = markdown_summary([row(), row("REFUTED"), row("REFUTED", "REFUTED")])

    lines = [line for line in page.splitlines() if line]
    assert lines[0] == "## capproof: 1 of 3 verdicts is not as expected"
    assert lines[1].startswith("**What to do:** exact-estimate in checkpoint on vllm==0.30.0 is")
    headings = [line for line in lines if line.startswith("#")]
    assert headings[1:] == ["### Not as expected", "### Verdicts"]
    assert f"REFUTED, expected PROVED: {NUMBERS}" in page
    assert json.dumps(SCENARIO) in page
    assert "| `exact-estimate` | 2 REFUTED, 1 PROVED, **1 not as expected** |" in page


def test_a_summary_of_what_is_as_expected_is_short() -> None:
    """Nothing is listed where nothing needs attention."""
    page = markdown_summary([row(), row("REFUTED", "REFUTED")])

    assert page.startswith("## capproof: all 2 verdicts are as expected\n\n### Verdicts\n")


def test_a_summary_keeps_to_its_size_and_says_what_it_leaves_out() -> None:
    """Result and counts stay, however much is not as expected."""
    page = markdown_summary([row("REFUTED") for _ in range(2000)], max_bytes=20_000)

    assert len(page.encode()) <= 20_000
    left_out = re.search(r"^- and (\d+) more", page, re.MULTILINE)
    assert left_out is not None
    assert page.count("\n- `exact-estimate in checkpoint") == 2000 - int(left_out[1])
    assert page.startswith("## capproof: 2000 of 2000 verdicts are not as expected\n")
    assert "| `exact-estimate` | 2000 REFUTED, **2000 not as expected** |" in page


def test_what_one_reason_keeps_from_being_settled_stands_together() -> None:
    """A construct that cannot be lifted is one entry, not one for each obligation."""
    rows = [{**UNSUPPORTED, "theorem": theorem} for theorem in THEOREMS]

    others = f"and {len(THEOREMS) - 1} other obligations on {TARGET}"
    assert markdown_summary(rows).count(others) == 1
    (result,) = json.loads(sarif(rows, {TARGET: PROJECT_ROOT}))["runs"][0]["results"]
    assert others in result["message"]["text"]


# ---- SARIF ---------------------------------------------------------------------------------------

_TEXT = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}, "markdown": {"type": "string"}},
    "additionalProperties": False,
}
#: What is used of the SARIF 2.1.0 schema, as strict as that: no property that it does not know.
SARIF_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": {"$ref": "#/$defs/run"}},
    },
    "$defs": {
        "run": {
            "type": "object",
            "required": ["tool"],
            "additionalProperties": False,
            "properties": {
                "tool": {
                    "type": "object",
                    "required": ["driver"],
                    "properties": {"driver": {"$ref": "#/$defs/driver"}},
                    "additionalProperties": False,
                },
                "automationDetails": {
                    "type": "object",
                    "properties": {"id": {"type": "string"}},
                    "additionalProperties": False,
                },
                "originalUriBaseIds": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "properties": {
                            "uri": {"type": "string", "pattern": "^file:///.*/$"},
                            "description": _TEXT,
                        },
                        "additionalProperties": False,
                    },
                },
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "results": {"type": "array", "items": {"$ref": "#/$defs/result"}},
            },
        },
        "driver": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string"},
                "version": {"type": "string"},
                "rules": {
                    "type": "array",
                    "uniqueItems": True,
                    "items": {
                        "type": "object",
                        "required": ["id"],
                        "additionalProperties": False,
                        "properties": {
                            "id": {"type": "string"},
                            "name": {"type": "string"},
                            "shortDescription": _TEXT,
                            "fullDescription": _TEXT,
                            "help": _TEXT,
                            "defaultConfiguration": {
                                "type": "object",
                                "properties": {
                                    "level": {"enum": ["none", "note", "warning", "error"]}
                                },
                                "additionalProperties": False,
                            },
                        },
                    },
                },
            },
        },
        "result": {
            "type": "object",
            "required": ["message"],
            "additionalProperties": False,
            "properties": {
                "ruleId": {"type": "string"},
                "ruleIndex": {"type": "integer", "minimum": -1},
                "level": {"enum": ["none", "note", "warning", "error"]},
                "message": _TEXT,
                "locations": {"type": "array", "items": {"$ref": "#/$defs/location"}},
                "partialFingerprints": {
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                },
                "properties": {"type": "object"},
            },
        },
        "location": {
            "type": "object",
            "required": ["physicalLocation"],
            "additionalProperties": False,
            "properties": {
                "physicalLocation": {
                    "type": "object",
                    "required": ["artifactLocation", "region"],
                    "additionalProperties": False,
                    "properties": {
                        "artifactLocation": {
                            "type": "object",
                            "required": ["uri"],
                            "properties": {
                                "uri": {"type": "string", "pattern": "^[^/]"},
                                "uriBaseId": {"type": "string"},
                            },
                            "additionalProperties": False,
                        },
                        "region": {
                            "type": "object",
                            "properties": {"startLine": {"type": "integer", "minimum": 1}},
                            "additionalProperties": False,
                        },
                    },
                }
            },
        },
    },
}


def log_of(rows: list[dict[str, Any]], roots: Mapping[str, Path]) -> dict[str, Any]:
    log: dict[str, Any] = json.loads(sarif(rows, roots))
    jsonschema.validate(log, SARIF_SCHEMA)
    return log


def test_sarif_keeps_to_its_schema_and_names_its_rules(trees: Mapping[str, Path]) -> None:
    """Rules are those of the theorems, each result points to its own, and no run shares an id."""
    rows = [{**row, "theorem": theorem} for row, *_ in EXAMPLES for theorem in THEOREMS]
    rows += [row(target="path:tree")]
    roots = {TARGET: trees["0.30.0"], "path:tree": trees["0.31.0"]}

    log = log_of(rows, roots)

    assert [run["automationDetails"]["id"] for run in log["runs"]] == [
        *(f"capproof/{TARGET}/", "capproof/path:tree/")
    ]
    for run in log["runs"]:
        rules = run["tool"]["driver"]["rules"]
        for result in run["results"]:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    (_, of_tree) = log["runs"]
    assert of_tree["originalUriBaseIds"]["SRCROOT"]["uri"] == f"{trees['0.31.0'].as_uri()}/"


#: Texts, and how a message says them.
MESSAGES = {
    "B 1, [K > 0] + [partial hit]": "B 1, [K > 0] + [partial hit]",
    r"a\b \[c\]": r"a\b \[c\]",
    "{0} of {'a': {}}": "{{0}} of {{'a': {{}}}}",
    "see [here](file:///etc)": r"see [here\](file:///etc)",
    "[a](0) [b](1)": r"[a\](0) [b\](1)",
    r"[a\](0)": r"[a\](0)",
    r"[a\\](0)": r"[a\\\](0)",
    "a](b\x1b": r"a\](b\x1b",
}
#: An embedded link of a plain text message (SARIF 2.1.0, 3.11.6).
SARIF_LINK = re.compile(r"\[(?:[^\\\[\]]|\\[\\\[\]])*\]\(")


@pytest.mark.parametrize("text", MESSAGES)
def test_a_message_escapes_what_would_be_a_link_or_a_placeholder(text: str) -> None:
    """Braces are doubled, `](` is escaped, and all else stands as it is."""
    assert message(text) == {"text": MESSAGES[text]}


@given(st.text(r"[]()\\{}0a", max_size=20))
def test_no_text_is_read_as_a_link_or_a_placeholder(text: str) -> None:
    """No reader that keeps to the standard finds either in a message, and braces come back."""
    shown = message(text)["text"]

    assert SARIF_LINK.search(shown) is None
    assert "{" not in shown.replace("{{", "")
    assert "}" not in shown.replace("}}", "")
    assert shown.count("{") == 2 * text.count("{")


def test_rules_say_nothing_that_needs_to_be_escaped() -> None:
    """Texts of theorems are shown by readers that escape nothing."""
    for theorem in THEOREMS.values():
        for text in (theorem.sentence, theorem.unsat_iff, theorem.source):
            assert message(text) == {"text": text}


def test_known_refutations_are_one_note_for_a_theorem_and_a_manager(
    trees: Mapping[str, Path],
) -> None:
    """Annotations stay few; what is proved has none, and a surprise is an error of its own."""
    known = [row("REFUTED", "REFUTED", tags=tags) for tags in ([], ["overwide"])]
    rows = [*known, row("REFUTED", "REFUTED", manager="coordinator"), row(), row("REFUTED")]

    (run,) = log_of(rows, {TARGET: trees["0.30.0"]})["runs"]

    assert Counter(result["level"] for result in run["results"]) == {"error": 1, "note": 2}
    (note,) = (
        r
        for r in run["results"]
        if r["properties"]["manager"] == "mamba-align" and r["level"] == "note"
    )
    assert "Known to be broken in checkpoint, checkpoint+overwide." in note["message"]["text"]


@pytest.mark.parametrize(
    ("changes", "module", "words"),
    [
        ({}, MANAGERS, ("class MambaManager", "def get_num_blocks_to_allocate")),
        ({"theorem": "conservation"}, MANAGERS, ("class MambaManager", "def allocate_new_blocks")),
        (
            {"theorem": "removal-keeps-state"},
            MANAGERS,
            ("class MambaManager", "def remove_skipped_blocks"),
        ),
        (
            {"theorem": "peak-within-sizing"},
            INTERFACE,
            ("class MambaSpec", "def max_memory_usage_bytes"),
        ),
        (
            {"manager": "coordinator"},
            KV_CACHE_MANAGER,
            ("class KVCacheManager", "def allocate_slots"),
        ),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_a_result_points_to_the_function_that_it_is_about(
    trees: Mapping[str, Path], changes: dict[str, str], module: str, words: tuple[str, str]
) -> None:
    """File and line are those of the tree that is judged."""
    (run,) = log_of([row("REFUTED", **changes)], {TARGET: trees["0.30.0"]})["runs"]

    (location,) = run["results"][0]["locations"]
    place = location["physicalLocation"]
    file = module.replace(".", "/") + ".py"
    assert place["artifactLocation"] == {"uri": file, "uriBaseId": "TREE"}
    lines = (trees["0.30.0"] / file).read_text().splitlines()
    line = place["region"]["startLine"]
    assert lines[line - 1].strip().startswith(words[1])
    (owner,) = [text for text in lines[:line] if text.startswith("class ")][-1:]
    assert owner.startswith(words[0])


def test_what_cannot_be_lifted_points_to_its_own_line(trees: Mapping[str, Path]) -> None:
    """The reason of an UNSUPPORTED row names file and line, and the result stands there."""
    (run,) = log_of([UNSUPPORTED], {TARGET: trees["0.30.0"]})["runs"]

    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == PLACE.partition(":")[0]
    assert place["region"] == {"startLine": 1700}


def test_a_function_may_stand_in_a_base_class_or_be_gone(tmp_path: Path) -> None:
    """A result has a line whatever the tree looks like."""
    file = tmp_path / "a" / "b.py"
    file.parent.mkdir()
    file.write_text("class Base:\n    def f(self): ...\n\nclass Own(Base, Own): ...\n")

    assert line_of(tmp_path, ("a.b", "Own", "f")) == 2
    assert line_of(tmp_path, ("a.b", "Own", "gone")) == 4
    assert line_of(tmp_path, ("a.b", "Gone", "f")) == 1
    assert line_of(tmp_path, ("a.c", "Own", "f")) == 1
    file.write_text("class Own(")
    assert line_of(tmp_path, ("a.b", "Own", "f")) == 1


# ---- the command line ----------------------------------------------------------------------------

FEW = (
    *("--family", "checkpoint", "--theorem", "dry-run-parity", "--theorem", "bounded-demand"),
    *("--manager", "mamba-align"),
)


def test_prove_writes_all_reports_and_ends_with_what_to_do(
    copy_tree: CopyTree, tmp_path: Path, capsys: Output
) -> None:
    """A checkout with a fault: each file says it, and the last line is what to do about it."""
    target = f"path:{copy_tree('0.30.0')}"
    files = {name: tmp_path / f"out.{name}" for name in ("junit", "markdown", "sarif", "json")}
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]

    assert cli.run(["prove", "--target", target, *FEW, *options]) == 1

    rows = json.loads(files["json"].read_text())["obligations"]
    number = sum(map(needs_attention, rows))
    assert number == 2
    assert ElementTree.parse(files["junit"]).getroot().get("failures") == str(number)
    assert "## capproof: 2 of 4 verdicts are not as expected" in files["markdown"].read_text()
    log = json.loads(files["sarif"].read_text())
    jsonschema.validate(log, SARIF_SCHEMA)
    assert len(log["runs"][0]["results"]) == number
    *_, totals, last = capsys.readouterr().out.splitlines()
    assert totals == "4 obligations: 2 proved, 2 not; 2 not as expected"
    assert last.startswith("what to do: bounded-demand in checkpoint on path:")


@pytest.mark.parametrize("option", ["--junit", "--markdown", "--sarif"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_proved(
    option: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and exit status 2, as for --json; so it is where two options name one file."""
    monkeypatch.setattr(
        prove_command, "settle_all", lambda *_, **__: pytest.fail("something was proved")
    )
    same = tmp_path / "out"

    assert cli.run(["prove", *FEW, option, "."]) == 2
    assert f"{option} .: a folder is there" in capsys.readouterr().err
    assert cli.run(["prove", *FEW, option, str(tmp_path / "no" / "out")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert cli.run(["prove", *FEW, "--json", str(same), option, f"{tmp_path}/./out"]) == 2
    assert capsys.readouterr().err == (
        f"capproof: --json and {option} name the same file; name two\n"
    )
