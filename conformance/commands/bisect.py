"""`capproof bisect`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from conformance.commands.arguments import CannotRun, check_names
from conformance.commands.output import (
    cannot_run_on,
    keep_scenarios,
    new_console,
    print_line,
    status_on,
)
from conformance.ending import AS_EXPECTED, NOT_AS_EXPECTED
from spec.theorems import THEOREMS


@click.command()
@click.option(
    "--repo",
    type=click.Path(path_type=Path),
    required=True,
    metavar="CHECKOUT",
    help="A clone of vLLM; it is only read.",
)
@click.option("--good", required=True, metavar="REV", help="Where the theorem is proved.")
@click.option("--bad", required=True, metavar="REV", help="Where it is refuted.")
@click.option("--theorem", required=True, metavar="SLUG")
@click.option("--family", metavar="F", help="Default: all.")
@click.option("--manager", metavar="M", help="Default: the first that the theorem is about.")
def bisect(
    repo: Path, good: str, bad: str, theorem: str, family: str | None, manager: str | None
) -> int:
    """Name the first commit of a clone that breaks a theorem, or that mends it."""
    from conformance import bisect as bisecting
    from conformance.obligations import Selection
    from conformance.report import show_unproved

    families = (family,) if family else ()
    check_names((manager,) if manager else (), families, (theorem,))
    managers = (manager or THEOREMS[theorem].managers[0],)
    if managers[0] not in THEOREMS[theorem].managers:
        raise CannotRun(f"{theorem} is not about the manager {managers[0]}")
    console = new_console()
    with cannot_run_on(bisecting.BisectError), status_on(console) as on_progress:
        found = bisecting.bisect(
            repo,
            good,
            bad,
            Selection(families, (theorem,), managers=managers),
            on_judged=lambda judged: print_line(console, bisecting.step_line(judged)),
            on_progress=on_progress,
        )
    for line in bisecting.closing_lines(found):
        print_line(console, line)
    rows = [row for row in found.refuted.rows if row["verdict"] == "REFUTED"]
    show_unproved(console, rows, {})
    for file in keep_scenarios(rows).values():
        command = shlex.join(["capproof", "replay", file, "--target", f"path:{repo}"])
        print_line(console, f"  with {found.refuted.commit.short} checked out: {command}")
    return AS_EXPECTED if found.first is not None else NOT_AS_EXPECTED
