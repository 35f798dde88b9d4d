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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from conformance.driver import core_driver
from conformance.generate import refutation
from conformance.replay import Outcome as ReplayOutcome
from conformance.replay import replay
from conformance.scenario import Scenario, ScenarioStep
from conformance.targets import TargetError, resolve
from models import smt, term
from models.containers import Block, BlockHash, Members, Pending, Table
from models.lift import Exploration, NotUnderstood, PathSummary, Variant, variants_of
from models.loader import CORE_MODULES, Core
from models.predict import LiftedTree
from models.prove import Counterexample, Obligation, Prover, Verdict, explorations_for
from models.rewrite import rewrite
from models.runtime import BUILTINS
from models.step import REQUEST
from models.term import BoolLike, Unsupported
from models.traits import Traits, traits_of
from spec.theorems import OBLIGATIONS, THEOREMS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "mutants.toml"
RELEASE = "0.31.0"
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
#: Families whose steps, and what is done before them, call a function at all; others: all of them.
_ONLY_IN_STEPS_OF: dict[str, tuple[str, ...]] = {
    "add_local_computed_blocks": (*_OF_HITS, "promoted"),
    "allocate_external_computed_blocks": (*_OF_HITS, "promoted"),
    "_apply_cow": _OF_HITS,
}
#: Families that likely show a change of a function; others begin with the catalogue's first.
_LIKELY_FIRST: dict[str, tuple[str, ...]] = {
    "add_local_computed_blocks": _OF_HITS,
    "allocate_external_computed_blocks": ("external-async", "external-sync", "resumed"),
    "_has_partial_local_hit": _OF_HITS,
    "_get_num_evictable_blocks": _OF_HITS,
    "_apply_cow": ("hit-partial", "resumed"),
    "remove_skipped_blocks": ("running",),
    "_remove_blocks_in_range": ("running",),
    "_relocate_speculative_block": ("running",),
    "get_num_blocks_to_allocate": ("first", "running", "checkpoint", "hit-partial"),
    "allocate_new_blocks": ("first", "running", "checkpoint", "hit-partial"),
    "get_mamba_prefill_checkpoint_position": ("first", "checkpoint"),
    "is_mamba_prefill_checkpoint_valid": ("first", "checkpoint"),
    "_needs_internal_checkpoint": ("first", "checkpoint", "running"),
    "cdiv": ("first", "running", "checkpoint"),
}
#: Name of the copy among predictions.
_TARGET = "path:the copy"
#: A family with its tags.
Kind = tuple[str, tuple[str, ...]]
#: One path, and what the step leaves there.
_Seen = tuple[PathSummary, Mapping[str, Any]]


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
    """

    name: str
    file: str
    function: str
    before: str
    after: str
    kind: str
    breaks: str


def load(path: Path = DATA) -> list[Mutant]:
    """Return the mutants of a file.

    Raises:
        MutantError: A record lacks a key or has an unknown one, a kind is unknown, or a name is
            there twice.
    """
    records = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    wanted = {field.name for field in fields(Mutant)}
    for record in records:
        if set(record) != wanted:
            wrong = ", ".join(sorted(set(record) ^ wanted))
            raise MutantError(f"{path}: {record.get('name', '?')}: missing or unknown: {wrong}")
        if record["kind"] not in KINDS:
            raise MutantError(f"{path}: {record['name']}: unknown kind {record['kind']!r}")
    names = Counter(record["name"] for record in records)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise MutantError(f"{path}: more than once: {', '.join(twice)}")
    return [Mutant(**record) for record in records]


def sample(mutants: Sequence[Mutant], number: int) -> list[Mutant]:
    """Return that many mutants, of as many kinds as there are, spread evenly over each kind."""
    per_kind = [[m for m in mutants if m.kind == kind] for kind in KINDS]
    per_kind = [found for found in per_kind if found]
    shares = [number // len(per_kind) + (i < number % len(per_kind)) for i in range(len(per_kind))]
    chosen = {
        found[(2 * i + 1) * len(found) // (2 * share)]
        for found, share in zip(per_kind, shares, strict=True)
        for i in range(share)
    }
    return [m for m in mutants if m in chosen]


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


# ---- what a step does and leaves -----------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is explored at once: one kind of step in one setting, or the removal before it.

    Attributes:
        family: Slug.
        tags: Which of its steps.
        variant: In which setting.
        asks: What else is asked: `asks_removal`, or nothing.
    """

    family: str
    tags: tuple[str, ...]
    variant: Variant
    asks: str = ""

    @property
    def label(self) -> str:
        """The kind of step, as one word."""
        return "+".join((self.family, *self.tags))


@dataclass(frozen=True)
class Behaviour:
    """All steps of one case of one tree.

    Attributes:
        exploration: Its paths, shown to be complete.
        left: By path, what the step leaves: the manager's attributes, what it returned, and what it
            gave back to the pool.
    """

    exploration: Exploration
    left: tuple[Mapping[str, Any], ...]


class _WatchedCore(Core):
    """A lifted core that keeps each manager built from it, and what it returned and freed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, rewrite=rewrite, overrides=BUILTINS)
        self.managers_built: list[Any] = []
        self.returned: dict[int, Any] = {}
        self.freed: dict[int, list[Any]] = {}
        self._watched = self._watching(super().symbol_of("MambaManager"))

    def symbol_of(self, name: str) -> Any:
        """Return a class of the core; the manager's is one that is watched."""
        return self._watched if name == "MambaManager" else super().symbol_of(name)

    def forget(self) -> None:
        """Let go of the managers of an exploration that is done."""
        for kept in (self.managers_built, self.returned, self.freed):
            kept.clear()

    def _watching(self, manager_class: Any) -> Any:
        core = self

        class Watched(manager_class):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                core.managers_built.append(self)
                freed = core.freed[id(self)] = []
                pool = kwargs["block_pool"]
                take_back = pool.free_blocks

                def free_blocks(blocks: Any) -> None:
                    freed.append(blocks.copy())
                    take_back(blocks)

                pool.free_blocks = free_blocks

            def allocate_new_blocks(self, *args: Any, **kwargs: Any) -> Any:
                core.returned[id(self)] = returned = super().allocate_new_blocks(*args, **kwargs)
                return returned

        Watched.__name__ = manager_class.__name__
        return Watched


class Lifted(LiftedTree):
    """One tree, lifted: each case is explored once, with what its steps leave."""

    def __init__(self, root: Path) -> None:
        self._core = self._watched_core = _WatchedCore(root)
        self.traits = traits_of(self._core)
        self._explored = {}
        self._left: dict[Case, tuple[Mapping[str, Any], ...]] = {}
        self._refuted: dict[tuple[str, tuple[str, ...], str], bool] = {}

    def behaviour(self, case: Case) -> Behaviour:
        """Return all steps of a case.

        Raises:
            NotUnderstood: As :func:`models.lift.explore`.
        """
        asks = {case.asks: True} if case.asks else {}
        exploration = self.exploration(case.family, case.tags, case.variant, **asks)
        return Behaviour(exploration, self._left[case])

    def exploration(
        self,
        family: str,
        tags: tuple[str, ...],
        variant: Variant,
        *,
        asks_gate: bool = False,
        asks_removal: bool = False,
    ) -> Exploration:
        """Explore as `LiftedTree` does, and keep what the steps leave."""
        asks = "asks_gate" if asks_gate else "asks_removal" if asks_removal else ""
        case = Case(family, tags, variant, asks)
        found = super().exploration(
            family, tags, variant, asks_gate=asks_gate, asks_removal=asks_removal
        )
        if case not in self._left:
            # The last ones: some were built before, to learn how the tree's manager works.
            managers = self._watched_core.managers_built[-len(found.paths) :]
            self._left[case] = tuple(map(self._left_by, managers))
        self._watched_core.forget()
        return found

    def is_refuted(self, case: Case, theorem: str) -> bool:
        """Whether a theorem is refuted for a kind of step, in whichever setting."""
        key = (case.family, case.tags, theorem)
        if key not in self._refuted:
            explorations = explorations_for(self, case.family, case.tags, THEOREMS[theorem])
            self._refuted[key] = any(
                smt.Question(each.assumptions).ask(Prover(each).violation(THEOREMS[theorem])).answer
                is smt.Answer.SAT
                for each in explorations
            )
        return self._refuted[key]

    def _left_by(self, manager: Any) -> dict[str, Any]:
        parts = {k: v for k, v in vars(manager).items() if k not in _CONSTANT_PARTS}
        return {
            **parts,
            "returned blocks": self._watched_core.returned.get(id(manager)),
            "freed blocks": self._watched_core.freed[id(manager)],
        }


_lifted_release = cache(Lifted)


def cases_of(traits: Traits, function: str) -> Iterator[Case]:
    """Yield the cases that a function has a part in; those likely to show a change come first.

    Gates are left out: they ask the estimator what a step of the whole request asks it.
    """
    name = function.rpartition(".")[2]
    kinds = [kind for kind in OBLIGATIONS if traits.why_not(*kind) is None]
    removal = THEOREMS["removal-keeps-state"]
    if name in _IN_REMOVAL:
        for family, tags in kinds:
            if removal.why_not(family) is None:
                yield Case(family, tags, Variant(), "asks_removal")
    if name in _ONLY_IN_REMOVAL:
        return
    steps = [
        Case(*kind, variant)
        for kind in kinds
        if kind[0] in _ONLY_IN_STEPS_OF.get(name, kind)
        for variant in variants_of(traits, kind[0])
    ]
    first = _LIKELY_FIRST.get(name, ())
    yield from sorted(
        steps,
        key=lambda case: (
            case.family not in first or "overwide" in case.tags,
            case.variant != Variant(),
            first.index(case.family) if case.family in first else 0,
        ),
    )


class Comparison:
    """All steps of one case of two trees, side by side."""

    def __init__(self, a: Behaviour, b: Behaviour) -> None:
        ours, theirs = a.exploration.assumptions, b.exploration.assumptions
        if any(ours.get(slug) is not theirs.get(slug) for slug in {*ours, *theirs}):
            raise NotUnderstood("the two trees are not asked about the same steps")
        self._question = smt.Question(a.exploration.assumptions)
        pairs = itertools.product(
            zip(a.exploration.paths, a.left, strict=True),
            zip(b.exploration.paths, b.left, strict=True),
        )
        self._pairs = [
            (_both(one[0], other[0]), one, other)
            for one, other in pairs
            if not _exclude_each_other(one[0], other[0])
        ]

    def tell_apart(self, differs: Callable[[_Seen, _Seen], BoolLike]) -> smt.Result:
        """Ask for a situation in which two steps differ.

        Unsat iff they agree in every step; a model is a step in which they differ.
        """
        return self._question.ask(
            term.disjunction(
                term.conjunction((both, differs(one, other)))
                for both, one, other in self._pairs
                if both is not False
            )
        )


def _both(one: PathSummary, other: PathSummary) -> BoolLike:
    return term.conjunction((one.condition, other.condition))


def _exclude_each_other(one: PathSummary, other: PathSummary) -> bool:
    """Whether one path decides something one way and the other the other: terms are interned."""
    against = {id(term.negation(literal)) for literal in one.decisions}
    return any(id(literal) in against for literal in other.decisions)


def differs(one: _Seen, other: _Seen) -> BoolLike:
    """Return where two steps differ in what the theorems speak of, or in what they leave."""
    return term.disjunction((step_differs(one, other), state_differs(one, other)))


def step_differs(one: _Seen, other: _Seen) -> BoolLike:
    """Return where two steps differ in what is seen of them, beside what they leave."""
    a, b = one[0].step, other[0].step
    if a.raised != b.raised:
        return True
    names = ["gate", "dry_run", "estimate", "drawn", "dry_run_left_state"]
    if a.raised is None:
        names += ["table_length", "deferred"]
    return _differ((getattr(a, name), getattr(b, name)) for name in names)


def state_differs(one: _Seen, other: _Seen) -> BoolLike:
    """Return where two steps differ in what they leave, or hand to the worker."""
    return term.disjunction(part_differs(name)(one, other) for name in one[1])


def part_differs(name: str) -> Callable[[_Seen, _Seen], BoolLike]:
    """Return where two steps differ in one part of what they leave; nowhere if one raised."""

    def differs(one: _Seen, other: _Seen) -> BoolLike:
        if one[0].step.raised or other[0].step.raised:
            return False
        return _differ([(one[1][name], other[1][name])])

    return differs


def _differ(pairs: Iterable[tuple[Any, Any]]) -> BoolLike:
    return term.disjunction(term.negation(_equal(a, b)) for a, b in pairs)


def _equal(a: Any, b: Any) -> BoolLike:
    """Whether two values of a manager are the same: numbers, terms and containers of them."""
    if a is b:
        return True
    if isinstance(a, Table) or isinstance(b, Table) or _are_blocks(a, b):
        return _same_table(*(x if isinstance(x, Table) else _as_table(x) for x in (a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {REQUEST} if isinstance(a, Pending) or isinstance(b, Pending) else {*a, *b}
        return term.conjunction(_same_entry(a, b, key) for key in keys)
    if isinstance(a, Block) and isinstance(b, Block):
        parts = [(a.block_id, b.block_id), (a.writable, b.writable)]
        parts += [(a._refs, b._refs), (a._hash, b._hash)]
        return term.conjunction(_equal(*part) for part in parts)
    if isinstance(a, BlockHash) and isinstance(b, BlockHash):
        return _equal(a.is_of_this_step, b.is_of_this_step)
    if a is None or b is None or a is ... or b is ...:
        return False
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        same_length = len(a) == len(b)
        return same_length and term.conjunction(map(_equal, a, b))
    if isinstance(a, bool | term.Bool) and isinstance(b, bool | term.Bool):
        return term.negation(a ^ b)
    if isinstance(a, int | term.Int) and isinstance(b, int | term.Int):
        return a == b
    if isinstance(a, Members) and isinstance(b, Members):
        return a.is_known == b.is_known and set.__eq__(a, b)
    if isinstance(a, set | frozenset | str) and isinstance(b, set | frozenset | str):
        return a == b
    raise NotUnderstood(f"comparing {type(a).__name__} with {type(b).__name__}")


def _are_blocks(a: Any, b: Any) -> bool:
    lists = isinstance(a, list) and isinstance(b, list)
    return lists and bool(a or b) and all(isinstance(x, Block) for x in (*a, *b))


def _as_table(blocks: Any) -> Table:
    if not isinstance(blocks, list) or not all(isinstance(block, Block) for block in blocks):
        raise NotUnderstood("comparing a table with something else than blocks")
    return Table.of(blocks)


def _same_table(a: Table, b: Table) -> BoolLike:
    column = term.int_var("any_column", 0)
    same_block = _equal(a.column(column), b.column(column))
    return term.conjunction((a.length == b.length, (column >= a.length) | same_block))


def _same_entry(a: dict[str, Any], b: dict[str, Any], key: str) -> BoolLike:
    (in_a, value_a), (in_b, value_b) = _entry(a, key), _entry(b, key)
    same_presence = _equal(in_a, in_b)
    if value_a is None and value_b is None:
        return same_presence
    # A value that only one of the two knows was written by one step and left alone by the other.
    same_value = value_a is not None and value_b is not None and _equal(value_a, value_b)
    return term.conjunction((same_presence, term.negation(in_a) | same_value))


def _entry(mapping: dict[str, Any], key: str) -> tuple[BoolLike, Any]:
    """Whether a key is there, and its value; an empty table counts as none."""
    if isinstance(mapping, Pending):
        return mapping.present, mapping.value
    value = dict.get(mapping, key)
    if isinstance(value, Table) and isinstance(value.length, int) and value.length == 0:
        return False, None
    return key in dict.keys(mapping), value


# ---- the outcome ---------------------------------------------------------------------------------


class Outcome(str, Enum):
    """What became of a mutant; the first three are as they should be."""

    REFUTED = "refuted"
    MODEL_ONLY = "refuted by matches-intended alone"
    EQUIVALENT = "equivalent"
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
    """The steps that show it, in tokens."""


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
    lifted = Lifted(tree)
    different: list[Case] = []
    doubts: dict[str, list[str]] = {}
    by_model: Refutation | None = None
    for case in cases_of(release.traits, mutant.function):
        try:
            behaviour = lifted.behaviour(case)
            if is_same(release.behaviour(case), behaviour):
                continue
        except NotUnderstood as error:
            doubts.setdefault(str(error).replace(f"{tree}/", ""), []).append(case.label)
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
    if different:  # the first one in detail: the questions are many, and some are hard
        first, *others = different
        for doubt in difference(release.behaviour(first), lifted.behaviour(first)):
            doubts.setdefault(doubt, []).append(first.label)
        also = dict.fromkeys(case.label for case in others if case.label != first.label)
        if also:
            doubts.setdefault("not shown to be the same", []).extend(also)
    notes = tuple(f"{', '.join(dict.fromkeys(kinds))}: {doubt}" for doubt, kinds in doubts.items())
    return Judgement(mutant, Outcome.SURVIVED if notes else Outcome.EQUIVALENT, None, notes)


def _first_broken(
    release: Lifted, exploration: Exploration, case: Case
) -> tuple[str, Counterexample] | None:
    """The first theorem that the mutant breaks and the release keeps; the model's is the last."""
    prover = Prover(exploration)
    for slug in sorted(THEOREMS, key=lambda slug: slug == MODEL_THEOREM):
        theorem = THEOREMS[slug]
        is_about = theorem.why_not(case.family) is None
        is_about &= release.traits.why_not(case.family, case.tags, slug) is None
        if (
            is_about
            and not theorem.asks_gate
            and theorem.asks_removal == (case.asks == "asks_removal")
        ):
            counterexample = prover.settle(theorem).counterexample
            if counterexample is not None and not release.is_refuted(case, slug):
                return slug, counterexample
    return None


def is_same(a: Behaviour, b: Behaviour) -> bool:
    """Whether it is proved that two trees' steps are the same."""
    return Comparison(a, b).tell_apart(differs).answer is smt.Answer.UNSAT


def difference(a: Behaviour, b: Behaviour) -> list[str]:
    """Return in what two trees' steps that are not shown to be the same may differ."""
    comparison, found = Comparison(a, b), []
    step = comparison.tell_apart(step_differs)
    if step.answer is not smt.Answer.UNSAT:
        found.append(f"another step ({step.reason or 'shown by a model'})")
    for name in a.left[0]:
        result = comparison.tell_apart(part_differs(name))
        if result.answer is not smt.Answer.UNSAT:
            found.append(f"leaves other {name} ({result.reason or 'shown by a model'})")
    return found


# ---- the changed code, run natively --------------------------------------------------------------


def _refutation(
    lifted: Lifted, tree: Path, case: Case, theorem: str, found: Counterexample
) -> Refutation:
    """Replay a counterexample, made a scenario, on the changed code itself."""
    obligation = Obligation(case.family, case.tags, theorem, Verdict.REFUTED, (), 0.0, found)
    shown, history = Shown.NOT, ""
    try:
        scenario = refutation(_TARGET, obligation, found, {_TARGET: lifted})
        seen = replay(scenario, core_driver(tree), _TARGET)
    except (Exception, Unsupported):  # a mutant may break anything
        return Refutation(theorem, case.label, shown, history)
    if seen.theorem_holds is False:
        reproduced = seen.outcome is ReplayOutcome.REPRODUCED
        shown = Shown.AS_PREDICTED if reproduced else Shown.OTHERWISE
        history = _history(scenario)
    return Refutation(theorem, case.label, shown, history)


def _history(scenario: Scenario) -> str:
    g = scenario.geometry
    sizes = [f"B={g.block_size}", f"H={g.hash_block_size}", f"S={g.num_speculative_blocks}"]
    sizes.append(f"K={g.num_prefill_checkpoint_blocks}")
    if g.prefill_checkpoint_alignment != 1:
        sizes.append(f"alignment={g.prefill_checkpoint_alignment}")
    if g.drop_eagle_checkpoint_block:
        sizes.append("EAGLE")
    if scenario.steps[-1].call.prefill_end:
        sizes.append(f"prefill_end={scenario.steps[-1].call.prefill_end}")
    return f"{' '.join(sizes)}: {', '.join(map(_chunk, scenario.steps))}"


def _chunk(step: ScenarioStep) -> str:
    call = step.call
    parts = ["preempted"] if step.preempted else []
    if step.num_hit_blocks:
        evictable = " evictable" if step.hit_is_evictable else ""
        parts.append(f"hit {call.num_local_computed_tokens}{evictable}")
    if step.num_external_tokens:
        parts.append(f"external {step.num_external_tokens}")
    if step.loads_asynchronously:
        parts.append("parked")
    if step.owns_partial_tail:
        parts.append("own tail")
    lookahead = call.num_tokens - call.num_tokens_main_model
    ahead = f" (+{lookahead})" if lookahead else ""
    chunk = f"{call.total_computed_tokens}→{call.num_tokens_main_model}{ahead}"
    return " ".join((*parts, chunk))


# ---- results -------------------------------------------------------------------------------------


def judge_all(
    mutants: Sequence[Mutant], root: Path, *, jobs: int, on_progress: Callable[[str], None]
) -> list[Judgement]:
    """Judge mutants side by side; the results come in the order of the mutants."""
    # A process per mutant: terms are interned, and what a solver is able to say may depend on the
    # order in which they came up. Where processes are forked, they share what is explored here.
    release = _lifted_release(root)
    cases = (case for mutant in mutants for case in cases_of(release.traits, mutant.function))
    for case in dict.fromkeys(cases):
        release.behaviour(case)
    judged: dict[str, Judgement] = {}
    with multiprocessing.Pool(jobs, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(partial(judge, root=root), mutants):
            judged[found.mutant.name] = found
            done = f"{len(judged)}/{len(mutants)}"
            on_progress(
                f"{done} {found.mutant.name}: {found.outcome.value} {_by(found)} "
                f"({found.seconds:.1f} s)"
            )
    return [judged[mutant.name] for mutant in mutants]


def counts(judged: Sequence[Judgement]) -> dict[str, int]:
    """Return the summary, in the order it is printed."""
    of = Counter(found.outcome for found in judged)
    shown = Counter(found.refutation.shown for found in judged if found.refutation is not None)
    return {
        "mutants": len(judged),
        "refuted by a theorem other than matches-intended": of[Outcome.REFUTED],
        "refuted by matches-intended alone": of[Outcome.MODEL_ONLY],
        "proved equivalent": of[Outcome.EQUIVALENT],
        "survived": of[Outcome.SURVIVED],
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


def page(judged: Sequence[Judgement], release: str) -> str:
    """Return the results as a page."""
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`; do not edit.",
        "",
        f"Each row is one change of a few tokens to vLLM {release}, made to a copy of its core and",
        "proved like any tree. A mutant is **refuted** when a theorem that is not refuted for the",
        "release is refuted for the copy; the first one that is found is named, with its kind of",
        "step. `matches-intended` compares with the project's own model, so mutants that nothing",
        "else refutes are counted apart. A mutant is **equivalent** when the solver shows, for",
        "every kind of step that the function has a part in, in every setting, that estimate, dry",
        "run, blocks drawn, exceptions, block table, returned and freed blocks and every other",
        "part of the manager's state are the release's. Anything else has **survived**: it is a",
        "hole in the theorems.",
        "",
        "The counterexample is also run on the changed code itself, without a solver: an",
        "admission and then the step.",
        "",
        "| count | of |",
        "|--:|---|",
        *(f"| {number} | {what} |" for what, number in counts(judged).items()),
        "",
    ]
    survivors = [found for found in judged if found.outcome is Outcome.SURVIVED]
    if survivors:
        lines += ["## Survivors", ""]
        for found in survivors:
            lines += [f"- `{found.mutant.name}`: {found.mutant.breaks}."]
            lines += [f"  - {note}" for note in found.notes]
        lines.append("")
    lines += [
        "## All",
        "",
        "| mutant | function | kind | breaks | outcome | by | run natively |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in judged:
        mutant = found.mutant
        function = mutant.function.rpartition(".")[2]
        cells = (f"`{mutant.name}`", f"`{function}`", mutant.kind, mutant.breaks)
        lines.append(f"| {' | '.join((*cells, found.outcome.value, _by(found), _native(found)))} |")
    return "\n".join(lines) + "\n"


def _native(found: Judgement) -> str:
    if found.refutation is None:
        return ""
    shown, history = found.refutation.shown.value, found.refutation.history
    return f"{shown}: {history}" if history else shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants of all kinds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--release", default=RELEASE, metavar="X.Y.Z")
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
        if options.sample is not None:
            mutants = sample(mutants, options.sample)
        started = time.perf_counter()
        judged = judge_all(
            mutants,
            resolve(f"vllm=={options.release}").root,
            jobs=options.jobs,
            on_progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (MutantError, TargetError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    print("\n".join(plain_lines(judged)))
    print(f"{time.perf_counter() - started:.0f} s, {options.jobs} at a time", file=sys.stderr)
    if options.write is not None:
        options.write.write_text(page(judged, options.release), encoding="utf-8")
    return int(any(found.outcome is Outcome.SURVIVED for found in judged))


if __name__ == "__main__":
    # Under its own name, so that worker processes import it instead of taking a copy per task.
    sys.path.insert(0, str(ROOT))
    sys.exit(importlib.import_module("scripts.mutants").main())
