"""The pytest plugin of the distribution, in pytest runs of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance import conform, memory_items
from conformance.conform import MemorySeen
from conformance.replay import PROJECT_ROOT
from conformance.targets import resolve

OLD, NEW = "vllm==0.30.0", "vllm==0.31.0"
HAS_TORCH = importlib.util.find_spec("torch") is not None
#: A person's own test, of the long prompt of vLLM #57050, which 0.30.0 overcounts.
OWN = """
import pytest
from spec.vocabulary import Call, Geometry

@pytest.mark.theorem("exact-estimate")
@pytest.mark.refuted(theorem="exact-estimate", targets={"vllm==0.30.0": "761 asked for, 2 taken"})
def test_long_prompt(driver):
    request = driver.request(Geometry(896, 128, 0, 1, 64, False), 1024)
    request.apply(Call(896, 896, 0, 0))
    step = request.apply(Call(704_547, 704_547, 896, 896))
    assert step.estimate == step.drawn

def test_of_nothing_of_ours():
    pass
"""


def pytest_in(
    folder: Path, *arguments: str, without: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder as a person does; packages that it lacks raise when imported."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in without)
    script = f"import sys\n{blocked}import pytest\nsys.exit(pytest.main(sys.argv[1:]))\n"
    command = [sys.executable, "-c", script, "-p", "no:cacheprovider", "--strict-markers"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        timeout=300,
    )


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of a person's own, with tests and without a conftest."""
    (tmp_path / "test_own.py").write_text(OWN)
    return tmp_path


def test_the_distribution_registers_the_plugin() -> None:
    """Pytest finds it without any conftest."""
    (found,) = (e for e in entry_points(group="pytest11") if e.name == "capproof")
    assert found.value == "conformance.pytest_plugin"


def test_own_tests_run_against_targets(own: Path) -> None:
    """`driver` is one per target, a known fault is a strict xfail there, other tests just run."""
    done = pytest_in(own, "-rx", "--capproof-target", OLD, "--capproof-target", NEW)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 1 xfailed" in done.stdout
    assert f"capproof: {OLD}, tier core, {resolve(OLD).root}\n" in done.stdout
    assert "exact-estimate is refuted: 761 asked for, 2 taken" in done.stdout


def test_a_checkout_is_judged_against_a_target(own: Path) -> None:
    """--capproof-against lends a checkout the known faults of a release; else they fail."""
    target = f"path:{resolve(OLD).root}"

    assert "1 failed" in pytest_in(own, "--capproof-target", target).stdout
    done = pytest_in(own, "--capproof-target", target, "--capproof-against", OLD)
    assert "1 passed, 1 xfailed" in done.stdout


@pytest.mark.parametrize("place", [".", "below"])
def test_hooks_of_plugin_and_conftest_do_their_work_once(own: Path, place: str) -> None:
    """With the conftest of generated tests, wherever it is found, every test runs once a target."""
    (own / place).mkdir(exist_ok=True)
    shutil.copyfile(PROJECT_ROOT / "generated_tests" / "conftest.py", own / place / "conftest.py")
    shutil.copyfile(own / "test_own.py", own / place / "test_again.py")

    done = pytest_in(own, "--capproof-target", OLD, "--capproof-target", NEW)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 2 xfailed" in done.stdout
    assert done.stdout.count(f"capproof: {OLD}, tier core") == 1


def test_generated_tests_run_without_the_plugin(own: Path) -> None:
    """The conftest alone is enough, as in a checkout that is not installed."""
    shutil.copyfile(PROJECT_ROOT / "generated_tests" / "conftest.py", own / "conftest.py")

    done = pytest_in(own, "-p", "no:capproof", "--capproof-target", NEW)

    assert "2 passed" in done.stdout


INERT = """
import sys

def test_nothing_is_there(request):
    heavy = {"z3", "jinja2", "torch", "vllm", "click", "rich", "conformance.testing"}
    heavy |= {"conformance.targets", "spec.theorems", "models.loader"}
    assert not {name for name in heavy if sys.modules.get(name)}
    ours = {name for name in sys.modules if name.split(".")[0] in ("conformance", "spec", "models")}
    assert ours == {"conformance", "conformance.pytest_plugin"}
    assert not [line for line in request.config.getini("markers") if line.startswith("refuted")]

def test_driver_is_free(driver):
    assert driver == "my own"
"""


def test_without_its_options_it_does_nothing(tmp_path: Path) -> None:
    """It imports nothing, registers no marker, and `driver` is anybody's name."""
    (tmp_path / "test_inert.py").write_text(INERT)
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef driver():\n    return 'my own'\n"
    )

    done = pytest_in(tmp_path)

    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_it_runs_without_solver_templates_and_torch(own: Path) -> None:
    """What is proved is no business of a test run."""
    done = pytest_in(own, "--capproof-target", NEW, without=("z3", "jinja2", "torch"))

    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capproof-target", "vllm=0.31.0"], "is not a target"),
        (["--capproof-against", "vllm=0.31.0"], "nothing is expected of 'vllm=0.31.0'"),
        (["--capproof-tier", "vllm"], "the vllm tier runs one target per process"),
        (["--capproof-target", NEW, "--capproof-device", "cpu"], "torch is not installed"),
    ],
)
def test_what_cannot_be_run_ends_the_run(own: Path, options: list[str], message: str) -> None:
    """Exit status 2 before anything is collected, with a line that says why."""
    without = ("torch",) if "--capproof-device" in options else ()

    done = pytest_in(own, *options, without=without)

    assert done.returncode == 2
    assert message in done.stdout + done.stderr
    assert "passed" not in done.stdout


# ---- lives on KV-cache tensors -------------------------------------------------------------------


@pytest.mark.skipif(not HAS_TORCH, reason="KV memory needs torch")
def test_a_device_adds_a_test_per_target(own: Path) -> None:
    """It is collected beside the others, and -k leaves it out as any test."""
    both = ("--capproof-target", OLD, "--capproof-target", NEW, "--capproof-device", "cpu")

    listed = pytest_in(own, *both, "--collect-only", "-q").stdout
    assert [line for line in listed.splitlines() if "kv-memory" in line] == [
        *(f"::kv-memory[{target}]" for target in (OLD, NEW))
    ]
    assert "kv-memory" not in pytest_in(own, *both, "--collect-only", "-q", "-k", "own").stdout


@pytest.mark.skipif(not HAS_TORCH, reason="KV memory needs torch")
def test_lives_are_lived_on_the_device(own: Path) -> None:
    """A release without unknown violations passes, and the report says what was lived."""
    (own / "conftest.py").write_text(
        "from conformance import conform\nconform.NUM_LIVES, conform.NUM_COMPARED = 10, 2\n"
    )

    options = ("--capproof-target", NEW, "--capproof-device", "cpu", "-k", "kv-memory", "-rP")
    done = pytest_in(own, *options)

    assert "1 passed, 2 deselected" in done.stdout, done.stdout + done.stderr
    assert "KV memory on cpu: 10 lives, " in done.stdout


@pytest.mark.parametrize(
    ("seen", "ends"),
    [
        (MemorySeen(True, ("10 lives",), ("  lost a state",)), memory_items._Wrong),
        (MemorySeen(False, ("no KV memory",)), pytest.skip.Exception),
        (MemorySeen(True, ("10 lives",)), None),
    ],
    ids=["violation", "release without memory", "as expected"],
)
def test_what_lives_show_decides(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    seen: MemorySeen,
    ends: type[BaseException] | None,
) -> None:
    """A violation fails with its line, and a release without such memory is skipped."""
    monkeypatch.setattr(memory_items, "live_with_memory", lambda *_: seen)
    (test,) = memory_items.memory_tests(request.session, [resolve(NEW)])
    options = SimpleNamespace(getoption=lambda *_: "cpu")
    monkeypatch.setattr(test, "config", options)

    if ends is None:
        test.runtest()
        return
    with pytest.raises(ends) as excinfo:
        test.runtest()
    if ends is memory_items._Wrong:
        assert test.repr_failure(excinfo) == "10 lives\n  lost a state"


def test_conform_says_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and the plugin have one way to live lives."""
    seen = MemorySeen(True, ("10 lives",), ("  lost a state",))
    monkeypatch.setattr(conform, "live_with_memory", lambda *_: seen)

    assert conform._live_with_memory(resolve(NEW), "cpu", None) == conform.FAILURES
    assert capsys.readouterr().out == f"capproof: {NEW}: 10 lives\n  lost a state\n"
