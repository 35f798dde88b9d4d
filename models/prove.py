"""Obligations and their verdicts: each theorem, for each kind of step, on one tree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Protocol, TypeVar

from models import intended, smt, term
from models.evaluate import Evaluator
from models.lift import (
    Exploration,
    MaybeMissingPaths,
    NotUnderstood,
    PathSummary,
    summary_of,
)
from models.term import BoolLike
from models.traits import Traits
from spec.assumptions import CHECKPOINT_BLOCKS, MAMBA_GROUPS, SPECULATIVE_BLOCKS
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS, Asks, Need, Pool, Theorem
from spec.vocabulary import Situation, Step

#: Order in which a counterexample's values are made least; what is left out does not matter to it.
_LEAST_FIRST = (
    "has_checkpoint_before",
    "has_column_to_retire_before",
    "was_parked",
    "hit_is_of_this_step",
    "hit_is_evictable",
    "other_hits_are_evictable",
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "prefill_end",
    "block_size",
    "hash_block_size",
    "prefill_checkpoint_alignment",
    "num_blocks_per_hit_unit",
    "num_tokens_behind_checkpoint",
    "num_excess_columns",
    "num_excess_attention_columns",
    "num_external_tokens",
    "num_hit_blocks",
    "num_evictable_attention_hits",
    "num_local_computed_tokens",
    "num_computed_tokens",
    "num_tokens_main_model",
    "num_tokens",
    "prefill_length",
    "num_request_tokens",
    "num_in_flight_tokens",
    "num_just_ended_tokens",
    "free_blocks",
    "watermark_blocks",
    "reserved_blocks",
)
#: Columns of a counterexample's table whose contents are made usual where they can be.
MOST_COLUMNS = 8
#: Sizes, and numbers of tokens, up to which all steps are looked at where a proof is out of reach.
SMALL_SIZE, SMALL_NUMBER_OF_TOKENS = 4, 16
_EVIDENCE = (
    f"bounded evidence, block sizes up to {SMALL_SIZE} and up to {SMALL_NUMBER_OF_TOKENS} tokens"
)
_Record = TypeVar("_Record", Situation, Step)


class Explorer(Protocol):
    """A tree whose families can be explored; `models.predict.LiftedTree` is one."""

    @property
    def traits(self) -> Traits:
        """What the tree's manager knows."""

    def explorations_of(
        self,
        family: str,
        tags: tuple[str, ...],
        *,
        asks: Asks = Asks.STEP,
        manager: str = "mamba-align",
    ) -> Iterable[Exploration]:
        """Yield all paths of a family, setting by setting."""


class Verdict(Enum):
    """What is known of an obligation; nothing but PROVED is a pass."""

    REFUTED = "REFUTED"
    UNSUPPORTED = "UNSUPPORTED"
    UNKNOWN = "UNKNOWN"
    VACUOUS = "VACUOUS"
    PROVED = "PROVED"
    NOT_APPLICABLE = "NOT_APPLICABLE"


#: The worst first: over enumerated parameters the worst verdict stands.
_WORST_FIRST = tuple(Verdict)


@dataclass(frozen=True)
class Counterexample:
    """A step that breaks a claim, in numbers.

    Attributes:
        situation: What the step was asked, and the state it started from.
        step: What the lifted code does then.
        need: What the intended model says the step needs, in blocks.
        raised_at: `file:line` in the tree, where the step raises.
    """

    situation: Situation
    step: Step
    need: int
    raised_at: str | None


@dataclass(frozen=True)
class Obligation:
    """One theorem for one kind of step of one tree's manager, and its verdict.

    Attributes:
        manager: Slug.
        assumptions: What a proof used (its unsat core), else all that were in force.
        seconds: Time spent, and on exploring, where no theorem before it needed that.
        reason: Why there is no verdict, or None.
    """

    manager: str
    family: str
    tags: tuple[str, ...]
    theorem: str
    verdict: Verdict
    assumptions: tuple[str, ...]
    seconds: float
    counterexample: Counterexample | None = None
    reason: str | None = None
    scope: str = ""
    num_paths: int = 0


def prove(
    tree: Explorer,
    *,
    managers: Sequence[str] = (),
    families: Sequence[str] = (),
    kinds: Sequence[tuple[str, tuple[str, ...]]] = (),
    theorems: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Obligation]:
    """Yield a verdict per kind of step, manager and theorem; empty selections mean all.

    A theorem has none of a manager that it is not about.

    Args:
        tree: What is explored.
        managers: Slugs of managers.
        families: Slugs of families.
        kinds: Families with the tags that are told apart.
        theorems: Slugs of theorems.
        on_progress: Told what is being worked on.

    Raises:
        CoreError: The tree lacks a symbol that a step needs.
    """
    chosen = [THEOREMS[slug] for slug in THEOREMS if not theorems or slug in theorems]
    for family, tags in OBLIGATIONS:
        if (families and family not in families) or (kinds and (family, tags) not in kinds):
            continue
        on_progress(f"{family} {' '.join(tags)}".strip())
        refutations = Refutations()
        for manager in managers or MANAGERS:
            of_manager = [theorem for theorem in chosen if manager in theorem.managers]
            yield from _of_manager(tree, manager, family, tags, of_manager, refutations)


def _of_manager(
    tree: Explorer,
    manager: str,
    family: str,
    tags: tuple[str, ...],
    theorems: Sequence[Theorem],
    refutations: Refutations,
) -> Iterator[Obligation]:
    applicable = []
    for theorem in theorems:
        reason = theorem.why_not(family, tags) or tree.traits.why_not(family, tags, theorem.slug)
        if reason is None:
            applicable.append(theorem)
        else:
            verdict = Verdict.NOT_APPLICABLE
            yield Obligation(manager, family, tags, theorem.slug, verdict, (), 0.0, reason=reason)
    for asks in Asks:
        about = [theorem for theorem in applicable if theorem.asks is asks]
        yield from _of_family(tree, manager, family, tags, about, refutations)


def explorations_for(
    tree: Explorer, manager: str, family: str, tags: tuple[str, ...], theorem: Theorem
) -> Iterable[Exploration]:
    """Return all paths of what a theorem is about, setting by setting.

    Raises:
        NotUnderstood: The lifter does not understand the code.
    """
    return tree.explorations_of(family, tags, asks=theorem.asks, manager=manager)


def _of_family(
    tree: Explorer,
    manager: str,
    family: str,
    tags: tuple[str, ...],
    theorems: Sequence[Theorem],
    refutations: Refutations,
) -> Iterator[Obligation]:
    if not theorems:
        return
    scope = scope_of(tree.traits, manager)
    provers = _Provers(explorations_for(tree, manager, family, tags, theorems[0]), refutations)
    for theorem in theorems:
        started = time.perf_counter()
        try:
            part = _over_all(provers, theorem)
        except NotUnderstood as error:
            solver_gave_up = isinstance(error, MaybeMissingPaths)
            verdict = Verdict.UNKNOWN if solver_gave_up else Verdict.UNSUPPORTED
            part = _Part(verdict, (), reason=str(error))
        yield Obligation(
            manager,
            family,
            tags,
            theorem.slug,
            part.verdict,
            part.assumptions,
            time.perf_counter() - started,
            part.counterexample,
            part.reason,
            scope=scope,
            num_paths=provers.num_paths,
        )


class _Provers:
    """A prover for each setting, explored when it is first asked for."""

    def __init__(self, explorations: Iterable[Exploration], refutations: Refutations) -> None:
        self._left = iter(explorations)
        self._refutations = refutations
        self._found: list[Prover] = []
        self._error: NotUnderstood | None = None

    def __iter__(self) -> Iterator[Prover]:
        for number in itertools.count():
            if number == len(self._found) and not self._explores_another():
                return
            yield self._found[number]

    def _explores_another(self) -> bool:
        if self._error is not None:
            raise self._error
        try:
            found = next(self._left, None)
        except NotUnderstood as error:
            self._error = error
            raise
        if found is not None:
            self._found.append(Prover(found, self._refutations))
        return found is not None

    @property
    def num_paths(self) -> int:
        """Paths of the settings that were asked for."""
        return sum(len(prover.exploration.paths) for prover in self._found)


def _over_all(provers: Iterable[Prover], theorem: Theorem) -> _Part:
    """The worst verdict over all settings; the first refutation is enough.

    Raises:
        NotUnderstood: The lifter does not understand the code in a setting that was asked for.
    """
    parts = []
    for prover in provers:
        parts.append(prover.settle(theorem))
        if parts[-1].verdict is Verdict.REFUTED:
            break
    worst = min(_settled(parts), key=lambda part: _WORST_FIRST.index(part.verdict))
    used = dict.fromkeys(slug for part in parts for slug in part.assumptions)
    return replace(worst, assumptions=tuple(used))


def scope_of(traits: Traits, manager: str = "mamba-align") -> str:
    """Return which sizes a proof on a tree covers."""
    parts = [
        "block size, hash block size, alignment and token counts unbounded",
        f"S {SPECULATIVE_BLOCKS[0]}..{SPECULATIVE_BLOCKS[-1]}",
    ]
    if traits.has_checkpoint_blocks:
        parts[-1] += f", K {CHECKPOINT_BLOCKS[0]}..{CHECKPOINT_BLOCKS[-1]}"
    if traits.has_eagle_drop:
        parts.append("EAGLE drop on and off")
    if traits.aligns_checkpoints_with_hits:
        parts.append("hits that end at hash units, and at whole blocks")
    parts.append("dense and sparse retention" if traits.takes_prefill_end else "dense retention")
    if manager == "coordinator":
        numbers = " or ".join(map(str, MAMBA_GROUPS))
        parts.append(f"one full-attention group and {numbers} Mamba groups of its block size")
    return "; ".join(parts)


@dataclass(frozen=True)
class _Part:
    verdict: Verdict
    assumptions: tuple[str, ...]
    counterexample: Counterexample | None = None
    reason: str | None = None


def _settled(parts: Sequence[_Part]) -> Sequence[_Part]:
    """The parts that say something: a setting in which the case does not occur says nothing.

    Where it occurs in none, all of them say so.
    """
    occurs = [part for part in parts if part.verdict is not Verdict.VACUOUS]
    return occurs or parts


class Refutations:
    """What was shown not to hold, and what that used: it does not hold wherever all of that does.

    Settings, and the groups that are added up, share most of what their paths decide, so most of
    what is asked about one of them was shown about another. Terms are interned: equal formulas are
    one object.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[frozenset[int], tuple[str, ...]]]] = {}

    def core_of(self, formula: BoolLike, facts: Set[int]) -> tuple[str, ...] | None:
        """Return the assumptions that refuted a formula, None where no refutation is known.

        Args:
            formula: What may hold.
            facts: Identities of the formulas that do.
        """
        known = self._of.get(id(formula), ())
        return next((core for used, core in known if used <= facts), None)

    def add(self, formula: BoolLike, used: frozenset[int], core: tuple[str, ...]) -> None:
        """Note that a formula does not hold where others do.

        Args:
            formula: What does not hold.
            used: Identities of the others.
            core: The assumptions among them.
        """
        self._of.setdefault(id(formula), []).append((used, core))


class Prover:
    """Settles theorems on one exploration.

    Args:
        exploration: All paths.
        refutations: Of others, which may hold here too; what is refuted here is added.
    """

    def __init__(self, exploration: Exploration, refutations: Refutations | None = None) -> None:
        self.exploration = exploration
        self._refutations = refutations or Refutations()
        self._question = smt.Question(exploration.assumptions)
        assumed = tuple(exploration.assumptions.values())
        self._facts = [_facts((*assumed, path.condition)) for path in exploration.paths]
        self._pool = Pool(
            term.int_var("free_blocks", 0),
            term.int_var("watermark_blocks", 0),
            term.int_var("reserved_blocks", 0),
        )
        self._need = Need(intended.need(exploration.situation))
        self._found: list[Mapping[str, Any]] = []

    def settle(self, theorem: Theorem) -> _Part:
        """Return the verdict of a theorem.

        Unsat iff the claim holds in every step of the exploration; a model is a step that breaks
        it. Where the solver gives up, it is asked about all steps of small sizes: evidence, which
        is no proof.
        """
        supposed = tuple(assumption.slug for assumption in theorem.premises)
        in_force = (*self._with_built_in(self.exploration.assumptions), *supposed)
        result = self._found_before(theorem) or self.look_for(theorem)
        reason = result.reason or ""
        if result.answer is smt.Answer.UNKNOWN:
            bounded = self._question.ask(self.violation(theorem), *self._small_sizes())
            holds = bounded.answer is smt.Answer.UNSAT
            reason += f"; {_EVIDENCE}: {'it holds there' if holds else 'none, the same'}"
            result = bounded if bounded.answer is smt.Answer.SAT else result
        if result.answer is smt.Answer.SAT:
            found = self._least(result.values, self.violation(theorem))
            self._found.append(found)
            return _Part(Verdict.REFUTED, in_force, self._counterexample(found))
        if result.answer is smt.Answer.UNKNOWN:
            return _Part(Verdict.UNKNOWN, in_force, reason=reason)
        witness = self._has_witness(theorem)
        if witness.answer is smt.Answer.UNKNOWN:
            return _Part(Verdict.UNKNOWN, in_force, reason=f"witness: {witness.reason}")
        if witness.answer is smt.Answer.UNSAT:
            return _Part(Verdict.VACUOUS, in_force, reason="no step shows the theorem's witness")
        used = (*self._with_built_in((*self.exploration.core, *result.core)), *supposed)
        return _Part(Verdict.PROVED, used)

    def look_for(self, theorem: Theorem) -> smt.Result:
        """Look for a step that breaks the claim, path by path; unsat means that there is none."""
        core: dict[str, None] = {}
        unknown: smt.Result | None = None
        for path, facts in zip(self.exploration.paths, self._facts, strict=True):
            for way in self._ways_to_break(theorem, path):
                result = self._ask(path, facts, way)
                if result.answer is smt.Answer.SAT:
                    return result
                if result.answer is smt.Answer.UNKNOWN:
                    unknown = unknown or result
                core.update(dict.fromkeys(result.core))
        return unknown or smt.Result(smt.Answer.UNSAT, core=tuple(core))

    def _ask(self, path: PathSummary, facts: Set[int], way: BoolLike) -> smt.Result:
        """Ask whether a path can be taken while ``way`` holds, unless that is known."""
        if term.excludes(path.condition, way):
            return smt.Result(smt.Answer.UNSAT)
        core = self._refutations.core_of(way, facts)
        if core is not None:
            return smt.Result(smt.Answer.UNSAT, core=core)
        result = self._question.ask(way, given=term.conjuncts(path.condition))
        if result.answer is smt.Answer.UNSAT:
            assumed = (self.exploration.assumptions[slug] for slug in result.core)
            self._refutations.add(way, _facts((*result.given, *assumed)), result.core)
        return result

    def _ways_to_break(self, theorem: Theorem, path: PathSummary) -> Iterator[BoolLike]:
        """Yield formulas one of which holds where a path breaks the claim."""
        if path.step.raised is None or theorem.survives_exception:
            broken = term.negation(self._claim(theorem, path))
            for way in term.disjuncts(broken):
                yield from self._apart(theorem, way)

    def _apart(self, theorem: Theorem, formula: BoolLike) -> Iterator[BoolLike]:
        """Yield formulas of which one holds where ``formula`` does, and no other."""
        if not theorem.each_s_apart:
            yield formula
            return
        number = self.exploration.situation.geometry.num_speculative_blocks
        apart = [number == one for one in SPECULATIVE_BLOCKS]
        for one in (*apart, term.negation(term.disjunction(apart))):
            yield term.conjunction((one, formula))

    def _found_before(self, theorem: Theorem) -> smt.Result | None:
        """A counterexample of another theorem that breaks this one too, to begin with."""
        if not self._found:
            return None
        violation = self.violation(theorem)
        known = (values for values in self._found if Evaluator(values).truth(violation))
        return next((smt.Result(smt.Answer.SAT, values) for values in known), None)

    def _small_sizes(self) -> Iterator[BoolLike]:
        geometry, call = self.exploration.situation.geometry, self.exploration.situation.call
        for name in ("block_size", "hash_block_size", "prefill_checkpoint_alignment"):
            yield getattr(geometry, name) <= SMALL_SIZE
        for tokens in (call.num_tokens, self.exploration.situation.prefill_length):
            yield tokens <= SMALL_NUMBER_OF_TOKENS

    def violation(self, theorem: Theorem) -> BoolLike:
        """Return the formula of all steps that break the claim."""
        return term.disjunction(
            term.conjunction((path.condition, term.negation(self._claim(theorem, path))))
            for path in self.exploration.paths
            if path.step.raised is None or theorem.survives_exception
        )

    def smtlib(self, theorem: Theorem) -> Iterator[str]:
        """Yield the theorem's questions as SMT-LIB 2 scripts; unsat, all of them, means proved."""
        for part in self._apart(theorem, self.violation(theorem)):
            question = smt.Question()
            question.add(*self.exploration.assumptions.values(), part)
            yield question.smtlib()

    def uncovered_smtlib(self) -> str:
        """Return the completeness question as an SMT-LIB 2 script; unsat means no path is missing.

        A model is a situation that keeps the assumptions and lies on none of the paths.
        """
        question = smt.Question()
        question.add(*self.exploration.assumptions.values())
        question.add(*(term.negation(path.condition) for path in self.exploration.paths))
        return question.smtlib()

    def _claim(self, theorem: Theorem, path: PathSummary) -> BoolLike:
        claim: BoolLike = theorem.holds(
            self.exploration.situation, path.step, self._pool, self._need
        )
        return claim

    def _has_witness(self, theorem: Theorem) -> smt.Result:
        interesting = [
            (path.condition, theorem.shows(self.exploration.situation, path.step))
            for path in self.exploration.paths
            if path.step.raised is None
        ]
        for sample in self.exploration.samples:
            evaluator = Evaluator(sample)
            if any(evaluator.truth(where) and evaluator.truth(what) for where, what in interesting):
                return smt.Result(smt.Answer.SAT, sample)
        return self._question.ask(term.disjunction(map(term.conjunction, interesting)))

    def _least(self, values: Mapping[str, Any], violation: BoolLike) -> Mapping[str, Any]:
        question, order = smt.Question(), variables_in_order()
        question.add(*self.exploration.assumptions.values(), violation)
        least = question.minimize(values, order)
        evaluator = Evaluator(least)
        columns = min(evaluator.number(self.exploration.situation.table_length), MOST_COLUMNS)
        pins = [variable == evaluator.number(variable) for variable in order]
        unusual = [*_unusual_contents(columns)]
        usual = question.ask(*pins, *(one == 0 for one in unusual))
        if usual.answer is smt.Answer.SAT:
            return usual.values
        return question.minimize(least, unusual, *pins)

    def _counterexample(self, values: Mapping[str, Any]) -> Counterexample:
        path = summary_of(self.exploration, values)
        assert path is not None, "a model breaks an assumption"
        evaluator = Evaluator(values)
        return Counterexample(
            in_numbers(self.exploration.situation, evaluator),
            in_numbers(path.step, evaluator),
            evaluator.number(self._need.blocks),
            path.raised_at,
        )

    def _with_built_in(self, slugs: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.exploration.built_in, *slugs)))


def _facts(formulas: Iterable[BoolLike]) -> frozenset[int]:
    """Identities of what formulas say together."""
    return frozenset(id(piece) for formula in formulas for piece in term.conjuncts(formula))


def variables_in_order() -> list[term.IntLike]:
    """Return the variables in the order in which a counterexample's values are made least."""
    declared = {a.args[0]: a for a in term.ATOMS if a.kind == "var"}
    order: list[term.IntLike] = []
    for name in _LEAST_FIRST:
        if name.startswith(("has_", "hit_is_", "other_hits_", "was_")):
            order.append(term.int_of(term.bool_var(name)))
        elif name in declared:
            order.append(term.int_var(name, declared[name].low, declared[name].high))
    return order


def _unusual_contents(columns: int) -> Iterator[term.IntLike]:
    """For each of the first columns of the table, whether it is null, and whether it is pinned."""
    for column in range(columns):
        yield term.int_of(term.cell("block_table", column) == 0)
        yield term.int_of(term.negation(term.cell("block_is_movable", column) == 1))


def in_numbers(record: _Record, evaluator: Evaluator) -> _Record:
    """Return a situation or step with every term replaced by its value."""
    changes: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, term.Bool):
            changes[field.name] = evaluator.truth(value)
        elif isinstance(value, term.Int):
            changes[field.name] = evaluator.number(value)
        elif hasattr(value, "__dataclass_fields__"):
            changes[field.name] = in_numbers(value, evaluator)
    return replace(record, **changes)
