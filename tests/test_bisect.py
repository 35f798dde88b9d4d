"""Bisection names the right commit of a clone, and leaves the clone as it was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from conformance import bisect, cli
from conformance.replay import PROJECT_ROOT
from conformance.targets import CORE_FILE

CopyTree = Callable[..., Path]
Output = pytest.CaptureFixture[str]

WANTED = ("--theorem", "exact-estimate", "--family", "checkpoint")
MANAGER = "class MambaManager"


class Clone:
    """A repository of the KV-cache core, which looks like a clone of vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shas: dict[str, str] = {}
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "A. Uthor")
        self.git("config", "user.email", "author@example.org")

    def git(self, *arguments: str) -> str:
        """Run git in the clone and return what it prints."""
        return subprocess.run(
            ["git", *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout

    def commit(self, subject: str, day: int = 1) -> str:
        """Commit all there is, on a day of January 2026, and return the hash."""
        self.git("add", "--all")
        date = f"--date=2026-01-{day:02}T12:00:00+0000"
        self.git("commit", "--quiet", "--allow-empty", date, "--message", subject)
        self.shas[subject] = self.git("rev-parse", "HEAD").strip()
        return self.shas[subject]

    def put(self, release: Path) -> None:
        """Have a release's core in the work tree, and nothing of another's."""
        shutil.rmtree(self.folder / "vllm", ignore_errors=True)
        for file in bisect.CORE_FILES:
            if (release / file).is_file():
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(release / file, self.folder / file)

    def edit(self, old: str, new: str) -> None:
        """Replace a text that stands once in the managers' module."""
        text = (self.folder / CORE_FILE).read_text()
        assert text.count(old) == 1, old
        (self.folder / CORE_FILE).write_text(text.replace(old, new))

    def state(self) -> tuple[str, ...]:
        """All that a user would see of the clone: branch, refs, index, files, git's own folder."""
        files = sorted(str(path) for path in self.folder.rglob("*"))
        asked = (("symbolic-ref", "HEAD"), ("for-each-ref",), ("worktree", "list"))
        index = (self.folder / ".git" / "index").read_bytes().hex()
        return (*files, index, *(self.git(*each) for each in asked))

    def bisect(self, good: str, bad: str, *wanted: str) -> int:
        """Run the command on the clone and return its exit status."""
        repo = ("--repo", str(self.folder), "--good", good, "--bad", bad)
        return cli.run(["bisect", *repo, *(wanted or WANTED)])


@pytest.fixture(scope="module")
def history(trees: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """The fault of 0.30.0, its fix, what cannot be parsed, and a mutation, amid other commits."""
    clone = Clone(tmp_path_factory.mktemp("clones") / "vllm")
    clone.commit("Start without a core")
    clone.put(trees["0.30.0"])
    clone.commit("Release 0.30.0", day=2)
    (clone.folder / "README.md").write_text("of no interest\n")
    clone.commit("Say nothing")
    clone.put(trees["0.31.0"])
    clone.commit("Release 0.31.0", day=3)
    (clone.folder / "setup.py").write_text("import setuptools\n")
    clone.commit("Add a file")
    clone.edit(MANAGER, f"def broken(:\n\n\n{MANAGER}")
    clone.commit("Break the syntax")
    clone.edit(f"def broken(:\n\n\n{MANAGER}", f"# A remark.\n{MANAGER}")
    clone.commit("Mend the syntax")
    mutate(clone)
    clone.commit("Count one more", day=4)
    (clone.folder / "setup.py").write_text("")
    clone.commit("Empty a file")
    clone.edit("# A remark.\n", "# Another remark.\n")
    clone.commit("Remark on it")
    return clone


def mutate(clone: Clone) -> None:
    """Have the estimate of checkpoint steps count a block too many."""
    clone.edit(
        "num_new_blocks = min(num_new_blocks, physical_block_cap)\n\n",
        "num_new_blocks = min(num_new_blocks, physical_block_cap) + checkpoint_block\n\n",
    )


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go; a test that ends leaves none."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def refusal(clone: Clone, good: str, bad: str, capsys: Output, *wanted: str) -> str:
    """The one line of a bisection that could not run."""
    assert clone.bisect(good, bad, *wanted) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("capproof: ")
    assert "first " not in out
    return line


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_the_first_bad_commit_is_named_with_its_counterexample(
    history: Clone, scratch: Path, capsys: Output
) -> None:
    """Commit, author date, verdict and least numbers; a line per step; the file replays."""
    assert history.bisect("HEAD~6", "HEAD") == 0

    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    sha = history.shas["Count one more"]
    short = history.git("rev-parse", "--short", sha).strip()
    at_good = "REFUTED in checkpoint+overwide, PROVED in checkpoint"
    assert lines[0].endswith(f" Release 0.31.0: {at_good}")
    assert lines[1].endswith(" Remark on it: REFUTED in checkpoint")
    assert f"{short} Count one more: REFUTED in checkpoint" in lines
    (named,) = (number for number, line in enumerate(lines) if line.startswith("first bad"))
    assert lines[named] == f"first bad commit: {sha} Count one more"
    assert lines[named + 1] == "  author date: 2026-01-04 12:00:00 +0000"
    refuted = f"REFUTED vllm@{short} checkpoint exact-estimate: B 1, H 1, S 0, K 1, "
    assert lines[named + 2].startswith(refuted)
    assert "estimate 3, drawn 2, needed 2" in lines[named + 2]
    assert list(scratch.iterdir()) == []
    assert cli.run(["replay", lines[-1].split()[6], "--target", f"path:{history.folder}"]) == 1


@pytest.mark.usefixtures("own_cache")
def test_commits_that_cannot_be_loaded_are_skipped_and_counted(
    history: Clone, tmp_path: Path, capsys: Output
) -> None:
    """Steps on broken syntax are no verdict, and do not keep the search from its answer."""
    clone = copy_of(history, tmp_path, "Break the syntax")
    for number in range(5):
        clone.edit(f"def broken{number or ''}(", f"def broken{number + 1}(")
        clone.commit(f"Leave it broken {number}")
    clone.edit(f"def broken5(:\n\n\n{MANAGER}", MANAGER)
    clone.commit("Mend the syntax again")
    mutate(clone)
    named = clone.commit("Count again")

    assert clone.bisect(clone.shas["Add a file"], "HEAD") == 0

    lines = capsys.readouterr().out.splitlines()
    skipped = [line for line in lines if line.endswith(": NOT_LOADED")]
    assert skipped
    number = "1 commit" if len(skipped) == 1 else f"{len(skipped)} commits"
    at = lines.index(f"{number} skipped:")
    assert lines[at + 1].startswith(f"  {number} NOT_LOADED: SyntaxError: invalid syntax (")
    assert lines[at + 2] == f"first bad commit: {named} Count again"


@pytest.mark.usefixtures("own_cache")
def test_where_only_skipped_commits_are_left_the_candidates_are_named(
    history: Clone, tmp_path: Path, capsys: Output
) -> None:
    """Between a good commit and a bad one without a verdict between: exit status 1."""
    clone = copy_of(history, tmp_path, "Add a file")
    good = clone.shas["Add a file"]
    clone.edit(MANAGER, f"def broken(:\n\n\n{MANAGER}")
    first = clone.commit("Break it")
    clone.edit("def broken(:\n\n\n", "# A remark.\n")
    mutate(clone)
    second = clone.commit("Mend and count")

    assert clone.bisect(good, second) == 1

    lines = capsys.readouterr().out.splitlines()
    at = lines.index("only skipped commits are left; the first bad commit is one of:")
    assert lines[at + 1 : at + 3] == [f"  {second} Mend and count", f"  {first} Break it"]
    assert lines[at + 3].startswith("REFUTED ")


@pytest.mark.usefixtures("own_cache")
def test_a_good_end_newer_than_the_bad_one_names_the_first_fixed_commit(
    history: Clone, capsys: Output
) -> None:
    """The search goes the other way, and shows the counterexample of the last bad commit."""
    assert history.bisect("HEAD~3", history.shas["Release 0.30.0"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert f"first fixed commit: {history.shas['Release 0.31.0']} Release 0.31.0" in lines
    assert any(line.endswith("estimate 3, drawn 2, needed 2") for line in lines)


@pytest.mark.usefixtures("own_cache")
def test_neighbours_are_decided_by_their_own_verdicts(history: Clone, capsys: Output) -> None:
    """With nothing between the ends the bad one is the first; no step is needed."""
    assert history.bisect(history.shas["Mend the syntax"], history.shas["Count one more"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines[:2]] == [
        "REFUTED in checkpoint+overwide, PROVED in checkpoint",
        "REFUTED in checkpoint",
    ]
    assert lines[2] == f"first bad commit: {history.shas['Count one more']} Count one more"


@pytest.mark.usefixtures("own_cache")
def test_only_commits_that_touch_the_core_are_judged(
    history: Clone, tmp_path: Path, capsys: Output
) -> None:
    """Many commits elsewhere cost no step, at the bad end neither."""
    clone = copy_of(history, tmp_path, "Add a file")
    for number in range(8):
        clone.commit(f"Before {number}")
    mutate(clone)
    named = clone.commit("Count one more")
    for number in range(8):
        clone.commit(f"After {number}")

    assert clone.bisect(clone.shas["Add a file"], "HEAD") == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0].split(" ", 1)[1] for line in lines[:3]] == [
        *("Add a file", "After 7", "Count one more")
    ]
    assert lines[3] == f"first bad commit: {named} Count one more"


@pytest.mark.usefixtures("own_cache")
def test_without_a_family_a_refutation_in_any_is_bad(history: Clone, capsys: Output) -> None:
    """What is proved at the good end is judged, and the line of a step says what is refuted."""
    good, bad = history.shas["Mend the syntax"], history.shas["Count one more"]

    assert history.bisect(good, bad, "--theorem", "exact-estimate") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[1].partition(": REFUTED in ")[2] == "9 kinds of step, PROVED in 9 kinds of step"
    refuted = [line.split()[2] for line in lines if line.startswith("REFUTED")]
    assert {"first+checkpoint", "checkpoint", "drafts+checkpoint"} < set(refuted)
    assert all("checkpoint" in kind for kind in refuted)


# ---- the clone stays as it was -------------------------------------------------------------------


def copy_of(history: Clone, tmp_path: Path, subject: str) -> Clone:
    """A clone of its own, whose branch ends at a commit."""
    clone = Clone(tmp_path / "copy")
    clone.git("fetch", "--quiet", str(history.folder), "main")
    clone.git("reset", "--hard", "--quiet", history.shas[subject])
    clone.shas.update(history.shas)
    return clone


@pytest.mark.usefixtures("own_cache")
def test_the_clone_is_only_read(history: Clone, tmp_path: Path) -> None:
    """Work in progress, branch, refs and git's folder are as before, whatever the outcome."""
    clone = copy_of(history, tmp_path, "Remark on it")
    (clone.folder / CORE_FILE).write_text("work in progress\n")
    (clone.folder / "untracked").write_text("")
    before = clone.state()

    assert clone.bisect("HEAD~6", "HEAD") == 0
    assert clone.state() == before
    assert (clone.folder / CORE_FILE).read_text() == "work in progress\n"

    assert clone.bisect("HEAD", "HEAD~6") == 2
    assert clone.bisect("nonsense", "HEAD") == 2
    assert clone.state() == before


@pytest.mark.usefixtures("own_cache")
def test_a_bisection_of_the_users_own_is_not_disturbed(
    history: Clone, tmp_path: Path, capsys: Output
) -> None:
    """In the middle of `git bisect`, called from a hook's environment: neither sees the other."""
    clone = copy_of(history, tmp_path, "Remark on it")
    clone.git("bisect", "start", "HEAD", "HEAD~6")
    log = clone.git("bisect", "log")

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
        assert clone.bisect(clone.shas["Release 0.31.0"], clone.shas["Remark on it"]) == 0

    assert "first bad commit: " + clone.shas["Count one more"] in capsys.readouterr().out
    assert clone.git("bisect", "log") == log


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("options", [("--depth=8",), ("--filter=blob:none",)])
def test_clones_that_lack_objects_are_bisected_too(
    options: tuple[str, ...], history: Clone, tmp_path: Path, capsys: Output
) -> None:
    """A shallow clone is searched as far as it goes; a partial one is not filled by it."""
    history.git("config", "uploadpack.allowFilter", "true")
    folder, origin = tmp_path / "partial", f"file://{history.folder}"
    history.git("clone", "--quiet", "--no-checkout", *options, origin, str(folder))
    repo = ("--repo", str(folder), "--good", history.shas["Release 0.31.0"], "--bad", "main")
    before = sorted(folder.rglob("*"))

    assert cli.run(["bisect", *repo, *WANTED]) == 0

    assert "first bad commit: " + history.shas["Count one more"] in capsys.readouterr().out
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("num_lines", [0, 2])
def test_an_interrupted_bisection_leaves_nothing(
    number: int, num_lines: int, history: Clone, scratch: Path
) -> None:
    """Ctrl-C ends the step that runs; one line, exit status 2, no folder, clone as before."""
    before = history.state()
    command = [sys.executable, "-m", "conformance.cli", "bisect", *WANTED]
    process = subprocess.Popen(
        [*command, "--repo", str(history.folder), "--good", "HEAD~6", "--bad", "HEAD"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
    )
    for _ in range(num_lines):
        assert process.stdout.readline()
    while not list(scratch.glob("*/tree-*")):
        assert process.poll() is None
        time.sleep(0.01)

    process.send_signal(number)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 2
    assert err.startswith("capproof: stopped; ")
    assert len(err.splitlines()) == 1
    assert list(scratch.iterdir()) == []
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(scratch) not in running
    assert history.state() == before


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("no-such-tag", "HEAD", "--good no-such-tag: there is no such commit in "),
        ("HEAD~6", "", "--bad : there is no such commit in "),
        ("HEAD~6", "HEAD:setup.py", "--bad HEAD:setup.py: there is no such commit in "),
        ("HEAD~9", "HEAD", f"--good HEAD~9 has no {CORE_FILE}: "),
        ("HEAD", "HEAD", " is REFUTED in checkpoint, checkpoint+overwide; the good end must"),
        ("HEAD~6", "HEAD~5", " is PROVED; the bad end must be REFUTED in checkpoint: "),
        ("HEAD~4", "HEAD", " is NOT_LOADED (SyntaxError: invalid syntax ("),
    ],
)
def test_ends_that_are_not_as_they_are_called_are_refused(
    good: str, bad: str, said: str, history: Clone, capsys: Output
) -> None:
    """Each in one line that says what is there."""
    assert said in refusal(history, good, bad, capsys)


def test_ends_on_two_lines_of_history_are_refused(
    history: Clone, tmp_path: Path, capsys: Output
) -> None:
    """Neither leads to the other, so no commit between them is the first."""
    clone = copy_of(history, tmp_path, "Release 0.31.0")
    clone.commit("Turn off")

    line = refusal(clone, "HEAD", clone.shas["Count one more"], capsys)

    assert "is no ancestor of" in line


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path, capsys: Output) -> None:
    """No repository, and no folder at all."""
    for folder, said in ((tmp_path, "not a git repository"), (tmp_path / "x", "no such folder")):
        assert cli.run(["bisect", "--repo", str(folder), "--good=a", "--bad=b", *WANTED]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (("--theorem", "nonsense"), "unknown theorem 'nonsense'"),
        (("--theorem", "exact-estimate", "--family", "nonsense"), "unknown family 'nonsense'"),
    ],
)
def test_unknown_theorems_and_families_are_refused(
    wanted: tuple[str, ...], said: str, history: Clone, capsys: Output
) -> None:
    """As by the other commands, before anything is judged."""
    assert said in refusal(history, "HEAD~6", "HEAD", capsys, *wanted)


# ---- steps ---------------------------------------------------------------------------------------


def test_a_step_that_fails_is_never_taken_for_a_verdict(tmp_path: Path) -> None:
    """To git 1 is bad, so a step without a repository ends with what stops the bisection."""
    options = ["--commit=HEAD", "--theorem=exact-estimate", "--before=PROVED", "--report=1"]

    assert bisect.main([f"--git-dir={tmp_path}", *options]) == 255


def test_an_end_that_cannot_be_judged_is_no_answer(
    history: Clone, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """The last line of the step that failed is passed on."""
    monkeypatch.setattr(bisect._Steps, "_step", lambda *_: ["sh", "-c", "echo ouch; exit 255"])

    assert "cannot be judged: ouch" in refusal(history, "HEAD~6", "HEAD", capsys)
