"""`capproof report`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from conformance.commands.arguments import no_cache_option, resolved, targets_option
from conformance.commands.output import cannot_run_on, new_console, print_line, progress
from conformance.commands.settling import settle_all
from conformance.ending import AS_EXPECTED, NOT_AS_EXPECTED
from conformance.targets import DEFAULT_TARGETS


@click.command()
@targets_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report"),
    show_default=True,
    help="Folder that the site is written into; it holds nothing else.",
)
@no_cache_option
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, metavar="N")
def report(targets: tuple[str, ...], out: Path, no_cache: bool, jobs: int) -> int:
    """Write verdicts, counterexamples and charts as a static site that needs no network."""
    from conformance.obligations import Selection, is_as_expected, summary
    from conformance.site import output
    from conformance.site.build import build

    with cannot_run_on(output.ReportError):
        output.check_folder(out)
        trees = resolved(targets or DEFAULT_TARGETS)
        rows = settle_all(trees, Selection(), use_cache=not no_cache, jobs=jobs)
        with progress() as on_progress:
            files = build(rows, trees, on_progress)
        num_changed = output.write(files, out)
    console = new_console()
    print_line(console, summary(rows))
    print_line(console, f"{out / 'index.html'}: {len(files)} files, {num_changed} changed")
    return AS_EXPECTED if all(map(is_as_expected, rows)) else NOT_AS_EXPECTED
