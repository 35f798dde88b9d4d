"""`capproof explore`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from conformance.commands.arguments import CannotRun, resolved, targets_option
from conformance.ending import AS_EXPECTED, NOT_AS_EXPECTED
from conformance.targets import DEFAULT_TARGETS, Tree

#: Violations of a target that `explore` shows.
_MOST_LINES = 10


def resolved_to_live(targets: Sequence[str]) -> list[Tree]:
    """Return the trees of targets, all of which lives are described for."""
    from conformance.life_files import NOT_LIVED

    trees = resolved(targets)
    for tree in trees:
        if tree.release in NOT_LIVED:
            raise CannotRun(f"{tree.target}: lives are not described for releases before 0.28.0")
    return trees


@click.command()
@targets_option
@click.option(
    "--blocks",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Pool size, null block included; 0: the least that a request fits by itself.",
)
@click.option(
    "--rules", type=click.IntRange(min=1), default=6, metavar="N", help="Rules in a life."
)
@click.option("--requests", type=click.IntRange(min=1), default=2, metavar="N")
@click.option(
    "--steps-in-flight",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Steps whose outputs are not known when the next is scheduled; without drafts.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, metavar="N", help="joblib workers.")
@click.option("--backend", metavar="NAME", help="joblib backend; default: processes here.")
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Journal of what is done: read first, added to.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the first life found with a violation that is not known.",
)
def explore(
    targets: tuple[str, ...],
    blocks: int,
    rules: int,
    requests: int,
    steps_in_flight: int,
    jobs: int,
    backend: str | None,
    resume: Path | None,
    save: Path | None,
) -> int:
    """Live every life up to a size on the real code; 1 where a violation is not known."""
    from dataclasses import replace

    from conformance import explore as exploring
    from conformance.driver import DriverError
    from conformance.life_files import dumps
    from conformance.report import counted

    to_save, worst = save, AS_EXPECTED
    for tree in resolved_to_live(targets or DEFAULT_TARGETS):
        try:
            driver = exploring.driver_of(str(tree.root))
            has_checkpoints = "num_prefill_checkpoint_blocks" in driver.bindings.spec_arguments
            setting = exploring.small_setting(blocks, requests, has_checkpoints, steps_in_flight)
            if not blocks:
                setting = exploring.tight(driver, replace(setting, num_gpu_blocks=2))
            found = exploring.explore_in_parallel(
                tree.root,
                setting,
                exploring.Bounds(rules),
                tree.target,
                jobs=jobs,
                journal=resume,
                backend=backend,
            )
        except DriverError as error:
            raise CannotRun(f"{tree.target}: {error}") from None
        click.echo(
            f"{tree.target}: {counted(setting.num_gpu_blocks, 'block')}, "
            f"{counted(requests, 'request')}, {counted(rules, 'rule')}: "
            f"{counted(found.num_states, 'state')}, {found.num_lives:,} lives, "
            f"{found.num_known:,} with a known fault, "
            f"{counted(len(found.violations), 'violation')}"
        )
        for line, _ in found.violations[:_MOST_LINES]:
            click.echo(f"  {line}")
        if len(found.violations) > _MOST_LINES:
            click.echo(f"  and {len(found.violations) - _MOST_LINES} more")
        if found.violations and to_save is not None:
            to_save.write_text(dumps(found.violations[0][1]))
            to_save = None
        worst = NOT_AS_EXPECTED if found.violations else worst
    return worst
