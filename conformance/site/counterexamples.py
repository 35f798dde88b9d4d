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
from conformance.expectations import cause, missed_by, where
from conformance.obligations import Row
from conformance.picture import picture
from conformance.replay import NEED_EXACT_POOL, Outcome, Replay, replay
from conformance.report import counterexample_line
from conformance.scenario import Scenario, dumps, loads
from conformance.site import names
from conformance.site.comparison import Line, compared, failed
from conformance.standalone import StandaloneError, standalone
from conformance.steps import how_it_ended
from conformance.svg import svg
from conformance.targets import Tree
from spec.families import FAMILIES
from spec.theorems import THEOREMS


@dataclass(frozen=True)
class AtScale:
    """The longest prompt that breaks claims at sizes that people run."""

    file: str
    """Its scenario's file, below the site's folder."""
    line: str
    """Its numbers."""
    text: str
    """The scenario's file as text."""
    theorems: list[str]
    """Slugs."""


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
    def missed_by(self) -> list[str]:
        """Why vLLM's own tests do not show it, where that was looked up."""
        return list(dict.fromkeys(filter(None, map(missed_by, self.causes))))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps that were taken, with what was seen of each."""
        taken = zip(self.scenario.steps, self.seen.steps, strict=False)
        return [
            {
                "why": planned.why + (f" ({how_it_ended(seen.step)})" if failed(seen) else ""),
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
        return list(compared(self.scenario, theorems, self.seen.steps[-1]))

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
    def at_production_sizes(self) -> list[AtScale]:
        """Longest prompts that break the claims at sizes that people run."""
        found: dict[str, AtScale] = {}
        for row in self.rows:
            content = row["scenario_at_production_sizes"]
            if content is None:
                continue
            line = counterexample_line(content, self.target)
            if line in found:
                found[line].theorems.append(row["theorem"])
            else:
                file = f"{self.path}-at-production-sizes-{len(found) + 1}.json"
                scenario = _read(content, self.target)
                found[line] = AtScale(file, line, dumps(scenario), [row["theorem"]])
        return list(found.values())


def counterexamples(
    pages: Mapping[str, tuple[str, Sequence[Row]]], drivers: Mapping[str, Driver | str]
) -> Iterator[Counterexample]:
    """Yield the counterexamples of pages, each replayed on its target's own manager.

    Args:
        pages: Of `grouped`.
        drivers: By target, what builds its managers, or why nothing can be built.

    Raises:
        ScenarioError: A row's counterexample is no scenario.
    """
    for path, (target, found) in pages.items():
        scenario = _read(found[0]["scenario"], target)
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
        identity = [row["target"], _steps_of(row)]
        path = heads.setdefault(
            names.hashed(identity), names.of_counterexample(row["scenario"]["name"], identity)
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


def _read(content: Mapping[str, Any], target: str) -> Scenario:
    (scenario,) = loads(json.dumps(content), name=f"counterexample in {target}")
    return scenario


def _command(*lines: Sequence[str]) -> str:
    """A command as a shell takes it, in lines that need no breaking."""
    return " \\\n  ".join(map(shlex.join, lines))
