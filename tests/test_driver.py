from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.driver import (
    MAX_POOL_BLOCKS,
    MAX_TABLE_COLUMNS,
    BindingError,
    Driver,
    DriverError,
    LimitError,
    RequestUnderTest,
    core_driver,
)
from conformance.targets import resolve
from models.loader import CORE_MODULES
from spec.families import family_of
from spec.vocabulary import Call, Geometry, Step

MANAGERS_FILE = "vllm/v1/core/single_type_kv_cache_manager.py"
POOL_FILE = "vllm/v1/core/block_pool.py"

RELEASES = tuple(f"0.{minor}.0" for minor in range(24, 34))
WITH_PARTIAL_HITS = RELEASES[RELEASES.index("0.26.0") :]

SMALL = Geometry(16, 4, 3, 1, 4, False)
FIRST = Call(100, 100, 0, 0)


@pytest.fixture(scope="module")
def drivers(trees: Mapping[str, Path]) -> dict[str, Driver]:
    """Drivers by release, side by side in this process."""
    return {release: core_driver(root) for release, root in trees.items()}


@pytest.fixture
def edited(trees: Mapping[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Copies the core of 0.31.0 and replaces a text in one of its files, or in all."""

    def edit(file: str | None, old: str, new: str, count: int = -1) -> Path:
        for module in CORE_MODULES:
            relative = module.replace(".", "/") + ".py"
            if not (trees["0.31.0"] / relative).is_file():
                continue
            text = (trees["0.31.0"] / relative).read_text()
            if file in (None, relative):
                assert file is None or old in text
                text = text.replace(old, new, count)
            (tmp_path / relative).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / relative).write_text(text)
        return tmp_path

    return edit


@functools.cache
def driver_of(release: str) -> Driver:
    return core_driver(resolve(f"vllm=={release}").root)


def counts(step: Step) -> tuple[object, ...]:
    """What is counted of a step, and whether its dry run left no trace."""
    return step.dry_run, step.estimate, step.drawn, step.table_length, step.dry_run_left_state


def free_list(request: Any) -> list[int]:
    """Block ids in the order in which the pool would hand them out."""
    return [block.block_id for block in request.pool.free_block_queue.get_all_free_blocks()]


# ---- what the managers say ----------------------------------------------------------------------

# The table of vLLM #57050's own test: B, S, prompt, then the estimate of 0.30.0 and the drawn
# blocks of both releases, which are 0.31.0's estimate too.
ROWS_57050 = [
    (896, 0, 25_121, 3, 2),
    (896, 1, 25_121, 3, 3),
    (896, 4, 25_121, 3, 3),
    (896, 0, 704_547, 761, 2),
    (896, 1, 704_547, 761, 3),
    (896, 4, 704_547, 761, 6),
    (1536, 0, 25_121, 2, 2),
    (1536, 1, 25_121, 2, 2),
    (1536, 4, 25_121, 2, 2),
    (1536, 0, 704_547, 444, 2),
    (1536, 1, 704_547, 444, 3),
    (1536, 4, 704_547, 444, 6),
]


@pytest.mark.parametrize(("block_size", "num_speculative", "prompt", "wrong", "right"), ROWS_57050)
def test_the_rows_of_57050(
    drivers: dict[str, Driver],
    block_size: int,
    num_speculative: int,
    prompt: int,
    wrong: int,
    right: int,
) -> None:
    """0.30.0 says too much where vLLM #57050 says so; 0.31.0 says what both draw."""
    geometry = Geometry(block_size, 128, num_speculative, 1, 64, False)
    estimates = {"0.30.0": wrong, "0.31.0": right}
    for release, estimate in estimates.items():
        request = drivers[release].request(geometry, 1024)
        request.apply(Call(23_040, 23_040, 0, 0))

        step = request.apply(Call(prompt, prompt, 23_040, 23_040))

        columns = -(-prompt // block_size) + num_speculative
        assert counts(step) == (estimate, estimate, right, columns, True), release


@pytest.mark.parametrize("release", ["0.30.0", "0.31.0"])
@pytest.mark.parametrize("num_speculative", range(9))
@pytest.mark.parametrize("num_checkpoint", [0, 1, 2])
def test_first_admission(
    drivers: dict[str, Driver], release: str, num_speculative: int, num_checkpoint: int
) -> None:
    """A first admission takes the running state, the speculative blocks and any checkpoint."""
    geometry = Geometry(16, 4, num_speculative, num_checkpoint, 4, False)
    request = drivers[release].request(geometry, 32)

    step = request.apply(FIRST)

    need = 1 + num_speculative + (num_checkpoint > 0)
    assert counts(step) == (need, need, need, 7 + num_speculative, True)
    assert step.pending_checkpoint == ((96, 5) if num_checkpoint else None)
    assert (step.returned_new_columns, step.no_block_is_twice) == (True, True)
    assert step.column_to_retire == -1
    observed = request.observe()
    assert (observed.held, observed.free) == (need, 31 - need)
    # The table: nulls for skipped blocks, then the blocks in the order in which they were drawn.
    assert observed.table == (0,) * (7 + num_speculative - need) + tuple(range(1, need + 1))


def test_a_release_gets_the_arguments_it_takes(drivers: dict[str, Driver]) -> None:
    """`prefill_end` reaches 0.31.0, which keeps no checkpoint before it; 0.30.0 has none."""
    sparse = Call(100, 100, 0, 0, prefill_end=200)

    drawn = {
        release: driver.request(SMALL, 32).apply(sparse).drawn
        for release, driver in drivers.items()
    }

    assert drawn == {"0.30.0": 5, "0.31.0": 4}


def test_the_eagle_drop_reaches_the_manager(drivers: dict[str, Driver]) -> None:
    """With the drop, the checkpoint lies one hash unit lower."""
    positions = []
    for drop in (False, True):
        request = drivers["0.31.0"].request(Geometry(16, 4, 0, 1, 4, drop), 32)
        request.apply(FIRST)
        positions += [position for position, _ in request.manager._checkpoints.values()]

    assert positions == [96, 92]


def test_a_tail_that_the_next_step_cannot_use_is_seen(drivers: dict[str, Driver]) -> None:
    """A null running state, or a speculative block that another holds, breaks the invariant."""

    def tail_after(damage: Callable[[Any], None]) -> Any:
        request = drivers["0.31.0"].request(SMALL, 32)
        assert request.apply(FIRST).tail_is_held is True
        damage(request)
        return request.apply(Call(104, 104, 100, 100)).tail_is_held

    def null_running_state(request: Any) -> None:
        request.manager.req_to_blocks["request"][-4] = request.pool.null_block

    def share_last_block(request: Any) -> None:
        request.pool.touch(request.manager.req_to_blocks["request"][-1:])

    assert tail_after(lambda request: None) is True
    assert tail_after(null_running_state) is False
    assert tail_after(share_last_block) is False


# ---- every kind of step, on every release --------------------------------------------------------

# Blocks of 16 tokens, hash units of 4, two speculative blocks, no checkpoint blocks.
PLAIN = Geometry(16, 4, 2, 0, 4, False)


def chunk(start: int, end: int, num_local: int | None = None) -> Call:
    """A step over the tokens `start` to `end`; all tokens before it are local unless said."""
    return Call(end, end, start, start if num_local is None else num_local)


def parked(request: RequestUnderTest, num_tokens: int = 40) -> Step:
    """Parks a request while a connector loads its first tokens."""
    call = Call(num_tokens, num_tokens, num_tokens, 0)
    return request.apply(call, num_external_tokens=num_tokens, loads_asynchronously=True)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("end", "columns"), [(40, 5), (100, 9)])
@pytest.mark.parametrize("is_evictable", [False, True])
def test_a_hit_that_ends_on_a_block_boundary(
    release: str, end: int, columns: int, is_evictable: bool
) -> None:
    """The running state and the speculative blocks are drawn, and a hit that nobody references."""
    request = driver_of(release).request(PLAIN, 32)

    step = request.apply(chunk(32, end), num_hit_blocks=2, hit_is_evictable=is_evictable)

    need = 3 + is_evictable
    assert counts(step) == (need, need, need, columns, True)
    assert step.tail_is_held
    assert (step.returned_new_columns, step.column_to_retire) == (True, 1)
    assert request.observe().held == 4
    assert request.observe().free == 31 - 4
    assert request.finish()


@pytest.mark.parametrize("release", RELEASES)
def test_a_hit_that_is_cached_in_the_same_step_puts_the_step_off(release: str) -> None:
    """The request is told one block more than the pool has, and nothing is done."""
    request = driver_of(release).request(PLAIN, 32)

    step = request.apply(chunk(32, 100), num_hit_blocks=2, hit_is_of_this_step=True)

    assert counts(step) == (33, 33, 0, 0, True)
    assert (step.deferred, step.refused, step.raised) == (True, False, None)
    assert request.observe().held == 0
    assert request.finish()


def test_a_release_that_does_not_wait_for_a_hit_is_seen(edited: Callable[..., Path]) -> None:
    """It is told what the step needs, which is performed."""
    asked = "new_computed_blocks[-1].block_hash in self.cached_blocks_this_step"
    request = core_driver(edited(MANAGERS_FILE, asked, "False")).request(PLAIN, 32)

    step = request.apply(chunk(32, 100), num_hit_blocks=2, hit_is_of_this_step=True)

    assert (step.deferred, step.estimate, step.drawn) == (False, 3, 3)


@pytest.mark.parametrize("release", WITH_PARTIAL_HITS)
@pytest.mark.parametrize("is_evictable", [False, True])
def test_a_hit_that_ends_inside_a_block(release: str, is_evictable: bool) -> None:
    """Its block is copied to one of the request's own; releases before 0.31.0 reserve one more."""
    is_exact = RELEASES.index(release) >= RELEASES.index("0.31.0")
    near, far = (
        driver_of(release)
        .request(PLAIN, 32)
        .apply(chunk(24, end), num_hit_blocks=2, hit_is_evictable=is_evictable)
        for end in (28, 100)
    )

    # To 28 the copy is the running state; to 100 that is a further block.
    drawn = 3 + is_evictable
    estimate = drawn if is_exact else drawn + 1
    assert counts(near) == (estimate, estimate, drawn, 4, True)
    assert counts(far) == (drawn + 1, drawn + 1, drawn + 1, 9, True)
    assert near.returned_new_columns is far.returned_new_columns is True


@pytest.mark.parametrize("release", RELEASES)
def test_external_tokens_with_a_chunk(release: str) -> None:
    """A chunk that ends in a later block than the external tokens draws one block unforeseen.

    The block of the external tokens' state is drawn first, and then as for any first chunk.
    """
    near, far = (
        driver_of(release).request(PLAIN, 32).apply(chunk(40, end, 0), num_external_tokens=40)
        for end in (48, 100)
    )

    assert counts(near) == (3, 3, 3, 5, True)
    assert counts(far) == (3, 3, 4, 9, True)


@pytest.mark.parametrize("release", RELEASES)
def test_a_pool_that_passes_the_check_is_too_short_for_external_tokens(release: str) -> None:
    """The block that was not foreseen is missing after the external tokens have theirs."""
    request = driver_of(release).request(PLAIN, 32)

    step = request.apply(chunk(40, 100, 0), num_external_tokens=40, exactly_the_estimate=True)

    assert (step.estimate, step.drawn, step.raised) == (3, 1, "ValueError")
    assert str(request.exception).startswith("Cannot get 3 free blocks")


@pytest.mark.parametrize("release", RELEASES)
def test_external_tokens_that_arrive_later(release: str) -> None:
    """The request is parked with its state's block, and draws one more once it moves on."""
    for end, drawn, columns in [(44, 0, 5), (100, 1, 9)]:
        request = driver_of(release).request(PLAIN, 32)
        assert counts(parked(request)) == (3, 3, 3, 5, True)
        assert family_of(request.situation(chunk(40, end), 200)) == "promoted"

        step = request.apply(chunk(40, end))

        assert counts(step) == (drawn, drawn, drawn, columns, True)
        assert family_of(request.situation(chunk(end, 104), 200)) == "running"
        assert request.finish()


@pytest.mark.parametrize("release", RELEASES)
def test_external_tokens_behind_a_hit_leave_the_hit_alone(release: str) -> None:
    """The state behind 60 tokens replaces that behind 32, but an evictable hit is counted."""
    used, evictable = (
        driver_of(release)
        .request(PLAIN, 32)
        .apply(
            Call(60, 60, 60, 32),
            num_hit_blocks=2,
            hit_is_evictable=is_evictable,
            num_external_tokens=28,
            loads_asynchronously=True,
        )
        for is_evictable in (False, True)
    )

    assert counts(used) == (3, 3, 3, 6, True)
    assert counts(evictable) == (4, 4, 3, 6, True)


@pytest.mark.parametrize("release", WITH_PARTIAL_HITS)
def test_an_own_partial_tail(release: str) -> None:
    """The tail's copy is drawn besides; before 0.31.0 one more is reserved within the block."""
    is_exact = RELEASES.index(release) >= RELEASES.index("0.31.0")
    for end, drawn, estimate, columns in [(44, 1, 1 if is_exact else 2, 5), (100, 2, 2, 9)]:
        request = driver_of(release).request(PLAIN, 32)
        request.apply(chunk(0, 32))
        request.apply(chunk(32, 40))
        request.cache_own_partial_tail(40)
        assert family_of(request.situation(chunk(40, end), 200)) == "own-tail"

        step = request.apply(chunk(40, end))

        assert counts(step) == (estimate, estimate, drawn, columns, True)
        assert step.returned_new_columns is True
        assert family_of(request.situation(chunk(end, 104), 200)) == "running"
        assert request.finish()


@pytest.mark.parametrize("release", WITH_PARTIAL_HITS)
def test_an_own_partial_tail_behind_a_load_that_filled_the_table(release: str) -> None:
    """0.26.0 and 0.27.0 put the copy in the running request's table, of which no worker hears.

    A step that adds no column does not mark the request as running there.
    """
    request = driver_of(release).request(Geometry(16, 4, 0, 0, 4, False), 32)
    parked(request, 36)
    promoted = request.apply(chunk(36, 40))
    request.cache_own_partial_tail(40)
    before = request.observe().table

    step = request.apply(chunk(40, 44))

    is_right = release not in ("0.26.0", "0.27.0")
    assert (promoted.drawn, step.drawn, before) == (0, 1, (0, 0, 1))
    assert request.observe().table == ((0, 0, 1) if is_right else (0, 0, 2))
    assert step.returned_new_columns is is_right


@pytest.mark.parametrize("release", WITH_PARTIAL_HITS)
def test_a_promoted_request_is_new_to_the_worker(release: str) -> None:
    """It is handed over with its whole table, whatever the step returned."""
    request = driver_of(release).request(Geometry(16, 4, 0, 0, 4, False), 32)
    parked(request)
    request.cache_own_partial_tail(40)
    assert family_of(request.situation(chunk(40, 44), 200)) == "promoted"

    step = request.apply(chunk(40, 44))

    assert (step.drawn, step.returned_new_columns) == (1, True)


@pytest.mark.parametrize("release", WITH_PARTIAL_HITS[-4:])
@pytest.mark.parametrize("num_behind", [0, 1])
def test_an_own_partial_tail_under_the_eagle_drop(release: str, num_behind: int) -> None:
    """The prompt that caches its tail at 40 tokens is longer then, and the tail is cached."""
    geometry = Geometry(16, 4, 2, 0, 4, True, 4, num_behind)
    request = driver_of(release).request(geometry, 32)
    request.apply(chunk(0, 40))

    request.cache_own_partial_tail(40)

    assert request.apply(chunk(40, 44)).drawn == 1


@pytest.mark.parametrize("release", RELEASES)
def test_drafts_that_were_rejected_make_the_estimate_negative(release: str) -> None:
    """Four positions from 95 reach a seventh block; without drafts the next step needs but six."""
    request = driver_of(release).request(PLAIN, 32)
    request.apply(chunk(0, 95))
    assert counts(request.apply(chunk(95, 99))) == (1, 1, 1, 9, True)
    assert family_of(request.situation(chunk(95, 96), 90)) == "drafts"

    step = request.apply(chunk(95, 96))

    assert counts(step) == (-1, -1, 0, 9, True)


@pytest.mark.parametrize("release", RELEASES)
def test_a_preempted_request_is_admitted_again(release: str) -> None:
    """It draws as at its first admission, with and without a hit."""
    request = driver_of(release).request(PLAIN, 32)
    request.apply(chunk(0, 40))
    request.preempt()
    assert request.observe().free == 31
    assert family_of(request.situation(chunk(0, 40), 200)) == "resumed"
    assert counts(request.apply(chunk(0, 40))) == (3, 3, 3, 5, True)
    assert family_of(request.situation(chunk(40, 44), 200)) == "running"
    request.preempt()

    step = request.apply(chunk(32, 100), num_hit_blocks=2, hit_is_evictable=True)

    assert counts(step) == (4, 4, 4, 9, True)
    assert request.finish()


@pytest.mark.parametrize("release", RELEASES[RELEASES.index("0.29.0") :])
def test_a_checkpoint_behind_a_hit(release: str) -> None:
    """A checkpoint takes a block of its own; 0.29.0 reserves one even where it has no column."""
    near, far = (
        driver_of(release)
        .request(Geometry(16, 4, 2, 1, 4, False), 32)
        .apply(chunk(32, end), num_hit_blocks=2)
        for end in (40, 100)
    )

    estimate = 4 if release == "0.29.0" else 3
    assert counts(near) == (estimate, estimate, 3, 5, True)
    assert counts(far) == (4, 4, 4, 9, True)
    assert (near.checkpoint_is_pending, far.checkpoint_is_pending) == (estimate == 4, True)
    assert far.pending_checkpoint == ((None, None) if release == "0.29.0" else (96, 5))


@pytest.mark.parametrize("release", WITH_PARTIAL_HITS)
def test_any_life_leaves_the_pool_as_it_was(release: str) -> None:
    """Hits, copies on write, cached tails and preemption are all undone at the end."""
    rng = random.Random(release)
    for _ in range(40):
        request = driver_of(release).request(PLAIN, 60)
        assert free_list(request) == list(range(1, 60))
        computed = 0
        for _ in range(rng.randint(1, 5)):
            if computed and rng.random() < 0.3:
                request.preempt()
            if not request.observe().table_length:
                computed = rng.randrange(0, 60, 4)
                num_blocks = -(-computed // 16)
                hit = {"num_hit_blocks": num_blocks, "hit_is_evictable": rng.random() < 0.5}
            else:
                hit = {}
                if computed % 16 and computed % 4 == 0:
                    request.cache_own_partial_tail(computed)
            end = computed + rng.choice([4, 8, 12, 17, 40])
            step = request.apply(chunk(computed, end), **hit)
            assert (step.raised, step.tail_is_held, step.no_block_is_twice) == (None, True, True)
            computed = end
        assert request.finish()


# ---- geometries of some releases -----------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES[RELEASES.index("0.30.0") :])
def test_the_alignment_of_hits_reaches_the_manager(release: str) -> None:
    """From 0.32.0 the checkpoint lies at a multiple of it, before at one of the hash block size."""
    positions = []
    for alignment in (4, 16):
        request = driver_of(release).request(Geometry(16, 4, 0, 1, 4, False, alignment), 32)
        positions.append(request.apply(chunk(0, 110)).checkpoint_position)

    assert positions == ([108, 96] if release >= "0.32.0" else [108, 108])


def test_tokens_behind_a_checkpoint_reach_the_pool() -> None:
    """A hash that looks ahead leaves as many tokens behind the checkpoint."""
    positions = [
        driver_of("0.33.0")
        .request(Geometry(16, 4, 0, 1, 4, False, 4, num_behind), 32)
        .apply(chunk(0, 110))
        .checkpoint_position
        for num_behind in (0, 1, 2, 3, 7)
    ]

    assert positions == [108, 108, 108, 104, 100]


@pytest.mark.parametrize(
    ("release", "geometry", "symbol"),
    [
        ("0.32.0", Geometry(16, 4, 0, 0, 4, False, 4, 2), "BlockPool.num_hash_lookahead_tokens"),
        ("0.28.0", Geometry(16, 4, 0, 0, 4, False, 16), "MambaManager.cache_hit_alignment_tokens"),
        ("0.29.0", Geometry(16, 4, 0, 0, 4, True), "MambaManager.drop_eagle_checkpoint_block"),
        ("0.28.0", SMALL, "MambaSpec.num_prefill_checkpoint_blocks"),
    ],
)
def test_a_size_that_a_release_does_not_know_is_refused(
    release: str, geometry: Geometry, symbol: str
) -> None:
    """What would be ignored is not claimed to have been tested."""
    with pytest.raises(BindingError, match=f"this release has no {symbol}"):
        driver_of(release).request(geometry, 32)


@pytest.mark.parametrize("release", ["0.24.0", "0.25.0"])
def test_releases_without_partial_blocks_say_so(release: str) -> None:
    """Before 0.26.0 neither a hit nor an own tail ends inside a block."""
    request = driver_of(release).request(PLAIN, 32)
    with pytest.raises(BindingError, match=r"\.py: .* no MambaManager._has_partial_local_hit"):
        request.apply(chunk(24, 40), num_hit_blocks=2)
    request = driver_of(release).request(PLAIN, 32)
    request.apply(chunk(0, 40))
    with pytest.raises(BindingError, match=r"\.py: .* no MambaManager._cache_partial_tail_block"):
        request.cache_own_partial_tail(40)


# ---- steps that cannot be brought about ----------------------------------------------------------


def test_what_only_an_admission_adopts_is_refused_later(drivers: dict[str, Driver]) -> None:
    """A running request has no new hit and no external tokens."""
    request = drivers["0.31.0"].request(PLAIN, 32)
    with pytest.raises(DriverError, match="without a table is not preempted"):
        request.preempt()
    with pytest.raises(DriverError, match="a hit of 32 tokens has not 3 blocks"):
        request.apply(chunk(32, 40), num_hit_blocks=3)
    with pytest.raises(DriverError, match="32 local and 8 external tokens are not 41"):
        request.apply(Call(48, 48, 41, 32), num_hit_blocks=2, num_external_tokens=8)
    request.apply(chunk(0, 40))

    with pytest.raises(DriverError, match="has a table"):
        request.apply(chunk(40, 48), num_hit_blocks=3)
    with pytest.raises(DriverError, match="has a table"):
        request.apply(Call(48, 48, 40, 32), num_external_tokens=8)


@pytest.mark.parametrize(
    ("geometry", "num_tokens", "reason"),
    [
        (PLAIN, 48, "a block ends there"),
        (PLAIN, 42, "no hash unit ends there"),
        (PLAIN, 24, "the request has no block in column 1"),
        (PLAIN, 84, "the request has no block in column 5"),
        (Geometry(16, 4, 2, 1, 4, False), 40, "caches the pending checkpoint instead"),
    ],
)
@pytest.mark.parametrize("release", ["0.31.0", "0.33.0"])
def test_a_tail_that_is_not_cached_says_why(
    release: str, geometry: Geometry, num_tokens: int, reason: str
) -> None:
    """The tree's own code decides; a step without its tail would be of another family."""
    request = driver_of(release).request(geometry, 32)
    request.apply(chunk(0, 40))

    with pytest.raises(DriverError, match=f"no partial tail is cached at {num_tokens} .*{reason}"):
        request.cache_own_partial_tail(num_tokens)


def test_a_tree_that_reads_more_of_a_request_is_named(edited: Callable[..., Path]) -> None:
    """What the stand-in for a request lacks is our error, not the step's."""
    root = edited(
        MANAGERS_FILE,
        "        hash_block_size = self.block_pool.hash_block_size\n        # Re-key",
        "        request.priority\n"
        "        hash_block_size = self.block_pool.hash_block_size\n        # Re-key",
    )
    request = core_driver(root).request(PLAIN, 32)
    request.apply(chunk(0, 40))

    with pytest.raises(DriverError, match=r"cache_blocks raised AttributeError: .*'priority'"):
        request.cache_own_partial_tail(40)


def test_a_renamed_method_ends_only_the_steps_that_need_it(edited: Callable[..., Path]) -> None:
    """The other steps of such a tree can still be driven."""
    driver = core_driver(edited(MANAGERS_FILE, "add_local_computed_blocks", "adopt_blocks"))

    assert driver.request(PLAIN, 32).apply(chunk(0, 40)).drawn == 3
    with pytest.raises(BindingError, match=r"no MambaManager\.add_local_computed_blocks here"):
        driver.request(PLAIN, 32).apply(chunk(32, 40), num_hit_blocks=2)


# ---- short pools --------------------------------------------------------------------------------


def test_a_pool_with_just_the_estimate_suffices(drivers: dict[str, Driver]) -> None:
    """The check passes on the estimate itself, so nothing more may be asked for."""
    request = drivers["0.31.0"].request(SMALL, 32)

    step = request.apply(FIRST, exactly_the_estimate=True)

    assert (step.raised, step.drawn, request.free_at_allocation) == (None, 5, 5)
    assert request.observe().free == 31 - 5


@pytest.mark.parametrize("release", RELEASES)
def test_a_pool_with_just_the_estimate_holds_an_evictable_hit(release: str) -> None:
    """The hit is one of the blocks that are free, and none that is taken to make the pool short."""
    request = driver_of(release).request(PLAIN, 32)

    step = request.apply(
        chunk(32, 100), num_hit_blocks=2, hit_is_evictable=True, exactly_the_estimate=True
    )

    assert (step.raised, step.drawn, request.free_at_allocation) == (None, 4, 4)
    assert request.observe().table[1] == 1
    assert request.finish()


def test_a_hit_takes_a_place_in_the_pool(drivers: dict[str, Driver]) -> None:
    """Too small a pool for the hit, or for as few free blocks as asked, is our error."""
    with pytest.raises(LimitError, match="no free block for the hit"):
        drivers["0.31.0"].request(PLAIN, 1).apply(chunk(32, 40), num_hit_blocks=2)
    with pytest.raises(LimitError, match="0 blocks are to be free, the hit alone is 1"):
        drivers["0.31.0"].request(PLAIN, 32).apply(
            chunk(32, 40), num_hit_blocks=2, hit_is_evictable=True, free_blocks=0
        )


def test_a_pool_one_block_short_raises(drivers: dict[str, Driver]) -> None:
    """What the pool raises is part of the step, with what was seen before it."""
    request = drivers["0.31.0"].request(SMALL, 32)

    step = request.apply(FIRST, free_blocks=4)

    assert (step.dry_run, step.estimate, step.drawn, step.raised) == (5, 5, 0, "ValueError")
    assert "Cannot get 5 free blocks" in str(request.exception)
    assert request.observe().free == 31


def test_an_exception_before_the_estimate_leaves_it_open(edited: Callable[..., Path]) -> None:
    """What a step did not reach is None, never 0."""
    driver = core_driver(
        edited(MANAGERS_FILE, "num_tokens = num_tokens_main_model\n", "num_tokens = None\n", 1)
    )
    request = driver.request(SMALL, 32)

    step = request.apply(FIRST)

    assert (step.dry_run, step.estimate, step.drawn) == (None, None, None)
    assert step.raised == "TypeError"
    assert request.free_at_allocation is None


@pytest.mark.parametrize("free_blocks", [32, 10**6])
def test_more_free_blocks_than_the_pool_has_is_our_error(
    drivers: dict[str, Driver], free_blocks: int
) -> None:
    """A pool that cannot be arranged as asked is not reported as vLLM's doing."""
    with pytest.raises(LimitError, match="31 free blocks"):
        drivers["0.31.0"].request(SMALL, 32).apply(FIRST, free_blocks=free_blocks)


def test_sizes_out_of_reach_are_refused(drivers: dict[str, Driver]) -> None:
    """A scenario from outside cannot make the driver fill the memory."""
    with pytest.raises(LimitError, match="blocks"):
        drivers["0.31.0"].request(SMALL, MAX_POOL_BLOCKS + 1)
    tokens = 16 * (MAX_TABLE_COLUMNS + 1)
    with pytest.raises(LimitError, match="columns"):
        drivers["0.31.0"].request(SMALL, 32).apply(Call(tokens, tokens, 0, 0))


# ---- the removal of skipped blocks ---------------------------------------------------------------


def test_what_the_removal_takes_is_seen(drivers: dict[str, Driver]) -> None:
    """The state before the last goes, which is no part of what the step starts from."""
    request = drivers["0.31.0"].request(Geometry(16, 4, 2, 0, 4, False), 64)

    steps = [request.apply(Call(end, end, end - 40, end - 40)) for end in (40, 80, 120, 160)]

    assert [step.removed_blocks for step in steps] == [False, False, True, True]
    assert all(step.removal_kept_state for step in steps)


@pytest.mark.parametrize("index", [-1, -2, -3])
def test_a_removal_that_takes_the_state_is_seen(edited: Callable[..., Path], index: int) -> None:
    """Neither the running state nor a speculative block may go before the step."""
    marker = "request_id, processed_computed_tokens, num_prompt_tokens\n        )\n"
    taken = f"(self.req_to_blocks.get(request_id) or [0] * 9)[{index}] = self._null_block"
    root = edited(MANAGERS_FILE, marker, f"{marker}        {taken}\n")
    request = core_driver(root).request(Geometry(16, 4, 2, 0, 4, False), 64)

    first, second = (request.apply(call) for call in (FIRST, Call(104, 104, 100, 100)))

    assert (first.removal_kept_state, first.removed_blocks) == (True, False)
    assert (second.removal_kept_state, second.removed_blocks) == (False, True)


# ---- the full-sequence gate ----------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
def test_the_gate_is_asked_for_the_whole_request(release: str) -> None:
    """What it is told is the dry run for all tokens, and the step goes on as without it."""
    geometry = Geometry(16, 4, 2, 0, 4, False)
    hit = {"num_hit_blocks": 2, "hit_is_evictable": True}
    asked, whole, plain = (driver_of(release).request(geometry, 64) for _ in range(3))

    step = asked.apply(Call(40, 40, 32, 32), **hit, num_request_tokens=200)

    assert step.gate == whole.apply(Call(200, 200, 32, 32), **hit).dry_run
    assert step == replace(plain.apply(Call(40, 40, 32, 32), **hit), gate=step.gate)
    assert asked.observe() == plain.observe()


def test_nobody_asks_the_gate_unless_told_to(drivers: dict[str, Driver]) -> None:
    """A situation says whether the gate is asked, and a step without it has no number."""
    request = drivers["0.31.0"].request(SMALL, 32)

    assert request.situation(FIRST, 200).num_request_tokens == 0
    assert request.situation(FIRST, 200, num_request_tokens=200).num_request_tokens == 200
    assert request.apply(FIRST).gate == 0


def test_an_exception_at_the_gate_leaves_everything_open(edited: Callable[..., Path]) -> None:
    """The gate comes before the dry run, the estimate and the allocation."""
    align = "num_tokens = num_tokens_main_model\n"
    root = edited(MANAGERS_FILE, align, f"assert num_tokens < 200\n            {align}", 1)

    step = core_driver(root).request(SMALL, 32).apply(FIRST, num_request_tokens=200)

    assert (step.raised, step.gate, step.dry_run) == ("AssertionError", None, None)


# ---- dry runs that leave a trace ----------------------------------------------------------------


@pytest.mark.parametrize(
    "trace",
    [
        "self._checkpoints[request_id] = (0, 0)",
        "self.block_pool.get_new_blocks(1)",
        "self.block_pool.touch(self.block_pool.blocks[9:10])",
        "self.block_pool.free_blocks(self.block_pool.get_new_blocks(2)[::-1])",
        "self.block_pool.cached_block_hash_to_block.insert(b'h', self.block_pool.blocks[3])",
        "self.req_to_blocks[request_id].append(self._null_block)",
        "self.req_to_blocks['another'].append(self._null_block)",
    ],
)
def test_a_dry_run_that_leaves_a_trace_is_seen(edited: Callable[..., Path], trace: str) -> None:
    """Pool, order of the free list, hash map, tables and checkpoints are all watched."""
    marker = "            if not apply_admission_cap:\n"
    root = edited(
        MANAGERS_FILE, marker, f"            if apply_admission_cap:\n{' ' * 16}{trace}\n{marker}"
    )

    step = core_driver(root).request(SMALL, 32).apply(FIRST)

    assert step.dry_run_left_state is False


def test_an_empty_table_is_no_trace(drivers: dict[str, Driver]) -> None:
    """Looking a request up makes an empty table, which equals an absent one."""
    request = drivers["0.31.0"].request(SMALL, 32)

    assert request.apply(FIRST).dry_run_left_state is True
    assert request.apply(Call(116, 116, 100, 100)).dry_run_left_state is True


def test_a_dry_run_that_is_not_watched_says_so(drivers: dict[str, Driver]) -> None:
    """Nothing is claimed of what was not looked at."""
    step = drivers["0.31.0"].request(SMALL, 32).apply(FIRST, watch_dry_run=False)

    assert step.dry_run_left_state is None


# ---- pools are used again -----------------------------------------------------------------------


def test_a_finished_request_leaves_the_pool_as_it_found_it(drivers: dict[str, Driver]) -> None:
    """Whatever ran on a pool before, the next request sees the free list of a new one."""
    rng = random.Random(57050)
    driver = drivers["0.31.0"]
    for _ in range(200):
        request = driver.request(SMALL, 40)
        assert free_list(request) == list(range(1, 40))
        computed = 0
        for _ in range(rng.randint(1, 6)):
            end = computed + rng.randint(1, 80)
            exactly = rng.random() < 0.3
            step = request.apply(Call(end, end, computed, computed), exactly_the_estimate=exactly)
            assert step.raised is None
            computed = end
        assert request.finish()


def test_requests_of_one_size_do_not_share_a_pool(drivers: dict[str, Driver]) -> None:
    """Only a finished request gives its pool away."""
    first, second = (drivers["0.31.0"].request(SMALL, 48) for _ in range(2))

    first.apply(FIRST)

    assert second.observe().free == 47


def test_a_pool_that_lost_a_block_is_not_used_again(drivers: dict[str, Driver]) -> None:
    """A leak is reported, and does not reach the next request."""
    request = drivers["0.31.0"].request(SMALL, 50)
    request.apply(FIRST)
    request.pool.get_new_blocks(1)

    assert request.finish() is False
    assert free_list(drivers["0.31.0"].request(SMALL, 50)) == list(range(1, 50))


# ---- trees that cannot be driven ----------------------------------------------------------------

UNDRIVABLE = [
    (
        MANAGERS_FILE,
        "get_num_blocks_to_allocate",
        "count_blocks",
        "no MambaManager.get_num_blocks_to_allocate here (renamed?)",
    ),
    (
        MANAGERS_FILE,
        "def allocate_new_blocks",
        "def take_blocks",
        "no MambaManager.allocate_new_blocks here (renamed?)",
    ),
    (MANAGERS_FILE, "MambaManager", "StateManager", "no MambaManager here (renamed?)"),
    (POOL_FILE, "def get_new_blocks", "def draw", "no BlockPool.get_new_blocks here (renamed?)"),
    (
        MANAGERS_FILE,
        "apply_admission_cap",
        "is_dry_run",
        "MambaManager.get_num_blocks_to_allocate takes no apply_admission_cap (renamed?)",
    ),
    (
        MANAGERS_FILE,
        "num_tokens_main_model: int,\n        apply_admission_cap",
        "num_tokens_main_model: int,\n        priority: int,\n        apply_admission_cap",
        "MambaManager.get_num_blocks_to_allocate requires priority, which the driver does not know",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "message"), UNDRIVABLE)
def test_a_tree_that_lacks_a_symbol_is_named(
    edited: Callable[..., Path], file: str, old: str, new: str, message: str
) -> None:
    """A renamed method is an error with file and symbol; the base class's is no substitute."""
    root = edited(file, old, new)

    with pytest.raises(BindingError) as refused:
        core_driver(root)

    assert str(root / file) in str(refused.value)
    assert str(refused.value).endswith(message)
    assert "\n" not in str(refused.value)


def test_a_folder_without_a_core_is_a_binding_error(tmp_path: Path) -> None:
    """What the loader refuses is refused in the same way."""
    with pytest.raises(BindingError, match="no KV-cache core here"):
        core_driver(tmp_path)


@pytest.mark.parametrize(
    ("geometry", "old", "symbol"),
    [
        (SMALL, "num_prefill_checkpoint_blocks", "MambaSpec.num_prefill_checkpoint_blocks"),
        (
            Geometry(16, 4, 0, 0, 4, True),
            "drop_eagle_checkpoint_block",
            "MambaManager.drop_eagle_checkpoint_block",
        ),
    ],
)
def test_a_feature_that_a_release_lacks_is_not_pretended(
    edited: Callable[..., Path], geometry: Geometry, old: str, symbol: str
) -> None:
    """A geometry that the release cannot have is refused; the others still run."""
    driver = core_driver(edited(None, old, "renamed"))

    with pytest.raises(BindingError, match=f"this release has no {symbol}"):
        driver.request(geometry, 32)
    plain = driver.request(Geometry(16, 4, 0, 0, 4, False), 32)
    assert plain.apply(FIRST).drawn == 1


def test_core_code_that_needs_more_than_the_core_is_our_error(edited: Callable[..., Path]) -> None:
    """A placeholder that is called says that the core tier cannot run it, not that vLLM raised."""
    root = edited(
        MANAGERS_FILE,
        "            num_tokens = num_tokens_main_model\n",
        "            num_tokens = num_tokens_main_model\n            MEDIUM_CPU()\n",
        1,
    )

    with pytest.raises(BindingError, match="outside the core"):
        core_driver(root).request(SMALL, 32).apply(FIRST)
