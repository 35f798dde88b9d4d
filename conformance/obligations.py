"""Verdicts of targets as the rows that the command line shows and writes, kept on disk."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import diskcache

import models
import spec
from conformance import scenario
from conformance.bindings import OWN_METHODS
from conformance.driver import BindingError, Driver, core_driver
from conformance.expectations import EXPECTABLE, MANAGER, expected, where
from conformance.replay import Outcome, replay
from conformance.scenario import Scenario
from conformance.targets import CORE_FILE, Tree, cache_root
from models.loader import CORE_MODULES, CoreError
from spec.assumptions import CHECKPOINT_BLOCKS, SPECULATIVE_BLOCKS
from spec.theorems import OBLIGATIONS, THEOREMS

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
    _check_own_methods(tree)
    rows = list(_prove(tree, selection, on_progress))
    if use_cache:
        _Store(tree).write(rows)
    return [_complete(tree, row) for row in rows]


def settled_before(tree: Tree, selection: Selection) -> list[Row] | None:
    """Return the rows of an earlier run, None unless all are there and nothing has changed."""
    rows = _Store(tree).read(selection)
    return None if rows is None else [_complete(tree, row) for row in rows]


def is_as_expected(row: Row) -> bool:
    """Whether a row's verdict is the expected one; a target without expectations expects PROVED.

    What cannot be expected is never as expected, even where another target comes to the same.
    """
    verdict = row["verdict"]
    return verdict in EXPECTABLE and bool(verdict == (row["expected"] or "PROVED"))


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
    try:
        return version("capproof")
    except PackageNotFoundError:
        return "not installed"


def _complete(tree: Tree, row: Row) -> Row:
    family = where(row["family"], row["tags"])
    wanted = expected(tree.target, MANAGER, family, row["theorem"])
    return {"target": tree.target, **row, "expected": wanted}


def _check_own_methods(tree: Tree) -> None:
    """Refuse a tree whose manager inherits what it is judged for: that counts by another rule."""
    file = tree.root / CORE_FILE
    try:
        content = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # loading it says what is wrong
    for node in content.body:
        if isinstance(node, ast.ClassDef) and node.name in OWN_METHODS:
            own = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            for method in OWN_METHODS[node.name]:
                if method not in own:
                    raise CoreError(f"{file}: no {node.name}.{method} here (renamed?)")


def _prove(tree: Tree, selection: Selection, on_progress: Callable[[str], None]) -> Iterator[Row]:
    from conformance.generate import refutation, refutation_at_production_sizes
    from models.predict import LiftedTree
    from models.prove import prove

    lifted, real_code = LiftedTree(tree.root), _RealCode(tree)
    for obligation in prove(
        lifted,
        families=selection.families,
        theorems=selection.theorems,
        on_progress=lambda text: on_progress(f"{tree.target} {text}"),
    ):
        found = at_scale = seen = None
        if obligation.counterexample is not None:
            trees = {tree.target: lifted}
            found = refutation(tree.target, obligation, obligation.counterexample, trees)
            at_scale = refutation_at_production_sizes(tree.target, obligation, trees)
            seen = real_code.shows(found)
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
            "replay": seen,
            "scenario_at_production_sizes": (
                None if at_scale is None else scenario.to_json(at_scale)
            ),
            "reason": obligation.reason,
        }


class _RealCode:
    """The tree's own manager, run natively (core tier); loaded when it is first asked."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._driver: Driver | None = None

    def shows(self, found: Scenario) -> str:
        """Return what it shows of a counterexample: `reproduced`, or another outcome and why."""
        try:
            self._driver = self._driver or core_driver(self._tree.root)
        except BindingError as error:
            return f"{Outcome.COULD_NOT_RUN.value}: {error}"
        seen = replay(found, self._driver, self._tree.target)
        if seen.outcome is not Outcome.REPRODUCED:
            return f"{seen.outcome.value}: {seen.detail}"
        if seen.theorem_holds is not False:
            return f"{Outcome.DISAGREES.value}: it holds in all that two chunks bring about"
        return seen.outcome.value


class _Store:
    """Rows of earlier runs, by all that they depend on: target, the core's text, ours, the solver.

    Rows name their target and hold its scenario, so two targets with the same text share none.
    """

    def __init__(self, tree: Tree) -> None:
        self._fingerprint = _fingerprint(tree)
        self._folder = cache_root() / "verdicts"

    def read(self, selection: Selection) -> list[Row] | None:
        """Return the rows of a selection, None if one is missing or the store cannot be read."""
        if not self._folder.is_dir():
            return None
        try:
            with diskcache.Cache(str(self._folder)) as cache:
                return [json.loads(cache[self._key(*wanted)]) for wanted in selection.obligations()]
        except Exception:  # missing, damaged, locked or read-only: proving again loses nothing
            return None

    def write(self, rows: Sequence[Row]) -> None:
        """Keep rows that a second run would come to again; a damaged store is made anew.

        A store that cannot be written is left alone, since it only saves time.
        """
        for is_retry in (False, True):
            try:
                with diskcache.Cache(str(self._folder)) as cache:
                    for row in rows:
                        if row["verdict"] != "UNKNOWN":  # the next run may get further
                            key = self._key(row["family"], tuple(row["tags"]), row["theorem"])
                            cache[key] = json.dumps(row)
                return
            except sqlite3.DatabaseError as error:
                is_damaged = not isinstance(error, sqlite3.OperationalError)
                if is_retry or not is_damaged:
                    return
                shutil.rmtree(self._folder, ignore_errors=True)
            except Exception:
                return

    def _key(self, family: str, tags: tuple[str, ...], theorem: str) -> str:
        return f"{self._fingerprint} {where(family, tags)} {theorem}"


def _fingerprint(tree: Tree) -> str:
    digest = hashlib.sha256()

    def add(name: str, content: bytes | None) -> None:
        size = "absent" if content is None else len(content)
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
        digest.update(content or b"")

    add("target", f"{tree.target}\0{tree.root}".encode("utf-8", "surrogateescape"))
    add("versions", f"{SCHEMA} {platform.python_version()} {version('z3-solver')}".encode())
    ours = [Path(package.__file__ or "").parent for package in (spec, models)]
    files = [file for folder in ours for file in sorted(folder.glob("*.py"))]
    files += [Path(__file__), *map(Path(__file__).with_name, ("generate.py", "scenario.py"))]
    for file in files:
        add(f"{file.parent.name}/{file.name}", file.read_bytes())
    for module in sorted(CORE_MODULES):
        file = tree.root / (module.replace(".", "/") + ".py")
        add(module, file.read_bytes() if file.is_file() else None)
    return digest.hexdigest()
