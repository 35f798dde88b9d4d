"""The pytest plugin of the distribution: scenario tests against a vLLM tree, in any pytest run.

It only adds options until one of them is given: nothing is imported, no fixture, hook or marker is
there. Then `conformance.testing` takes part: the fixture `driver`, the markers, strict xfails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

#: Options by the name that pytest keeps their values under.
_OPTIONS = ("capproof_target", "capproof_against", "capproof_tier", "capproof_device")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say what to run on, unless they are there.

    The conftest of a folder that gen-tests wrote adds them too, for runs without this plugin.
    """
    group = parser.getgroup("capproof", "capproof: vLLM's KV-cache managers under test")
    if group.options:
        return
    group.addoption(
        "--capproof-target",
        action="append",
        metavar="T",
        help="vLLM tree to test: vllm==X.Y.Z, path:DIR or installed; may be repeated "
        "(default: the project's default targets)",
    )
    group.addoption(
        "--capproof-against",
        metavar="T",
        help="target whose known faults a target without expectations has too",
    )
    group.addoption(
        "--capproof-tier",
        choices=("core", "vllm"),
        help="core (the default): the tree's managers under placeholders; vllm: everything "
        "imported for real",
    )
    group.addoption(
        "--capproof-device",
        choices=("auto", "cpu", "cuda"),
        help="also live random lives of each target on KV-cache tensors there, a test per target, "
        "in a process of its own that needs torch; auto is cuda where torch finds a device",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let `conformance.testing` take part where an option is given."""
    if any(config.getoption(name, None) is not None for name in _OPTIONS):
        from conformance import testing

        config.pluginmanager.register(testing, "capproof-testing")
