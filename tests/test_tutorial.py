"""The tutorial: what it says is run, and what it shows is what is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from in_core import outcomes_in_core

from conformance.replay import PROJECT_ROOT

TUTORIAL = PROJECT_ROOT / "docs" / "tutorial.md"
#: A block of commands, each behind `$ ` and followed by what it prints.
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="the tutorial's paths are those of Linux"
)
#: What differs from run to run.
SECONDS = re.compile(r"\b\d+\.\d\d ?s\b")
#: A line that stands for any lines.
ANYTHING = "..."


@dataclass(frozen=True)
class Shown:
    """A command of the tutorial, and what is shown of its output."""

    command: str
    output: str


def shown() -> list[Shown]:
    """Every command of the tutorial in order."""
    return [found for block in CONSOLE.findall(TUTORIAL.read_text()) for found in in_block(block)]


def with_vllm() -> list[Shown]:
    """Those that import vLLM, which takes its time."""
    return [step for step in shown() if "pytest" in step.command]


def in_block(block: str) -> Iterator[Shown]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Shown(command, output)


def normal(text: str, home: Path) -> list[str]:
    """Lines without what differs from run to run, and without blanks at their ends."""
    text = SECONDS.sub("N s", text.replace(str(home), "~"))
    return [line.rstrip() for line in text.strip().splitlines()]


def matches(expected: list[str], lines: list[str]) -> bool:
    """Whether lines are those expected, `...` standing for any number of them."""
    parts = (r"(?:.*\n)*" if line == ANYTHING else re.escape(line) + r"\n" for line in expected)
    return re.fullmatch("".join(parts), "".join(f"{line}\n" for line in lines)) is not None


@dataclass(frozen=True)
class Reader:
    """Someone with a home and a folder to work in, who has run `make prove`."""

    home: Path
    folder: Path

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command as it stands in the tutorial."""
        bin_folder = str(Path(sys.executable).parent)
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("CAPPROOF_CACHE", "XDG_CACHE_HOME", "PYTEST_ADDOPTS")
        }
        environment |= {
            "HOME": str(self.home),
            "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def ends(self, command: str, running: subprocess.Popen[str], output: str) -> None:
        """Wait for a command and compare what it printed with what is shown."""
        printed = normal(running.communicate(timeout=300)[0], self.home)
        expected = normal(output, self.home)
        assert matches(expected, printed), "\n".join([f"$ {command}", *printed])


@pytest.fixture(scope="module")
def reader(trees: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader whose cache holds releases and no verdict, and who has done all but pytest."""
    home = tmp_path_factory.mktemp("home")
    cache = home / ".cache" / "capproof"
    cache.mkdir(parents=True)
    (cache / "trees").symlink_to(trees["0.31.0"].parent)
    found = Reader(home, tmp_path_factory.mktemp("folder"))
    for step in shown():
        if step not in with_vllm():
            found.ends(step.command, found.start(step.command), step.output)
    return found


@ON_LINUX
def test_what_the_tutorial_shows_is_what_is_printed(
    reader: Reader, trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands run as they stand and print what is shown; the rendered test ends so on the core."""
    assert sum(step.command.startswith("capproof") for step in shown()) >= 6
    rendered = (reader.folder / "test_block_estimate.py").read_text()
    shown_ends = [step.output.splitlines()[-1].split(" in ")[0] for step in with_vllm()]

    roots = (reader.folder / "my-vllm", trees["0.31.0"])
    passes = [list(outcomes_in_core(rendered, root, monkeypatch).values()) for root in roots]

    assert passes == [[False], [True]]
    assert shown_ends == ["1 failed", "1 passed"]


@ON_LINUX
@pytest.mark.skipif(not os.environ.get("CAPPROOF_ALL_RELEASES"), reason="part of make selfcheck")
def test_so_it_does_with_vllm_imported_for_real(reader: Reader) -> None:
    """The commands run as they stand, and print what is shown."""
    running = [reader.start(f"{step.command} -p no:cacheprovider") for step in with_vllm()]

    for step, process in zip(with_vllm(), running, strict=True):
        reader.ends(step.command, process, step.output)


@pytest.mark.parametrize(
    ("expected", "lines", "is_match"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        (["a", "..."], ["a", "b", "c"], True),
        (["...", "c"], ["a", "b", "c"], True),
        (["...", "d"], ["a", "b", "c"], False),
        (["a.c"], ["abc"], False),
    ],
)
def test_the_comparison_notices(expected: list[str], lines: list[str], is_match: bool) -> None:
    """What is shown must be there in full, and dots stand for lines and for nothing else."""
    assert matches(expected, lines) is is_match
