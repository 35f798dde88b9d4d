from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import CopyTree

from conformance.driver import core_driver
from conformance.life import Life, Plan, Rule, Setting
from conformance.life_files import run_life
from conformance.life_machine import lived
from conformance.targets import resolve
from spec.vocabulary import Geometry

RELEASE = "0.33.0"
CORE = Path("vllm/v1/core")
MANAGERS, POOL = CORE / "single_type_kv_cache_manager.py", CORE / "block_pool.py"
CACHE_MANAGER, SCHEDULER = CORE / "kv_cache_manager.py", CORE / "sched/scheduler.py"
#: Lives within which each fault is found.
ENOUGH_LIVES = 1000


@dataclass(frozen=True)
class SeededFault:
    """An edit of the release, and the theorems of which one must be found not to hold."""

    name: str
    file: Path
    old: str
    new: str
    theorems: tuple[str, ...]
    inside: str = ""
    """Text behind which the edit is made."""


CONSERVATION, LIVE = "conservation", "live-state-kept"
FAULTS = (
    SeededFault(
        "one block is leaked when a request is freed",
        MANAGERS,
        "self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))",
        "self.block_pool.free_blocks([*reversed(self.pop_blocks_for_free(request_id))][1:])",
        (CONSERVATION,),
    ),
    SeededFault(
        "a request's blocks are freed twice",
        MANAGERS,
        "        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))",
        "        blocks = self.pop_blocks_for_free(request_id)\n"
        "        self.block_pool.free_blocks(reversed(blocks))\n"
        "        self.block_pool.free_blocks(reversed(blocks))",
        (CONSERVATION,),
    ),
    SeededFault(
        "the state that the next step reads is freed",
        MANAGERS,
        "< cdiv(processed_computed_tokens, self.block_size) - 1",
        "< cdiv(processed_computed_tokens, self.block_size)",
        (LIVE, CONSERVATION),
        inside="class MambaManager",
    ),
    SeededFault(
        "all states up to the running one are retired",
        MANAGERS,
        "return num_computed_tokens - 1",
        "return num_computed_tokens + self.block_size",
        (LIVE, CONSERVATION, "no-undercount", "eventually-admitted"),
        inside="class MambaManager",
    ),
    SeededFault(
        "states that have moved on are not retired",
        CACHE_MANAGER,
        "        self.coordinator.remove_skipped_blocks(\n            request.request_id,\n",
        "        (lambda *_, **named: None)(\n            request.request_id,\n",
        ("peak-within-sizing", "no-undercount", "eventually-admitted"),
    ),
    SeededFault(
        "the source of a copy is not kept until it has run",
        MANAGERS,
        "source_block.ref_cnt += 1",
        "pass",
        (CONSERVATION,),
        inside="class MambaManager",
    ),
    SeededFault(
        "a hit stays in the free list",
        POOL,
        "                self.free_block_queue.remove(block)",
        "                pass",
        (CONSERVATION, "allocation-succeeds"),
        inside="def touch",
    ),
    SeededFault(
        "a checkpoint is recorded one column too low",
        MANAGERS,
        "checkpoint_idx = cdiv(num_tokens, self.block_size) - 2",
        "checkpoint_idx = max(cdiv(num_tokens, self.block_size) - 3, 0)",
        (LIVE, "allocation-succeeds"),
        inside="if checkpoint_position > 0:",
    ),
    SeededFault(
        "evictable hits are not counted",
        MANAGERS,
        "return num_new_blocks + num_evictable_computed_blocks",
        "return num_new_blocks",
        ("no-undercount", "matches-intended"),
        inside="class MambaManager",
    ),
    SeededFault(
        "a refused step takes blocks all the same",
        CACHE_MANAGER,
        "        if required_blocks > available_blocks:\n",
        "        if required_blocks > available_blocks:\n"
        "            self.block_pool.get_new_blocks(self.block_pool.get_num_free_blocks())\n",
        (CONSERVATION,),
    ),
    SeededFault(
        "the pool is not compared with the estimate",
        CACHE_MANAGER,
        "        if required_blocks > available_blocks:\n",
        "        if required_blocks > available_blocks + 8:\n",
        ("allocation-succeeds",),
    ),
)


def edited(fault: SeededFault, copy_tree: CopyTree) -> Path:
    """A copy of the release with the fault."""
    root = copy_tree(RELEASE)
    (root / SCHEDULER).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(resolve(f"vllm=={RELEASE}").root / SCHEDULER, root / SCHEDULER)
    before, inside, text = (root / fault.file).read_text().partition(fault.inside or "\n")
    assert fault.old in text
    (root / fault.file).write_text(before + inside + text.replace(fault.old, fault.new, 1))
    return root


def test_the_edits_are_of_different_places() -> None:
    """Each fault has a name of its own."""
    faults = [*FAULTS, *(fault for fault, _ in OF_A_HIT), *INSIDE_A_BLOCK]
    assert len({fault.name for fault in faults}) == len(faults) >= 15


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_seeded_fault_is_found(fault: SeededFault, copy_tree: CopyTree) -> None:
    """The check that must notice it does, told of what is known of the release."""
    root = edited(fault, copy_tree)

    with pytest.raises(AssertionError) as found:
        lived(core_driver(root), f"vllm=={RELEASE}", ENOUGH_LIVES)

    theorem = re.match(r"[a-z-]+", str(found.value))
    assert theorem is not None
    assert theorem.group() in fault.theorems, str(found.value)


#: Two requests that begin alike, in one step, and the second while the first is there.
ALIKE = Setting(Geometry(4, 4, 0, 0, 1, False), 32, (Plan(9, 3, 99), Plan(12, 1, 99)))
IN_ONE_STEP = (Rule("admit", 0, 8), Rule("admit", 1, 64), Rule("step"))
ONE_BY_ONE = (
    *(Rule("admit", 0, 64), Rule("step"), Rule("admit", 1, 64), Rule("step")),
    Rule("abort", 0),
)
#: Faults of a hit that random lives come to seldom, each with rules that do.
OF_A_HIT = (
    (
        SeededFault(
            "a hit cached in the same step is taken",
            MANAGERS,
            "return self.block_pool.num_gpu_blocks + 1",
            "pass",
            (LIVE,),
            inside="class MambaManager",
        ),
        IN_ONE_STEP,
    ),
    (
        SeededFault(
            "a hit's references are not counted",
            POOL,
            "            block.ref_cnt += 1\n            if self.metrics_collector:\n"
            "                self.metrics_collector.on_block_accessed",
            "            block.ref_cnt += block.ref_cnt == 0\n"
            "            if self.metrics_collector:\n"
            "                self.metrics_collector.on_block_accessed",
            (CONSERVATION,),
        ),
        ONE_BY_ONE,
    ),
)


@pytest.mark.parametrize(
    ("fault", "rules"), OF_A_HIT, ids=[fault.name.replace(" ", "-") for fault, _ in OF_A_HIT]
)
def test_a_fault_of_a_hit_is_found(
    fault: SeededFault, rules: tuple[Rule, ...], copy_tree: CopyTree
) -> None:
    """What the first request writes is neither taken before it is, nor freed while it is held."""
    life = Life(ALIKE, rules)

    shown = run_life(core_driver(edited(fault, copy_tree)), life, f"vllm=={RELEASE}")
    honest = core_driver(resolve(f"vllm=={RELEASE}").root)

    assert tuple(violation.theorem for violation in shown.unknown)[:1] == fault.theorems
    assert run_life(honest, life, f"vllm=={RELEASE}").violations == ()


#: Faults where a hit ends inside a block, which random lives come to seldom.
INSIDE_A_BLOCK = (
    SeededFault(
        "a hit ends one hash unit further than its state",
        MANAGERS,
        "block_hash = block_hashes[fine_idx]",
        "block_hash = block_hashes[max(fine_idx - 1, 0)]",
        (LIVE, "allocation-succeeds"),
        inside="class MambaManager",
    ),
    SeededFault(
        "a copy on write has the wrong source",
        MANAGERS,
        "self._pending_cow_copies.append((source_block, cow_block))",
        "self._pending_cow_copies.append((cow_block, source_block))",
        (LIVE,),
    ),
    SeededFault(
        "a copy on write does not happen",
        MANAGERS,
        "        self._pending_cow_copies.append((source_block, cow_block))\n"
        "        cow_block.ref_cnt += 1",
        "        self.block_pool.free_blocks([source_block])",
        (LIVE, "exact-estimate"),
    ),
)


@pytest.mark.parametrize("fault", INSIDE_A_BLOCK, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_of_a_hit_inside_a_block_is_found(fault: SeededFault, copy_tree: CopyTree) -> None:
    """A request hits inside a block of another, whose state it must copy and leave alone."""
    root = edited(fault, copy_tree)
    setting = Setting(Geometry(4, 2, 0, 0, 1, False), 32, (Plan(7, 2, 6), Plan(12, 2, 6)))
    first = (Rule("admit", 0, 64), Rule("step"), Rule("run", 0, 64), Rule("step"))
    second = (Rule("admit", 1, 64), Rule("step"), Rule("run", 1, 64), Rule("step"))

    shown = run_life(core_driver(root), Life(setting, first + second), f"vllm=={RELEASE}")
    honest = core_driver(resolve(f"vllm=={RELEASE}").root)

    assert {violation.theorem for violation in shown.unknown} & set(fault.theorems)
    assert run_life(honest, Life(setting, first + second), f"vllm=={RELEASE}").unknown == ()
