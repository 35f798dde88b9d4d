"""`capproof conform`."""

from __future__ import annotations

from pathlib import Path

import click

from conformance.commands.arguments import GENERATED_TESTS, targets_option, tier_option
from conformance.targets import DEFAULT_TARGETS


@click.command()
@targets_option
@tier_option
@click.option(
    "--tests",
    "tests_dir",
    type=click.Path(path_type=Path),
    default=GENERATED_TESTS,
    help="Folder that gen-tests wrote. Default: the project's.",
)
@click.option("--against", metavar="T", help="Expect a checkout to have this target's faults.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def conform(
    targets: tuple[str, ...],
    tier: str,
    tests_dir: Path,
    against: str | None,
    device: str,
    pytest_args: tuple[str, ...],
) -> int:
    """Run the generated tests on the real managers; what follows -- goes to pytest."""
    from conformance.conform import run

    return run(
        targets or DEFAULT_TARGETS, tier, pytest_args, tests_dir, device=device, against=against
    )
