"""The command line: its contract is stable, and every failure is one line and exit status 2."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance import cli, life_files, obligations, parallel
from conformance.commands.output import write_whole
from conformance.expectations import expected, where
from conformance.explore import small_setting
from conformance.life import Life
from conformance.obligations import Selection, settled_by_part
from conformance.replay import PROJECT_ROOT
from conformance.scenario import dumps, load
from conformance.targets import CORE_FILE, DEFAULT_TARGETS, KNOWN_RELEASES, resolve
from spec.assumptions import (
    ASSUMPTIONS,
    OF_GROUPS,
    OF_SOME_RELEASES,
    OF_THE_COORDINATOR,
    OF_THE_GATE,
)
from spec.families import FAMILIES
from spec.theorems import OBLIGATIONS, THEOREMS

CopyTree = Callable[..., Path]
Capproof = Callable[..., "subprocess.CompletedProcess[str]"]
Output = pytest.CaptureFixture[str]

OLD, NEW = "vllm==0.30.0", "vllm==0.31.0"
#: Two theorems for two kinds of step, of which 0.30.0 breaks one for each: fast to settle.
FEW = (
    *("--family", "checkpoint", "--theorem", "dry-run-parity", "--theorem", "bounded-demand"),
    *("--manager", "mamba-align"),
)
#: Theorems about the sum over groups.
OF_SEVERAL = {slug for slug, theorem in THEOREMS.items() if "coordinator" in theorem.managers}
FIRST = [of for of in OBLIGATIONS if of[0] == "first"]
FAULTY = ["PROVED", "REFUTED"] * 2
REFUTATIONS = PROJECT_ROOT / "generated_tests" / "scenarios" / "refutations"
SHOWN = REFUTATIONS / "exact-estimate-checkpoint-vllm-0-30-0.json"
COMMAND = (sys.executable, "-m", "conformance.cli")
FIRST_LINE = "    supports_fine_grained_hash_lookup"
HAS_TORCH = importlib.util.find_spec("torch") is not None


def rows_in(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["obligations"]
    return rows


def verdicts(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str, str], str]:
    return {
        (row["target"], row["manager"], where(row["family"], row["tags"]), row["theorem"]): row[
            "verdict"
        ]
        for row in rows
    }


def one_line(text: str) -> str:
    """What was said on standard error beside the progress of a fetch: one line."""
    (line,) = (line for line in text.splitlines() if not line.startswith("fetching "))
    assert line.startswith("capproof: ")
    return line


# ---- prove ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_prove_settles_the_default_targets(tmp_path: Path, capsys: Output) -> None:
    """Without targets all verdicts of the fault, of its fix and of the newest come as expected."""
    file = tmp_path / "out.json"

    assert cli.run(["prove", "--family", "first", "--json", str(file)]) == 0

    rows = rows_in(file)
    assert set(verdicts(rows)) == {
        (target, manager, where(*of), slug)
        for target in DEFAULT_TARGETS
        for of in FIRST
        for slug, theorem in THEOREMS.items()
        for manager in theorem.managers
    }
    for of, verdict in verdicts(rows).items():
        assert verdict == expected(*of)
    out, err = capsys.readouterr()
    assert err == ""
    number = {
        verdict: list(verdicts(rows).values()).count(verdict)
        for verdict in ("PROVED", "REFUTED", "NOT_APPLICABLE")
    }
    assert out.splitlines()[-1] == (
        f"{len(rows)} obligations: {number['PROVED']} proved, {number['REFUTED']} not, "
        f"{number['NOT_APPLICABLE']} not applicable; 0 not as expected"
    )
    assert len([line for line in out.splitlines() if line.endswith(" s")]) == len(rows)


@pytest.mark.usefixtures("own_cache")
def test_json_holds_what_the_contract_says(tmp_path: Path) -> None:
    """The schema, the versions, and a row with every key that DESIGN.md names."""
    file = tmp_path / "out.json"
    cli.run(["prove", "--target", OLD, *FEW, "--json", str(file)])

    content = json.loads(file.read_text())
    assert (content["schema"], list(content)) == (1, ["schema", "versions", "obligations"])
    assert {"z3", "capproof"} <= content["versions"].keys()
    for row in content["obligations"]:
        assert {
            *("target", "manager", "family", "tags", "theorem", "verdict", "expected", "scope"),
            *("params", "seconds", "assumptions", "scenario", "reason"),
        } <= row.keys()
    assert [path.name for path in tmp_path.glob("*.json")] == ["out.json"]


def test_a_tree_without_expectations_is_expected_to_be_proved(
    own_cache: Path, copy_tree: CopyTree, tmp_path: Path, capsys: Output
) -> None:
    """A copy of 0.30.0 has its fault: exit status 1, `expected` null, and a command to replay."""
    target, file = f"path:{copy_tree('0.30.0')}", tmp_path / "out.json"

    assert cli.run(["prove", "--target", target, *FEW, "--json", str(file)]) == 1

    rows = rows_in(file)
    assert {row["expected"] for row in rows} == {None}
    assert {row["target"] for row in rows} == {target}
    assert [row["verdict"] for row in rows] == FAULTY
    out = capsys.readouterr().out
    assert "4 obligations: 2 proved, 2 not; 2 not as expected" in out
    command, _ = re.findall("capproof replay (.*) --target", out)
    assert Path(command).is_relative_to(own_cache)
    assert cli.run(["replay", command, "--target", target]) == 0


@pytest.mark.usefixtures("own_cache")
def test_against_expects_the_other_targets_verdicts(
    copy_tree: CopyTree, tmp_path: Path, capsys: Output
) -> None:
    """A fork that carries a release's fault is as expected against it, and not against the fix."""
    target, file = f"path:{copy_tree('0.30.0')}", tmp_path / "out.json"
    asked = ["prove", "--target", target, *FEW, "--json", str(file)]

    assert cli.run([*asked, "--against", OLD]) == 0
    assert [row["expected"] for row in rows_in(file)] == FAULTY
    assert {row["target"] for row in rows_in(file)} == {target}
    assert f"estimates of {target} and {OLD}: equal in 2 kinds of step" in capsys.readouterr().out

    assert cli.run([*asked, "--against", NEW]) == 1
    assert [row["expected"] for row in rows_in(file)] == ["PROVED"] * 4
    out = capsys.readouterr().out
    head = f"DIFFER estimates of {target} and {NEW}, checkpoint: B 1, H 1, S 0, K 1, "
    assert f"{head}1 token computed, then 4: 3 and 2" in out.splitlines()
    differences = json.loads(file.read_text())["differences"]
    assert {row["comparison"] for row in differences} == {"DIFFER"}

    assert cli.run(["prove", "--target", NEW, "--against", NEW, *FEW]) == 0


@pytest.mark.usefixtures("own_cache")
def test_nothing_is_expected_where_the_other_target_has_no_such_step(tmp_path: Path) -> None:
    """Against a release without checkpoint blocks, what is proved of them is no surprise."""
    file = tmp_path / "out.json"
    asked = ["prove", "--target", NEW, "--against", "vllm==0.24.0", *FEW, "--json", str(file)]

    assert cli.run(asked) == 0

    assert [row["expected"] for row in rows_in(file)] == [None] * 4
    assert cli.run([*asked[:2], OLD, *asked[3:]]) == 1


@pytest.mark.usefixtures("own_cache")
def test_what_is_not_understood_is_never_as_expected(
    copy_tree: CopyTree, tmp_path: Path, capsys: Output
) -> None:
    """UNSUPPORTED rows name file and line and make the status 1, even against the same tree."""
    line = "num_new_blocks = (\n                num_required_blocks"
    root = copy_tree("0.31.0", (line, f"num_tokens = num_tokens >> 0\n            {line}"))
    place = (root / CORE_FILE).read_text().split(">> 0")[0].count("\n") + 1
    target, file = f"path:{root}", tmp_path / "out.json"

    asked = ["prove", "--target", target, "--family", "first"]
    assert cli.run([*asked, "--json", str(file)]) == 1
    decided = {row["verdict"] for row in rows_in(file)}
    assert decided == {"UNSUPPORTED", "NOT_APPLICABLE"}
    for row in rows_in(file):
        if row["verdict"] == "UNSUPPORTED":
            assert f"{CORE_FILE}:{place}: " in row["reason"]
    assert f"{CORE_FILE}:{place}: " in capsys.readouterr().out
    assert cli.run([*asked, "--against", target]) == 1


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (
            ["--family", "first", "--manager", "coordinator"],
            [(where(*of), t) for of in FIRST for t in THEOREMS if t in OF_SEVERAL],
        ),
        (["--theorem", "bounded-demand"], [(where(*of), "bounded-demand") for of in OBLIGATIONS]),
        (
            [*FEW],
            [
                (family, theorem)
                for family in ("checkpoint", "checkpoint+overwide")
                for theorem in ("dry-run-parity", "bounded-demand")
            ],
        ),
        (
            ["--family", "running", "--family", "first", "--theorem", "no-block-twice"],
            [
                (family, "no-block-twice")
                for family in ("first", "first+checkpoint", "running", "running+overwide")
            ],
        ),
    ],
)
def test_obligations_are_selected(
    tmp_path: Path, arguments: list[str], chosen: list[tuple[str, str]]
) -> None:
    """--family takes all tags of a family, options may be repeated, and the order stays."""
    file = tmp_path / "out.json"

    assert cli.run(["prove", "--target", "vllm==0.24.0", *arguments, "--json", str(file)]) == 0

    assert [(family, theorem) for *_, family, theorem in verdicts(rows_in(file))] == chosen


@pytest.mark.usefixtures("own_cache")
def test_a_target_given_twice_is_settled_once(tmp_path: Path) -> None:
    """Repetitions and blanks around a target make no second row."""
    file = tmp_path / "out.json"

    cli.run(["prove", "--target", NEW, "--target", f" {NEW} ", *FEW, "--json", str(file)])

    assert [row["target"] for row in rows_in(file)] == [NEW] * 4


@pytest.mark.usefixtures("own_cache")
def test_the_second_run_reads_and_no_cache_proves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not changed is not proved again unless that is asked for."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    asked = ["prove", "--target", OLD, *FEW, "--json"]
    cli.run([*asked, str(first)])

    def refuse(*arguments: object) -> None:
        raise AssertionError("something was proved")

    monkeypatch.setattr(parallel, "spread", refuse)
    assert cli.run([*asked, str(second)]) == 0
    assert rows_in(second) == rows_in(first)
    with pytest.raises(AssertionError, match="something was proved"):
        cli.run([*asked, str(second), "--no-cache"])


def test_a_tree_edited_under_the_same_name_is_proved_again(
    own_cache: Path, copy_tree: CopyTree
) -> None:
    """A checkout that is worked on gets its own verdicts each time."""
    root = copy_tree("0.31.0")
    fixed = (root / CORE_FILE).read_text()
    faulty = (copy_tree("0.30.0", name="other") / CORE_FILE).read_text()
    asked = ["prove", "--target", f"path:{root}", *FEW]

    assert cli.run(asked) == 0
    (root / CORE_FILE).write_text(faulty)
    assert cli.run(asked) == 1
    (root / CORE_FILE).write_text(fixed)
    assert cli.run(asked) == 0


def test_a_damaged_result_cache_is_survived(own_cache: Path, capproof: Capproof) -> None:
    """The result cache only saves time."""
    (own_cache / "verdicts").mkdir()
    (own_cache / "verdicts" / "cache.db").write_bytes(b"damaged" * 1000)

    done = capproof("prove", "--target", NEW, *FEW)

    assert (done.returncode, done.stderr) == (0, "")


def test_jobs_change_no_verdict(own_cache: Path, tmp_path: Path, capproof: Capproof) -> None:
    """Kinds of step are settled in several processes, and come in the catalogue's order."""
    found = []
    for jobs in ("1", "2"):
        file = tmp_path / f"{jobs}.json"
        asked = ["--target", NEW, "--target", OLD, *FEW, "--no-cache"]
        done = capproof("prove", *asked, "--json", str(file), "--jobs", jobs)
        assert (done.returncode, done.stderr) == (0, "")
        rows = rows_in(file)
        found.append([{key: row[key] for key in row if key != "seconds"} for row in rows])
    assert found[0] == found[1]


def test_an_interrupted_run_is_taken_up_where_it_was_left(
    own_cache: Path, tmp_path: Path, capproof: Capproof
) -> None:
    """What was settled before Ctrl-C, in any process, is read and not proved again."""
    command = ("prove", "--target", "vllm==0.24.0", "--jobs", "2")
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PROJECT_ROOT,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.startswith("3 of "):
            break
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "stopped; nothing half-written is left" in one_line(err)
    assert is_over(process.pid)

    kept = settled_by_part(resolve("vllm==0.24.0"), Selection()).values()
    assert len([rows for rows in kept if rows is not None]) >= 3


def test_a_matrix_is_written_of_what_was_settled(own_cache: Path, tmp_path: Path) -> None:
    """A column per target, and what the manager of each knows."""
    file = tmp_path / "matrix.md"

    assert cli.run(["prove", "--target", OLD, "--target", NEW, *FEW, "--matrix", str(file)]) == 0

    text = file.read_text()
    assert re.search(r"^\| +\| 0\.30\.0 +\| 0\.31\.0 +\|$", text, re.MULTILINE)
    assert re.search(r"^\| `takes_prefill_end` +\| - +\| yes +\|$", text, re.MULTILINE)
    assert re.search(r"^\| `checkpoint` +\| R +\| P +\|$", text, re.MULTILINE)
    assert "## no-undercount" not in text


# ---- where the output goes -----------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_a_pipe_gets_lines_without_escapes(capproof: Capproof) -> None:
    """One line per verdict, also where the environment would have colours forced."""
    done = capproof("prove", "--target", OLD, *FEW, FORCE_COLOR="1", COLUMNS="20")

    assert "\x1b" not in done.stdout
    first, second, _, _, refuted, *_ = done.stdout.splitlines()
    assert re.fullmatch(rf"{OLD} mamba-align checkpoint dry-run-parity PROVED \d+\.\d\d s", first)
    assert re.fullmatch(rf"{OLD} mamba-align checkpoint bounded-demand REFUTED \d+\.\d\d s", second)
    head = rf"REFUTED {OLD} checkpoint bounded-demand \(as expected\): B 1, H 1, S 0, K 1, "
    assert re.match(head, refuted)
    committed = REFUTATIONS / "bounded-demand-checkpoint-vllm-0-30-0.json"
    assert (
        f"  capproof replay {committed.relative_to(PROJECT_ROOT)} --target {OLD}"
        in done.stdout.splitlines()
    )


def on_terminal(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the command line with a terminal as its output; return the status and what it shows."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=theirs,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
        cwd=PROJECT_ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # the other end is closed
            read = b""
        if not read:
            break
        shown += read
    os.close(ours)
    return process.wait(timeout=60), shown.decode()


@pytest.mark.usefixtures("own_cache")
def test_a_terminal_gets_a_matrix_and_no_color_is_honoured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A terminal shows the matrix, in colour unless NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = re.compile("\x1b\\[(?:[0-9;]*;)?3[0-7]m")

    status, shown = on_terminal("prove", "--target", NEW, *FEW)
    _, plain = on_terminal("prove", "--target", NEW, *FEW, NO_COLOR="1")

    assert status == 0
    assert colour.search(shown)
    assert not colour.search(plain)
    for text in (shown, plain):
        assert "bounded-demand" in text
        assert "PROVED" in text
        assert f"{NEW} mamba-align checkpoint" not in text


@pytest.mark.parametrize(("release", "status"), [("0.31.0", 0), ("0.30.0", 1)])
def test_a_reader_that_leaves_changes_nothing(
    own_cache: Path, copy_tree: CopyTree, release: str, status: int
) -> None:
    """`capproof prove | head -1` says nothing more, and its status is that of the verdicts."""
    process = subprocess.Popen(
        [*COMMAND, "prove", "--target", f"path:{copy_tree(release)}", *FEW],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=PROJECT_ROOT,
    )
    process.stdout.close()

    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == status


@pytest.mark.parametrize("command", [["targets"], ["explain", "first"], ["--help"]])
def test_other_commands_take_a_closed_pipe_too(command: list[str]) -> None:
    """A reader that leaves is no failure."""
    process = subprocess.Popen(
        [*COMMAND, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=PROJECT_ROOT,
    )
    process.stdout.close()

    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


#: The command line, saying on standard output what is being proved, so that a test can wait for it.
TELLING = """
import contextlib, sys
from conformance import cli
from conformance.commands import settling

@contextlib.contextmanager
def progress():
    yield lambda text: print(text, flush=True)

settling.progress = progress
cli.main(sys.argv[1:])
"""


def is_over(group: int) -> bool:
    """Whether no process of a group is left, a moment after its leader ended."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("delay", [0.0, 0.3])
@pytest.mark.parametrize(
    "command",
    [
        ("prove", "--no-cache", "--json", "out.json", "--jobs", "1"),
        ("prove", "--no-cache", "--json", "out.json", "--jobs", "2"),
        ("gen-tests", "--out", "generated"),
        ("gen-tests", "--check", "--no-cache"),
    ],
    ids=["prove", "prove in parallel", "gen-tests", "gen-tests --check"],
)
def test_ctrl_c_is_one_line(tmp_path: Path, command: tuple[str, ...], delay: float) -> None:
    """Ctrl-C in the middle of proving ends all processes and leaves nothing half-written."""
    folder = tmp_path / "here"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        start_new_session=True,
    )
    assert process.stdout.readline()
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 2
    assert "stopped; nothing half-written is left" in one_line(err)
    assert "PROVED" not in out
    assert is_over(process.pid)
    assert list(folder.iterdir()) == []


#: What Ctrl-C meets in a module that is being imported.
INTERRUPTED = {
    "raised": "raise KeyboardInterrupt",
    "signalled": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)",
    "swallowed": """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
""",
}


@pytest.mark.parametrize("module", ["click", "platformdirs", "models"])
@pytest.mark.parametrize("how", INTERRUPTED)
def test_ctrl_c_during_imports_is_one_line(tmp_path: Path, how: str, module: str) -> None:
    """Ctrl-C ends the command before its modules are there, whatever a module does about it."""
    (tmp_path / f"{module}.py").write_text(INTERRUPTED[how])
    done = subprocess.run(
        [*COMMAND, "targets"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT_ROOT)])},
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "stopped; nothing half-written is left" in one_line(done.stderr)


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    """The entry point imports none of the modules that take time, ours or others'."""
    command = [sys.executable, "-S", "-c", "import conformance.cli, sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT_ROOT, check=True)
    found = done.stdout.split()

    assert {name for name in found if name.startswith("conformance.")} == {
        "conformance.cli",
        "conformance.ending",
    }
    assert not {"click", "models", "pathlib", "re", "spec", "typing"}.intersection(found)


# ---- bad input: one line, exit status 2 ----------------------------------------------------------


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that could not run."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout == ""
    return one_line(done.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command. See `capproof --help`."),
        (["prov"], "No such command 'prov'"),
        (["prove", "--bogus"], "No such option"),
        (["conform", "--bogus"], "No such option"),
        (["prove", "--target"], "requires an argument"),
        (["prove", "--jobs", "0"], "--jobs"),
        (["prove", "argument"], "unexpected extra argument"),
        (["prove", "--theorem", "no-such"], "unknown theorem 'no-such'; theorems: no-undercount"),
        (["prove", "--family", "no-such"], "unknown family 'no-such'; families: first"),
        (["prove", "--matrix", "."], "--matrix .: a folder is there"),
        (
            ["prove", "--manager", "no-such"],
            "unknown manager 'no-such'; modelled: mamba-align, coord",
        ),
        (["prove", "--manager", "full-attention"], "unknown manager 'full-attention'"),
        (["prove", "--target", "0.31.0"], "is not a target"),
        (["prove", "--target", "vllm==latest"], "is not a target"),
        (["prove", "--target", "path:/no/such"], "there is no folder /no/such"),
        (["prove", "--target", "path:a\nb"], "unprintable"),
        (["prove", "--against", "path:/no/such"], "there is no folder /no/such"),
        (["prove", "--json", "."], "a folder is there"),
        (["prove", "--json", "/no/such/out.json"], "/no/such is no folder"),
        (["prove", "--json", "/dev/null/out.json"], "/dev/null is no folder"),
        (["prove", "--json", "x" * 300], "File name too long"),
        (
            ["explain", "no-such"],
            "unknown theorem, family, assumption, manager or verdict 'no-such'",
        ),
        (["explain"], "Missing argument 'SLUG'"),
        (["replay", "/no/such.json"], "/no/such.json: cannot be read"),
        (["replay", "pyproject.toml"], "pyproject.toml: not JSON"),
        (["replay", "generated_tests/scenarios/verdicts.json"], "verdicts.json: "),
        (["replay", "spec"], "spec: cannot be read"),
        (["replay", str(SHOWN), "--tier", "gpu"], "--tier"),
        (["targets", "--fetch", "path:."], "is not a target"),
        (["gen-tests", "--target", "nothing"], "is not a target"),
        (["gen-tests", "--check", "--out", "/no/such"], "no scenarios here"),
        (["conform", "--tests", "/no/such"], "/no/such: no such folder"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else " ".join(value)[:40] or "nothing",
)
def test_bad_arguments_are_one_line(capproof: Capproof, arguments: list[str], message: str) -> None:
    """What cannot run says what is wrong in one line, before any time is spent."""
    assert message in refused(capproof(*arguments))


def test_an_unknown_release_is_one_line(tmp_path: Path, capproof: Capproof) -> None:
    """A release that pip does not find, or cannot look for, is named."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "CAPPROOF_CACHE": str(tmp_path)}

    assert "vllm==0.99.0" in refused(capproof("prove", "--target", "vllm==0.99.0", **offline))
    assert "vllm==0.99.0" in refused(capproof("targets", "--fetch", "vllm==0.99.0", **offline))
    assert os.listdir(tmp_path / "trees") in ([], [".lock"])


def test_a_damaged_cache_entry_is_one_line_offline(
    tmp_path: Path, copy_tree: CopyTree, capproof: Capproof
) -> None:
    """A cached file that was changed is named, and what to do about it."""
    entry = copy_tree("0.31.0", name="cache/trees/0.31.0")
    files = {
        str(file.relative_to(entry)): file.read_bytes() for file in sorted(entry.rglob("*.py"))
    }
    sizes = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
    manifest = {"schema": 1, "wheel": "vllm.whl", "files": sizes}
    (entry / "manifest.json").write_text(json.dumps(manifest))
    environment = {"PIP_NO_INDEX": "1", "CAPPROOF_CACHE": str(tmp_path / "cache")}
    assert capproof("prove", "--target", NEW, *FEW, **environment).returncode == 0

    (entry / CORE_FILE).write_bytes(files[CORE_FILE].replace(b"min(", b"max(", 1))
    done = capproof("prove", "--target", NEW, *FEW, **environment)

    assert done.returncode == 2
    progress, line = (text for text in done.stderr.splitlines() if not text.startswith("fetching "))
    assert f"{CORE_FILE} was changed); fetching it again" in progress
    assert line.startswith(f"capproof: the cached {NEW} is damaged ({CORE_FILE} was changed)")
    assert f"capproof targets --fetch {NEW}" in line


def test_a_folder_without_vllm_is_one_line(tmp_path: Path, capproof: Capproof) -> None:
    """A folder that holds no vLLM, or only a part of it, is refused."""
    assert "holds no vllm/" in refused(capproof("prove", "--target", f"path:{tmp_path}"))
    (tmp_path / "vllm").mkdir()
    assert f"has no {CORE_FILE}" in refused(capproof("prove", "--target", f"path:{tmp_path}"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("def get_num_blocks_to_allocate", "def renamed"), "no MambaManager.get_num_blocks_to_"),
        (("def allocate_new_blocks", "def renamed"), "no MambaManager.allocate_new_blocks here"),
        (("(SingleTypeKVCacheManager)", "2(SingleTypeKVCacheManager)"), "no MambaManager here"),
        ((FIRST_LINE, f"    def def\n{FIRST_LINE}"), "SyntaxError"),
        ((FIRST_LINE, f"    from no_such import x\n    x + 1\n{FIRST_LINE}"), "TypeError"),
        ((FIRST_LINE, f"    from enum import no_such\n{FIRST_LINE}"), "cannot import name"),
    ],
    ids=["no-estimator", "no-allocator", "no-class", "syntax", "outside-the-core", "import"],
)
def test_a_broken_tree_is_one_line(
    capproof: Capproof, copy_tree: CopyTree, edit: tuple[str, str], message: str
) -> None:
    """A tree that lacks what is judged, or cannot be executed, is refused with its file."""
    root = copy_tree("0.31.0", edit)

    line = refused(capproof("prove", "--target", f"path:{root}", "--no-cache"))

    assert message in line
    assert "single_type_kv_cache_manager.py" in line


def test_a_tree_that_lacks_a_module_is_one_line(capproof: Capproof, copy_tree: CopyTree) -> None:
    """A core module that is missing is named."""
    root = copy_tree("0.31.0")
    (root / "vllm/v1/kv_cache_interface.py").unlink()

    line = refused(capproof("prove", "--target", f"path:{root}"))

    assert "kv_cache_interface.py is missing" in line


def test_a_broken_tree_among_others_is_one_line(capproof: Capproof, copy_tree: CopyTree) -> None:
    """A worker process that fails says no more than this one would."""
    root = copy_tree("0.31.0", ("def allocate_new_blocks", "def renamed"))
    asked = ["--target", NEW, "--target", f"path:{root}", "--no-cache", "--jobs", "2"]

    assert "no MambaManager.allocate_new_blocks" in refused(capproof("prove", *asked, *FEW))


# ---- writing --json ------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_json_replaces_a_file_and_follows_a_link(tmp_path: Path) -> None:
    """An earlier result is replaced whole; a link stays a link."""
    file, link = tmp_path / "out.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)

    assert cli.run(["prove", "--target", NEW, *FEW, "--json", str(link)]) == 0

    assert link.is_symlink()
    assert len(rows_in(file)) == 4
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["link.json", "out.json"]


@pytest.mark.usefixtures("own_cache")
def test_json_into_a_pipe_does_not_replace_it(tmp_path: Path) -> None:
    """--json /dev/stdout and the like write there."""
    fifo, received = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()))
    reader.start()

    assert cli.run(["prove", "--target", NEW, *FEW, "--json", str(fifo)]) == 0
    reader.join(timeout=10)

    assert len(json.loads(received[0])["obligations"]) == 4
    assert fifo.is_fifo()


def test_a_pipe_without_a_name_is_written_into() -> None:
    """What /dev/fd leads to is no path: `--json >(cat)` and `--json /dev/stdout | cat`."""
    reading, writing = os.pipe()

    write_whole(Path(f"/dev/fd/{writing}"), "text")
    os.close(writing)

    with open(reading) as pipe:
        assert pipe.read() == "text"


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    """Who may read it is not for the command to change."""
    file = tmp_path / "out.json"
    file.write_text("old")
    file.chmod(0o600)

    write_whole(file, "new")

    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o600)


# ---- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["core", "vllm"])
def test_a_committed_counterexample_is_reproduced(capsys: Output, tier: str) -> None:
    """By default a counterexample is replayed on the targets whose fault it shows."""
    if tier == "vllm" and not HAS_TORCH:
        pytest.skip("the vllm tier needs torch")

    assert cli.run(["replay", str(SHOWN), "--tier", tier]) == 0

    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{SHOWN.stem} on {OLD}, tier {tier}: reproduced"
    assert last == "  exact-estimate is broken"


def test_a_counterexample_does_not_show_on_the_fix(capsys: Output) -> None:
    """On the fixed release the theorem holds, as the scenario predicts."""
    assert cli.run(["replay", str(SHOWN), "--target", NEW]) == 0
    out = capsys.readouterr().out
    assert f"on {NEW}, tier core: reproduced" in out
    assert "exact-estimate holds here" in out


def test_a_wrong_prediction_is_exit_status_1(tmp_path: Path, capsys: Output) -> None:
    """The real code disagreeing with the model is never as expected."""
    file = tmp_path / "wrong.json"
    file.write_text(SHOWN.read_text().replace('"estimate": 3', '"estimate": 4'))

    assert cli.run(["replay", str(file), "--target", OLD]) == 1
    assert "disagrees" in capsys.readouterr().out


@pytest.mark.parametrize(("release", "status"), [("0.30.0", 1), ("0.31.0", 0)])
def test_a_target_without_prediction_is_judged_by_the_theorem(
    trees: Mapping[str, Path], capsys: Output, release: str, status: int
) -> None:
    """A fork that breaks the scenario's theorem is exit status 1, one that does not is 0."""
    assert cli.run(["replay", str(SHOWN), "--target", f"path:{trees[release]}"]) == status
    assert "not-predicted" in capsys.readouterr().out


def test_a_collection_is_replayed_on_what_it_predicts(capsys: Output, tmp_path: Path) -> None:
    """Scenarios that refute nothing are replayed on every target they predict."""
    file = tmp_path / "first.json"
    scenarios = load(PROJECT_ROOT / "generated_tests/scenarios/first.json")[:3]
    file.write_text(dumps(scenarios))

    assert cli.run(["replay", str(file)]) == 0

    out = capsys.readouterr().out
    for target in {target for scenario in scenarios for target in scenario.predicted}:
        assert f" on {target}, tier core: reproduced" in out


def test_what_could_not_be_replayed_is_exit_status_2(
    capproof: Capproof, copy_tree: CopyTree, tmp_path: Path
) -> None:
    """A tree that cannot be driven, or a file without scenarios, shows nothing."""
    root = copy_tree("0.31.0", ("def allocate_new_blocks", "def renamed"))
    done = capproof("replay", str(SHOWN), "--target", f"path:{root}")
    assert done.returncode == 2
    assert "could-not-run" in done.stdout
    assert "no MambaManager.allocate_new_blocks here" in one_line(done.stderr)

    empty = tmp_path / "empty.json"
    empty.write_text('{"schema": 1, "scenarios": []}')
    assert "holds no scenario" in refused(capproof("replay", str(empty)))


# ---- targets, explain, help ----------------------------------------------------------------------


def test_targets_lists_what_is_known_and_cached(own_cache: Path, capsys: Output) -> None:
    """Every known release is listed, with what is default and what is here."""
    assert cli.run(["targets"]) == 0

    out = capsys.readouterr().out
    for target in (OLD, NEW):
        assert re.search(rf"^{re.escape(target)}  known, cached", out, re.MULTILINE)
    for release in KNOWN_RELEASES:
        assert f"vllm=={release}  known" in out
    assert re.search(rf"^{OLD} .*default$", out, re.MULTILINE)
    assert f"cache: {own_cache}" in out


def test_targets_says_what_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """An empty cache is listed without touching a network."""
    monkeypatch.setenv("CAPPROOF_CACHE", str(tmp_path / "empty"))

    assert cli.run(["targets"]) == 0
    assert f"{NEW}  known, not cached" in capsys.readouterr().out
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("slug", "sentence"),
    [
        *((slug, theorem.sentence) for slug, theorem in THEOREMS.items()),
        *((slug, family.sentence) for slug, family in FAMILIES.items()),
        *(
            (one.slug, one.sentence)
            for one in (
                *ASSUMPTIONS,
                *OF_SOME_RELEASES,
                *OF_THE_GATE,
                *OF_GROUPS,
                *OF_THE_COORDINATOR,
            )
        ),
    ],
)
def test_everything_with_a_name_is_explained(capsys: Output, slug: str, sentence: str) -> None:
    """Theorems, families and assumptions say what they are in a sentence."""
    assert cli.run(["explain", slug]) == 0
    assert capsys.readouterr().out.startswith(f"{slug}: {sentence}\n")


# ---- lives ---------------------------------------------------------------------------------------


def test_the_first_life_that_explore_finds_is_saved_and_replays(
    copy_tree: CopyTree, tmp_path: Path, capsys: Output
) -> None:
    """States that are retired too early are found; of several such lives one is kept, once."""
    edit = ("return num_computed_tokens - 1", "return num_computed_tokens + self.block_size")
    root, saved = copy_tree("0.31.0", edit), tmp_path / "life.json"
    target = f"path:{root}"
    assert cli.run(["explore", "--target", target]) == 2
    assert "scheduler.py: cannot be read" in one_line(capsys.readouterr().err)
    scheduler = Path("vllm", "v1", "core", "sched", "scheduler.py")
    (root / scheduler).parent.mkdir()
    shutil.copyfile(resolve(NEW).root / scheduler, root / scheduler)
    command = ["explore", "--target", target, "--rules", "4", "--requests", "1"]

    assert cli.run([*command, "--save", str(saved)]) == 1
    counts, *lines = capsys.readouterr().out.splitlines()
    assert cli.run(["replay", str(saved), "--target", target]) == 1
    of_saved = capsys.readouterr().out.splitlines()[1:]

    assert "17 violations" in counts
    assert (len(lines), lines[-1]) == (11, "  and 7 more")
    assert any(line.startswith(lines[0]) for line in of_saved)


def test_lives_of_a_release_that_is_not_described_are_refused(
    tmp_path: Path, capsys: Output
) -> None:
    """Before anything is lived on another target, and when one is replayed too."""
    saved = tmp_path / "life.json"
    saved.write_text(life_files.dumps(Life(small_setting(9, 1, True), ())))

    for command in (["explore"], ["replay", str(saved)]):
        assert cli.run([*command, "--target", NEW, "--target", "vllm==0.24.0"]) == 2
        out, err = capsys.readouterr()
        assert "vllm==0.24.0: lives are not described for releases before 0.28.0" in one_line(err)
        assert out == ""


@pytest.mark.parametrize(
    "command",
    [
        [],
        *([name] for name in ("prove", "gen-tests", "conform", "replay", "targets", "explain")),
        *([name] for name in ("explore", "workloads", "bisect")),
    ],
)
def test_every_command_has_help(capsys: Output, command: list[str]) -> None:
    """Help is no failure."""
    assert cli.run([*command, "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: capproof")


def test_the_version_is_the_distributions(capsys: Output) -> None:
    """The version that results name is what the command says."""
    assert cli.run(["--version"]) == 0
    assert obligations.project_version() in capsys.readouterr().out
