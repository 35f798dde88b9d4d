"""Random lives of a release whose blocks are KV-cache tensors on a device (vllm tier).

Run as a process that imports the release; `run_in` starts one. What a life may do, and what is
checked after every rule, is the same as of any life; what blocks hold is read from memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TextIO

from conformance.bindings import one_line
from conformance.driver import BindingError, Driver, DriverError, vllm_driver
from conformance.explore import Bounds, live_at_random, tight
from conformance.kv_cache import (
    CacheBuilder,
    DeviceMemoryError,
    KVCache,
    is_out_of_memory,
    out_of_memory,
)
from conformance.kv_memory import Counts, KVMemory
from conformance.life import Plan, Setting
from conformance.life_checks import known_fault
from conformance.lives import SharedPool
from conformance.release_copies import ReleaseCopies, triton_for
from conformance.replay import ask_process, own_standard_output
from spec.vocabulary import Geometry

SEED = 20_260_101
#: Rules in a life, and what may apply: tokens of a step, external tokens.
BOUNDS = Bounds(60, token_grid=(1, 2, 5, 64), external_grid=(0, 2, 5))
#: A life of many steps: requests are seldom ended, and what is scheduled is run.
WEIGHTS = {"step": 24, "run": 6, "admit": 3, "promote": 6, "arrive": 6}
#: Moves of states that the CPU interprets, of each part.
_MOST_MOVES = 6
#: Lives in which waits of the host are counted.
_LIVES_WATCHED = 20
#: Caches that are kept for later lives.
_MAX_CACHES = 256


@dataclass(frozen=True)
class MemoryLives:
    """What lives on a device showed."""

    location: str
    """Folder of the release, and torch's version."""
    device: str
    """`cpu`, or name of the card."""
    num_lives: int
    counts: dict[str, int]
    """`kv_memory.Counts`, of the steps of lives."""
    seconds: float
    """From the first rule of the first life to the last of the last."""
    known: dict[str, int]
    """Violations by name of the known fault that they are."""
    unknown: tuple[str, ...]
    """All others, a line each."""
    steps_per_second_without: float | None
    """Of lives whose blocks are Python values, in the same process; None was not asked."""
    host_waits: tuple[int, int] | None
    """Times that the host waited for a CUDA device in some lives, and steps in them."""
    copies: str
    """What was compared with the release's own copies, in words."""
    differing: tuple[str, ...]
    """Copies that differ, a line each."""

    @property
    def steps_per_second(self) -> float:
        """Steps of lives in a second."""
        return self.counts["steps"] / self.seconds


class Memories:
    """Makes memories for lives' pools, each layout of the release in turn.

    Args:
        builder: Of the release.
        device: For torch.
        copies: What compares copies with the release's own; None compares none.
    """

    def __init__(
        self, builder: CacheBuilder, device: str, copies: ReleaseCopies | None = None
    ) -> None:
        self.counts = Counts()
        self.copies = copies
        self._builder, self._device = builder, device
        self._caches: dict[tuple[Any, ...], KVCache] = {}

    def new(self, setting: Setting, layout: str) -> KVMemory:
        """Return a memory that nobody has written to.

        Raises:
            DeviceMemoryError: There is not so much.
        """
        sizes = (setting.geometry, setting.num_mamba_groups, setting.num_gpu_blocks, layout)
        cache = self._caches.pop(sizes, None) or self._builder.build(*sizes, self._device)
        if len(self._caches) >= _MAX_CACHES:
            self._caches.pop(next(iter(self._caches)))
        self._caches[sizes] = cache
        around = None
        if self.copies is not None:
            around = self.copies.around(cache, self._builder.build(*sizes, self._device))
        try:
            return KVMemory(cache, self.counts, around)
        except RuntimeError as error:
            if is_out_of_memory(error):
                said = out_of_memory(self._device, cache.num_bytes)
                raise DeviceMemoryError(said) from error
            raise


def settings(driver: Driver, chance: Random) -> Iterator[Setting]:
    """Draw settings: small blocks, requests with and without a common prefix, a pool that fits."""
    # What 0.29.0 does with checkpoint blocks is not described for lives.
    has_checkpoints = "prefill_checkpoint_alignment" in driver.bindings.spec_arguments
    while True:
        block_size = chance.choice([2, 4])
        speculative = chance.randint(0, min(2, block_size - 1))
        geometry = Geometry(
            block_size,
            chance.choice([size for size in (1, 2, 4) if size <= block_size]),
            speculative,
            chance.randint(0, int(has_checkpoints)),
            1,
            False,
        )
        plans = tuple(
            Plan(
                chance.randint(1, 5 * block_size),
                chance.randint(1, 8),
                chance.choice([0, block_size, 99]),
            )
            for _ in range(chance.randint(1, 4))
        )
        setting = tight(
            driver,
            Setting(
                geometry,
                0,
                plans,
                chance.randint(1, 2),
                chance.choice([64, 64, 3]),
                chance.choice([0, speculative]),
                chance.random() < 0.5,
            ),
        )
        room = chance.choice([0, 1, 3, 12])
        yield replace(setting, num_gpu_blocks=setting.num_gpu_blocks + room)


def live(
    driver: Driver,
    target: str,
    memories: Memories | None,
    layouts: Sequence[str],
    *,
    seed: int = SEED,
    num_lives: int = 0,
    num_steps: int = 0,
) -> tuple[int, int, float, Counter[str], list[str]]:
    """Live random lives until there are so many, of them or of their steps.

    Args:
        driver: Of the release.
        target: Whose known faults are told apart.
        memories: Where blocks are kept; None keeps Python values.
        layouts: Layouts of the release.
        seed: Of all that is drawn.
        num_lives: Lives; 0 does not count them.
        num_steps: Steps; 0 does not count them.

    Returns:
        Lives, steps, seconds, known faults by name, and all other violations, a line each.
    """
    chance, known, unknown = Random(seed), Counter[str](), list[str]()
    lives = steps = 0
    seconds = 0.0
    for setting in settings(driver, chance):
        if (num_lives and lives >= num_lives) or (num_steps and steps >= num_steps):
            break
        layout = chance.choice(layouts)
        pool = _pool(driver, setting, memories, layout)
        began = time.perf_counter()
        for _ in live_at_random(pool, BOUNDS, chance, WEIGHTS):
            pass
        seconds += time.perf_counter() - began
        lives, steps = lives + 1, steps + pool.num_steps
        for violation in pool.violations:
            fault = known_fault(violation, target)
            if fault is None:
                unknown.append(f"life {lives} of seed {seed}, {layout}: {violation}")
            else:
                known[fault.name] += 1
    return lives, steps, seconds, known, unknown


def _pool(driver: Driver, setting: Setting, memories: Memories | None, layout: str) -> SharedPool:
    if memories is None:
        return driver.shared_pool(setting)
    memory = memories.new(setting, layout)
    new_shadow, config = (lambda _: memory), memory.cache.config
    return driver.shared_pool(setting, new_shadow=new_shadow, kv_cache_config=config)


def run_in(root: Path, target: str, device: str, **options: int) -> MemoryLives:
    """Live random lives of a tree, in a process of their own.

    Args:
        root: Folder holding `vllm/`.
        target: Whose known faults are told apart.
        device: `cpu` or `cuda`.
        options: As for `live`.

    Raises:
        DeviceMemoryError: The device has too little memory.
        BindingError: The release cannot be driven so, or the process failed.
    """
    try:
        return _asked(root, target, device, options)
    except DeviceMemoryError:
        raise
    except BindingError as error:
        # As a package that is installed the release may want more of its platform than is there.
        lives = _asked(root, target, device, {**options, "plain": 1})
        return replace(lives, copies=f"{lives.copies} ({error})")


def _asked(root: Path, target: str, device: str, options: Mapping[str, int]) -> MemoryLives:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    module = ["conformance.memory_lives", str(root), target, f"--device={device}"]
    answers, reason = ask_process([*module, *arguments], root, ())
    if not answers:
        raise BindingError(reason)
    (answer,) = answers
    if "reason" in answer:
        raise (DeviceMemoryError if answer["out_of_memory"] else BindingError)(answer["reason"])
    lists = {name: tuple(answer[name]) for name in ("unknown", "differing")}
    return MemoryLives(**{**answer, **lists})


def _device_name(device: str) -> str:
    torch = importlib.import_module("torch")
    return str(torch.cuda.get_device_name()) if device == "cuda" else device


def _host_waits(driver: Driver, target: str, builder: CacheBuilder) -> tuple[int, int]:
    """Count what torch calls a synchronizing operation while some lives are lived."""
    cuda, memories = importlib.import_module("torch").cuda, Memories(builder, "cuda")
    cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            live(driver, target, memories, builder.layouts, num_lives=_LIVES_WATCHED)
    finally:
        cuda.set_sync_debug_mode("default")
    waits = [one for one in found if "synchronizing" in str(one.message)]
    return len(waits), memories.counts.steps


def _lived(options: argparse.Namespace) -> MemoryLives:
    release = options.target.removeprefix("vllm==")
    version = "0" if release == options.target else release
    with nullcontext() if options.plain else triton_for(options.device, version):
        driver = vllm_driver(options.root)
        builder = CacheBuilder(driver.modules)
        copies = ReleaseCopies(driver.modules, None if options.device == "cuda" else _MOST_MOVES)
    known_as, layouts, seed = options.target, builder.layouts, options.seed
    compared = Memories(builder, options.device, copies)
    if options.num_compared:
        live(driver, known_as, compared, layouts, seed=seed, num_lives=options.num_compared)
    memories = None if options.without_memory else Memories(builder, options.device)
    lives, steps, seconds, known, unknown = live(
        driver,
        known_as,
        memories,
        layouts,
        seed=seed,
        num_lives=options.num_lives,
        num_steps=options.num_steps,
    )
    without = None
    if options.num_without:
        _, steps, seconds_without, *_ = live(
            driver, known_as, None, layouts, seed=seed, num_lives=options.num_without
        )
        without = steps / seconds_without
    return MemoryLives(
        driver.location,
        _device_name(options.device),
        lives,
        asdict(memories.counts if memories is not None else Counts(steps)),
        seconds,
        {**known},
        tuple(unknown),
        without,
        _host_waits(driver, known_as, builder) if options.device == "cuda" else None,
        copies.shown,
        tuple(copies.differing),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Live lives and answer on standard output; 2, and a line, where that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m conformance.memory_lives", description=__doc__)
    parser.add_argument("root", type=Path, help="folder holding vllm/")
    parser.add_argument("target", help="whose known faults are told apart")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-lives", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--num-compared", type=int, default=0, help="lives whose copies are compared"
    )
    parser.add_argument("--num-without", type=int, default=0, help="lives that are timed without")
    parser.add_argument("--plain", type=int, default=0, help="1 leaves triton as it is")
    parser.add_argument("--without-memory", type=int, default=0, help="1 keeps Python values")
    options = parser.parse_args(arguments)
    answers = own_standard_output()
    try:
        answer = _lived(options)
    except DriverError as error:
        return _could_not_run(str(error), isinstance(error, DeviceMemoryError), answers)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = f"--device {options.device}: out of memory: {one_line(error)}"
        return _could_not_run(reason, True, answers)
    print(json.dumps(asdict(answer)), file=answers, flush=True)
    return 0


def _could_not_run(reason: str, is_out_of_memory: bool, answers: TextIO) -> int:
    said = {"reason": reason, "out_of_memory": is_out_of_memory}
    print(json.dumps(said), file=answers, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
