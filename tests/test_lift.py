from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import RELEASES
from native import TIDY, compared, differences, lifted_step

from conformance.driver import Driver, DriverError, RequestUnderTest, core_driver
from models import lift, predict, term
from models.evaluate import Evaluator
from models.lift import (
    Exploration,
    NotUnderstood,
    Variant,
    explore,
    lifted_core,
    summary_of,
    variants_of,
)
from models.loader import CORE_MODULES, Core, CoreError
from models.predict import LiftedTree
from models.prove import Prover, Verdict, in_numbers, prove
from models.traits import Traits, traits_of
from spec.theorems import ADMISSIONS, OBLIGATIONS, THEOREMS, Asks
from spec.vocabulary import Call, Geometry, Situation

MANAGERS_FILE = "vllm/v1/core/single_type_kv_cache_manager.py"
#: More than any of these steps takes.
POOL_BLOCKS = 120

Values = Mapping[str, Any]
Kind = tuple[str, tuple[str, ...]]
Drivers = Mapping[str, Driver]


def slug_of(kind: Kind) -> str:
    return "-".join((kind[0], *kind[1]))


def named(part: Any) -> str:
    return part if isinstance(part, str) else slug_of(part)


def has_kind(release: str, kind: Kind) -> bool:
    """Whether a release has steps of this kind: partial hits since 0.26.0, checkpoints 0.29.0."""
    words, minor = {kind[0], *kind[1]}, int(release.split(".")[1])
    starts_inside = bool(words & {"hit-partial", "own-tail"})
    keeps_checkpoint = "checkpoint" in words
    if starts_inside and keeps_checkpoint:
        return minor >= 30
    return (not starts_inside or minor >= 26) and (not keeps_checkpoint or minor >= 29)


#: The release whose accounting is its own, and the newest; `make selfcheck` takes all.
SAMPLE = ("0.29.0", "0.33.0")
ALL = bool(os.environ.get("CAPPROOF_ALL_RELEASES"))
CHECKED = RELEASES if ALL else SAMPLE
KINDS_OF_RELEASES = [
    (release, kind) for release in CHECKED for kind in OBLIGATIONS if has_kind(release, kind)
]


def copy_of(root: Path, to: Path, edit: Callable[[str], str]) -> Path:
    """Copy a tree's core, with the file of the managers edited."""
    for module in CORE_MODULES:
        relative = module.replace(".", "/") + ".py"
        if (root / relative).is_file():
            (to / relative).parent.mkdir(parents=True, exist_ok=True)
            text = (root / relative).read_text()
            (to / relative).write_text(edit(text) if relative == MANAGERS_FILE else text)
    return to


@pytest.fixture(scope="module")
def drivers(release_trees: Mapping[str, Path]) -> Drivers:
    return {release: core_driver(release_trees[release]) for release in RELEASES}


# ---- the same step, lifted and native ------------------------------------------------------------


def within_bounds(name: str, value: int) -> int:
    """A value that the variable may have."""
    atom = next(a for a in term.ATOMS if a.kind == "var" and a.args[0] == name)
    least = value if atom.low is None else max(value, atom.low)
    return least if atom.high is None else min(least, atom.high)


def any_values(chance: random.Random, exploration: Exploration) -> Values:
    """Values near a path's sample, with a table that need not be one the manager makes."""
    values = dict(chance.choice(exploration.samples))
    for name in chance.sample(sorted(values), k=chance.randrange(5)):
        if isinstance(values[name], bool):
            values[name] = chance.random() < 0.5
        elif isinstance(values[name], int):
            by = chance.choice((-4, -2, -1, 1, 2, 7))
            values[name] = within_bounds(name, values[name] + by)
    nulls, fixed = chance.choice((0.0, 0.1, 0.5)), chance.choice((0.0, 0.1))
    columns = range(60)
    return {
        **values,
        TIDY: chance.random() < 0.4,
        "has_column_to_retire_before": chance.random() < 0.5,
        "column_to_retire_before": chance.randrange(4),
        **{name: chance.randrange(8) for name in ("first_column", "second_column", "some_column")},
        "block_table": {i: 0 if chance.random() < nulls else i + 10 for i in columns},
        "block_is_movable": {i: int(chance.random() >= fixed) for i in columns},
    }


def check_paths(driver: Driver, exploration: Exploration) -> None:
    """Natively, the step of each path's own sample takes that path and does what it says."""
    for number, sample in enumerate(exploration.samples):
        assert differences(driver, exploration, sample) == (number, []), sample


def check_near(driver: Driver, exploration: Exploration, seed: str, *, of: int) -> int:
    """The same for random samples near them; return how many keep the assumptions."""
    chance, kept = random.Random(seed), 0
    for values in (any_values(chance, exploration) for _ in range(of)):
        found = differences(driver, exploration, values)
        if found is not None:
            assert found[1] == [], values
            kept += 1
    return kept


def variants_tried(release: str, traits: Traits, kind: Kind) -> Sequence[Variant]:
    """All settings in `make selfcheck`, but for neighbours of releases that have them; else one."""
    found = variants_of(traits, kind[0])
    turn = OBLIGATIONS.index(kind) % len(found)
    return found if ALL and release not in ("0.30.0", "0.32.0") else found[turn : turn + 1]


@pytest.mark.parametrize(("release", "kind"), KINDS_OF_RELEASES, ids=named)
def test_lifted_summaries_agree_with_the_real_function(
    lifted_trees: Mapping[str, LiftedTree], drivers: Drivers, release: str, kind: Kind
) -> None:
    """On each path, near each and in random lives, the summary says what vLLM does."""
    tree, driver = lifted_trees[release], drivers[release]
    for variant in variants_tried(release, tree.traits, kind):
        exploration = tree.exploration(*kind, variant)
        seed = f"{release} {kind} {variant}"

        check_paths(driver, exploration)
        kept = check_near(driver, exploration, seed, of=150)
        lived = check_lives(driver, tree.traits, exploration, kind, variant, seed)

        assert kept >= 10
        assert lived >= 1


@pytest.mark.parametrize("release", ["0.27.0", "0.33.0"])
@pytest.mark.parametrize("family", ADMISSIONS)
def test_the_gate_is_asked_as_the_real_one(
    lifted_trees: Mapping[str, LiftedTree], drivers: Drivers, release: str, family: str
) -> None:
    """What the full-sequence gate is told in a lifted step is what the release's own says."""
    tree = lifted_trees[release]
    exploration = tree.exploration(family, (), Variant(), asks=Asks.GATE)

    check_paths(drivers[release], exploration)
    assert check_near(drivers[release], exploration, f"{release} {family}", of=200) >= 10


def any_table(chance: random.Random, exploration: Exploration) -> Values:
    """Values near a path's sample, with blocks that may stand in several columns."""
    columns = range(60)
    return {
        **any_values(chance, exploration),
        "block_table": {i: chance.choice((0, 5, 6, i + 10)) for i in columns},
        "block_is_movable": {i: chance.choice((0, 1, 1, 1)) for i in columns},
    }


@pytest.mark.parametrize("kind", OBLIGATIONS, ids=slug_of)
def test_exactly_one_path_is_taken(lifted_trees: Mapping[str, LiftedTree], kind: Kind) -> None:
    """Whatever keeps the assumptions takes one path, not none and not two."""
    chance = random.Random(slug_of(kind))
    exploration = lifted_trees["0.31.0"].exploration(*kind, Variant())
    samples = [any_table(chance, exploration) for _ in range(600)]

    # `summary_of` fails unless exactly one condition holds.
    kept = sum(summary_of(exploration, sample) is not None for sample in samples)

    assert kept >= 20


def test_every_kind_of_step_of_a_release_has_a_path_that_draws(
    lifted_trees: Mapping[str, LiftedTree],
) -> None:
    """No theorem holds of a kind only because there is no such step, or none that takes a block."""
    tree = lifted_trees["0.33.0"]
    for kind in OBLIGATIONS:
        exploration = tree.exploration(*kind, Variant())
        draws = THEOREMS["no-undercount"].witness
        found = [
            sample
            for path, sample in zip(exploration.paths, exploration.samples, strict=True)
            if path.step.raised is None
            and Evaluator(sample).truth(draws(exploration.situation, path.step))
        ]
        assert exploration.paths
        assert found, kind


@pytest.mark.parametrize("kind", [("hit-partial", ()), ("checkpoint", ("overwide",))])
def test_paths_do_not_depend_on_which_samples_were_looked_at_first(
    kind: Kind, trees: Mapping[str, Path]
) -> None:
    """Seeds spare questions; whatever they are, the paths are the same in the same order."""
    core = lifted_core(trees["0.31.0"])
    alone = explore(core, *kind)
    of_eagle = explore(core, *kind, Variant(eagle=True))
    seeds = (*reversed(of_eagle.samples), {"block_size": 0}, {}, *alone.samples)

    seeded = explore(core, *kind, seeds=seeds)

    assert [path.condition for path in seeded.paths] == [path.condition for path in alone.paths]
    assert [path.taken for path in alone.paths] == sorted(path.taken for path in alone.paths)
    assert len(alone.paths) > 2
    for path, sample in zip(seeded.paths, seeded.samples, strict=True):
        evaluator = Evaluator(sample)
        assert evaluator.truth(path.condition)
        assert all(map(evaluator.truth, seeded.assumptions.values()))


# ---- random lives on the real manager ------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A request of the real manager, about to make a step."""

    request: RequestUnderTest
    situation: Situation
    adopted: Mapping[str, Any]


def values_of(ready: Ready) -> Values:
    """Values of all variables: the situation's, and the state that the request is in."""
    manager = ready.request.manager
    table = manager.req_to_blocks.get("request", ())
    pending = getattr(manager, "_checkpoints", {}).get("request")
    is_pending = pending is not None or getattr(manager, "_num_checkpoint_blocks", {}).get(
        "request", 0
    )
    position, column = pending or (1, 0)
    retired = manager.last_state_block_idx.get("request")
    return {
        **predict.values_of(ready.situation),
        "num_gpu_blocks": POOL_BLOCKS,
        "has_checkpoint_before": bool(is_pending),
        "checkpoint_before": position,
        "column_before": column,
        "has_column_to_retire_before": retired is not None,
        "column_to_retire_before": retired or 0,
        "was_parked": "request" not in manager._allocated_block_reqs,
        "block_table": {i: block.block_id for i, block in enumerate(table)},
        "column_of_block": {block.block_id: i for i, block in enumerate(table)},
        "block_is_movable": {
            i: int(block.ref_cnt == 1 and block.block_hash is None) for i, block in enumerate(table)
        },
    }


def a_geometry(chance: random.Random, traits: Traits, kind: Kind, variant: Variant) -> Geometry:
    hash_block_size = chance.choice((1, 1, 2, 3, 4))
    block_size = hash_block_size * chance.choice((1, 1, 2, 3, 5))
    keeps = "checkpoint" in (kind[0], *kind[1])
    starts_inside = "own-tail" in (kind[0], *kind[1]) or kind[0] == "hit-partial"
    if starts_inside:
        block_size = hash_block_size * chance.choice((2, 3, 5))
    blocks = int(traits.has_checkpoint_blocks and (keeps or chance.random() < 0.7))
    if traits.has_checkpoint_blocks and not traits.records_checkpoint_position:
        unit = hash_block_size if starts_inside else block_size
        blocks = 0 if starts_inside else blocks
        return Geometry(block_size, unit, chance.randrange(9), blocks, 1, False, None, 0)
    behind = 0 if variant.eagle and traits.eagle_drop_leaves_tokens else 1
    return Geometry(
        block_size=block_size,
        hash_block_size=hash_block_size,
        num_speculative_blocks=chance.randrange(9),
        num_prefill_checkpoint_blocks=blocks,
        prefill_checkpoint_alignment=chance.choice((1, 1, 1, 2, 3, hash_block_size)),
        drop_eagle_checkpoint_block=variant.eagle,
        cache_hit_alignment_tokens=(
            block_size * chance.choice((1, 1, 2)) if variant.whole_blocks else None
        ),
        num_tokens_behind_checkpoint=chance.randrange(2, 9) if variant.looks_ahead else behind,
    )


def a_call(chance: random.Random, g: Geometry, start: int, *, dense: bool) -> tuple[Call, int]:
    """A chunk from ``start``, with lengths that crowd around block and hash boundaries."""
    blocks = chance.choice((0, 1, 3, *[chance.randrange(g.num_speculative_blocks + 3)] * 3))
    near = chance.choice((-g.hash_block_size, -1, 0, 1, 2, g.hash_block_size, g.block_size))
    end = max(start + 1, (start // g.block_size + blocks) * g.block_size + near)
    prefill_length = max(1, chance.choice((end, end - 1, end + 1, start + 1, start, end + 50)))
    prefill_end = 0 if dense else chance.choice((0, 0, prefill_length))
    lookahead = chance.choice((0, 0, 1, g.num_speculative_blocks))
    return Call(end + lookahead, end, start, start, prefill_end), prefill_length


def computed_of(chance: random.Random, g: Geometry) -> int:
    """Tokens that end on a block or hash boundary, or not."""
    return chance.choice((1, 2, g.hash_block_size, g.block_size, chance.randrange(1, 60)))


def hit_of(chance: random.Random, g: Geometry, family: str) -> int:
    """Tokens of a local hit, which ends at a hash unit where one ends inside a block."""
    if family in ("first", "external-async") or (family == "resumed" and chance.random() < 0.5):
        return 0
    if family == "hit-partial":
        units = g.block_size // g.hash_block_size
        return g.hash_block_size * (units * chance.randrange(3) + chance.randrange(1, units))
    return g.block_size * chance.randrange(family == "hit-full", 4)


def an_admission(
    chance: random.Random, request: RequestUnderTest, family: str, traits: Traits
) -> Ready:
    """A request without a table: it may have been preempted, and finds hits."""
    g = request.geometry
    if family == "resumed":
        tokens = computed_of(chance, g)
        request.apply(Call(tokens, tokens, 0, 0), watch_dry_run=False)
        request.preempt()
    local = hit_of(chance, g, family)
    external = 0
    if family.startswith("external") or (family == "resumed" and chance.random() < 0.5):
        external = computed_of(chance, g)
    is_parked = family == "external-async"
    call, length = a_call(chance, g, local + external, dense=not traits.takes_prefill_end)
    if is_parked:
        call = replace(call, num_tokens=local + external, num_tokens_main_model=local + external)
    adopted = {
        "num_hit_blocks": -(-local // g.block_size),
        "hit_is_evictable": local > 0 and chance.random() < 0.5,
        "num_external_tokens": external,
        "loads_asynchronously": is_parked,
    }
    call = replace(call, num_local_computed_tokens=local)
    return Ready(request, request.situation(call, length, **adopted), adopted)


def with_a_table(
    chance: random.Random, request: RequestUnderTest, kind: Kind, traits: Traits
) -> Ready:
    """A request that computed some chunks, or was parked; tokens may have been taken back."""
    (family, tags), g, start = kind, request.geometry, 0
    if family == "promoted":
        start = computed_of(chance, g) + ("overwide" in tags) * g.block_size
        load = {"num_external_tokens": start, "loads_asynchronously": True}
        request.apply(Call(start, start, start, 0), watch_dry_run=False, **load)  # type: ignore[arg-type]
    for _ in range(0 if family == "promoted" else chance.choice((1, 1, 2))):
        call, _ = a_call(chance, g, start, dense=True)
        assert request.apply(call, watch_dry_run=False).raised is None
        start = call.num_tokens_main_model
    if "overwide" in tags:
        start = max(start - chance.choice((1, 2, g.block_size, g.block_size + 1)), 1)
    if "own-tail" in (family, *tags):
        request.cache_own_partial_tail(start)
    call, length = a_call(chance, g, start, dense=not traits.takes_prefill_end)
    if family == "drafts":
        length = chance.choice((start, max(start - 1, 1)))
        call = replace(call, prefill_end=length if call.prefill_end else 0)
    return Ready(request, request.situation(call, length), {})


def lives(
    driver: Driver,
    traits: Traits,
    kind: Kind,
    variant: Variant,
    seed: str,
    *,
    fails: bool = True,
) -> Iterator[Ready]:
    """Many situations of one kind, in states that the real manager got into."""
    chance = random.Random(seed)
    for _ in range(2_000):
        request = driver.request(a_geometry(chance, traits, kind, variant), POOL_BLOCKS)
        try:
            if kind[0] in ADMISSIONS:
                ready = an_admission(chance, request, kind[0], traits)
            else:
                ready = with_a_table(chance, request, kind, traits)
        except DriverError:
            continue
        if fails and chance.random() < 0.3:
            fail_a_check(chance, ready, traits)
        request._end_last_step()
        request.manager.remove_skipped_blocks("request", ready.situation.call.total_computed_tokens)
        yield ready
        if request.exception is None:
            request.finish()


def fail_a_check(chance: random.Random, ready: Ready, traits: Traits) -> None:
    """An estimate that no allocation follows, since the pool is short: it leaves its checkpoint."""
    request, start = ready.request, ready.situation.call.total_computed_tokens
    call, _ = a_call(chance, request.geometry, start, dense=True)
    fields = request._bindings.estimator_call_fields
    request._estimate({name: getattr(call, name) for name in fields}, (), is_dry_run=False)


def check_lives(
    driver: Driver,
    traits: Traits,
    exploration: Exploration,
    kind: Kind,
    variant: Variant,
    seed: str,
) -> int:
    """Compare summaries with the steps of random lives; return how many were of the kind."""
    kept = 0
    for ready in itertools.islice(lives(driver, traits, kind, variant, seed), 800):
        if predict.obligation_of(ready.situation) != kind:
            continue
        values = values_of(ready)
        lifted = lifted_step(exploration, values)
        if lifted is None:
            continue
        _, expected = lifted
        seen = ready.request.apply(ready.situation.call, **ready.adopted)
        for name in compared(ready.situation, values, expected, seen):
            assert getattr(seen, name) == getattr(expected, name), (name, ready.situation)
        kept += 1
        if kept == 60:
            break
    return kept


@pytest.mark.parametrize("kind", [("first", ("checkpoint",)), ("checkpoint", ()), ("drafts", ())])
def test_two_checkpoint_blocks_are_as_good_as_one(
    release_trees: Mapping[str, Path], kind: Kind
) -> None:
    """The code asks only whether there is a checkpoint block: K = 2 gives the steps of K = 1."""
    core = lifted_core(release_trees["0.31.0"])
    chance = random.Random(slug_of(kind))
    one, two = (explore(core, *kind, Variant(), checkpoint_blocks=blocks) for blocks in (1, 2))

    verdicts = [
        {
            slug: prover.settle(theorem).verdict
            for slug, theorem in THEOREMS.items()
            if not theorem.asks_gate and not theorem.asks_removal
        }
        for prover in (Prover(one), Prover(two))
    ]
    assert verdicts[0] == verdicts[1]
    for sample in (any_table(chance, x) for x in (one, two) for _ in range(300)):
        paths = [summary_of(exploration, sample) for exploration in (one, two)]
        steps = [path and in_numbers(path.step, Evaluator(sample)) for path in paths]
        # The start-up sizing counts the second block, which no step takes.
        alike = [step and replace(step, reserved_at_startup=0) for step in steps]
        assert alike[0] == alike[1]


# ---- what is not understood ---------------------------------------------------------------------

#: A place in the estimator where all its numbers are at hand.
ANCHOR = "            checkpoint_block = int(checkpoint_position > 0)\n"


@dataclass(frozen=True)
class Variants:
    """One tree whose estimator runs the lines of a chosen variant."""

    root: Path
    core: Core
    first_line: Mapping[str, int]

    def choose(self, name: str) -> Core:
        """Run this variant's lines from now on."""
        vars(self.core.managers)["VARIANT"] = name
        return self.core


def with_variants(
    root: Path, to: Path, variants: Mapping[str, str], load: Callable[[Path], Core] = lifted_core
) -> Variants:
    """Copy a tree and add variants to its estimator, which is at a line of its own for each."""
    first_line = {}

    def edit(text: str) -> str:
        assert text.count(ANCHOR) == 1
        outside = "VARIANT = ''; from vllm.v1.hisparse.extra import HiSparseX\n"
        head, tail = text.replace("import itertools\n", outside, 1).split(ANCHOR)
        head += ANCHOR
        for name, lines in variants.items():
            head += f"            if VARIANT == {name!r}:\n"
            first_line[name] = head.count("\n") + 1
            head += "".join(f"                {line}\n" for line in lines.splitlines())
        return head + tail

    copied = copy_of(root, to, edit)
    return Variants(copied, load(copied), first_line)


#: Lines that the lifter must refuse, and which of them it must name (counted from 0).
NOT_UNDERSTOOD: dict[str, tuple[str, int]] = {
    "float arithmetic": (
        "import math\nnum_new_blocks = math.ceil(num_tokens / self.block_size)",
        1,
    ),
    "a float factor": ("num_new_blocks = int(num_tokens * 1.0)", 0),
    "float()": ("num_new_blocks += float(num_tokens) > 3.0", 0),
    "a comparison with a float": ("if num_tokens == 1.0: num_new_blocks += 1", 0),
    "a square root": ("import math\nnum_new_blocks += math.isqrt(num_tokens)", 1),
    "a number outside the core": ("num_new_blocks += MEDIUM_CPU", 0),
    "a comparison outside the core": ("if MEDIUM_CPU == 'CPU': num_new_blocks += 1", 0),
    "an instance of something outside": ("if isinstance(self, HiSparseX): num_new_blocks += 1", 0),
    "a set of things outside": ("if MEDIUM_CPU in {1, 2}: num_new_blocks += 1", 0),
    "a function outside the core": ("num_new_blocks += HiSparseX.blocks(num_tokens)", 0),
    "a right shift": ("num_new_blocks = num_tokens >> 4", 0),
    "a left shift": ("num_new_blocks = 1 << num_new_blocks", 0),
    "a mask": ("num_new_blocks = num_tokens & -16", 0),
    "bit_length": ("num_new_blocks += num_tokens.bit_length()", 0),
    "a power": ("num_new_blocks += num_tokens ** 2", 0),
    "a dict keyed on a number": ("num_new_blocks += {num_tokens: 1}.get(7, 2)", 0),
    "a look-up by a number": ("num_new_blocks += {7: 1}.get(num_tokens, 2)", 0),
    "a set of numbers": ("num_new_blocks += len({num_tokens, num_new_blocks})", 0),
    "a cached function": (
        "import functools\nnum_new_blocks += functools.cache(abs)(num_tokens)",
        1,
    ),
    "hash": ("num_new_blocks += hash(num_tokens) % 2", 0),
    "id": ("num_new_blocks += id(num_tokens) % 2", 0),
    "identity": ("if num_tokens is num_new_blocks: num_new_blocks += 1", 0),
    "an index": ("num_new_blocks += [1, 2][num_tokens % 2]", 0),
    "text": ("if str(num_tokens) == '7': num_new_blocks += 1", 0),
    "formatted text": ("if f'{num_tokens}' == '7': num_new_blocks += 1", 0),
    "text in old style": ("if '%s' % num_tokens == '7': num_new_blocks += 1", 0),
    "a handler around": (
        "try:\n    num_new_blocks += hash(num_tokens)\nexcept Exception:\n    num_new_blocks = 0",
        1,
    ),
    "a bare handler around": (
        "try:\n    num_new_blocks += hash(num_tokens)\nexcept:\n    num_new_blocks = 0",
        1,
    ),
    "a loop without end": (
        "while num_tokens > 0:\n    num_tokens -= 1\n    num_new_blocks += 0",
        0,
    ),
    "a loop over tokens": ("for _ in range(num_tokens): num_new_blocks += 0", 0),
    "the caller's frame": ("num_new_blocks += len(locals())", 0),
    "the pool's free blocks": ("num_new_blocks += self.block_pool.get_num_free_blocks()", 0),
    "how many requests there are": ("num_new_blocks += len(self.req_to_blocks)", 0),
    "which requests there are": ("num_new_blocks += len(self._allocated_block_reqs)", 0),
    "another request": ("num_new_blocks += len(self.req_to_blocks['other'])", 0),
    "what a step logged": ("if self.new_block_ids: num_new_blocks += 1", 0),
    "what the coordinator sets": ("num_new_blocks += self.use_eagle", 0),
}
#: The same for a request that has a table.
NOT_UNDERSTOOD_WITH_A_TABLE: dict[str, tuple[str, int]] = {
    "a loop over the table": (
        "num_new_blocks += sum(block.is_null for block in self.req_to_blocks[request_id])",
        0,
    ),
    "sorting the table": ("num_new_blocks += len(sorted(self.req_to_blocks[request_id]))", 0),
    "a block's references": (
        "blocks = self.req_to_blocks[request_id]\n"
        "if len(blocks) > 0: num_new_blocks += blocks[0].ref_cnt",
        1,
    ),
    "a block's hash": (
        "blocks = self.req_to_blocks[request_id]\n"
        "if len(blocks) > 0: num_new_blocks += blocks[0].block_hash is None",
        1,
    ),
    "state of earlier steps": (
        "num_new_blocks += self.num_cached_block.get(request_id, 0)\n"
        "self.num_cached_block[request_id] = num_new_blocks",
        0,
    ),
    "what an earlier step noted": (
        "num_new_blocks += getattr(self, 'most_tokens', 0)\nself.most_tokens = num_tokens",
        0,
    ),
}


@pytest.fixture(scope="module")
def not_understood(trees: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Variants:
    lines = {**NOT_UNDERSTOOD, **NOT_UNDERSTOOD_WITH_A_TABLE}
    variants = {name: text for name, (text, _) in lines.items()}
    return with_variants(trees["0.31.0"], tmp_path_factory.mktemp("tree"), variants)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("first", name) for name in NOT_UNDERSTOOD),
        *(("running", name) for name in NOT_UNDERSTOOD_WITH_A_TABLE),
    ],
)
def test_a_construct_that_is_not_understood_is_named(
    not_understood: Variants, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that terms cannot follow ends with file and line, never with a guess."""
    monkeypatch.setattr("models.path.MAX_ROUNDS", 12)  # one loop is followed round by round
    _, which = {**NOT_UNDERSTOOD, **NOT_UNDERSTOOD_WITH_A_TABLE}[name]

    with pytest.raises(NotUnderstood) as caught:
        explore(not_understood.choose(name), family, ())

    line = not_understood.first_line[name] + which
    assert str(caught.value).startswith(f"{MANAGERS_FILE}:{line}: ")
    assert "\n" not in str(caught.value)


def test_a_helper_outside_the_core_is_unsupported(
    trees: Mapping[str, Path], tmp_path: Path
) -> None:
    """A new module that the loader does not know is not executed, and asking it is refused."""
    lines = "from vllm.v1.core.new_helper import extra\nnum_new_blocks += extra(num_tokens)"
    variants = with_variants(trees["0.31.0"], tmp_path, {"": lines})
    (tmp_path / "vllm/v1/core/new_helper.py").write_text("def extra(n):\n    return 0\n")

    found = list(prove(LiftedTree(tmp_path), families=["first", "promoted", "drafts"]))
    obligations = [o for o in found if o.verdict is not Verdict.NOT_APPLICABLE]

    assert {obligation.verdict for obligation in obligations} == {Verdict.UNSUPPORTED}
    for obligation in obligations:
        assert str(obligation.reason).startswith(f"{MANAGERS_FILE}:{variants.first_line[''] + 1}: ")
        assert "new_helper" in str(obligation.reason)
        assert obligation.counterexample is None


#: Lines that the lifter understands.
UNDERSTOOD = {
    "what the coordinator lowers": "num_new_blocks += self.cache_hit_alignment_tokens % 3",
    "the last state": "num_new_blocks += self.last_state_block_idx.get(request_id, num_tokens % 2)",
    "a sum over the hits": "num_new_blocks += sum(b.ref_cnt == 0 for b in new_computed_blocks)"
    " + num_tokens % 2",
    "sum": "num_new_blocks = sum([num_new_blocks, checkpoint_block])",
    "sum of a generator": "num_new_blocks += sum(n > 3 for n in (num_tokens, num_new_blocks))",
    "abs": "num_new_blocks = abs(num_new_blocks - 3)",
    "divmod": "num_new_blocks += sum(divmod(num_tokens, self.block_size)) % 3",
    "any and all": "num_new_blocks += any([num_tokens > 3, checkpoint_block]) + all([num_tokens])",
    "max of a generator": "num_new_blocks = max(n for n in (num_new_blocks, 2))",
    "max with a default": "num_new_blocks = max([num_new_blocks, 2], default=0)",
    "min by a key": "num_new_blocks = min(num_new_blocks, 2, key=lambda n: abs(n - 2))",
    "sorting a few": "num_new_blocks = sorted([num_new_blocks, num_tokens, 4])[1]",
    "rounding": "import math\nnum_new_blocks += math.ceil(num_tokens) % 2 + round(num_tokens) % 3",
    "classes": "num_new_blocks += isinstance(num_tokens, int) + isinstance(num_tokens > 3, bool)",
    "no bool": "num_new_blocks += isinstance(num_tokens, bool) + (type(num_tokens) is int)",
    "a short loop": "for i in range(num_tokens % 3): num_new_blocks += i",
    "a short while": "n = num_new_blocks % 4\nwhile n > 1: n -= 1\nnum_new_blocks += n",
    "membership": "num_new_blocks += num_tokens in (7, 8, 9)",
    "a negative divisor": "num_new_blocks += num_tokens // -self.block_size + num_tokens",
    "a conditional": "num_new_blocks += 1 if num_tokens > 9 and self.block_size < 4 else 0",
    "a chain": "num_new_blocks += 3 < num_tokens <= 3 * self.block_size",
    "a match": "match num_tokens:\n    case 7 | 8:\n        num_new_blocks += 1",
    "a message": "assert num_tokens > 0, f'{num_tokens} tokens'",
    "logging": "logger.debug(f'{num_tokens} tokens')",
    "a trace of the dry run": "self.new_block_ids.append(7)",
    "an exception": "if num_tokens % 5 == 4: raise ValueError(f'{num_tokens} tokens')",
    "an error of its own": "class E(Exception): pass\nif num_tokens % 5 == 4: raise E(num_tokens)",
    "a handler": "try:\n    num_new_blocks += 1 // (num_tokens % 3)\n"
    "except ZeroDivisionError:\n    num_new_blocks += 2",
    "division by zero": "num_new_blocks += 1 // (num_tokens % 3)",
    "an index out of range": "num_new_blocks += [][0] if num_tokens % 3 == 2 else 0",
    "empty max": "num_new_blocks += max([]) if num_tokens % 3 == 2 else 0",
}


@pytest.fixture(scope="module")
def understood(
    trees: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Variants, Variants, Driver]:
    """The same tree lifted and native, and a driver of the latter."""
    lifted, native = (
        with_variants(trees["0.31.0"], tmp_path_factory.mktemp("tree"), UNDERSTOOD, load)
        for load in (lifted_core, Core)
    )
    return lifted, native, Driver(native.core)


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_ordinary_python_is_understood(
    understood: tuple[Variants, Variants, Driver], name: str
) -> None:
    """Builtins, loops, handlers and exceptions give on terms what the same tree gives natively."""
    lifted, native, driver = understood
    native.choose(name)
    core = lifted.choose(name)
    explorations = {
        eagle: explore(core, "first", (), Variant(eagle=eagle)) for eagle in (False, True)
    }
    hit = set()
    traits = traits_of(core)
    kind: Kind = ("first", ())
    settings = [
        itertools.islice(lives(driver, traits, kind, Variant(eagle), name, fails=False), 200)
        for eagle in (False, True)
    ]
    for ready in itertools.chain(*settings):
        if predict.obligation_of(ready.situation) != kind:
            continue
        eagle = ready.situation.geometry.drop_eagle_checkpoint_block
        lifted_one = lifted_step(explorations[eagle], values_of(ready))
        assert lifted_one is not None
        path, expected = lifted_one
        hit.add((eagle, path))

        step = ready.request.apply(ready.situation.call)

        assert step.raised == expected.raised
        if step.raised is None:
            # What is a trace of the dry run is broader here: the driver looks at public state.
            assert replace(step, dry_run_left_state=None) == replace(
                expected, dry_run_left_state=None
            )
        else:
            file, line = str(explorations[eagle].paths[path].raised_at).split(":")
            assert file == MANAGERS_FILE
            assert int(line) - lifted.first_line[name] in (0, 1)
    assert len(hit) >= 2


#: What the dry run does beside counting.
TRACES = {
    "a log": "self.new_block_ids.append(7)",
    "an equal table": "self.req_to_blocks[request_id] = self.req_to_blocks[request_id][:]",
    "a number by request": "self._num_retired_blocks[request_id] = 3",
    "a member": "self.cached_blocks_this_step.add(request_id)",
    "a block": "self.block_pool.get_new_blocks(1)",
    "an attribute": "self.most_tokens = num_tokens",
    "an attribute of the pool": "self.block_pool.asked = num_tokens",
}


def test_a_dry_run_that_leaves_a_trace_is_noticed(
    trees: Mapping[str, Path], tmp_path: Path
) -> None:
    """A dry run that logs, swaps its table for an equal one, or draws, is not pure."""
    variants = with_variants(trees["0.31.0"], tmp_path, {**TRACES, "none": "pass"})
    for name in variants.first_line:
        exploration = explore(variants.choose(name), "checkpoint", ())
        verdict = Prover(exploration).settle(THEOREMS["dry-run-pure"]).verdict
        assert verdict is (Verdict.PROVED if name == "none" else Verdict.REFUTED), name


def test_a_renamed_attribute_is_an_error_of_the_tree(
    trees: Mapping[str, Path], tmp_path: Path
) -> None:
    """What the model puts into a manager must be what the manager reads."""
    root = copy_of(
        trees["0.31.0"], tmp_path, lambda text: text.replace("req_to_blocks", "new_name")
    )

    with pytest.raises(CoreError, match=r"no MambaManager\.req_to_blocks here \(renamed\?\)"):
        explore(lifted_core(root), "first", ())


def test_a_renamed_setting_of_the_coordinator_is_not_understood(
    trees: Mapping[str, Path], tmp_path: Path
) -> None:
    """What the coordinator sets under a name that nobody knows is named where it is read."""
    root = copy_of(trees["0.31.0"], tmp_path, lambda text: text)
    for module in CORE_MODULES:
        file = root / (module.replace(".", "/") + ".py")
        if file.is_file():
            file.write_text(file.read_text().replace("drop_eagle_checkpoint_block", "new_name"))

    with pytest.raises(NotUnderstood, match=rf"^{MANAGERS_FILE}:\d+: new_name is not what"):
        explore(lifted_core(root), "first", ())


def test_an_unknown_argument_is_not_understood(trees: Mapping[str, Path], tmp_path: Path) -> None:
    """A constructor that asks for more than the model gives is named with its file."""
    old = "kv_cache_spec: MambaSpec, block_pool: BlockPool, **kwargs"
    new = "kv_cache_spec: MambaSpec, block_pool: BlockPool, *, new_size: int, **kwargs"
    root = copy_of(trees["0.31.0"], tmp_path, lambda text: text.replace(old, new))

    with pytest.raises(NotUnderstood, match=r"single_type_kv_cache_manager\.py.*new_size"):
        explore(lifted_core(root), "first", ())


def test_too_many_paths_are_given_up(
    trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exploration that does not end is UNSUPPORTED with its file, not cut short."""
    monkeypatch.setattr(lift, "MAX_PATHS", 1)

    with pytest.raises(NotUnderstood, match=r"single_type_kv_cache_manager\.py: more than 1 paths"):
        explore(lifted_core(trees["0.31.0"]), "first", ())
