"""Which branches of vLLM's accounting the generated tests take, by themselves, on real imports.

    python scripts/coverage_of_vllm.py [--target T]... [--jobs N] [--keep DIR] [--write FILE]

coverage.py counts, while the generated tests run in the vllm tier, each release by itself. A branch
that none of them takes needs a judgement. That no lifted run of any kind of step takes it is
computed, of all paths, which the solver shows to be all (`scripts/lifted_branches.py`); anything
else is a reason in `tests/unreached_branches.toml`. Without one the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from conformance import conform
from conformance.targets import DEFAULT_TARGETS, TargetError, resolve
from models.loader import COORDINATOR, INTERFACE, KV_CACHE_MANAGER, MANAGERS
from scripts.branches import Arc, Branch, BranchError, branches_of, function_named

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "generated_tests"
DATA = ROOT / "tests" / "unreached_branches.toml"
WORKER = Path(__file__).with_name("lifted_branches.py")

_BASE, _MAMBA = "SingleTypeKVCacheManager", "MambaManager"
#: Functions that count blocks, by the module that a release has them in.
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    INTERFACE: ("get_mamba_prefill_checkpoint_position", "is_mamba_prefill_checkpoint_valid"),
    MANAGERS: (
        f"{_MAMBA}.get_num_blocks_to_allocate",
        f"{_MAMBA}._needs_internal_checkpoint",
        f"{_MAMBA}.allocate_new_blocks",
        f"{_MAMBA}._relocate_speculative_block",
        f"{_MAMBA}.remove_skipped_blocks",
        f"{_MAMBA}._remove_blocks_in_range",
        f"{_BASE}.get_num_blocks_to_allocate",
        f"{_BASE}._has_partial_local_hit",
        f"{_BASE}.add_local_computed_blocks",
        f"{_BASE}.allocate_external_computed_blocks",
        f"{_BASE}.allocate_new_blocks",
        f"{_BASE}.remove_skipped_blocks",
    ),
    COORDINATOR: (
        "KVCacheCoordinator.get_num_blocks_to_allocate",
        "KVCacheCoordinator.allocate_new_computed_blocks",
        "KVCacheCoordinator.allocate_new_blocks",
        "KVCacheCoordinator.remove_skipped_blocks",
    ),
    KV_CACHE_MANAGER: ("KVCacheManager.allocate_slots",),
}


class CoverageError(Exception):
    """There is nothing to judge; one line saying what is missing."""


# ---- judgements ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reason:
    """A written judgement.

    Attributes:
        function: Qualified name.
        condition: As `Branch.condition`.
        way: As `Branch.way`.
        reason: Why no generated test takes it, in one line.
        gap: Whether one could: the tests fall short of it.
    """

    function: str
    condition: str
    way: str
    reason: str
    gap: bool = False

    def is_about(self, branch: Branch) -> bool:
        """Whether it judges a branch."""
        return (self.function, self.condition, self.way) == branch.key


def load_reasons(path: Path = DATA) -> list[Reason]:
    """Return the written judgements of a file.

    Raises:
        CoverageError: A record has an unknown key, or lacks one.
    """
    records = tomllib.loads(path.read_text(encoding="utf-8")).get("branch", [])
    try:
        return [Reason(**record) for record in records]
    except TypeError as error:
        raise CoverageError(f"{path.name}: {error}") from error


class Standing(str, Enum):
    """What is known of a branch that no generated test takes."""

    NO_PATH = "no path takes it"
    """Its condition is asked of terms, and on all paths goes the other way."""
    BEHIND = "behind another"
    """It lies behind a branch that is not taken either."""
    WRITTEN = "written"
    GAP = "gap"
    OPEN = "open"
    """There is no judgement."""


@dataclass(frozen=True)
class Judged:
    """A branch that no generated test takes, and why."""

    branch: Branch
    file: str
    standing: Standing
    judgement: str


@dataclass(frozen=True)
class Lifted:
    """What the lifted runs do in one file; see `scripts/lifted_branches.py`."""

    lines: Collection[int] = ()
    asked: Collection[int] = ()
    taken: Mapping[Arc, Sequence[str]] = field(default_factory=dict)
    is_complete: bool = True

    @classmethod
    def read(cls, found: Mapping[str, Any], file: str) -> Lifted:
        """Read a file's part of what the worker wrote."""
        of_file = found["files"].get(file, {"lines": (), "asked": (), "taken": ()})
        taken = {(first, then): kinds for first, then, kinds in of_file["taken"]}
        lines, asked = frozenset(of_file["lines"]), frozenset(of_file["asked"])
        return cls(lines, asked, taken, not found["gave_up"])


def judge(
    missing: Mapping[Arc, Branch], file: str, source: str, lifted: Lifted, reasons: Sequence[Reason]
) -> list[Judged]:
    """Judge the branches of a function that no generated test takes.

    A written reason comes first, since it says more; what is computed is that no path takes it.

    Args:
        missing: The branches.
        file: Path below the tree's root.
        source: Its text.
        lifted: What the lifted runs do there.
        reasons: Written judgements.
    """
    judged: dict[tuple[int, str], Judged] = {}
    for arc, branch in sorted(missing.items()):
        at = next((judged[way] for way in branch.behind if way in judged), None)
        reason = next((reason for reason in reasons if reason.is_about(branch)), None)
        if reason is not None:
            standing = Standing.GAP if reason.gap else Standing.WRITTEN
            judgement = reason.reason
        elif at is not None and at.standing is not Standing.OPEN:
            standing = Standing.GAP if at.standing is Standing.GAP else Standing.BEHIND
            judgement = at.judgement
        else:
            standing, judgement = _computed(arc, branch, source, lifted)
        judged[branch.line, branch.way] = Judged(branch, file, standing, judgement)
    return list(judged.values())


def _computed(arc: Arc, branch: Branch, source: str, lifted: Lifted) -> tuple[Standing, str]:
    kinds = lifted.taken.get(arc)
    if kinds:
        more = f" and {len(kinds) - 3} more" if len(kinds) > 3 else ""
        return Standing.OPEN, f"lifted runs take it: {', '.join(kinds[:3])}{more}"
    if not lifted.is_complete:
        return Standing.OPEN, "paths of the lifted runs may be missing"
    function = function_named(source, branch.function)
    assert function is not None
    body = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
    if not any(line in lifted.lines for line in body):
        return Standing.OPEN, "no lifted run calls the function"
    if branch.line not in lifted.lines:
        return Standing.NO_PATH, "no path comes to the condition"
    if branch.line not in lifted.asked:
        return Standing.OPEN, "how lifted runs are set up settles the condition, not the solver"
    return Standing.NO_PATH, "no path takes it, in any kind of step; the paths are shown to be all"


# ---- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True)
class OfFunction:
    """The branches of one function of one release."""

    name: str
    num_taken: int
    missing: tuple[Judged, ...]

    @property
    def num_all(self) -> int:
        """Branches, taken or not."""
        return self.num_taken + len(self.missing)


def of_release(
    root: Path,
    tests: Mapping[str, Any],
    lifted: Mapping[str, Any],
    reasons: Sequence[Reason],
    functions: Mapping[str, tuple[str, ...]] = FUNCTIONS,
) -> list[OfFunction]:
    """Return the branches of each function that a release has.

    Args:
        root: The release's tree.
        tests: coverage.py's JSON report of the generated tests.
        lifted: What `scripts/lifted_branches.py` wrote.
        reasons: Written judgements.
        functions: Qualified names by module.

    Raises:
        CoverageError: The report says nothing of a file.
        BranchError: A branch is not understood.
    """
    reported = {Path(path).resolve(): found for path, found in tests["files"].items()}
    result = []
    for module, names in functions.items():
        file = f"{module.replace('.', '/')}.py"
        path = (root / file).resolve()
        if path not in reported:
            raise CoverageError(f"{file}: coverage.py says nothing of it")
        source, report = path.read_text(encoding="utf-8"), reported[path]
        executed, missing = (
            {(first, then) for first, then in report[f"{which}_branches"]}
            for which in ("executed", "missing")
        )
        for name in names:
            if function_named(source, name) is None:
                continue  # older or newer than the release
            branches = branches_of(source, name, executed | missing)
            untaken = {arc: branch for arc, branch in branches.items() if arc in missing}
            judged = judge(untaken, file, source, Lifted.read(lifted, file), reasons)
            result.append(OfFunction(name, len(branches) - len(untaken), tuple(judged)))
    return result


def measured(target: str, folder: Path, jobs: int) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Run the generated tests under coverage.py, and the lifted code; return the tree and both.

    Args:
        target: As on the command line.
        folder: Where results are written; what is there is not measured again.
        jobs: Test processes.

    Raises:
        CoverageError: A test failed, or a process could not do its work.
        TargetError: The target is not there.
    """
    root = Path(resolve(target).root)
    slug = target.replace("==", "-").replace("/", "-")
    tests, lifted = (folder / f"{what}-{slug}.json" for what in ("tests", "lifted"))
    if not tests.exists():
        _run_tests(target, root, tests, jobs)
    if not lifted.exists():
        command = [sys.executable, str(WORKER), str(root), str(lifted)]
        if subprocess.run(command, env=_with_project(), check=False).returncode:
            raise CoverageError(f"{target}: the lifted code could not be run")
    found, of_lifted = (json.loads(path.read_text(encoding="utf-8")) for path in (tests, lifted))
    return root, found, of_lifted


def _with_project() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def _run_tests(target: str, root: Path, out: Path, jobs: int) -> None:
    """Run the generated tests as `capproof conform` does, with coverage.py beside."""
    files = (root / f"{module.replace('.', '/')}.py" for module in FUNCTIONS)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "coveragerc"
        lines = ["[run]", "branch = true", f"data_file = {folder}/data", "include ="]
        config.write_text("\n".join([*lines, *(f"    {file}" for file in files)]) + "\n")
        options = ["--cov", f"--cov-config={config}", f"--cov-report=json:{folder}/report.json"]
        options += ["-q", "-r", "fE", "-n", str(jobs)]
        if conform.run([target], "vllm", options, TESTS) != conform.AS_EXPECTED:
            raise CoverageError(f"{target}: the generated tests do not pass")
        out.write_bytes((Path(folder) / "report.json").read_bytes())


# ---- the page ------------------------------------------------------------------------------------


def page(found: Mapping[str, Sequence[OfFunction]], paths: Mapping[str, int]) -> str:
    """Return the page of several releases.

    Args:
        found: Functions by target.
        paths: How many paths the lifted code has, by target.
    """
    how_many = ", ".join(f"{number:,} of {target}" for target, number in paths.items())
    lines = [
        "# Coverage",
        "",
        "Written by `make coverage-generated`; do not edit.",
        "",
        "Branches of vLLM's accounting that the generated tests take, and nothing else: all of",
        "`generated_tests/` on the vllm tier, each release by itself, counted by coverage.py. A",
        "branch is a way out of an `if` or a loop; what an `and` or a conditional expression",
        "decides within a line is not one.",
        "",
        *_table(found),
        "",
        "## Branches that no generated test takes",
        "",
        "**No path** is computed: the condition is asked of terms in the lifted code, and on no",
        "path, in any kind of step that `capproof prove` explores, does it go this way; the solver",
        "shows that these paths are all there are, under the assumptions of `spec/assumptions.py`",
        f"(paths: {how_many}).",
        "**Written** reasons are kept in `tests/unreached_branches.toml`. A",
        "**gap** is a branch that a step can take and no generated test does, or lies behind one.",
        "",
        *_missing(found),
        "",
    ]
    return "\n".join(lines)


def _table(found: Mapping[str, Sequence[OfFunction]]) -> Iterator[str]:
    by_name = {target: {f.name: f for f in functions} for target, functions in found.items()}
    yield f"| function | {' | '.join(found)} |"
    yield "|---|" + "--:|" * len(found)
    for name in (name for names in FUNCTIONS.values() for name in names):
        cells = [
            _count([by_name[target][name]]) if name in by_name[target] else "-" for target in found
        ]
        if any(cell != "-" for cell in cells):
            yield f"| `{name}` | {' | '.join(cells)} |"
    totals = [f"**{_count(functions)}**" for functions in found.values()]
    yield f"| all | {' | '.join(totals)} |"
    for standing in Standing:
        numbers = [
            sum(judged.standing is standing for f in functions for judged in f.missing)
            for functions in found.values()
        ]
        yield f"| not taken: {standing.value} | {' | '.join(map(str, numbers))} |"


def _count(functions: Iterable[OfFunction]) -> str:
    counted = list(functions)
    taken, every = (sum(f.num_taken for f in counted), sum(f.num_all for f in counted))
    return f"{taken} / {every}" if every else "no branch"


def _missing(found: Mapping[str, Sequence[OfFunction]]) -> Iterator[str]:
    rows: dict[tuple[str, str, str, Standing, str], dict[str, list[str]]] = {}
    for target, functions in found.items():
        for judged in (judged for f in functions for judged in f.missing):
            key = (*judged.branch.key, judged.standing, judged.judgement)
            place = f"{Path(judged.file).name}:{judged.branch.line}"
            rows.setdefault(key, {}).setdefault(target, []).append(place)
    yield f"| function | condition | way | {' | '.join(found)} | judgement |"
    yield "|---|---|---|" + "---|" * len(found) + "---|"
    for (function, condition, way, standing, why), places in rows.items():
        cells = (", ".join(places.get(target, ["-"])) for target in found)
        text = condition.replace("|", "\\|")
        yield f"| `{function}` | `{text}` | {way} | {' | '.join(cells)} | {_words(standing, why)} |"


def _words(standing: Standing, judgement: str) -> str:
    name = {Standing.NO_PATH: "No path", Standing.BEHIND: "Behind another branch"}
    return f"**{name.get(standing, standing.value.capitalize())}**: {judgement}"


def unused(reasons: Sequence[Reason], found: Iterable[Sequence[OfFunction]]) -> list[Reason]:
    """Return the written judgements of branches that are taken, or that no release has."""
    missing = [judged.branch for functions in found for f in functions for judged in f.missing]
    return [reason for reason in reasons if not any(map(reason.is_about, missing))]


def problems(reasons: Sequence[Reason], found: Mapping[str, Sequence[OfFunction]]) -> list[str]:
    """Return what has to be seen to, a line each."""
    lines = [
        f"{target}: {judged.file}:{judged.branch.line}: {judged.branch.function}: "
        f"`{judged.branch.condition}` {judged.branch.way}: {judged.judgement}"
        for target, functions in found.items()
        for f in functions
        for judged in f.missing
        if judged.standing is Standing.OPEN
    ]
    lines += [
        f"{DATA.name}: {reason.function} `{reason.condition}` {reason.way}: judges nothing"
        for reason in unused(reasons, found.values())
    ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--target", action="append", metavar="T", help="default: the project's defaults"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep what is measured, and use it"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page")
    options = parser.parse_args(arguments)
    found: dict[str, list[OfFunction]] = {}
    paths: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            reasons = load_reasons()
            for target in options.target or DEFAULT_TARGETS:
                root, tests, lifted = measured(target, folder, options.jobs)
                found[target] = of_release(root, tests, lifted, reasons)
                paths[target] = lifted["paths"]
        except (CoverageError, BranchError, TargetError) as error:
            print(f"coverage_of_vllm: {error}", file=sys.stderr)
            return 2
    if options.write is not None:
        options.write.write_text(page(found, paths), encoding="utf-8")
    for target, functions in found.items():
        standings = Counter(judged.standing.value for f in functions for judged in f.missing)
        of_missing = ", ".join(f"{number} {what}" for what, number in standings.items())
        print(f"{target}: {_count(functions)} branches taken; not taken: {of_missing or 'none'}")
    to_do = problems(reasons if options.target is None else (), found)
    print("\n".join(to_do), end="\n" if to_do else "")
    return int(bool(to_do))


if __name__ == "__main__":
    sys.exit(main())
