"""Make scenarios: a witness per refutation, each feasible path, the edges of each, public cases.

Every scenario is one request admitted with its first chunk and taken on by the next ones; the last
chunk is the step under test. Expected numbers come from the intended model, predictions from the
lifted code.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.cases import Case
from conformance.scenario import MAX_SLUG_LENGTH, Expect, Prediction, Scenario, ScenarioStep
from models import intended, smt, term
from models.evaluate import Evaluator
from models.lift import Exploration, PathSummary
from models.predict import LiftedTree, after, obligation_of, violated
from models.prove import MANAGER, Counterexample, Obligation, Prover, in_numbers
from spec.families import checkpoint_column, checkpoint_position, reserves_checkpoint, tags_of
from spec.logic import negation
from spec.theorems import THEOREMS
from spec.vocabulary import Call, Geometry, Situation, Step

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
#: Blocks in a scenario's pool beyond what estimate and steps can take.
SPARE_BLOCKS = 8
#: What a canonical scenario makes least, the first one first.
_ORDER = (
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "prefill_end",
    "num_computed_tokens",
    "num_tokens_main_model",
    "num_tokens",
)
#: The same for a scenario that no size is given for.
_SIZES_FIRST = ("block_size", "hash_block_size", "prefill_checkpoint_alignment", *_ORDER)
#: The same for the longest prompt.
_LONGEST = (
    "num_prefill_checkpoint_blocks",
    "num_speculative_blocks",
    "tokens_left",
    "prefill_end",
    "num_computed_tokens",
)


@dataclass(frozen=True)
class Request:
    """A request in numbers: all that a scenario is made from."""

    geometry: Geometry
    chunks: tuple[int, ...]
    """Tokens that have a slot after each step; the last one is under test."""
    lookahead: int = 0
    """Tokens of lookahead in the last step."""
    prefill_length: int = 0
    """Tokens to prefill; 0 is the last of `chunks`."""
    is_sparse: bool = False

    def situations(self) -> Iterator[Situation]:
        """Yield what decides the family of each step."""
        length = self.prefill_length or self.chunks[-1]
        first = self.chunks[0]
        situation = Situation(
            geometry=self.geometry,
            call=Call(first, first, 0, 0, length if self.is_sparse else 0),
            table_length=0,
            prefill_length=length,
        )
        for i, end in enumerate(self.chunks):
            if i:
                situation = after(situation, num_tokens=end, prefill_length=length)
            is_last = i == len(self.chunks) - 1
            lookahead = self.lookahead if is_last else 0
            yield replace(situation, call=replace(situation.call, num_tokens=end + lookahead))

    @property
    def name(self) -> str:
        """A slug that tells the request."""
        g = self.geometry
        parts = [f"b{g.block_size}-h{g.hash_block_size}-s{g.num_speculative_blocks}"]
        parts.append(f"k{g.num_prefill_checkpoint_blocks}-a{g.prefill_checkpoint_alignment}")
        parts += ["eagle"] if g.drop_eagle_checkpoint_block else []
        parts.append("tokens-" + "-".join(map(str, self.chunks)))
        parts += [f"lookahead-{self.lookahead}"] if self.lookahead else []
        length = self.prefill_length or self.chunks[-1]
        kind = "sparse" if self.is_sparse else "of"
        parts += [f"{kind}-{length}"] if self.is_sparse or length != self.chunks[-1] else []
        return "-".join(parts)


def request_of(situation: Situation) -> Request:
    """Return the request that gets into a situation of numbers in the fewest steps.

    Under dense retention nothing asks where the prefill ends; the last chunk then ends it.
    """
    call = situation.call
    is_sparse = call.prefill_end > 0
    computed, end = call.total_computed_tokens, call.num_tokens_main_model
    return Request(
        situation.geometry,
        (computed, end) if computed else (end,),
        lookahead=call.num_tokens - end,
        prefill_length=situation.prefill_length if is_sparse else 0,
        is_sparse=is_sparse,
    )


def scenario_of(
    request: Request,
    *,
    trees: Mapping[str, LiftedTree],
    source: str,
    name: str | None = None,
    theorem: str | None = None,
) -> Scenario:
    """Return the scenario of a request, with what its last step is predicted to do."""
    situations = list(request.situations())
    last = situations[-1]
    predicted = {}
    for target, tree in trees.items():
        checkpoint_before = len(situations) > 1 and bool(reserves_checkpoint(situations[-2]))
        step = tree.predict(last, checkpoint_before=checkpoint_before)
        if step is not None:
            predicted[target] = _prediction(last, step)
    return Scenario(
        name=name or request.name,
        manager=MANAGER,
        geometry=request.geometry,
        num_gpu_blocks=_pool_size(situations, predicted.values()),
        steps=tuple(_steps(situations)),
        family=obligation_of(last)[0],
        tags=tags_of(last),
        theorem=theorem,
        source=source,
        predicted=predicted,
    )


def _prediction(situation: Situation, step: Step) -> Prediction:
    return Prediction(
        dry_run=step.dry_run,
        estimate=step.estimate,
        drawn=step.drawn,
        table_length=step.table_length,
        raised=step.raised,
        violates=violated(situation, step),
    )


def _steps(situations: Iterable[Situation]) -> Iterator[ScenarioStep]:
    to_retire = -1
    for situation in situations:
        to_retire = intended.column_to_retire(situation, to_retire)
        yield _step(situation, to_retire)


def _step(situation: Situation, column_to_retire: int) -> ScenarioStep:
    call = situation.call
    if not call.total_computed_tokens:
        why = "admission of the first chunk"
    elif reserves_checkpoint(situation):
        why = "a prefill chunk that keeps an internal checkpoint"
    else:
        why = "a prefill chunk"
    return ScenarioStep(
        why=why,
        call=call,
        prefill_length=situation.prefill_length,
        expect=Expect(
            need=intended.need(situation),
            table_length=intended.table_length(situation),
            checkpoint=(
                (checkpoint_position(situation), checkpoint_column(situation))
                if reserves_checkpoint(situation)
                else None
            ),
            column_to_retire=column_to_retire,
        ),
    )


def _pool_size(situations: Sequence[Situation], predictions: Iterable[Prediction]) -> int:
    """A pool large enough for anything: for the estimates, and for all that the steps draw."""
    most = max((p.estimate or 0 for p in predictions), default=0)
    per_step = 3 + situations[0].geometry.num_speculative_blocks
    return most + per_step * len(situations) + SPARE_BLOCKS


# ---- where requests come from --------------------------------------------------------------------


def refutation(
    target: str,
    obligation: Obligation,
    counterexample: Counterexample,
    trees: Mapping[str, LiftedTree],
) -> Scenario:
    """Return a counterexample as a scenario that names the theorem it refutes.

    Where the state that the counterexample starts from has more to it than two chunks bring about,
    such as a checkpoint left pending, the least one that they do bring about is taken instead.
    """
    where = "-".join((obligation.family, *obligation.tags))

    def scenario(situation: Situation) -> Scenario:
        return scenario_of(
            request_of(situation),
            trees=trees,
            source=f"least counterexample of {obligation.theorem} in {where} for {target}",
            name=_name(f"{obligation.theorem}-{where}", target),
            theorem=obligation.theorem,
        )

    found = scenario(counterexample.situation)
    if not _shows(found, target):
        reachable = _least_reachable(obligation, trees[target])
        if reachable is not None:
            return scenario(reachable)
    return found


def _shows(scenario: Scenario, target: str) -> bool:
    prediction = (scenario.predicted or {}).get(target)
    return prediction is not None and scenario.theorem in prediction.violates


def _least_reachable(obligation: Obligation, tree: LiftedTree) -> Situation | None:
    for eagle in (False, True):
        exploration = tree.exploration(obligation.family, obligation.tags, eagle=eagle)
        violation = Prover(exploration).violation(THEOREMS[obligation.theorem])
        question = smt.Question()
        question.add(*exploration.assumptions.values(), violation, _is_reached(exploration))
        found = question.ask()
        if found.answer is smt.Answer.SAT:
            values = question.minimize(found.values, _variables(_SIZES_FIRST))
            return in_numbers(exploration.situation, Evaluator(values))
    return None


def refutation_at_production_sizes(
    target: str, obligation: Obligation, trees: Mapping[str, LiftedTree]
) -> Scenario | None:
    """Return the longest prompt that breaks a refuted theorem at sizes that people run.

    None where the theorem is not refuted at these sizes.
    """
    theorem = THEOREMS[obligation.theorem]
    for eagle in (False, True):
        exploration = trees[target].exploration(obligation.family, obligation.tags, eagle=eagle)
        question = smt.Question()
        question.add(*exploration.assumptions.values(), Prover(exploration).violation(theorem))
        question.add(*_of_sizes(exploration, PRODUCTION_SIZES), *_within_limit())
        question.add(_is_reached(exploration))
        found = question.ask()
        if found.answer is smt.Answer.SAT:
            values = question.minimize(found.values, _variables(_LONGEST))
            where = "-".join((obligation.family, *obligation.tags))
            return scenario_of(
                _request(exploration, values),
                trees=trees,
                source=f"longest prompt that breaks {obligation.theorem} in {where} for {target} "
                "at production sizes",
                name=_name(f"{obligation.theorem}-{where}-at-production-sizes", target),
                theorem=obligation.theorem,
            )
    return None


def request_in(scenario: Scenario) -> Request:
    """Return the request that a scenario of ours was made from."""
    steps = scenario.steps
    last = steps[-1].call
    is_sparse = last.prefill_end > 0
    return Request(
        scenario.geometry,
        tuple(step.call.num_tokens_main_model for step in steps),
        lookahead=last.num_tokens - last.num_tokens_main_model,
        prefill_length=steps[-1].prefill_length if is_sparse else 0,
        is_sparse=is_sparse,
    )


def with_predictions(scenario: Scenario, trees: Mapping[str, LiftedTree]) -> Scenario:
    """Return a scenario of ours with what each of ``trees`` is predicted to do."""
    return scenario_of(
        request_in(scenario),
        trees=trees,
        source=scenario.source,
        name=scenario.name,
        theorem=scenario.theorem,
    )


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
    trees: Mapping[str, LiftedTree], on_progress: Callable[[str], None] = lambda text: None
) -> dict[Request, str]:
    """Return a request for each feasible path of each target and for its edges, with sources."""
    found: dict[Request, str] = {}
    for target, tree in trees.items():
        for family, tags, eagle, exploration in tree.explorations():
            on_progress(f"{target} {family} {' '.join(tags)}".strip())
            for number, path in enumerate(exploration.paths, start=1):
                where = f"path {number} of {'-'.join((family, *tags))} in {target}"
                drop = " with EAGLE drop" if eagle else ""
                for request, edge in _of_path(exploration, path, with_edges=not eagle):
                    found.setdefault(request, f"{edge} of {where}{drop}")
    return found


def _of_path(
    exploration: Exploration, path: PathSummary, *, with_edges: bool
) -> Iterator[tuple[Request, str]]:
    on_path = (*exploration.assumptions.values(), path.condition, _is_reached(exploration))
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
    greatest = _greatest(question, values, request)
    if greatest is not None:
        yield _request(exploration, greatest), "greatest tokens"
    for edge in _around_boundaries(request):
        yield edge, "block or hash boundary near the least tokens"
    for edge in _around_prefill_end(request):
        yield edge, "end of the prefill near the least tokens"


def _is_reached(exploration: Exploration) -> Any:
    """A first chunk up to the computed tokens leaves the state, pending checkpoint included."""
    situation = exploration.situation
    computed = situation.call.total_computed_tokens
    if isinstance(computed, int):
        return True
    call = replace(
        situation.call,
        num_tokens=computed,
        num_tokens_main_model=computed,
        total_computed_tokens=0,
        num_local_computed_tokens=0,
    )
    kept = reserves_checkpoint(replace(situation, call=call, table_length=0))
    pending = term.bool_var("has_checkpoint_before")
    return (pending & kept) | (negation(pending) & negation(kept))


def _of_sizes(exploration: Exploration, sizes: Mapping[str, int]) -> Iterator[Any]:
    geometry = exploration.situation.geometry
    for name, size in sizes.items():
        yield getattr(geometry, name) == size


def _within_limit() -> Iterator[Any]:
    """The prompt has `MAX_TOKENS` but for `tokens_left`, and there is no lookahead."""
    end = term.int_var(*_declared("num_tokens_main_model"))
    yield end + term.int_var("tokens_left", 0) == MAX_TOKENS
    yield term.int_var(*_declared("num_tokens")) == end


def _greatest(
    question: smt.Question, values: Mapping[str, Any], request: Request
) -> Mapping[str, Any] | None:
    """The model with the most tokens within `MAX_TOKENS` that starts as the request does."""
    pins = list(_within_limit())
    if len(request.chunks) > 1:
        computed = term.int_var(*_declared("num_computed_tokens"))
        pins.append(computed == request.chunks[0])
    found = question.ask(*pins)
    if found.answer is not smt.Answer.SAT:
        return None
    return question.minimize(found.values, _variables(_LONGEST), *pins)


def _around_boundaries(request: Request) -> Iterator[Request]:
    """Requests that end at, one below and one above the next block and hash boundaries."""
    geometry, end = request.geometry, request.chunks[-1]
    start = request.chunks[-2] if len(request.chunks) > 1 else 0
    for unit in (geometry.block_size, geometry.hash_block_size):
        boundary = -(-end // unit) * unit
        for near in (boundary - 1, boundary, boundary + 1):
            if near > start:
                length = near if request.is_sparse else 0
                yield replace(request, chunks=(*request.chunks[:-1], near), prefill_length=length)


def _around_prefill_end(request: Request) -> Iterator[Request]:
    """Under sparse retention: the chunk ends the prefill, or stops one token short of it."""
    *_, last = request.situations()
    if reserves_checkpoint(last):
        for missing in (0, 1):
            length = request.chunks[-1] + missing
            yield replace(request, is_sparse=True, prefill_length=length)


def _request(exploration: Exploration, values: Mapping[str, Any]) -> Request:
    return request_of(in_numbers(exploration.situation, Evaluator(values)))


def _variables(names: Iterable[str]) -> list[term.IntLike]:
    return [term.int_var(*_declared(name)) for name in names if _is_declared(name)]


def _is_declared(name: str) -> bool:
    return any(atom.kind == "var" and atom.args[0] == name for atom in term.ATOMS)


def _declared(name: str) -> tuple[str, int | None, int | None]:
    atom = next(atom for atom in term.ATOMS if atom.kind == "var" and atom.args[0] == name)
    return name, atom.low, atom.high


def cases(known: Iterable[Case]) -> dict[Request, str]:
    """Return the requests of public reports, with their sources."""
    return {Request(case.geometry, case.chunks): case.source for case in known}


def collect(
    requests: Mapping[Request, str], trees: Mapping[str, LiftedTree]
) -> dict[str, list[Scenario]]:
    """Return scenarios by family, sorted by size, without steps that no target can be asked."""
    scenarios = (
        scenario_of(request, trees=trees, source=source) for request, source in requests.items()
    )
    kept = sorted((s for s in scenarios if s.predicted), key=_size)
    return {family: list(group) for family, group in itertools.groupby(kept, lambda s: s.family)}


def _size(scenario: Scenario) -> tuple[Any, ...]:
    geometry, steps = scenario.geometry, scenario.steps
    sizes = tuple(int(value) for value in vars(geometry).values())
    return scenario.family, sizes, tuple(step.call.num_tokens for step in steps), scenario.name
