"""`capproof report`: the verdicts, counterexamples and charts of targets as a static site."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("report")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="T",
    help="vllm==X.Y.Z, path:DIR or installed; may be repeated.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report"),
    show_default=True,
    help="Folder that the site is written into; it holds nothing else.",
)
@click.option("--no-cache", is_flag=True, help="Prove again even if nothing changed.")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, metavar="N")
def report(targets: tuple[str, ...], out: Path, no_cache: bool, jobs: int) -> int:
    """Write verdicts, counterexamples and charts as a static site that needs no network."""
    from conformance import cli
    from conformance.obligations import Selection, summary
    from conformance.site import output
    from conformance.site.build import build
    from conformance.targets import DEFAULT_TARGETS

    with cli._cannot_run_on(output.ReportError):
        output.check_folder(out)
        trees = cli._resolved(targets or DEFAULT_TARGETS)
        rows = cli._settle_all(trees, Selection(), use_cache=not no_cache, jobs=jobs)
        with cli._progress() as on_progress:
            files = build(rows, trees, on_progress)
        num_changed = output.write(files, out)
    console = cli._console()
    cli._print(console, summary(rows))
    cli._print(console, f"{out / 'index.html'}: {len(files)} files, {num_changed} changed")
    return cli.AS_EXPECTED
