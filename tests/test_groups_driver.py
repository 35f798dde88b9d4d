from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.driver import BindingError, Driver, DriverError, LimitError, core_driver
from conformance.groups import GroupsUnderTest
from conformance.replay import Outcome, replay, replay_in
from conformance.scenario import Prediction, Scenario, ScenarioStep, dumps, loads
from conformance.steps import (
    EarlierStepError,
    applied,
    chunk,
    hit,
    last_of,
    load,
    own_tail,
    park,
    preempted,
)
from conformance.targets import resolve
from models.loader import CORE_MODULES
from spec.families import family_of
from spec.vocabulary import Call, Geometry, Step

RELEASES = tuple(f"0.{minor}.0" for minor in range(24, 34))
NEWEST = RELEASES[-1]
#: Which of them are driven here; each shape of the coordinator's calls is one.
SHOWN = ("0.24.0", "0.26.0", "0.29.0", "0.31.0", NEWEST)

KV_CACHE_MANAGER_FILE = "vllm/v1/core/kv_cache_manager.py"
COORDINATOR_FILE = "vllm/v1/core/kv_cache_coordinator.py"
REQUEST_FILE = "vllm/v1/request.py"

#: Blocks of 16 tokens, hash units of 4, one speculative block.
PLAIN = Geometry(16, 4, 1, 0, 4, False)
WITH_CHECKPOINT = replace(PLAIN, num_prefill_checkpoint_blocks=1)

#: Steps of each family, and the release from which they can be brought about; then blocks of the
#: full-attention group, and blocks of one Mamba group, that are estimated and drawn.
#:
#: 100 tokens are 7 blocks of full attention. A Mamba group takes one for its running state, one for
#: a draft (S = 1) when the request is admitted, and one for each copy or checkpoint.
ROWS: dict[str, tuple[str, tuple[ScenarioStep, ...], Geometry, int, int, int, int]] = {
    "first": ("0.24.0", (chunk(0, 100),), PLAIN, 7, 7, 2, 2),
    "first+checkpoint": ("0.30.0", (chunk(0, 100),), WITH_CHECKPOINT, 7, 7, 3, 3),
    # Two of the seven blocks are there.
    "hit-full": ("0.24.0", (hit(32, 100, blocks=2),), PLAIN, 5, 5, 2, 2),
    # Three are there, of which the last, half full, is copied in every group.
    "hit-partial": ("0.26.0", (hit(40, 100, blocks=3),), PLAIN, 5, 5, 3, 3),
    # The Mamba groups draw a block for the state that the connector brings; nobody estimated it.
    "external-sync": ("0.24.0", (load(external=40, end=100),), PLAIN, 7, 7, 2, 3),
    # Full attention found 32 tokens more than the Mamba groups did.
    "external-sync behind a hit": (
        "0.24.0",
        (load(external=40, end=100, local=32),),
        PLAIN,
        *(5, 5, 2, 3),
    ),
    "external-async": ("0.24.0", (park(external=40),), PLAIN, 3, 3, 2, 2),
    "promoted": ("0.24.0", (park(external=40), chunk(40, 100)), PLAIN, 4, 4, 1, 1),
    "running": ("0.24.0", (chunk(0, 40), chunk(40, 100)), PLAIN, 4, 4, 1, 1),
    # 0.31.0 draws one more, since it takes the block for drafts anew.
    "checkpoint": ("0.32.0", (chunk(0, 40), chunk(40, 100)), WITH_CHECKPOINT, 4, 4, 2, 2),
    # Full attention goes on writing to its block; a Mamba group moves its state away.
    "own-tail": ("0.26.0", (chunk(0, 40), own_tail(chunk(40, 100))), PLAIN, 4, 4, 2, 2),
    # Rejected drafts left each Mamba table one block too long, which counts as one less to take.
    "drafts": (
        "0.24.0",
        (chunk(0, 95), chunk(95, 99), replace(chunk(95, 96), prefill_length=90)),
        PLAIN,
        *(0, 0, -1, 0),
    ),
    "resumed": ("0.24.0", (chunk(0, 40), preempted(hit(32, 100, blocks=2))), PLAIN, 5, 5, 2, 2),
}


@functools.cache
def driver_of(release: str) -> Driver:
    return core_driver(resolve(f"vllm=={release}").root)


def last(
    release: str, geometry: Geometry, *steps: ScenarioStep, groups: int = 1, pool: int = 64
) -> Step:
    """What the last step showed, on a pool of `pool` blocks."""
    request = driver_of(release).request(geometry, pool, groups)
    return last_of(request, steps, watch_dry_run=True)


def counts(step: Step) -> tuple[int, int, int]:
    return step.dry_run, step.estimate, step.drawn


# ---- what is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("release", "name"),
    [(release, name) for name, row in ROWS.items() for release in SHOWN if release >= row[0]],
)
def test_a_step_of_every_family(release: str, name: str, groups: int) -> None:
    """Estimated and drawn are the sums over the groups."""
    _, steps, geometry, *numbers = ROWS[name]
    estimated_attention, drawn_attention, estimated_mamba, drawn_mamba = numbers
    request = driver_of(release).request(geometry, 64, groups)

    shown = [*applied(request, steps)][-1]

    step, estimate = shown.step, estimated_attention + groups * estimated_mamba
    drawn = drawn_attention + groups * drawn_mamba
    assert family_of(shown.situation) == re.split("[+ ]", name)[0]
    assert counts(step) == (estimate, estimate, drawn)
    assert (step.dry_run_left_state, step.raised, step.refused) == (True, None, False)
    assert (step.tail_is_held, step.no_block_is_twice) == (True, True)
    assert (step.returned_new_columns, step.removal_kept_state) == (True, True)
    # A chunk of 100 tokens ends in column 6, with one column for drafts behind it.
    assert step.table_length == (4 if name == "external-async" else 8)
    assert request.free_at_allocation == request.observe().free + drawn
    assert request.finish()


@pytest.mark.parametrize("release", SHOWN)
def test_evictable_hits_of_all_groups_leave_the_free_list(release: str) -> None:
    """Blocks that nobody references are taken from the free ones, whichever group has hit them."""
    step = hit(64, 100, blocks=4)
    kinds = {
        "nobody": step,
        "attention": replace(step, num_evictable_attention_hits=3),
        "first": replace(step, hit_is_evictable=True),
        "second": replace(step, other_hits_are_evictable=True),
        "all": hit(64, 100, blocks=4, evictable=True, attention_evictable=4, others_evictable=True),
    }

    found = {name: counts(last(release, PLAIN, kind, groups=2)) for name, kind in kinds.items()}

    # Three of seven blocks of full attention, and two in each Mamba group, are new.
    expected = {"nobody": 7, "attention": 10, "first": 8, "second": 8, "all": 13}
    assert found == {name: (number,) * 3 for name, number in expected.items()}


@pytest.mark.parametrize("release", SHOWN)
def test_a_hit_that_is_cached_in_the_same_step_puts_the_step_off(release: str) -> None:
    """A Mamba group asks for more than the pool has, so that allocate_slots refuses the sum."""
    request = driver_of(release).request(PLAIN, 64, 2)

    seen = last_of(request, [hit(32, 100, blocks=2, of_this_step=True)])

    assert (seen.deferred, seen.refused, seen.drawn, seen.table_length) == (True, False, 0, 0)
    assert seen.estimate == seen.dry_run > 64
    assert request.observe().held == 0


def test_a_pool_with_just_the_estimate_holds_the_hit() -> None:
    """The blocks of an evictable hit are among the free ones that the step finds."""
    step = hit(64, 100, blocks=4, evictable=True, attention_evictable=4, others_evictable=True)
    request = driver_of(NEWEST).request(PLAIN, 64, 2)

    seen = last_of(request, [step], exactly_the_estimate=True)

    assert (seen.drawn, request.free_at_allocation, seen.raised) == (13, 13, None)


def test_full_attention_counts_the_lookahead_and_the_mamba_groups_do_not() -> None:
    """Drafts behind the 96th token take a seventh block of full attention."""
    step = chunk(0, 96, lookahead=4)

    for groups in (1, 2):
        assert counts(last(NEWEST, PLAIN, step, groups=groups)) == (7 + 2 * groups,) * 3


def test_what_one_group_has_too_much_hides_what_another_needs() -> None:
    """Estimates are added up: the table that is too long pays for a block of full attention."""
    steps = chunk(0, 95), chunk(95, 99), chunk(95, 96, lookahead=20)

    seen = last(NEWEST, PLAIN, *steps)

    # 116 tokens are 8 blocks of full attention, one more than before.
    assert (seen.estimate, seen.drawn) == (0, 1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("release", SHOWN)
def test_the_gate_asks_for_the_whole_request(release: str, groups: int) -> None:
    """200 tokens are 13 blocks of full attention, of which the hit holds two."""
    step = hit(
        32, 100, blocks=2, evictable=True, attention_evictable=1, others_evictable=True, gate=200
    )

    seen = last(release, PLAIN, step, groups=groups)

    assert seen.gate == (13 - 2 + 1) + groups * (2 + 1)
    assert seen.estimate == seen.drawn == (7 - 2 + 1) + groups * (2 + 1)


@pytest.mark.parametrize("release", ["0.31.0", NEWEST])
def test_under_sparse_retention_only_the_end_of_the_prefill_is_checkpointed(release: str) -> None:
    """The coordinator passes the prefill's end on; under dense retention it does not."""
    whole = chunk(0, 100, prefill_end=100)
    part = replace(chunk(0, 100, prefill_end=200), prefill_length=200)

    found = [last(release, WITH_CHECKPOINT, step, groups=2) for step in (whole, part)]
    dense = last(release, WITH_CHECKPOINT, replace(chunk(0, 100), prefill_length=200), groups=2)

    assert [counts(step) for step in (*found, dense)] == [(13,) * 3, (11,) * 3, (13,) * 3]
    assert [step.pending_checkpoint for step in (*found, dense)] == [(96, 5), None, (96, 5)]


@pytest.mark.parametrize(
    ("geometry", "position"),
    [
        (WITH_CHECKPOINT, 108),
        (replace(WITH_CHECKPOINT, drop_eagle_checkpoint_block=True), 104),
        (replace(WITH_CHECKPOINT, num_tokens_behind_checkpoint=7), 100),
        (replace(WITH_CHECKPOINT, cache_hit_alignment_tokens=16), 96),
    ],
    ids=["plain", "eagle-drop", "hash-lookahead", "whole-blocks"],
)
def test_the_sizes_reach_every_mamba_group(geometry: Geometry, position: int) -> None:
    """Of 110 tokens the checkpoint lies where each size puts it."""
    request = driver_of(NEWEST).request(geometry, 64, 2)

    step = request.apply(chunk(0, 110).call)

    managers = groups_of(request).kv_cache_manager.coordinator.single_type_managers[1:]
    assert step.pending_checkpoint == (position, 5)
    assert [m._checkpoints["request"] for m in managers] == [(position, 5)] * 2


def groups_of(request: object) -> GroupsUnderTest:
    assert isinstance(request, GroupsUnderTest)
    return request


def test_the_situation_says_what_the_groups_are() -> None:
    """Both kinds of table, and what is evictable of the hits, decide what a step is."""
    request = driver_of(NEWEST).request(PLAIN, 64, 2)
    step = hit(32, 100, blocks=2, attention_evictable=1, others_evictable=True)

    shown = list(applied(request, [step, chunk(100, 110)]))

    first, second = (one.situation for one in shown)
    assert (first.num_mamba_groups, first.attention_table_length) == (2, 0)
    assert (first.num_evictable_attention_hits, first.other_hits_are_evictable) == (1, True)
    assert (second.attention_table_length, second.table_length) == (7, 8)


def test_a_pool_of_many_blocks_is_whole_again() -> None:
    """A finished request leaves no block, no hash and no reference behind."""
    request = driver_of(NEWEST).request(PLAIN, 2_000, 2)
    steps = [
        hit(424, 1_000, blocks=27, evictable=True, attention_evictable=20, others_evictable=True),
        chunk(1_000, 1_004),
        own_tail(chunk(1_004, 1_100)),
        preempted(load(external=100, end=900, local=400, blocks=25)),
    ]

    raised = [shown.step.raised for shown in applied(request, steps)]

    assert raised == [None] * 4
    assert request.finish()
    assert request.pool.get_num_free_blocks() == 1_999


# ---- the check -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpu_blocks", "raised", "refused", "drawn"),
    [(8, None, True, 0), (9, "ValueError", False, 8), (10, None, False, 9)],
)
def test_the_check_lets_a_step_through_that_runs_dry(
    num_gpu_blocks: int, raised: str | None, refused: bool, drawn: int
) -> None:
    """Seven blocks and one are estimated, and a ninth is taken: what a connector brings."""
    geometry = replace(PLAIN, num_speculative_blocks=0)
    request = driver_of(NEWEST).request(geometry, num_gpu_blocks, 1)

    step = last_of(request, [load(external=40, end=100, gate=100)])

    assert (step.gate, step.estimate) == (8, 8)
    assert (step.raised, step.refused, step.drawn) == (raised, refused, drawn)
    if raised:
        assert str(request.exception) == "Cannot get 1 free blocks from the pool"


@pytest.mark.parametrize(("num_gpu_blocks", "refused"), [(23, True), (24, False)])
def test_a_waiting_request_is_refused_where_the_whole_of_it_does_not_fit(
    num_gpu_blocks: int, refused: bool
) -> None:
    """331 tokens are 21 blocks and a state, though the first chunk takes two of them."""
    geometry = replace(PLAIN, num_speculative_blocks=0)
    step = chunk(0, 16, gate=331)

    whole, part = (
        last_of(
            driver_of(NEWEST).request(geometry, num_gpu_blocks - must_fit, 1),
            [step],
            full_sequence_must_fit=must_fit,
        )
        for must_fit in (True, False)
    )

    assert (whole.gate, whole.estimate) == (part.gate, part.estimate) == (22, 2)
    assert (whole.refused, whole.drawn) == (refused, 0 if refused else 2)
    assert (part.refused, part.drawn) == (False, 2)


def test_a_refused_step_does_nothing() -> None:
    """It can be asked again, and then draws what it would have."""
    request = driver_of(NEWEST).request(PLAIN, 64, 2)
    step = load(external=40, end=100).call
    refused = request.apply(step, num_external_tokens=40, free_blocks=10)
    table = request.observe().table

    again = request.apply(step, num_external_tokens=40, free_blocks=13)

    assert (refused.refused, refused.drawn, refused.estimate, table) == (True, 0, 11, ())
    assert (again.refused, again.drawn, again.raised) == (False, 13, None)
    assert request.finish()


def test_nothing_is_known_behind_a_step_that_was_refused() -> None:
    """A step that was to make the state for another did not."""
    request = driver_of(NEWEST).request(PLAIN, 8, 1)
    steps = [chunk(0, 100), chunk(100, 110)]

    assert len(list(applied(request, steps))) == 1
    with pytest.raises(EarlierStepError, match="was refused"):
        last_of(driver_of(NEWEST).request(PLAIN, 8, 1), steps)


# ---- replay --------------------------------------------------------------------------------------

RUNS_DRY = Scenario(
    name="a-connector-brings-the-first-tokens",
    manager="coordinator",
    geometry=replace(PLAIN, num_speculative_blocks=0),
    num_gpu_blocks=64,
    steps=(load(external=40, end=100),),
    family="external-sync",
    theorem="allocation-succeeds",
    predicted={NEWEST: Prediction(8, 8, 9, 7, None, ("no-undercount", "exact-estimate"))},
    num_mamba_groups=1,
)


def scenarios_of(release: str) -> list[Scenario]:
    return [
        replace(
            RUNS_DRY,
            name=f"groups-{groups}-step-{number}",
            steps=steps,
            geometry=geometry,
            family=family_name,
            theorem=None,
            predicted={},
            num_mamba_groups=groups,
        )
        for groups in (1, 2)
        for number, (name, (since, steps, geometry, *_)) in enumerate(ROWS.items())
        for family_name in [re.split("[+ ]", name)[0]]
        if release >= since
    ]


def test_a_counterexample_is_reproduced() -> None:
    """On a pool of just the estimate the real `allocate_slots` raises."""
    result = replay(RUNS_DRY, driver_of(NEWEST), NEWEST)

    assert (result.outcome, result.differences) == (Outcome.REPRODUCED, ())
    assert result.theorem_holds is False
    assert result.steps[-1].step.raised == "ValueError"


def test_a_refused_step_is_not_what_was_predicted() -> None:
    """Theorems say nothing of it, but those about the dry run, which was made."""
    scenario = replace(RUNS_DRY, num_gpu_blocks=8, theorem="no-undercount")

    result = replay(scenario, driver_of(NEWEST), NEWEST)

    assert result.outcome is Outcome.DISAGREES
    assert result.detail == "refused: the pool is too small, the estimate is 8"
    assert (result.theorem_holds, result.violated) == (None, ())
    early = replace(scenario, steps=(*scenario.steps, chunk(100, 101)))
    assert replay(early, driver_of(NEWEST), NEWEST).detail == (
        "step 1 (external tokens) already was refused"
    )
    unknown = replay(replace(scenario, predicted={}), driver_of(NEWEST), NEWEST)
    assert unknown.detail.endswith("table 0, was refused")


def test_scenarios_of_several_groups_are_read_as_they_were_written() -> None:
    """No step here is one that a file may not hold."""
    for scenario in scenarios_of(NEWEST):
        assert loads(dumps(scenario), name=scenario.name) == [scenario]


@pytest.mark.parametrize("release", ["0.24.0", "0.29.0", NEWEST])
def test_both_tiers_show_the_same(release: str) -> None:
    """What is imported for real counts as what runs under placeholders."""
    pytest.importorskip("torch")
    root, scenarios = resolve(f"vllm=={release}").root, scenarios_of(release)

    core, real = (replay_in(root, tier, scenarios, target=release) for tier in ("core", "vllm"))

    assert [result.outcome for result in real] == [Outcome.NOT_PREDICTED] * len(scenarios)
    assert real == core


# ---- what cannot be driven -----------------------------------------------------------------------


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copies the core of the newest release and replaces a text in one of its files."""

    def edit(file: str, old: str, new: str) -> Path:
        root = resolve(f"vllm=={NEWEST}").root
        for relative in (Path(module.replace(".", "/") + ".py") for module in CORE_MODULES):
            (tmp_path / relative).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / relative).write_bytes((root / relative).read_bytes())
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))
        return tmp_path

    return edit


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (KV_CACHE_MANAGER_FILE, "class KVCacheManager", "class Other", "no KVCacheManager here"),
        (KV_CACHE_MANAGER_FILE, "allocate_slots", "other", "no KVCacheManager.allocate_slots here"),
        (
            KV_CACHE_MANAGER_FILE,
            "num_external_computed_tokens: int = 0",
            "other: int = 0",
            "KVCacheManager.allocate_slots takes no num_external_computed_tokens",
        ),
        (
            KV_CACHE_MANAGER_FILE,
            "        hash_block_size: int,\n",
            "        hash_block_size: int,\n        novelty: int,\n",
            "KVCacheManager requires novelty, which the driver does not know",
        ),
        (KV_CACHE_MANAGER_FILE, "self.coordinator", "self.c", "no KVCacheManager.coordinator here"),
        (
            KV_CACHE_MANAGER_FILE,
            "self.coordinator.block_pool",
            "self.coordinator.novelty",
            "KVCacheManager: AttributeError: 'HybridKVCacheCoordinator' object has no attribute",
        ),
        (
            COORDINATOR_FILE,
            "self.retention_interval",
            "self.retained",
            "no KVCacheCoordinator.retention_interval here",
        ),
        (
            COORDINATOR_FILE,
            "def remove_skipped_blocks",
            "def other",
            "no KVCacheCoordinator.remove_skipped_blocks here",
        ),
        (REQUEST_FILE, "PREEMPTED", "OTHER", "no RequestStatus.PREEMPTED here"),
        (COORDINATOR_FILE, "import", "import import", "SyntaxError"),
    ],
)
def test_a_symbol_that_is_missing_is_named(
    edited: Callable[..., Path], file: str, old: str, new: str, message: str
) -> None:
    """One line says which file lacks what; the manager by itself can still be driven."""
    driver = core_driver(edited(file, old, new))

    assert driver.request(PLAIN, 64).apply(chunk(0, 100).call).drawn == 2
    for _ in range(2):
        with pytest.raises(BindingError, match=re.escape(message)) as caught:
            driver.request(PLAIN, 64, 1)
        assert Path(file).name in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("release", "geometry", "symbol"),
    [
        ("0.24.0", WITH_CHECKPOINT, "MambaSpec.num_prefill_checkpoint_blocks"),
        (
            "0.32.0",
            replace(PLAIN, num_tokens_behind_checkpoint=2),
            "KVCacheManager.num_hash_lookahead_tokens",
        ),
        (
            "0.29.0",
            replace(PLAIN, drop_eagle_checkpoint_block=True),
            "MambaManager.drop_eagle_checkpoint_block",
        ),
    ],
)
def test_a_size_that_a_release_does_not_know_is_refused(
    release: str, geometry: Geometry, symbol: str
) -> None:
    """What would be ignored is not claimed to have been tested."""
    with pytest.raises(BindingError, match=f"this release has no {symbol}"):
        driver_of(release).request(geometry, 64, 2)


def test_a_sum_that_is_let_pass_although_a_group_waits_is_named(
    edited: Callable[..., Path],
) -> None:
    """What puts the step off is that the pool has not what is asked for."""
    root = edited(KV_CACHE_MANAGER_FILE, "required_blocks > available_blocks", "False")
    request = core_driver(root).request(PLAIN, 64, 1)

    with pytest.raises(DriverError, match="allocate_slots lets pass what is told"):
        last_of(request, [hit(32, 100, blocks=2, of_this_step=True)])


def test_what_allocate_slots_reads_of_a_request_is_known(edited: Callable[..., Path]) -> None:
    """Anything else is no exception of the step."""
    old = "prefill_end = max(request.num_prompt_tokens,"
    root = edited(KV_CACHE_MANAGER_FILE, old, f"request.novelty\n        {old}")

    with pytest.raises(BindingError, match=r"reads Request\.novelty, which the driver does not"):
        core_driver(root).request(PLAIN, 64, 1).apply(chunk(0, 100).call)


def test_a_check_of_another_estimate_is_noticed(edited: Callable[..., Path]) -> None:
    """What is recorded as the estimate is what `allocate_slots` compares with the free blocks."""
    old = "            num_tokens=num_tokens_need_slot,\n"
    root = edited(KV_CACHE_MANAGER_FILE, old, old.replace(",\n", " + 16,\n"))

    with pytest.raises(DriverError, match=r"allocate_slots estimated \[10\], .* gave 9"):
        core_driver(root).request(PLAIN, 64, 1).apply(chunk(0, 100).call)


def test_a_dry_run_that_leaves_a_trace_in_any_group_is_seen(edited: Callable[..., Path]) -> None:
    """All managers' state is watched."""
    file = "vllm/v1/core/single_type_kv_cache_manager.py"
    line = "        num_required_blocks = cdiv(num_tokens, self.block_size)\n        if"
    trace = line.replace("        if", "        self.num_cached_block['other'] = 1\n        if")
    request = core_driver(edited(file, line, trace)).request(PLAIN, 64, 1)

    # The full-attention group's estimator is the one that the base class has.
    assert request.apply(chunk(0, 100).call).dry_run_left_state is False


@pytest.mark.parametrize(
    ("call", "kind", "reason"),
    [
        (Call(100, 100, 32, 32), {}, "no hit holds the 32 local tokens"),
        (
            Call(100, 100, 42, 42),
            {"num_hit_blocks": 3},
            "a hit of 42 tokens is not a multiple of hash_block_size",
        ),
        (
            Call(100, 100, 32, 32),
            {"num_hit_blocks": 2, "num_evictable_attention_hits": 3},
            "3 evictable blocks of 2 of the full-attention hit",
        ),
        (Call(100, 100, 40, 0), {}, "0 local and 0 external tokens are not 40"),
        (Call(100, 100, 32, 32), {"num_hit_blocks": 3}, "a hit of 32 tokens has not 3 blocks"),
        (
            Call(100, 100, 0, 0, 100),
            {"num_request_tokens": 200},
            "prefill_end 100: the request prefills 199 tokens",
        ),
    ],
)
def test_what_no_caller_can_ask_is_refused(call: Call, kind: dict[str, int], reason: str) -> None:
    """Arguments that contradict each other reach nobody."""
    with pytest.raises(DriverError, match=reason):
        driver_of(NEWEST).request(PLAIN, 64, 2).apply(call, **kind)


def test_a_pool_without_room_for_the_hit_is_refused() -> None:
    """The hit of full attention alone has two blocks."""
    with pytest.raises(LimitError, match="the pool has fewer than 2 free blocks for the hit"):
        last(NEWEST, PLAIN, hit(32, 100, blocks=2), pool=2)
    with pytest.raises(LimitError, match="the pool has no free block for the hit"):
        last(NEWEST, PLAIN, hit(32, 100, blocks=2), pool=3)
    with pytest.raises(LimitError, match="a pool of"):
        driver_of(NEWEST).request(PLAIN, 2**22 + 1, 2)
