"""`capproof prove`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from conformance.commands.arguments import (
    CannotRun,
    check_names,
    check_writable,
    no_cache_option,
    resolved,
    targets_option,
)
from conformance.commands.output import (
    cannot_run_on,
    keep_scenarios,
    new_console,
    print_line,
    progress,
    write_whole,
)
from conformance.commands.settling import compare_all, settle_all
from conformance.ending import AS_EXPECTED, NOT_AS_EXPECTED
from conformance.targets import DEFAULT_TARGETS, Tree


@click.command()
@targets_option
@click.option("--against", metavar="T", help="Expect the verdicts of this target.")
@click.option("--manager", "managers", multiple=True, metavar="M", help="Default: all modelled.")
@click.option("--family", "families", multiple=True, metavar="F", help="Default: all.")
@click.option("--theorem", "theorems", multiple=True, metavar="SLUG", help="Default: all.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write verdicts.")
@click.option("--matrix", type=click.Path(path_type=Path), help="Also write a page of tables.")
@click.option("--junit", type=click.Path(path_type=Path), help="Also write JUnit XML.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Also write a summary.")
@click.option("--sarif", type=click.Path(path_type=Path), help="Also write SARIF annotations.")
@no_cache_option
@click.option(
    "--crosscheck",
    is_flag=True,
    help="Check proofs with cvc5 too, and counterexamples on the real code.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, metavar="N")
def prove(
    targets: tuple[str, ...],
    against: str | None,
    managers: tuple[str, ...],
    families: tuple[str, ...],
    theorems: tuple[str, ...],
    json_file: Path | None,
    matrix: Path | None,
    junit: Path | None,
    markdown: Path | None,
    sarif: Path | None,
    no_cache: bool,
    crosscheck: bool,
    jobs: int,
) -> int:
    """Settle each theorem for each kind of step of each target."""
    from conformance.ci_reports import reports, same_file
    from conformance.matrix import page, traits_in, verdicts_of
    from conformance.obligations import Selection, document, is_as_expected, summary
    from conformance.outcomes import advice
    from conformance.report import show_differences, show_unproved, show_verdicts
    from models import second_solver

    check_names(managers, families, theorems)
    selection = Selection(families, theorems, managers=managers)
    if not list(selection.obligations()):
        raise CannotRun("nothing to prove: no obligation is in this selection")
    outputs = {"--json": json_file, "--matrix": matrix}
    outputs |= {"--junit": junit, "--markdown": markdown, "--sarif": sarif}
    for option, file in outputs.items():
        check_writable(option, file)
    if (pair := same_file(outputs)) is not None:
        raise CannotRun(f"{pair[0]} and {pair[1]} name the same file; name two")
    if crosscheck:
        with cannot_run_on(second_solver.SecondSolverMissing):
            second_solver.require()
    trees = resolved(targets or DEFAULT_TARGETS)
    baseline = resolved((against,))[0] if against else None
    wanted = [*trees, *([baseline] if baseline and baseline not in trees else [])]
    rows = settle_all(wanted, selection, use_cache=not no_cache, jobs=jobs)
    differences = None
    if baseline is not None:
        rows = _expecting(rows, baseline.target, {tree.target for tree in trees})
        differences = compare_all(trees, baseline, selection, use_cache=not no_cache, jobs=jobs)
    if crosscheck:
        rows = _crosschecked(rows, trees, jobs)
    if json_file is not None:
        write_whole(json_file, json.dumps(document(rows, differences), indent=2) + "\n")
    if matrix is not None:
        write_whole(matrix, page(verdicts_of(rows), {t.target: traits_in(t.root) for t in trees}))
    for file, text in reports(outputs, rows, {t.target: t.root for t in trees}):
        write_whole(file, text)
    console, kept = new_console(), keep_scenarios(rows)
    show_verdicts(console, rows)
    show_unproved(console, rows, kept)
    show_differences(console, differences or ())
    print_line(console, summary(rows))
    surprises = any(not is_as_expected(row) for row in rows)
    unconfirmed = crosscheck and not _show_crosscheck(console, rows)
    if (line := advice(rows, kept)) is not None:
        print_line(console, line)
    return NOT_AS_EXPECTED if surprises or unconfirmed else AS_EXPECTED


def _expecting(
    rows: Sequence[dict[str, Any]], baseline: str, shown: set[str]
) -> list[dict[str, Any]]:
    """Rows of the shown targets, each expected to have the baseline's verdict.

    Nothing is expected where the baseline has no such step.
    """
    from conformance.obligations import obligation_of

    verdicts = {
        obligation_of(row): None if row["verdict"] == "NOT_APPLICABLE" else row["verdict"]
        for row in rows
        if row["target"] == baseline
    }
    return [
        {**row, "expected": verdicts[obligation_of(row)]} for row in rows if row["target"] in shown
    ]


def _crosschecked(
    rows: Sequence[dict[str, Any]], trees: Sequence[Tree], jobs: int
) -> list[dict[str, Any]]:
    """Return the rows with what the second check says, each kind of step in a process of its own.

    What took longest to settle is checked first.
    """
    from conformance.crosscheck import crosscheck
    from conformance.expectations import where
    from conformance.obligations import obligation_of
    from conformance.parallel import ProcessLost, spread

    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        kind = where(row["family"], row["tags"])
        by_kind.setdefault((row["target"], kind), []).append(row)
    tree_of = {tree.target: tree for tree in trees}
    works = [(tree_of[target], of_kind) for (target, _), of_kind in by_kind.items()]
    works.sort(key=lambda work: -sum(row["seconds"] for row in work[1]))
    checked = {}
    with progress() as on_progress, cannot_run_on(ProcessLost):
        on_progress(f"{len(works)} kinds of step to check in {min(jobs, len(works))} processes")
        for number, (_, found) in enumerate(spread(crosscheck, works, jobs), start=1):
            checked |= {(row["target"], obligation_of(row)): row for row in found}
            on_progress(f"{number} of {len(works)} kinds of step checked")
    return [checked[row["target"], obligation_of(row)] for row in rows]


def _show_crosscheck(console: Any, rows: Sequence[dict[str, Any]]) -> bool:
    """Print what the second check came to; whether it agrees with every verdict."""
    from conformance.crosscheck import AGREES
    from conformance.report import verdict_line

    rows = [row for row in rows if row["verdict"] != "NOT_APPLICABLE"]
    unconfirmed = [row for row in rows if row["crosscheck"] != AGREES]
    for row in unconfirmed:
        said = row["crosscheck"] or "nothing to check"
        console.print(f"CROSSCHECK {said}: {verdict_line(row)}", markup=False, soft_wrap=True)
    console.print(
        f"crosscheck: {len(rows) - len(unconfirmed)} of {len(rows)} verdicts confirmed",
        highlight=False,
    )
    return not unconfirmed
