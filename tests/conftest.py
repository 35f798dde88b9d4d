"""Fixtures that several test modules use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from conformance.replay import PROJECT_ROOT
from conformance.targets import CORE_FILE, resolve
from models.loader import CORE_MODULES
from models.predict import LiftedTree

#: A slow machine is no failure of the property under test.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

#: Releases with align mode.
RELEASES = tuple(f"0.{minor}.0" for minor in range(24, 34))

CopyTree = Callable[..., Path]
Capproof = Callable[..., "subprocess.CompletedProcess[str]"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in its background, and processes that tests interrupt inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def trees() -> Mapping[str, Path]:
    """Folders holding `vllm/`, by release: the one with vLLM #57050's fault, and its fix."""
    return {release: resolve(f"vllm=={release}").root for release in ("0.30.0", "0.31.0")}


class ReleaseTrees(Mapping[str, Path]):
    """Folders holding `vllm/`, by release, each fetched when it is first asked for."""

    def __getitem__(self, release: str) -> Path:
        if release not in RELEASES:
            raise KeyError(release)
        return resolve(f"vllm=={release}").root

    def __iter__(self) -> Iterator[str]:
        return iter(RELEASES)

    def __len__(self) -> int:
        return len(RELEASES)


class LiftedTrees(Mapping[str, LiftedTree]):
    """Releases whose families are explored, each tree and each family once in a session."""

    def __init__(self, trees: Mapping[str, Path]) -> None:
        self._trees = trees
        self._lifted: dict[str, LiftedTree] = {}

    def __getitem__(self, release: str) -> LiftedTree:
        if release not in self._lifted:
            self._lifted[release] = LiftedTree(self._trees[release])
        return self._lifted[release]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trees)

    def __len__(self) -> int:
        return len(self._trees)


@pytest.fixture(scope="session")
def release_trees() -> Mapping[str, Path]:
    """Folders holding `vllm/`, by release: all that align mode is proved of."""
    return ReleaseTrees()


@pytest.fixture(scope="session")
def lifted_trees(release_trees: Mapping[str, Path]) -> Mapping[str, LiftedTree]:
    """The same, lifted."""
    return LiftedTrees(release_trees)


@pytest.fixture
def copy_tree(tmp_path: Path) -> CopyTree:
    """Copies the KV-cache core of a release; edits replace text in its `MambaManager`, once."""

    def copy(release: str, *edits: tuple[str, str], name: str = "tree") -> Path:
        root, release_root = tmp_path / name, resolve(f"vllm=={release}").root
        for module in CORE_MODULES:
            file = Path(module.replace(".", "/") + ".py")
            if (release_root / file).is_file():
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(release_root / file, root / file)
        for old, new in edits:
            text = (root / CORE_FILE).read_text()
            before, head, manager = text.partition("class MambaManager")
            assert old in manager, old
            (root / CORE_FILE).write_text(before + head + manager.replace(old, new, 1))
        return root

    return copy


@pytest.fixture
def own_cache(trees: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the trees of the environment's cache, and nothing else."""
    cache = tmp_path / "own-cache"
    cache.mkdir()
    (cache / "trees").symlink_to(trees["0.31.0"].parent)
    monkeypatch.setenv("CAPPROOF_CACHE", str(cache))
    return cache


@pytest.fixture
def capproof() -> Capproof:
    """Runs the real command line in a process of its own."""

    def run(*arguments: str, cwd: Path = PROJECT_ROOT, **environment: str) -> object:
        return subprocess.run(
            [sys.executable, "-m", "conformance.cli", *arguments],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT), **environment},
            stdin=subprocess.DEVNULL,
            timeout=900,
        )

    return run
