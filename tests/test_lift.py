from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conformance.driver import Driver, RequestUnderTest, core_driver
from models import lift
from models.evaluate import Evaluator
from models.lift import Exploration, NotUnderstood, explore, lifted_core, summary_of
from models.loader import CORE_MODULES, Core, CoreError
from models.prove import Prover, Verdict, in_numbers, prove
from spec.families import family_of, reserves_checkpoint
from spec.theorems import OBLIGATIONS, THEOREMS
from spec.vocabulary import Call, Geometry, Situation, Step

RELEASES = ("0.30.0", "0.31.0")
KINDS = ["-".join((family, *tags)) for family, tags in OBLIGATIONS]
MANAGERS_FILE = "vllm/v1/core/single_type_kv_cache_manager.py"
#: More than any of these steps takes.
POOL_BLOCKS = 64

Values = Mapping[str, Any]


def copy_of(root: Path, to: Path, edit: Callable[[str], str]) -> Path:
    """Copy a tree's core, with the file of the managers edited."""
    for module in CORE_MODULES:
        relative = module.replace(".", "/") + ".py"
        if (root / relative).is_file():
            (to / relative).parent.mkdir(parents=True, exist_ok=True)
            text = (root / relative).read_text()
            (to / relative).write_text(edit(text) if relative == MANAGERS_FILE else text)
    return to


class Lifted:
    """A tree's explorations, each made once."""

    def __init__(self, root: Path) -> None:
        core = lifted_core(root)
        self.of = cache(lambda family, tags, eagle: explore(core, family, tags, eagle=eagle))


@pytest.fixture(scope="module")
def lifted(trees: Mapping[str, Path]) -> dict[str, Lifted]:
    return {release: Lifted(trees[release]) for release in RELEASES}


@pytest.fixture(scope="module")
def drivers(trees: Mapping[str, Path]) -> dict[str, Driver]:
    return {release: core_driver(trees[release]) for release in RELEASES}


# ---- random situations on the real manager ------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """A request of the real manager, about to make a step."""

    request: RequestUnderTest
    situation: Situation


def values_of(ready: Ready) -> Values:
    """Values of all variables: the situation's, and the state that the request is in."""
    manager, situation = ready.request.manager, ready.situation
    call = situation.call
    table = manager.req_to_blocks.get("request", ())
    position, column = manager._checkpoints.get("request", (1, 0))
    return {
        **vars(situation.geometry),
        "num_computed_tokens": call.total_computed_tokens,
        "num_tokens": call.num_tokens,
        "num_tokens_main_model": call.num_tokens_main_model,
        "prefill_end": call.prefill_end,
        "prefill_length": situation.prefill_length,
        "num_gpu_blocks": POOL_BLOCKS,
        "has_checkpoint_before": "request" in manager._checkpoints,
        "checkpoint_before": position,
        "column_before": column,
        "block_table": {i: block.block_id for i, block in enumerate(table)},
        "block_is_movable": {
            i: int(block.ref_cnt == 1 and block.block_hash is None) for i, block in enumerate(table)
        },
    }


def a_geometry(random: random.Random, *, checkpoint: bool) -> Geometry:
    hash_block_size = random.choice((1, 1, 2, 3, 4))
    return Geometry(
        block_size=hash_block_size * random.choice((1, 1, 2, 3, 5)),
        hash_block_size=hash_block_size,
        num_speculative_blocks=random.randrange(9),
        num_prefill_checkpoint_blocks=int(checkpoint or random.random() < 0.7),
        prefill_checkpoint_alignment=random.choice((1, 1, 1, 2, 3, hash_block_size)),
        drop_eagle_checkpoint_block=random.random() < 0.5,
    )


def a_call(random: random.Random, g: Geometry, start: int) -> tuple[Call, int]:
    """A chunk from ``start``, with lengths that crowd around block and hash boundaries."""
    blocks = random.choice((0, 1, 3, *[random.randrange(g.num_speculative_blocks + 3)] * 3))
    near = random.choice((-g.hash_block_size, -1, 0, 1, 2, g.hash_block_size, g.block_size))
    end = max(start + 1, (start // g.block_size + blocks) * g.block_size + near)
    prefill_length = max(1, random.choice((end, end - 1, end + 1, start + 1, end + 50)))
    prefill_end = random.choice((0, 0, prefill_length))
    lookahead = random.choice((0, 0, 1, g.num_speculative_blocks))
    return Call(end + lookahead, end, start, start, prefill_end), prefill_length


def situations(driver: Driver, kind: str, seed: str) -> Iterator[Ready]:
    """Endlessly many situations of one kind, in states that the real manager got into."""
    chance = random.Random(seed)
    takes_end = "prefill_end" in driver.bindings.estimator_call_fields
    while True:
        geometry = a_geometry(chance, checkpoint="checkpoint" in kind)
        request = driver.request(geometry, POOL_BLOCKS)
        start = 0
        for _ in range(0 if kind.startswith("first") else chance.choice((1, 1, 2))):
            call, _ = a_call(chance, geometry, start)
            assert request.apply(call, watch_dry_run=False).raised is None
            start = call.num_tokens_main_model
        call, prefill_length = a_call(chance, geometry, start)
        if not takes_end and call.prefill_end:
            call = Call(call.num_tokens, call.num_tokens_main_model, start, start)
        request.manager.remove_skipped_blocks("request", start)
        situation = request.situation(call, prefill_length)
        tags = ("checkpoint",) if reserves_checkpoint(situation) else ()
        family = family_of(situation)
        if "-".join((family, *tags) if family == "first" else (family,)) == kind:
            yield Ready(request, situation)
        request.finish()


def kind_of(kind: str) -> tuple[str, tuple[str, ...]]:
    family, _, tag = kind.partition("-")
    return family, (tag,) if tag else ()


def seen_by_lifted_code(exploration: Exploration, values: Values) -> tuple[int, Step]:
    """Number of the path taken, and what the lifted code says of the step."""
    path = summary_of(exploration, values)
    assert path is not None, "the situation breaks an assumption"
    return exploration.paths.index(path), in_numbers(path.step, Evaluator(values))


def state_of(ready: Ready) -> Values:
    """The situation's numbers, and the column that the real manager would free next."""
    column = ready.request.manager.last_state_block_idx.get("request")
    known = {} if column is None else {"column_to_retire_before": column}
    return {**values_of(ready), "has_column_to_retire_before": column is not None, **known}


def self_check(
    explorations: Mapping[bool, Exploration], ready: Iterator[Ready], *, least: int, most: int
) -> tuple[int, int]:
    """Compare summaries with the real steps; return how many paths were taken, of how many."""
    paths = {(eagle, i) for eagle, found in explorations.items() for i in range(len(found.paths))}
    hit: set[tuple[bool, int]] = set()
    for done, step in enumerate(ready):
        if done >= least and (hit == paths or done >= most):
            break
        eagle = step.situation.geometry.drop_eagle_checkpoint_block
        path, expected = seen_by_lifted_code(explorations[eagle], state_of(step))
        hit.add((eagle, path))
        assert step.request.apply(step.situation.call) == expected, step.situation
    return len(hit), len(paths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("release", RELEASES)
def test_lifted_summaries_agree_with_the_real_function(
    lifted: dict[str, Lifted], drivers: dict[str, Driver], release: str, kind: str
) -> None:
    """On a thousand random steps and more, each path taken, the summary says what vLLM does."""
    explorations = {eagle: lifted[release].of(*kind_of(kind), eagle) for eagle in (False, True)}
    steps = situations(drivers[release], kind, f"{release} {kind}")

    hit, of = self_check(explorations, steps, least=1000, most=30_000)

    assert hit == of


# ---- all paths, each once -----------------------------------------------------------------------


def any_values(chance: random.Random, exploration: Exploration) -> Values:
    """Values near a path's sample, with a table that need not be one the manager makes."""
    values = dict(chance.choice(exploration.samples))
    for name in chance.sample(sorted(values), k=chance.randrange(4)):
        if isinstance(values[name], bool):
            values[name] = chance.random() < 0.5
        elif isinstance(values[name], int):
            values[name] = max(values[name] + chance.choice((-4, -2, -1, 1, 2, 7)), 0)
    columns = range(60)
    return {
        **values,
        "block_table": {i: chance.choice((0, 5, 6, i + 10)) for i in columns},
        "block_is_movable": {i: chance.choice((0, 1, 1, 1)) for i in columns},
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("release", RELEASES)
def test_exactly_one_path_is_taken(lifted: dict[str, Lifted], release: str, kind: str) -> None:
    """Whatever keeps the assumptions takes one path, not none and not two."""
    chance = random.Random(f"{release} {kind}")
    kept = 0
    for eagle in (False, True):
        exploration = lifted[release].of(*kind_of(kind), eagle)
        for _ in range(600):
            # `summary_of` fails unless exactly one condition holds.
            kept += summary_of(exploration, any_values(chance, exploration)) is not None
        for number, sample in enumerate(exploration.samples):
            assert summary_of(exploration, sample) is exploration.paths[number]
    assert kept >= 100


@pytest.mark.parametrize("kind", KINDS)
def test_two_checkpoint_blocks_are_as_good_as_one(trees: Mapping[str, Path], kind: str) -> None:
    """The code asks only whether there is a checkpoint block: K = 2 gives the steps of K = 1."""
    core = lifted_core(trees["0.31.0"])
    chance = random.Random(kind)
    one, two = (
        explore(core, *kind_of(kind), eagle=False, checkpoint_blocks=blocks) for blocks in (1, 2)
    )

    verdicts = [
        {slug: prover.settle(theorem).verdict for slug, theorem in THEOREMS.items()}
        for prover in (Prover(one), Prover(two))
    ]
    assert verdicts[0] == verdicts[1]
    for sample in (any_values(chance, x) for x in (one, two) for _ in range(300)):
        paths = [summary_of(exploration, sample) for exploration in (one, two)]
        steps = [path and in_numbers(path.step, Evaluator(sample)) for path in paths]
        assert steps[0] == steps[1]


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
    "what the coordinator lowers": ("num_new_blocks += self.cache_hit_alignment_tokens", 0),
}
#: The same for a request that has a table.
NOT_UNDERSTOOD_WITH_A_TABLE: dict[str, tuple[str, int]] = {
    "a loop over the table": (
        "num_new_blocks += sum(block.is_null for block in self.req_to_blocks[request_id])",
        0,
    ),
    "sorting the table": ("num_new_blocks += len(sorted(self.req_to_blocks[request_id]))", 0),
    "a block's references": ("num_new_blocks += self.req_to_blocks[request_id][0].ref_cnt", 0),
    "a block's hash": ("num_new_blocks += self.req_to_blocks[request_id][0].block_hash is None", 0),
    "state of earlier steps": (
        "num_new_blocks += self._num_retired_blocks.get(request_id, 0)\n"
        "self._num_retired_blocks[request_id] = num_new_blocks",
        0,
    ),
    "what an earlier step noted": (
        "num_new_blocks += getattr(self, 'most_tokens', 0)\nself.most_tokens = num_tokens",
        0,
    ),
    "the last state": ("num_new_blocks += self.last_state_block_idx[request_id]", 0),
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
    not_understood: Variants, family: str, name: str
) -> None:
    """Code that terms cannot follow ends with file and line, never with a guess."""
    _, which = {**NOT_UNDERSTOOD, **NOT_UNDERSTOOD_WITH_A_TABLE}[name]

    with pytest.raises(NotUnderstood) as caught:
        explore(not_understood.choose(name), family, (), eagle=False)

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

    obligations = list(prove(tmp_path))

    assert {obligation.verdict for obligation in obligations} == {Verdict.UNSUPPORTED}
    for obligation in obligations:
        assert str(obligation.reason).startswith(f"{MANAGERS_FILE}:{variants.first_line[''] + 1}: ")
        assert "new_helper" in str(obligation.reason)
        assert obligation.counterexample is None


#: Lines that the lifter understands.
UNDERSTOOD = {
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
    explorations = {eagle: explore(core, "first", (), eagle=eagle) for eagle in (False, True)}
    hit = set()
    for ready in itertools.islice(situations(driver, "first", name), 200):
        eagle = ready.situation.geometry.drop_eagle_checkpoint_block
        path, expected = seen_by_lifted_code(explorations[eagle], values_of(ready))
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
        exploration = explore(variants.choose(name), "checkpoint", (), eagle=False)
        verdict = Prover(exploration).settle(THEOREMS["dry-run-pure"]).verdict
        assert verdict is (Verdict.PROVED if name == "none" else Verdict.REFUTED), name


@pytest.mark.parametrize("name", ["req_to_blocks", "drop_eagle_checkpoint_block"])
def test_a_renamed_attribute_is_an_error_of_the_tree(
    trees: Mapping[str, Path], tmp_path: Path, name: str
) -> None:
    """What the model puts into a manager must be what the manager reads."""
    root = copy_of(trees["0.31.0"], tmp_path, lambda text: text.replace(name, "new_name"))

    with pytest.raises(CoreError, match=rf"no MambaManager\.{name} here \(renamed\?\)"):
        explore(lifted_core(root), "first", (), eagle=False)


def test_an_unknown_argument_is_not_understood(trees: Mapping[str, Path], tmp_path: Path) -> None:
    """A constructor that asks for more than the model gives is named with its file."""
    old = "kv_cache_spec: MambaSpec, block_pool: BlockPool, **kwargs"
    new = "kv_cache_spec: MambaSpec, block_pool: BlockPool, *, new_size: int, **kwargs"
    root = copy_of(trees["0.31.0"], tmp_path, lambda text: text.replace(old, new))

    with pytest.raises(NotUnderstood, match=r"single_type_kv_cache_manager\.py.*new_size"):
        explore(lifted_core(root), "first", (), eagle=False)


def test_too_many_paths_are_given_up(
    trees: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exploration that does not end is UNSUPPORTED with its file, not cut short."""
    monkeypatch.setattr(lift, "MAX_PATHS", 1)

    with pytest.raises(NotUnderstood, match=r"single_type_kv_cache_manager\.py: more than 1 paths"):
        explore(lifted_core(trees["0.31.0"]), "first", (), eagle=False)
