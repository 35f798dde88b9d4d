"""Name the commit of a vLLM clone at which a theorem's verdict changes, by `git bisect run`.

The clone is only read. Git works in a bare repository in a temporary folder, which borrows the
clone's objects; no commit is checked out, since a step needs the few files of the KV-cache core.
`python -m conformance.bisect` is one such step: it judges a commit, reports it as a line of JSON,
and its exit status tells git what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.expectations import where
from conformance.obligations import NOT_APPLICABLE, Kind, Row, Selection, settle
from conformance.replay import PROJECT_ROOT
from conformance.targets import CORE_FILE, Tree
from models.loader import CORE_MODULES, CoreError

CORE_FILES = tuple(sorted(module.replace(".", "/") + ".py" for module in CORE_MODULES))
PROVED, REFUTED = "PROVED", "REFUTED"
#: As many kinds of step are named in a line.
_FEW = 4
#: Stands for a verdict where the tree cannot be loaded.
NOT_LOADED = "NOT_LOADED"

#: What a step's exit status tells `git bisect run`.
_BEFORE, _AFTER, _SKIP, _ABORT = 0, 1, 125, 255
#: Exit status of `git bisect run` where only skipped commits are left.
_ONLY_SKIPPED_LEFT = 2
#: What git calls the two states, so that one search serves both directions.
_TERMS = ("--term-old=before", "--term-new=after")
#: Variables that would lead git to a repository other than the one it is asked about.
_OF_ANOTHER_REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_NAMESPACE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_PREFIX"),
)


class BisectError(Exception):
    """There is nothing to bisect, or git cannot; one line saying what and what to do."""


@dataclass(frozen=True)
class Commit:
    """A commit, with what is printed of it."""

    sha: str
    short: str
    author_date: str
    subject: str


@dataclass(frozen=True)
class Judged:
    """What a commit came to.

    Attributes:
        commit: The commit.
        verdict: PROVED; REFUTED, if in any kind of step; else why neither.
        reason: One line, where neither.
        rows: A row per obligation, as `capproof prove --json` has them.
    """

    commit: Commit
    verdict: str
    reason: str
    rows: tuple[Row, ...]

    @property
    def is_decided(self) -> bool:
        """Whether it is proved or refuted."""
        return self.verdict in (PROVED, REFUTED)

    def kinds(self, verdict: str) -> tuple[Kind, ...]:
        """Return the kinds of step with a verdict."""
        rows = (row for row in self.rows if row["verdict"] == verdict)
        return tuple((row["family"], tuple(row["tags"])) for row in rows)

    def of(self, kinds: Sequence[Kind]) -> Judged:
        """Return what the commit came to in some kinds of step; all of it where it has no rows."""
        rows = [row for row in self.rows if (row["family"], tuple(row["tags"])) in kinds]
        verdict, reason = _together(rows) if self.rows else (self.verdict, self.reason)
        return replace(self, verdict=verdict, reason=reason, rows=tuple(rows))


@dataclass(frozen=True)
class Bisection:
    """What a search came to.

    Attributes:
        is_fix: Whether the good end is the newer one, and the first fixed commit was looked for.
        first: The first commit with the newer end's verdict, None where git cannot tell.
        candidates: Where it cannot: the commits of which one is the first.
        refuted: The refuted commit next to the change, on either side.
        skipped: Commits that came to no verdict.
    """

    is_fix: bool
    first: Commit | None
    candidates: tuple[Commit, ...]
    refuted: Judged
    skipped: tuple[Judged, ...]


# ---- the search ----------------------------------------------------------------------------------


def bisect(
    repo: Path,
    good: str,
    bad: str,
    selection: Selection,
    *,
    on_judged: Callable[[Judged], None] = lambda judged: None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Search the commits between two revisions for the one at which the verdict changes.

    Args:
        repo: A folder of the clone; nothing is written there.
        good: Revision at which the selection is proved, in some kinds of step.
        bad: Revision at which some of these are refuted; an ancestor of ``good``, or a descendant.
            Only these kinds of step are looked at in between.
        selection: A theorem, in all its families or in one.
        on_judged: Told each commit that was judged, the ends first.
        on_progress: Told what comes next.

    Raises:
        BisectError: An end is unknown or not as it is called, neither end descends from the other,
            or git fails.
    """
    with _stops_cleanly(), _Borrowed(repo) as history:
        ends = history.resolve("--good", good), history.resolve("--bad", bad)
        is_fix = not history.is_ancestor(*ends)
        if is_fix and not history.is_ancestor(*reversed(ends)):
            raise BisectError(
                f"--good {good} is no ancestor of --bad {bad}, nor the other way round: "
                "give two commits of one line (`git merge-base` names where theirs part)"
            )
        steps = _Steps(history, selection, on_judged, on_progress)
        _check_ends(steps, (("--good", good, PROVED), ("--bad", bad, REFUTED)), ends)
        before, after = reversed(ends) if is_fix else ends
        return _search(steps, before, after, is_fix=is_fix)


def _check_ends(steps: _Steps, wanted: Sequence[tuple[str, str, str]], shas: Sequence[str]) -> None:
    among = ""
    for (option, revision, verdict), sha in zip(wanted, shas, strict=True):
        if not steps.history.has(sha, CORE_FILE):
            raise BisectError(
                f"{option} {revision} has no {CORE_FILE}: give a clone and a commit of vLLM 0.24.0 "
                "or newer"
            )
        judged = steps.judge(sha)
        steps.watch(judged.kinds(verdict))
        if not judged.kinds(verdict):
            which = option.removeprefix("--")
            reason = f" ({judged.reason})" if judged.reason else ""
            raise BisectError(
                f"{option} {revision} ({judged.commit.short}) is {described(judged)}{reason}; "
                f"the {which} end must be {verdict}{among}: name another commit"
            )
        among = f" in {_named(judged.kinds(verdict))}"


def _search(steps: _Steps, before: str, after: str, *, is_fix: bool) -> Bisection:
    history = steps.history
    touching = history.between(before, after, CORE_FILES)
    paths = CORE_FILES if touching else ()
    candidates = touching or history.between(before, after, ())
    steps.expect(len(candidates))
    if candidates != [after]:
        history.git("bisect", "start", "--no-checkout", *_TERMS, after, before, "--", *paths)
        status = steps.run(PROVED if not is_fix else REFUTED)
        after = history.git("rev-parse", "refs/bisect/after").strip()
        if status == _ONLY_SKIPPED_LEFT:
            candidates = history.left(paths)
        elif status != 0:
            raise BisectError(f"git bisect gave up: {steps.last_words()}")
        else:
            candidates = [after]
    first = after if candidates == [after] else None
    return Bisection(
        is_fix=is_fix,
        first=history.commit(first) if first else None,
        candidates=() if first else tuple(map(history.commit, candidates)),
        refuted=[judged for judged in steps.seen if judged.verdict == REFUTED][-1],
        skipped=tuple(judged for judged in steps.seen if not judged.is_decided),
    )


class _Steps:
    """Runs steps, each in a process of its own, and collects what they report."""

    def __init__(
        self,
        history: _Borrowed,
        selection: Selection,
        on_judged: Callable[[Judged], None],
        on_progress: Callable[[str], None],
    ) -> None:
        self.history, self.seen = history, list[Judged]()
        self._selection = selection
        self._on_judged, self._on_progress = on_judged, on_progress
        self._log = history.folder / "log"
        self._about = ""

    def watch(self, kinds: Sequence[Kind]) -> None:
        """Look at these kinds of step only from now on, of what was seen as well."""
        self._selection = replace(self._selection, kinds=tuple(kinds))
        self.seen = [judged.of(kinds) for judged in self.seen]

    def expect(self, num_candidates: int) -> None:
        """Note how many commits are searched, for the progress."""
        self._about = f" of about {num_candidates.bit_length()}"

    def judge(self, revision: str) -> Judged:
        """Judge one commit.

        Raises:
            BisectError: The step ended without a word.
        """
        num_seen = len(self.seen)
        self._on_progress(f"judging {self.history.commit(revision).short}")
        self._run(lambda report: self._step(report, PROVED, revision))
        if len(self.seen) == num_seen:
            raise BisectError(f"{revision} cannot be judged: {self.last_words()}")
        return self.seen[-1]

    def run(self, verdict_before: str) -> int:
        """Have git bisect run steps until it is done; return its exit status."""
        num_seen = len(self.seen)

        def command(report: int) -> list[str]:
            step = self._step(report, verdict_before, "BISECT_HEAD")
            return [*self.history.command, "bisect", "run", *step]

        def before_each() -> None:
            self._on_progress(f"step {len(self.seen) - num_seen + 1}{self._about}")

        return self._run(command, before_each)

    def last_words(self) -> str:
        """Return the last line that the last process wrote."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((_printable(line) for line in reversed(lines) if line.strip()), "no reason")

    def _step(self, report: int, verdict_before: str, revision: str) -> list[str]:
        options = [f"--git-dir={self.history.git_dir}", f"--commit={revision}"]
        options += [f"--report={report}", f"--before={verdict_before}"]
        options += [f"--theorem={theorem}" for theorem in self._selection.theorems]
        options += [f"--family={family}" for family in self._selection.families]
        options += [f"--manager={manager}" for manager in self._selection.managers]
        options += [f"--kind={where(*kind)}" for kind in self._selection.kinds]
        return [sys.executable, "-m", "conformance.bisect", *options]

    def _run(
        self,
        command: Callable[[int], list[str]],
        before_each: Callable[[], None] = lambda: None,
    ) -> int:
        """Run a process in a group of its own, so that Ctrl-C reaches us and ends all of it."""
        before_each()
        reading, writing = os.pipe()
        with os.fdopen(reading, encoding="utf-8") as reports, self._log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    command(writing),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.history.folder,
                    env=_environment(),
                    pass_fds=(writing,),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            try:
                for line in reports:
                    self._take(json.loads(line))
                    before_each()
                return process.wait()
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise

    def _take(self, report: Mapping[str, Any]) -> None:
        commit = self.history.commit(report["commit"])
        judged = Judged(commit, report["verdict"], report["reason"], tuple(report["rows"]))
        self.seen.append(judged)
        self._on_judged(judged)


class _Borrowed:
    """A bare repository in a temporary folder, over the objects of a clone that is only read."""

    def __init__(self, repo: Path) -> None:
        self._repo = Path(os.path.abspath(repo.expanduser()))

    def __enter__(self) -> _Borrowed:
        objects = self._path_in_clone("objects")
        self._temporary = tempfile.TemporaryDirectory(prefix="capproof-bisect-")
        try:
            self.folder = Path(self._temporary.name)
            self.git_dir = self.folder / "git"
            self.command = ["git", f"--git-dir={self.git_dir}", "-c", "log.showSignature=false"]
            self._borrow(objects)
        except BaseException:
            self._temporary.cleanup()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._temporary.cleanup()

    def git(self, *arguments: str) -> str:
        """Run git here and return what it prints.

        Raises:
            BisectError: It fails.
        """
        return _checked([*self.command, *arguments], self.folder)

    def resolve(self, option: str, revision: str) -> str:
        """Return the hash of a revision as the clone understands it, and make it known here.

        Raises:
            BisectError: The clone has no such commit.
        """
        try:
            found = self._in_clone("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        except BisectError:
            raise BisectError(
                f"{option} {revision}: there is no such commit in {self._repo}: "
                "give a branch, tag or hash that is (`git fetch --tags` gets those of releases)"
            ) from None
        self.git("update-ref", "--no-deref", "HEAD", found.strip())
        return found.strip()

    def is_ancestor(self, older: str, newer: str) -> bool:
        """Whether one commit is the other, or leads to it."""
        return self.git("rev-list", "--max-count=1", older, f"^{newer}") == ""

    def has(self, sha: str, path: str) -> bool:
        """Whether a commit holds a file."""
        return self.git("ls-tree", "--name-only", sha, "--", path) != ""

    def between(self, before: str, after: str, paths: Sequence[str]) -> list[str]:
        """Return the commits up to ``after`` that are not up to ``before``."""
        return self.git("rev-list", after, f"^{before}", "--", *paths).split()

    def left(self, paths: Sequence[str]) -> list[str]:
        """Return the commits among which git bisect cannot tell."""
        known = ("--not", "--glob=refs/bisect/before-*")
        return self.git("rev-list", "refs/bisect/after", *known, "--", *paths).split()

    def commit(self, revision: str) -> Commit:
        """Return what is printed of a commit."""
        form = "--format=%H%x00%h%x00%ai%x00%s"
        shown = self.git("log", "--max-count=1", form, revision, "--")
        return Commit(*map(_printable, shown.rstrip("\n").split("\0", 3)))

    def _borrow(self, objects: Path) -> None:
        """Make the repository: it sees the clone's objects, and fetches what those do not hold."""
        kind = self._in_clone("rev-parse", "--show-object-format").strip()
        init = ("init", "--bare", "--quiet", "--template=", f"--object-format={kind}")
        _checked(["git", *init, str(self.git_dir)], self.folder)
        info = self.git_dir / "objects" / "info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "alternates").write_bytes(os.fsencode(objects) + b"\n")
        shallow = self._path_in_clone("shallow")
        if shallow.is_file():
            shutil.copyfile(shallow, self.git_dir / "shallow")
        for line in self._in_clone("config", "--list").splitlines():
            name, _, value = line.partition("=")
            if name.startswith("remote.") and name.endswith((".url", ".promisor")):
                self.git("config", name, value)

    def _path_in_clone(self, name: str) -> Path:
        if not self._repo.is_dir():
            raise BisectError(f"--repo {self._repo}: there is no such folder: give a clone of vLLM")
        try:
            found = self._in_clone("rev-parse", "--git-path", name)
        except BisectError as error:
            raise BisectError(
                f"--repo {self._repo}: not a git repository that can be read ({error}): "
                "give a clone of vLLM"
            ) from None
        return self._repo / found.rstrip("\n")

    def _in_clone(self, *arguments: str) -> str:
        return _checked(["git", *arguments], self._repo)


def _checked(command: Sequence[str], folder: Path) -> str:
    """Run git and return what it prints.

    Raises:
        BisectError: It fails, or is not installed.
    """
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError:
        raise BisectError("there is no git on the path: install it") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"git ended with {done.returncode}"]
        raise BisectError(_printable(lines[0].removeprefix("fatal: ")))
    return done.stdout


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_REPOSITORY}
    path = filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def _stops_cleanly() -> Iterator[None]:
    """Take a request to end for Ctrl-C, after which nothing is left behind."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


# ---- what is printed -----------------------------------------------------------------------------


def described(judged: Judged) -> str:
    """Return a verdict, and where it is refuted the kinds of step, and those that are proved."""
    refuted, proved = judged.kinds(REFUTED), judged.kinds(PROVED)
    if not refuted:
        return judged.verdict
    also = f", {PROVED} in {_named(proved)}" if proved else ""
    return f"{REFUTED} in {_named(refuted)}{also}"


def _named(kinds: Sequence[Kind]) -> str:
    """A few kinds of step by name, more of them by number."""
    few = ", ".join(where(*kind) for kind in kinds)
    return few if len(kinds) <= _FEW else f"{len(kinds)} kinds of step"


def step_line(judged: Judged) -> str:
    """Return the line of a commit that was judged."""
    return f"{judged.commit.short} {judged.commit.subject}: {described(judged)}"


def closing_lines(found: Bisection) -> Iterator[str]:
    """Yield what a search came to: what was skipped, then the commit or those left."""
    if found.skipped:
        yield f"{len(found.skipped)} {_commits(len(found.skipped))} skipped:"
        why = [f"{judged.verdict}: {judged.reason}" for judged in found.skipped]
        for reason in dict.fromkeys(why):
            yield f"  {why.count(reason)} {_commits(why.count(reason))} {reason}"
    kind = "fixed" if found.is_fix else "bad"
    if found.first is None:
        yield f"only skipped commits are left; the first {kind} commit is one of:"
        yield from (f"  {commit.sha} {commit.subject}" for commit in found.candidates)
        return
    yield f"first {kind} commit: {found.first.sha} {found.first.subject}"
    yield f"  author date: {found.first.author_date}"


def _commits(number: int) -> str:
    return "commit" if number == 1 else "commits"


# ---- one step ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge a commit, report it, and return what `git bisect run` is to make of it."""
    parser = argparse.ArgumentParser(prog="python -m conformance.bisect", description=__doc__)
    parser.add_argument("--git-dir", type=Path, required=True)
    parser.add_argument("--commit", required=True, help="a revision in that repository")
    parser.add_argument("--theorem", action="append", default=[])
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--manager", action="append", default=[])
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--before", choices=(PROVED, REFUTED), required=True)
    parser.add_argument("--report", type=int, required=True, help="file descriptor to report to")
    options = parser.parse_args(arguments)
    kinds = tuple((family, tuple(tags)) for family, *tags in (k.split("+") for k in options.kind))
    chosen = map(tuple, (options.family, options.theorem, kinds, options.manager))
    selection = Selection(*chosen)
    try:
        report = _judge(options.git_dir, options.commit, selection)
        with os.fdopen(options.report, "w", encoding="utf-8") as reports:
            reports.write(json.dumps(report) + "\n")
    except (BisectError, OSError) as error:
        print(error, file=sys.stderr)
        return _ABORT
    if report["verdict"] not in (PROVED, REFUTED):
        return _SKIP
    return _BEFORE if report["verdict"] == options.before else _AFTER


def _judge(git_dir: Path, revision: str, selection: Selection) -> dict[str, Any]:
    git = ["git", f"--git-dir={git_dir}"]
    sha = _checked([*git, "rev-parse", "--verify", revision], git_dir).strip()
    short = _checked([*git, "rev-parse", "--short", sha], git_dir).strip()
    with tempfile.TemporaryDirectory(prefix="tree-", dir=git_dir.parent) as folder:
        root = Path(folder)
        names = _checked([*git, "ls-tree", "-z", "--name-only", sha, "--", *CORE_FILES], git_dir)
        for name in names.split("\0")[:-1]:
            content = _checked([*git, "cat-file", "blob", f"{sha}:{name}"], git_dir)
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        verdict, reason, rows = _verdict(Tree(f"vllm@{short}", root, None), selection)
    for own in (f"{root}: ", f"{root}/"):
        reason = reason.replace(own, "")
    reason = _printable(" ".join(reason.split()))
    return {"commit": sha, "verdict": verdict, "reason": reason, "rows": rows}


def _verdict(tree: Tree, selection: Selection) -> tuple[str, str, list[Row]]:
    """Return the verdict of all rows together, why there is none, and the rows."""
    from models.lift import NotUnderstood

    try:
        rows = settle(tree, selection, use_cache=False)
    except (CoreError, NotUnderstood) as error:
        return NOT_LOADED, str(error), []
    except Exception as error:  # a commit that cannot be judged says nothing of its neighbours
        return NOT_LOADED, f"{type(error).__name__}: {error}", []
    return *_together(rows), rows


def _together(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the verdict of rows together, and why there is none.

    What a theorem is not about counts where it is about nothing else.
    """
    about = [row for row in rows if row["verdict"] != NOT_APPLICABLE] or rows
    undecided = [row for row in about if row["verdict"] not in (PROVED, REFUTED)]
    if any(row["verdict"] == REFUTED for row in about):
        return REFUTED, ""
    if undecided:
        return undecided[0]["verdict"], undecided[0]["reason"] or "no reason given"
    return PROVED, ""


if __name__ == "__main__":
    sys.exit(main())
