"""What rendered tests run with: the real managers of the targets that the command line names.

`driver` is one driver per target. A test of a theorem that it, or one of its parameter sets, is
marked `refuted` of for a target is a strict xfail there: a fix is noticed, and another failure is
not hidden.

Hooks come from the conftest of a folder that gen-tests wrote, from the distribution's plugin
(`conformance.pytest_plugin`) where one of its options is given, or from both; each does its work
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import pytest

from conformance.driver import BindingError, Driver, core_driver, vllm_driver
from conformance.expectations import expectations, why_nothing_is_expected
from conformance.pytest_plugin import pytest_addoption
from conformance.targets import DEFAULT_TARGETS, TargetError, resolve

__all__ = [
    "driver",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_report_header",
    "pytest_sessionstart",
]

COULD_NOT_RUN = 2

_drivers = pytest.StashKey[dict[str, Driver]]()
#: What a configuration, a test function or an item has been through.
_is_done = pytest.StashKey[bool]()
_is_announced = pytest.StashKey[bool]()
_is_extended = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    if not _is_first(config.stash, _is_done):
        return
    config.addinivalue_line("markers", "theorem(slug): the theorem that the test asserts")
    config.addinivalue_line(
        "markers",
        "refuted(theorem, targets, raises=AssertionError): for each target named, with the reason, "
        "the theorem is refuted: its test is a strict xfail",
    )
    config.addinivalue_line(
        "markers",
        "not_applicable(targets, theorems=None): for each target named, with the reason, the step "
        "cannot be asked of that release, or the theorems named say nothing of it there: the test "
        "is deselected there, and counted as such",
    )
    config.stash[_drivers] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Set every target up before anything is collected, so that none can be skipped over."""
    targets = _targets(session.config)
    if _tier(session.config) == "vllm" and len(targets) != 1:
        _stop("the vllm tier runs one target per process: give one --capproof-target")
    for target in targets:
        _driver_of(session.config, target)
    against = session.config.getoption("--capproof-against", None)
    reason = None if against is None else why_nothing_is_expected(against)
    if reason is not None:
        _stop(f"--capproof-against: {reason}")
    _check_device(session.config.getoption("--capproof-device", None))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which vLLM is under test, in which tier."""
    if not _is_first(config.stash, _is_announced):
        return []
    return [
        f"capproof: {target}, tier {_tier(config)}, {driver.location}"
        for target, driver in config.stash[_drivers].items()
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes a driver once per target."""
    if "driver" in metafunc.fixturenames and _is_first(metafunc.definition.stash, _is_done):
        targets = _targets(metafunc.config)
        metafunc.parametrize("driver", targets, ids=targets, indirect=True, scope="session")


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what the target cannot be asked; expect the failure of what is refuted for it."""
    if config.getoption("--capproof-device", None) and _is_first(config.stash, _is_extended):
        from conformance.memory_items import memory_tests

        items += memory_tests(session, [resolve(target) for target in _targets(config)])
    against = config.getoption("--capproof-against", None)
    applicable: list[pytest.Item] = []
    not_applicable: list[pytest.Item] = []
    for item in items:
        (not_applicable if _cannot_be_asked(item, against) else applicable).append(item)
    if not_applicable:
        config.hook.pytest_deselected(items=not_applicable)
        items[:] = applicable
    for item in applicable:
        if not _is_first(item.stash, _is_done):
            continue
        for mark in item.iter_markers("refuted"):
            reasons = _reasons(item, mark)
            if mark.kwargs["theorem"] != _theorem_of(item):
                continue
            for name in _judged_as(_target_of(item), against):
                if name in reasons:
                    item.add_marker(_expected_failure(mark, reasons[name]))
                    _say_briefly(item)


@pytest.fixture(scope="session")
def driver(request: pytest.FixtureRequest) -> Driver:
    """The driver of one target."""
    return _driver_of(request.config, request.param)


def _is_first(stash: pytest.Stash, key: pytest.StashKey[bool]) -> bool:
    """Whether a hook sees something for the first time; from now on it has."""
    is_new = key not in stash
    stash[key] = True
    return is_new


def _cannot_be_asked(item: pytest.Item, against: str | None) -> bool:
    judged_as = _judged_as(_target_of(item), against)
    return any(
        not judged_as.isdisjoint(mark.kwargs["targets"])
        and ("theorems" not in mark.kwargs or _theorem_of(item) in mark.kwargs["theorems"])
        for mark in item.iter_markers("not_applicable")
    )


def _theorem_of(item: pytest.Item) -> str:
    """The theorem that a test with marks about theorems asserts: without it they say nothing."""
    mark = item.get_closest_marker("theorem")
    if mark is None or len(mark.args) != 1 or mark.kwargs:
        raise pytest.UsageError(f"{item.nodeid}: the test needs the mark theorem(slug)")
    slug: str = mark.args[0]
    return slug


def _expected_failure(mark: pytest.Mark, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(
        strict=True,
        raises=mark.kwargs.get("raises", AssertionError),
        reason=f"{mark.kwargs['theorem']} is refuted: {reason}",
    )


def _say_briefly(item: pytest.Item) -> None:
    """Report an expected failure in one line: a traceback costs a parse of the whole file."""
    in_full = item.repr_failure

    def repr_failure(excinfo: pytest.ExceptionInfo[BaseException]) -> object:
        return excinfo.exconly() if excinfo.errisinstance(AssertionError) else in_full(excinfo)

    item.repr_failure = repr_failure  # type: ignore[method-assign]


def _reasons(item: pytest.Item, mark: pytest.Mark) -> Mapping[str, str]:
    if mark.args or not {"theorem", "targets"} <= mark.kwargs.keys() <= {
        "theorem",
        "targets",
        "raises",
    }:
        raise pytest.UsageError(f"{item.nodeid}: refuted takes theorem=, targets= and raises=")
    reasons: Mapping[str, str] = mark.kwargs["targets"]
    return reasons


def _target_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("driver")


def _judged_as(target: str | None, against: str | None) -> set[str | None]:
    """Targets of which it is known what is not true of them: itself; of a checkout ``against``."""
    has_expectations = any(target == known for known, *_ in expectations())
    return {target} if has_expectations or against is None else {target, against}


def _targets(config: pytest.Config) -> list[str]:
    given = config.getoption("--capproof-target", None)
    return list(dict.fromkeys(target.strip() for target in given or DEFAULT_TARGETS))


def _tier(config: pytest.Config) -> str:
    return str(config.getoption("--capproof-tier", None) or "core")


def _driver_of(config: pytest.Config, target: str) -> Driver:
    drivers = config.stash[_drivers]
    if target not in drivers:
        make = vllm_driver if _tier(config) == "vllm" else core_driver
        try:
            drivers[target] = make(resolve(target).root)
        except TargetError as error:
            _stop(str(error))
        except BindingError as error:
            _stop(f"{target}: {error}")
    return drivers[target]


def _check_device(device: str | None) -> None:
    """Refuse a device that is not there, before anything is collected."""
    if device is None:
        return
    from conformance.conform import ConformError, check_cuda, check_installed

    try:
        check_installed("torch")
        if device == "cuda":
            check_cuda("--capproof-device")
    except ConformError as error:
        _stop(str(error))


def _stop(reason: str) -> NoReturn:
    """End the run: a target that cannot be set up is never a skip."""
    pytest.exit(f"capproof: {reason}", returncode=COULD_NOT_RUN)
