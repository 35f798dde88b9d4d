"""Which branches of a tree's files the lifted runs take, over every kind of step that is explored.

    python scripts/lifted_branches.py ROOT FILE.json

The paths of a kind are shown to be all there are, so what is taken on none of them no step of it
takes. coverage.py watches: lifted code keeps the lines of the tree. What is looked at only to see
both sides of a connective counts as taken, too, which can only make more of a branch than there is.
Beside the branches stand the lines at which a term was asked whether it is true: at any other line
the way was settled by how the run is set up.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import coverage
from coverage.python import PythonFileReporter

from models.lift import NotUnderstood
from models.loader import COORDINATOR, INTERFACE, KV_CACHE_MANAGER, MANAGERS
from models.path import Path as LiftedPath
from models.predict import LiftedTree
from models.term import Bool
from models.traits import Traits
from spec.theorems import MANAGERS as KINDS_OF_MANAGER
from spec.theorems import OBLIGATIONS, THEOREMS, Asks

#: Files that are looked at, below the tree's root.
FILES = tuple(
    f"{module.replace('.', '/')}.py"
    for module in (MANAGERS, INTERFACE, COORDINATOR, KV_CACHE_MANAGER)
)

#: What is explored at once: a manager, a family with its tags, and what is done with the request.
Kind = tuple[str, str, tuple[str, ...], Asks]


def kinds_of(traits: Traits) -> Iterator[Kind]:
    """Yield all that `capproof prove` explores of a tree."""
    for family, tags in OBLIGATIONS:
        if traits.why_not(family, tags) is not None:
            continue
        for asks in Asks:
            for manager in KINDS_OF_MANAGER:
                if any(
                    theorem.asks is asks
                    and manager in theorem.managers
                    and theorem.why_not(family, tags) is None
                    and traits.why_not(family, tags, theorem.slug) is None
                    for theorem in THEOREMS.values()
                ):
                    yield manager, family, tags, asks


class _Asked:
    """Notes the lines of the tree at which a term is asked whether it is true."""

    def __init__(self, files: frozenset[str]) -> None:
        self.lines: dict[str, set[int]] = {file: set() for file in files}

    def __enter__(self) -> _Asked:
        decide = self._decide = LiftedPath.decide
        lines = self.lines

        def noted(path: LiftedPath, formula: Bool) -> bool:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename not in lines:
                frame = frame.f_back
            if frame is not None:
                lines[frame.f_code.co_filename].add(frame.f_lineno)
            return decide(path, formula)

        LiftedPath.decide = noted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        LiftedPath.decide = self._decide  # type: ignore[method-assign]


def explored(
    root: Path, data_file: Path, kinds: Callable[[Traits], Iterable[Kind]] = kinds_of
) -> dict[str, Any]:
    """Explore kinds of step of a tree, watched by coverage.py.

    Args:
        root: Folder holding `vllm/`.
        data_file: Where coverage.py may write.
        kinds: What is explored of a tree; all there is, if left out.

    Returns:
        `files`: by path below the root, lines that were run, lines at which a term was asked, and
        branches, each with the kinds that take it. `gave_up`: by kind, why its paths are not shown
        to be all. `paths`: how many there are.
    """
    files = [str(root / file) for file in FILES if (root / file).is_file()]
    cov = coverage.Coverage(str(data_file), branch=True, include=files, config_file=False)
    gave_up: dict[str, str] = {}
    paths = 0
    with cov.collect(), _Asked(frozenset(files)) as asked:
        tree = LiftedTree(root)
        for manager, family, tags, asks in kinds(tree.traits):
            kind = " ".join((manager, family, *tags, *([asks.value] * (asks is not Asks.STEP))))
            print(kind, file=sys.stderr, flush=True)
            cov.switch_context(kind)
            try:
                of_kind = tree.explorations_of(family, tags, asks=asks, manager=manager)
                paths += sum(len(exploration.paths) for exploration in of_kind)
            except NotUnderstood as error:
                gave_up[kind] = str(error).replace(f"{root}/", "")
    cov.save()
    found = {file: _of_file(cov, root / file, asked.lines) for file in FILES}
    return {"files": found, "gave_up": gave_up, "paths": paths}


def _of_file(cov: coverage.Coverage, file: Path, asked: dict[str, set[int]]) -> dict[str, Any]:
    reporter, data = PythonFileReporter(str(file), cov), cov.get_data()
    kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
    lines: set[int] = set()
    for kind in sorted(data.measured_contexts()):
        data.set_query_context(kind)
        lines |= reporter.translate_lines(data.lines(str(file)) or ())
        for arc in reporter.translate_arcs(data.arcs(str(file)) or ()):
            kinds[arc].append(kind or "loading")
    return {
        "lines": sorted(lines),
        "asked": sorted(reporter.translate_lines(asked.get(str(file), ()))),
        "taken": [[*arc, of] for arc, of in sorted(kinds.items())],
    }


def main() -> None:
    root, out = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        found = explored(root, Path(folder) / "data")
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
