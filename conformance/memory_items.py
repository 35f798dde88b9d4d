"""Lives of a target on KV-cache tensors as a test of a pytest run (`--capproof-device`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.bindings import DriverError
from conformance.conform import live_with_memory
from conformance.targets import Tree


class _Wrong(Exception):
    """Violations that are not known, and copies that differ: a line each."""


class MemoryTest(pytest.Item):
    """Random lives of one target on a device, in a process of its own."""

    tree: Tree

    def runtest(self) -> None:
        """Fail where a life violates a rule in a way that is not known, or a copy differs."""
        config = self.config
        seen = live_with_memory(
            self.tree,
            config.getoption("--capproof-device"),
            config.getoption("--capproof-against", None),
        )
        if not seen.was_run:
            pytest.skip(seen.said[0])
        self.add_report_section("call", "KV memory", "\n".join(seen.said))
        if seen.wrong:
            raise _Wrong("\n".join([*seen.said, *seen.wrong]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Say what was wrong, or why nothing was run, without a traceback of ours."""
        if excinfo.errisinstance((_Wrong, DriverError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return where the test is, which is in no file."""
        return self.config.rootpath, None, self.name


def memory_tests(session: pytest.Session, trees: Sequence[Tree]) -> list[pytest.Item]:
    """Return a test for each target."""
    tests: list[pytest.Item] = []
    for tree in trees:
        test = MemoryTest.from_parent(session, name=f"kv-memory[{tree.target}]")
        test.tree = tree
        tests.append(test)
    return tests
