"""Verdicts of targets as the rows that the command line shows and writes, kept on disk."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diskcache

import models
import spec
from conformance import scenario
from conformance.expectations import expected, where
from conformance.targets import Tree, cache_root
from models.loader import CORE_MODULES
from spec.assumptions import CHECKPOINT_BLOCKS, SPECULATIVE_BLOCKS
from spec.theorems import OBLIGATIONS, THEOREMS

MANAGER = "mamba-align"
SCHEMA = 1

Row = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """Which obligations are asked for; empty means all."""

    families: tuple[str, ...] = ()
    theorems: tuple[str, ...] = ()

    def obligations(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield family, tags and theorem of each obligation, in the catalogue's order."""
        for family, tags in OBLIGATIONS:
            for theorem in THEOREMS:
                if (not self.families or family in self.families) and (
                    not self.theorems or theorem in self.theorems
                ):
                    yield family, tags, theorem


def settle(
    tree: Tree,
    selection: Selection,
    *,
    use_cache: bool = True,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Prove or refute a target's obligations and return a row each.

    Args:
        tree: The target.
        selection: Which obligations.
        use_cache: Whether to keep the rows for :func:`settled_before`.
        on_progress: Told what is being worked on.

    Raises:
        CoreError: The tree cannot be loaded, or lacks a symbol that a step needs.
    """
    rows = list(_prove(tree, selection, on_progress))
    if use_cache:
        _Store(tree.root).write(rows)
    return [_complete(tree, row) for row in rows]


def settled_before(tree: Tree, selection: Selection) -> list[Row] | None:
    """Return the rows of an earlier run, None unless all are there and nothing has changed."""
    rows = _Store(tree.root).read(selection)
    return None if rows is None else [_complete(tree, row) for row in rows]


def is_as_expected(row: Row) -> bool:
    """Whether a row's verdict is the expected one; a target without expectations expects PROVED."""
    return bool(row["verdict"] == (row["expected"] or "PROVED"))


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what `--json` writes."""
    from models.smt import SOLVER_VERSION

    versions = {
        "capproof": project_version(),
        "z3": SOLVER_VERSION,
        "python": platform.python_version(),
    }
    return {"schema": SCHEMA, "versions": versions, "obligations": list(rows)}


def project_version() -> str:
    """Return the version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("capproof")
    except PackageNotFoundError:
        return "not installed"


def _complete(tree: Tree, row: Row) -> Row:
    family = where(row["family"], row["tags"])
    wanted = expected(tree.target, MANAGER, family, row["theorem"])
    return {"target": tree.target, **row, "expected": wanted}


def _prove(tree: Tree, selection: Selection, on_progress: Callable[[str], None]) -> Iterator[Row]:
    from conformance.generate import refutation, refutation_at_production_sizes
    from models.predict import LiftedTree
    from models.prove import prove

    lifted = LiftedTree(tree.root)
    for obligation in prove(
        tree.root,
        explorer=lifted.exploration,
        families=selection.families,
        theorems=selection.theorems,
        on_progress=lambda text: on_progress(f"{tree.target} {text}"),
    ):
        found = at_scale = None
        if obligation.counterexample is not None:
            trees = {tree.target: lifted}
            found = refutation(tree.target, obligation, obligation.counterexample, trees)
            at_scale = refutation_at_production_sizes(tree.target, obligation, trees)
        yield {
            "manager": MANAGER,
            "family": obligation.family,
            "tags": list(obligation.tags),
            "theorem": obligation.theorem,
            "verdict": obligation.verdict.value,
            "scope": obligation.scope,
            "params": {"S": list(SPECULATIVE_BLOCKS), "K": list(CHECKPOINT_BLOCKS)},
            "seconds": round(obligation.seconds, 4),
            "assumptions": list(obligation.assumptions),
            "scenario": None if found is None else scenario.to_json(found),
            "scenario_at_production_sizes": (
                None if at_scale is None else scenario.to_json(at_scale)
            ),
            "reason": obligation.reason,
        }


class _Store:
    """Rows of earlier runs, by all that they depend on: the core's text, ours, the solver."""

    def __init__(self, root: Path) -> None:
        self._fingerprint = _fingerprint(root)
        self._folder = cache_root() / "verdicts"

    def read(self, selection: Selection) -> list[Row] | None:
        """Return the rows of a selection, None if one is missing or the store cannot be read."""
        if not self._folder.is_dir():
            return None
        try:
            with diskcache.Cache(str(self._folder)) as cache:
                rows = [cache.get((self._fingerprint, *key)) for key in selection.obligations()]
        except Exception:  # damaged, locked or read-only: proving again loses nothing
            return None
        return None if None in rows else rows

    def write(self, rows: Sequence[Row]) -> None:
        """Keep rows; a store that cannot be written is left alone, since it only saves time."""
        try:
            with diskcache.Cache(str(self._folder)) as cache:
                for row in rows:
                    key = (row["family"], tuple(row["tags"]), row["theorem"])
                    cache.set((self._fingerprint, *key), row)
        except Exception:
            return


def _fingerprint(root: Path) -> str:
    from importlib.metadata import version

    digest = hashlib.sha256()
    digest.update(version("z3-solver").encode())
    ours = (Path(package.__file__ or "").parent for package in (spec, models))
    files = [file for folder in ours for file in sorted(folder.glob("*.py"))]
    files.append(Path(__file__).with_name("generate.py"))
    files += [root / (module.replace(".", "/") + ".py") for module in sorted(CORE_MODULES)]
    for file in files:
        digest.update(file.name.encode())
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()
