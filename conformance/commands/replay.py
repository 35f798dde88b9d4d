"""`capproof replay`: a scenario, a life or a workload on the real code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from conformance.commands.arguments import (
    CannotRun,
    check_writable,
    resolved,
    targets_option,
    tier_option,
)
from conformance.commands.lives import resolved_to_live
from conformance.commands.output import new_console, print_line, write_whole
from conformance.commands.pictures import check_one, check_svg, draw_option, draw_svg_option
from conformance.commands.workloads import run_workloads
from conformance.ending import AS_EXPECTED, NOT_AS_EXPECTED
from conformance.targets import DEFAULT_TARGETS, Tree


@click.command()
@click.argument("scenario_file", type=click.Path(path_type=Path), metavar="SCENARIO.json")
@targets_option
@tier_option
@draw_option
@draw_svg_option
@click.option(
    "--shrink", is_flag=True, help="First make it smaller, while it breaks the same theorem."
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the scenario that --shrink ends with.",
)
def replay(
    scenario_file: Path,
    targets: tuple[str, ...],
    tier: str,
    draw: bool,
    draw_svg: Path | None,
    shrink: bool,
    save: Path | None,
) -> int:
    """Replay a scenario, by default where it shows a fault, or a life, on the real manager."""
    from conformance import drawing, life_files, workload
    from conformance.picture import picture
    from conformance.reading import kind_of
    from conformance.replay import Outcome, replay_in
    from conformance.report import show_replay
    from conformance.scenario import load
    from conformance.svg import svg

    kind = None
    with suppress(OSError, ValueError):  # `load` says what is wrong with it.
        kind = kind_of(scenario_file.read_bytes())
    if kind in (workload.KIND, life_files.KIND) and shrink:
        raise CannotRun(f"{scenario_file}: a {kind} is not shrunk; name a scenario")
    if save is not None and not shrink:
        raise CannotRun("--save: there is nothing to write without --shrink")
    if kind == workload.KIND:
        return run_workloads([workload.load(scenario_file)], targets, tier, draw, draw_svg)
    if kind == life_files.KIND:
        return _replay_life(scenario_file, targets or DEFAULT_TARGETS, tier, draw, draw_svg)
    scenarios = load(scenario_file)
    predicted = dict.fromkeys(target for scenario in scenarios for target in _shows_on(scenario))
    if not scenarios:
        raise CannotRun(f"{scenario_file}: holds no scenario; name a file that does")
    if draw_svg is not None:
        check_one(str(scenario_file), len(scenarios), "scenarios")
        check_svg(draw_svg)
    console = new_console()
    worst, not_run = AS_EXPECTED, []
    trees = resolved(targets or tuple(predicted) or DEFAULT_TARGETS)
    if shrink:
        scenarios = [_shrunk(scenarios, scenario_file, trees, save)]
    shows: list[str] = []
    for tree in trees:
        results = replay_in(
            tree.root, tier, scenarios, target=tree.target, with_tables=draw or bool(draw_svg)
        )
        for scenario, result in zip(scenarios, results, strict=True):
            show_replay(console, scenario, result, tier)
            if draw and result.steps:
                drawing.draw(console, picture(scenario, result))
            if draw_svg is not None and result.steps:
                write_whole(draw_svg, svg(picture(scenario, result)))
                draw_svg = None
            shows += [tree.target] if result.theorem_holds is False else []
            if result.outcome is Outcome.COULD_NOT_RUN:
                not_run.append(f"{tree.target}: {result.detail}")
            elif shrink:
                continue  # nothing is predicted of it; what it shows is said below
            elif result.outcome is Outcome.DISAGREES or (
                result.outcome is Outcome.NOT_PREDICTED and result.theorem_holds is False
            ):
                worst = NOT_AS_EXPECTED
    if not_run:
        raise CannotRun(f"{len(not_run)} replays could not be run, the first on {not_run[0]}")
    if shrink:
        others = [tree.target for tree in trees if tree.target not in shows]
        elsewhere = f"; not on {', '.join(others)}" if others else ""
        print_line(console, f"reproduces on {', '.join(shows) or 'none'}{elsewhere}")
        return AS_EXPECTED if shows else NOT_AS_EXPECTED
    return worst


def _shrunk(
    scenarios: Sequence[Any], scenario_file: Path, trees: Sequence[Tree], save: Path | None
) -> Any:
    """Shrink a scenario on the first target that shows it (core tier), and write what is left."""
    from conformance.driver import BindingError, core_driver
    from conformance.scenario import dumps
    from conformance.shrink import NothingToShrink, is_ours
    from conformance.shrink import shrink as shrink_on

    if len(scenarios) > 1:
        raise CannotRun(f"{scenario_file}: holds {len(scenarios)} scenarios; --shrink takes one")
    check_writable("--save", save)
    if save is not None and save.exists() and not is_ours(save):
        raise CannotRun(f"--save {save}: was not written by --shrink; name another file")
    reasons = []
    for tree in trees:
        try:
            found = shrink_on(scenarios[0], core_driver(tree.root), tree.target)
        except (NothingToShrink, BindingError) as error:
            reasons.append(str(error))
            continue
        if save is not None:
            write_whole(save, dumps(found.scenario))
        end = "no smaller one shows it" if found.is_least else "the most that are judged"
        click.echo(f"shrunk on {tree.target}: {found.num_candidates} candidates, {end}")
        return found.scenario
    raise CannotRun(f"nothing to shrink: {reasons[0]}")


def _shows_on(scenario: Any) -> list[str]:
    """Targets on which a scenario shows something: its refutation, or what is predicted."""
    return [
        target
        for target, prediction in (scenario.predicted or {}).items()
        if scenario.theorem is None or scenario.theorem in prediction.violates
    ]


def _replay_life(
    file: Path, targets: Sequence[str], tier: str, draw: bool, draw_svg: Path | None
) -> int:
    """Live a life again on targets; a violation that is not known is not as expected."""
    from conformance.drawing import draw_all
    from conformance.driver import BindingError
    from conformance.life_files import load, replay_lives
    from conformance.life_picture import life_pictures
    from conformance.report import counted
    from conformance.svg import svg_of_all

    life, worst, with_tables = load(file), AS_EXPECTED, draw or draw_svg is not None
    if draw_svg is not None:
        check_svg(draw_svg)
    for tree in resolved_to_live(targets):
        try:
            (seen,) = replay_lives(tree.root, tier, [life], tree.target, with_tables)
        except BindingError as error:
            raise CannotRun(f"{tree.target}: {error}") from None
        rules, violations = counted(seen.num_rules, "rule"), counted(len(seen.lines), "violation")
        click.echo(f"{tree.target}: {rules}, {violations}")
        for line in seen.lines:
            click.echo(f"  {line}")
        pictures = life_pictures(seen.requests)
        if draw:
            draw_all(new_console(), pictures)
        if draw_svg is not None:
            write_whole(draw_svg, svg_of_all(f"{file.name} on {tree.target}", pictures))
            draw_svg = None
        worst = NOT_AS_EXPECTED if seen.num_unknown else worst
    return worst
