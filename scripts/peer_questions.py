"""The questions that `scripts/bench_peers.py` asks, as functions of plain numbers.

Each asks the real manager, through the driver, for one step, and says whether the claim holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from conformance.driver import Driver
from conformance.scenario import ScenarioStep
from conformance.steps import applied, chunk, load
from spec.vocabulary import Geometry, Step

#: The manager that all are asked about, as `capproof prove` names it.
MANAGER = "mamba-align"
#: Blocks in the pool beyond what the tokens and drafts of a step can fill.
_SPARE_BLOCKS = 8


@dataclass(frozen=True)
class Question:
    """A claim about one kind of step of one release.

    Attributes:
        slug: On the command line of the workers.
        title: What is asked.
        target: The release.
        family: Kind of step, as `capproof prove` names it.
        theorem: The claim, as `capproof prove` names it.
        ranges: Least and greatest of each number, by name, as somebody chooses them who knows
            which step is in question.
        step: Performs the step with such numbers; None where they do not make such a step.
        holds: Whether what was seen is as claimed.
        transcribed: Contracts of `scripts/peer_transcription.py`, each with its sizes.
        real: Contract of `scripts/peer_real_manager.py`.
    """

    slug: str
    title: str
    target: str
    family: str
    theorem: str
    ranges: Mapping[str, tuple[int, int]]
    step: Callable[..., Step | None]
    holds: Callable[[Step], bool]
    transcribed: Mapping[str, str]
    real: str


def checkpoint_step(
    driver: Driver,
    hash_block_size: int,
    units_per_block: int,
    num_speculative_blocks: int,
    start_units: int,
    num_new_tokens: int,
) -> Step | None:
    """A chunk of a running request, None unless it keeps an internal checkpoint."""
    start = start_units * hash_block_size
    end = start + num_new_tokens
    geometry = _geometry(hash_block_size, units_per_block, num_speculative_blocks, 1)
    step = _last_step(driver, geometry, end, [chunk(0, start), chunk(start, end)])
    return step if step is not None and step.checkpoint_is_pending else None


def external_step(
    driver: Driver,
    hash_block_size: int,
    units_per_block: int,
    num_speculative_blocks: int,
    num_external_tokens: int,
    num_new_tokens: int,
) -> Step | None:
    """An admission whose first tokens a connector brings in the same step."""
    end = num_external_tokens + num_new_tokens
    geometry = _geometry(hash_block_size, units_per_block, num_speculative_blocks, 0)
    return _last_step(driver, geometry, end, [load(external=num_external_tokens, end=end)])


def _geometry(unit: int, units: int, speculative: int, checkpoint: int) -> Geometry:
    return Geometry(unit * units, unit, speculative, checkpoint, 1, False)


def _last_step(
    driver: Driver, geometry: Geometry, num_tokens: int, steps: list[ScenarioStep]
) -> Step | None:
    num_blocks = -(-num_tokens // geometry.block_size) + geometry.num_speculative_blocks
    request = driver.request(geometry, num_blocks + _SPARE_BLOCKS)
    seen = [shown.step for shown in applied(request, steps, watch_dry_run=False)]
    if request.exception is None:
        request.finish()
    return seen[-1] if len(seen) == len(steps) and seen[-1].raised is None else None


_GEOMETRY = {
    "hash_block_size": (1, 32),
    "units_per_block": (1, 16),
    "num_speculative_blocks": (0, 2),
}
_CHECKPOINT = {**_GEOMETRY, "start_units": (1, 64), "num_new_tokens": (1, 2048)}
_EXTERNAL = {**_GEOMETRY, "num_external_tokens": (1, 2048), "num_new_tokens": (1, 2048)}
_ANY_SIZE = "all block sizes and token counts, S up to 2, of a transcription"


def _is_exact(step: Step) -> bool:
    return bool(step.estimate == step.drawn)


QUESTIONS: Mapping[str, Question] = {
    question.slug: question
    for question in (
        Question(
            "overcount",
            "Does 0.30.0 estimate more, or less, than a checkpoint step draws? (It does.)",
            *("vllm==0.30.0", "checkpoint", "exact-estimate"),
            *(_CHECKPOINT, checkpoint_step, _is_exact),
            {"overcount": _ANY_SIZE},
            "checkpoint_is_exact",
        ),
        Question(
            "undercount",
            "Does a step of 0.33.0 with external tokens draw more than was estimated? (It does.)",
            *("vllm==0.33.0", "external-sync", "no-undercount"),
            *(_EXTERNAL, external_step, lambda step: bool(step.drawn <= step.estimate)),
            {"undercount": _ANY_SIZE},
            "external_is_covered",
        ),
        Question(
            "absence",
            "Is 0.31.0's estimate exactly what a checkpoint step draws? (It is.)",
            *("vllm==0.31.0", "checkpoint", "exact-estimate"),
            *(_CHECKPOINT, checkpoint_step, _is_exact),
            {
                "exact_of_one_block_size": "B 16, H 4, all token counts, S up to 2, of a "
                "transcription",
                "exact": _ANY_SIZE,
            },
            "checkpoint_is_exact",
        ),
    )
}


def small_sizes(question: Question, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of a question up to a size, those that are not up to a lesser one.

    Args:
        question: What is asked.
        most: The greatest of the numbers; what cannot be so great stops before.
    """
    ranges = [range(low, min(high, most) + 1) for low, high in question.ranges.values()]
    lesser = most - 1
    for numbers in product(*ranges):
        if most == 1 or any(number > lesser for number in numbers):
            yield numbers
