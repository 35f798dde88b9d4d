"""`capproof workloads`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from conformance.commands.arguments import CannotRun, resolved, targets_option
from conformance.commands.output import new_console, print_line, write_whole
from conformance.commands.pictures import check_one, check_svg, draw_option, draw_svg_option
from conformance.ending import AS_EXPECTED, NOT_AS_EXPECTED
from conformance.targets import DEFAULT_TARGETS


@click.command()
@targets_option
@click.option("--name", "names", multiple=True, metavar="N", help="Default: all of the file.")
@draw_option
@draw_svg_option
def workloads(
    targets: tuple[str, ...], names: tuple[str, ...], draw: bool, draw_svg: Path | None
) -> int:
    """Run the project's workloads on vLLM's own scheduler (vllm tier)."""
    from conformance.workload import known_workloads

    known = {workload.name: workload for workload in known_workloads()}
    for name in names:
        if name not in known:
            raise CannotRun(f"unknown workload {name!r}; see conformance/workloads.toml")
    chosen = [known[name] for name in names or known]
    return run_workloads(chosen, targets, "vllm", draw, draw_svg)


def run_workloads(
    workloads: Sequence[Any], targets: Sequence[str], tier: str, draw: bool, draw_svg: Path | None
) -> int:
    """Run workloads on targets, by default those of which something is expected; a line each."""
    from conformance.drawing import draw_all
    from conformance.engine import run_in
    from conformance.svg import svg_of_all
    from conformance.workload import differences, summary
    from conformance.workload_picture import workload_pictures

    if tier != "vllm":
        raise CannotRun("a workload runs on the real scheduler: add --tier vllm")
    if draw_svg is not None:
        check_one("--name", len(workloads), "workloads")
        check_svg(draw_svg)
    is_drawn = draw or draw_svg is not None
    expected = dict.fromkeys(target for workload in workloads for target in workload.expected)
    console, worst, not_run = new_console(), AS_EXPECTED, []
    for tree in resolved(targets or tuple(expected) or DEFAULT_TARGETS):
        for workload, answer in zip(workloads, run_in(tree.root, workloads, is_drawn), strict=True):
            about = f"{tree.target} {workload.name}"
            if answer.outcome is None:
                not_run.append(f"{about}: {answer.reason}")
                continue
            wanted = workload.expected.get(tree.target)
            found = differences(answer.outcome, wanted or {})
            said = "nothing expected" if wanted is None else "; ".join(found) or "as expected"
            print_line(console, f"{about} ({said}): {summary(answer.outcome)}")
            worst = NOT_AS_EXPECTED if found else worst
            pictures = workload_pictures(workload, answer)
            if draw:
                draw_all(console, pictures)
            if draw_svg is not None:
                write_whole(draw_svg, svg_of_all(f"{workload.name} on {tree.target}", pictures))
                draw_svg = None
    if not_run:
        raise CannotRun(f"{len(not_run)} workloads could not be run, the first {not_run[0]}")
    return worst
