"""Counterexamples as pages show them: what the real manager did, beside what was to be seen.

Rows of a target that share their steps share a page. What is shown was seen on the real manager
(core tier) when the site was written; only what is expected comes from the scenario.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.driver import BindingError, Driver, core_driver
from conformance.expectations import cause, where
from conformance.obligations import Row
from conformance.picture import picture
from conformance.replay import NEED_EXACT_POOL, Outcome, Replay, StepSeen, replay
from conformance.report import counterexample_line
from conformance.scenario import Scenario, dumps, loads
from conformance.site import names
from conformance.standalone import StandaloneError, standalone
from conformance.steps import how_it_ended
from conformance.svg import svg
from conformance.targets import Tree
from spec.families import FAMILIES
from spec.theorems import THEOREMS

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


@dataclass(frozen=True)
class Counterexample:
    """A page: steps that break one or more claims on a target."""

    path: str
    """The page's path, without `.html`."""
    target: str
    scenario: Scenario
    rows: tuple[Row, ...]
    """Verdicts that it refutes, all of them with these steps."""
    seen: Replay

    @property
    def title(self) -> str:
        """The claim that is broken, and where."""
        return f"{self.rows[0]['theorem']}, {self.kind}, {self.target}"

    @property
    def kind(self) -> str:
        """The kind of step: the family with its tags."""
        return where(self.rows[0]["family"], self.rows[0]["tags"])

    @property
    def numbers(self) -> str:
        """The last step's numbers in a line."""
        return counterexample_line(self.rows[0]["scenario"], self.target)

    @property
    def family_sentence(self) -> str:
        """What the kind of step is."""
        return FAMILIES[self.rows[0]["family"]].sentence

    @property
    def is_reproduced(self) -> bool:
        """Whether the real manager shows what was predicted, and breaks the claim."""
        return self.seen.outcome is Outcome.REPRODUCED and self.seen.theorem_holds is False

    @property
    def claims(self) -> list[tuple[str, str, list[str]]]:
        """Theorems that the rows refute: slug, sentence, and kinds of step."""
        kinds: dict[str, list[str]] = {}
        for row in self.rows:
            kinds.setdefault(row["theorem"], []).append(where(row["family"], row["tags"]))
        return [(slug, THEOREMS[slug].sentence, found) for slug, found in kinds.items()]

    @property
    def causes(self) -> list[str]:
        """Public reports, or causes, that the expected verdicts name."""
        found = (
            cause(self.target, row["manager"], where(row["family"], row["tags"]), row["theorem"])
            for row in self.rows
        )
        return list(dict.fromkeys(filter(None, found)))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps that were taken, with what was seen of each."""
        taken = zip(self.scenario.steps, self.seen.steps, strict=False)
        return [
            {
                "why": planned.why + (f" ({how_it_ended(seen.step)})" if _failed(seen) else ""),
                "start": planned.call.total_computed_tokens,
                "end": planned.call.num_tokens_main_model,
                "lookahead": planned.call.num_tokens - planned.call.num_tokens_main_model,
                "numbers": [
                    seen.step.dry_run,
                    seen.step.estimate,
                    seen.step.drawn,
                    planned.expect.need,
                    seen.step.table_length,
                    seen.held,
                    seen.free,
                ],
            }
            for planned, seen in taken
        ]

    @property
    def comparison(self) -> list[Line]:
        """What the last step showed, beside what was to be seen."""
        if len(self.seen.steps) < len(self.scenario.steps):
            return []
        theorems = {row["theorem"] for row in self.rows}
        return list(_compared(self.scenario, theorems, self.seen.steps[-1]))

    @property
    def picture(self) -> str:
        """The block table after each step, as SVG; empty where nothing was seen."""
        return svg(picture(self.scenario, self.seen)) if self.seen.steps else ""

    @property
    def file(self) -> str:
        """The scenario's file, beside the page."""
        return f"{self.path}.json"

    @property
    def text(self) -> str:
        """The scenario's file as text."""
        return dumps(self.scenario)

    @property
    def command(self) -> str:
        """The command that takes the steps again, run from the site's folder."""
        return _command(["capproof", "replay", self.file], ["--target", self.target], ["--draw"])

    def standalone_command(self, driver: Driver) -> str | None:
        """Return the command that renders a test for vLLM itself, None where there are no words."""
        try:
            standalone([self.scenario], driver.bindings, self.target)
        except StandaloneError:
            return None
        return _command(
            ["capproof", "gen-tests", "--standalone", self.file],
            ["--target", self.target],
            ["--out", "test_block_estimate.py"],
        )

    @property
    def num_reserved(self) -> int | None:
        """Blocks reserved for others on a pool that just passes the check.

        None where the last step finds a pool with enough.
        """
        return NEED_EXACT_POOL.get(self.scenario.theorem or "")

    @property
    def at_production_sizes(self) -> dict[str, list[str]]:
        """Longest prompts that break the claims at sizes that people run: theorems by line."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row["scenario_at_production_sizes"] is not None:
                line = counterexample_line(row["scenario_at_production_sizes"], self.target)
                found.setdefault(line, []).append(row["theorem"])
        return found


def counterexamples(
    rows: Iterable[Row], drivers: Mapping[str, Driver | str]
) -> Iterator[Counterexample]:
    """Yield the counterexamples of rows, each replayed on its target's own manager.

    Args:
        rows: Verdicts.
        drivers: By target, what builds its managers, or why nothing can be built.

    Raises:
        ScenarioError: A row's counterexample is no scenario.
    """
    for path, (target, found) in grouped(rows).items():
        (scenario,) = loads(json.dumps(found[0]["scenario"]), name=f"counterexample in {target}")
        driver = drivers[target]
        if isinstance(driver, str):
            seen = Replay(scenario.name, target, Outcome.COULD_NOT_RUN, detail=driver)
        else:
            seen = replay(scenario, driver, target, with_tables=True)
        yield Counterexample(path, target, scenario, tuple(found), seen)


def grouped(rows: Iterable[Row]) -> dict[str, tuple[str, list[Row]]]:
    """Return rows with a counterexample by the path of its page, with the target of each."""
    pages: dict[str, tuple[str, list[Row]]] = {}
    heads: dict[str, str] = {}
    for row in rows:
        if row["scenario"] is None:
            continue
        key = names.hashed([row["target"], _steps_of(row)])
        path = heads.setdefault(
            key, names.of_counterexample(row["scenario"]["name"], [row["target"], _steps_of(row)])
        )
        pages.setdefault(path, (row["target"], []))[1].append(row)
    return pages


def drivers_of(trees: Sequence[Tree]) -> dict[str, Driver | str]:
    """Return what builds each target's managers, or why nothing can be built."""
    found: dict[str, Driver | str] = {}
    for tree in trees:
        try:
            found[tree.target] = core_driver(tree.root)
        except BindingError as error:
            found[tree.target] = str(error)
    return found


def _steps_of(row: Row) -> object:
    """What makes a counterexample another one: its steps, and the pool that the last one finds."""
    scenario = row["scenario"]
    pool = NEED_EXACT_POOL.get(row["theorem"])
    groups = scenario.get("num_mamba_groups", 0)
    return [scenario["manager"], groups, scenario["geometry"], scenario["steps"], pool]


def _command(*lines: Sequence[str]) -> str:
    """A command as a shell takes it, in lines that need no breaking."""
    return " \\\n  ".join(map(shlex.join, lines))


def _failed(seen: StepSeen) -> bool:
    return seen.step.raised is not None or seen.step.refused


def _compared(scenario: Scenario, theorems: set[str], seen: StepSeen) -> Iterator[Line]:
    step, expect = seen.step, scenario.steps[-1].expect
    if scenario.theorem in NEED_EXACT_POOL or _failed(seen):
        ended = how_it_ended(step) if _failed(seen) else "goes through"
        yield Line("the step", ended, "goes through", _failed(seen))
    until = " before it raised" if step.raised else ""
    yield _line("estimate, blocks", step.estimate, expect.need)
    if not step.refused:
        yield _line(f"drawn{until}, blocks", step.drawn, expect.need)
    if "dry-run-parity" in theorems:
        yield _line("dry run, blocks", step.dry_run, step.estimate)
    if _failed(seen):
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
