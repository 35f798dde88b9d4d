"""Settling the obligations of several targets, spread over processes and kept for later runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from conformance.commands.output import cannot_run_on, progress
from conformance.targets import Tree
from spec.theorems import THEOREMS

#: Families whose kinds of step take the longest to settle.
_LONG_FAMILIES = ("hit-full", "resumed", "external-sync")


def settle_all(
    trees: Sequence[Tree], selection: Any, *, use_cache: bool, jobs: int = os.cpu_count() or 1
) -> list[dict[str, Any]]:
    """Return the rows of all targets in the catalogue's order, kept ones where there are any."""
    from conformance.obligations import keep, settle, settled_by_part

    found = {
        (tree, part): rows
        for tree in trees
        for part, rows in settled_by_part(tree, selection, use_cache=use_cache).items()
    }
    _complete(found, partial(settle, use_cache=False), keep if use_cache else None, jobs)
    return [row for rows in found.values() for row in rows or ()]


def compare_all(
    trees: Sequence[Tree], baseline: Tree, selection: Any, *, use_cache: bool, jobs: int
) -> list[dict[str, Any]]:
    """Return how each target's estimator compares with the baseline's, by kind of step."""
    from conformance.obligations import compare, compared_by_kind, keep_comparison

    found = {
        (tree, part, baseline): row
        for tree in trees
        if tree != baseline
        for part, row in compared_by_kind(tree, baseline, selection, use_cache=use_cache).items()
    }
    _complete(found, compare, keep_comparison if use_cache else None, jobs)
    return [row for row in found.values() if row is not None]


def _complete(
    found: dict[Any, Any],
    do: Callable[..., Any],
    keep: Callable[..., None] | None,
    jobs: int,
) -> None:
    """Fill in the results that are None, each in a process of its own.

    Args:
        found: A result by work: the target, its part of the selection, and what else ``do`` takes.
        do: Does one work.
        keep: Keeps a work's result for later runs.
        jobs: Number of processes at a time.
    """
    from conformance.obligations import check
    from conformance.parallel import ProcessLost, spread

    missing = [work for work, result in found.items() if result is None]
    if not missing:
        return
    with progress() as on_progress, cannot_run_on(ProcessLost):
        on_progress(f"{len(missing)} questions in {min(jobs, len(missing))} processes")
        for tree in dict.fromkeys(tree for tree, *_ in missing if tree.release is None):
            check(tree)
        done = spread(do, _longest_first(missing), jobs)
        for number, (work, result) in enumerate(done, start=1):
            found[work] = result
            if keep is not None:
                keep(*work, result)
            on_progress(f"{number} of {len(missing)} questions settled, last {_about(work)}")


def _about(work: Any) -> str:
    tree, part, *_ = work
    ((family, tags),) = part.kinds
    return f"{tree.target} {' with '.join((family, *tags))}"


def _longest_first(works: Sequence[Any]) -> list[Any]:
    """Order the work so that no long one is begun when all others are done."""
    return sorted(works, key=lambda work: _cost_rank(work[1]))


def _cost_rank(part: Any) -> tuple[bool, ...]:
    """A rank that is lower for what takes longer, by what makes it hard."""
    ((family, tags),) = part.kinds
    is_gate = bool(part.theorems) and all(THEOREMS[slug].asks_gate for slug in part.theorems)
    return not is_gate, family not in _LONG_FAMILIES, "overwide" not in tags
