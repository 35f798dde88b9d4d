"""Run the generated tests with pytest, in the core tier or in the vllm tier.

The core tier is one pytest process for all targets. The vllm tier is one per target, with the
target's tree first on the path, since a process can import only one vLLM; and in another, random
lives of several requests on KV-cache tensors on a device (`conformance.memory_lives`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.bindings import DriverError
from conformance.replay import PROJECT_ROOT, TIERS, tier_environment
from conformance.targets import TargetError, Tree, resolve

if TYPE_CHECKING:
    from conformance.memory_lives import MemoryLives

DEVICES = ("auto", "cpu", "cuda")

AS_EXPECTED, FAILURES, COULD_NOT_RUN = 0, 1, 2

#: Random lives with KV memory of each target; they are the same in every run.
NUM_LIVES = 200
#: Of these, lives whose copies are compared with the release's own.
NUM_COMPARED = 40
#: Releases whose worker has no `allocate_kv_cache` of its own.
WITHOUT_MEMORY = ("0.24.0", "0.25.0", "0.26.0", "0.27.0", "0.28.0")
#: Violations of a target that are shown.
_MOST_LINES = 10

#: Starts pytest in the caller's folder, which relative targets and files mean, without having it on
#: the path of imports: a vLLM checkout would be imported instead of the target.
_START = (
    "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
    "import pytest; sys.exit(pytest.main())"
)
#: pytest's own exit status when it collected no test.
_NO_TESTS_COLLECTED = 5


class ConformError(Exception):
    """The tests cannot be run; one line saying what is missing."""


def run(
    targets: Sequence[str],
    tier: str,
    pytest_args: Sequence[str],
    tests_dir: Path,
    *,
    device: str = "auto",
    against: str | None = None,
) -> int:
    """Run the generated tests on targets.

    Args:
        targets: Targets, as on the command line.
        tier: One of `TIERS`.
        pytest_args: Passed on to pytest.
        tests_dir: Folder of the generated tests.
        against: Target whose known faults are expected of a target without expectations.
        device: One of `DEVICES`: where the vllm tier keeps KV memory. `auto` is `cuda` if torch
            finds such a device, else `cpu`.

    Returns:
        0 where all went as expected, 1 where a test failed, 2 where the tests could not be run;
        the last with one line on standard error.
    """
    try:
        _check_request(targets, tier, tests_dir, device)
        trees = {target: _resolved(target) for target in targets}
    except ConformError as error:
        return _could_not_run(str(error))
    base = [sys.executable, "-c", _START, "-c", str(PROJECT_ROOT / "pyproject.toml")]
    base += ["-p", "no:cacheprovider", "--capproof-tier", tier]
    base += [] if against is None else ["--capproof-against", against]
    tail = [str(tests_dir), *pytest_args]
    if tier == "core":
        named = [argument for target in targets for argument in ("--capproof-target", target)]
        return _run_pytest([*base, *named, *tail], _core_environment(), tests_dir)
    statuses = []
    for target, tree in trees.items():
        command = [*base, "--capproof-target", target, *tail]
        statuses.append(_run_pytest(command, tier_environment(tree.root), tests_dir))
        statuses.append(_live_with_memory(tree, device, against))
    return max(statuses)


def _live_with_memory(tree: Tree, device: str, against: str | None) -> int:
    """Live random lives of a target on KV-cache tensors, and say what came of it."""
    try:
        seen = live_with_memory(tree, device, against)
    except DriverError as error:
        return _could_not_run(f"{tree.target}: {error}")
    print("\n".join([*(f"capproof: {tree.target}: {line}" for line in seen.said), *seen.wrong]))
    return FAILURES if seen.wrong else AS_EXPECTED


@dataclass(frozen=True)
class MemorySeen:
    """What lives of a target on KV-cache tensors showed.

    Attributes:
        was_run: Whether there were any: a release may have no such memory.
        said: Lines that say what was done, or why nothing was.
        wrong: Violations that are not known and copies that differ, a line each, if many not all.
    """

    was_run: bool
    said: tuple[str, ...]
    wrong: tuple[str, ...] = ()


def live_with_memory(tree: Tree, device: str, against: str | None) -> MemorySeen:
    """Live random lives of a target on KV-cache tensors, in a process of its own.

    Args:
        tree: The target.
        device: One of `DEVICES`.
        against: Target whose known faults are expected of a target without expectations.

    Raises:
        DriverError: The tree cannot be driven, or the device lacks memory.
    """
    from conformance.memory_lives import run_in

    if tree.release in WITHOUT_MEMORY:
        return MemorySeen(False, ("no KV memory: its worker has no allocate_kv_cache",))
    known_as = tree.target if tree.release or against is None else against
    numbers = {"num_lives": NUM_LIVES, "num_compared": NUM_COMPARED}
    lives = run_in(tree.root, known_as, _device(device), **numbers)
    wrong = [f"  {line}" for line in (*lives.unknown, *lives.differing)]
    more = [f"  and {len(wrong) - _MOST_LINES} more"] if len(wrong) > _MOST_LINES else []
    return MemorySeen(True, (summary(lives), lives.copies), (*wrong[:_MOST_LINES], *more))


def summary(lives: MemoryLives) -> str:
    """Say in a line what lives with KV memory showed."""
    counts, known = lives.counts, sum(lives.known.values())
    return (
        f"KV memory on {lives.device}: {lives.num_lives} lives, {counts['steps']:,} steps, "
        f"{counts['pages_written']:,} pages written, {counts['pages_read']:,} read, "
        f"{counts['blocks_zeroed']:,} blocks cleared, {counts['blocks_copied']:,} copied, "
        f"{counts['states_moved']:,} states moved; "
        f"{known + len(lives.unknown)} violations, {len(lives.unknown)} not known"
    )


def _check_request(targets: Sequence[str], tier: str, tests_dir: Path, device: str) -> None:
    if tier not in TIERS:
        raise ConformError(f"unknown tier {tier!r}: one of {', '.join(TIERS)}")
    if not targets:
        raise ConformError("no target given")
    if not Path(tests_dir).is_dir():
        raise ConformError(f"{tests_dir}: no such folder; render the tests with gen-tests")
    check_installed("pytest")
    if tier == "vllm":
        check_installed("torch")
    _check_device(device, tier)


def check_installed(package: str) -> None:
    """Refuse to go on without a package.

    Raises:
        ConformError: It is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConformError(f"{package} is not installed in {sys.executable}; run make setup-test")


def _check_device(device: str, tier: str) -> None:
    if device not in DEVICES:
        raise ConformError(f"unknown device {device!r}: one of {', '.join(DEVICES)}")
    if device != "cuda":
        return
    if tier != "vllm":
        raise ConformError("--device cuda needs --tier vllm: the core tier runs without torch")
    check_cuda("--device")


def check_cuda(option: str) -> None:
    """Refuse `cuda` where torch finds no such device.

    Raises:
        ConformError: It finds none.
    """
    if not importlib.import_module("torch").cuda.is_available():
        raise ConformError(f"{option} cuda: torch finds no CUDA device on this machine")


def _device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if importlib.import_module("torch").cuda.is_available() else "cpu"


def _resolved(target: str) -> Tree:
    try:
        return resolve(target)
    except TargetError as error:
        raise ConformError(str(error)) from error


def _core_environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), inherited]))
    return {**os.environ, "PYTHONPATH": path}


def _run_pytest(command: Sequence[str], environment: dict[str, str], tests_dir: Path) -> int:
    sys.stdout.flush()
    status = subprocess.run(command, env=environment, check=False).returncode
    if status == _NO_TESTS_COLLECTED:
        return _could_not_run(f"{tests_dir}: no test was collected")
    return status if status in (AS_EXPECTED, FAILURES) else COULD_NOT_RUN


def _could_not_run(reason: str) -> int:
    print(f"capproof: {reason}", file=sys.stderr)
    return COULD_NOT_RUN
