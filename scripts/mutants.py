"""Which small changes to the lifted functions are noticed: by proofs, generated tests, and lives.

Each change of tests/mutants.toml is made to a copy of a release's core, and the copy is proved like
any tree. A change is noticed when a theorem that is not refuted for the release is refuted for the
copy; else the solver must show that no step tells the two apart. Anything else is a hole in the
theorems. Counterexamples are run on the changed code, too. A copy that is not proved to be the same
is also run by the generated tests and by random lives; where none of the three notices it, the exit
status is 1.

What became of each mutant is kept in the cache folder, so that a run goes on where one was
interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diskcache  # type: ignore[import-untyped]

from conformance.targets import TargetError, cache_root, resolve
from models.loader import CORE_MODULES
from scripts.mutant_proofs import Judgement, Outcome, Shown, judge_all
from scripts.mutant_runs import BY, NUM_LIVES, Run, run_all
from scripts.mutations import ROOT, SCHEDULER, Mutant, MutantError, load, mutated_tree

#: The release that the changes are made for, so that each fits it; and the newest.
RELEASE, NEWEST = "0.31.0", "0.33.0"
#: What proofs, and runs, depend on beside a release and a mutant.
_PROVED_BY = (
    *("spec/*.py", "models/*.py", "conformance/*.py"),
    *("scripts/mutant_proofs.py", "scripts/mutations.py", "scripts/same_steps.py"),
)
_RUN_BY = (*_PROVED_BY, "scripts/mutant_runs.py", "generated_tests/*.py", "spec/*.toml")
PROOFS, TESTS, LIVES = "proofs", *BY
#: Outcomes of a mutant whose behaviour is, or may be, another than the release's.
_MAY_DIFFER = (Outcome.REFUTED, Outcome.MODEL_ONLY, Outcome.NOT_UNDERSTOOD, Outcome.SURVIVED)


@dataclass(frozen=True)
class Result:
    """What became of a mutant of a release.

    Attributes:
        judgement: By proof.
        runs: By what runs the changed code, where it may do something else than the release's.
    """

    judgement: Judgement
    runs: Mapping[str, Run]

    @property
    def mutant(self) -> Mutant:
        """The change."""
        return self.judgement.mutant

    @property
    def noticed_by(self) -> frozenset[str]:
        """Which of the three notice it; a verdict UNSUPPORTED is no pass."""
        noticing = {by for by, run in self.runs.items() if run.noticed}
        is_pass = self.judgement.outcome in (Outcome.SURVIVED, *_NOT_COUNTED)
        return frozenset(noticing if is_pass else {PROOFS, *noticing})

    @property
    def counts(self) -> bool:
        """Whether something should notice it."""
        return self.judgement.outcome not in _NOT_COUNTED


_NOT_COUNTED = (Outcome.EQUIVALENT, Outcome.DOES_NOT_FIT)


class _Kept:
    """Results of earlier runs, by all that they depend on."""

    def __init__(self, root: Path) -> None:
        folder = cache_root() / "mutants"
        self._of_release = _digest(root, (f"{m.replace('.', '/')}.py" for m in _READ))
        self._cache = diskcache.Cache(str(folder), eviction_policy="none")

    def get(self, by: str, mutant: Mutant | None) -> Any:
        """Return what became of a mutant, or of the unchanged copy; None is not known."""
        return self._cache.get(self._key(by, mutant))

    def keep(self, by: str, mutant: Mutant | None, found: Judgement | Run) -> None:
        """Keep it."""
        self._cache[self._key(by, mutant)] = found

    def _key(self, by: str, mutant: Mutant | None) -> str:
        return (
            f"{by} {mutant!r} {self._of_release} {_ours(_PROVED_BY if by == PROOFS else _RUN_BY)}"
        )


_READ = sorted((*CORE_MODULES, SCHEDULER))


@cache
def _ours(patterns: tuple[str, ...]) -> str:
    names = sorted(str(f.relative_to(ROOT)) for p in patterns for f in ROOT.glob(p))
    versions = f"{platform.python_version()} {version('z3-solver')} {version('hypothesis')}"
    return _digest(ROOT, names) + versions


def _digest(root: Path, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        content = (root / name).read_bytes() if (root / name).is_file() else b""
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def results_of(
    mutants: Sequence[Mutant],
    root: Path,
    release: str,
    *,
    jobs: int,
    on_progress: Callable[[str], None],
) -> list[Result]:
    """Judge mutants of a release, those not known yet, in the order of the mutants.

    Raises:
        MutantError: The unchanged copy fails what is run.
    """
    kept = _Kept(root)
    unjudged = [mutant for mutant in mutants if kept.get(PROOFS, mutant) is None]
    for number, judgement in enumerate(judge_all(unjudged, root, jobs=jobs), start=1):
        kept.keep(PROOFS, judgement.mutant, judgement)
        on_progress(
            f"{number}/{len(unjudged)} {judgement.mutant.name}: {judgement.outcome.value} "
            f"{judgement.by} ({judgement.seconds:.1f} s)"
        )
    judged = {mutant: kept.get(PROOFS, mutant) for mutant in mutants}
    differing = [mutant for mutant in mutants if judged[mutant].outcome in _MAY_DIFFER]
    to_run = [(by, one) for one in (None, *differing) for by in BY if kept.get(by, one) is None]
    for number, (by, one, run) in enumerate(run_all(to_run, root, release, jobs=jobs), start=1):
        if one is None and run.noticed:
            raise MutantError(f"{release} itself fails the {by}: {run.noticed}")
        kept.keep(by, one, run)
        name = "unchanged" if one is None else one.name
        noticed = run.noticed or "noticed nothing"
        on_progress(f"{number}/{len(to_run)} {name}: {by}: {noticed} ({run.seconds:.1f} s)")
    return [
        Result(judged[one], {by: kept.get(by, one) for by in BY if one in differing})
        for one in mutants
    ]


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return the summary, in the order it is printed."""
    of = Counter(found.judgement.outcome for found in results)
    refutations = [found.judgement.refutation for found in results]
    shown = Counter(found.shown for found in refutations if found is not None)
    counted = [found for found in results if found.counts]
    noticed = Counter(by for found in counted for by in found.noticed_by)
    return {
        "mutants": len(results),
        "do not fit the release": of[Outcome.DOES_NOT_FIT],
        "proved equivalent": of[Outcome.EQUIVALENT],
        "others": len(counted),
        "of these noticed by proofs, generated tests or lives": sum(
            bool(found.noticed_by) for found in counted
        ),
        "noticed by proofs": noticed[PROOFS],
        "refuted by a theorem other than matches-intended": of[Outcome.REFUTED],
        "refuted by matches-intended alone": of[Outcome.MODEL_ONLY],
        "not understood: the verdict is UNSUPPORTED": of[Outcome.NOT_UNDERSTOOD],
        "noticed by the generated tests": noticed[TESTS],
        "noticed by lives": noticed[LIVES],
        "noticed by none": sum(not found.noticed_by for found in counted),
        "survived the proofs": of[Outcome.SURVIVED],
        "refuted mutants whose code, run natively, shows it as predicted": shown[
            Shown.AS_PREDICTED
        ],
        "refuted mutants whose code shows it in other numbers": shown[Shown.OTHERWISE],
        "refuted mutants whose code was not seen to show it": shown[Shown.NOT],
    }


def kill_matrix(results: Sequence[Result]) -> dict[tuple[str, ...], int]:
    """Return how many mutants are noticed by exactly these, the most of them first."""
    of = Counter(
        tuple(by for by in (PROOFS, *BY) if by in found.noticed_by)
        for found in results
        if found.counts
    )
    return dict(of.most_common())


def plain_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield one line per mutant, and the summary."""
    width = max(len(found.mutant.name) for found in results)
    for found in results:
        judgement = found.judgement
        by = f"{judgement.outcome.value}  {judgement.by}".rstrip()
        also = [name for name in BY if name in found.noticed_by]
        yield f"{found.mutant.name:{width}}  {'; '.join((by, *also))}"
        if judgement.outcome is Outcome.SURVIVED:
            yield from (f"{'':{width}}  {note}" for note in judgement.notes)
    yield ""
    yield from (f"{number:5}  {what}" for what, number in counts(results).items())


def page(by_release: Mapping[str, Sequence[Result]], before: str = "") -> str:
    """Return the results of one or more releases as a page.

    Args:
        by_release: What became of mutants.
        before: The page as it was, whose sections of other releases stay.
    """
    lives = (f"{n} with {s or 'no'} step in flight" for s, n in NUM_LIVES.items())
    sections = sections_of(before)
    sections |= {name: "\n".join(_section(name, found)) for name, found in by_release.items()}
    lines = [
        "# Mutants",
        "",
        "Written by `make mutants`; do not edit.",
        "",
        "Each row is one change of a few tokens to vLLM, made to a copy of a release's core and",
        "proved like any tree. A mutant is **refuted** when a theorem that is not refuted for the",
        "release is refuted for the copy; the first one found is named, with its kind of step.",
        "`matches-intended` compares with the project's own model, so mutants that nothing else",
        "refutes are counted apart. A mutant is **not understood** when the lifter refuses the",
        "copy: its verdicts are UNSUPPORTED, never a pass. It is **equivalent** when the solver",
        "shows, for every kind of step that the function has a part in, in every setting, that",
        "estimate, dry run, blocks drawn, exceptions, block table, returned and freed blocks and",
        "every other part of the manager's state are the release's; of several groups: that the",
        "same requests are refused, and for the others gate, dry run, estimate, blocks drawn and",
        "tables' lengths are the same. Anything else has **survived** the proofs: it is a hole in",
        "the theorems, whatever the judgement beside it says. The counterexample is also run on",
        "the changed code itself, without a solver.",
        "",
        "What is not proved equivalent is run, on the core tier: by the **generated tests**, as",
        f"they judge the release, and by random **lives**, {' and '.join(lives)}.",
        "An unchanged copy passes both.",
        "",
        *(sections[release] for release in sorted(sections)),
    ]
    return "\n".join(lines)


def sections_of(text: str) -> dict[str, str]:
    """Return the sections of a page, by release."""
    _, *parts = re.split(r"^(?=## vLLM )", text, flags=re.MULTILINE)
    return {part.split()[2]: part.rstrip("\n") + "\n" for part in parts}


def _section(release: str, results: Sequence[Result]) -> Iterator[str]:
    yield from (f"## vLLM {release}", "", "| count | of |", "|--:|---|")
    yield from (f"| {number} | {what} |" for what, number in counts(results).items())
    yield from ("", "| mutants | noticed by exactly |", "|--:|---|")
    for by, number in kill_matrix(results).items():
        yield f"| {number} | {', '.join(by) or 'none'} |"
    yield from ("", "| | seconds of one process, all mutants together |", "|---|--:|")
    seconds = {PROOFS: sum(found.judgement.seconds for found in results)}
    seconds |= {by: sum(f.runs[by].seconds for f in results if by in f.runs) for by in BY}
    yield from (f"| {by} | {number:.0f} |" for by, number in seconds.items())
    yield ""
    survivors = [found for found in results if found.judgement.outcome is Outcome.SURVIVED]
    if survivors:
        yield from ("### Survivors of the proofs", "")
        for found in survivors:
            yield from _survivor(found)
        yield ""
    unfit = [f"`{r.mutant.name}`" for r in results if r.judgement.outcome is Outcome.DOES_NOT_FIT]
    if unfit:
        yield from (f"### Does not fit {release}", "", ", ".join(unfit), "")
    yield from (
        "### All",
        "",
        "| mutant | function | kind | breaks | outcome | by | run natively | generated tests "
        "| lives |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    for found in results:
        if found.judgement.outcome is not Outcome.DOES_NOT_FIT:
            mutant = found.mutant
            function = mutant.function.rpartition(".")[2]
            cells = (f"`{mutant.name}`", f"`{function}`", mutant.kind, mutant.breaks)
            proved = (found.judgement.outcome.value, found.judgement.by, _native(found.judgement))
            runs = (_what(found.runs[by]) if by in found.runs else "" for by in BY)
            yield f"| {' | '.join((*cells, *proved, *runs))} |"
    yield ""


def _survivor(found: Result) -> Iterator[str]:
    yield f"- `{found.mutant.name}`: {found.mutant.breaks}."
    if found.mutant.judgement:
        yield f"  - **Judgement:** {found.mutant.judgement}."
    for by, run in found.runs.items():
        if run.noticed:
            yield f"  - **Noticed by the {by}:** {_what(run)}"
    yield from (f"  - {note}" for note in found.judgement.notes)


def _native(found: Judgement) -> str:
    if found.refutation is None:
        return ""
    shown, history = found.refutation.shown.value, found.refutation.history
    return f"{shown}: {history}" if history else shown


def _what(run: Run) -> str:
    """What a run noticed, in few words: the test, or the check of a life."""
    if not run.noticed:
        return "not noticed"
    test = re.match(r"(\w+)\.py::(\w+)", run.noticed)
    if test:
        return f"`{test[2]}` ({test[1].removeprefix('test_').replace('_', '-')})"
    check = re.match(r"AssertionError: ([a-z-]+) \[(\w+)\]", run.noticed)
    return f"{check[1]} ({check[2]})" if check else f"`{run.noticed[:80]}`".replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--release", action="append", metavar="X.Y.Z", help=f"default {RELEASE}, {NEWEST}"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of results")
    options = parser.parse_args(arguments)
    by_release: dict[str, list[Result]] = {}
    try:
        mutants = load()
        unknown = sorted(set(options.only) - {mutant.name for mutant in mutants})
        if unknown:
            raise MutantError(f"no mutant is called {', '.join(unknown)}")
        if options.only:
            mutants = [mutant for mutant in mutants if mutant.name in options.only]
        roots = {
            name: resolve(f"vllm=={name}").root for name in options.release or (RELEASE, NEWEST)
        }
        for mutant in mutants if RELEASE in roots else ():
            with mutated_tree(roots[RELEASE], mutant):
                pass  # what is made for a release has to fit it
        for name, root in roots.items():
            started = time.perf_counter()
            by_release[name] = results_of(
                mutants,
                root,
                name,
                jobs=options.jobs,
                on_progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
            print("\n".join((f"vLLM {name}", *plain_lines(by_release[name]))))
            seconds = time.perf_counter() - started
            print(f"{name}: {seconds:.0f} s, {options.jobs} at a time", file=sys.stderr, flush=True)
            if options.write is not None:
                before = options.write.read_text("utf-8") if options.write.exists() else ""
                options.write.write_text(page(by_release, before), encoding="utf-8")
    except (MutantError, TargetError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    everything = [found for results in by_release.values() for found in results]
    return int(any(found.counts and not found.noticed_by for found in everything))


if __name__ == "__main__":
    # Under its own name, so that worker processes import it instead of taking a copy per task.
    sys.path.insert(0, str(ROOT))
    sys.exit(importlib.import_module("scripts.mutants").main())
