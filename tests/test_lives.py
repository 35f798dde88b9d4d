from __future__ import annotations

import functools
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Capproof

from conformance.driver import Driver, DriverError, core_driver
from conformance.explore import (
    Bounds,
    explore,
    explore_in_parallel,
    random_life,
    small_setting,
    tight,
)
from conformance.life import Life, Plan, Rule, Setting, Stage
from conformance.life_checks import CHECKS, KNOWN, known_fault
from conformance.life_files import dumps, load, replay_lives, run_life
from conformance.life_machine import lived
from conformance.life_scheduler import CALLERS
from conformance.lives import SharedPool
from conformance.scenario import ScenarioError
from conformance.targets import resolve
from spec.vocabulary import Geometry

#: The fault of vLLM #57050, the release that mended it, and the newest.
RELEASES = ("0.30.0", "0.31.0", "0.33.0")
#: Lives within which a machine that is told of no fault finds #57050.
ENOUGH_LIVES = 1000
#: Lives of a machine that is told what is known; `make selfcheck` takes more.
LIVES_PER_RELEASE = 400 if os.environ.get("CAPPROOF_ALL_RELEASES") else 160
#: Checkpoint blocks, where lives do not follow what a release does with them.
CHECKPOINTS_IN_LIVES = {"0.29.0": (0,)}


@functools.cache
def driver_of(release: str) -> Driver:
    return core_driver(resolve(f"vllm=={release}").root)


@pytest.mark.parametrize("release", RELEASES)
def test_lives_show_no_fault_that_is_not_known(release: str) -> None:
    """Random lives on a release's real code keep everything but what is known of the release."""
    lived(driver_of(release), f"vllm=={release}", LIVES_PER_RELEASE)


@pytest.mark.parametrize(
    ("release", "steps"), [("0.29.0", 1), ("0.31.0", 1), ("0.33.0", 1), ("0.33.0", 2)]
)
def test_lives_with_steps_in_flight_show_no_fault_that_is_not_known(
    release: str, steps: int
) -> None:
    """So do lives whose next step is scheduled before the output of the last is known."""
    lived(
        driver_of(release),
        f"vllm=={release}",
        LIVES_PER_RELEASE // 2,
        steps_in_flight=steps,
        checkpoints=CHECKPOINTS_IN_LIVES.get(release, (0, 1)),
    )


def test_a_machine_that_is_told_nothing_finds_a_tail_that_a_step_in_flight_overwrites() -> None:
    """On 0.31.0 it shows within `ENOUGH_LIVES` lives."""
    others = tuple(f for f in KNOWN if f.name != "tail-cached-while-a-step-in-flight-writes-it")

    with pytest.raises(AssertionError, match="live-state-kept"):
        lived(driver_of("0.31.0"), "vllm==0.31.0", ENOUGH_LIVES, steps_in_flight=1, faults=others)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("release", ["0.28.0", "0.29.0", "0.30.0", "0.33.0"])
def test_every_life_of_a_prompt_in_chunks_shows_which_releases_free_what_was_in_flight(
    release: str, steps: int
) -> None:
    """One request of 12 blocks, up to 9 rules: chunks of two blocks leave null columns between."""
    setting = Setting(Geometry(2, 2, 0, 0, 1, False), 40, (Plan(24, 2),), num_steps_in_flight=steps)

    found = explore(driver_of(release), setting, Bounds(9, (4, 7), (0,)), "told of no fault")

    assert found.num_states > 300
    theorems = {violation.split(" ")[0] for violation, _ in found.violations}
    assert theorems == ({"peak-within-sizing"} if steps and release < "0.30.0" else set())


def test_a_machine_that_is_told_nothing_finds_the_request_that_waits_for_ever(
    tmp_path: Path,
) -> None:
    """On 0.30.0 #57050 shows within `ENOUGH_LIVES` lives; what is saved replays without it."""
    saved, of_57050 = tmp_path / "life.json", next(f for f in KNOWN if "#57050" in f.name)
    others = tuple(fault for fault in KNOWN if fault is not of_57050)

    with pytest.raises(AssertionError, match="eventually-admitted"):
        lived(
            driver_of("0.30.0"),
            "vllm==0.30.0",
            ENOUGH_LIVES,
            saved,
            faults=others,
            theorems=("eventually-admitted",),
        )

    life = load(saved)
    assert of_57050 in run_life(driver_of("0.30.0"), life, "vllm==0.30.0").known
    for mended in ("0.31.0", "0.33.0"):
        shown = run_life(driver_of(mended), life, f"vllm=={mended}").violations
        assert "eventually-admitted" not in [violation.theorem for violation in shown]


@pytest.mark.parametrize("release", RELEASES)
def test_every_short_life_shows_no_fault_that_is_not_known(release: str) -> None:
    """All lives of two like requests and five rules, on the least pool that one of them fits."""
    driver = driver_of(release)

    found = explore(driver, tight(driver, small_setting(0, 2, True)), Bounds(5), f"vllm=={release}")

    assert found.violations == ()
    assert found.num_states > 100


def test_a_life_replays_from_its_file(tmp_path: Path, capproof: Capproof) -> None:
    """`capproof replay` accepts a life, and prints what each release shows."""
    life = Life(
        Setting(Geometry(2, 1, 0, 1, 1, False), 16, (Plan(8, 1),)),
        (
            Rule("admit", 0, 64, 3, True),
            Rule("step"),
            Rule("arrive"),
            Rule("promote", 0, 64),
            Rule("step"),
        ),
    )
    file = tmp_path / "life.json"
    file.write_text(dumps(life))

    shown = capproof("replay", str(file), "--target", "vllm==0.33.0")

    assert load(file) == life
    assert shown.returncode == 0, shown.stderr
    assert "expected cached state after 4 tokens" in shown.stdout
    assert "known: state-cached-for-a-later-position" in shown.stdout


def test_lives_are_the_same_on_both_tiers() -> None:
    """Random lives show the same with everything imported for real as under placeholders."""
    release = RELEASES[-1]
    driver, chance = driver_of(release), random.Random(release)
    settings = [
        replace(small_setting(0, 3, True), geometry=Geometry(2, 1, speculative, 1, 1, False))
        for speculative in (0, 1, 2)
    ]
    lives = [
        random_life(driver, tight(driver, setting), Bounds(40), chance)
        for setting in settings
        for _ in range(20)
    ]
    root, target = resolve(f"vllm=={release}").root, f"vllm=={release}"

    core, vllm = (replay_lives(root, tier, lives, target) for tier in ("core", "vllm"))

    assert vllm == core
    assert sum(life.num_rules for life in core) > 1000
    assert any(life.lines for life in core)
    assert not any(life.num_unknown for life in core)


def test_every_rule_of_callers_names_its_source() -> None:
    """What the harness follows by hand can be looked up."""
    assert all(".py" in caller.source or "/" in caller.source for caller in CALLERS)
    assert len({caller.slug for caller in CALLERS}) == len(CALLERS)


#: Sizes of a production engine, with checkpoints at hash boundaries.
PRODUCTION = Geometry(896, 128, 0, 1, 64, False)


def after(release: str, setting: Setting, *rules: Rule) -> SharedPool:
    pool = driver_of(release).shared_pool(setting, CHECKS)
    for applied in rules:
        pool.apply(applied)
    return pool


@pytest.mark.parametrize("release", ["0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_a_state_is_cached_for_more_tokens_than_it_holds(release: str) -> None:
    """A hit inside a block, and a chunk with a checkpoint: a finding, by what the manager says."""
    plans = (Plan(1100, 2, 1024), Plan(4000, 2, 2000), Plan(2500, 2, 2000))
    step = Rule("step")
    first = (Rule("admit", 0, 8192), step, Rule("finish", 0))

    pool = after(release, Setting(PRODUCTION, 40, plans), *first, Rule("admit", 1, 8192))

    computed, mamba = pool.scheduled[1], pool.managers[1]
    copy = mamba.req_to_blocks["r1"][1]
    assert (computed.start, computed.num_new) == (1024, 2976)
    assert copy in [target for _, target in mamba._pending_cow_copies]
    assert copy.block_hash_num_tokens == 1792
    hit = pool.manager.get_computed_blocks(pool.requests[2])
    assert (hit[1], hit[0].blocks[1][-1].block_id) == (1792, copy.block_id)
    pool.apply(step)
    assert [v.block for v in pool.violations if v.theorem == "live-state-kept"] == [copy.block_id]


@pytest.mark.parametrize(("release", "cached"), [("0.31.0", 2688), ("0.33.0", 3968)])
def test_a_draft_block_is_cached_as_a_state_that_nobody_wrote(release: str, cached: int) -> None:
    """0.31.0 leaves it before the new state; 0.33.0 takes it for the checkpoint."""
    setting = Setting(replace(PRODUCTION, num_speculative_blocks=1), 40, (Plan(4000, 2),))

    pool = after(release, setting, Rule("admit", 0, 1792), Rule("step"))
    draft = pool.managers[1].req_to_blocks["r0"][-1]
    pool.apply(Rule("run", 0, 8192))

    assert draft.block_hash_num_tokens == cached
    holds_too_many = any(v.theorem == "peak-within-sizing" for v in pool.violations)
    assert holds_too_many is (release == "0.31.0")


#: The same without checkpoints, and chunks of vLLM's default budget.
CHUNKED = replace(
    Setting(replace(PRODUCTION, num_prefill_checkpoint_blocks=0), 200, ()),
    max_num_scheduled_tokens=8192,
)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("release", ["0.28.0", "0.29.0", "0.30.0", "0.33.0"])
def test_a_chunk_in_flight_keeps_its_state_until_it_has_run(release: str, steps: int) -> None:
    """Up to 0.29.0 nothing frees it then, and a prompt holds a block for each of its chunks."""
    setting = replace(CHUNKED, plans=(Plan(60_000),), num_steps_in_flight=steps)
    leaks = release < "0.30.0" and steps > 0

    pool, held = driver_of(release).shared_pool(setting, CHECKS), []
    for name in ("admit", *["run"] * 7):
        pool.apply(Rule(name, 0, 8192))
        held.append(len(pool.held(pool.requests[0])[1]))
        pool.apply(Rule("step"))

    assert held == [min(n, 9 if leaks else 2 + steps) for n in range(1, 9)]
    found = [violation for violation in pool.violations if violation.theorem != "matches-intended"]
    names = {known_fault(violation, f"vllm=={release}") for violation in found}
    assert {fault and fault.name for fault in names} == (
        {"states-in-flight-are-not-freed"} if leaks else set()
    )


@pytest.mark.parametrize("release", ["0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"])
def test_a_step_in_flight_writes_into_what_is_cached_as_the_prompt(release: str) -> None:
    """Up to 0.31.0 the prompt is cached once more when a step in flight writes behind it.

    The next step then copies that block for whoever is told of a hit: a state after one token more,
    which is another request's.
    """
    is_wrong = release < "0.32.0"
    plans = (Plan(1024, 4, 1024), Plan(896 * 6), Plan(1200, 1, 1024))
    setting = replace(CHUNKED, plans=plans, num_steps_in_flight=1, num_gpu_blocks=12)
    pool, step = driver_of(release).shared_pool(setting, ()), Rule("step")
    first = pool.requests[0]
    pool.apply(Rule("admit", 0, 8192))
    pool.apply(step)
    while first.num_computed_tokens < 1025:
        pool.apply(Rule("run", 0, 8192))
        pool.apply(step)

    running = pool.managers[1].req_to_blocks["r0"][1]
    assert (first.num_computed_tokens, first.num_in_flight_tokens) == (1025, 1)
    assert len(pool.shadow.contents[running.block_id][1]) == 1025
    assert (running.block_hash_num_tokens == 1024) is is_wrong

    while first.stage is not Stage.ENDED:
        if not first.samples_its_last:
            pool.apply(Rule("run", 0, 8192))
        pool.apply(step)
    # Another request takes the free blocks, and so what was cached first.
    for applied in (Rule("admit", 1, 8192), step, step):
        pool.apply(applied)
    blocks, num_tokens, *_ = pool.manager.get_computed_blocks(pool.requests[2])
    held = len(pool.shadow.contents[blocks.blocks[1][-1].block_id][1])
    assert (num_tokens, held) == ((1024, 1025) if is_wrong else (896, 896))


#: A state after few tokens, a prompt that is loaded in part, and one that begins like both.
LOADED_AND_HIT = {
    "least": (
        Setting(
            Geometry(4, 1, 0, 0, 1, False), 30, (Plan(2, 1, 4), Plan(17, 6, 99), Plan(16, 2, 4))
        ),
        5,
    ),
    "ordinary": (
        replace(CHUNKED, plans=(Plan(256, 1, 1000), Plan(5000, 6, 9999), Plan(2000, 2, 1000))),
        1000,
    ),
}


@pytest.mark.parametrize("sizes", LOADED_AND_HIT)
@pytest.mark.parametrize("release", ["0.28.0", "0.30.0", "0.33.0"])
def test_a_block_is_copied_before_the_step_that_fills_it(release: str, sizes: str) -> None:
    """A finding: one request's block is loaded and, in the same step, copied for another's hit."""
    setting, num_external = LOADED_AND_HIT[sizes]
    step, most = Rule("step"), setting.max_num_scheduled_tokens

    first = (Rule("admit", 0, most), step, Rule("admit", 1, most, num_external))
    pool = after(release, setting, *first)
    loaded = pool.managers[0].req_to_blocks["r1"][0]
    pool.apply(Rule("admit", 2, most))
    assert loaded in [source for source, _ in pool.managers[0]._pending_cow_copies]
    pool.apply(step)

    (lost,) = [v for v in pool.violations if v.theorem == "live-state-kept"]
    assert type(lost).__name__ == "CopiedTooEarly"
    assert lost.request == "r2"
    assert f"is a copy of block {loaded.block_id}, which r1 fills from token 0 on" in lost.detail
    fault = known_fault(lost, f"vllm=={release}")
    assert fault is not None
    assert fault.name == "copied-before-it-is-filled"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("setting", 5), "setting: expected an object, got an integer"),
        (("rules", [{"name": "jump"}]), "rules[0]: no rule 'jump'"),
        (("rules", [{"name": "run", "request": 7}]), "rules[0]: request 7 of 1"),
        (("rules", [{"name": "run", "tokens": 7}]), 'rules[0]: unknown field "tokens"'),
        (("rules", [{"name": "run", "num_tokens": 10**9}]), "lives are run up to 65,536"),
        (("schema", 2), "schema: expected 1"),
    ],
)
def test_a_life_that_is_none_is_refused_with_its_field(
    tmp_path: Path, change: tuple[str, Any], reason: str
) -> None:
    """One line says what is wrong with a file, and where."""
    content = json.loads(dumps(Life(Setting(PRODUCTION, 40, (Plan(100),)), (Rule("step"),))))
    content[change[0]] = change[1]
    file = tmp_path / "life.json"
    file.write_text(json.dumps(content))

    with pytest.raises(ScenarioError, match=re.escape(reason)):
        load(file)


def test_lives_are_the_same_wherever_they_are_lived() -> None:
    """Spread over processes, or over a Dask cluster, as many states and lives are met."""
    release = RELEASES[-1]
    root, setting = resolve(f"vllm=={release}").root, small_setting(8, 2, True)

    here, by_processes, by_dask = (
        explore_in_parallel(
            root, setting, Bounds(4), f"vllm=={release}", jobs=jobs, backend=backend
        )
        for jobs, backend in ((1, None), (2, None), (2, "dask"))
    )

    assert here.num_states > 100
    assert here == by_processes == by_dask


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("nonesuch", "--backend nonesuch: "), ("ray", "--backend ray: .*No module named 'ray'")],
)
def test_a_backend_that_is_not_there_is_named(backend: str, reason: str) -> None:
    """One line, before any life is lived elsewhere."""
    setting = small_setting(8, 1, True)

    with pytest.raises(DriverError, match=reason):
        explore_in_parallel(
            resolve("vllm==0.33.0").root, setting, Bounds(2), "x", jobs=1, backend=backend
        )


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    """Resuming from something else says so, and adds nothing to it."""
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    setting = small_setting(8, 1, True)

    with pytest.raises(DriverError, match="not a journal"):
        explore_in_parallel(
            resolve("vllm==0.33.0").root, setting, Bounds(2), "vllm==0.33.0", jobs=1, journal=file
        )

    assert file.read_text() == "mine"
