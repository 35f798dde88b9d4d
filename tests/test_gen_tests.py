"""The generated tests: the same bytes everywhere, and --check notices whatever differs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance import cli, gen_tests
from conformance.commands import gen_tests as gen_tests_command
from conformance.commands.settling import settle_all
from conformance.gen_tests import (
    GenTestsError,
    check_rendering,
    check_scenarios,
    check_verdicts,
    write,
)
from conformance.obligations import Row, Selection
from conformance.render import MARKER
from conformance.replay import PROJECT_ROOT
from conformance.scenario import ScenarioError
from conformance.targets import DEFAULT_TARGETS, Tree, resolve
from models.predict import LiftedTree

GENERATED = PROJECT_ROOT / "generated_tests"
OLD, NEW, _ = DEFAULT_TARGETS
RENDERED = "test_checkpoint.py"
REFUTATION = "scenarios/refutations/exact-estimate-checkpoint-vllm-0-30-0.json"
FIRST = "scenarios/first.json"
VERDICTS = "scenarios/verdicts.json"
#: Families of the folder that most tests change: all of it would be made anew for each of them.
FEW = ("first", "checkpoint")
Edit = Callable[[Path], object]
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def targets() -> list[Tree]:
    return [resolve(target) for target in DEFAULT_TARGETS]


@pytest.fixture(scope="module")
def rows(targets: list[Tree]) -> list[Row]:
    """All verdicts, solved where they were not solved with the same text before."""
    return settle_all(targets, Selection(), use_cache=True)


@pytest.fixture(scope="module")
def few_rows(rows: list[Row]) -> list[Row]:
    """Verdicts of the kinds of step in a folder of few families."""
    return [row for row in rows if row["family"] in FEW]


@pytest.fixture(scope="module")
def lifted(targets: list[Tree]) -> dict[Path, LiftedTree]:
    return {tree.root: LiftedTree(tree.root) for tree in targets}


@pytest.fixture
def solved(
    monkeypatch: pytest.MonkeyPatch, few_rows: list[Row], lifted: dict[Path, LiftedTree]
) -> None:
    """Solving and lifting take no time: they were done before, in this process."""
    monkeypatch.setattr(gen_tests, "LiftedTree", lifted.__getitem__)
    monkeypatch.setattr(gen_tests, "spread", _here)
    monkeypatch.setattr(
        gen_tests_command,
        "settle_all",
        lambda trees, *arguments, **options: [
            row for row in few_rows if row["target"] in {tree.target for tree in trees}
        ],
    )


def _here(
    do: Callable[..., Any], works: Sequence[tuple[Any, ...]], jobs: int
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return ((work, do(*work)) for work in works)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What is committed of a few families, in a folder of its own."""
    out = tmp_path / "generated"
    (out / "scenarios/refutations").mkdir(parents=True)
    suites = [f"{manager}{family}" for family in FEW for manager in ("", "coordinator-")]
    names = ["conftest.py", *(f"scenarios/{suite}.json" for suite in suites)]
    names += [f"test_{suite.replace('-', '_')}.py" for suite in suites]
    names += [
        str(file.relative_to(GENERATED))
        for file in (GENERATED / "scenarios/refutations").iterdir()
        if json.loads(file.read_text())["family"] in FEW
    ]
    for name in names:
        shutil.copyfile(GENERATED / name, out / name)
    content = json.loads((GENERATED / VERDICTS).read_text())
    for of_target in content["verdicts"].values():
        for kind in [kind for kind in of_target if not _is_of_few(kind)]:
            del of_target[kind]
    (out / VERDICTS).write_text(json.dumps(content, indent=2) + "\n")
    return out


def _is_of_few(kind: str) -> bool:
    return kind.removeprefix("coordinator-").partition("+")[0] in FEW


def files_in(folder: Path) -> list[str]:
    return sorted(
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    )


# ---- the same bytes ------------------------------------------------------------------------------


def test_the_committed_folder_is_current(capproof: Callable[..., Any]) -> None:
    """Another process with another hash seed would write what is committed, byte for byte."""
    done = capproof("gen-tests", "--check", PYTHONHASHSEED="4711")

    assert (done.returncode, done.stderr) == (0, "")
    assert "current, and 2958 verdicts are the committed ones" in done.stdout


# ---- --check -------------------------------------------------------------------------------------


def edit(name: str, old: str, new: str) -> Edit:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def change_json(name: str, change: Callable[[Any], object]) -> Edit:
    def rewrite(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        text = json.dumps(content, indent=2, sort_keys=name != VERDICTS) + "\n"
        (folder / name).write_text(text)

    return rewrite


def in_last_step(**expect: int) -> Edit:
    return change_json(FIRST, lambda c: c["scenarios"][0]["steps"][-1]["expect"].update(expect))


def in_prediction(**fields: Any) -> Edit:
    return change_json(FIRST, lambda c: c["scenarios"][0]["predicted"][NEW].update(fields))


def in_verdicts(**verdicts: str) -> Edit:
    words = {theorem.replace("_", "-"): verdict for theorem, verdict in verdicts.items()}
    return change_json(VERDICTS, lambda c: c["verdicts"][NEW]["first"].update(words))


CHANGES: dict[str, tuple[Edit, str]] = {
    "a rendered file": (edit(RENDERED, "== step.drawn", ">= 0"), f"{RENDERED} differs"),
    "a blank in a rendered file": (edit(RENDERED, "assert", "assert "), f"{RENDERED} differs"),
    "conftest": (edit("conftest.py", "driver", "drivers"), "conftest.py differs"),
    "a missing rendered file": (lambda out: (out / RENDERED).unlink(), f"{RENDERED} differs"),
    "an extra generated file": (
        lambda out: (out / "test_more.py").write_text(f"{MARKER}\n"),
        "test_more.py is rendered from no scenario",
    ),
    "a need": (
        in_last_step(need=9),
        "scenarios/first.json: b",
    ),
    "a table length": (
        in_last_step(table_length=9),
        "test_first.py differs",
    ),
    "a prediction that is not rendered": (
        in_prediction(drawn=9),
        "is not what is predicted now",
    ),
    "what is violated": (
        in_prediction(violates=["no-undercount"]),  # not expected, so no test is marked for it
        "is not what is predicted now",
    ),
    "a forgotten prediction": (
        change_json(FIRST, lambda c: c["scenarios"][0]["predicted"].pop(NEW)),
        "is not what is predicted now",
    ),
    "a scenario of no path": (
        change_json(FIRST, lambda c: c["scenarios"].pop()),
        "test_first.py differs",
    ),
    "a refutation": (
        edit(REFUTATION, '"num_gpu_blocks": ', '"num_gpu_blocks": 1'),
        f"{REFUTATION} is not the counterexample that was found again",
    ),
    "a missing refutation": (
        lambda out: (out / REFUTATION).unlink(),
        f"{REFUTATION} is missing",
    ),
    "an extra refutation": (
        lambda out: (out / "scenarios/refutations/more.json").write_text(
            re.sub('"name": ".*"', '"name": "more"', (out / REFUTATION).read_text())
        ),
        "more.json is the counterexample of no refuted theorem",
    ),
    "a verdict": (
        in_verdicts(no_undercount="REFUTED"),
        f"{NEW} first no-undercount: committed REFUTED, now PROVED",
    ),
    "a missing verdict": (
        change_json(VERDICTS, lambda c: c["verdicts"][NEW]["first"].pop("no-undercount")),
        f"{NEW} first no-undercount: committed None, now PROVED",
    ),
    "a verdict of no theorem": (
        in_verdicts(more="PROVED"),
        f"{NEW} first more: committed PROVED, now None",
    ),
    "another solver": (edit(VERDICTS, '"z3 ', '"z3 1'), f"{RENDERED} differs"),
}


@pytest.mark.usefixtures("solved")
def test_a_folder_that_nothing_was_changed_in_is_current(out: Path, capsys: Output) -> None:
    """Without a change there is nothing to notice."""
    assert cli.run(["gen-tests", "--check", "--out", str(out)]) == 0
    assert ": current, and " in capsys.readouterr().out


@pytest.mark.usefixtures("solved")
@pytest.mark.parametrize("what", CHANGES)
def test_check_notices_a_change(out: Path, capsys: Output, what: str) -> None:
    """One change of any kind is exit status 1, named, with what to run."""
    change, message = CHANGES[what]
    change(out)
    before = files_in(out)

    assert cli.run(["gen-tests", "--check", "--out", str(out)]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert any(message in line for line in lines), lines
    assert all(line.endswith("; run `capproof gen-tests`") for line in lines)
    assert files_in(out) == before


def test_another_verdict_of_the_solver_is_a_difference(rows: list[Row]) -> None:
    """What is compared is each verdict, not how many there are."""
    changed = [{**row, "verdict": "UNKNOWN"} for row in rows if row["theorem"] == "dry-run-pure"]
    others = [row for row in rows if row["theorem"] != "dry-run-pure"]

    found = [difference.what for difference in check_verdicts(GENERATED, [*others, *changed])]

    assert len(found) == 29 * 3 * 2  # kinds of step, targets, managers
    assert all(text.endswith("committed PROVED, now UNKNOWN") for text in found)


@pytest.mark.usefixtures("solved")
def test_a_target_that_is_not_committed_is_a_difference(out: Path, capsys: Output) -> None:
    """A folder says nothing of a target that it was not generated for."""
    change_json(VERDICTS, lambda c: c["verdicts"].pop(OLD))(out)

    assert cli.run(["gen-tests", "--check", "--out", str(out), "--target", OLD]) == 1
    assert f"{OLD} first no-undercount: committed None" in capsys.readouterr().out


@pytest.mark.usefixtures("solved")
@pytest.mark.parametrize("target", DEFAULT_TARGETS)
def test_one_target_of_several_can_be_checked(
    targets: list[Tree], few_rows: list[Row], out: Path, target: str
) -> None:
    """What is predicted for the other targets does not matter then."""
    asked = [tree for tree in targets if tree.target == target]
    of_target = [row for row in few_rows if row["target"] == target]

    assert check_verdicts(out, of_target) == []
    assert check_scenarios(out, asked, of_target) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"solver": 5, "verdicts": {}}',
        '{"solver": "z3 5", "verdicts": []}',
        '{"solver": "z3 5", "verdicts": {"t": []}}',
        '{"solver": "z3 5", "verdicts": {"t": {"first": "PROVED"}}}',
        '{"solver": "z3 5", "verdicts": {"t": {"first": {"no-undercount": 1}}}}',
        '{"solver": "z3 5", "verdicts": {"t\\nimport os": {"first": {}}}}',
        '{"solver": "5\\nimport os", "verdicts": {}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:30] or "nothing",
)
def test_damaged_verdicts_are_one_line(out: Path, capsys: Output, text: str) -> None:
    """A file that holds no verdicts is named, and nothing of it reaches a rendered file."""
    (out / VERDICTS).write_text(text)

    assert cli.run(["gen-tests", "--check", "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{out / VERDICTS}: not the verdicts of a gen-tests run" in line


def test_damaged_scenarios_are_refused(out: Path) -> None:
    """A scenario file that is not one is named; without any there is nothing to check."""
    (out / "scenarios/first.json").write_text("{")
    with pytest.raises(ScenarioError, match=r"first\.json: not JSON"):
        check_rendering(out)

    shutil.rmtree(out / "scenarios")
    with pytest.raises(GenTestsError, match="no scenarios here; run `capproof gen-tests`"):
        check_rendering(out)


# ---- writing -------------------------------------------------------------------------------------

OURS = {Path("conftest.py"): f"{MARKER}\nours", Path("a/test_a.py"): f"{MARKER}\nours too"}


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    """A second run changes nothing, and a changed file is written anew."""
    assert write(OURS, tmp_path) == list(OURS)
    assert write(OURS, tmp_path) == []
    (tmp_path / "a/test_a.py").write_text(f"{MARKER}\nedited")
    assert write(OURS, tmp_path) == [Path("a/test_a.py")]
    assert files_in(tmp_path) == ["a/test_a.py", "conftest.py"]


def test_stale_generated_files_go_and_foreign_ones_stay(out: Path) -> None:
    """What is no longer made is removed if it is ours; a person's files are never touched."""
    before = files_in(out)
    stale = ["a/test_stale.py", "scenarios/refutations/stale.json", "test_stale.py"]
    (out / "a").mkdir()
    (out / stale[2]).write_text(f"{MARKER}\n")
    (out / stale[0]).write_text(f"{MARKER}\n")
    (out / stale[1]).write_text(
        re.sub('"name": ".*"', '"name": "stale"', (out / REFUTATION).read_text())
    )
    foreign = {
        "a/test_mine.py": "# mine\n",
        "test_mine.py": "# mine\n",
        "README.md": "mine\n",
        "scenarios/mine.json": (out / REFUTATION).read_text(),
        "scenarios/notes.json": '{"schema": 1}',
        "scenarios/refutations/mine.json": (out / REFUTATION).read_text(),
    }
    for name, text in foreign.items():
        (out / name).write_text(text)
    current = {Path(name): (out / name).read_text() for name in before}

    assert write(current, out) == [Path(name) for name in stale]

    assert {name: (out / name).read_text() for name in foreign} == foreign
    assert files_in(out) == sorted([*before, *foreign])


@pytest.mark.parametrize("name", ["conftest.py", RENDERED, "scenarios/first.json", VERDICTS])
def test_a_foreign_file_of_the_same_name_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, name: str
) -> None:
    """Nothing is written where a person's file stands in the way, and nothing is lost."""
    files = {Path(one): (GENERATED / one).read_text() for one in files_in(GENERATED)}
    monkeypatch.setattr(gen_tests, "generate_files", lambda *_, **__: files)
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")

    assert cli.run(["gen-tests", "--out", str(out)]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert f"{out / name} was not generated by capproof; nothing was written" in line
    assert files_in(out) == [name]
    assert (out / name).read_text() == "mine"


@pytest.mark.parametrize(
    "obstacle",
    [
        lambda out: out.write_text("a file"),
        lambda out: (out / "conftest.py").mkdir(parents=True),
        lambda out: _file(out / "a"),
    ],
    ids=["the folder is a file", "a file is a folder", "a folder is a file"],
)
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, obstacle: Edit
) -> None:
    """What stands in the way is named."""
    monkeypatch.setattr(gen_tests, "generate_files", lambda *_, **__: OURS)
    obstacle(tmp_path / "out")

    assert cli.run(["gen-tests", "--out", str(tmp_path / "out")]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "out") in line


def _file(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("a file")


def test_an_interrupted_write_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is the old one or the new one, and no other name is left behind."""
    write(OURS, tmp_path)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write({path: f"{text} and new" for path, text in OURS.items()}, tmp_path)

    assert files_in(tmp_path) == ["a/test_a.py", "conftest.py"]
    assert (tmp_path / "conftest.py").read_text() == f"{MARKER}\nours"
