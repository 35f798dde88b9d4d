"""The command line: `capproof prove`, `gen-tests`, `conform`, `replay`, `bisect` and two lists.

Exit status: 0 as expected; 1 a verdict or a replay is not as expected, or a bisection names no
commit; 2 the command could not run, with one line saying what and what to do.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from conformance.targets import (
    DEFAULT_TARGETS,
    KNOWN_RELEASES,
    TargetError,
    Tree,
    cache_root,
    cached,
    fetch,
    resolve,
)
from spec.families import FAMILIES
from spec.theorems import MANAGERS, THEOREMS

AS_EXPECTED, NOT_AS_EXPECTED, COULD_NOT_RUN = 0, 1, 2
PROJECT_ROOT = Path(__file__).resolve().parent.parent
#: Columns of a table that goes into a pipe or a file.
_PIPE_WIDTH = 160
#: Families whose kinds of step take the longest to settle.
_LONG_FAMILIES = ("hit-full", "resumed", "external-sync")
#: Clears the line of progress on a terminal and shows the cursor again.
_END_PROGRESS = "\r\x1b[K\x1b[?25h"
GENERATED_TESTS = PROJECT_ROOT / "generated_tests"


class CannotRun(Exception):
    """The command cannot run; one line saying what and what to do."""


_targets_option = click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="T",
    help="vllm==X.Y.Z, path:DIR or installed; may be repeated.",
)
_tier_option = click.option(
    "--tier",
    type=click.Choice(["core", "vllm"]),
    default="core",
    help="core: the tree's managers under placeholders; vllm: everything imported for real.",
)


_no_cache_option = click.option(
    "--no-cache", is_flag=True, help="Prove again even if nothing changed."
)


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="capproof", prog_name="capproof")
def cli() -> None:
    """Prove or refute claims about vLLM's KV-cache block estimate, on the source itself."""


@cli.command()
@_targets_option
@click.option("--against", metavar="T", help="Expect the verdicts of this target.")
@click.option("--manager", "managers", multiple=True, metavar="M", help="Default: all modelled.")
@click.option("--family", "families", multiple=True, metavar="F", help="Default: all.")
@click.option("--theorem", "theorems", multiple=True, metavar="SLUG", help="Default: all.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write verdicts.")
@click.option("--matrix", type=click.Path(path_type=Path), help="Also write a page of tables.")
@click.option("--junit", type=click.Path(path_type=Path), help="Also write JUnit XML.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Also write a summary.")
@click.option("--sarif", type=click.Path(path_type=Path), help="Also write SARIF annotations.")
@_no_cache_option
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

    _check_names(managers, families, theorems)
    selection = Selection(families, theorems, managers=managers)
    if not list(selection.obligations()):
        raise CannotRun("nothing to prove: no obligation is in this selection")
    outputs = {"--json": json_file, "--matrix": matrix}
    outputs |= {"--junit": junit, "--markdown": markdown, "--sarif": sarif}
    for option, file in outputs.items():
        _check_writable(option, file)
    if (pair := same_file(outputs)) is not None:
        raise CannotRun(f"{pair[0]} and {pair[1]} name the same file; name two")
    trees = _resolved(targets or DEFAULT_TARGETS)
    baseline = _resolved((against,))[0] if against else None
    wanted = [*trees, *([baseline] if baseline and baseline not in trees else [])]
    rows = _settle_all(wanted, selection, use_cache=not no_cache, jobs=jobs)
    differences = None
    if baseline is not None:
        rows = _expecting(rows, baseline.target, {tree.target for tree in trees})
        differences = _compare_all(trees, baseline, selection, use_cache=not no_cache, jobs=jobs)
    if crosscheck:
        rows = _crosschecked(rows, trees)
    if json_file is not None:
        _write(json_file, json.dumps(document(rows, differences), indent=2) + "\n")
    if matrix is not None:
        _write(matrix, page(verdicts_of(rows), {t.target: traits_in(t.root) for t in trees}))
    for file, text in reports(outputs, rows, {t.target: t.root for t in trees}):
        _write(file, text)
    console, kept = _console(), _keep_scenarios(rows)
    show_verdicts(console, rows)
    show_unproved(console, rows, kept)
    show_differences(console, differences or ())
    _print(console, summary(rows))
    surprises = any(not is_as_expected(row) for row in rows)
    unconfirmed = crosscheck and not _show_crosscheck(console, rows)
    if (line := advice(rows, kept)) is not None:
        _print(console, line)
    return NOT_AS_EXPECTED if surprises or unconfirmed else AS_EXPECTED


@cli.command("gen-tests")
@_targets_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=GENERATED_TESTS,
    help="Default: the project's.",
)
@click.option("--against", metavar="T", help="Expect a checkout to have this target's faults.")
@click.option("--check", is_flag=True, help="Write nothing; fail where the folder is not current.")
@click.option(
    "--standalone",
    is_flag=True,
    help="Write one test file for SCENARIO files that needs vLLM and pytest alone, to --out FILE.",
)
@_no_cache_option
@click.argument(
    "scenario_files", nargs=-1, type=click.Path(path_type=Path), metavar="[SCENARIO]..."
)
def gen_tests(
    targets: tuple[str, ...],
    out: Path,
    against: str | None,
    check: bool,
    standalone: bool,
    no_cache: bool,
    scenario_files: tuple[Path, ...],
) -> int:
    """Write the generated tests, or check that the committed ones are current.

    A test of what a target is not expected to break fails; of a known fault, it is a strict xfail.
    """
    if standalone:
        return _write_standalone(scenario_files, targets, out, is_plain=not (against or check))
    if scenario_files:
        raise CannotRun(f"{scenario_files[0]}: scenarios are named with --standalone only")
    from conformance import gen_tests as writing
    from conformance.obligations import Selection

    console = _console()
    with _cannot_run_on(writing.GenTestsError):
        if not check:
            trees = _resolved(targets or DEFAULT_TARGETS)
            rows = _settle_all(trees, Selection(), use_cache=not no_cache)
            found = {
                tree.target: [row for row in rows if row["target"] == tree.target] for tree in trees
            }
            with _progress() as on_progress, _ctrl_c_ends_at_once():
                files = writing.generate_files(trees, found, on_progress, against=against)
            changed = writing.write(files, out)
            _print(console, f"{out}: {len(files)} files, {len(changed)} changed")
            return _show_surprises(console, found, against)
        differences = writing.check_rendering(out)
        trees = _resolved(targets or writing.committed_targets(out))
        rows = _settle_all(trees, Selection(), use_cache=not no_cache)
        with _progress(), _ctrl_c_ends_at_once():
            differences += writing.check_verdicts(out, rows)
            differences += writing.check_scenarios(out, trees, rows)
    for difference in differences:
        _print(console, f"{difference.what}; run `capproof gen-tests`")
    if not differences:
        _print(console, f"{out}: current, and {len(rows)} verdicts are the committed ones")
    return NOT_AS_EXPECTED if differences else AS_EXPECTED


def _write_standalone(
    files: Sequence[Path], targets: Sequence[str], out: Path, *, is_plain: bool
) -> int:
    """Write one test file for scenarios, for the newest release or the target that is given."""
    from conformance.driver import BindingError, core_driver
    from conformance.gen_tests import replaces_nothing_of_others
    from conformance.replay import Outcome, replay
    from conformance.scenario import load
    from conformance.standalone import StandaloneError
    from conformance.standalone import standalone as rendered

    if not is_plain:
        raise CannotRun("--standalone goes with --target and --out only")
    if not files:
        raise CannotRun("--standalone: name a scenario file")
    if out == GENERATED_TESTS:
        raise CannotRun("--standalone: name the test file with --out FILE")
    if len(targets) > 1:
        raise CannotRun("--standalone: a file is written for one target; name one")
    _check_writable("--out", out)
    if not replaces_nothing_of_others(out):
        raise CannotRun(f"--out {out}: was not generated by capproof; name another file")
    scenarios = [scenario for file in files for scenario in load(file)]
    names = [scenario.name for scenario in scenarios]
    if len(set(names)) != len(names) or not scenarios:
        raise CannotRun("--standalone: name at least one scenario, and none twice")
    (tree,) = _resolved(targets or DEFAULT_TARGETS[-1:])
    with _cannot_run_on(BindingError, StandaloneError):
        driver = core_driver(tree.root)
        text = rendered(scenarios, driver.bindings, tree.target)
        results = [replay(scenario, driver, tree.target) for scenario in scenarios]
    for scenario, result in zip(scenarios, results, strict=True):
        if result.outcome is Outcome.COULD_NOT_RUN or len(result.steps) < len(scenario.steps):
            raise CannotRun(f"{result.scenario} on {tree.target}: {result.detail}")
    _write(out, text)
    broken = sum(result.theorem_holds is False for result in results)
    click.echo(f"{out}: {len(scenarios)} tests, of which {broken} fail on {tree.target}")
    return AS_EXPECTED


@cli.command()
@_targets_option
@_tier_option
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


@cli.command()
@click.argument("scenario_file", type=click.Path(path_type=Path), metavar="SCENARIO.json")
@_targets_option
@_tier_option
@click.option("--draw", is_flag=True, help="Print the block table after each step as a picture.")
@click.option(
    "--draw-svg",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the picture of the first target as SVG.",
)
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
    if kind in (workload.KIND, life_files.KIND) and (draw or draw_svg or shrink):
        undone = "is not shrunk" if shrink else "has no picture"
        raise CannotRun(f"{scenario_file}: a {kind} {undone}; name a scenario")
    if save is not None and not shrink:
        raise CannotRun("--save: there is nothing to write without --shrink")
    if kind == workload.KIND:
        return _run_workloads([workload.load(scenario_file)], targets, tier)
    if kind == life_files.KIND:
        return _replay_life(scenario_file, targets or DEFAULT_TARGETS, tier)
    scenarios = load(scenario_file)
    predicted = dict.fromkeys(target for scenario in scenarios for target in _shows_on(scenario))
    if not scenarios:
        raise CannotRun(f"{scenario_file}: holds no scenario; name a file that does")
    if draw_svg is not None:
        _check_svg(draw_svg, scenario_file, len(scenarios))
    console = _console()
    worst, not_run = AS_EXPECTED, []
    trees = _resolved(targets or tuple(predicted) or DEFAULT_TARGETS)
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
                _write(draw_svg, svg(picture(scenario, result)))
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
        _print(console, f"reproduces on {', '.join(shows) or 'none'}{elsewhere}")
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
    _check_writable("--save", save)
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
            _write(save, dumps(found.scenario))
        end = "no smaller one shows it" if found.is_least else "the most that are judged"
        click.echo(f"shrunk on {tree.target}: {found.num_candidates} candidates, {end}")
        return found.scenario
    raise CannotRun(f"nothing to shrink: {reasons[0]}")


@cli.command()
@_targets_option
@click.option("--name", "names", multiple=True, metavar="N", help="Default: all of the file.")
def workloads(targets: tuple[str, ...], names: tuple[str, ...]) -> int:
    """Run the project's workloads on vLLM's own scheduler (vllm tier)."""
    from conformance.workload import known_workloads

    known = {workload.name: workload for workload in known_workloads()}
    for name in names:
        if name not in known:
            raise CannotRun(f"unknown workload {name!r}; see conformance/workloads.toml")
    return _run_workloads([known[name] for name in names or known], targets, "vllm")


#: Releases whose calls differ from what `conformance.life_scheduler` describes.
_NOT_LIVED = ("0.24.0", "0.25.0", "0.26.0", "0.27.0")
#: Violations of a target that `explore` shows.
_MOST_LINES = 10


def _resolved_to_live(targets: Sequence[str]) -> list[Tree]:
    trees = _resolved(targets)
    for tree in trees:
        if tree.release in _NOT_LIVED:
            raise CannotRun(f"{tree.target}: lives are not described for releases before 0.28.0")
    return trees


@cli.command()
@_targets_option
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

    to_save, worst = save, AS_EXPECTED
    for tree in _resolved_to_live(targets or DEFAULT_TARGETS):
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
            f"{tree.target}: {setting.num_gpu_blocks} blocks, {requests} requests, {rules} rules: "
            f"{found.num_states} states, {found.num_lives} lives, {found.num_known} with a known "
            f"fault, {len(found.violations)} violations"
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


def _replay_life(file: Path, targets: Sequence[str], tier: str) -> int:
    """Live a life again on targets; a violation that is not known is not as expected."""
    from conformance.driver import BindingError
    from conformance.life_files import load, replay_lives

    life, worst = load(file), AS_EXPECTED
    for tree in _resolved_to_live(targets):
        try:
            (seen,) = replay_lives(tree.root, tier, [life], tree.target)
        except BindingError as error:
            raise CannotRun(f"{tree.target}: {error}") from None
        click.echo(f"{tree.target}: {seen.num_rules} rules, {len(seen.lines)} violations")
        for line in seen.lines:
            click.echo(f"  {line}")
        worst = NOT_AS_EXPECTED if seen.num_unknown else worst
    return worst


@cli.command()
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
    _check_names((manager,) if manager else (), families, (theorem,))
    managers = (manager or THEOREMS[theorem].managers[0],)
    if managers[0] not in THEOREMS[theorem].managers:
        raise CannotRun(f"{theorem} is not about the manager {managers[0]}")
    console = _console()
    with _cannot_run_on(bisecting.BisectError), _status_on(console) as on_progress:
        found = bisecting.bisect(
            repo,
            good,
            bad,
            Selection(families, (theorem,), managers=managers),
            on_judged=lambda judged: _print(console, bisecting.step_line(judged)),
            on_progress=on_progress,
        )
    for line in bisecting.closing_lines(found):
        _print(console, line)
    rows = [row for row in found.refuted.rows if row["verdict"] == "REFUTED"]
    show_unproved(console, rows, {})
    for file in _keep_scenarios(rows).values():
        command = shlex.join(["capproof", "replay", file, "--target", f"path:{repo}"])
        _print(console, f"  with {found.refuted.commit.short} checked out: {command}")
    return AS_EXPECTED if found.first is not None else NOT_AS_EXPECTED


@cli.command("targets")
@click.option("--fetch", "to_fetch", metavar="T", help="Fetch a release again.")
def list_targets(to_fetch: str | None) -> int:
    """List the releases that are known and cached."""
    if to_fetch is not None:
        tree = fetch(to_fetch)
        click.echo(f"{tree.target}  {tree.root}")
        return AS_EXPECTED
    present = cached()
    known = [f"vllm=={release}" for release in KNOWN_RELEASES]
    for target in sorted({*known, *present}, key=_version_key):
        notes = ["known" if target in known else "not described yet"]
        notes.append("cached" if target in present else "not cached")
        notes += ["default"] if target in DEFAULT_TARGETS else []
        click.echo(f"{target}  {', '.join(notes)}")
    click.echo(f"cache: {cache_root()}")
    return AS_EXPECTED


@cli.command()
@click.argument("slug", metavar="SLUG")
def explain(slug: str) -> int:
    """Explain a theorem, a family, an assumption, a manager or a verdict."""
    from conformance.explain import explanation, nearest

    text = explanation(slug)
    if text is None:
        raise CannotRun(
            f"unknown theorem, family, assumption, manager or verdict {slug[:60]!r}; the nearest: "
            f"{', '.join(nearest(slug))}"
        )
    click.echo(text)
    return AS_EXPECTED


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; every failure is one line on stderr."""
    from conformance.scenario import ScenarioError
    from conformance.workload import WorkloadError
    from models.loader import CoreError

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Not `cli.main`, which has its own way with Ctrl-C and closed pipes.
        with cli.make_context("capproof", given) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _stopped()
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "capproof"
        return _fail(f"{error.format_message()} See `{command} --help`.")
    except click.ClickException as error:
        return _fail(error.format_message())
    except (CannotRun, TargetError, ScenarioError, WorkloadError, CoreError) as error:
        return _fail(str(error))
    except BrokenPipeError:
        _drop_output()
        return AS_EXPECTED
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}")


def _fail(reason: str) -> int:
    click.echo(f"capproof: {' '.join(reason.split())}", err=True)
    return COULD_NOT_RUN


def _drop_output() -> None:
    """Nobody reads what is written from here on, which is no failure."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stopped() -> int:
    return _fail("stopped; nothing half-written is left, run the same command again")


# ---- checking what was asked for -----------------------------------------------------------------


def _check_names(managers: Sequence[str], families: Sequence[str], theorems: Sequence[str]) -> None:
    for manager in managers:
        if manager not in MANAGERS:
            raise CannotRun(f"unknown manager {manager!r}; modelled: {', '.join(MANAGERS)}")
    for family in families:
        if family not in FAMILIES:
            raise CannotRun(f"unknown family {family!r}; families: {', '.join(FAMILIES)}")
    for theorem in theorems:
        if theorem not in THEOREMS:
            raise CannotRun(f"unknown theorem {theorem!r}; theorems: {_names()}")


def _shows_on(scenario: Any) -> list[str]:
    """Targets on which a scenario shows something: its refutation, or what is predicted."""
    return [
        target
        for target, prediction in (scenario.predicted or {}).items()
        if scenario.theorem is None or scenario.theorem in prediction.violates
    ]


def _names() -> str:
    return ", ".join(THEOREMS)


def _check_writable(option: str, file: Path | None) -> None:
    """Refuse an output file before any time is spent on what goes into it."""
    if file is None:
        return
    given = f"{option} {file}"
    try:
        if file.is_dir():
            raise CannotRun(f"{given}: a folder is there; name a file")
        if not file.parent.is_dir():
            raise CannotRun(f"{given}: {file.parent} is no folder; make it, or name another")
        is_new = not file.exists()
    except OSError as error:
        raise CannotRun(f"{given}: {error.strerror}; name another file") from None
    if not os.access(file.parent if is_new else file, os.W_OK):
        raise CannotRun(f"{given}: cannot be written; name another file")


def _check_svg(file: Path, scenario_file: Path, num_scenarios: int) -> None:
    """Refuse a picture of several scenarios, and one that would replace what is no picture."""
    from conformance.svg import MARKER

    if num_scenarios > 1:
        raise CannotRun(
            f"{scenario_file}: holds {num_scenarios} scenarios, and --draw-svg draws one; "
            "name a file with one"
        )
    _check_writable("--draw-svg", file)
    if file.is_file() and not file.read_bytes().startswith(MARKER.encode()):
        raise CannotRun(f"--draw-svg {file}: is no picture of capproof's; name another file")


def _write(file: Path, text: str) -> None:
    """Write a file that readers see whole or not at all, unless a pipe or device stands there."""
    file = file.resolve()
    temporary = file.with_name(f".{os.getpid()}.tmp")
    try:
        if file.exists() and not file.is_file():
            file.write_text(text, encoding="utf-8")
            return
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CannotRun(f"{file}: cannot be written: {error.strerror}") from None


def _resolved(targets: Sequence[str]) -> list[Tree]:
    for target in targets:
        if not target.strip().isprintable():
            raise CannotRun(f"target {target!r}: holds an unprintable character; rename the folder")
    return [resolve(target) for target in dict.fromkeys(target.strip() for target in targets)]


# ---- doing it ------------------------------------------------------------------------------------


def _settle_all(
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


def _compare_all(
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
    with _progress() as on_progress, _cannot_run_on(ProcessLost):
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


@contextmanager
def _ctrl_c_ends_at_once() -> Iterator[None]:
    """End the process on Ctrl-C, even in the middle of a question to the solver.

    z3 has a handler of its own, which turns Ctrl-C into the answer UNKNOWN, and an exception of
    Python's can get lost between its calls. So a thread waits for the signal, and nobody else.
    """
    others = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    is_over = threading.Event()

    def wait() -> None:
        signal.sigwait({signal.SIGINT})
        if not is_over.is_set():
            if sys.stderr.isatty():
                sys.stderr.write(_END_PROGRESS)
            os._exit(_stopped())

    waiting = threading.Thread(target=wait, daemon=True)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        waiting.start()
    try:
        yield
    finally:
        is_over.set()
        if waiting.ident is not None:
            signal.pthread_kill(waiting.ident, signal.SIGINT)
            waiting.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, others)


def _run_workloads(workloads: Sequence[Any], targets: Sequence[str], tier: str) -> int:
    """Run workloads on targets, by default those of which something is expected; a line each."""
    from conformance.engine import run_in
    from conformance.workload import differences, summary

    if tier != "vllm":
        raise CannotRun("a workload runs on the real scheduler: add --tier vllm")
    expected = dict.fromkeys(target for workload in workloads for target in workload.expected)
    console, worst, not_run = _console(), AS_EXPECTED, []
    for tree in _resolved(targets or tuple(expected) or DEFAULT_TARGETS):
        for workload, answer in zip(workloads, run_in(tree.root, workloads), strict=True):
            about = f"{tree.target} {workload.name}"
            if answer.outcome is None:
                not_run.append(f"{about}: {answer.reason}")
                continue
            wanted = workload.expected.get(tree.target)
            found = differences(answer.outcome, wanted or {})
            said = "nothing expected" if wanted is None else "; ".join(found) or "as expected"
            _print(console, f"{about} ({said}): {summary(answer.outcome)}")
            worst = NOT_AS_EXPECTED if found else worst
    if not_run:
        raise CannotRun(f"{len(not_run)} workloads could not be run, the first {not_run[0]}")
    return worst


def _show_surprises(
    console: Any, rows: Mapping[str, list[dict[str, Any]]], against: str | None
) -> int:
    """Print what no target was expected to break, whose tests will fail."""
    from conformance.expectations import expected, where
    from conformance.obligations import is_as_expected
    from conformance.report import show_unproved

    judged = [
        {
            **row,
            "expected": row["expected"]
            or (
                against
                and expected(
                    against, row["manager"], where(row["family"], row["tags"]), row["theorem"]
                )
            ),
        }
        for found in rows.values()
        for row in found
    ]
    surprises = [row for row in judged if not is_as_expected(row)]
    show_unproved(console, surprises, _keep_scenarios(surprises))
    return NOT_AS_EXPECTED if surprises else AS_EXPECTED


def _crosschecked(rows: Sequence[dict[str, Any]], trees: Sequence[Tree]) -> list[dict[str, Any]]:
    from conformance.crosscheck import crosscheck
    from models.second_solver import SecondSolverMissing

    with _cannot_run_on(SecondSolverMissing), _ctrl_c_ends_at_once():
        return [
            row
            for tree in trees
            for row in crosscheck(tree, [row for row in rows if row["target"] == tree.target])
        ]


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


def _keep_scenarios(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Write counterexamples where `replay` can read them; committed ones are named as they are.

    Returns:
        The file by target and scenario name.
    """
    from conformance.scenario import dump, loads

    paths = {}
    for row in rows:
        if row["scenario"] is None:
            continue
        name = row["scenario"]["name"]
        (found,) = loads(json.dumps(row["scenario"]), name=name)
        file = GENERATED_TESTS / "scenarios" / "refutations" / f"{name}.json"
        if not _holds(file, found):
            file = cache_root() / "scenarios" / f"{name}.json"
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                dump(found, file)
            except OSError:
                continue  # --json holds the scenario all the same
        is_near = file.is_relative_to(Path.cwd())
        paths[row["target"], name] = os.path.relpath(file) if is_near else str(file)
    return paths


def _holds(file: Path, scenario: Any) -> bool:
    """Whether a committed file takes the same steps as a scenario, and predicts the same for it."""
    from conformance.scenario import ScenarioError, load

    try:
        (committed,) = load(file)
    except (ScenarioError, ValueError):
        return False
    return bool(
        (committed.geometry, committed.steps) == (scenario.geometry, scenario.steps)
        and scenario.predicted.items() <= (committed.predicted or {}).items()
    )


def _print(console: Any, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _console() -> Any:
    """A console whose reader may leave: what follows is dropped, and the exit status stays."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            _drop_output()

    if sys.stdout is not None and sys.stdout.isatty():
        return Output(emoji=False)
    return Output(emoji=False, width=_PIPE_WIDTH, force_terminal=False)


@contextmanager
def _cannot_run_on(*errors: type[Exception]) -> Iterator[None]:
    from models.lift import NotUnderstood

    try:
        yield
    except (*errors, NotUnderstood) as error:
        raise CannotRun(str(error)) from error


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being worked on: one line that is rewritten on a terminal, nothing in a pipe."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


@contextmanager
def _status_on(console: Any) -> Iterator[Callable[[str], None]]:
    """What is being worked on, below the lines that are printed; nothing in a pipe."""
    from rich.text import Text

    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


def _version_key(target: str) -> tuple[int, ...]:
    release = target.rpartition("==")[2]
    return tuple(int(part) if part.isdigit() else 0 for part in release.split("."))


if __name__ == "__main__":
    main()
