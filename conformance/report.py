"""Verdicts and replays as text: a matrix on a terminal, one greppable line each in a pipe."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.expectations import where
from conformance.obligations import NOT_APPLICABLE, Row, is_as_expected
from conformance.replay import Replay, StepSeen
from conformance.scenario import Scenario

#: The manager that goes without saying.
ONE_MANAGER = "mamba-align"
_STYLE = {"PROVED": "green", "REFUTED": "red", "NOT_APPLICABLE": "dim"}


def show_verdicts(console: Console, rows: Sequence[Row]) -> None:
    """Print every verdict: a table per target and manager on a terminal, else a line each."""
    if not console.is_terminal:
        for row in rows:
            console.print(verdict_line(row), markup=False, highlight=False, soft_wrap=True)
        return
    for key in dict.fromkeys((row["target"], row["manager"]) for row in rows):
        of_manager = [row for row in rows if (row["target"], row["manager"]) == key]
        table = _matrix(", ".join(key), of_manager)
        unlimited = console.options.update(max_width=sys.maxsize)
        is_narrow = console.measure(table, options=unlimited).maximum <= console.width
        console.print(table if is_narrow else _exceptions(", ".join(key), of_manager))


def counted(number: int, noun: str) -> str:
    """Return a number with what it counts, in the plural unless it is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def verdict_line(row: Row) -> str:
    """Return a verdict as one line that grep can find."""
    family = where(row["family"], row["tags"])
    return (
        f"{row['target']} {row['manager']} {family} {row['theorem']} {row['verdict']} "
        f"{row['seconds']:.2f} s{_surprise(row, '  ')}"
    )


def _surprise(row: Row, separator: str) -> str:
    """What was expected instead, after a separator; nothing where the verdict is as expected."""
    return "" if is_as_expected(row) else f"{separator}expected {row['expected'] or 'PROVED'}"


def show_unproved(
    console: Console, rows: Iterable[Row], replay_paths: Mapping[tuple[str, str], str]
) -> None:
    """Print a line per obligation that is not proved: the numbers, and how to replay them.

    Those without numbers that share a verdict and a reason are one line.

    Args:
        console: Where to print.
        rows: Verdicts.
        replay_paths: Scenario file by target and scenario name.
    """
    undecided: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        if row["verdict"] == "PROVED":
            continue
        family = where(row["family"], row["tags"])
        manager = "" if row["manager"] == ONE_MANAGER else f"{row['manager']} "
        head = f"{row['verdict']} {row['target']} {manager}{family} {row['theorem']}"
        head += " (as expected)" if is_as_expected(row) else ""
        if row["scenario"] is None:
            key = row["verdict"], row["target"], str(row["reason"]), _surprise(row, ", ")
            undecided.setdefault(key, []).append(f"{family} {row['theorem']}")
            continue
        line = counterexample_line(row["scenario"], row["target"])
        _print(console, f"{head}: {line}")
        if row["scenario_at_production_sizes"] is not None:
            line = counterexample_line(row["scenario_at_production_sizes"], row["target"])
            _print(console, f"  at production sizes: {line}")
        if row["replay"] != "reproduced":
            _print(console, f"  NOT shown by the real code: {row['replay']}")
        path = replay_paths.get((row["target"], row["scenario"]["name"]))
        if path is not None:
            command = shlex.join(["capproof", "replay", path, "--target", row["target"]])
            _print(console, f"  {command}")
    for (verdict, target, reason, surprise), obligations in undecided.items():
        which = obligations[0] if len(obligations) == 1 else f"{len(obligations)} obligations"
        surprise = surprise if verdict == NOT_APPLICABLE else ""
        _print(console, f"{verdict} {target} {which}{surprise}: {reason}")


def show_differences(console: Console, rows: Sequence[Row]) -> None:
    """Print where two targets' estimates can differ, a line each, and where they cannot."""
    for pair in dict.fromkeys((row["target"], row["baseline"]) for row in rows):
        of_pair = [row for row in rows if (row["target"], row["baseline"]) == pair]
        head = f"estimates of {pair[0]} and {pair[1]}"
        for row in of_pair:
            if row["comparison"] in ("DIFFER", "UNKNOWN"):
                family = where(row["family"], row["tags"])
                _print(console, f"{row['comparison']} {head}, {family}: {_difference_line(row)}")
        counts = Counter(row["comparison"] for row in of_pair)
        _print(
            console,
            f"{head}: equal in {counts['EQUAL']} kinds of step, can differ in {counts['DIFFER']}, "
            f"undecided in {counts['UNKNOWN']}, not in both targets {counts['NOT_COMPARABLE']}",
        )


def _difference_line(row: Row) -> str:
    if row["situation"] is None:
        return str(row["reason"])
    situation = row["situation"]
    step = _step_line(situation["geometry"], {**situation, **situation["call"]})
    shown = ["it raises" if blocks is None else str(blocks) for blocks in row["estimates"]]
    return f"{step}: {' and '.join(shown)}"


def _step_line(geometry: Mapping[str, Any], step: Mapping[str, Any], covered: int = 0) -> str:
    """A step's sizes, what it starts from, and where it ends, in tokens unless said otherwise."""
    return (
        f"B {geometry['block_size']}, H {geometry['hash_block_size']}, "
        f"S {geometry['num_speculative_blocks']}, K {geometry['num_prefill_checkpoint_blocks']}, "
        f"{', '.join(_starts_from(step, covered))}, then {step['num_tokens_main_model']:,}"
        f"{_lookahead(step)}"
    )


def _lookahead(step: Mapping[str, Any]) -> str:
    lookahead = step["num_tokens"] - step["num_tokens_main_model"]
    return f" with {lookahead:,} of lookahead" if lookahead else ""


def _starts_from(step: Mapping[str, Any], covered: int) -> Iterator[str]:
    if step.get("preempted"):
        yield "preempted"
    hit, external = step.get("num_hit_blocks", 0), step.get("num_external_tokens", 0)
    local, computed = step["num_local_computed_tokens"], step["total_computed_tokens"]
    if not hit and not external:
        yield f"{counted(computed, 'token')} computed"
    elif local:
        evictable = ", evictable" if step.get("hit_is_evictable") else ""
        of_this_step = ", cached in this step" if step.get("hit_is_of_this_step") else ""
        found = f"a hit of {counted(local, 'token')} in {counted(hit, 'block')}"
        yield f"{found}{evictable}{of_this_step}"
    if external:
        later = " loaded for a later step" if step.get("loads_asynchronously") else ""
        yield f"{counted(external, 'external token')}{later}"
    if covered > computed:
        yield f"slots for {covered:,}"
    if step.get("owns_partial_tail"):
        yield "their tail cached"


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def counterexample_line(scenario: Mapping[str, Any], target: str) -> str:
    """Return the numbers of a scenario's last step on a target, in one line."""
    geometry, (*before, last) = scenario["geometry"], scenario["steps"]
    covered = max((step["num_tokens_main_model"] for step in before), default=0)
    seen = scenario["predicted"].get(target)
    need = last["expect"]["need"]
    if seen is None:
        outcome = f"needed {need}, nothing predicted"
    elif seen["raised"] is not None:
        outcome = f"raises {seen['raised']}"
    else:
        outcome = f"estimate {seen['estimate']}, drawn {seen['drawn']}, needed {need}"
        if seen.get("held") is not None:
            held = f"{seen['held_before']} before and {seen['held']} after"
            outcome += f", held {held}, {seen['reserved_at_startup']} reserved"
        if seen.get("gate") is not None:
            outcome = f"the gate asks {seen['gate']}, {outcome}"
    number = scenario.get("num_mamba_groups", 0)
    groups = f"{1 + number} groups, " if number else ""
    step = _step_line(geometry, last, 0 if last.get("preempted") else covered)
    return f"{groups}{step}: {outcome}"


def _matrix(title: str, rows: Sequence[Row]) -> Table:
    families = list(dict.fromkeys(where(row["family"], row["tags"]) for row in rows))
    cells = {(row["theorem"], where(row["family"], row["tags"])): row for row in rows}
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    table.add_column("theorem")
    for family in families:
        table.add_column(family)
    for theorem in dict.fromkeys(row["theorem"] for row in rows):
        table.add_row(theorem, *(_cell(cells.get((theorem, family))) for family in families))
    return table


def _exceptions(title: str, rows: Sequence[Row]) -> Table:
    """How many kinds of step each theorem is proved for, and which are not."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    table.add_column("theorem")
    table.add_column("proved", justify="right")
    table.add_column("not about", justify="right")
    table.add_column("kinds of step that are neither, or not as expected")
    for theorem in dict.fromkeys(row["theorem"] for row in rows):
        of_theorem = [row for row in rows if row["theorem"] == theorem]
        verdicts = [row["verdict"] for row in of_theorem]
        others = [
            f"{where(row['family'], row['tags'])} {_cell(row)}"
            for row in of_theorem
            if row["verdict"] not in ("PROVED", NOT_APPLICABLE) or not is_as_expected(row)
        ]
        counts = [str(verdicts.count(verdict)) for verdict in ("PROVED", NOT_APPLICABLE)]
        table.add_row(theorem, *counts, "\n".join(others))
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    style = _STYLE.get(row["verdict"], "yellow")
    note = _surprise(row, " (")
    return f"[{style}]{row['verdict']}[/]{note}{')' if note else ''}"


def show_replay(console: Console, scenario: Scenario, replay: Replay, tier: str) -> None:
    """Print the steps of a replay as a numbered table, and what came of it."""
    console.print(
        f"{scenario.name} on {replay.target}, tier {tier}: {replay.outcome.value}",
        markup=False,
        soft_wrap=True,
    )
    if replay.steps:
        console.print(_steps(scenario, replay.steps))
    if replay.detail:
        console.print(f"  {replay.detail}", markup=False, highlight=False, soft_wrap=True)
    if scenario.theorem is not None and replay.theorem_holds is not None:
        verb = "holds here" if replay.theorem_holds else "is broken"
        console.print(f"  {scenario.theorem} {verb}", markup=False, highlight=False, soft_wrap=True)


def _steps(scenario: Scenario, seen: Sequence[StepSeen]) -> Table:
    table = Table(box=None, pad_edge=True)
    for heading in ("step", "what", "tokens"):
        table.add_column(heading)
    for heading in ("dry run", "estimate", "drawn", "needed", "columns", "held", "free"):
        table.add_column(heading, justify="right")
    for number, (planned, step) in enumerate(zip(scenario.steps, seen, strict=False), start=1):
        values: list[Any] = [
            step.step.dry_run,
            step.step.estimate,
            step.step.drawn,
            planned.expect.need,
            step.step.table_length,
            step.held,
            step.free,
        ]
        raised = f" ({step.step.raised})" if step.step.raised else ""
        tokens = f"{planned.call.total_computed_tokens} to {planned.call.num_tokens_main_model}"
        shown = ["-" if value is None else str(value) for value in values]
        table.add_row(str(number), Text(planned.why + raised), tokens, *shown)
    return table
