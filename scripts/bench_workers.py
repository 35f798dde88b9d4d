"""What `scripts/bench.py` measures inside a process of its own; each answers with one JSON line.

    python scripts/bench_workers.py stages ROOT               where a lifted proof spends its time
    python scripts/bench_workers.py beside ROOT RELEASE SEED  lifted proof, then the hand encoding
    python scripts/bench_workers.py replay ROOT TIER          steps per second on the real manager
    python scripts/bench_workers.py lives ROOT TIER           random lives on a real KVCacheManager
    python scripts/bench_workers.py explored ROOT             every life, by its number of rules
    python scripts/bench_workers.py scheduler ROOT TOKENS     steps of a long prompt, in such chunks
    python scripts/bench_workers.py growth ROOT               a proof by S, K and number of groups
    python scripts/bench_workers.py ideas                     what can be switched off
    python scripts/bench_workers.py without IDEA ROOT SEED    a proof with one idea switched off

Ideas are switched off from outside, by replacing the functions that carry them: `models/` knows
nothing of it, and a function that is no longer there stops the measurement.
"""

from __future__ import annotations

import builtins
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hand_encoding
import z3

import models.predict
from conformance.bindings import import_vllm
from conformance.driver import core_driver, vllm_driver
from conformance.engine import Run
from conformance.engine_bindings import EngineBindings
from conformance.explore import Bounds, explore, random_life, small_setting, tight
from conformance.replay import replay
from conformance.scenario import Scenario, ScenarioStep
from conformance.workload import Arrival, End, Engine, Workload
from models import lift, path, rewrite, runtime, smt, term
from models.lift import Exploration, Variant, variants_of
from models.predict import LiftedTree
from models.prove import Prover, Refutations, Verdict, explorations_for, prove
from models.traits import traits_of
from spec.assumptions import SPECULATIVE_BLOCKS
from spec.theorems import OBLIGATIONS, THEOREMS, Asks
from spec.vocabulary import Call, Geometry

#: Seconds of replay that one figure rests on, the same for both tiers.
REPLAY_SECONDS = 2.0
#: Rules of a random life, and the most of those that are all lived.
RULES_PER_LIFE, MOST_RULES = 18, 7
#: Tokens of the prompt of vLLM #57050.
LONG_PROMPT = 704_547


class Stopwatch:
    """Processor seconds spent inside functions, by name, measured at the outermost call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: set[str] = set()

    def watch(self, name: str, owner: Any, function: str) -> None:
        """Measure `owner.function` from now on."""
        original = getattr(owner, function)
        self.seconds[name] = 0.0

        def measured(*args: Any, **kwargs: Any) -> Any:
            if name in self._inside:
                return original(*args, **kwargs)
            self._inside.add(name)
            started = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[name] += time.process_time() - started
                self._inside.remove(name)

        setattr(owner, function, measured)


# ---- where time goes, and the hand encoding beside it --------------------------------------------


def stages(root: Path) -> dict[str, Any]:
    """Prove everything once; return seconds by stage."""
    watch = Stopwatch()
    watch.watch("loading the tree", models.predict, "lifted_core")
    watch.watch("running its code on terms", lift, "run_along")
    watch.watch("translating terms for the solver", smt._Encoder, "formula")
    watch.watch("solving", z3.Solver, "check")
    watch.watch("reading models back", smt._Encoder, "values")
    started = time.process_time()
    for _ in prove(LiftedTree(root)):
        pass
    total = time.process_time() - started
    rest = {"everything else": total - sum(watch.seconds.values())}
    return {"total": total, "stages": watch.seconds | rest}


def beside(root: Path, release: str, seed: int) -> dict[str, Any]:
    """Settle the theorems that both know, first lifted, then by hand; return seconds of each."""
    z3.set_param("smt.random_seed", seed)
    watch = Stopwatch()
    watch.watch("solver", z3.Solver, "check")
    slugs = hand_encoding.theorems()
    lifted, by_hand = {}, {}

    def timed(settle: Callable[[], None]) -> dict[str, float]:
        watch.seconds["solver"], started = 0.0, time.process_time()
        settle()
        return {"seconds": time.process_time() - started, "solver": watch.seconds["solver"]}

    def lifted_proof() -> None:
        tree, some = LiftedTree(root), THEOREMS[slugs[0]]
        for kind in hand_encoding.KINDS:
            provers = [Prover(e) for e in explorations_for(tree, "mamba-align", *kind, some)]
            for slug in slugs:
                verdict = _worst(prover.settle(THEOREMS[slug]).verdict for prover in provers)
                lifted[(*kind, slug)] = verdict.value

    lifted_time = timed(lifted_proof)
    hand_time = timed(lambda: by_hand.update(hand_encoding.verdicts(release)))
    assert lifted == by_hand, "the hand encoding and the lifted proof disagree"
    return {"lifted": lifted_time, "hand": hand_time}


# ---- replay --------------------------------------------------------------------------------------


#: Kinds of step that growth is measured on: many paths, and hits, without a checkpoint and with.
GROWING = (("running", ()), ("external-sync", ()), ("checkpoint", ()))


def growth(root: Path) -> list[dict[str, Any]]:
    """Settle the theorems of a step for more and more: paths and seconds of each."""
    rows = []
    core = lift.lifted_core(root)
    for family, tags in GROWING:
        for what, explored in (
            *((f"S {s}", partial(_explored, core, family, tags, Variant(), s)) for s in (0, 4, 8)),
            ("S 0 to 8", partial(_explored, core, family, tags, Variant(), None)),
            *(
                (f"K {k}", partial(lift.explore, core, family, tags, checkpoint_blocks=k))
                for k in ((0, 1) if family != "checkpoint" else (1,))
            ),
        ):
            rows.append({"family": family, "what": what, **_settled(explored, "mamba-align")})
        lifted = LiftedTree(root)
        lifted.exploration(family, tags, Variant())  # what several groups are made from
        for number in range(1, 5):
            explored = partial(lifted.exploration, family, tags, Variant(), num_mamba_groups=number)
            what = f"{1 + number} groups"
            rows.append({"family": family, "what": what, **_settled(explored, "coordinator")})
    return rows


def _settled(explored: Callable[[], Exploration], manager: str) -> dict[str, Any]:
    """Explore, and settle the theorems of a step of a manager that need no other exploration."""
    started = time.process_time()
    exploration = explored()
    prover, exploring = Prover(exploration), time.process_time() - started
    for theorem in THEOREMS.values():
        if manager in theorem.managers and theorem.asks is Asks.STEP:
            prover.settle(theorem)
    total = time.process_time() - started
    return {"paths": len(exploration.paths), "exploring": exploring, "total": total}


def replay_rate(root: Path, tier: str) -> dict[str, float]:
    """Replay for a while; return steps per second, and seconds to load the real code."""
    started = time.perf_counter()
    driver = vllm_driver(root) if tier == "vllm" else core_driver(root)
    loading = time.perf_counter() - started
    scenarios, num_steps = scenarios_to_replay(), 0
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < REPLAY_SECONDS:
        for scenario in scenarios:
            num_steps += len(replay(scenario, driver, "benchmark").steps)
    return {"steps_per_second": num_steps / spent, "loading": loading}


def scenarios_to_replay() -> list[Scenario]:
    """An admission and a prefill chunk each, of sizes as in a test: seeded, so always the same."""
    rng = random.Random(0)
    return [_two_steps(rng, f"random-{i}") for i in range(200)]


def _two_steps(rng: random.Random, name: str) -> Scenario:
    hash_block_size = rng.randint(1, 8)
    geometry = Geometry(
        block_size=hash_block_size * rng.randint(1, 4),
        hash_block_size=hash_block_size,
        num_speculative_blocks=rng.randint(0, 4),
        num_prefill_checkpoint_blocks=rng.randint(0, 1),
        prefill_checkpoint_alignment=hash_block_size,
        drop_eagle_checkpoint_block=False,
    )
    first, chunk = rng.randint(1, 40), rng.randint(1, 40)
    whole = first + chunk
    steps = (
        ScenarioStep("admitted", Call(first, first, 0, 0), whole),
        ScenarioStep("a further chunk", Call(whole, whole, first, first), whole),
    )
    return Scenario(name, "mamba-align", geometry, 64, steps, "running")


# ---- lives, and the scheduler ------------------------------------------------------------------


def lives_rate(root: Path, tier: str) -> dict[str, float]:
    """Live at random for a while; return lives and rules per second, all checks included."""
    driver = vllm_driver(root) if tier == "vllm" else core_driver(root)
    setting = tight(driver, small_setting(0, 3, True))
    bounds, chance, num_lives, num_rules = Bounds(RULES_PER_LIFE), random.Random(0), 0, 0
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < REPLAY_SECONDS:
        num_rules += len(random_life(driver, setting, bounds, chance).rules)
        num_lives += 1
    return {"lives_per_second": num_lives / spent, "rules_per_second": num_rules / spent}


def explored(root: Path) -> list[dict[str, Any]]:
    """Live every life of two requests, of more and more rules: states, lives and seconds."""
    driver, rows = core_driver(root), []
    setting = tight(driver, small_setting(0, 2, True))
    for num_rules in range(3, MOST_RULES + 1):
        started = time.perf_counter()
        found = explore(driver, setting, Bounds(num_rules), f"vllm=={root.name}")
        seconds = time.perf_counter() - started
        counts = {"states": found.num_states, "lives": found.num_lives}
        rows.append({"rules": num_rules, **counts, "seconds": seconds})
    return rows


def scheduler_rate(root: Path, chunk: int) -> dict[str, float]:
    """Run #57050's prompt alone through the release's own scheduler; return steps per second."""
    bindings = EngineBindings(import_vllm(root))
    engine = Engine(
        block_size=896,
        hash_block_size=128,
        num_gpu_blocks=900,
        max_model_len=705_000,
        max_num_batched_tokens=chunk,
    )
    workload = Workload("long", engine, (Arrival("long", LONG_PROMPT, 2),))
    parts = bindings.new_scheduler(engine)
    started = time.perf_counter()
    outcome = Run(workload, parts).outcome()
    seconds = time.perf_counter() - started
    assert outcome.end is End.FINISHED, outcome
    return {"steps": outcome.steps, "steps_per_second": outcome.steps / seconds}


# ---- ideas, switched off -------------------------------------------------------------------------


@dataclass(frozen=True)
class Idea:
    """Something that makes proofs fast, and how to do without it.

    Attributes:
        slug: Name on the command line.
        sentence: What the prover does, in English.
        instead: What is done here instead.
        switch_off: Replaces the functions that carry the idea.
        explores_eagle: Whether the EAGLE flag's values are explored one by one.
        speculative: Values of S, one exploration each; None is symbolic.
    """

    slug: str
    sentence: str
    instead: str
    switch_off: Callable[[], None]
    explores_eagle: bool = True
    speculative: tuple[int | None, ...] = (None,)


def ideas() -> list[dict[str, str]]:
    """Return what can be switched off."""
    return [
        {"slug": idea.slug, "sentence": idea.sentence, "instead": idea.instead}
        for idea in IDEAS.values()
    ]


def without(slug: str, root: Path, seed: int) -> dict[str, Any]:
    """Settle the theorems of steps without one idea; return seconds, paths, and what stayed open.

    Theorems about gates and removals are left out: they are explored apart, and alike.
    """
    idea = IDEAS[slug]
    z3.set_param("smt.random_seed", seed)
    watch = Stopwatch()
    watch.watch("solver", z3.Solver, "check")
    started = time.process_time()
    idea.switch_off()
    core = lift.lifted_core(root)
    traits = traits_of(core)
    num_paths, unsettled = 0, []
    for family, tags in OBLIGATIONS:
        variants = [v for v in variants_of(traits, family) if idea.explores_eagle or not v.eagle]
        try:
            explorations = [
                _explored(core, family, tags, variant, speculative)
                for variant in variants
                for speculative in idea.speculative
            ]
        except lift.NotUnderstood as error:
            unsettled.append(str(error))
            continue
        num_paths += sum(len(exploration.paths) for exploration in explorations)
        refutations = Refutations()
        provers = [Prover(exploration, refutations) for exploration in explorations]
        for theorem in THEOREMS.values():
            is_of_one = "mamba-align" in theorem.managers and theorem.asks is Asks.STEP
            if not is_of_one or theorem.why_not(family):
                continue
            verdict = _worst(prover.settle(theorem).verdict for prover in provers)
            if verdict not in (Verdict.PROVED, Verdict.REFUTED):
                unsettled.append(f"{family}: {theorem.slug} {verdict.value}")
    return {
        "seconds": time.process_time() - started,
        "solver": watch.seconds["solver"],
        "paths": num_paths,
        "unsettled": unsettled,
    }


def _worst(verdicts: Iterator[Verdict]) -> Verdict:
    """The worst verdict; a setting in which the case does not occur says nothing."""
    found = set(verdicts)
    order = (Verdict.REFUTED, Verdict.UNKNOWN, Verdict.PROVED, Verdict.VACUOUS)
    return next(verdict for verdict in order if verdict in found)


def _explored(
    core: Any, family: str, tags: tuple[str, ...], variant: Variant, speculative: int | None
) -> Exploration:
    geometry = lift._geometry
    if speculative is not None:
        lift._geometry = lambda *args: replace(geometry(*args), num_speculative_blocks=speculative)
    try:
        return lift.explore(core, family, tags, variant)
    finally:
        lift._geometry = geometry


def _nothing() -> None:
    """Leave everything on."""


def _without_one_form() -> None:
    """Floor division that keeps its numerator as it comes."""

    def floor_div(a: term.IntLike, b: term.IntLike) -> term.IntLike:
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        low, high = term.bounds(b)
        if high is not None and high < 0:
            return floor_div(-a, -b)
        if low is None or low <= 0:
            if b == 0:
                raise ZeroDivisionError
            if b < 0:
                return floor_div(-a, -b)
        low, high = term.bounds(a)
        low = None if low is None else min(low, 0)
        high = None if high is None else max(high, -1)
        return term._intern_atom("div", (a, b), low, high)

    _replace(term, "floor_div", floor_div)


def _without_order() -> None:
    _replace(smt._Encoder, "_say_order", lambda self, uid: None)


def _without_refutations() -> None:
    _replace(Refutations, "core_of", lambda self, formula, facts: None)


def _without_merging() -> None:
    """Connectives, conditional expressions, min and max decide as Python does."""

    def connective(operands: Any, *, settles: bool, join: Any) -> Any:
        value = None
        for operand in operands:
            value = operand()
            if bool(value) is settles:
                return value
        return value

    _replace(runtime, "_connective", connective)
    taking_sides = {
        rewrite.CHOOSE: lambda test, then, otherwise: then() if test else otherwise(),
        "min": builtins.min,
        "max": builtins.max,
    }
    for name, function in taking_sides.items():
        assert name in runtime.BUILTINS, name
        runtime.BUILTINS[name] = function


def _without_samples() -> None:
    """Ask about both sides of every decision, and run the code once per combination that exists."""

    def explore(
        core: Any, family: str, tags: tuple[str, ...], variant: Variant, **asks: Any
    ) -> Exploration:
        traits = traits_of(core)
        situation = lift.symbolic_situation(family, tags, traits=traits, variant=variant)
        extra = traits.assumptions()
        assumptions = lift._assumptions(situation, family, tags, extra)
        question = smt.Question(assumptions)
        summaries, samples = [], []
        waiting: list[tuple[bool, ...]] = [()]
        while waiting:
            trail = waiting.pop()
            asking = _AskingPath(question, waiting, trail, tuple(assumptions.values()))
            lift.Path = lambda *_, asking=asking: asking
            make = partial(lift.StepRun, core, traits, situation)
            run = lift.StepRun.step
            summaries.append(lift.run_along(core, make, run, tuple(assumptions.values()), {}))
            if asking.sample is not None:
                samples.append(asking.sample)
        return Exploration(situation, assumptions, tuple(summaries), tuple(samples), ())

    _replace(lift, "explore", explore)


class _AskingPath(path.Path):
    """Decides by asking the solver which sides exist; the side not taken waits for its own run."""

    def __init__(
        self,
        question: smt.Question,
        waiting: list[tuple[bool, ...]],
        trail: tuple[bool, ...],
        assumptions: tuple[Any, ...],
    ) -> None:
        super().__init__({}, assumptions)
        self.sample: Mapping[str, Any] | None = None
        self._question, self._waiting, self._trail = question, waiting, trail
        self._taken: tuple[bool, ...] = ()

    def decide(self, formula: term.Bool) -> bool:
        if self.speculating:
            return super().decide(formula)
        if len(self._taken) < len(self._trail):
            side = self._trail[len(self._taken)]
        else:
            side = self._asked(formula)
        self._taken += (side,)
        literal = formula if side else term.negation(formula)
        self.literals.append(literal)
        self._learn(literal)
        return side

    def _asked(self, formula: term.Bool) -> bool:
        yes = self._question.ask(*self.literals, formula)
        no = self._question.ask(*self.literals, term.negation(formula))
        exists = [result.answer is not smt.Answer.UNSAT for result in (yes, no)]
        if all(exists):
            self._waiting.append((*self._taken, False))
        self.sample = (yes if exists[0] else no).values or None
        return exists[0]


def _with_length_as_variable() -> None:
    with_table = lift._with_table

    def make(*args: Any) -> Any:
        return replace(with_table(*args), table_length=term.int_var("table_length", 1))

    _replace(lift, "_with_table", make)


def _with_symbolic_eagle() -> None:
    geometry = lift._geometry

    def make(*args: Any) -> Geometry:
        flag = term.bool_var("drop_eagle_checkpoint_block")
        return replace(geometry(*args), drop_eagle_checkpoint_block=flag)

    _replace(lift, "_geometry", make)


def _without_facts() -> None:
    """A path remembers no bounds: only a formula met before is decided for free."""
    _replace(path.Path, "_bound", lambda self, at_most_zero: None)


def _naive() -> None:
    """A naive path-by-path sketch."""
    for switch_off in (
        _without_one_form,
        _without_order,
        _without_refutations,
        _without_merging,
        _without_samples,
        _without_facts,
        _with_length_as_variable,
    ):
        switch_off()


def _without_either_on_quotients() -> None:
    _without_one_form()
    _without_order()


def _replace(owner: Any, name: str, function: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, function)


IDEAS = {
    idea.slug: idea
    for idea in (
        Idea("nothing", "everything on", "-", _nothing),
        Idea(
            "one-form",
            "one canonical form for floor and ceiling quotients",
            "each quotient as the code writes it",
            _without_one_form,
        ),
        Idea(
            "order",
            "lemmas: quotients by one divisor keep the order of their numerators",
            "each quotient defined by its bounds alone",
            _without_order,
        ),
        Idea(
            "quotients",
            "both of the above",
            "quotients as the code writes them, defined by their bounds alone",
            _without_either_on_quotients,
        ),
        Idea(
            "refutations",
            "what a path was refuted by is not asked again where the same holds",
            "every path of every setting asked about",
            _without_refutations,
        ),
        Idea(
            "merging",
            "`and`, `or`, conditional expressions, `min` and `max` become one term",
            "a path for each side",
            _without_merging,
        ),
        Idea(
            "samples",
            "paths found by sample, one question at the end whether one is missing",
            "the solver asked about both sides of every decision",
            _without_samples,
        ),
        Idea(
            "facts",
            "linear facts of a path decide later comparisons",
            "only a formula met before is decided for free",
            _without_facts,
        ),
        Idea(
            "symbolic-s",
            "S symbolic",
            "S 0 to 8 one by one",
            _nothing,
            speculative=SPECULATIVE_BLOCKS,
        ),
        Idea(
            "length-term",
            "table length as a term of the computed tokens",
            "a variable, with the equation as an assumption",
            _with_length_as_variable,
        ),
        Idea(
            "eagle",
            "EAGLE flag on and off, one by one",
            "symbolic",
            _with_symbolic_eagle,
            explores_eagle=False,
        ),
        Idea(
            "all",
            "all of the above",
            "a naive path-by-path sketch, and that for S 1 alone",
            _naive,
            speculative=(1,),
        ),
    )
}


def main() -> None:
    kind, *arguments = sys.argv[1:]
    answer = {
        "stages": lambda root: stages(Path(root)),
        "beside": lambda root, release, seed: beside(Path(root), release, int(seed)),
        "replay": lambda root, tier: replay_rate(Path(root), tier),
        "lives": lambda root, tier: lives_rate(Path(root), tier),
        "explored": lambda root: explored(Path(root)),
        "scheduler": lambda root, chunk: scheduler_rate(Path(root), int(chunk)),
        "growth": lambda root: growth(Path(root)),
        "ideas": ideas,
        "without": lambda idea, root, seed: without(idea, Path(root), int(seed)),
    }[kind](*arguments)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
