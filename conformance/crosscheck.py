"""Check verdicts another way: proofs with a second solver, counterexamples on the real code.

A proof has two parts, and both are asked again: no path breaks the claim, and no situation lies off
the paths. A counterexample counts when the tree's own manager, run natively, shows it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from conformance.obligations import Row
from conformance.replay import Outcome, replay_in
from conformance.scenario import loads
from conformance.targets import Tree
from models import second_solver
from models.predict import LiftedTree
from models.prove import Prover, explorations_for
from models.smt import Answer
from spec.theorems import THEOREMS, Theorem

AGREES, DISAGREES, UNDECIDED = "agrees", "disagrees", "undecided"


def crosscheck(tree: Tree, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one target with what the second check says, under ``crosscheck``.

    A row that is neither PROVED nor REFUTED has nothing to check: its entry is None.

    Raises:
        SecondSolverMissing: cvc5 is not installed.
    """
    checker = _Checker(tree)
    return [{**row, "crosscheck": checker.check(row)} for row in rows]


class _Checker:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lifted = LiftedTree(tree.root)
        self._provers: dict[tuple[Any, ...], list[Prover]] = {}

    def check(self, row: Row) -> str | None:
        if row["verdict"] == "REFUTED":
            return self._on_real_code(row)
        return self._with_second_solver(row) if row["verdict"] == "PROVED" else None

    def _on_real_code(self, row: Row) -> str:
        scenarios = loads(json.dumps(row["scenario"]), name="counterexample")
        (found,) = replay_in(self._tree.root, "core", scenarios, target=row["target"])
        if found.outcome is Outcome.COULD_NOT_RUN:
            return UNDECIDED
        is_shown = found.outcome is Outcome.REPRODUCED and row["theorem"] in found.violated
        return AGREES if is_shown else DISAGREES

    def _with_second_solver(self, row: Row) -> str:
        theorem = THEOREMS[row["theorem"]]
        scripts = (
            script
            for prover in self._provers_of(row, theorem)
            for script in (*prover.smtlib(theorem), prover.uncovered_smtlib())
        )
        answers = {second_solver.ask(script) for script in scripts}
        if Answer.SAT in answers:
            return DISAGREES
        return UNDECIDED if Answer.UNKNOWN in answers else AGREES

    def _provers_of(self, row: Row, theorem: Theorem) -> list[Prover]:
        kind = row["manager"], row["family"], tuple(row["tags"])
        key = *kind, theorem.asks
        if key not in self._provers:
            found = explorations_for(self._lifted, *kind, theorem)
            self._provers[key] = [Prover(exploration) for exploration in found]
        return self._provers[key]
