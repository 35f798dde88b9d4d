"""Which small changes to the lifted functions the theorems notice.

Each change of tests/mutants.toml is made to a copy of a release's core, and `models.prove.prove` is
run on the copy. A change is noticed when a theorem that holds for the release is refuted for the
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
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from conformance.driver import Driver, DriverError, core_driver
from conformance.replay import theorem_holds
from conformance.targets import TargetError, resolve
from models import intended, smt, term
from models.containers import Block, Pending, Table
from models.evaluate import Evaluator
from models.lift import Exploration, NotUnderstood, PathSummary, explore
from models.loader import CORE_MODULES, Core
from models.prove import Counterexample, Obligation, Prover, Verdict, in_numbers, prove
from models.rewrite import rewrite
from models.runtime import BUILTINS
from models.step import REQUEST
from models.term import BoolLike, IntLike, Unsupported
from spec.families import family_of, reserves_checkpoint
from spec.theorems import OBLIGATIONS, THEOREMS, Pool
from spec.vocabulary import Call, Geometry, Situation, Step

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

#: Numbers that a native step must agree in with the counterexample it is made from.
_COMPARED = ("dry_run", "estimate", "drawn", "table_length", "raised")
#: Parts of a manager that no step changes; everything else is compared after the step.
_CONSTANT_PARTS = frozenset({"kv_cache_spec", "block_pool", "_null_block"})
#: Order in which a counterexample found here is made least.
_LEAST_FIRST = (
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "prefill_end",
    "block_size",
    "hash_block_size",
    "prefill_checkpoint_alignment",
    "total_computed_tokens",
    "num_tokens_main_model",
    "num_tokens",
    "prefill_length",
)

#: Small histories that are tried natively for one refutation.
MAX_HISTORIES = 20_000
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
class Behaviour:
    """All steps of one kind of one tree, with EAGLE drop or without.

    Attributes:
        exploration: Its paths, shown to be complete.
        left: By path, what the step leaves: the manager's attributes, and what it returned.
    """

    exploration: Exploration
    left: tuple[Mapping[str, Any], ...]


class _WatchedCore(Core):
    """A lifted core that keeps each manager built from it, and what its allocation returned."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, rewrite=rewrite, overrides=BUILTINS)
        self.managers_built: list[Any] = []
        self.returned: dict[int, Any] = {}
        self._watched = self._watching(super().symbol_of("MambaManager"))

    def symbol_of(self, name: str) -> Any:
        """Return a class of the core; the manager's is one that is watched."""
        return self._watched if name == "MambaManager" else super().symbol_of(name)

    def _watching(self, manager_class: Any) -> Any:
        core = self

        class Watched(manager_class):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                core.managers_built.append(self)

            def allocate_new_blocks(self, *args: Any, **kwargs: Any) -> Any:
                core.returned[id(self)] = returned = super().allocate_new_blocks(*args, **kwargs)
                return returned

        return Watched


class Lifted:
    """One tree, lifted: each kind of step is explored once."""

    def __init__(self, root: Path) -> None:
        self._core = _WatchedCore(root)
        self._behaviours: dict[Kind, tuple[Behaviour, Behaviour]] = {}

    def behaviours(self, kind: Kind) -> tuple[Behaviour, Behaviour]:
        """Return all steps of a kind, without and with EAGLE drop.

        Raises:
            NotUnderstood: As :func:`models.lift.explore`.
        """
        if kind not in self._behaviours:
            self._behaviours[kind] = self._explore(kind, False), self._explore(kind, True)
        return self._behaviours[kind]

    def _explore(self, kind: Kind, eagle: bool) -> Behaviour:
        self._core.managers_built.clear()
        exploration = explore(self._core, *kind, eagle=eagle)
        managers = self._core.managers_built
        assert len(managers) == len(exploration.paths), "a manager per path"
        return Behaviour(exploration, tuple(map(self._left_by, managers)))

    def _left_by(self, manager: Any) -> dict[str, Any]:
        parts = {k: v for k, v in vars(manager).items() if k not in _CONSTANT_PARTS}
        return {**parts, "returned blocks": self._core.returned.get(id(manager))}


_lifted_release = cache(Lifted)


class Comparison:
    """All steps of one kind of two trees, side by side."""

    def __init__(self, a: Behaviour, b: Behaviour) -> None:
        ours, theirs = a.exploration.assumptions, b.exploration.assumptions
        assert all(ours[slug] is theirs[slug] for slug in {*ours, *theirs}), "one set of situations"
        self._question = smt.Question(a.exploration.assumptions)
        pairs = itertools.product(
            zip(a.exploration.paths, a.left, strict=True),
            zip(b.exploration.paths, b.left, strict=True),
        )
        self._pairs = [
            (term.conjunction((one[0].condition, other[0].condition)), one, other)
            for one, other in pairs
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


def step_differs(one: _Seen, other: _Seen) -> BoolLike:
    """Return where two steps differ in what the theorems speak of."""
    a, b = one[0].step, other[0].step
    if a.raised != b.raised:
        return True
    names = ["dry_run", "estimate", "drawn", "dry_run_left_state"]
    if a.raised is None:
        names += ["table_length", "tail_is_held"]
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
    if isinstance(a, Table | list) and isinstance(b, Table | list):
        return _same_table(*(x if isinstance(x, Table) else _as_table(x) for x in (a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {REQUEST} if isinstance(a, Pending) or isinstance(b, Pending) else {*a, *b}
        return term.conjunction(_same_entry(a, b, key) for key in keys)
    if isinstance(a, Block) and isinstance(b, Block):
        return term.conjunction((a.block_id == b.block_id, _equal(a.writable, b.writable)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        same_length = len(a) == len(b)
        return same_length and term.conjunction(map(_equal, a, b))
    if isinstance(a, bool | term.Bool) and isinstance(b, bool | term.Bool):
        return term.negation(a ^ b)
    if isinstance(a, int | term.Int) and isinstance(b, int | term.Int):
        return a == b
    if isinstance(a, set | frozenset | str | None) and isinstance(b, set | frozenset | str | None):
        return a == b
    raise NotUnderstood(f"comparing {type(a).__name__} with {type(b).__name__}")


def _as_table(blocks: list[Any]) -> Table:
    if not all(isinstance(block, Block) for block in blocks):
        raise NotUnderstood("comparing a list of something else than blocks")
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

    AS_IT_IS = "as it is"
    """Admission and the step: the numbers are the counterexample's, the theorem is broken."""
    BY_ANOTHER_HISTORY = "by another history"
    """A step of the same family breaks the theorem, after other steps than one admission."""
    NOT = "not shown"


@dataclass(frozen=True)
class Refutation:
    """One theorem that the release keeps and the mutant breaks."""

    theorem: str
    kind: str
    shown: Shown
    needs_pending_checkpoint: bool
    """Whether only a state with the checkpoint of an earlier chunk shows it."""
    history: str
    """The steps that show it, in tokens."""


@dataclass(frozen=True)
class Judgement:
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome
    refutations: tuple[Refutation, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)


def refuted_obligations(root: Path) -> frozenset[tuple[str, tuple[str, ...], str]]:
    """Return what is refuted for a release as it is: family, tags and theorem."""
    return frozenset(
        (found.family, found.tags, found.theorem)
        for found in prove(root)
        if found.verdict is Verdict.REFUTED
    )


def judge(
    mutant: Mutant, root: Path, refuted_before: frozenset[tuple[str, tuple[str, ...], str]]
) -> Judgement:
    """Make the change, prove the copy, and say what became of the mutant.

    Args:
        mutant: The change.
        root: The release's tree.
        refuted_before: What is refuted for the release as it is; that tells nothing.
    """
    started = time.perf_counter()
    with mutated_tree(root, mutant) as tree:
        try:
            found = _judge(mutant, root, tree, refuted_before)
        except (Exception, Unsupported) as error:  # else its process would end without an answer
            found = Judgement(mutant, Outcome.SURVIVED, (), (f"{type(error).__name__}: {error}",))
    return replace(found, seconds=time.perf_counter() - started)


def _judge(
    mutant: Mutant,
    root: Path,
    tree: Path,
    refuted_before: frozenset[tuple[str, tuple[str, ...], str]],
) -> Judgement:
    obligations = list(prove(tree))
    changed = _Changed(tree)
    notes = tuple(_undecided(obligations))
    broken = [
        o
        for o in obligations
        if o.verdict is Verdict.REFUTED and (o.family, o.tags, o.theorem) not in refuted_before
    ]
    shown = [
        _refutation(changed, (o.family, o.tags), o.theorem, o.counterexample)
        for o in broken
        if o.counterexample is not None
    ]
    if any(o.theorem != MODEL_THEOREM for o in broken):
        return Judgement(mutant, Outcome.REFUTED, tuple(shown), notes)
    release = _lifted_release(root)
    if not broken:
        shown += _broken_elsewhere(release, changed, refuted_before)
    if shown:
        return Judgement(mutant, Outcome.MODEL_ONLY, tuple(shown), notes)
    doubts = list(_doubts_of_equivalence(release, changed.lifted))
    outcome = Outcome.SURVIVED if doubts else Outcome.EQUIVALENT
    return Judgement(mutant, outcome, (), (*notes, *doubts))


def _undecided(obligations: Iterable[Obligation]) -> Iterator[str]:
    """Yield what is neither proved nor refuted, one line per kind of step and verdict."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for found in obligations:
        if found.verdict not in (Verdict.PROVED, Verdict.REFUTED):
            key = label(found.family, found.tags), found.verdict.value, found.reason or ""
            reasons.setdefault(key, []).append(found.theorem)
    for (kind, verdict, reason), theorems in reasons.items():
        which = "all theorems" if len(theorems) == len(THEOREMS) else ", ".join(theorems)
        yield f"{kind}: {verdict} ({which}): {reason}"


def _doubts_of_equivalence(release: Lifted, lifted: Lifted) -> Iterator[str]:
    """Yield, for each kind of step, why it is not proved that the mutant does the same."""
    for kind in OBLIGATIONS:
        try:
            pairs = zip(release.behaviours(kind), lifted.behaviours(kind), strict=True)
            doubts = [doubt for pair in pairs for doubt in difference(*pair)]
        except NotUnderstood as error:
            doubts = [str(error)]
        if doubts:
            yield f"{label(*kind)}: {'; '.join(dict.fromkeys(doubts))}"


def difference(a: Behaviour, b: Behaviour) -> list[str]:
    """Return in what two trees' steps may differ; nothing if it is proved that they do not."""
    comparison = Comparison(a, b)
    found = []
    step = comparison.tell_apart(step_differs)
    if step.answer is not smt.Answer.UNSAT:
        found.append(f"another step ({step.reason or 'shown by a model'})")
    state = comparison.tell_apart(state_differs)
    if state.answer is smt.Answer.UNSAT:
        return found
    for name in a.left[0]:
        result = comparison.tell_apart(part_differs(name))
        if result.answer is not smt.Answer.UNSAT:
            found.append(f"leaves another `{name}` ({result.reason or 'shown by a model'})")
    return found


def _broken_elsewhere(
    release: Lifted,
    changed: _Changed,
    refuted_before: frozenset[tuple[str, tuple[str, ...], str]],
) -> Iterator[Refutation]:
    """Yield theorems refuted before that the mutant breaks in a step where the release keeps them.

    Where a theorem is refuted for the release as it is, a refutation says nothing; a step that the
    release does right and the mutant does wrong says as much as elsewhere.
    """
    for family, tags, slug in sorted(refuted_before):
        try:
            old = release.behaviours((family, tags))
            new = changed.lifted.behaviours((family, tags))
        except NotUnderstood:
            continue
        for before, after in zip(old, new, strict=True):
            counterexample = _newly_broken(before.exploration, after.exploration, slug)
            if counterexample is not None:
                yield _refutation(changed, (family, tags), slug, counterexample)
                break


def _newly_broken(before: Exploration, after: Exploration, slug: str) -> Counterexample | None:
    kept = term.negation(Prover(before).violation(THEOREMS[slug]))
    broken = Prover(after).violation(THEOREMS[slug])
    question = smt.Question()
    question.add(*after.assumptions.values(), kept, broken)
    result = question.ask()
    if result.answer is not smt.Answer.SAT:
        return None
    values = question.minimize(result.values, _variables(after.situation))
    evaluator = Evaluator(values)
    path = next(path for path in after.paths if evaluator.truth(path.condition))
    situation = in_numbers(after.situation, evaluator)
    step = in_numbers(path.step, evaluator)
    return Counterexample(situation, step, intended.need(situation), path.raised_at)


def _variables(situation: Situation) -> list[IntLike]:
    parts = {**vars(situation.geometry), **vars(situation.call), **vars(situation)}
    return [parts[name] for name in _LEAST_FIRST if isinstance(parts[name], term.Int)]


def label(family: str, tags: Iterable[str]) -> str:
    """A family with its tags, as one word."""
    return "+".join((family, *tags))


# ---- the changed code, run natively --------------------------------------------------------------


class _Changed:
    """A mutant's tree: its code on terms, and its code on numbers. Each is loaded when needed."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree

    @cached_property
    def lifted(self) -> Lifted:
        """The tree on terms."""
        return Lifted(self._tree)

    @cached_property
    def driver(self) -> Driver:
        """The tree's own managers."""
        return core_driver(self._tree)


def _refutation(changed: _Changed, kind: Kind, theorem: str, found: Counterexample) -> Refutation:
    family, tags = kind
    driver = changed.driver
    calls = [*_admission_for(found.situation), found.situation.call]
    if _shows_as_it_is(driver, theorem, found, calls):
        return Refutation(
            theorem, label(family, tags), Shown.AS_IT_IS, False, _history(found.situation, calls)
        )
    pending = _needs_pending_checkpoint(changed.lifted, kind, theorem)
    for situation, history in itertools.islice(_histories(found.situation, kind), MAX_HISTORIES):
        if _breaks(driver, theorem, kind, situation, history):
            return Refutation(
                theorem,
                label(family, tags),
                Shown.BY_ANOTHER_HISTORY,
                pending,
                _history(situation, history),
            )
    return Refutation(theorem, label(family, tags), Shown.NOT, pending, "")


def _admission_for(situation: Situation) -> Iterator[Call]:
    computed = situation.call.total_computed_tokens
    if computed:
        yield _chunk(0, computed, situation.call.prefill_end)


def _chunk(start: int, end: int, prefill_end: int, lookahead: int = 0) -> Call:
    return Call(end + lookahead, end, start, start, prefill_end)


def _shows_as_it_is(
    driver: Driver, theorem: str, found: Counterexample, calls: Sequence[Call]
) -> bool:
    """Whether the step gives the counterexample's numbers, and breaks the theorem."""
    seen = _last_step(driver, found.situation, calls)
    if seen is None:
        return False
    situation, step = seen
    if situation.table_length != found.situation.table_length:
        return False
    if found.step.raised is not None:
        return step.raised == found.step.raised
    if any(getattr(step, name) != getattr(found.step, name) for name in _COMPARED):
        return False
    return _violates(driver, theorem, situation, step, calls)


def _last_step(
    driver: Driver,
    asked: Situation,
    calls: Sequence[Call],
    *,
    exactly_the_estimate: bool = False,
) -> tuple[Situation, Step] | None:
    """Apply calls to a fresh request; None where an earlier one than the last raises."""
    tokens = max(call.num_tokens for call in calls)
    blocks = 64 + 2 * len(calls) * (tokens // asked.geometry.block_size + 20)
    try:
        request = driver.request(asked.geometry, blocks)
        for call in calls[:-1]:
            if request.apply(call).raised is not None:
                return None
        situation = request.situation(calls[-1], asked.prefill_length)
        step = request.apply(calls[-1], exactly_the_estimate=exactly_the_estimate)
        if request.exception is None:
            request.finish()
    except (DriverError, ArithmeticError, LookupError, ValueError, AssertionError):
        return None
    return situation, step


def _violates(
    driver: Driver, theorem: str, situation: Situation, step: Step, calls: Sequence[Call]
) -> bool:
    need = intended.need(situation)
    if theorem == "allocation-succeeds" and step.raised is None:
        if step.drawn <= step.estimate:
            return False
        seen = _last_step(driver, situation, calls, exactly_the_estimate=True)
        return seen is not None and seen[1].raised is not None
    return theorem_holds(theorem, situation, step, Pool(0, 0, 0), need) is False


def _breaks(
    driver: Driver, theorem: str, kind: Kind, situation: Situation, calls: Sequence[Call]
) -> bool:
    seen = _last_step(driver, situation, calls)
    return (
        seen is not None
        and _kind_of(seen[0]) == kind
        and _violates(driver, theorem, seen[0], seen[1], calls)
    )


def _kind_of(situation: Situation) -> Kind:
    family = family_of(situation)
    has_tag = family == "first" and bool(reserves_checkpoint(situation))
    return family, ("checkpoint",) if has_tag else ()


def _histories(found: Situation, kind: Kind) -> Iterator[tuple[Situation, list[Call]]]:
    """Yield one, two or three chunks of small requests, the counterexample's geometry first."""
    for geometry in _geometries(found.geometry):
        most = 4 * geometry.block_size + geometry.hash_block_size
        for number in (1,) if kind[0] == "first" else (2, 3):
            for ends in itertools.combinations(range(1, most + 1), number):
                for prefill_end in (0, ends[-1], ends[-1] + 1):
                    calls = [
                        _chunk(start, end, prefill_end)
                        for start, end in zip((0, *ends), ends, strict=False)
                    ]
                    length = prefill_end or ends[-1] + 1
                    situation = replace(
                        found, geometry=geometry, call=calls[-1], prefill_length=length
                    )
                    yield situation, calls


def _geometries(found: Geometry) -> Iterator[Geometry]:
    sizes = dict.fromkeys(
        ((found.block_size, found.hash_block_size), (1, 1), (2, 1), (2, 2), (4, 2))
    )
    speculative = dict.fromkeys((found.num_speculative_blocks, 0, 1, 2))
    checkpoints = dict.fromkeys((found.num_prefill_checkpoint_blocks, 1))
    alignments = dict.fromkeys((found.prefill_checkpoint_alignment, 1))
    for (block, hashed), s, k, alignment in itertools.product(
        sizes, speculative, checkpoints, alignments
    ):
        if block <= 8:
            yield replace(
                found,
                block_size=block,
                hash_block_size=hashed,
                num_speculative_blocks=s,
                num_prefill_checkpoint_blocks=k,
                prefill_checkpoint_alignment=alignment,
            )


def _needs_pending_checkpoint(lifted: Lifted, kind: Kind, theorem: str) -> bool:
    """Whether no step breaks the theorem unless an earlier chunk's checkpoint is still recorded."""
    if kind[0] == "first":
        return False
    none_before = term.negation(term.bool_var("has_checkpoint_before"))
    for behaviour in lifted.behaviours(kind):
        exploration = behaviour.exploration
        violation = Prover(exploration).violation(THEOREMS[theorem])
        result = smt.Question(exploration.assumptions).ask(violation, none_before)
        if result.answer is not smt.Answer.UNSAT:
            return False
    return True


def _history(situation: Situation, calls: Sequence[Call]) -> str:
    g = situation.geometry
    sizes = [f"B={g.block_size}", f"H={g.hash_block_size}", f"S={g.num_speculative_blocks}"]
    sizes.append(f"K={g.num_prefill_checkpoint_blocks}")
    if g.prefill_checkpoint_alignment != 1:
        sizes.append(f"alignment={g.prefill_checkpoint_alignment}")
    if g.drop_eagle_checkpoint_block:
        sizes.append("EAGLE")
    if situation.call.prefill_end:
        sizes.append(f"prefill_end={situation.call.prefill_end}")
    chunks = [f"{call.total_computed_tokens}→{call.num_tokens_main_model}" for call in calls]
    lookahead = calls[-1].num_tokens - calls[-1].num_tokens_main_model
    return f"{' '.join(sizes)}: {', '.join(chunks)}{f' (+{lookahead})' if lookahead else ''}"


# ---- results -------------------------------------------------------------------------------------


def judge_all(
    mutants: Sequence[Mutant], root: Path, *, jobs: int, on_progress: Callable[[str], None]
) -> list[Judgement]:
    """Judge mutants side by side; the results come in the order of the mutants."""
    refuted_before = refuted_obligations(root)
    # A process per mutant: terms are interned, and what a solver is able to say may depend on the
    # order in which they came up. Where processes are forked, they share what is explored here.
    for kind in OBLIGATIONS:
        _lifted_release(root).behaviours(kind)
    work = partial(judge, root=root, refuted_before=refuted_before)
    judged: dict[str, Judgement] = {}
    with multiprocessing.Pool(jobs, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(work, mutants):
            judged[found.mutant.name] = found
            done = f"{len(judged)}/{len(mutants)}"
            on_progress(
                f"{done} {found.mutant.name}: {found.outcome.value} ({found.seconds:.1f} s)"
            )
    return [judged[mutant.name] for mutant in mutants]


def counts(judged: Sequence[Judgement]) -> dict[str, int]:
    """Return the summary, in the order it is printed."""
    of = Counter(found.outcome for found in judged)
    refutations = [r for found in judged for r in found.refutations]
    shown = Counter(r.shown for r in refutations)
    shown_mutants = [
        found for found in judged if any(r.shown is not Shown.NOT for r in found.refutations)
    ]
    return {
        "mutants": len(judged),
        "refuted by a theorem other than matches-intended": of[Outcome.REFUTED],
        "refuted by matches-intended alone": of[Outcome.MODEL_ONLY],
        "proved equivalent": of[Outcome.EQUIVALENT],
        "survived": of[Outcome.SURVIVED],
        "refuted mutants that the changed code shows, run natively": len(shown_mutants),
        "refutations (mutant, kind of step, theorem)": len(refutations),
        "of these shown natively by admission and step": shown[Shown.AS_IT_IS],
        "of these shown natively by another history": shown[Shown.BY_ANOTHER_HISTORY],
        "of these not shown natively": shown[Shown.NOT],
        "refutations that need an earlier chunk's checkpoint": sum(
            r.needs_pending_checkpoint for r in refutations
        ),
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
    kinds: dict[str, list[str]] = {}
    for refutation in found.refutations:
        kinds.setdefault(refutation.theorem, []).append(refutation.kind)
    if found.outcome is Outcome.REFUTED:
        kinds.pop(MODEL_THEOREM, None)
    return "; ".join(f"{slug} ({', '.join(where)})" for slug, where in kinds.items())


def page(judged: Sequence[Judgement], release: str) -> str:
    """Return the results as a page."""
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`; do not edit.",
        "",
        f"Each row is one change of a few tokens to vLLM {release}, made to a copy of its core and",
        "proved like any tree. A mutant is **refuted** when a theorem that holds for the release",
        "does not hold for the copy. `matches-intended` compares with the project's own model, so",
        "mutants that nothing else refutes are counted apart; where the release itself differs",
        "from the model, a step counts that the release does by the model and the mutant does not.",
        "A mutant is **equivalent** when the solver shows, for every step of the families with",
        "obligations, that estimate, dry run, blocks drawn, exceptions, block table, returned",
        "blocks and every other part of the manager's state are the release's. Anything else has",
        "**survived**: it is a hole in the theorems.",
        "",
        "Counterexamples are also run on the changed code itself, without a solver: admission of",
        "the computed tokens and then the step, or, where the state needs more than that, the",
        "first small history that breaks the theorem.",
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
    notes = [
        f"- `{found.mutant.name}`: {note}"
        for found in judged
        for note in found.notes
        if found.outcome is not Outcome.SURVIVED
    ]
    if notes:
        lines += ["", "## Neither proved nor refuted, beside a refutation", "", *notes]
    return "\n".join(lines) + "\n"


def _native(found: Judgement) -> str:
    if not found.refutations:
        return ""
    order = list(Shown)
    best = min(
        found.refutations,
        key=lambda r: (r.theorem == MODEL_THEOREM, order.index(r.shown)),
    )
    shown = sum(r.shown is not Shown.NOT for r in found.refutations)
    how = f"{best.shown.value}, {best.theorem}: {best.history}" if best.history else "not shown"
    return f"{shown} of {len(found.refutations)}; {how}"


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
