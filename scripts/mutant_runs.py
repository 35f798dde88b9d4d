"""What becomes of a small change to a release when the copy that has it is run.

It is run by the generated tests, judged as the release is, and by random lives, whose faults that
the release is known to have are excepted; both on the core tier. The first failure ends a run.

    python -m scripts.mutant_runs TREE RELEASE    live on one tree
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from conformance.driver import core_driver
from conformance.expectations import suite_of
from conformance.life_machine import lived
from models.loader import Core
from models.traits import traits_of
from scripts.mutant_proofs import cases_of
from scripts.mutations import ROOT, Mutant, MutantError, mutated_tree

GENERATED_TESTS = ROOT / "generated_tests"
#: Random lives of a run, by the number of steps in flight.
NUM_LIVES = {0: 400, 1: 200}
#: Seconds after which a run is ended: a change may make a loop that never ends.
PATIENCE = 600
NEVER_ENDS = "it does not end"
_PASSED, _FAILED, _INTERRUPTED, _NOTHING_COLLECTED = 0, 1, 2, 5


@dataclass(frozen=True)
class Run:
    """What the generated tests, or lives, made of a mutant.

    Attributes:
        noticed: What failed first, in one line; empty where nothing did.
        seconds: Wall time until then.
    """

    noticed: str
    seconds: float = field(default=0.0, compare=False)


def tested(mutant: Mutant | None, root: Path, release: str) -> Run:
    """Run the generated tests on a copy with a mutant (None: none), those of its families first."""
    started = time.perf_counter()
    noticed = ""
    with mutated_tree(root, mutant) as tree:
        for file in _likely_first(mutant, root):
            noticed = _tested_by(file, tree, release)
            if noticed:
                break
    return Run(noticed.replace(str(tree), "the copy"), time.perf_counter() - started)


def lived_on(mutant: Mutant | None, root: Path, release: str) -> Run:
    """Have requests live on a copy with a mutant; None is an unchanged copy."""
    started = time.perf_counter()
    with mutated_tree(root, mutant) as tree:
        done = _run("-m", "scripts.mutant_runs", str(tree), release)
    noticed = NEVER_ENDS if done is None else ""
    if done is not None and done.returncode != _PASSED:
        noticed = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Run(noticed.replace(str(tree), "the copy"), time.perf_counter() - started)


BY = {"generated tests": tested, "lives": lived_on}


def run_all(
    mutants: Iterable[tuple[str, Mutant | None]], root: Path, release: str, *, jobs: int
) -> Iterator[tuple[str, Mutant | None, Run]]:
    """Run mutants side by side, and yield what was run, on what, and what became of it.

    Args:
        mutants: Each with one of `BY`.
        root: The release's tree.
        release: Its number.
        jobs: How many at a time.
    """
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(BY[by], one, root, release): (by, one) for by, one in mutants}
        try:
            for run in as_completed(runs):
                yield (*runs[run], run.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _likely_first(mutant: Mutant | None, root: Path) -> Sequence[Path]:
    """The rendered test files: of kinds of step that the mutant has a part in first, by size."""
    cases = () if mutant is None else cases_of(traits_of(Core(root)), mutant)
    suites = {suite_of(case.manager, case.family).replace("-", "_") for case in cases}
    files = GENERATED_TESTS.glob("test_*.py")
    return sorted(files, key=lambda f: (f.stem[5:] not in suites, f.stat().st_size))


def _tested_by(file: Path, tree: Path, release: str) -> str:
    """The first test of a file that fails, or why none could run; empty where all pass."""
    options = ("-x", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider")
    targets = ("--capproof-target", f"path:{tree}", "--capproof-against", f"vllm=={release}")
    done = _run("-m", "pytest", str(file), *options, *targets)
    if done is None:
        return NEVER_ENDS
    if done.returncode in (_PASSED, _NOTHING_COLLECTED):
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == _FAILED and lines:
        return lines[0].partition(" ")[2].removeprefix(f"{GENERATED_TESTS.name}/")
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode == _INTERRUPTED and said:  # the tree could not be set up
        return said[-1]
    raise MutantError(f"{file}: pytest ended with exit status {done.returncode}: {said[-1:]}")


def _run(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Run Python from the project's folder; None where it does not end."""
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": "0", "COLUMNS": "1000"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def main() -> int:
    """Live on one tree; a violation that is not known is the last line of stderr."""
    tree, release = sys.argv[1:]
    try:
        driver = core_driver(Path(tree))
        for steps_in_flight, lives in NUM_LIVES.items():
            lived(driver, f"vllm=={release}", lives, steps_in_flight=steps_in_flight)
    except Exception as error:
        said = " ".join(str(error).split())
        print(f"{type(error).__name__}: {said}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
