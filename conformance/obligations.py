"""Verdicts of targets as the rows that the command line shows and writes, kept on disk."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diskcache

import models
import spec
from conformance import scenario
from conformance.driver import BindingError, Driver, core_driver
from conformance.expectations import EXPECTABLE, expected, where
from conformance.replay import Outcome, replay
from conformance.scenario import Scenario
from conformance.targets import Tree, cache_root
from models.loader import CORE_MODULES
from spec.assumptions import CHECKPOINT_BLOCKS, SPECULATIVE_BLOCKS
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS

if TYPE_CHECKING:
    from models.predict import LiftedTree

SCHEMA = 1
NOT_APPLICABLE = "NOT_APPLICABLE"

Row = dict[str, Any]
#: Modules beside ours and the spec that rows depend on.
_MADE_BY = ("obligations", "generate", "made_request", "predicted", "reached", "scenario")
#: Modules of ours that no row depends on: they check a proof that there is.
_NO_VERDICT_FROM = {"second_solver"}
#: A kind of step: a family with the tags that are told apart.
Kind = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Selection:
    """Which obligations are asked for; empty means all."""

    families: tuple[str, ...] = ()
    theorems: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    managers: tuple[str, ...] = ()

    def by_kind(self) -> Iterator[Selection]:
        """Yield what is asked of each kind of step, in the catalogue's order."""
        theorems = tuple(slug for slug in THEOREMS if slug in (self.theorems or THEOREMS))
        managers = tuple(slug for slug in MANAGERS if slug in (self.managers or MANAGERS))
        for family, tags in OBLIGATIONS:
            in_kinds = not self.kinds or (family, tags) in self.kinds
            if in_kinds and family in (self.families or (family,)) and theorems:
                yield Selection((family,), theorems, ((family, tags),), managers)

    def parts(self) -> Iterator[Selection]:
        """Yield what is settled together: of each kind of step, what is explored at once.

        Theorems about the gate are the last. What a coordinator adds up is made from what one
        manager does, so all managers are settled together.
        """
        for part in self.by_kind():
            (family,) = part.families
            about = [
                slug for slug in part.theorems if set(THEOREMS[slug].managers) & set(part.managers)
            ]
            of_gate = [
                slug
                for slug in about
                if THEOREMS[slug].asks_gate and THEOREMS[slug].why_not(family) is None
            ]
            others = [slug for slug in about if slug not in of_gate]
            for theorems in filter(None, (others, of_gate)):
                yield replace(part, theorems=tuple(theorems))

    def obligations(self) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
        """Yield manager, family, tags and theorem of each obligation, in the catalogue's order."""
        for part in self.parts():
            for manager, theorem in product(part.managers, part.theorems):
                if manager in THEOREMS[theorem].managers:
                    yield manager, *part.kinds[0], theorem


def settle(
    tree: Tree,
    selection: Selection,
    *,
    use_cache: bool = True,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Prove or refute a target's obligations and return a row each.

    What is loaded of a tree stays loaded, so that the next part of a selection finds it.

    Args:
        tree: The target.
        selection: Which obligations.
        use_cache: Whether to :func:`keep` the rows, part by part.
        on_progress: Told what is being worked on.

    Raises:
        CoreError: The tree cannot be loaded, or lacks a symbol that a step needs.
    """
    rows = []
    for part in selection.parts():
        found = sorted(_prove(tree, part, on_progress), key=_place_in_catalogue)
        rows += [_complete(tree, row) for row in found]
        if use_cache:
            keep(tree, part, found)
    return rows


def keep(tree: Tree, part: Selection, rows: Sequence[Row]) -> None:
    """Keep rows for :func:`settled_by_part`, but those that the next run may get further with."""
    decided = [row for row in rows if row["verdict"] != "UNKNOWN"]
    _Store(tree).write({_key_of(row): _incomplete(row) for row in decided})


def _place_in_catalogue(row: Row) -> tuple[int, int]:
    return list(MANAGERS).index(row["manager"]), list(THEOREMS).index(row["theorem"])


def check(tree: Tree) -> None:
    """Load a tree, so that one that cannot be judged is refused before any time is spent.

    Raises:
        CoreError: As :func:`settle`.
    """
    _loaded(tree, _fingerprint(tree))


def settled_before(tree: Tree, selection: Selection) -> list[Row] | None:
    """Return the rows of an earlier run, None unless all are there and nothing has changed."""
    parts = settled_by_part(tree, selection).values()
    return None if None in parts else [row for rows in parts for row in rows or ()]


def settled_by_part(
    tree: Tree, selection: Selection, *, use_cache: bool = True
) -> dict[Selection, list[Row] | None]:
    """Return the rows of earlier runs by part of the selection, None where one is missing."""
    parts = {part: [_key(*one) for one in part.obligations()] for part in selection.parts()}
    kept = _Store(tree).read([key for keys in parts.values() for key in keys]) if use_cache else {}
    return {
        part: [_complete(tree, kept[key]) for key in keys] if kept.keys() >= set(keys) else None
        for part, keys in parts.items()
    }


def compare(
    tree: Tree,
    part: Selection,
    baseline: Tree,
) -> Row:
    """Return a row on whether two targets' estimates can differ in one kind of step.

    Args:
        tree: The target.
        part: The kind of step, of :meth:`Selection.by_kind`.
        baseline: The other target.

    Raises:
        CoreError: As :func:`settle`.
    """
    ((family, tags),) = part.kinds
    return {
        "target": tree.target,
        "baseline": baseline.target,
        "family": family,
        "tags": list(tags),
        **_comparison(tree, baseline, family, tags),
    }


def keep_comparison(tree: Tree, part: Selection, baseline: Tree, row: Row) -> None:
    """Keep a row for :func:`compared_by_kind`, unless the next run may get further."""
    if row["comparison"] != "UNKNOWN":
        _Store(tree).write({_comparison_key(baseline, part): row})


def _comparison(tree: Tree, baseline: Tree, family: str, tags: tuple[str, ...]) -> Row:
    """Return what is known: EQUAL for all sizes, DIFFER with the least step, or why neither."""
    from models.compare import compare as compare_estimators
    from models.lift import NotUnderstood

    ours, theirs = (_loaded(one, _fingerprint(one))[0] for one in (tree, baseline))
    row: Row = {"comparison": "EQUAL", "situation": None, "estimates": None, "reason": None}
    for traits in (ours.traits, theirs.traits):
        reason = traits.why_not(family, tags)
        if reason is not None:
            return {**row, "comparison": "NOT_COMPARABLE", "reason": reason}
    try:
        found = compare_estimators(ours, theirs, family, tags)
    except NotUnderstood as error:
        return {**row, "comparison": "UNKNOWN", "reason": str(error)}
    if found.difference is not None:
        estimates = [found.difference.estimate, found.difference.other_estimate]
        situation = asdict(found.difference.situation)
        return {**row, "comparison": "DIFFER", "situation": situation, "estimates": estimates}
    if found.reason is not None:
        return {**row, "comparison": "UNKNOWN", "reason": found.reason}
    return row


def compared_by_kind(
    tree: Tree, baseline: Tree, selection: Selection, *, use_cache: bool = True
) -> dict[Selection, Row | None]:
    """Return the rows of earlier comparisons by part of the selection, None where missing."""
    keys = {part: _comparison_key(baseline, part) for part in selection.by_kind()}
    kept = _Store(tree).read(list(keys.values())) if use_cache else {}
    return {part: kept.get(key) for part, key in keys.items()}


def is_as_expected(row: Row) -> bool:
    """Whether a row's verdict is the expected one.

    A target without expectations expects PROVED of every theorem that is about it. What cannot be
    expected is never as expected, even where another target comes to the same.
    """
    verdict, wanted = row["verdict"], row["expected"]
    if wanted is None:
        return verdict in ("PROVED", NOT_APPLICABLE)
    return verdict in EXPECTABLE and bool(verdict == wanted)


def summary(rows: Sequence[Row]) -> str:
    """Return how many verdicts there are of each sort, in one line."""
    proved = sum(row["verdict"] == "PROVED" for row in rows)
    elsewhere = sum(row["verdict"] == NOT_APPLICABLE for row in rows)
    surprises = sum(not is_as_expected(row) for row in rows)
    parts = [f"{proved} proved", f"{len(rows) - proved - elsewhere} not"]
    parts += [f"{elsewhere} not applicable"] if elsewhere else []
    return f"{len(rows)} obligations: {', '.join(parts)}; {surprises} not as expected"


def document(rows: Sequence[Row], differences: Sequence[Row] | None = None) -> dict[str, Any]:
    """Return what `--json` writes; `differences` only where targets were compared."""
    from models.smt import SOLVER_VERSION

    versions = {
        "capproof": project_version(),
        "z3": SOLVER_VERSION,
        "python": platform.python_version(),
    }
    compared = {} if differences is None else {"differences": list(differences)}
    return {"schema": SCHEMA, "versions": versions, "obligations": list(rows), **compared}


def project_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("capproof")
    except PackageNotFoundError:
        return "not installed"


def _complete(tree: Tree, row: Row) -> Row:
    family = where(row["family"], row["tags"])
    wanted = expected(tree.target, row["manager"], family, row["theorem"])
    return {"target": tree.target, **row, "expected": wanted}


def _incomplete(row: Row) -> Row:
    """A row without what it is known by, and what depends on more than the tree."""
    return {key: value for key, value in row.items() if key not in ("target", "expected")}


def _prove(tree: Tree, selection: Selection, on_progress: Callable[[str], None]) -> Iterator[Row]:
    """Yield the rows of one kind of step."""
    from conformance.generate import refutation, refutation_at_production_sizes
    from models.prove import prove

    ((family, tags),) = selection.kinds
    on_progress(f"{tree.target} {family} {' '.join(tags)}".strip())
    lifted, real_code = _loaded(tree, _fingerprint(tree))
    found_obligations = prove(
        lifted, managers=selection.managers, kinds=selection.kinds, theorems=selection.theorems
    )
    for obligation in found_obligations:
        found = at_scale = seen = None
        if obligation.counterexample is not None:
            trees = {tree.target: lifted}
            found = refutation(tree.target, obligation, obligation.counterexample, trees)
            at_scale = refutation_at_production_sizes(tree.target, obligation, trees)
            seen = real_code.shows(found)
        yield {
            "manager": obligation.manager,
            "family": obligation.family,
            "tags": list(obligation.tags),
            "theorem": obligation.theorem,
            "verdict": obligation.verdict.value,
            "scope": obligation.scope,
            "params": {"S": list(SPECULATIVE_BLOCKS), "K": list(CHECKPOINT_BLOCKS)},
            "seconds": round(obligation.seconds, 6),
            "assumptions": list(obligation.assumptions),
            "scenario": None if found is None else scenario.to_json(found),
            "replay": seen,
            "scenario_at_production_sizes": (
                None if at_scale is None else scenario.to_json(at_scale)
            ),
            "reason": obligation.reason,
        }


@lru_cache(maxsize=2)
def _loaded(tree: Tree, fingerprint: str) -> tuple[LiftedTree, _RealCode]:
    """Load a tree once for all kinds of step; an edited one has another fingerprint."""
    from models.predict import LiftedTree

    return LiftedTree(tree.root), _RealCode(tree)


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

    def read(self, keys: Sequence[str]) -> dict[str, Row]:
        """Return the rows that are there by key, none if the store cannot be read."""
        if not self._folder.is_dir():
            return {}
        try:
            with diskcache.Cache(str(self._folder)) as cache:
                kept = {key: cache.get(f"{self._fingerprint} {key}") for key in keys}
            return {key: json.loads(text) for key, text in kept.items() if text is not None}
        except Exception:  # damaged, locked or read-only: proving again loses nothing
            return {}

    def write(self, rows: Mapping[str, Row]) -> None:
        """Keep rows by key, all or none; a damaged store is made anew.

        A store that cannot be written is left alone, since it only saves time.
        """
        texts = {f"{self._fingerprint} {key}": json.dumps(row) for key, row in rows.items()}
        with suppress(Exception):
            if not self._is_written(texts):
                self._remove_damaged()
                self._is_written(texts)

    def _is_written(self, texts: Mapping[str, str]) -> bool:
        """Write texts; whether the store is undamaged."""
        try:
            with diskcache.Cache(str(self._folder)) as cache, cache.transact():
                for key, text in texts.items():
                    cache[key] = text
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            return False
        return True

    def _remove_damaged(self) -> None:
        """Remove the store, unless another process has made it anew in the meantime."""
        from filelock import FileLock

        with FileLock(self._folder.with_suffix(".lock")):
            if not self._is_written({}):
                shutil.rmtree(self._folder, ignore_errors=True)


def obligation_of(row: Row) -> tuple[str, str, tuple[str, ...], str]:
    """Return the manager, the family with tags and the theorem of a row."""
    return row["manager"], row["family"], tuple(row["tags"]), row["theorem"]


def _key(manager: str, family: str, tags: Sequence[str], theorem: str) -> str:
    return f"{manager} {where(family, tuple(tags))} {theorem}"


def _key_of(row: Row) -> str:
    return _key(*obligation_of(row))


def _comparison_key(baseline: Tree, part: Selection) -> str:
    return f"{where(*part.kinds[0])} compared with {_fingerprint(baseline)}"


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
    files = [file for file in files if file.stem not in _NO_VERDICT_FROM]
    files += [Path(__file__).with_name(f"{name}.py") for name in _MADE_BY]
    for file in files:
        add(f"{file.parent.name}/{file.name}", file.read_bytes())
    for module in sorted(CORE_MODULES):
        file = tree.root / (module.replace(".", "/") + ".py")
        add(module, file.read_bytes() if file.is_file() else None)
    return digest.hexdigest()
