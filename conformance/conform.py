"""Run the generated tests with pytest, in the core tier or in the vllm tier.

The core tier is one pytest process for all targets. The vllm tier is one per target, with the
target's tree first on the path, since a process can import only one vLLM.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.replay import PROJECT_ROOT, TIERS, tier_environment
from conformance.targets import TargetError, resolve

DEVICES = ("auto", "cpu", "cuda")

AS_EXPECTED, FAILURES, COULD_NOT_RUN = 0, 1, 2

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
        device: One of `DEVICES`. The managers hold no device memory, so `cuda` only makes sure
            that there is such a device.

    Returns:
        0 where all went as expected, 1 where a test failed, 2 where the tests could not be run;
        the last with one line on standard error.
    """
    try:
        _check_request(targets, tier, tests_dir, device)
        roots = {target: _resolved_root(target) for target in targets}
    except ConformError as error:
        return _could_not_run(str(error))
    base = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capproof-tier", tier]
    base += [] if against is None else ["--capproof-against", against]
    tail = [str(tests_dir), *pytest_args]
    if tier == "core":
        named = [argument for target in targets for argument in ("--capproof-target", target)]
        return _run_pytest([*base, *named, *tail], _core_environment(), tests_dir)
    return max(
        _run_pytest([*base, "--capproof-target", target, *tail], tier_environment(root), tests_dir)
        for target, root in roots.items()
    )


def _check_request(targets: Sequence[str], tier: str, tests_dir: Path, device: str) -> None:
    if tier not in TIERS:
        raise ConformError(f"unknown tier {tier!r}: one of {', '.join(TIERS)}")
    if not targets:
        raise ConformError("no target given")
    if not Path(tests_dir).is_dir():
        raise ConformError(f"{tests_dir}: no such folder; render the tests with gen-tests")
    _check_installed("pytest")
    if tier == "vllm":
        _check_installed("torch")
    _check_device(device, tier)


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConformError(f"{package} is not installed in {sys.executable}; run make setup")


def _check_device(device: str, tier: str) -> None:
    if device not in DEVICES:
        raise ConformError(f"unknown device {device!r}: one of {', '.join(DEVICES)}")
    if device != "cuda":
        return
    if tier != "vllm":
        raise ConformError("--device cuda needs --tier vllm: the core tier runs without torch")
    if not importlib.import_module("torch").cuda.is_available():
        raise ConformError("--device cuda: torch finds no CUDA device on this machine")
    print("capproof: a CUDA device is there, but these tests place no KV memory on it yet")


def _resolved_root(target: str) -> Path:
    try:
        return Path(resolve(target).root)
    except TargetError as error:
        raise ConformError(str(error)) from error


def _core_environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), inherited]))
    return {**os.environ, "PYTHONPATH": path}


def _run_pytest(command: Sequence[str], environment: dict[str, str], tests_dir: Path) -> int:
    sys.stdout.flush()
    status = subprocess.run(command, env=environment, cwd=PROJECT_ROOT, check=False).returncode
    if status == _NO_TESTS_COLLECTED:
        return _could_not_run(f"{tests_dir}: no test was collected")
    return status if status in (AS_EXPECTED, FAILURES) else COULD_NOT_RUN


def _could_not_run(reason: str) -> int:
    print(f"capproof: {reason}", file=sys.stderr)
    return COULD_NOT_RUN
