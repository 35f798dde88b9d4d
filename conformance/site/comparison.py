"""What a counterexample's last step showed, beside what was to be seen."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from conformance.replay import NEED_EXACT_POOL, StepSeen
from conformance.scenario import Scenario
from conformance.steps import how_it_ended

#: What is asked of each step that has no number: the field of `Step`, and the claim in words.
_CLAIMS = {
    "dry_run_left_state": "the dry run leaves everything as it was",
    "tail_is_held": "the table's last 1 + S blocks are held",
    "checkpoint_block_is_held": "the checkpoint's column holds a block",
    "returned_new_columns": "the blocks of the new columns are returned",
    "no_block_is_twice": "no block stands in two columns",
    "state_is_in_place": "the state that the step starts from stays in place",
    "only_states_are_held": "blocks stand only in the columns of states",
    "drawn_are_held": "every block that is drawn is held, and none is given back",
    "removal_kept_state": "the removal of skipped blocks leaves the running state",
    "removal_freed_skipped": "it leaves no block before the running state",
    "removal_freed_ended": "it leaves no block before the last token whose step has ended",
}


@dataclass(frozen=True)
class Line:
    """A number, or another thing, that was seen, beside what was to be seen."""

    what: str
    actual: str
    expected: str
    differs: bool


def compared(scenario: Scenario, theorems: Collection[str], seen: StepSeen) -> Iterator[Line]:
    """Yield what was seen of a scenario's last step, beside what was to be seen.

    Args:
        scenario: What was replayed.
        theorems: Slugs of the theorems that it refutes.
        seen: Its last step.
    """
    step, expect = seen.step, scenario.steps[-1].expect
    if scenario.theorem in NEED_EXACT_POOL or failed(seen):
        ended = how_it_ended(step) if failed(seen) else "goes through"
        yield Line("the step", ended, "goes through", failed(seen))
    until = " before it raised" if step.raised else ""
    yield _line("estimate, blocks", step.estimate, expect.need)
    if not step.refused:
        yield _line(f"drawn{until}, blocks", step.drawn, expect.need)
    if "dry-run-parity" in theorems:
        yield _line("dry run, blocks", step.dry_run, step.estimate)
    if failed(seen):
        return
    yield _line("columns of the table", step.table_length, expect.table_length)
    if expect.column_to_retire is not None:
        yield _line("column to free next", step.column_to_retire, expect.column_to_retire)
    if step.checkpoint_position is not None and (step.checkpoint_is_pending or expect.checkpoint):
        pending, intended = step.pending_checkpoint, expect.checkpoint
        what = "checkpoint: tokens, column"
        yield Line(what, _shown(pending), _shown(intended), pending != intended)
    if any(one.num_request_tokens for one in scenario.steps):
        least = step.held if "gate-covers-lifetime" in theorems else step.drawn
        told = f"{least:,} or more"
        yield Line("told to the gate, blocks", f"{step.gate:,}", told, step.gate < least)
    if "peak-within-sizing" in theorems:
        yield _bounded("held, blocks", step.held, step.reserved_at_startup)
    if "eventually-admitted" in theorems:
        whole = step.held_before + step.estimate
        yield _bounded("held before and estimate, blocks", whole, step.reserved_at_startup)
    for field, claim in _CLAIMS.items():
        if not getattr(step, field):
            yield Line(claim, "no", "yes", True)


def _line(what: str, actual: object, wanted: object) -> Line:
    is_known = actual is not None and wanted is not None
    return Line(what, _shown(actual), _shown(wanted), is_known and actual != wanted)


def _bounded(what: str, actual: int, most: int) -> Line:
    return Line(what, f"{actual:,}", f"{most:,} or less, which start-up reserves", actual > most)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def failed(seen: StepSeen) -> bool:
    """Return whether a step did not go through."""
    return seen.step.raised is not None or seen.step.refused
