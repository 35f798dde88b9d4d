"""Which small changes to the lifted functions the theorems notice.

Each change of tests/mutants.toml is made to a copy of a release's core, and the copy is proved like
any tree. A change is noticed when a theorem that is not refuted for the release is refuted for the
copy; else the solver must show that no step tells the two apart. Anything else is a hole in the
theorems: it is listed, and the exit status is 1. Counterexamples are run on the changed code, too.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
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
from conformance.targets import TargetError, resolve
from models import smt
from models.lift import (
    Exploration,
    MaybeMissingPaths,
    NotUnderstood,
    PathSummary,
    Variant,
    variants_of,
)
from models.loader import CORE_MODULES, Core
from models.predict import LiftedTree
from models.prove import Counterexample, Obligation, Prover, Refutations, Verdict, explorations_for
from models.rewrite import rewrite
from models.runtime import BUILTINS
from models.step import ManagerRun
from models.term import Unsupported
from models.traits import Traits, traits_of
from scripts.same_steps import Behaviour, NotComparable, difference, is_same
from spec.assumptions import MAMBA_GROUPS
from spec.theorems import OBLIGATIONS, THEOREMS, Asks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "mutants.toml"
#: The release that the changes are made for, so that each fits it; and the newest.
RELEASE, NEWEST = "0.31.0", "0.33.0"
KINDS = (
    "comparison",
    "sign",
    "constant",
    "extreme",
    "dropped-term",
    "negated-condition",
    "dropped-statement",
)
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


class MutantError(Exception):
    """The data is malformed, or does not fit the release; one line."""


# ---- the data ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One change of a few tokens.

    Attributes:
        name: Slug.
        file: Path below the tree's root.
        function: Qualified name of the function that changes.
        before: Tokens to change; they occur exactly once in the function.
        after: What they become.
        kind: One of `KINDS`.
        breaks: What changes in behaviour, in one line.
        judgement: Why the theorems may not see it, in one line; it still counts as a survivor.
    """

    name: str
    file: str
    function: str
    before: str
    after: str
    kind: str
    breaks: str
    judgement: str = ""


def load(path: Path = DATA) -> list[Mutant]:
    """Return the mutants of a file.

    Raises:
        MutantError: A record lacks a key or has an unknown one, a kind is unknown, or a name is
            there twice.
    """
    records = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    wanted = {field.name for field in fields(Mutant)}
    for record in records:
        if set(record) | {"judgement"} != wanted:
            wrong = ", ".join(sorted((set(record) | {"judgement"}) ^ wanted))
            raise MutantError(f"{path}: {record.get('name', '?')}: missing or unknown: {wrong}")
        if record["kind"] not in KINDS:
            raise MutantError(f"{path}: {record['name']}: unknown kind {record['kind']!r}")
    names = Counter(record["name"] for record in records)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise MutantError(f"{path}: more than once: {', '.join(twice)}")
    return [Mutant(**record) for record in records]


def mutated(source: str, mutant: Mutant) -> str:
    """Return the source of a file with the change made.

    Raises:
        MutantError: The function is not there, or does not hold `before` exactly once.
    """
    lines_of = _function_lines(source, mutant.function)
    if lines_of is None:
        raise MutantError(f"{mutant.name}: {mutant.file} has no function {mutant.function}")
    first, last = lines_of
    lines = source.splitlines(keepends=True)
    function = "".join(lines[first:last])
    times = function.count(mutant.before)
    if times != 1:
        where = f"{mutant.file}: {mutant.function}"
        raise MutantError(f"{mutant.name}: {where} holds {mutant.before!r} {times} times, not once")
    changed = function.replace(mutant.before, mutant.after)
    return "".join([*lines[:first], changed, *lines[last:]])


@cache
def _function_lines(source: str, qualified_name: str) -> tuple[int, int] | None:
    """First line of a function and the line behind it, from 0; None where it is not there."""
    body: Sequence[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for name in qualified_name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == name), None)
        body = getattr(found, "body", [])
    if not isinstance(found, ast.FunctionDef) or found.end_lineno is None:
        return None
    return found.lineno - 1, found.end_lineno


@contextmanager
def mutated_tree(root: Path, mutant: Mutant) -> Iterator[Path]:
    """Copy a tree's core modules to a temporary folder, make the change, and give the folder.

    Raises:
        MutantError: As :func:`mutated`, or the tree has no such file.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for module in CORE_MODULES:
            path = Path(*module.split(".")).with_suffix(".py")
            if (root / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, folder / path)
        target = folder / mutant.file
        if not target.is_file():
            raise MutantError(f"{mutant.name}: the core has no {mutant.file}")
        target.write_text(mutated(target.read_text(encoding="utf-8"), mutant), encoding="utf-8")
        yield folder


def fits(mutant: Mutant, root: Path) -> bool:
    """Whether the change can be made to a tree."""
    try:
        with mutated_tree(root, mutant):
            return True
    except MutantError:
        return False


# ---- what a step does and leaves -----------------------------------------------------------------


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


# ---- the outcome ---------------------------------------------------------------------------------


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
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome
    refutation: Refutation | None = None
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)


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


# ---- the changed code, run natively --------------------------------------------------------------


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


# ---- results -------------------------------------------------------------------------------------


def judge_all(
    mutants: Sequence[Mutant], root: Path, *, jobs: int, on_progress: Callable[[str], None]
) -> list[Judgement]:
    """Judge mutants side by side; the results come in the order of the mutants.

    A mutant that does not fit the tree is said to be so, and not judged.
    """
    # A process per mutant: terms are interned, and what a solver is able to say may depend on the
    # order in which they came up. Where processes are forked, they share what is explored here.
    release = _lifted_release(root)
    fitting = [mutant for mutant in mutants if fits(mutant, root)]
    cases = (case for mutant in fitting for case in cases_of(release.traits, mutant))
    for case in dict.fromkeys(cases):
        release.behaviour(case)
        for slug in _theorems_of(release, case):
            release.is_refuted(case, slug)
    judged: dict[str, Judgement] = {}
    with multiprocessing.Pool(jobs, _give_up_sooner, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(partial(judge, root=root), fitting):
            judged[found.mutant.name] = found
            done = f"{len(judged)}/{len(fitting)}"
            on_progress(
                f"{done} {found.mutant.name}: {found.outcome.value} {_by(found)} "
                f"({found.seconds:.1f} s)"
            )
    unfit = partial(Judgement, outcome=Outcome.DOES_NOT_FIT)
    return [judged.get(mutant.name) or unfit(mutant) for mutant in mutants]


def _give_up_sooner() -> None:
    smt.ATTEMPTS = _ATTEMPTS


def counts(judged: Sequence[Judgement]) -> dict[str, int]:
    """Return the summary, in the order it is printed."""
    of = Counter(found.outcome for found in judged)
    shown = Counter(found.refutation.shown for found in judged if found.refutation is not None)
    return {
        "mutants": len(judged),
        "refuted by a theorem other than matches-intended": of[Outcome.REFUTED],
        "refuted by matches-intended alone": of[Outcome.MODEL_ONLY],
        "not understood: the verdict is UNSUPPORTED": of[Outcome.NOT_UNDERSTOOD],
        "proved equivalent": of[Outcome.EQUIVALENT],
        "survived": of[Outcome.SURVIVED],
        "do not fit the release": of[Outcome.DOES_NOT_FIT],
        "refuted mutants whose code, run natively, shows it as predicted": shown[
            Shown.AS_PREDICTED
        ],
        "refuted mutants whose code shows it in other numbers": shown[Shown.OTHERWISE],
        "refuted mutants whose code was not seen to show it": shown[Shown.NOT],
    }


def plain_lines(judged: Sequence[Judgement]) -> Iterator[str]:
    """Yield one line per mutant, and the summary."""
    width = max(len(found.mutant.name) for found in judged)
    for found in judged:
        yield f"{found.mutant.name:{width}}  {found.outcome.value}  {_by(found)}".rstrip()
        if found.outcome is Outcome.SURVIVED:
            yield from (f"{'':{width}}  {note}" for note in found.notes)
    yield ""
    yield from (f"{number:5}  {what}" for what, number in counts(judged).items())


def _by(found: Judgement) -> str:
    return (
        "" if found.refutation is None else f"{found.refutation.theorem} ({found.refutation.kind})"
    )


def page(results: Mapping[str, Sequence[Judgement]]) -> str:
    """Return the results of one or more releases as a page."""
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`; do not edit.",
        "",
        "Each row is one change of a few tokens to vLLM, made to a copy of a release's core and",
        "proved like any tree. A mutant is **refuted** when a theorem that is not refuted for the",
        "release is refuted for the copy; the first one found is named, with its kind of step.",
        "`matches-intended` compares with the project's own model, so mutants that nothing else",
        "refutes are counted apart. A mutant is **not understood** when the lifter refuses the",
        "copy: its verdicts are UNSUPPORTED, never a pass. It is **equivalent** when the solver",
        "shows, for every kind of step that the function has a part in, in every setting, that",
        "estimate, dry run, blocks drawn, exceptions, block table, returned and freed blocks and",
        "every other part of the manager's state are the release's; of several groups: that the",
        "same requests are refused, and for the others gate, dry run, estimate, blocks drawn and",
        "tables' lengths are the same. Anything else has **survived**: it is a hole in the",
        "theorems, whatever the judgement beside it says. The counterexample is also run on the",
        "changed code itself, without a solver.",
        "",
        *(line for release, judged in results.items() for line in _section(release, judged)),
    ]
    return "\n".join(lines)


def _section(release: str, judged: Sequence[Judgement]) -> Iterator[str]:
    yield from (f"## vLLM {release}", "", "| count | of |", "|--:|---|")
    yield from (f"| {number} | {what} |" for what, number in counts(judged).items())
    yield ""
    survivors = [found for found in judged if found.outcome is Outcome.SURVIVED]
    if survivors:
        yield from ("### Survivors", "")
        for found in survivors:
            yield f"- `{found.mutant.name}`: {found.mutant.breaks}."
            if found.mutant.judgement:
                yield f"  - **Judgement:** {found.mutant.judgement}."
            yield from (f"  - {note}" for note in found.notes)
        yield ""
    unfit = [f"`{j.mutant.name}`" for j in judged if j.outcome is Outcome.DOES_NOT_FIT]
    if unfit:
        yield from (f"### Does not fit {release}", "", ", ".join(unfit), "")
    yield from (
        "### All",
        "",
        "| mutant | function | kind | breaks | outcome | by | run natively |",
        "|---|---|---|---|---|---|---|",
    )
    for found in judged:
        if found.outcome is not Outcome.DOES_NOT_FIT:
            mutant = found.mutant
            function = mutant.function.rpartition(".")[2]
            cells = (f"`{mutant.name}`", f"`{function}`", mutant.kind, mutant.breaks)
            yield f"| {' | '.join((*cells, found.outcome.value, _by(found), _native(found)))} |"
    yield ""


def _native(found: Judgement) -> str:
    if found.refutation is None:
        return ""
    shown, history = found.refutation.shown.value, found.refutation.history
    return f"{shown}: {history}" if history else shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--release", action="append", metavar="X.Y.Z", help=f"default {RELEASE}, {NEWEST}"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of results")
    options = parser.parse_args(arguments)
    try:
        mutants = load()
        unknown = sorted(set(options.only) - {mutant.name for mutant in mutants})
        if unknown:
            raise MutantError(f"no mutant is called {', '.join(unknown)}")
        if options.only:
            mutants = [mutant for mutant in mutants if mutant.name in options.only]
        roots = {
            name: resolve(f"vllm=={name}").root for name in options.release or (RELEASE, NEWEST)
        }
        for mutant in mutants if RELEASE in roots else ():
            with mutated_tree(roots[RELEASE], mutant):
                pass  # what is made for a release has to fit it
    except (MutantError, TargetError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    results: dict[str, list[Judgement]] = {}
    for name, root in roots.items():
        started = time.perf_counter()
        results[name] = judge_all(
            mutants,
            root,
            jobs=options.jobs,
            on_progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print("\n".join((f"vLLM {name}", *plain_lines(results[name]))))
        seconds = time.perf_counter() - started
        print(f"{name}: {seconds:.0f} s, {options.jobs} at a time", file=sys.stderr, flush=True)
        if options.write is not None:
            options.write.write_text(page(results), encoding="utf-8")
    judged = itertools.chain.from_iterable(results.values())
    return int(any(found.outcome is Outcome.SURVIVED for found in judged))


if __name__ == "__main__":
    # Under its own name, so that worker processes import it instead of taking a copy per task.
    sys.path.insert(0, str(ROOT))
    sys.exit(importlib.import_module("scripts.mutants").main())
