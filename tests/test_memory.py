from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from conformance.conform import summary
from conformance.replay import PROJECT_ROOT, tier_environment
from conformance.targets import resolve

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="KV memory needs torch"
)
RELEASE = "0.33.0"
#: Releases whose random lives are lived here, all that have such memory where all are gone through.
LIVED = ["0.29.0", RELEASE]
if os.environ.get("CAPPROOF_ALL_RELEASES"):
    LIVED[1:1] = ["0.30.0", "0.31.0", "0.32.0"]


def asked(release: str, *arguments: str) -> list[Any]:
    """What a process says that imports a release, an object a line."""
    root = resolve(f"vllm=={release}").root
    done = subprocess.run(
        [sys.executable, *[argument.replace("ROOT", str(root)) for argument in arguments]],
        capture_output=True,
        text=True,
        cwd=PROJECT_ROOT,
        env=tier_environment(root),
        check=False,
    )
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def lived(release: str, *options: str) -> Mapping[str, Any]:
    """What random lives of a release show."""
    module = ["-m", "conformance.memory_lives", "ROOT", f"vllm=={release}"]
    (answer,) = asked(release, *module, "--num-lives=120", *options)
    return answer


@pytest.mark.parametrize("release", LIVED)
def test_random_lives_show_nothing_in_memory_but_what_is_known(release: str) -> None:
    """Honest managers lose no state; pages are written, read, copied and moved on the way."""
    shown = lived(release)

    assert shown["unknown"] == []
    assert shown["num_lives"] == 120
    counts = shown["counts"]
    assert counts["steps"] > 1000
    assert counts["pages_written"] > 5000
    assert counts["pages_read"] > counts["pages_written"]
    assert counts["slots_compared"] > counts["pages_read"]
    assert counts["blocks_zeroed"] > 500
    assert counts["blocks_copied"] > 10
    assert counts["states_moved"] > 300


def test_the_device_is_waited_for_once_a_step_at_most() -> None:
    """All that a step reads is compared on the device, and asked for once."""
    counts = lived(RELEASE)["counts"]

    assert 0 < counts["comparisons"] <= counts["steps"]


def test_memory_and_values_show_the_same() -> None:
    """The same lives find the same known faults with blocks in memory as with Python values."""
    memory, values = lived(RELEASE), lived(RELEASE, "--without-memory=1")

    assert values["counts"]["pages_read"] == 0
    assert memory["differing"] == []
    for part in ("known", "unknown"):
        assert memory[part] == values[part]
    assert memory["counts"]["steps"] == values["counts"]["steps"]
    assert memory["known"]["state-cached-for-a-later-position"] > 0


def test_every_seeded_fault_is_caught_in_memory_as_what_it_is() -> None:
    """Faults of the manager, the worker and the layout: each its own error; without it, silence."""
    caught = asked(RELEASE, "scripts/memory_faults.py", "ROOT", "--json")

    assert [c["fault"] for c in caught if c["found"] != c["error"]] == []
    assert [c["fault"] for c in caught if not c["silent_without"]] == []
    assert len(caught) >= 20
    assert {c["found"] for c in caught} == {
        *("WrongOwner", "StalePosition", "WrittenByTwo"),
        *("ReadAfterFree", "WrittenAfterFree", "NeverWritten"),
    }
    for one in caught:
        assert f"[{one['found']}] step " in one["detail"]
        assert " request r" in one["detail"]


TOO_MUCH = """
import sys
from conformance.bindings import import_vllm
from conformance.kv_cache import CacheBuilder, DeviceMemoryError
from conformance.replay import own_standard_output
from spec.vocabulary import Geometry

answers = own_standard_output()
builder = CacheBuilder(import_vllm())
try:
    builder.build(Geometry(4, 2, 0, 0, 1, False), 1, 2**45, builder.layouts[0], "cpu")
except DeviceMemoryError as error:
    print(f'"{error}"', file=answers)
"""


COMPARED = """
import json
from pathlib import Path
from random import Random
from conformance.replay import own_standard_output

answers = own_standard_output()
from conformance.release_copies import ReleaseCopies, triton_for

with triton_for("cpu", "RELEASE"):
    from conformance.driver import vllm_driver
    driver = vllm_driver(Path("ROOT"))
    copies = {name: ReleaseCopies(driver.modules) for name in ("followed", "faulty")}
from conformance.kv_cache import CacheBuilder
from conformance.life import Plan, Rule, Setting
from conformance.memory_lives import Memories
from scripts.memory_seeds import FAULTS
from spec.vocabulary import Geometry

builder = CacheBuilder(driver.modules)
fault = next(f for f in FAULTS if f.name == "the window is not shifted by accepted drafts")
setting = Setting(Geometry(4, 2, 2, 0, 1, False), 40, (Plan(7, 30), Plan(3, 30)))
step = Rule("step")
rules = [Rule("admit", 0, 64), Rule("admit", 1, 64), step]
for accepted in (0, 0, 2, 2, 1):
    rules += [Rule("run", n, 64, num_accepted=accepted) for n in (0, 1)] + [step]
for name, compared in copies.items():
    memories = Memories(builder, "cpu", compared)
    pool = driver.shared_pool(setting, (), lambda s: memories.new(s, "LBNHC"))
    if name == "faulty":
        pool.planner = fault.planner(pool.planner.geometry, pool.planner.num_groups)
    for rule in rules:
        pool.apply(rule)
    parts = compared.compared, compared.copying, len(compared.differing), compared.refused
    print(json.dumps([name, *parts]), file=answers, flush=True)
"""


def test_states_are_moved_as_the_release_moves_them() -> None:
    """Its own kernels, interpreted, leave what ours leave; a window left where it was differs."""
    root = str(resolve(f"vllm=={RELEASE}").root)
    script = COMPARED.replace("RELEASE", RELEASE).replace("ROOT", root)
    (_, compared, copying, differing, refused), faulty = asked(RELEASE, "-c", script)

    assert refused == []
    assert differing == 0
    assert copying["clearing"] > 1
    assert compared["moves before"] == compared["moves after"] == 6
    assert copying["moves before"] > 1
    assert copying["moves after"] > 1
    assert faulty[3] > 0


def test_a_device_with_too_little_memory_is_one_line_with_the_bytes_asked_for() -> None:
    """2**45 blocks of two layers, each page of 512 bytes."""
    (said,) = asked(RELEASE, "-c", TOO_MUCH)

    assert said == f"--device cpu: out of memory: {2**45 * 2 * 512:,} bytes asked for"


LAYOUTS = """
import json
from conformance.bindings import import_vllm
from conformance.kv_cache import CacheBuilder
from conformance.replay import own_standard_output
from spec.vocabulary import Geometry

answers = own_standard_output()
builder = CacheBuilder(import_vllm())
for layout in builder.layouts:
    cache = builder.build(Geometry(4, 2, 1, 0, 1, False), 2, 7, layout, "cpu")
    groups = cache.config.kv_cache_groups
    print(json.dumps({
        "layout": layout,
        "pages": [group.kv_cache_spec.page_size_bytes for group in groups],
        "layers": [len(group.layer_names) for group in groups],
        "bytes": cache.num_bytes,
        "page_words": cache.page_words,
        "storages": len({t.untyped_storage().data_ptr() for t in cache.tensors.values()}),
        "states": len(cache.states),
        "ends": [max(at.bases) + 6 * at.block_stride + at.num_slots * at.slot_words
                 for at in (cache.groups[1].window, cache.groups[1].state)],
    }), file=answers)
"""


@pytest.mark.parametrize("release", ["0.29.0", RELEASE])
def test_the_cache_is_laid_out_by_the_release(release: str) -> None:
    """Pages are of the specs' size, groups overlay each other, and nothing reaches past the end."""
    shown = asked(release, "-c", LAYOUTS)

    assert {one["layout"] for one in shown} >= {"LBNHC", "BLNHC"}
    for one in shown:
        assert one["layers"] == [2, 2, 2]
        (page,) = {*one["pages"]}
        assert one["page_words"] * 8 == page
        assert one["bytes"] == 7 * 2 * page
        assert one["storages"] == 1
        assert one["states"] == 4
        assert all(end * 8 <= one["bytes"] for end in one["ends"])


def test_a_release_whose_worker_cannot_allocate_says_so() -> None:
    """0.28.0 allocates inside the model runner."""
    root = resolve("vllm==0.28.0").root
    done = subprocess.run(
        [sys.executable, "-m", "conformance.memory_lives", str(root), "vllm==0.28.0"],
        capture_output=True,
        text=True,
        cwd=PROJECT_ROOT,
        env=tier_environment(root),
        check=False,
    )

    assert done.returncode == 2
    assert "KV memory needs 0.29.0 or newer" in json.loads(done.stdout)["reason"]


def test_a_release_that_is_not_imported_as_installed_is_imported_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lives are lived all the same, and the line about copies says why none was moved."""
    from conformance import memory_lives

    ask = memory_lives.ask_process

    def refusing(arguments: list[str], *others: Any) -> tuple[list[Any], str]:
        if "--plain=1" in arguments:
            return ask(arguments, *others)
        return [], "vllm tier: no such platform (exit status 1)"

    monkeypatch.setattr(memory_lives, "ask_process", refusing)
    root = resolve(f"vllm=={RELEASE}").root
    numbers = {"num_lives": 20, "num_compared": 20}
    lives = memory_lives.run_in(root, f"vllm=={RELEASE}", "cpu", **numbers)

    assert lives.unknown == ()
    assert lives.counts["steps"] > 100
    assert "0 of moves before" in lives.copies
    assert "triton cannot run here, so that no move was compared" in lives.copies
    assert lives.copies.endswith("(vllm tier: no such platform (exit status 1))")


def test_a_run_is_summed_up_in_one_line() -> None:
    """Counts say that something was looked at."""
    from conformance.memory_lives import MemoryLives

    shown = lived(RELEASE)
    lives = MemoryLives(**shown)

    said = summary(lives)
    assert said.startswith("KV memory on cpu: 120 lives, ")
    assert f"{shown['counts']['pages_read']:,} read" in said
    assert said.endswith("0 not known")
