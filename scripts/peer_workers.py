"""What `scripts/bench_peers.py` measures in a process of its own; each answers with a JSON line.

    python scripts/peer_workers.py hypothesis QUESTION ROOT TIER EXAMPLES SEEDS
    python scripts/peer_workers.py enumeration QUESTION ROOT TIER SECONDS
    python scripts/peer_workers.py capproof QUESTION ROOT

Seconds are those of a search, the real code loaded; `loading` is what that took, imports included.
"""

from __future__ import annotations

import json
import os
import sys
import time

#: When the process was started, as whoever started it says, on the clock of `perf_counter`.
STARTED = time.perf_counter() - (time.time() - float(os.environ["CAPPROOF_STARTED"]))

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from conformance.driver import Driver, core_driver, vllm_driver  # noqa: E402
from scripts.peer_questions import MANAGER, QUESTIONS, Question, small_sizes  # noqa: E402


class Found(Exception):
    """A counterexample, in numbers."""


def hypothesis(question: Question, root: Path, tier: str, examples: int, seeds: int) -> Any:
    """Look for a counterexample at random, once per seed; the first one ends a search."""
    import hypothesis
    from hypothesis import HealthCheck, Phase, strategies

    driver = _driver(root, tier)
    loading = time.perf_counter() - STARTED
    numbers = strategies.tuples(*(strategies.integers(*r) for r in question.ranges.values()))

    @hypothesis.given(numbers)
    @hypothesis.settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def holds(values: tuple[int, ...]) -> None:
        step = question.step(driver, *values)
        hypothesis.assume(step is not None)
        if step is not None and not question.holds(step):
            raise Found

    runs = []
    for seed in range(seeds):
        started = time.perf_counter()
        try:
            hypothesis.seed(seed)(holds)()
            found = False
        except Found:
            found = True
        runs.append({"found": found, "seconds": time.perf_counter() - started})
    return {"loading": loading, "runs": runs}


def enumeration(question: Question, root: Path, tier: str, seconds: float) -> Any:
    """Try all sizes, the small ones first, up to a counterexample or till the time is over."""
    driver = _driver(root, tier)
    loading = time.perf_counter() - STARTED
    started, num_tried, num_steps, complete = time.perf_counter(), 0, 0, 0
    for most in range(1, max(high for _, high in question.ranges.values()) + 1):
        for numbers in small_sizes(question, most):
            num_tried += 1
            step = question.step(driver, *numbers)
            num_steps += step is not None
            found = step is not None and not question.holds(step)
            spent = time.perf_counter() - started
            if found or spent > seconds:
                return {
                    "loading": loading,
                    "runs": [{"found": found, "seconds": spent}],
                    "tried": num_tried,
                    "steps": num_steps,
                    "complete": complete,
                }
        complete = most
    raise AssertionError("all sizes were tried, and there was time left")


def capproof(question: Question, root: Path) -> Any:
    """Lift the tree, and settle one theorem of one kind of step, as `capproof prove` does."""
    from models.predict import LiftedTree
    from models.prove import Verdict, prove

    started = time.perf_counter()
    tree = LiftedTree(root)
    found = None
    kind = (question.family, ())
    settled = prove(tree, managers=[MANAGER], kinds=[kind], theorems=[question.theorem])
    verdicts = []
    for obligation in settled:
        verdicts.append(obligation.verdict.value)
        if obligation.verdict is Verdict.REFUTED and found is None:
            found = time.perf_counter() - started
    seconds = time.perf_counter() - started if found is None else found
    return {
        "loading": started - STARTED,
        "runs": [{"found": found is not None, "seconds": seconds}],
        "verdicts": verdicts,
    }


def _driver(root: Path, tier: str) -> Driver:
    return vllm_driver(root) if tier == "vllm" else core_driver(root)


def main() -> None:
    what, slug, root, *rest = sys.argv[1:]
    question, folder = QUESTIONS[slug], Path(root)
    if what == "hypothesis":
        tier, examples, seeds = rest
        answer = hypothesis(question, folder, tier, int(examples), int(seeds))
    elif what == "enumeration":
        tier, seconds = rest
        answer = enumeration(question, folder, tier, float(seconds))
    else:
        answer = capproof(question, folder)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
