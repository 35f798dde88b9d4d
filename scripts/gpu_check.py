"""Lives on KV memory of each release, faults seeded and caught, rates, and copies compared.

`gpu_check.sh` runs it. Each release is imported in a process of its own, one after the other, so
that rates are not of a machine that does something else. 1 where something is lost, differs or is
not caught; 2 where it cannot be run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conformance.bindings import DriverError
from conformance.conform import NUM_COMPARED, WITHOUT_MEMORY
from conformance.memory_lives import MemoryLives, run_in
from conformance.replay import PROJECT_ROOT, tier_environment

#: Seconds after which nothing new is begun: three and a half minutes.
PATIENCE_S = 210
#: Steps with memory, and lives without, of each release.
NUM_STEPS, NUM_WITHOUT = 2000, 200
#: The release whose manager faults are seeded into.
SEEDED = "0.33.0"
COLUMNS = (
    "release",
    "honest steps",
    "pages written",
    "pages read",
    "known faults",
    "other violations",
    "steps/s",
    "steps/s without memory",
    "host waits in steps",
)


def row(release: str, lives: MemoryLives) -> list[str]:
    """Return what a release showed, in the order of `COLUMNS`."""
    counts, without = lives.counts, lives.steps_per_second_without or 0.0
    return [
        release,
        f"{counts['steps']:,}",
        f"{counts['pages_written']:,}",
        f"{counts['pages_read']:,}",
        str(sum(lives.known.values())),
        str(len(lives.unknown)),
        f"{lives.steps_per_second:,.0f}",
        f"{without:,.0f}",
        "-" if lives.host_waits is None else "{:,} in {:,}".format(*lives.host_waits),
    ]


def faults(root: Path, device: str, is_late: Callable[[], bool]) -> tuple[int, int, list[str]]:
    """Return how many seeded faults were caught, of how many tried, and the others, a line each."""
    script = str(PROJECT_ROOT / "scripts" / "memory_faults.py")
    process = subprocess.Popen(
        [sys.executable, script, str(root), f"--device={device}", "--json"],
        env=tier_environment(root),
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    caught, missed = 0, []
    for line in process.stdout:
        one = json.loads(line)
        if one["found"] == one["error"] and one["silent_without"]:
            caught += 1
        else:
            missed.append(f"{one['fault']}: {one['detail']}")
        if is_late():
            process.terminate()
            break
    process.wait()
    return caught, caught + len(missed), missed


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", type=Path, help="folder of unpacked releases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=PATIENCE_S, help="begin nothing later")
    options = parser.parse_args()
    began, device = time.monotonic(), options.device
    found = sorted(at.parent.name for at in options.trees.glob("*/vllm"))
    releases = [release for release in found if release not in WITHOUT_MEMORY]
    if not releases:
        print(
            f"{options.trees}: holds no release with KV memory (0.29.0/vllm, ...)", file=sys.stderr
        )
        return 2
    try:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise ImportError("torch finds no CUDA device")
    except ImportError as error:
        print(f"--device {device}: {error}", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name() if device == "cuda" else platform.machine()

    def is_late() -> bool:
        return time.monotonic() - began > options.seconds

    rows, said, wrong = [], [], []
    numbers = {"num_steps": NUM_STEPS, "num_without": NUM_WITHOUT}
    # The newest first: it is what faults are seeded into, and what matters most if time runs out.
    for release in reversed(releases):
        if is_late():
            said.append(f"vllm=={release}: not begun, {options.seconds:.0f} s are over")
            continue
        root = (options.trees / release).resolve()
        try:
            lives = run_in(root, f"vllm=={release}", device, **numbers, num_compared=NUM_COMPARED)
        except DriverError as error:
            wrong.append(f"vllm=={release}: {error}")
            continue
        rows.append(row(release, lives))
        said.append(f"vllm=={release}: {lives.copies}")
        wrong += [f"vllm=={release}: {line}" for line in (*lives.unknown, *lives.differing)]
        print(f"vllm=={release}: {time.monotonic() - began:.0f} s", flush=True)
        if release == SEEDED:
            caught, tried, missed = faults(root, device, is_late)
            said.append(f"faults caught: {caught} of {tried} tried in {SEEDED}")
            wrong += missed
            if not tried:
                wrong.append(f"no fault was tried in {SEEDED}: scripts/memory_faults.py says why")
            print(f"faults: {time.monotonic() - began:.0f} s", flush=True)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "numpy"))
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    print(f"\n{card}, {versions}{cuda}, Python {platform.python_version()}\n")
    print(table(rows))
    print("", *said, sep="\n")
    print("", *wrong, f"{time.monotonic() - began:.0f} s, {len(wrong)} problems", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
