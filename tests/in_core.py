"""Run a standalone test file against a tree's core, without torch or vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.loader import BLOCK_POOL, INTERFACE, MANAGERS, Core


def outcomes_in_core(text: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Run a file's tests against a tree's core under placeholders: whether each of them passes."""
    core = Core(root)
    for name in (BLOCK_POOL, MANAGERS, INTERFACE):
        monkeypatch.setitem(sys.modules, name, core.module(name))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(float32=None))
    # The marker is vLLM's.
    monkeypatch.setitem(sys.modules, "pytest", SimpleNamespace(mark=SimpleNamespace(cpu_test=None)))
    names: dict[str, object] = {}
    exec(compile(text, "standalone.py", "exec"), names)
    monkeypatch.undo()
    return {
        name: _passes(test)
        for name, test in names.items()
        if name.startswith("test_") and callable(test)
    }


def _passes(test: object) -> bool:
    try:
        test()  # type: ignore[operator]
    except (AssertionError, ValueError):
        return False
    return True
