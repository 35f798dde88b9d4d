"""Find what scenarios are made of: a request per refutation, for each feasible path, for its edges.

Every scenario is one request admitted with its first chunk and taken on by the next ones; the last
chunk is the step under test.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from conformance.made_request import Request, request_of
from conformance.predicted import scenario_of
from conformance.reached import (
    ends_at_hash_unit,
    is_left_by_chunks,
    is_reached,
    is_reached_by_chunks,
)
from conformance.reading import MAX_SLUG_LENGTH
from conformance.scenario import Scenario
from models import smt, term
from models.evaluate import Evaluator
from models.lift import Exploration, PathSummary, Variant, variants_of
from models.predict import LiftedTree
from models.prove import (
    Counterexample,
    Obligation,
    Prover,
    explorations_for,
    in_numbers,
)
from models.term import BoolLike
from spec.assumptions import MAMBA_GROUPS, SPECULATIVE_BLOCKS
from spec.families import (
    family_of,
    reserves_checkpoint,
)
from spec.logic import negation
from spec.theorems import THEOREMS
from spec.vocabulary import Situation

#: The longest prompt that edges go up to, in tokens: vLLM #57050's `--max-model-len`.
MAX_TOKENS = 1_048_576

#: Sizes at which the edges of a path are taken, in tokens: those of the stall in CASES 57050.
EDGE_SIZES = {"block_size": 16, "hash_block_size": 4, "prefill_checkpoint_alignment": 4}
#: Sizes of a model in production, in tokens: those of vLLM #57050.
PRODUCTION_SIZES = {
    "block_size": 896,
    "hash_block_size": 128,
    "prefill_checkpoint_alignment": 64,
}
#: What a canonical scenario makes least, the first one first.
_ORDER = (
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "hit_is_evictable",
    "other_hits_are_evictable",
    "num_evictable_attention_hits",
    "num_blocks_per_hit_unit",
    "num_tokens_behind_checkpoint",
    "prefill_end",
    "num_excess_columns",
    "num_excess_attention_columns",
    "num_external_tokens",
    "num_hit_blocks",
    "num_local_computed_tokens",
    "num_computed_tokens",
    "num_tokens_main_model",
    "num_tokens",
    "prefill_length",
    "num_request_tokens",
    "num_in_flight_tokens",
    "num_just_ended_tokens",
)
#: The same for a scenario that no size is given for.
_SIZES_FIRST = ("block_size", "hash_block_size", "prefill_checkpoint_alignment", *_ORDER)
#: The same for the longest prompt.
_LONGEST = (
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "hit_is_evictable",
    "other_hits_are_evictable",
    "num_evictable_attention_hits",
    "num_blocks_per_hit_unit",
    "num_tokens_behind_checkpoint",
    "tokens_left",
    "prefill_end",
    "num_excess_columns",
    "num_excess_attention_columns",
    "num_external_tokens",
    "num_hit_blocks",
    "num_local_computed_tokens",
    "num_computed_tokens",
    "prefill_length",
    "num_request_tokens",
)


def refutation(
    target: str,
    obligation: Obligation,
    counterexample: Counterexample,
    trees: Mapping[str, LiftedTree],
) -> Scenario:
    """Return a counterexample as a scenario that names the theorem it refutes.

    Where the state that the counterexample starts from has more to it than two chunks bring about,
    such as a checkpoint left pending or a hit that ends inside a hash unit, the least one that they
    do bring about is taken instead.
    """
    where = _where(obligation)

    def scenario(situation: Situation) -> Scenario:
        return scenario_of(
            request_of(situation),
            trees=trees,
            source=f"least counterexample of {obligation.theorem} in {where} for {target}",
            name=_name(f"{obligation.theorem}-{where}", target),
            theorem=obligation.theorem,
        )

    found = scenario(counterexample.situation)
    begins = replace(counterexample.situation, geometry=found.geometry)
    if not (_shows(found, target) and ends_at_hash_unit(begins)):
        reachable = _least_reachable(obligation, trees[target])
        if reachable is not None:
            return scenario(reachable)
    return found


def _where(obligation: Obligation) -> str:
    of_groups = () if obligation.manager == "mamba-align" else (obligation.manager,)
    return "-".join((*of_groups, obligation.family, *obligation.tags))


def _shows(scenario: Scenario, target: str) -> bool:
    prediction = (scenario.predicted or {}).get(target)
    return prediction is not None and scenario.theorem in prediction.violates


def _least_reachable(obligation: Obligation, tree: LiftedTree) -> Situation | None:
    for exploration in _explorations_of(obligation, tree):
        violation = Prover(exploration).violation(THEOREMS[obligation.theorem])
        question = smt.Question()
        question.add(*exploration.assumptions.values(), violation)
        if is_left_by_chunks(exploration.situation):
            question.add(is_reached_by_chunks(exploration, [*question.cells("block_table")]))
        else:
            question.add(is_reached(exploration))
        found = question.ask()
        if found.answer is smt.Answer.SAT:
            values = question.minimize(found.values, _variables(_SIZES_FIRST))
            return in_numbers(exploration.situation, Evaluator(values))
    return None


def _explorations_of(obligation: Obligation, tree: LiftedTree) -> Iterable[Exploration]:
    theorem = THEOREMS[obligation.theorem]
    kind = obligation.manager, obligation.family, obligation.tags
    return explorations_for(tree, *kind, theorem)


def refutation_at_production_sizes(
    target: str, obligation: Obligation, trees: Mapping[str, LiftedTree]
) -> Scenario | None:
    """Return the longest prompt that breaks a refuted theorem at sizes that people run.

    None where the theorem is not refuted at these sizes.
    """
    theorem = THEOREMS[obligation.theorem]
    for exploration in _explorations_of(obligation, trees[target]):
        question = smt.Question()
        question.add(*exploration.assumptions.values(), Prover(exploration).violation(theorem))
        question.add(*_of_sizes(exploration, PRODUCTION_SIZES), *_within_limit(exploration))
        question.add(is_reached(exploration))
        found = question.ask()
        if found.answer is smt.Answer.SAT:
            values = question.minimize(found.values, _variables(_LONGEST))
            where = _where(obligation)
            return scenario_of(
                _request(exploration, values),
                trees=trees,
                source=f"longest prompt that breaks {obligation.theorem} in {where} for {target} "
                "at production sizes",
                name=_name(f"{obligation.theorem}-{where}-at-production-sizes", target),
                theorem=obligation.theorem,
            )
    return None


def _name(what: str, target: str) -> str:
    """Lower-case letters, digits and single hyphens, no longer than a name may be.

    Releases differ in these; of other targets, which may not, a digest keeps them apart.
    """
    slug = re.sub("[^a-z0-9]+", "-", f"{what}-{target}".lower()).strip("-")
    if target.startswith("vllm=="):
        return slug
    digest = hashlib.sha256(target.encode()).hexdigest()[:8]
    return f"{slug[: MAX_SLUG_LENGTH - 9].strip('-')}-{digest}"


def paths_and_edges(
    target: str, tree: LiftedTree, kinds: Iterable[tuple[str, tuple[str, ...]]]
) -> dict[Request, str]:
    """Return a request for each feasible path of kinds of step and for its edges, with sources.

    Where a coordinator adds up groups, the paths are those of one Mamba group, and of two where
    they differ: in what references a hit.

    What a setting changes is where a checkpoint lies, so others than the plain one are taken for
    the kinds of step of `_IN_ALL_SETTINGS` only. Edges are those of the families of
    `_WITH_EDGES`, in the plain setting, for tables as long as required. Of paths that differ in how
    many speculative blocks are moved, some stand for all (`_SPECULATIVE_BLOCKS`), but in those
    families.

    Nothing about a step that is put off depends on its numbers, so its path has no edges, and of
    the coordinator the same request is asked.
    """
    found: dict[Request, str] = {}

    def take(exploration: Exploration, where: str, *, with_edges: bool) -> None:
        for number, path in enumerate(exploration.paths, start=1):
            if path.step.refused is not True and path.step.deferred is not True:
                for request, edge in of_path(exploration, path, with_edges=with_edges):
                    found.setdefault(request, f"{edge} of path {number} of {where}")

    def take_put_off(exploration: Exploration, where: str) -> None:
        for number, path in enumerate(exploration.paths, start=1):
            if path.step.deferred is True:
                for request, edge in of_path(exploration, path, with_edges=False):
                    for groups in (0, MAMBA_GROUPS[0]):
                        of_groups = replace(request, num_mamba_groups=groups)
                        found.setdefault(of_groups, f"{edge} of path {number} of {where}")

    for family, tags in kinds:
        for variant in variants_of(tree.traits, family):
            is_plain = variant == Variant()
            if not is_plain and (family, tags) not in _IN_ALL_SETTINGS:
                continue
            with_edges = is_plain and family in _WITH_EDGES and "overwide" not in tags
            where = f"{'-'.join((family, *tags))} in {target}"
            exploration = tree.exploration(family, tags, variant)
            take(exploration, f"{where}{_setting(variant)}", with_edges=with_edges)
            if is_plain:
                take_put_off(exploration, where)
            has_hits = not isinstance(exploration.situation.num_hit_blocks, int)
            for groups in (MAMBA_GROUPS if has_hits else MAMBA_GROUPS[:1]) if is_plain else ():
                joined = tree.exploration(family, tags, variant, num_mamba_groups=groups)
                of_groups = f"{where} with {1 + groups} groups"
                take(joined, of_groups, with_edges=False)
    return found


#: Kinds of step whose paths are taken in every setting.
_IN_ALL_SETTINGS = (("first", ("checkpoint",)), ("hit-full", ("checkpoint",)), ("checkpoint", ()))
#: Families whose paths are taken with their edges.
_WITH_EDGES = ("first", "hit-full", "hit-partial", "external-sync", "running", "checkpoint")
#: S of the paths that stand for the others.
_SPECULATIVE_BLOCKS = (0, 1, 2, SPECULATIVE_BLOCKS[-1])


def stands_for_others(exploration: Exploration, path: PathSummary) -> BoolLike:
    """Return where a path is taken with as many speculative blocks as stand for other numbers."""
    number = exploration.situation.geometry.num_speculative_blocks
    some = term.disjunction(number == one for one in _SPECULATIVE_BLOCKS)
    return term.conjunction((path.condition, some))


def _setting(variant: Variant) -> str:
    drop = " with EAGLE drop" if variant.eagle else ""
    units = " with hits at whole blocks" if variant.whole_blocks else ""
    return drop + units + (" with hashes that look ahead" if variant.looks_ahead else "")


def of_path(
    exploration: Exploration, path: PathSummary, *, with_edges: bool
) -> Iterator[tuple[Request, str]]:
    """Yield a request that takes a path in the fewest tokens, and its edges, with words for each.

    None where no request gets there in a few steps.
    """
    taken = path.condition if with_edges else stands_for_others(exploration, path)
    on_path = (*exploration.assumptions.values(), taken, is_reached(exploration))
    is_put_off = path.step.deferred is True
    if not is_put_off and isinstance(exploration.situation.hit_is_of_this_step, term.Bool):
        on_path = (*on_path, negation(exploration.situation.hit_is_of_this_step))
    question = smt.Question()
    question.add(*on_path, *_of_sizes(exploration, EDGE_SIZES))
    least = question.ask()
    is_ordinary = least.answer is smt.Answer.SAT
    if not is_ordinary:
        question = smt.Question()
        question.add(*on_path)
        least = question.ask()
    if least.answer is not smt.Answer.SAT:
        return
    names = _ORDER if is_ordinary else _SIZES_FIRST
    values = question.minimize(least.values, _variables(names))
    request = _request(exploration, values)
    yield request, "least tokens"
    if not (with_edges and is_ordinary) or values.get("has_checkpoint_before"):
        return
    greatest = _greatest(exploration, question, values)
    if greatest is not None:
        yield _request(exploration, greatest), "greatest tokens"
    for edge in _around_boundaries(request):
        yield edge, "block or hash boundary near the least tokens"
    for edge in _around_prefill_end(request):
        yield edge, "end of the prefill near the least tokens"


def _of_sizes(exploration: Exploration, sizes: Mapping[str, int]) -> Iterator[Any]:
    """Sizes as given; hash units are blocks, and any alignment does, where a tree says so."""
    geometry = exploration.situation.geometry
    for name, size in sizes.items():
        if isinstance(geometry.prefill_checkpoint_alignment, int) and name != "block_size":
            continue
        yield getattr(geometry, name) == size


def _within_limit(exploration: Exploration) -> Iterator[Any]:
    """The prompt has `MAX_TOKENS` but for `tokens_left`, and there is no lookahead."""
    call = exploration.situation.call
    yield call.num_tokens_main_model + term.int_var("tokens_left", 0) == MAX_TOKENS
    yield call.num_tokens == call.num_tokens_main_model
    yield exploration.situation.num_request_tokens <= MAX_TOKENS


#: What a step starts from, but for its table.
_START = (
    "num_computed_tokens",
    "num_local_computed_tokens",
    "num_external_tokens",
    "num_hit_blocks",
    "hit_is_evictable",
)


def _greatest(
    exploration: Exploration, question: smt.Question, values: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The model with the most tokens within `MAX_TOKENS` that starts as the request does."""
    evaluator = Evaluator(values)
    pins = list(_within_limit(exploration))
    pins += [v == evaluator.number(v) for v in _variables(_START)]
    found = question.ask(*pins)
    if found.answer is not smt.Answer.SAT:
        return None
    return question.minimize(found.values, _variables(_LONGEST), *pins)


def _around_boundaries(request: Request) -> Iterator[Request]:
    """Requests that end at, one below and one above the next block and hash boundaries."""
    if request.origin.loads_asynchronously and len(request.chunks) == 1:
        return  # nothing is computed, so it ends where the load does
    *_, last = request.situations()
    geometry, end = request.geometry, request.chunks[-1]
    for unit in (geometry.block_size, geometry.hash_block_size):
        boundary = -(-end // unit) * unit
        for near in (boundary - 1, boundary, boundary + 1):
            if near > last.call.total_computed_tokens:
                length = near if request.is_sparse else request.prefill_length
                yield replace(request, chunks=(*request.chunks[:-1], near), prefill_length=length)


def _around_prefill_end(request: Request) -> Iterator[Request]:
    """Under sparse retention: the chunk ends the prefill, or stops one token short of it."""
    *_, last = request.situations()
    if reserves_checkpoint(last) and family_of(last) != "drafts":
        for missing in (0, 1):
            length = request.chunks[-1] + missing
            yield replace(request, is_sparse=True, prefill_length=length)


def _request(exploration: Exploration, values: Mapping[str, Any]) -> Request:
    return request_of(in_numbers(exploration.situation, Evaluator(values)))


def _variables(names: Iterable[str]) -> list[term.IntLike]:
    declared = {atom.args[0]: atom for atom in term.ATOMS if atom.kind == "var"}
    found: list[term.IntLike] = []
    for name in names:
        if name in declared:
            found.append(term.int_var(name, declared[name].low, declared[name].high))
        elif name.startswith(("hit_is_", "other_hits_")):
            found.append(term.int_of(term.bool_var(name)))
    return found
