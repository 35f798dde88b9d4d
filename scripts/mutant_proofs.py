"""What becomes of a small change to a release when the copy that has it is proved like any tree."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

from conformance.driver import core_driver
from conformance.generate import refutation
from conformance.replay import Outcome as ReplayOutcome
from conformance.replay import replay
from conformance.report import counterexample_line
from conformance.scenario import to_json
from models import smt
from models.lift import (
    Exploration,
    MaybeMissingPaths,
    NotUnderstood,
    PathSummary,
    Variant,
    variants_of,
)
from models.loader import Core
from models.predict import LiftedTree
from models.prove import Counterexample, Obligation, Prover, Refutations, Verdict, explorations_for
from models.rewrite import rewrite
from models.runtime import BUILTINS
from models.step import ManagerRun
from models.term import Unsupported
from models.traits import Traits, traits_of
from scripts.mutations import Mutant, fits, mutated_tree
from scripts.same_steps import Behaviour, NotComparable, difference, is_same
from spec.assumptions import MAMBA_GROUPS
from spec.theorems import OBLIGATIONS, THEOREMS, Asks

MODEL_THEOREM = "matches-intended"

#: Parts of a manager that no step changes; everything else is compared after the step.
_CONSTANT_PARTS = frozenset({"kv_cache_spec", "block_pool", "_null_block"})
#: Functions that are called by the removal of skipped blocks, and those by nothing else.
_ONLY_IN_REMOVAL = frozenset({"remove_skipped_blocks", "_remove_blocks_in_range"})
_IN_REMOVAL = _ONLY_IN_REMOVAL | {"cdiv"}
_OF_HITS = ("hit-full", "hit-partial", "external-async", "external-sync", "resumed")
#: Files of what adds up groups; no group's manager calls what is there.
_OF_THE_SUM = ("vllm/v1/core/kv_cache_coordinator.py", "vllm/v1/core/kv_cache_manager.py")
#: Functions that full attention calls, and the align-mode manager overrides.
_OF_FULL_ATTENTION = (
    "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
    "SingleTypeKVCacheManager.allocate_new_blocks",
)
#: Qualified names that start so are called by the align-mode manager alone.
_OF_MAMBA = ("MambaManager.", "get_mamba_", "is_mamba_")
#: Families whose steps, and what is done before them, call a function at all; others: all of them.
_ONLY_IN_STEPS_OF: dict[str, tuple[str, ...]] = {
    "add_local_computed_blocks": (*_OF_HITS, "promoted"),
    "allocate_external_computed_blocks": (*_OF_HITS, "promoted"),
    "_apply_cow": _OF_HITS,
}
#: Families that likely show a change come first.
_LIKELY_FIRST = ("first", "running", "checkpoint", "hit-partial")
#: Seconds per attempt of the solver, by seed, where a copy is asked about. Releases get longer: a
#: question about a copy that stays open makes a survivor, which is the harder judgement.
_ATTEMPTS = {0: 1.0, 1: 10.0}
#: Name of the copy among predictions.
_TARGET = "path:the copy"
#: A family with its tags.
Kind = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """What is explored at once: one kind of step in one setting, or the removal before it.

    Attributes:
        family: Slug.
        tags: Which of its steps.
        variant: In which setting.
        asks: What is done with the request.
        num_mamba_groups: Beside a full-attention group; 0 is one Mamba manager by itself.
    """

    family: str
    tags: tuple[str, ...]
    variant: Variant
    asks: Asks = Asks.STEP
    num_mamba_groups: int = 0

    @property
    def manager(self) -> str:
        """Slug of the manager whose step it is."""
        return "coordinator" if self.num_mamba_groups else "mamba-align"

    @property
    def label(self) -> str:
        """The kind of step, as one word, and whose it is unless it is one manager's."""
        kind = "+".join((self.family, *self.tags))
        return f"{self.manager}:{kind}" if self.num_mamba_groups else kind


class _WatchedCore(Core):
    """A lifted core that keeps what each manager built from it returned and freed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, rewrite=rewrite, overrides=BUILTINS)
        self.returned: dict[int, Any] = {}
        self.told_pool: dict[int, dict[str, list[Any]]] = {}
        self._watched = self._watching(super().symbol_of("MambaManager"))

    def symbol_of(self, name: str) -> Any:
        """Return a class of the core; the manager's is one that is watched."""
        return self._watched if name == "MambaManager" else super().symbol_of(name)

    def forget(self) -> None:
        """Let go of what the managers of an exploration that is done did."""
        for kept in (self.returned, self.told_pool):
            kept.clear()

    def _watching(self, manager_class: Any) -> Any:
        core = self

        class Watched(manager_class):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                pool = kwargs["block_pool"]
                freed: list[Any] = []
                moved: list[Any] = []
                core.told_pool[id(self)] = {"freed blocks": freed, "moved hashes": moved}
                take_back, move = pool.free_blocks, pool.move_block_hashes

                def free_blocks(blocks: Any) -> None:
                    freed.append(blocks.copy())
                    take_back(blocks)

                def move_block_hashes(source: Any, target: Any) -> None:
                    moved.append((source, target))
                    move(source, target)

                pool.free_blocks, pool.move_block_hashes = free_blocks, move_block_hashes

            @wraps(manager_class.allocate_new_blocks)  # its signature is asked for
            def allocate_new_blocks(self, *args: Any, **kwargs: Any) -> Any:
                core.returned[id(self)] = returned = super().allocate_new_blocks(*args, **kwargs)
                return returned

        Watched.__name__ = manager_class.__name__
        return Watched


class Lifted(LiftedTree):
    """One tree, lifted: each case is explored once, with what its steps leave.

    Args:
        root: Folder holding `vllm/`.
        same: A tree whose groups' managers are the same, so that theirs are not explored again.

    Attributes:
        refutations: What was shown of the tree's paths, and of its mutants'.
    """

    def __init__(self, root: Path, same: Lifted | None = None) -> None:
        self._core = self._watched_core = _WatchedCore(root)
        self.traits = traits_of(self._core)
        self._explored, self._parts = {}, {}
        self._left: dict[Case, tuple[Mapping[str, Any], ...]] = {}
        if same is not None:
            self._left |= same._left
            self._explored |= {
                case: same._explored[case] for case in same._explored if not case[-1]
            }
        self._refuted: dict[tuple[Any, ...], bool] = {}
        self.refutations = Refutations()

    def behaviour(self, case: Case) -> Behaviour:
        """Return all steps of a case.

        Raises:
            NotUnderstood: As :func:`models.lift.explore`.
        """
        exploration = self.exploration(
            case.family,
            case.tags,
            case.variant,
            asks=case.asks,
            num_mamba_groups=case.num_mamba_groups,
        )
        left = self._left.get(case)
        return Behaviour(exploration, left or tuple({} for _ in exploration.paths))

    def exploration(
        self,
        family: str,
        tags: tuple[str, ...],
        variant: Variant,
        *,
        asks: Asks = Asks.STEP,
        num_mamba_groups: int = 0,
    ) -> Exploration:
        """Explore as `LiftedTree` does, and keep what the steps leave."""
        case = Case(family, tags, variant, asks, num_mamba_groups)
        found = super().exploration(
            family, tags, variant, asks=asks, num_mamba_groups=num_mamba_groups
        )
        if not num_mamba_groups and case not in self._left:
            self._left[case] = tuple(map(self._left_by, found.paths))
        self._watched_core.forget()
        return found

    def is_refuted(self, case: Case, theorem: str) -> bool:
        """Whether a theorem is refuted for a kind of step, in whichever setting."""
        key = (case.manager, case.family, case.tags, theorem)
        if key not in self._refuted:
            explorations = explorations_for(
                self, case.manager, case.family, case.tags, THEOREMS[theorem]
            )
            self._refuted[key] = any(
                Prover(each, self.refutations).look_for(THEOREMS[theorem]).answer is smt.Answer.SAT
                for each in explorations
            )
        return self._refuted[key]

    def _left_by(self, path: PathSummary) -> dict[str, Any]:
        assert isinstance(path.run, ManagerRun)
        manager = path.run.manager
        parts = {k: v for k, v in vars(manager).items() if k not in _CONSTANT_PARTS}
        return {
            **parts,
            "returned blocks": self._watched_core.returned.get(id(manager)),
            **self._watched_core.told_pool[id(manager)],
        }


_lifted_release = cache(Lifted)


def cases_of(traits: Traits, mutant: Mutant) -> Iterator[Case]:
    """Yield the cases that a function has a part in; those likely to show a change come first.

    Gates are left out of one manager by itself: they ask its estimator what a step of the whole
    request asks it.
    """
    name = mutant.function.rpartition(".")[2]
    kinds = [kind for kind in OBLIGATIONS if traits.why_not(*kind) is None]
    if mutant.file not in _OF_THE_SUM and name in _IN_REMOVAL:
        for family, tags in kinds:
            if THEOREMS["removal-keeps-state"].why_not(family) is None:
                yield Case(family, tags, Variant(), Asks.REMOVAL)
        if name in _ONLY_IN_REMOVAL:
            return
    steps = [
        Case(*kind, variant, asks, number)
        for kind in kinds
        if kind[0] in _ONLY_IN_STEPS_OF.get(name, kind)
        for variant in variants_of(traits, kind[0])
        for number in _numbers_of_groups(mutant)
        for asks in _asked(kind[0], number)
    ]
    yield from sorted(steps, key=_likelihood)


def _likelihood(case: Case) -> tuple[Any, ...]:
    is_likely = case.family in _LIKELY_FIRST and "overwide" not in case.tags
    place = _LIKELY_FIRST.index(case.family) if is_likely else len(_LIKELY_FIRST)
    return case.num_mamba_groups, case.variant != Variant(), place


def _numbers_of_groups(mutant: Mutant) -> tuple[int, ...]:
    """Mamba groups beside a full-attention group where the function has a part; 0 is by itself."""
    if mutant.file in _OF_THE_SUM or mutant.function in _OF_FULL_ATTENTION:
        return MAMBA_GROUPS
    return (0,) if mutant.function.startswith(_OF_MAMBA) else (0, *MAMBA_GROUPS)


def _asked(family: str, num_mamba_groups: int) -> tuple[Asks, ...]:
    gate = THEOREMS["gate-covers-first-step"]
    asks_gate = num_mamba_groups and gate.why_not(family) is None
    return (Asks.STEP, Asks.GATE) if asks_gate else (Asks.STEP,)


class Outcome(str, Enum):
    """What became of a mutant; only a survivor is a hole."""

    REFUTED = "refuted"
    MODEL_ONLY = "refuted by matches-intended alone"
    NOT_UNDERSTOOD = "not understood"
    """The lifter refuses the copy: verdicts are UNSUPPORTED, which is never a pass."""
    EQUIVALENT = "equivalent"
    DOES_NOT_FIT = "does not fit"
    """The release has no such tokens."""
    SURVIVED = "survived"


class Shown(str, Enum):
    """Whether the changed code, run natively, shows a counterexample."""

    AS_PREDICTED = "as predicted"
    """Its numbers are those of the lifted code, and the theorem is broken."""
    OTHERWISE = "otherwise"
    """The theorem is broken, in other numbers."""
    NOT = "not shown"


@dataclass(frozen=True)
class Refutation:
    """A theorem that the release keeps and the mutant breaks."""

    theorem: str
    kind: str
    shown: Shown
    history: str
    """The step that shows it, in numbers."""


@dataclass(frozen=True)
class Judgement:
    """What became of a mutant by proof."""

    mutant: Mutant
    outcome: Outcome
    refutation: Refutation | None = None
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def by(self) -> str:
        """The theorem that is refuted, with the kind of step; empty where none is."""
        found = self.refutation
        return "" if found is None else f"{found.theorem} ({found.kind})"


def judge(mutant: Mutant, root: Path) -> Judgement:
    """Make the change, prove the copy, and say what became of the mutant.

    The first theorem that is refuted for the copy and not for the release ends it; cases in which
    the two are shown to do the same need no theorem.

    Args:
        mutant: The change.
        root: The release's tree.
    """
    started = time.perf_counter()
    with mutated_tree(root, mutant) as tree:
        try:
            found = _judge(mutant, _lifted_release(root), tree)
        except (Exception, Unsupported) as error:  # else its process would end without an answer
            note = f"{type(error).__name__}: {error}".replace(str(tree), "the copy")
            found = Judgement(mutant, Outcome.SURVIVED, None, (note,))
    return replace(found, seconds=time.perf_counter() - started)


def _judge(mutant: Mutant, release: Lifted, tree: Path) -> Judgement:
    lifted = Lifted(tree, release if mutant.file in _OF_THE_SUM else None)
    different: list[Case] = []
    doubts: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    by_model: Refutation | None = None
    for case in cases_of(release.traits, mutant):
        if any(case.label in labels for labels in refused.values()):
            continue  # another setting of it adds nothing
        try:
            behaviour = lifted.behaviour(case)
            if is_same(release.behaviour(case), behaviour):
                continue
        except NotUnderstood as error:
            kept = doubts if isinstance(error, MaybeMissingPaths | NotComparable) else refused
            kept.setdefault(str(error).replace(f"{tree}/", ""), []).append(case.label)
            continue
        different.append(case)
        found = _first_broken(release, behaviour.exploration, case)
        if found is None:
            continue
        broken = _refutation(lifted, tree, case, *found)
        if broken.theorem != MODEL_THEOREM:
            return Judgement(mutant, Outcome.REFUTED, broken)
        by_model = by_model or broken
    if by_model is not None:
        return Judgement(mutant, Outcome.MODEL_ONLY, by_model)
    if refused:
        return Judgement(mutant, Outcome.NOT_UNDERSTOOD, None, _notes(refused))
    if different:  # the first one in detail: the questions are many, and some are hard
        first, *others = different
        for doubt in difference(release.behaviour(first), lifted.behaviour(first)):
            doubts.setdefault(doubt, []).append(first.label)
        also = dict.fromkeys(case.label for case in others if case.label != first.label)
        if also:
            doubts.setdefault("not shown to be the same", []).extend(also)
    outcome = Outcome.SURVIVED if doubts else Outcome.EQUIVALENT
    return Judgement(mutant, outcome, None, _notes(doubts))


def _notes(found: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(f"{', '.join(dict.fromkeys(kinds))}: {what}" for what, kinds in found.items())


def _first_broken(
    release: Lifted, exploration: Exploration, case: Case
) -> tuple[str, Counterexample] | None:
    """The first theorem that the mutant breaks and the release keeps; the model's is the last."""
    prover = Prover(exploration, release.refutations)
    for slug in _theorems_of(release, case):
        holds = prover.look_for(THEOREMS[slug]).answer is smt.Answer.UNSAT
        if holds or release.is_refuted(case, slug):
            continue
        counterexample = prover.settle(THEOREMS[slug]).counterexample
        if counterexample is not None:
            return slug, counterexample
    return None


def _theorems_of(release: Lifted, case: Case) -> list[str]:
    """Theorems about a case, the model's last."""
    return [
        slug
        for slug, theorem in sorted(THEOREMS.items(), key=lambda item: item[0] == MODEL_THEOREM)
        if case.manager in theorem.managers
        and theorem.asks is case.asks
        and theorem.why_not(case.family, case.tags) is None
        and release.traits.why_not(case.family, case.tags, slug) is None
    ]


def _refutation(
    lifted: Lifted, tree: Path, case: Case, theorem: str, found: Counterexample
) -> Refutation:
    """Replay a counterexample, made a scenario, on the changed code itself."""
    of_case = case.manager, case.family, case.tags, theorem
    obligation = Obligation(*of_case, Verdict.REFUTED, (), 0.0, found)
    shown, history = Shown.NOT, ""
    try:
        scenario = refutation(_TARGET, obligation, found, {_TARGET: lifted})
        seen = replay(scenario, core_driver(tree), _TARGET)
    except (Exception, Unsupported):  # a mutant may break anything
        return Refutation(theorem, case.label, shown, history)
    if seen.theorem_holds is False:
        reproduced = seen.outcome is ReplayOutcome.REPRODUCED
        shown = Shown.AS_PREDICTED if reproduced else Shown.OTHERWISE
        history = counterexample_line(to_json(scenario), _TARGET)
    return Refutation(theorem, case.label, shown, history)


def judge_all(mutants: Sequence[Mutant], root: Path, *, jobs: int) -> Iterator[Judgement]:
    """Judge mutants side by side, and yield what became of each as it comes.

    A mutant that does not fit the tree is said to be so, and not judged.
    """
    # A process per mutant: terms are interned, and what a solver is able to say may depend on the
    # order in which they came up. Where processes are forked, they share what is explored here.
    fitting = [mutant for mutant in mutants if fits(mutant, root)]
    unfit = partial(Judgement, outcome=Outcome.DOES_NOT_FIT)
    yield from (unfit(mutant) for mutant in mutants if mutant not in fitting)
    if not fitting:
        return
    release = _lifted_release(root)
    cases = (case for mutant in fitting for case in cases_of(release.traits, mutant))
    for case in dict.fromkeys(cases):
        release.behaviour(case)
        for slug in _theorems_of(release, case):
            release.is_refuted(case, slug)
    with multiprocessing.Pool(jobs, _give_up_sooner, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(partial(judge, root=root), fitting)


def _give_up_sooner() -> None:
    smt.ATTEMPTS = _ATTEMPTS
