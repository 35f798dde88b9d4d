"""Replay scenarios on the real managers, and say whether they show what was predicted.

A counterexample counts when the real code shows it. In the core tier replay runs in this process;
in the vllm tier it runs in one of its own per tree, since a process can import only one vLLM. That
process reads a scenario object from each line of its standard input, and answers it with one line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from conformance.driver import (
    BindingError,
    Driver,
    DriverError,
    RequestUnderTest,
    core_driver,
    vllm_driver,
)
from conformance.layout import TableSeen, tables_from_json
from conformance.scenario import (
    OPTIONALLY_PREDICTED,
    Prediction,
    Scenario,
    ScenarioError,
    loads,
    to_json,
)
from conformance.steps import Applied, applied, how_it_ended
from spec.families import family_of, tags_of
from spec.theorems import THEOREMS, Need, Pool, Theorem, least_pool, manager_of
from spec.vocabulary import Situation, Step

PROJECT_ROOT = Path(__file__).resolve().parent.parent
TIERS = ("core", "vllm")

#: Seconds that one process of the vllm tier may take; importing vLLM alone takes 4 to 12.
PROCESS_TIMEOUT_S = 600

#: Fields of a prediction that are compared as they are: what the step is told, which is not
#: predicted of one that is put off, and what becomes of it.
TOLD = ("dry_run", "estimate")
DONE = ("drawn", "table_length", "raised", "deferred")

#: Theorems about where a checkpoint is, which 0.29.0 does not record.
NEED_CHECKPOINT_POSITION = frozenset({"checkpoint-recorded"})

#: Theorems about a pool that just passes the check; their step is applied on one, of which so many
#: free blocks are reserved for others.
NEED_EXACT_POOL = {"allocation-succeeds": 0, "admission-keeps-reserve": 4}


class Outcome(str, Enum):
    """What a replay came to; never mixed."""

    REPRODUCED = "reproduced"
    """The real code shows what was predicted for the target."""
    DISAGREES = "disagrees"
    """The real code shows something else: the model's defect, or drift."""
    COULD_NOT_RUN = "could-not-run"
    """Nothing was learned; the detail says why."""
    NOT_PREDICTED = "not-predicted"
    """The steps ran, and the scenario predicts nothing for the target."""


@dataclass(frozen=True)
class StepSeen:
    """One replayed step."""

    why: str
    table_length_before: int
    """Columns."""
    step: Step
    free: int
    """Free blocks in the pool after the step."""
    held: int
    """Distinct non-null blocks of the table after the step."""
    free_found: int | None = None
    """Free blocks that the step's allocation found, None where it was not reached."""
    tables: tuple[TableSeen, ...] = ()
    """What the request's tables hold after the step; empty where nobody asked."""


@dataclass(frozen=True)
class Replay:
    """What came of one scenario on one target."""

    scenario: str
    target: str
    outcome: Outcome
    steps: tuple[StepSeen, ...] = ()
    detail: str = ""
    """One line: what differs, why it could not run, or what was seen."""
    differences: tuple[str, ...] = ()
    """One entry per predicted field that was not seen."""
    violated: tuple[str, ...] = ()
    """Slugs of the theorems that the last step was seen to violate."""
    theorem_holds: bool | None = None
    """Whether the scenario's theorem holds in the last step; None where it says nothing."""


def replay(scenario: Scenario, driver: Driver, target: str, *, with_tables: bool = False) -> Replay:
    """Apply a scenario's steps to the real manager and compare with what `target` predicts.

    The last step finds a pool with just the estimate's blocks free, and those reserved, if the
    scenario is about one of `NEED_EXACT_POOL`, else the scenario's pool.

    Args:
        scenario: What to replay.
        driver: Builds the real manager.
        target: Name under which predictions are looked up.
        with_tables: Whether to look at what each column holds after each step, which takes time in
            proportion to the table.
    """
    try:
        request = driver.request(
            scenario.geometry, scenario.num_gpu_blocks, scenario.num_mamba_groups
        )
        exactly, slug = scenario.theorem in NEED_EXACT_POOL, scenario.theorem or ""
        steps: list[StepSeen] = []
        for shown in applied(
            request,
            scenario.steps,
            exactly_the_estimate=exactly,
            reserved_blocks=NEED_EXACT_POOL.get(slug, 0),
        ):
            steps.append(_seen(shown, request, with_tables=with_tables))
    except DriverError as error:
        return _could_not_run(scenario, target, str(error))
    seen = tuple(steps)
    failed = _failed_early(scenario, seen)
    if failed is not None:
        outcome = Outcome.DISAGREES if _prediction(scenario, target) else Outcome.NOT_PREDICTED
        return Replay(scenario.name, target, outcome, seen, failed, (failed,))
    if request.exception is None:
        request.finish()
    return _compare(scenario, target, seen, shown.situation)


def replay_in(
    tree_root: Path,
    tier: str,
    scenarios: Iterable[Scenario],
    *,
    target: str,
    with_tables: bool = False,
) -> list[Replay]:
    """Replay scenarios on a tree, in this process (core) or one of its own (vllm).

    Args:
        tree_root: Folder holding `vllm/`.
        tier: One of `TIERS`.
        scenarios: What to replay; the answers come in the same order.
        target: Name under which predictions are looked up.
        with_tables: Whether to look at what each column holds after each step.
    """
    scenarios = list(scenarios)
    if tier == "vllm":
        return _replay_in_process(Path(tree_root), scenarios, target, with_tables=with_tables)
    try:
        driver = core_driver(tree_root)
    except BindingError as error:
        return [_could_not_run(scenario, target, str(error)) for scenario in scenarios]
    return [replay(scenario, driver, target, with_tables=with_tables) for scenario in scenarios]


def tier_environment(tree_root: Path) -> dict[str, str]:
    """Return the environment of a process that imports the vLLM of `tree_root`."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(tree_root), str(PROJECT_ROOT), inherited]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }


# ---- one replay ----------------------------------------------------------------------------------


def _seen(shown: Applied, request: RequestUnderTest, *, with_tables: bool) -> StepSeen:
    after = request.observe()
    return StepSeen(
        shown.planned.why,
        shown.situation.table_length,
        shown.step,
        after.free,
        after.held,
        request.free_at_allocation,
        request.tables() if with_tables else (),
    )


def _failed_early(scenario: Scenario, seen: Sequence[StepSeen]) -> str | None:
    if len(seen) == len(scenario.steps):
        return None
    return f"step {len(seen)} ({seen[-1].why}) already {how_it_ended(seen[-1].step)}"


def _violated(situation: Situation, step: Step, need: int | None) -> tuple[str, ...]:
    needed = Need(need)
    return tuple(
        slug
        for slug, theorem in THEOREMS.items()
        if _says_something(theorem, situation, step, need)
        and not theorem.holds(situation, step, least_pool(theorem, step), needed)
        and _is_about(theorem, situation)
    )


def _says_something(theorem: Theorem, situation: Situation, step: Step, need: int | None) -> bool:
    """Whether all is known of a step that a theorem about its family speaks of."""
    slug = theorem.slug
    return (
        (step.raised is None or theorem.survives_exception)
        and (not step.refused or theorem.covers_deferred)
        and (need is not None or slug != "matches-intended")
        and (step.checkpoint_position is not None or slug not in NEED_CHECKPOINT_POSITION)
        and (situation.num_request_tokens > 0 or not theorem.asks_gate)
    )


def _is_about(theorem: Theorem, situation: Situation) -> bool:
    """With steps in flight only what is removed is spoken of."""
    is_of_manager = manager_of(situation) in theorem.managers
    is_asked = theorem.asks_removal or situation.num_in_flight_tokens == 0
    is_about_kind = theorem.why_not(family_of(situation), tags_of(situation)) is None
    return is_of_manager and is_asked and is_about_kind


def theorem_holds(
    slug: str, situation: Situation, step: Step, pool: Pool, need: int | None
) -> bool | None:
    """Return whether a theorem holds in a step that was seen.

    Args:
        slug: A slug of the catalogue.
        situation: What decided the step's family.
        step: What was seen.
        pool: Free capacity that the allocation found, in blocks.
        need: Blocks that the intended model says the step needs, None where it is not known.

    Returns:
        None where the theorem says nothing: it is not about the step's family, the step raised or
        was refused, its need is not known, nobody asked the gate, or the release does not record
        where its checkpoint is.
    """
    theorem = THEOREMS[slug]
    if not (_says_something(theorem, situation, step, need) and _is_about(theorem, situation)):
        return None
    return bool(theorem.holds(situation, step, pool, Need(need)))


def _compare(
    scenario: Scenario,
    target: str,
    seen: tuple[StepSeen, ...],
    situation: Situation,
) -> Replay:
    step, prediction = seen[-1].step, _prediction(scenario, target)
    need, slug = scenario.steps[-1].expect.need, scenario.theorem
    violated = _violated(situation, step, need)
    holds = None
    if slug in THEOREMS:
        holds = theorem_holds(slug, situation, step, least_pool(THEOREMS[slug], step), need)
    if prediction is not None and _falls_short(scenario, prediction):
        differences = tuple(_differences_on_short_pool(prediction, step))
    else:
        differences = tuple(_differences(prediction, step, violated))
    if prediction is None:
        outcome = Outcome.NOT_PREDICTED
    else:
        outcome = Outcome.DISAGREES if differences else Outcome.REPRODUCED
    detail = "; ".join(differences) or _summary(step)
    return Replay(scenario.name, target, outcome, seen, detail, differences, violated, holds)


def _prediction(scenario: Scenario, target: str) -> Prediction | None:
    return (scenario.predicted or {}).get(target)


def _falls_short(scenario: Scenario, prediction: Prediction) -> bool:
    """Whether the last step finds a pool of exactly the estimate, and is to draw more than that."""
    if scenario.theorem not in NEED_EXACT_POOL or prediction.raised is not None:
        return False
    least = (prediction.estimate or 0) + NEED_EXACT_POOL[scenario.theorem]
    return (prediction.drawn or 0) > max(least, 0)


def _differences_on_short_pool(prediction: Prediction, step: Step) -> Iterator[str]:
    """Predictions are made for a pool with enough blocks; on a short one the step must raise."""
    yield from _differing(TOLD, prediction, step)
    if step.raised is None:
        yield f"drawn: predicted {prediction.drawn} of {prediction.estimate}, saw {step.drawn}"


def _differences(
    prediction: Prediction | None, step: Step, violated: Sequence[str]
) -> Iterator[str]:
    if prediction is None:
        return
    if step.refused:
        yield f"refused: the pool is too small, the estimate is {step.estimate}"
        yield from _differing(TOLD, prediction, step)
        return
    yield from _differing(DONE if prediction.deferred else (*TOLD, *DONE), prediction, step)
    for slug in prediction.violates:
        if slug not in violated:
            yield f"{slug}: predicted to be violated, was not"


def _differing(names: Sequence[str], prediction: Prediction, step: Step) -> Iterator[str]:
    said = [name for name in OPTIONALLY_PREDICTED if getattr(prediction, name) is not None]
    for name in (*said, *names):
        predicted, found = getattr(prediction, name), getattr(step, name)
        if predicted != found:
            yield f"{name}: predicted {predicted}, saw {found}"


def _summary(step: Step) -> str:
    is_done = not (step.raised or step.refused or step.deferred)
    ended = "" if is_done else f", {how_it_ended(step)}"
    return (
        f"dry run {step.dry_run}, estimate {step.estimate}, drawn {step.drawn}, "
        f"table {step.table_length}{ended}"
    )


def _could_not_run(scenario: Scenario, target: str, reason: str) -> Replay:
    return Replay(scenario.name, target, Outcome.COULD_NOT_RUN, detail=reason)


# ---- a process per tree --------------------------------------------------------------------------


def ask_process(
    arguments: Sequence[str], tree_root: Path, questions: Iterable[str]
) -> tuple[list[Any], str]:
    """Ask a process that imports the vLLM of a tree, one line a question.

    Args:
        arguments: Module to run, and its arguments.
        tree_root: Folder holding `vllm/`.
        questions: Lines of its standard input.

    Returns:
        The answers, and why there are no more of them, on one line.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", *arguments],
            input="".join(question + "\n" for question in questions),
            capture_output=True,
            text=True,
            cwd=PROJECT_ROOT,
            env=tier_environment(tree_root),
            timeout=PROCESS_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"vllm tier: no answer within {PROCESS_TIMEOUT_S} s"
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    return answers, why_no_answer(process.stderr, process.returncode)


def why_no_answer(said: str, status: int) -> str:
    """Return on one line why a process of the vllm tier ended, and what to do where that is known.

    Args:
        said: What it wrote to its standard error.
        status: Its exit status.
    """
    last = _last_line(said).removeprefix("vllm tier: ")
    to_do = "; run make setup-test" if "ModuleNotFoundError" in last else ""
    return f"vllm tier: {last} (exit status {status}){to_do}"


def _replay_in_process(
    tree_root: Path, scenarios: list[Scenario], target: str, *, with_tables: bool
) -> list[Replay]:
    options = ["--root", str(tree_root), "--tier", "vllm", "--target", target]
    answers, reason = ask_process(
        ["conformance.replay", *options, *(["--with-tables"] if with_tables else [])],
        tree_root,
        (json.dumps(to_json(scenario)) for scenario in scenarios),
    )
    found = [_from_json(answer) for answer in answers]
    return found + [
        _could_not_run(scenario, target, reason) for scenario in scenarios[len(found) :]
    ]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "the process ended without a word"


def _to_json(result: Replay) -> dict[str, Any]:
    return asdict(result)


def _from_json(content: dict[str, Any]) -> Replay:
    steps = tuple(map(_step_from_json, content.pop("steps")))
    lists = {name: tuple(content.pop(name)) for name in ("differences", "violated")}
    return Replay(**{**content, **lists, "outcome": Outcome(content["outcome"]), "steps": steps})


def _step_from_json(content: dict[str, Any]) -> StepSeen:
    tables = tables_from_json(content["tables"])
    return StepSeen(**{**content, "step": Step(**content["step"]), "tables": tables})


def own_standard_output() -> TextIO:
    """Keep standard output for the answers: what vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the scenarios on standard input, line by line; 2 where the tree cannot be driven."""
    parser = argparse.ArgumentParser(prog="python -m conformance.replay", description=__doc__)
    parser.add_argument("--tier", choices=TIERS, required=True)
    parser.add_argument("--root", type=Path, required=True, help="folder holding vllm/")
    parser.add_argument("--target", required=True, help="name that predictions are stored under")
    parser.add_argument("--with-tables", action="store_true", help="what each column holds, too")
    options = parser.parse_args(arguments)
    answers = own_standard_output()
    try:
        driver = (vllm_driver if options.tier == "vllm" else core_driver)(options.root)
        for number, line in enumerate(sys.stdin, start=1):
            for scenario in loads(line, name=f"standard input, line {number}"):
                result = replay(scenario, driver, options.target, with_tables=options.with_tables)
                print(json.dumps(_to_json(result)), file=answers, flush=True)
    except (ScenarioError, BindingError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
