"""Ask what people have the same questions as capproof, and write the answers down.

    python scripts/bench_peers.py [--seeds N] [--patience S] [--write docs/benchmarks.md]

Hypothesis and plain enumeration drive the real manager, CrossHair a transcription and the real
manager; vLLM's own tests are run where a release's sources carry them. CrossHair gets an
environment of its own below `build/`. Nothing is asserted: where capproof is not ahead, the table
says so. The section of the page between the markers is written anew, and nothing else of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from conformance.replay import tier_environment
from conformance.targets import resolve
from scripts.bench import Failed, Figure, machine, table
from scripts.marked import PEERS
from scripts.peer_questions import MANAGER, QUESTIONS, Question

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).with_name("peer_workers.py")
CAPPROOF = Path(sys.executable).with_name("capproof")
#: CrossHair, and the environment that it is installed into.
CROSSHAIR = "crosshair-tool==0.0.113"
ENVIRONMENT = ROOT / "build" / "peers" / "crosshair"
#: Examples of Hypothesis: its default, and many.
EXAMPLES = (100, 10_000)
#: vLLM's own tests of what is judged, below a checkout.
OWN_TESTS = Path("tests/v1/core/test_single_type_kv_cache_manager.py")
#: The sizes of `scripts/peer_real_manager.py`.
SMALL = "B up to 4, 8 tokens, S up to 1, on the release's own source"
NOT_SHOWN = "no"
OURS = "**`capproof prove`**, to its end"
OURS_INSIDE = "**capproof**, inside one process, to the first"


@dataclass(frozen=True)
class Answer:
    """What became of one question asked of one tool.

    Attributes:
        who: The tool, and how it was asked.
        found: How many runs of how many found a counterexample, or why there are none.
        search: Seconds to the counterexample, or to giving up, the code under test loaded.
        whole: The same from process start.
        absence: What it shows where there is nothing to be found.
        is_found: Whether it found a counterexample in half of its runs or more.
        shows_all: Whether it shows absence for all sizes, on the release's own source.
    """

    who: str
    found: str
    search: Figure | None = None
    whole: Figure | None = None
    absence: str = "-"
    is_found: bool = False
    shows_all: bool = False

    def cells(self) -> list[str]:
        """Return the line's cells."""
        figures = ("-" if figure is None else str(figure) for figure in (self.search, self.whole))
        return [self.who, self.found, *figures, self.absence]


def asked(who: str, ask: Callable[[], Answer]) -> Answer:
    """Ask, and say so where that cannot be done."""
    print(who, file=sys.stderr, flush=True)
    try:
        return replace(ask(), who=who)
    except Failed as error:
        return Answer(who, f"could not run: {error}")


# ---- those asked ---------------------------------------------------------------------------------


def answers(question: Question, num_seeds: int, patience: int) -> Iterator[Answer]:
    """Yield what each tool says to a question.

    Args:
        question: What is asked.
        num_seeds: Searches of Hypothesis; a tenth of them where each may take all examples.
        patience: Seconds for enumeration, and for CrossHair per contract.
    """
    root = Path(resolve(question.target).root)
    search = partial(_searched, question, root)
    for examples, num, tier in (
        (EXAMPLES[0], num_seeds, "core"),
        (EXAMPLES[0], num_seeds, "vllm"),
        (EXAMPLES[1], seeds_of_many(num_seeds), "core"),
    ):
        who = f"Hypothesis, {examples:,} examples" + ", vLLM imported" * (tier == "vllm")
        yield asked(who, partial(search, "hypothesis", tier, str(examples), str(num)))
    who = "enumeration, small sizes first"
    yield asked(who, partial(search, "enumeration", "core", str(patience)))
    for contract, sizes in question.transcribed.items():
        name = f"peer_transcription.{contract}"
        who = f"CrossHair, a transcription (`{contract}`)"
        yield asked(who, partial(_crosshair, name, sizes, root, patience))
    who, name = "CrossHair, the real manager", f"peer_real_manager.{question.real}"
    yield asked(who, partial(_crosshair, name, SMALL, root, patience))
    yield asked("vLLM's own tests", partial(_own_tests, root))
    yield asked(OURS_INSIDE, partial(_in_one_process, question, root))
    yield asked(OURS, partial(_command, question))


def seeds_of_many(num_seeds: int) -> int:
    """Return how many searches are made where each may take very many examples."""
    return max(num_seeds // 10, 2)


def _searched(question: Question, root: Path, what: str, tier: str, *arguments: str) -> Answer:
    command: list[str | Path] = [
        sys.executable,
        WORKERS,
        what,
        question.slug,
        root,
        tier,
        *arguments,
    ]
    found = _answer(command, tier_environment(root) if tier == "vllm" else _environment())
    answer = _timed(found)
    if answer.is_found:
        return answer
    if what == "hypothesis":
        return replace(answer, absence=NOT_SHOWN)
    absence = (
        f"each number up to {found['complete']}: {found['tried']:,} tried, of which "
        f"{found['steps']:,} make such a step"
    )
    return replace(answer, absence=absence)


def _timed(found: dict[str, Any]) -> Answer:
    """An answer with the times of the runs that found something, or of all where none did."""
    runs = found["runs"]
    counted = [one for one in runs if one["found"]]
    search = tuple(one["seconds"] for one in counted or runs)
    return Answer(
        "",
        f"{len(counted)} of {len(runs)}",
        Figure(search),
        Figure(tuple(seconds + found["loading"] for seconds in search)),
        is_found=2 * len(counted) >= len(runs),
    )


def _answer(command: Sequence[str | Path], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON line of a worker, which counts from the moment it is started here."""
    found: dict[str, Any] = json.loads(
        _said(command, {**environment, "CAPPROOF_STARTED": str(time.time())}).splitlines()[-1]
    )
    return found


def _environment(**others: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **others}


def _said(
    command: Sequence[str | Path], environment: dict[str, str] | None = None, *, at_most: int = 0
) -> str:
    """What a process prints that has to end with exit status 0, or one up to `at_most`."""
    process = subprocess.run(
        list(map(str, command)),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if not 0 <= process.returncode <= at_most:
        lines = (process.stderr.strip() or process.stdout.strip() or "it said nothing").splitlines()
        raise Failed(lines[-1])
    return process.stdout


def _crosshair(contract: str, sizes: str, root: Path, patience: int) -> Answer:
    python = _crosshair_python()
    command = [python, "-m", "crosshair", "check", f"scripts.{contract}"]
    command += ["--analysis_kind=asserts", "--report_all", f"--per_condition_timeout={patience}"]
    started = time.perf_counter()
    said = _said(command, _environment(CAPPROOF_PEER_ROOT=str(root)), at_most=1)
    whole = Figure((time.perf_counter() - started,))
    if "error: AssertionError" in said:
        return Answer("", "yes", whole=whole, is_found=True)
    if "error: " in said or not said:
        raise Failed(said.strip() or "it said nothing")
    is_confirmed = "Confirmed over all paths" in said
    return Answer("", "no", whole=whole, absence=sizes if is_confirmed else NOT_SHOWN)


def _crosshair_python() -> str:
    """The interpreter of an environment that has CrossHair, made when it is first asked for."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / f".{CROSSHAIR}"
    if not stamp.exists():
        _said([sys.executable, "-m", "venv", "--clear", ENVIRONMENT])
        quietly = ["--disable-pip-version-check", "install", "--quiet"]
        _said([python, "-m", "pip", *quietly, CROSSHAIR])
        stamp.touch()
    return str(python)


def _own_tests(root: Path) -> Answer:
    file = root / OWN_TESTS
    if not file.is_file():
        return Answer("", "not in the wheel")
    started = time.perf_counter()
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        file,
    ]
    said = _said(command, tier_environment(root), at_most=1)
    whole = Figure((time.perf_counter() - started,))
    found = " failed" in said
    return Answer("", "yes" if found else "no", whole=whole, absence=NOT_SHOWN, is_found=found)


def _in_one_process(question: Question, root: Path) -> Answer:
    """The same work without the command around it, up to the first counterexample."""
    worker: list[str | Path] = [sys.executable, WORKERS, "capproof", question.slug, root]
    found = _answer(worker, _environment())
    return replace(_timed(found), **_proved(set(found["verdicts"]) == {"PROVED"}))


def _command(question: Question) -> Answer:
    """The command as a user runs it, to its end.

    It settles the family's other kinds of step, too, and makes each counterexample least, and one
    at production sizes, and replays them.
    """
    command: list[str | Path] = [CAPPROOF, "prove", "--no-cache", "--target", question.target]
    command += ["--manager", MANAGER, "--family", question.family, "--theorem", question.theorem]
    _said([CAPPROOF, "--help"])  # writes bytecode
    walls = []
    for _ in range(3):
        started = time.perf_counter()
        said = _said(command, at_most=1)
        walls.append(time.perf_counter() - started)
    kind = f"{question.target} {MANAGER} {question.family} {question.theorem} "
    verdicts = [line.removeprefix(kind).split()[0] for line in said.splitlines() if kind in line]
    if verdicts not in (["PROVED"], ["REFUTED"]):
        raise Failed(f"{kind}: {', '.join(verdicts) or 'no verdict'}")
    is_proved = verdicts == ["PROVED"]
    answer = Answer("", "", whole=Figure(tuple(walls)), is_found=not is_proved)
    return replace(answer, **_proved(is_proved))


def _proved(is_proved: bool) -> dict[str, Any]:
    absence = "all sizes, S 0 to 8, on the release's own source"
    return {
        "found": "no" if is_proved else "yes",
        "absence": absence if is_proved else "-",
        "shows_all": is_proved,
    }


# ---- the section ---------------------------------------------------------------------------------


def compared(said: Sequence[Answer]) -> str:
    """Say in words how the command, the last of the answers, stands among those of others."""
    *before, ours = said
    others = [one for one in before if one.who != OURS_INSIDE]
    if not ours.is_found:
        everything = [one.who for one in said if one.shows_all]
        less = [one.who for one in others if one.absence not in ("-", NOT_SHOWN)]
        return (
            f"Shown for all sizes on the release's own source by: {_listed(everything)}. Shown for "
            f"fewer sizes, or of a transcription, by: {_listed(less)}."
        )
    assert ours.whole is not None
    ahead, behind, without = [], [], []
    for one in others:
        if one.whole is None or not one.is_found:
            without.append(one.who)
        elif ours.whole.median < one.whole.median:
            ahead.append(one.who)
        else:
            behind.append(one.who)
    return (
        f"From process start to the counterexample, by medians, the command is ahead of: "
        f"{_listed(ahead)}. It is **not ahead** of: {_listed(behind)}. No counterexample from: "
        f"{_listed(without)}."
    )


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names) or "nobody"


def section(num_seeds: int, patience: int) -> Iterator[str]:
    """Yield the section, paragraph by paragraph, as it is measured."""
    yield "## Beside what people have"
    yield (
        f"Written by `make bench-peers`; {machine()}; {CROSSHAIR.replace('==', ' ')}; load average "
        f"before, of other work: {os.getloadavg()[0]:.1f}. All are told "
        "which kind of step is in question and which claim, and ask the same code for it. "
        "*Search* begins when that is loaded; *from process start* counts imports, too. Where a "
        "row does not say *vLLM imported*, capproof's own loader has loaded the manager, which is "
        f"faster than importing vLLM. Hypothesis: {num_seeds} seeds at {EXAMPLES[0]} examples, "
        f"{seeds_of_many(num_seeds)} at {EXAMPLES[1]:,}, without shrinking. Enumeration and "
        f"CrossHair have {patience} s. Times are medians (least to greatest) of the runs that "
        "found a counterexample, else of all. The transcription is "
        "`scripts/peer_transcription.py`, the questions are `scripts/peer_questions.py`."
    )
    for question in QUESTIONS.values():
        said = list(answers(question, num_seeds, patience))
        yield f"### {question.title}"
        selection = f"`--family {question.family} --theorem {question.theorem}`"
        yield f"`{question.target}`, {selection}."
        head = ["who", "found", "search", "from process start", "absence shown for"]
        yield table(head, [one.cells() for one in said])
        yield compared(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, metavar="N")
    parser.add_argument("--patience", type=int, default=60, metavar="SECONDS")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the section there")
    options = parser.parse_args()
    paragraphs = []
    for paragraph in section(options.seeds, options.patience):
        print(paragraph, end="\n\n", flush=True)
        paragraphs.append(paragraph)
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
        options.write.write_text(PEERS.put(text, "\n\n".join(paragraphs)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
