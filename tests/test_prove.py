from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models import smt, term
from models.evaluate import Evaluator
from models.lift import Exploration, Variant, summary_of
from models.predict import LiftedTree, values_of, violated
from models.prove import (
    Counterexample,
    Obligation,
    Prover,
    Refutations,
    Verdict,
    prove,
)
from models.smt import Answer, ModelMismatch, Question, Result
from spec.assumptions import (
    ASSUMPTIONS,
    OF_CLAIMS,
    OF_GROUPS,
    OF_SOME_RELEASES,
    OF_THE_COORDINATOR,
    OF_THE_GATE,
    SPECULATIVE_BLOCKS,
)
from spec.families import FAMILIES
from spec.theorems import OBLIGATIONS, THEOREMS

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("0.30.0", "0.31.0")
#: Families proved here; the rest is proved by the expected verdicts' tests.
PROVED_FAMILIES = ("first", "running", "checkpoint")
KINDS = [kind for kind in OBLIGATIONS if kind[0] in PROVED_FAMILIES]
#: A table that is too long makes the estimate negative.
_NEGATIVE = {"no-undercount", "exact-estimate", "estimate-nonnegative", "matches-intended"}
_CHECKPOINT_ON_LONG_TABLE = _NEGATIVE | {
    "checkpoint-recorded",
    "retirement-recorded",
    "only-states-are-held",
}
#: A checkpoint step leaves its draft blocks where they are, and draws new ones.
_NEW_DRAFT_BLOCKS = {
    "matches-intended",
    "only-states-are-held",
    "peak-within-sizing",
    "gate-covers-lifetime",
    "eventually-admitted",
}
#: By kind of step, the theorems that do not hold.
REFUTED: dict[str, dict[tuple[str, tuple[str, ...]], set[str]]] = {
    "0.30.0": {
        ("first", ("checkpoint",)): {"gate-covers-first-step"},
        ("running", ()): {"gate-covers-lifetime"},
        ("running", ("overwide",)): _NEGATIVE,
        ("checkpoint", ()): {"exact-estimate", "bounded-demand", *_NEW_DRAFT_BLOCKS},
        ("checkpoint", ("overwide",)): _CHECKPOINT_ON_LONG_TABLE | {"bounded-demand"},
    },
    "0.31.0": {
        ("first", ("checkpoint",)): {"gate-covers-first-step"},
        ("running", ()): {"gate-covers-lifetime"},
        ("running", ("overwide",)): _NEGATIVE,
        ("checkpoint", ()): _NEW_DRAFT_BLOCKS,
        ("checkpoint", ("overwide",)): _CHECKPOINT_ON_LONG_TABLE,
    },
}

Proved = dict[str, list[Obligation]]
Explored = dict[tuple[str, str, tuple[str, ...], bool], Exploration]


#: The manager whose verdicts are looked at one by one here.
ONE_MANAGER = "mamba-align"


@pytest.fixture(scope="module")
def explored(lifted_trees: Mapping[str, LiftedTree]) -> Explored:
    return {
        (release, family, tags, eagle): lifted_trees[release].exploration(
            family, tags, Variant(eagle)
        )
        for release in RELEASES
        for family, tags in KINDS
        for eagle in (False, True)
    }


@pytest.fixture(scope="module")
def proved(lifted_trees: Mapping[str, LiftedTree]) -> Proved:
    return {
        release: list(
            prove(lifted_trees[release], managers=(ONE_MANAGER,), families=PROVED_FAMILIES)
        )
        for release in RELEASES
    }


def test_the_verdicts_of_the_fault_and_its_fix(proved: Proved) -> None:
    """0.30.0 overcounts checkpoint steps; 0.31.0 counts them, but not on a table that is longer."""
    for release in RELEASES:
        of_one = [theorem for theorem in THEOREMS.values() if ONE_MANAGER in theorem.managers]
        assert len(proved[release]) == len(KINDS) * len(of_one)
        for obligation in proved[release]:
            refuted = REFUTED[release].get((obligation.family, obligation.tags), set())
            is_refuted = obligation.theorem in refuted
            expected = Verdict.REFUTED if is_refuted else Verdict.PROVED
            if THEOREMS[obligation.theorem].why_not(obligation.family, obligation.tags) is not None:
                expected = Verdict.NOT_APPLICABLE
            assert obligation.verdict is expected, (release, obligation)
            assert (obligation.counterexample is not None) is is_refuted
            assert (obligation.reason is None) is (expected is not Verdict.NOT_APPLICABLE)


def test_what_a_tree_does_not_have_is_not_applicable(
    lifted_trees: Mapping[str, LiftedTree],
) -> None:
    """A release without partial tails and checkpoints is asked about neither, and says why."""
    found = list(prove(lifted_trees["0.24.0"], families=("hit-partial", "own-tail", "checkpoint")))

    assert {obligation.verdict for obligation in found} == {Verdict.NOT_APPLICABLE}
    assert all(obligation.reason for obligation in found)


def test_a_counterexample_breaks_its_claim_in_plain_numbers(
    proved: Proved, lifted_trees: Mapping[str, LiftedTree]
) -> None:
    """Every refutation is a step of numbers that is in its family, fair, and breaks the claim."""
    for release in RELEASES:
        for obligation in proved[release]:
            found = obligation.counterexample
            if found is None:
                continue
            situation = found.situation
            assert all(isinstance(value, int) for value in vars(situation.call).values())
            assert FAMILIES[obligation.family].holds(situation) is True
            assert all(assumption.holds(situation) is True for assumption in ASSUMPTIONS)
            assert obligation.theorem in violated(
                situation, found.step, lifted_trees[release].traits
            )


def test_a_counterexample_is_the_least(proved: Proved, explored: Explored) -> None:
    """No counterexample has a smaller block size, or the same and fewer tokens."""
    for release in RELEASES:
        for obligation in proved[release]:
            if obligation.counterexample is None:
                continue
            least = obligation.counterexample.situation
            theorem = THEOREMS[obligation.theorem]
            if theorem.asks_gate or theorem.asks_removal:
                continue
            exploration = explored[release, obligation.family, obligation.tags, False]
            question = Question(exploration.assumptions)
            question.add(Prover(exploration).violation(THEOREMS[obligation.theorem]))
            g = exploration.situation.geometry
            same = g.num_speculative_blocks == least.geometry.num_speculative_blocks
            fewer = g.num_speculative_blocks < least.geometry.num_speculative_blocks
            smaller = same & (g.block_size < least.geometry.block_size)
            assert question.ask(fewer | smaller).answer is Answer.UNSAT


def test_a_core_is_enough(explored: Explored, proved: Proved) -> None:
    """A proof goes through again with nothing but the assumptions that it says it used."""
    for (release, family, tags, _), exploration in explored.items():
        prover = Prover(exploration)
        for obligation in proved[release]:
            if (obligation.family, obligation.tags) != (family, tags):
                continue
            theorem = THEOREMS[obligation.theorem]
            is_of_step = not theorem.asks_gate and not theorem.asks_removal
            if obligation.verdict is Verdict.PROVED and is_of_step:
                used = set(obligation.assumptions)
                named = {k: v for k, v in exploration.assumptions.items() if k in used}
                claim_fails = prover.violation(THEOREMS[obligation.theorem])
                assert Question(named).ask(claim_fails).answer is Answer.UNSAT


def test_a_proof_lists_what_it_builds_on(
    proved: Proved, lifted_trees: Mapping[str, LiftedTree]
) -> None:
    """What holds by how the variables are declared is listed; every slug has a record."""
    every = (*ASSUMPTIONS, *OF_SOME_RELEASES, *OF_THE_GATE, *OF_GROUPS, *OF_THE_COORDINATOR)
    every = (*every, *OF_CLAIMS)
    known = {assumption.slug for assumption in every} | {"family"}
    for release in RELEASES:
        for obligation in proved[release]:
            if obligation.verdict is Verdict.NOT_APPLICABLE:
                continue
            used = set(obligation.assumptions)
            assert used <= known
            assert {"prompt-has-tokens", "one-token-behind-checkpoint"} <= used
            has_table = obligation.family != "first"
            assert ("table-holds-computed-state" in used) is has_table
            if obligation.verdict is Verdict.REFUTED:
                in_force = lifted_trees[release].traits.assumptions()
                assert {assumption.slug for assumption in in_force} <= used


def test_no_path_is_missing_without_the_completeness_proof(explored: Explored) -> None:
    """The paths of an exploration cover what its assumptions allow, asked once more."""
    for exploration in explored.values():
        question = Question(exploration.assumptions)
        question.add(*(smt.term.negation(path.condition) for path in exploration.paths))
        assert question.ask().answer is Answer.UNSAT


# ---- VACUOUS ------------------------------------------------------------------------------------


def test_a_theorem_whose_witness_cannot_occur_is_vacuous(explored: Explored) -> None:
    """A claim that holds, but never in the case that makes it interesting, is not PROVED."""
    exploration = explored["0.31.0", "first", (), False]
    theorem = replace(THEOREMS["no-undercount"], witness=lambda s, step: step.drawn >= 10)

    assert Prover(exploration).settle(theorem).verdict is Verdict.VACUOUS


def test_a_witness_that_only_the_solver_finds_counts(explored: Explored) -> None:
    """A witness need not be among the paths' samples."""
    exploration = explored["0.31.0", "first", (), False]
    theorem = replace(
        THEOREMS["no-undercount"], witness=lambda s, step: s.call.num_tokens_main_model == 123_457
    )

    assert Prover(exploration).settle(theorem).verdict is Verdict.PROVED


def test_a_family_without_steps_is_vacuous(
    trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where assumptions leave no step at all, nothing is proved."""
    impossible = replace(FAMILIES["first"], holds=lambda s: s.call.num_tokens <= 0)
    monkeypatch.setitem(FAMILIES, "first", impossible)

    obligations = list(prove(LiftedTree(trees["0.31.0"]), families=["first"]))

    asked = [o for o in obligations if o.verdict is not Verdict.NOT_APPLICABLE]
    assert {obligation.verdict for obligation in asked} == {Verdict.VACUOUS}
    assert all(obligation.reason for obligation in obligations)


def test_a_step_that_always_raises_proves_nothing(copy_tree: Callable[..., Path]) -> None:
    """Where every step raises, allocation is refuted and claims on its numbers are vacuous."""
    line = "            checkpoint_block = int(request_id in self._checkpoints)\n"
    root = copy_tree("0.31.0", (line, f"{line}            assert num_tokens < 0\n"))

    verdicts = {o.theorem: o for o in prove(LiftedTree(root), families=["first"]) if not o.tags}

    assert verdicts["allocation-succeeds"].verdict is Verdict.REFUTED
    counterexample = verdicts["allocation-succeeds"].counterexample
    assert counterexample is not None
    assert counterexample.step.raised == "AssertionError"
    assert str(counterexample.raised_at).startswith("vllm/v1/core/single_type_kv_cache_manager.py:")
    others = {o.verdict for slug, o in verdicts.items() if slug != "allocation-succeeds"}
    assert others == {Verdict.VACUOUS, Verdict.NOT_APPLICABLE}


@pytest.mark.parametrize(
    "changed",
    ["False", "len(new_computed_blocks) > 0"],
    ids=["never", "always"],
)
def test_a_release_that_waits_for_other_hits_than_those_of_the_same_step_is_refuted(
    copy_tree: Callable[..., Path], changed: str
) -> None:
    """A copy that puts no hit off, or any, differs from the intended model, and in no count."""
    asked = """            len(new_computed_blocks) > 0
            and new_computed_blocks[-1].block_hash in self.cached_blocks_this_step
"""
    root = copy_tree("0.31.0", (asked, f"            {changed}\n"))

    found = prove(LiftedTree(root), families=["hit-full"], managers=[ONE_MANAGER])
    verdicts = {o.theorem: o for o in found if not o.tags}

    refuted = {slug for slug, o in verdicts.items() if o.verdict is Verdict.REFUTED}
    assert refuted == {"matches-intended"}
    counterexample = verdicts["matches-intended"].counterexample
    assert counterexample is not None
    is_put_off = changed != "False"
    assert counterexample.step.deferred is is_put_off
    assert counterexample.situation.hit_is_of_this_step is not is_put_off


# ---- UNKNOWN and mismatches ---------------------------------------------------------------------


def test_a_solver_that_gives_up_leaves_unknown(
    explored: Explored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question beyond the budget is UNKNOWN with the budget, never a pass."""
    monkeypatch.setattr(smt, "RESOURCE_LIMIT", 1)

    part = Prover(explored["0.31.0", "running", (), False]).settle(THEOREMS["no-undercount"])

    assert part.verdict is Verdict.UNKNOWN
    assert "budget: 1 solver steps" in str(part.reason)


def test_an_exploration_that_the_solver_cannot_finish_is_unknown(
    trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not knowing whether paths are missing is the solver's limit, not the code's fault."""
    monkeypatch.setattr(smt, "RESOURCE_LIMIT", 1)

    obligations = list(prove(LiftedTree(trees["0.31.0"]), families=["running"]))

    asked = [o for o in obligations if o.verdict is not Verdict.NOT_APPLICABLE]

    assert {obligation.verdict for obligation in asked} == {Verdict.UNKNOWN}
    assert all("paths may be missing" in str(o.reason) for o in asked)


def test_an_unknown_witness_is_unknown(explored: Explored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solver cannot find out whether the interesting case occurs, nothing is proved."""
    prover = Prover(explored["0.31.0", "first", (), False])
    theorem = replace(THEOREMS["no-undercount"], witness=lambda s, step: step.drawn >= 10)
    ask = Question.ask
    monkeypatch.setattr(
        Question,
        "ask",
        lambda self, *also, given=(): (
            ask(self, *also, given=given) if given else Result(Answer.UNKNOWN, reason="no idea")
        ),
    )

    part = prover.settle(theorem)

    assert (part.verdict, part.reason) == (Verdict.UNKNOWN, "witness: no idea")


def test_a_model_that_python_does_not_confirm_never_leaves(
    trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With comparisons encoded one off, proving stops instead of refuting."""
    translation = smt._Translation()
    honest = translation._made

    def off_by_one(x: Any) -> Any:
        if x.kind not in ("le", "eq"):
            return honest(x)
        number = translation.number(x.args[0])
        return number <= 1 if x.kind == "le" else number == 1

    monkeypatch.setattr(translation, "_made", off_by_one)
    monkeypatch.setattr(smt, "_TRANSLATION", translation)

    with pytest.raises(ModelMismatch):
        list(prove(LiftedTree(trees["0.30.0"]), families=["first"]))


def test_a_claim_that_is_wrong_for_one_number_is_refuted(explored: Explored) -> None:
    """A proof is for all sizes: one exception anywhere is found, and is the counterexample."""
    exploration = explored["0.31.0", "running", (), False]
    theorem = replace(
        THEOREMS["no-undercount"],
        claim=lambda s, step, pool, need: s.call.num_tokens_main_model != 987_654,
    )

    part = Prover(exploration).settle(theorem)

    assert part.verdict is Verdict.REFUTED
    assert part.counterexample is not None
    assert part.counterexample.situation.call.num_tokens_main_model == 987_654


def test_the_exported_script_says_what_was_asked(explored: Explored) -> None:
    """A proved theorem's script is unsatisfiable, a refuted one's is not."""
    for release, slug, answer in (
        ("0.31.0", "exact-estimate", "unsat"),
        ("0.30.0", "exact-estimate", "sat"),
    ):
        (script,) = Prover(explored[release, "checkpoint", (), False]).smtlib(THEOREMS[slug])
        solver = smt.z3.SolverFor(smt.LOGIC)
        solver.from_string(script)
        assert str(solver.check()) == answer


def test_a_claim_is_asked_about_in_parts_that_leave_out_no_step(explored: Explored) -> None:
    """One number of speculative blocks at a time, and all others, which the assumptions exclude."""
    prover = Prover(explored["0.31.0", "running", (), False])
    theorem = THEOREMS["no-block-twice"]
    parts = [
        term.conjunction((path.condition, way))
        for path in prover.exploration.paths
        for way in prover._ways_to_break(theorem, path)
    ]
    question = smt.Question()
    question.add(prover.violation(theorem), term.negation(term.disjunction(parts)))

    assert len(parts) % (len(SPECULATIVE_BLOCKS) + 1) == 0
    assert len(parts) > len(SPECULATIVE_BLOCKS) + 1
    assert question.ask().answer is Answer.UNSAT
    assert sum(1 for _ in prover.smtlib(theorem)) == len(SPECULATIVE_BLOCKS) + 1


def test_a_refutation_is_known_only_where_all_that_it_used_holds() -> None:
    """Of another formula, or where something is missing, nothing is known."""
    a, b, c = (term.bool_var(name) for name in ("known_a", "known_b", "known_c"))
    refutations = Refutations()
    refutations.add(c, frozenset({id(a), id(b)}), ("slug",))

    assert refutations.core_of(c, {id(a), id(b), id(c)}) == ("slug",)
    assert refutations.core_of(c, {id(a), id(c)}) is None
    assert refutations.core_of(a, {id(a), id(b)}) is None


@pytest.mark.parametrize("family", ["first", "hit-partial"])
def test_what_was_refuted_before_changes_no_verdict(
    family: str, trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings and groups that know of each other's refutations come to what they come to alone."""

    def verdicts() -> list[tuple[Any, ...]]:
        return [
            (o.manager, o.tags, o.theorem, o.verdict, repr(o.counterexample))
            for o in prove(LiftedTree(trees["0.31.0"]), families=[family])
        ]

    together, known = verdicts(), Refutations.core_of
    uses = []

    def noted(self: Refutations, formula: Any, facts: Any) -> Any:
        uses.append(known(self, formula, facts) is not None)

    monkeypatch.setattr(Refutations, "core_of", noted)
    alone = verdicts()

    assert alone == together
    assert any(uses)


@pytest.mark.parametrize(
    ("small", "verdict", "said"),
    [
        (Answer.UNSAT, Verdict.UNKNOWN, "it holds there"),
        (Answer.UNKNOWN, Verdict.UNKNOWN, "none, the same"),
    ],
)
def test_where_the_solver_gives_up_small_sizes_are_looked_at(
    small: Answer, verdict: Verdict, said: str, explored: Explored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is evidence with its bounds, and never a proof."""
    prover = Prover(explored["0.31.0", "first", (), False])

    def ask(self: Question, *formulas: object, given: Sequence[object] = ()) -> Result:
        answer = Answer.UNKNOWN if given else small
        return Result(answer, reason="out of reach")

    monkeypatch.setattr(Question, "ask", ask)
    part = prover.settle(THEOREMS["exact-estimate"])

    assert part.verdict is verdict
    assert part.reason == (
        f"out of reach; bounded evidence, block sizes up to 4 and up to 16 tokens: {said}"
    )


def test_a_small_counterexample_is_found_where_the_solver_gives_up(
    explored: Explored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least one of 57050 is small, so it does not take a question about all sizes."""
    prover = Prover(explored["0.30.0", "checkpoint", (), False])
    ask = Question.ask

    def give_up_on_all(
        self: Question, *formulas: term.BoolLike, given: Sequence[term.BoolLike] = ()
    ) -> Result:
        if given:
            return Result(Answer.UNKNOWN, reason="hard")
        return ask(self, *formulas)

    monkeypatch.setattr(Question, "ask", give_up_on_all)

    assert prover.settle(THEOREMS["exact-estimate"]).verdict is Verdict.REFUTED


def test_a_selection_of_nothing_yields_nothing(trees: Mapping[str, Path]) -> None:
    """Names that nothing has select no obligation."""
    assert list(prove(LiftedTree(trees["0.31.0"]), families=["first"], theorems=["none"])) == []
    assert list(prove(LiftedTree(trees["0.31.0"]), families=["none"])) == []


# ---- the same everywhere ------------------------------------------------------------------------

SCRIPT = """
import json, sys
from pathlib import Path
from models.predict import LiftedTree
from models.prove import prove
found = {}
for root in map(Path, sys.argv[1:]):
    names = ["exact-estimate", "matches-intended"]
    tree = LiftedTree(root)
    for o in prove(tree, managers=["mamba-align"], families=["checkpoint"], theorems=names):
        c = o.counterexample
        found[f"{root} {o.tags} {o.theorem}"] = (o.verdict.value, sorted(o.assumptions), repr(c))
print(json.dumps(found))
"""


def test_another_process_and_another_order_find_the_same(trees: Mapping[str, Path]) -> None:
    """Verdicts, cores and counterexamples do not depend on what was proved before, or on hashes."""
    results = []
    for roots, seed in ((RELEASES, "1"), (RELEASES[::-1], "2")):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *(str(trees[release]) for release in roots)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))

    for name in results[0]:
        assert results[0][name][0] == results[1][name][0]
        assert results[0][name][2] == results[1][name][2]


def test_a_counterexample_is_what_the_summary_says(proved: Proved, explored: Explored) -> None:
    """Evaluating the paths anew at a counterexample gives the step that it shows."""
    for obligation in proved["0.30.0"]:
        found = obligation.counterexample
        if found is None:
            continue
        assert isinstance(found, Counterexample)
        eagle = found.situation.geometry.drop_eagle_checkpoint_block
        if THEOREMS[obligation.theorem].asks_gate or found.situation.has_left_over_checkpoint:
            continue
        exploration = explored["0.30.0", obligation.family, obligation.tags, eagle]
        values = {**values_of(found.situation), "has_checkpoint_before": False}
        path = summary_of(exploration, values)
        assert path is not None
        assert Evaluator(values).number(path.step.estimate) == found.step.estimate
