"""Seed faults into a release's manager, into the worker and into the layout, and see them caught.

    PYTHONPATH=ROOT python scripts/memory_faults.py ROOT [--device cpu|cuda] [--json]

The only check is what blocks hold, in KV-cache tensors on the device. Lives are random; the first
that a fault is caught in is lived again without the fault, and must then be silent. ROOT holds the
release's `vllm/`; the edited managers run in the core tier, the tensors are the release's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from conformance.driver import Driver, core_driver, vllm_driver
from conformance.explore import live_at_random
from conformance.kv_cache import CacheBuilder
from conformance.kv_memory import KVMemory
from conformance.life import Rule, Setting
from conformance.life_checks import Violation, known_fault, live_state
from conformance.lives import NotPossible, SharedPool
from conformance.memory_lives import BOUNDS, SEED, WEIGHTS, Memories, settings
from conformance.replay import own_standard_output

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.memory_seeds import FAULTS, RELEASE, MemoryFault, edited

#: Lives within which each fault is caught.
ENOUGH_LIVES = 3000


@dataclass(frozen=True)
class Caught:
    """How a fault showed."""

    fault: str
    error: str
    found: str
    """Name of the error; empty where it was not caught."""
    detail: str
    num_lives: int
    silent_without: bool
    """Whether the same life shows nothing without the fault."""

    @property
    def as_expected(self) -> bool:
        """Whether it was caught, as the error that it is."""
        return self.found == self.error and self.silent_without


# ---- lives ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What faults are tried on."""

    root: Path
    target: str
    honest: Driver
    builder: CacheBuilder
    memories: Memories

    def pool(self, driver: Driver, setting: Setting, layout: str, fault: MemoryFault) -> SharedPool:
        """A pool whose blocks are in memory, and whose worker and layout have the fault."""

        def new_shadow(setting: Setting) -> KVMemory:
            memory = self.memories.new(setting, layout)
            if fault.layout is not None:
                memory = KVMemory(fault.layout(memory.cache), memory.counts)
            return memory

        pool = driver.shared_pool(setting, (live_state,), new_shadow)
        pool.planner = fault.planner(pool.planner.geometry, pool.planner.num_groups)
        return pool

    def caught(self, fault: MemoryFault) -> Caught:
        """Live until the fault is caught."""
        chance, lives = Random(SEED), 0
        with tempfile.TemporaryDirectory(prefix="capproof-fault-") as folder:
            faulty = self.honest
            if fault.edits:
                faulty = core_driver(edited(self.root, fault, Path(folder)))
            for setting in settings(self.honest, chance):
                if lives >= ENOUGH_LIVES:
                    return Caught(fault.name, fault.error, "", "not caught", lives, True)
                lives += 1
                layout = chance.choice(self.builder.layouts)
                pool = self.pool(faulty, setting, layout, fault)
                rules = [*live_at_random(pool, BOUNDS, chance, WEIGHTS)]
                shown = self.unknown(pool)
                if shown is None:
                    continue
                return Caught(
                    fault.name,
                    fault.error,
                    type(shown).__name__,
                    str(shown),
                    lives,
                    self.is_silent(setting, layout, rules),
                )
        raise AssertionError("settings do not end")

    def is_silent(self, setting: Setting, layout: str, rules: Sequence[Rule]) -> bool:
        """Whether a life shows nothing on the release as it is."""
        pool = self.pool(self.honest, setting, layout, MemoryFault("none", ""))
        for rule in rules:
            try:
                if not pool.is_dead:
                    pool.apply(rule)
            except NotPossible:
                continue
        return self.unknown(pool) is None

    def unknown(self, pool: SharedPool) -> Violation | None:
        """The first lost state that no known fault of the release explains."""
        lost = (v for v in pool.violations if v.theorem == "live-state-kept")
        return next((v for v in lost if known_fault(v, self.target) is None), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--only", help="faults whose name has this in it")
    options = parser.parse_args()
    answers = own_standard_output()
    honest = vllm_driver(options.root)
    builder = CacheBuilder(honest.modules)
    bench = Bench(
        options.root, f"vllm=={RELEASE}", honest, builder, Memories(builder, options.device)
    )
    tried = [fault for fault in FAULTS if (options.only or "") in fault.name]
    num_expected = 0
    for fault in tried:
        caught = bench.caught(fault)
        num_expected += caught.as_expected
        line = f"{'caught' if caught.as_expected else 'MISSED'}  {caught.fault}: {caught.detail}"
        print(json.dumps(asdict(caught)) if options.json else line, file=answers, flush=True)
    if not options.json:
        print(f"{num_expected} of {len(tried)} faults caught", file=answers)
    return int(num_expected < len(tried))


if __name__ == "__main__":
    sys.exit(main())
