from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pytest

from conformance.driver import Driver, core_driver
from conformance.targets import resolve
from scripts.bench import Figure
from scripts.bench_peers import NOT_SHOWN, OURS_INSIDE, Answer, compared
from scripts.marked import PEERS, Marked
from scripts.peer_questions import QUESTIONS, Question, small_sizes
from scripts.peer_transcription import checkpoint_step, external_step, keeps_checkpoint

#: Steps on which a transcription is compared with a real manager.
STEPS = 400
UNTIL_SOME_ARE_MADE = 20_000


@pytest.fixture(scope="module")
def drivers() -> Mapping[str, Driver]:
    return {
        question.target: core_driver(Path(resolve(question.target).root))
        for question in QUESTIONS.values()
    }


def transcribed(slug: str, numbers: tuple[int, ...]) -> tuple[int, int] | None:
    """Estimate and drawn by the transcription, None where the step is not in question."""
    unit, units, speculative, first, num_new = numbers
    if slug == "undercount":
        return external_step(unit * units, speculative, first, first + num_new)
    start = first * unit
    if not keeps_checkpoint(unit * units, unit, start, start + num_new):
        return None
    return checkpoint_step(
        *(unit * units, speculative, start, start + num_new), caps_by_minimum=slug == "absence"
    )


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_the_transcription_counts_as_the_real_manager(
    question: Question, drivers: Mapping[str, Driver]
) -> None:
    """What CrossHair is asked about is the step that the others are asked about."""
    rng, num_made = random.Random(0), 0
    for _ in range(STEPS):
        numbers = tuple(rng.randint(low, min(high, 40)) for low, high in question.ranges.values())
        step = question.step(drivers[question.target], *numbers)
        seen = None if step is None else (step.estimate, step.drawn)
        assert seen == transcribed(question.slug, numbers), numbers
        num_made += step is not None
    assert num_made > STEPS // 20


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_has_the_answer_that_its_title_gives(
    question: Question, drivers: Mapping[str, Driver]
) -> None:
    """Small sizes hold a counterexample where there is one, and none where there is none."""
    sizes = (numbers for most in (1, 2, 3, 4) for numbers in small_sizes(question, most))
    steps = (question.step(drivers[question.target], *numbers) for numbers in sizes)
    holds = [question.holds(step) for step in islice(steps, UNTIL_SOME_ARE_MADE) if step]

    assert all(holds) == (question.slug == "absence")
    assert holds


def test_small_sizes_come_once_and_in_order() -> None:
    """Up to each size there are all numbers, and none of them twice."""
    question = QUESTIONS["overcount"]
    found = [numbers for most in (1, 2, 3) for numbers in small_sizes(question, most)]

    greatest = [max(numbers) for numbers in found]
    assert greatest == sorted(greatest)
    assert len(found) == len(set(found)) == 3 * 3 * 3 * 3 * 3


SLOW, FAST = Figure((9.0,)), Figure((1.0,))
OURS = Answer("ours", "yes", whole=Figure((3.0,)), is_found=True)


def test_who_is_faster_is_said_to_be() -> None:
    """Where capproof is not ahead, the page says so, and names who is."""
    slow = Answer("slow", "yes", whole=SLOW, is_found=True)
    fast = Answer("fast", "yes", whole=FAST, is_found=True)
    blind = Answer("blind", "0 of 20", whole=FAST)

    inside = Answer(OURS_INSIDE, "yes", whole=FAST, is_found=True)

    said = compared([slow, fast, blind, inside, OURS])

    assert "is ahead of: slow. It is **not ahead** of: fast. No counterexample from: blind." in said


def test_who_shows_absence_is_told_from_who_finds_nothing() -> None:
    """Finding nothing shows nothing; fewer sizes, or a transcription, are no release's source."""
    nothing = Answer("nothing", "0 of 20", absence=NOT_SHOWN)
    some = Answer("some", "no", absence="numbers up to 9")
    ours = Answer("ours", "no", absence="all sizes", shows_all=True)

    said = compared([nothing, some, ours])

    assert "source by: ours." in said
    assert "transcription, by: some." in said


MARKED = Marked("<begin>", "<end>")


def test_a_section_is_written_between_its_markers() -> None:
    """What others wrote stays, before and behind; a page without the section gets it."""
    page = MARKED.put("# Page\n", "one")
    assert page == "# Page\n\n<begin>\n\none\n\n<end>\n"
    assert MARKED.put(page + "more\n", "two") == "# Page\n\n<begin>\n\ntwo\n\n<end>\nmore\n"


def test_a_page_written_anew_keeps_the_section() -> None:
    """`make bench` leaves what `make bench-peers` wrote."""
    before = MARKED.put("# Page\n", "one")
    assert MARKED.keep("# New\n", before) == "# New\n\n<begin>\n\none\n\n<end>\n"
    assert MARKED.keep("# New\n", "# Page\n") == "# New\n"
    assert PEERS.keep("# New\n", before) == "# New\n"
