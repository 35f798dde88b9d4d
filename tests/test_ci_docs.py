"""What people copy: the workflow file, and the commands that the pages of the docs show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from conformance.commands.root import cli
from conformance.replay import PROJECT_ROOT

DOCS = PROJECT_ROOT / "docs"
WORKFLOW = DOCS / "examples" / "capproof.yml"
PAGES = ("ci.md", "tutorial.md", "../README.md")
CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)


def workflow() -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return content


def steps() -> list[dict[str, Any]]:
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of the capproof commands in lines of a shell, long ones in one piece."""
    for line in text.replace("\\\n", " ").splitlines():
        words = line.strip().removeprefix("$ ")
        if words.startswith("capproof ") and "..." not in words:
            yield shlex.split(words)[1:]


def in_workflow() -> list[list[str]]:
    return [found for step in steps() for found in commands(step.get("run", ""))]


def in_pages() -> list[list[str]]:
    texts = [(DOCS / page).read_text() for page in PAGES] + [
        (PROJECT_ROOT / "README.md").read_text()
    ]
    codes = (code for text in texts for code in CODE.findall(text))
    return [found for block, span in codes for found in commands(block or span)]


def ids(found: list[list[str]]) -> list[str]:
    return [" ".join(arguments)[:80] for arguments in found]


ALL = [*in_workflow(), *in_pages()]


@pytest.mark.parametrize("arguments", ALL, ids=ids(ALL))
def test_a_command_that_is_shown_can_be_parsed(arguments: list[str]) -> None:
    """Its options exist and take what is given."""
    name, *rest = arguments
    command = cli.commands[name]
    if rest:
        command.make_context(name, rest)


def test_the_workflow_proves_each_change_of_the_core_and_keeps_what_it_finds() -> None:
    """It is a workflow: triggers, jobs with runners, and the four kinds of output are used."""
    content = workflow()
    # YAML 1.1 reads `on` as a truth value.
    paths = content[True]["pull_request"]["paths"]
    assert {"vllm/v1/core/**", "vllm/v1/kv_cache_interface.py"} <= set(paths)
    assert content["permissions"]["security-events"] == "write"
    for job in content["jobs"].values():
        assert job["runs-on"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])

    (prove, report, conform) = in_workflow()
    assert {"--against", "--junit", "--markdown", "--sarif", "--json"} <= set(prove)
    assert conform[: conform.index("--")].count("cuda") == 1
    written = {prove[prove.index(option) + 1] for option in ("--junit", "--sarif", "--json")}
    written.add(report[report.index("--out") + 1])
    assert all(file.startswith("capproof-out/") for file in written)
    uploads = [step["with"] for step in steps() if "upload" in step.get("uses", "")]
    assert prove[prove.index("--sarif") + 1] in [given.get("sarif_file") for given in uploads]
    assert "capproof-out" in [given.get("path") for given in uploads]


def test_files_that_the_workflow_installs_from_are_there() -> None:
    """The lists of requirements have the names that it gives."""
    named = re.findall(r"-r \.capproof/(\S+)", WORKFLOW.read_text())

    assert sorted(named) == ["requirements/prove.txt", "requirements/test.txt"]
    for name in named:
        assert (PROJECT_ROOT / name).is_file()


def test_links_of_the_pages_lead_somewhere() -> None:
    """Every relative link names a file."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
            assert ((DOCS / page).parent / link).exists(), f"{page}: {link}"
