from __future__ import annotations

import importlib.util
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance import conform, memory_lives
from conformance.conform import AS_EXPECTED, COULD_NOT_RUN, FAILURES, run
from conformance.replay import PROJECT_ROOT
from conformance.targets import resolve

OLD, NEW = "vllm==0.30.0", "vllm==0.31.0"
HAS_TORCH = importlib.util.find_spec("torch") is not None

#: As rendered tests are: the long prompt of vLLM #57050, which 0.30.0 overcounts.
RENDERED = """
import pytest

from spec.vocabulary import Call, Geometry

OVERCOUNTS = {"vllm==0.30.0": "761 blocks asked for, 2 taken"}
ROWS = [
    pytest.param(1000, id="short"),
    pytest.param(
        704_547,
        id="long",
        marks=pytest.mark.refuted(theorem="exact-estimate", targets=OVERCOUNTS),
    ),
]

def long_prompt(driver, num_tokens):
    request = driver.request(Geometry(896, 128, 0, 1, 64, False), 1024)
    request.apply(Call(896, 896, 0, 0))
    return request.apply(Call(num_tokens, num_tokens, 896, 896))

@pytest.mark.theorem("exact-estimate")
@pytest.mark.parametrize("num_tokens", ROWS)
def test_estimate_is_drawn(driver, num_tokens):
    step = long_prompt(driver, num_tokens)
    assert step.estimate == step.drawn

@pytest.mark.theorem("dry-run-parity")
@pytest.mark.parametrize("num_tokens", ROWS)
def test_dry_run_is_the_estimate(driver, num_tokens):
    step = long_prompt(driver, num_tokens)
    assert step.dry_run == step.estimate

@pytest.mark.theorem("exact-estimate")
@pytest.mark.refuted(theorem="exact-estimate", targets=OVERCOUNTS, raises=AssertionError)
def test_estimate_is_drawn_whatever_the_row(driver):
    step = long_prompt(driver, 704_547)
    assert step.estimate == step.drawn
"""

Tests = Callable[[str], Path]


@pytest.fixture
def tests_dir(tmp_path: Path) -> Tests:
    """Makes a folder as `generated_tests/` is, with one rendered file."""

    def make(rendered: str) -> Path:
        shutil.copyfile(PROJECT_ROOT / "generated_tests" / "conftest.py", tmp_path / "conftest.py")
        (tmp_path / "test_rendered.py").write_text(textwrap.dedent(rendered))
        return tmp_path

    return make


def test_refuted_rows_fail_as_expected_and_only_where_refuted(
    tests_dir: Tests, capfd: pytest.CaptureFixture[str]
) -> None:
    """A mark on a test or on a row is a strict xfail for its targets and its theorem only."""
    status = run([OLD, NEW], "core", ["-v", "-ra"], tests_dir(RENDERED))

    out = capfd.readouterr().out
    assert status == AS_EXPECTED
    assert "8 passed, 2 xfailed" in out
    assert f"capproof: {OLD}, tier core, {resolve(OLD).root}\n" in out
    assert "test_estimate_is_drawn[vllm==0.30.0-long] XFAIL" in out
    assert "exact-estimate is refuted: 761 blocks asked for, 2 taken" in out


def test_a_fix_is_noticed(tests_dir: Tests, capfd: pytest.CaptureFixture[str]) -> None:
    """What is marked as refuted and passes is a failure."""
    rendered = RENDERED.replace('"vllm==0.30.0":', '"vllm==0.31.0":')

    assert run([NEW], "core", [], tests_dir(rendered)) == FAILURES
    assert "XPASS(strict)" in capfd.readouterr().out


def test_another_failure_is_not_hidden(tests_dir: Tests) -> None:
    """A refuted theorem excuses its own exception type only."""
    rendered = RENDERED.replace("assert step.estimate == step.drawn", "raise ValueError('other')")

    assert run([OLD], "core", ["-k", "long or whatever"], tests_dir(rendered)) == FAILURES


@pytest.mark.parametrize(
    "malformed",
    [
        ('refuted(theorem="exact-estimate", ', "refuted("),
        ('@pytest.mark.theorem("exact-estimate")\n', ""),
        ('theorem("exact-estimate")', "theorem()"),
    ],
    ids=["no theorem refuted", "no theorem asserted", "no slug"],
)
def test_a_malformed_mark_is_refused(tests_dir: Tests, malformed: tuple[str, str]) -> None:
    """A mark that names no theorem would hide a failure without a reason."""
    rendered = RENDERED.replace(*malformed, 1)

    assert run([OLD], "core", [], tests_dir(rendered)) == COULD_NOT_RUN


NOT_APPLICABLE = """
import pytest

def test_is_run(driver):
    pass

@pytest.mark.not_applicable(targets={"vllm==0.30.0": "no such step"})
def test_cannot_be_asked(driver):
    assert driver.location.endswith("0.31.0")

@pytest.mark.theorem("no-undercount")
@pytest.mark.not_applicable(theorems=["no-undercount"], targets={"vllm==0.30.0": "silent"})
def test_says_nothing(driver):
    assert driver.location.endswith("0.31.0")

@pytest.mark.theorem("exact-estimate")
@pytest.mark.not_applicable(theorems=["no-undercount"], targets={"vllm==0.30.0": "silent"})
def test_says_something(driver):
    pass
"""


def test_what_cannot_be_asked_is_left_out_and_counted(
    tests_dir: Tests, capfd: pytest.CaptureFixture[str]
) -> None:
    """A mark leaves a test out for its targets and its theorems, and for no others."""
    assert run([OLD, NEW], "core", [], tests_dir(NOT_APPLICABLE)) == AS_EXPECTED

    assert "6 passed, 2 deselected" in capfd.readouterr().out


def test_a_checkout_is_asked_no_more_than_the_target_that_it_is_judged_as(
    tests_dir: Tests, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--against` says what does not apply to a checkout, too; without it everything is asked."""
    checkout, tests = [f"path:{resolve(OLD).root}"], tests_dir(NOT_APPLICABLE)

    assert run(checkout, "core", [], tests) == FAILURES
    assert run(checkout, "core", [], tests, against=OLD) == AS_EXPECTED

    assert "2 passed, 2 deselected" in capfd.readouterr().out


UNBOUND = """
import pytest

from conformance.steps import chunk, hit, last_of
from spec.vocabulary import Geometry

@pytest.mark.theorem("no-undercount")
@pytest.mark.refuted(theorem="no-undercount", targets={"vllm==0.24.0": "expected"})
def test_unbound(driver):
    last_of(driver.request(Geometry(16, 4, 0, 0, 4, False), 32), [hit(24, 40, blocks=2)])

@pytest.mark.theorem("no-undercount")
@pytest.mark.refuted(theorem="no-undercount", targets={"vllm==0.24.0": "expected"})
def test_earlier_step(driver):
    request = driver.request(Geometry(16, 4, 0, 0, 4, False), 1)
    last_of(request, [chunk(0, 40), chunk(40, 44)])
"""


def test_a_step_that_cannot_be_brought_about_is_a_failure(
    tests_dir: Tests, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither a release without the feature nor a pool too short shows that a theorem fails."""
    assert run(["vllm==0.24.0"], "core", [], tests_dir(UNBOUND)) == FAILURES

    out = capfd.readouterr().out
    assert "2 failed" in out
    assert "this release has no MambaManager._has_partial_local_hit" in out
    assert "EarlierStepError" in out


def one_line(capfd: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error, which is one line."""
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("capproof: ")
    return line


def test_no_test_is_not_success(tests_dir: Tests, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that collected nothing has shown nothing."""
    assert run([NEW], "core", ["-k", "nothing"], tests_dir(RENDERED)) == COULD_NOT_RUN
    assert "no test was collected" in one_line(capfd)


@pytest.mark.parametrize(
    ("targets", "tier", "device", "message"),
    [
        (["vllm=0.31.0"], "core", "auto", "is not a target"),
        (["path:/nowhere"], "core", "auto", "there is no folder /nowhere"),
        ([], "core", "auto", "no target given"),
        ([NEW], "gpu", "auto", "unknown tier 'gpu'"),
        ([NEW], "core", "tpu", "unknown device 'tpu'"),
        ([NEW], "core", "cuda", "--device cuda needs --tier vllm"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tests_dir: Tests,
    capfd: pytest.CaptureFixture[str],
    targets: list[str],
    tier: str,
    device: str,
    message: str,
) -> None:
    """Bad arguments end in exit status 2 and a line that says what is wrong."""
    assert run(targets, tier, [], tests_dir(RENDERED), device=device) == COULD_NOT_RUN
    assert message in one_line(capfd)


@pytest.mark.parametrize("package", ["pytest", "torch"])
def test_a_missing_package_is_one_line(
    tests_dir: Tests,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    """The vllm tier without torch does not run, and is not skipped."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        conform.importlib.util,
        "find_spec",
        lambda name: None if name == package else find_spec(name),
    )

    assert run([NEW], "vllm", [], tests_dir(RENDERED)) == COULD_NOT_RUN
    assert f"{package} is not installed" in one_line(capfd)


def test_a_folder_that_is_not_there_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tests that were not rendered yet are named, with what to do."""
    assert run([NEW], "core", [], tmp_path / "absent") == COULD_NOT_RUN
    assert "render the tests with gen-tests" in one_line(capfd)


def test_a_tree_that_cannot_be_driven_stops_the_run(
    tests_dir: Tests, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A broken tree is exit status 2 before anything is collected, never a skip."""
    managers = tmp_path / "tree/vllm/v1/core/single_type_kv_cache_manager.py"
    managers.parent.mkdir(parents=True)
    managers.write_text("class MambaManager: ...\n")

    target = f"path:{tmp_path / 'tree'}"
    assert run([NEW, target], "core", [], tests_dir(RENDERED)) == COULD_NOT_RUN
    out = capfd.readouterr().out
    assert f"Exit: capproof: {target}: " in out
    assert "passed" not in out


def test_relative_paths_are_those_of_the_caller(
    tests_dir: Tests,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A target, a folder of tests and a file of pytest's mean what they do where the command is."""
    tests_dir(RENDERED)
    monkeypatch.chdir(tmp_path)
    Path("vllm").symlink_to(resolve(NEW).root / "vllm")

    status = run(["path:."], "core", ["--junitxml=out.xml"], Path("."), against=NEW)

    assert status == AS_EXPECTED
    assert f"capproof: path:., tier core, {tmp_path}\n" in capfd.readouterr().out
    assert Path("out.xml").is_file()


@pytest.mark.skipif(not HAS_TORCH, reason="the vllm tier needs torch")
def test_the_vllm_tier_runs_one_process_per_target(
    tests_dir: Tests, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tests run on really imported managers, each target's in a process of its own.

    Lives with KV memory follow where the release has any, and where it has none that is said.
    """
    monkeypatch.setattr(conform, "WITHOUT_MEMORY", (OLD.removeprefix("vllm=="),))
    monkeypatch.setattr(conform, "NUM_LIVES", 20)
    monkeypatch.setattr(conform, "NUM_COMPARED", 4)

    assert run([OLD, NEW], "vllm", [], tests_dir(RENDERED), device="cpu") == AS_EXPECTED

    out = capfd.readouterr().out
    assert "3 passed, 2 xfailed" in out
    assert "5 passed" in out
    assert ", torch 2" in out
    assert f"capproof: {OLD}: no KV memory: " in out
    assert f"capproof: {NEW}: KV memory on cpu: 20 lives, " in out
    assert f"capproof: {NEW}: copies compared with the release's own: " in out


@pytest.mark.skipif(not HAS_TORCH, reason="the vllm tier needs torch")
def test_lives_with_kv_memory_are_part_of_the_vllm_tier(
    tests_dir: Tests, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A checkout whose tests pass and that loses a state in memory fails, and says what it lost."""
    managers = Path("vllm/v1/core/single_type_kv_cache_manager.py")
    root = tmp_path / "checkout"

    def link(source: str, target: str) -> None:
        if Path(source).name == "__init__.py" or Path(target) == root / managers:
            shutil.copyfile(source, target)
        else:
            os.symlink(source, target)

    shutil.copytree(resolve(NEW).root / "vllm", root / "vllm", copy_function=link)
    before, inside, text = (root / managers).read_text().partition("class MambaManager")
    right, wrong = "block_hashes[fine_idx]", "block_hashes[max(fine_idx - 1, 0)]"
    assert right in text
    (root / managers).write_text(before + inside + text.replace(right, wrong, 1))
    target = f"path:{root}"
    given = {"device": "cpu", "against": NEW}

    assert run([target], "vllm", [], tests_dir(RENDERED), **given) == FAILURES
    out = capfd.readouterr().out
    assert "5 passed" in out
    assert f"capproof: {target}: KV memory on cpu: 200 lives, " in out
    assert "live-state-kept [StalePosition] step " in out


@pytest.mark.skipif(not HAS_TORCH, reason="the vllm tier needs torch")
def test_a_device_with_too_little_memory_is_one_line(
    tests_dir: Tests, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process that lives says is said, with the target, and the status is 2."""
    said = "--device cpu: out of memory: 1,024 bytes asked for"
    answer = {"reason": said, "out_of_memory": True}
    monkeypatch.setattr(memory_lives, "ask_process", lambda *_: ([answer], ""))
    monkeypatch.setattr(conform, "_run_pytest", lambda *_: AS_EXPECTED)

    assert run([NEW], "vllm", [], tests_dir(RENDERED), device="cpu") == COULD_NOT_RUN
    assert one_line(capfd) == f"capproof: {NEW}: {said}"


@pytest.mark.skipif(not HAS_TORCH, reason="the vllm tier needs torch")
def test_a_device_that_is_absent_is_not_pretended(
    tests_dir: Tests, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asking for CUDA where there is none is exit status 2."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")

    assert run([NEW], "vllm", [], tests_dir(RENDERED), device="cuda") == COULD_NOT_RUN
    assert "no CUDA device" in one_line(capfd)
