"""Measure what people wait for, and write it down.

    python scripts/bench.py [--quick] [--ablations] [--jobs N] [--write docs/benchmarks.md]

Every figure is the median of several processes, with the least and the greatest beside it. The
machine should be idle; nothing is asserted, and an aim that is missed is said to be missed.
Releases come from the cache; what is proved is kept in one of its own, which begins empty.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import z3

from conformance.replay import tier_environment
from conformance.targets import KNOWN_RELEASES, resolve
from scripts.marked import PEERS

PROJECT_ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).with_name("bench_workers.py")
CAPPROOF = Path(sys.executable).with_name("capproof")
FAULTY, FIXED, LATEST = "vllm==0.30.0", "vllm==0.31.0", "vllm==0.33.0"
#: Seconds after which a measured process is stopped; "gave up" is a result too.
PATIENCE_S = 1200
#: Seeds of the solver: its luck varies more than the machine does. Ablations take the first three.
SEEDS = range(5)


class Failed(Exception):
    """A measured process did not do its work; one line saying what it said."""


class GaveUp(Exception):
    """A measured process was stopped."""


@dataclass(frozen=True)
class Figure:
    """Several measurements of one thing."""

    values: tuple[float, ...]
    unit: str = "s"

    @property
    def median(self) -> float:
        """The one in the middle."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"{_number(self.median)} ({_number(low)} to {_number(high)}){_unit(self.unit)}"


@dataclass(frozen=True)
class Row:
    """A line of the first table: what was measured, and the aim it has."""

    what: str
    figure: Figure | str
    aim: str = "-"
    is_met: Callable[[float], bool] | None = None

    def cells(self) -> list[str]:
        """Return the line's cells."""
        met = "-"
        if self.is_met is not None and isinstance(self.figure, Figure):
            met = "met" if self.is_met(self.figure.median) else "missed"
        return [self.what, str(self.figure), self.aim, met]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _unit(unit: str) -> str:
    return f" {unit}" if unit else ""


# ---- processes -----------------------------------------------------------------------------------


def run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    """Run a process and return what it printed.

    Raises:
        Failed: It ended with a status other than 0 and 1 (a verdict that was not expected).
        GaveUp: It took longer than `PATIENCE_S`.
    """
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        process = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            cwd=PROJECT_ROOT,
            env=environment or {**os.environ, "PYTHONPATH": path},
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GaveUp(f"gave up after {PATIENCE_S} s") from None
    if process.returncode not in ((0,) if WORKERS in command else (0, 1)):
        said = ["it said nothing", *process.stderr.strip().splitlines()]
        raise Failed(f"{Path(command[0]).name}, exit status {process.returncode}: {said[-1]}")
    return process.stdout


def wall(*command: str | Path) -> float:
    """Return the seconds from starting a process to its end."""
    started = time.perf_counter()
    run(command)
    return time.perf_counter() - started


def worker(*arguments: str | Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the answer of `bench_workers.py`."""
    answer = run([sys.executable, WORKERS, *arguments], environment)
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


def several(count: int, measure: Callable[[], float], unit: str = "s") -> Figure:
    """Measure a few times."""
    return Figure(tuple(measure() for _ in range(count)), unit)


# ---- what is measured ----------------------------------------------------------------------------


def commands(targets: Sequence[str], count: int, jobs: int) -> Iterator[Row]:
    """Yield what a person at a terminal waits for, from process start to its end."""
    prove = [CAPPROOF, "prove", "--jobs", str(jobs)]
    first = [*prove, "--target", FAULTY, "--no-cache"]
    first += ["--family", "checkpoint", "--theorem", "exact-estimate"]
    run([CAPPROOF, "--help"])  # writes bytecode
    every = [f"vllm=={release}" for release in KNOWN_RELEASES]
    measured = [(target, [target], count, 60) for target in targets]
    for what, of, times, aim in (*measured, (f"all {len(every)} releases", every, 1, 360)):
        cold, again = [], []
        command = [*prove, *(word for target in of for word in ("--target", target))]
        for _ in range(times):
            with empty_cache():
                cold.append(wall(*command))
                again.append(wall(*command))
        yield Row(
            f"`capproof prove` of {what}, all obligations, nothing kept from before",
            Figure(tuple(cold)),
            f"{aim} s",
            partial(operator.ge, aim),
        )
        yield Row(
            "the same when nothing changed", Figure(tuple(again)), "3 s", partial(operator.ge, 3)
        )
    yield Row(
        "from process start to 0.30.0's first counterexample",
        several(max(count, 2), lambda: wall(*first)),
        "2 s",
        lambda seconds: seconds <= 2,
    )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Give the measured processes a cache that holds releases and nothing else."""
    trees = resolve(FAULTY).root.parent
    for release in KNOWN_RELEASES:
        resolve(f"vllm=={release}")  # fetches what is missing
    before = os.environ.get("CAPPROOF_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trees").symlink_to(trees)
        os.environ["CAPPROOF_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["CAPPROOF_CACHE"]
            if before is not None:
                os.environ["CAPPROOF_CACHE"] = before


def replays(count: int) -> Iterator[Row]:
    """Yield steps per second on each tier, and what it takes to load the real code."""
    for tier, found in on_each_tier("replay", resolve(FIXED).root, count):
        if isinstance(found, str):
            yield Row(f"replay, {tier} tier", found)
            continue
        rates = Figure(tuple(run["steps_per_second"] for run in found), "steps/s")
        loading = Figure(tuple(run["loading"] for run in found))
        aim = ("20,000 steps/s", lambda rate: rate >= 20_000) if tier == "core" else ("-", None)
        yield Row(f"replay, {tier} tier", rates, *aim)
        yield Row(f"loading the real code, {tier} tier", loading)


def on_each_tier(
    kind: str, root: Path, count: int
) -> Iterator[tuple[str, list[dict[str, Any]] | str]]:
    """Yield each tier with a worker's answers there, or why there are none."""
    for tier, environment in (("core", None), ("vllm", tier_environment(root))):
        try:
            yield tier, [worker(kind, root, tier, environment=environment) for _ in range(count)]
        except (Failed, GaveUp) as error:
            yield tier, f"could not run: {error}"


def lives(target: str, count: int) -> Iterator[Row]:
    """Yield how many random lives, and rules of theirs, are lived in a second on each tier."""
    for tier, found in on_each_tier("lives", resolve(target).root, count):
        if isinstance(found, str):
            yield Row(f"random lives, {tier} tier", found)
            continue
        for what in ("lives", "rules"):
            rates = tuple(run[f"{what}_per_second"] for run in found)
            yield Row(f"random lives, {tier} tier", Figure(rates, f"{what}/s"))


def memory(targets: Sequence[str], count: int) -> Iterator[Row]:
    """Yield steps per second of random lives with blocks in memory, and without."""
    from conformance.memory_lives import run_in

    numbers = {"num_lives": 400, "num_without": 400}
    for target in targets:
        root = resolve(target).root
        found = [run_in(root, target, "cpu", **numbers) for _ in range(count)]
        rates = tuple(lives.steps_per_second for lives in found)
        yield Row(f"{target}, KV memory on the CPU", Figure(rates, "steps/s"))
        rates = tuple(lives.steps_per_second_without or 0.0 for lives in found)
        yield Row(f"{target}, the same lives without", Figure(rates, "steps/s"))


def explored(target: str) -> list[list[str]]:
    """Return states, lives and rates of every life up to more and more rules."""
    return [
        [
            str(row["rules"]),
            *(f"{row[what]:,}" for what in ("states", "lives")),
            f"{row['seconds']:.2f} s",
            _number(row["states"] / row["seconds"]),
        ]
        for row in worker("explored", resolve(target).root)
    ]


def scheduler(targets: Sequence[str], count: int) -> Iterator[Row]:
    """Yield steps per second of vLLM's own scheduler on one long prompt."""
    for target in targets:
        root = resolve(target).root
        for chunk in (8192, 896):
            arguments = ("scheduler", root, str(chunk))
            environment = tier_environment(root)
            found = [worker(*arguments, environment=environment) for _ in range(count)]
            rates = tuple(run["steps_per_second"] for run in found)
            what = f"{target}, {found[0]['steps']:,} steps of up to {chunk:,} tokens"
            yield Row(what, Figure(rates, "steps/s"))


def beside_hand_encoding(num_seeds: int) -> Iterator[Row]:
    """Yield lifted and hand-encoded proof of the same theorems, and their ratio."""
    for target in (FAULTY, FIXED):
        release, root = target.removeprefix("vllm=="), resolve(target).root
        runs = [worker("beside", root, release, str(seed)) for seed in range(num_seeds)]
        for who, words in (("hand", "hand encoding"), ("lifted", "lifted, loading included")):
            seconds = Figure(tuple(run[who]["seconds"] for run in runs))
            solver = Figure(tuple(run[who]["solver"] for run in runs))
            yield Row(f"{release}, {words}", seconds)
            yield Row(f"{release}, {words}: of it in the solver", solver)
        ratios = tuple(run["lifted"]["seconds"] / run["hand"]["seconds"] for run in runs)
        yield Row(
            f"{release}, lifted by hand-encoded",
            Figure(ratios, ""),
            "within 10 times",
            lambda ratio: ratio <= 10,
        )


def stages(target: str, count: int) -> list[list[str]]:
    """Return where the lifted prover's time goes, the largest part first."""
    runs = [worker("stages", resolve(target).root) for _ in range(count)]
    parts = {name: Figure(tuple(run["stages"][name] for run in runs)) for name in runs[0]["stages"]}
    total = sum(part.median for part in parts.values())
    rows = sorted(parts.items(), key=lambda item: -item[1].median)
    return [[name, str(part), f"{100 * part.median / total:.0f} %"] for name, part in rows]


def growth(target: str) -> list[list[str]]:
    """Return paths and seconds of a proof for more and more speculative blocks and groups."""
    rows = worker("growth", resolve(target).root)
    return [
        [f"`{row['family']}`", row["what"], str(row["paths"])]
        + [f"{row[part]:.2f} s" for part in ("exploring", "total")]
        for row in rows
    ]


def ablations() -> list[list[str]]:
    """Return what each idea brought: the same proofs with it switched off."""
    root, rows = resolve(FIXED).root, []
    for idea in worker("ideas"):
        runs, stopped = [], ""
        for seed in SEEDS[:3]:
            try:
                runs.append(worker("without", idea["slug"], root, str(seed)))
            except GaveUp as error:
                stopped = str(error)
            except Failed as error:
                stopped = f"could not run: {error}"
            if stopped or runs[-1]["unsettled"]:
                break
        rows.append([idea["sentence"], idea["instead"], *_outcome(runs, stopped)])
    return rows


def _outcome(runs: Sequence[dict[str, Any]], stopped: str) -> list[str]:
    if stopped:
        return ["-", "-", "-", stopped]
    seconds = Figure(tuple(run["seconds"] for run in runs))
    solver = Figure(tuple(run["solver"] for run in runs))
    unsettled = runs[-1]["unsettled"]
    if not unsettled:
        return [str(seconds), str(solver), str(runs[-1]["paths"]), "all settled"]
    more = f", and {len(unsettled) - 1} more" if len(unsettled) > 1 else ""
    return [str(seconds), str(solver), "-", f"open: {unsettled[0]}{more}"]


# ---- the document --------------------------------------------------------------------------------


def machine() -> str:
    """Say what the figures were measured on."""
    return (
        f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"z3 {z3.get_version_string()}, {platform.system()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sections(options: argparse.Namespace) -> Iterator[str]:
    """Yield the document, section by section, as it is measured."""
    count = 1 if options.quick else 3
    processes = 1 if options.quick else 3
    seeds = 2 if options.quick else len(SEEDS)
    aims = ["", "median (least to greatest)", "aim", ""]
    yield "# Benchmarks"
    yield f"Written by `{_command(options)}`. Measured on {machine()}."
    yield "## What one waits for"
    yield (
        "From process start to its end, the tree already in the cache; "
        f"runs: {count}, of all releases one; --jobs {options.jobs}."
    )
    yield table(aims, [row.cells() for row in commands((FIXED, LATEST), count, options.jobs)])
    yield "## Replay"
    yield (
        "Random scenarios of two steps (an admission, then a chunk) on blocks of up to 32 tokens "
        f"and a pool of 64, checks after each step included; processes: {processes}."
    )
    yield table(aims, [row.cells() for row in replays(processes)])
    yield "## Lives"
    yield (
        f"Of three requests of 5 prompt tokens and 2 to sample, B 2, S 1, K 1, on the least pool, "
        f"{LATEST}, every check after every rule; processes: {processes}."
    )
    yield table(aims, [row.cells() for row in lives(LATEST, processes)])
    yield (
        "Steps of random lives, every check after every rule, with what blocks hold in KV-cache "
        f"tensors ([KV memory](device.md)) and as Python values; processes: {processes}. Not "
        "measured on CUDA: `scripts/gpu_check.sh` does it where there is such a machine."
    )
    yield table(aims, [row.cells() for row in memory((FAULTY, LATEST), processes)])
    yield (
        "Every life of two such requests (`capproof explore`), core tier, one process. States that "
        "differ in block ids, or in the order of like requests, count once."
    )
    head = ["rules", "states", "lives", "seconds", "states/s"]
    yield table(head, explored(LATEST))
    yield "## The real scheduler"
    yield (
        "vLLM's own scheduler, without a model, on a prompt of 704,547 tokens, B 896, H 128, 900 "
        f"blocks; processes: {processes}."
    )
    yield table(aims, [row.cells() for row in scheduler((FAULTY, LATEST), processes)])
    yield "## Beside a hand encoding"
    yield (
        "`scripts/hand_encoding.py` transcribes both releases' functions into z3, block counts "
        "only, S symbolic, and states seven theorems of four kinds of step. Both prove these, in "
        f"one process, processor time, imports left out; {seeds} seeds of the solver, a process "
        "each. The lifted side also loads the tree, shows that no path is missing, finds a witness "
        "for each proof and the least counterexample for each refutation; the hand encoding does "
        "none of it."
    )
    yield table(aims, [row.cells() for row in beside_hand_encoding(seeds)])
    yield "## Where the lifted prover's time goes"
    detailed = FIXED if options.quick else LATEST
    yield f"All obligations of {detailed}, processor time; processes: {processes}."
    yield table(["part", "median (least to greatest)", "share"], stages(detailed, processes))
    yield "## Growth with S, K and the number of groups"
    yield (
        f"The theorems about a step, {LATEST}, one setting, processor time, one process. Of "
        "several groups: what is done beyond exploring the align-mode manager once; two groups are "
        "a full-attention group and a Mamba group."
    )
    yield table(["kind of step", "", "paths", "exploring", "and settling"], growth(LATEST))
    if options.ablations:
        yield "## What helped, and by how much"
        yield (
            "All obligations of 0.31.0 but those about gates and removals, with one idea switched "
            "off, processor time, the median of "
            f"{len(SEEDS[:3])} seeds of the solver (one where something stayed open)."
        )
        head = ["idea", "instead", "seconds", "of it in the solver", "paths", "outcome"]
        yield table(head, ablations())


def _command(options: argparse.Namespace) -> str:
    flags = [f"--{name}" for name in ("quick", "ablations") if getattr(options, name)]
    flags += ["--jobs", str(options.jobs)]
    target = ["--write", str(options.write)] if options.write else []
    return " ".join(["python scripts/bench.py", *flags, *target])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--ablations", action="store_true", help="also switch ideas off")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the markdown there")
    options = parser.parse_args()
    document = []
    try:
        for section in sections(options):
            print(section, end="\n\n", flush=True)
            document.append(section)
    except (Failed, GaveUp) as error:
        print(error, file=sys.stderr)
        return 2
    if options.write:
        before = options.write.read_text() if options.write.exists() else ""
        options.write.write_text(PEERS.keep("\n\n".join(document) + "\n", before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
