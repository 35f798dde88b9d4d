from __future__ import annotations

import pytest

from conformance.kv_cache import GroupPlaces, Lanes
from conformance.kv_signs import (
    ATTENTION,
    NUM_WORDS,
    STATE,
    Slots,
    Writers,
    kinds_of,
    prefix_signs,
    rejected,
    rejected_sign,
    sign_at,
    written_by,
)
from conformance.life_plan import (
    NeverWritten,
    Reading,
    StalePosition,
    StateLost,
    WrittenByTwo,
    WrongOwner,
)

#: Two requests that share two tokens.
OURS, THEIRS = (0, 0, 1, 1, 1), (0, 0, 2, 2)
READING = Reading("r0", 1, 7, OURS[:4], window=7)
PLACES = (
    GroupPlaces(attention=Lanes((0, 32, 448, 480), 64, 4, 8, 8)),
    GroupPlaces(state=Lanes((32, 480), 64, 1, 16, 16)),
)
KINDS = [kinds_of(group, places) for group, places in enumerate(PLACES)]


def written(sign: int, position: int, by: int, *, group: int = 1, code: int = STATE) -> list[int]:
    """The words of the first lane of a slot."""
    slots = Slots(KINDS)
    slots.add(group, code, 7, 0, sign, position, by)
    return [int(word) for word in slots.built()[1][:, 0]]


def judged(found: list[int], reading: Reading = READING) -> StateLost:
    """What is said of a state of `READING` in whose place these words are."""
    writers = Writers()
    assert (writers.number("r0", OURS), writers.number("r1", THEIRS)) == (0, 1)
    position = len(reading.tokens)
    expected = written(sign_at(prefix_signs(reading.tokens), position), position, 0)
    return writers.lost(reading, found, expected)


def at(tokens: tuple[int, ...], position: int, request: int) -> list[int]:
    return written(sign_at(prefix_signs(tokens), position), position, written_by(request, 3))


@pytest.mark.parametrize(
    ("found", "error", "said"),
    [
        ([0] * NUM_WORDS, NeverWritten, "was never written"),
        (at(OURS, 3, 0), StalePosition, "holds position 3 of r0 in step 3"),
        (at(OURS, 5, 0), StalePosition, "holds position 5 of r0 in step 3"),
        (at(THEIRS, 2, 1), StalePosition, "holds position 2 of r1 in step 3"),
        (at(THEIRS, 3, 1), WrongOwner, "holds position 3 of r1 in step 3"),
        (at(THEIRS, 4, 1), WrongOwner, "holds position 4 of r1 in step 3"),
        (
            written(rejected_sign(1), rejected(4), written_by(0, 3)),
            StalePosition,
            "holds position 4 of r0 in step 3, a rejected draft",
        ),
        (
            written(sign_at(prefix_signs(OURS), 4), 4, written_by(0, 3), group=0, code=ATTENTION),
            WrongOwner,
            "holds position 4 of r0 in step 3, of group 0",
        ),
        (
            [*at(OURS, 4, 0)[:4], at(THEIRS, 4, 1)[4]],
            WrittenByTwo,
            "begins as r0 in step 3 wrote it and ends otherwise",
        ),
    ],
)
def test_a_slot_that_holds_something_else_is_named(
    found: list[int], error: type[StateLost], said: str
) -> None:
    """Each kind of fault has its own error, with request, block and what was found."""
    lost = judged(found)

    assert type(lost) is error
    assert (lost.request, lost.block) == ("r0", 7)
    assert lost.detail == f"{said}, expected state after 4 tokens of group 1"


def test_who_wrote_a_shared_prefix_is_no_matter() -> None:
    """The sign is of the tokens: what two requests share is the same whoever wrote it."""
    assert at(OURS, 2, 0)[0] == at(THEIRS, 2, 1)[0]
    assert at(OURS, 2, 0)[2] != at(THEIRS, 2, 1)[2]
    assert at(OURS, 3, 0)[0] != at(THEIRS, 3, 1)[0]


def test_no_two_slots_have_one_sign() -> None:
    """Layers, heads, groups, kinds, positions and drafts are told apart."""
    slots = Slots(KINDS)
    for group, code in ((0, ATTENTION), (1, STATE)):
        for position in range(-2, 6):
            sign = sign_at(prefix_signs(OURS), position)
            slots.add(group, code, 1, 0, sign, position, written_by(0, 0))
        slots.add(group, code, 1, 0, rejected_sign(1), rejected(5), written_by(0, 0))
        slots.add(group, code, 1, 0, rejected_sign(2), rejected(5), written_by(0, 0))
    _, values = slots.built()

    assert values.shape == (NUM_WORDS, 10 * 4 + 10 * 2)
    assert len({*values[0].tolist()}) == values.shape[1]
    assert 0 not in values[0]


def test_words_stand_at_both_ends_of_a_slot() -> None:
    """A slot of 16 words holds four at its start and one at its end."""
    slots = Slots(KINDS)
    slots.add(1, STATE, 2, 0, 5, 1, 0)
    places, values = slots.built()

    assert places[:, 0].tolist() == [160, 161, 162, 163, 175]
    assert values[0].tolist() == values[4].tolist()


def test_a_moved_state_is_blamed_on_the_block_that_it_came_from() -> None:
    """Where a step moved what it reads, the fault is of the source."""
    reading = Reading("r0", 1, 9, OURS[:4], window=9, source=4)

    assert judged(at(OURS, 3, 0), reading).block == 4
