from __future__ import annotations

import itertools

import pytest

from models import intended
from spec.families import family_of
from spec.vocabulary import Call, Geometry, Situation

# ---- a deliberately dumb twin -------------------------------------------------------------------


class Twin:
    """A careful allocator that keeps its table column by column, and counts what it takes.

    A column holds None or the name of a block. Names are never used again, so what is taken is
    what is new.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.g = geometry
        self.states: list[str | None] = []
        self.drafts: list[str] = []
        self.taken = 0

    def _take(self) -> str:
        self.taken += 1
        return f"block {self.taken}"

    def step(self, start: int, end: int, prefill_end: int) -> int:
        """Compute tokens start..end-1 one by one; return how many blocks that took."""
        before = self.taken
        # The column that a token's state ends up in, token by token.
        column_of_end = 0
        for token in range(end):
            column_of_end = token // self.g.block_size
        column_of_start = None if start == 0 else (start - 1) // self.g.block_size
        while len(self.states) <= column_of_end:
            self.states.append(None)
        if column_of_start != column_of_end:
            self.states[column_of_end] = self._take()
        if self._keeps_checkpoint(start, end, prefill_end):
            self.states[column_of_end - 1] = self._take()
        while len(self.drafts) < self.g.num_speculative_blocks:
            self.drafts.append(self._take())
        return self.taken - before

    def _keeps_checkpoint(self, start: int, end: int, prefill_end: int) -> bool:
        g = self.g
        if not g.num_prefill_checkpoint_blocks or (prefill_end and end < prefill_end):
            return False
        ends_of_hash_units = [p for p in range(1, end) if p % g.hash_block_size == 0]
        if g.drop_eagle_checkpoint_block:
            ends_of_hash_units = ends_of_hash_units[:-1]
        if not ends_of_hash_units or start % g.hash_block_size:
            return False
        position = ends_of_hash_units[-1]
        steps = (position - start) / g.prefill_checkpoint_alignment
        column = (end - 1) // g.block_size - 1
        column_of_start = (start - 1) // g.block_size if start else -1
        return (
            position - start >= g.hash_block_size
            and steps == int(steps)
            and (column > column_of_start)
        )

    @property
    def table_length(self) -> int:
        """Columns of the table."""
        return len(self.states) + len(self.drafts)


def situation(g: Geometry, start: int, end: int, table_length: int, prefill_end: int) -> Situation:
    return Situation(g, Call(end, end, start, start, prefill_end), table_length, 100)


GEOMETRIES = [
    Geometry(h * per_block, h, s, k, alignment, drop)
    for h, per_block, s, k, alignment, drop in itertools.product(
        (1, 2, 3), (1, 2, 3), (0, 1, 3), (0, 1), (1, 2), (False, True)
    )
]


@pytest.mark.parametrize("prefill_end", [0, 9])
def test_need_is_what_a_careful_allocator_takes(prefill_end: int) -> None:
    """At all small sizes the formulas count what keeping a table column by column takes."""
    seen = set()
    for g in GEOMETRIES:
        for middle, end in itertools.combinations(range(1, 15), 2):
            twin = Twin(g)
            admission = situation(g, 0, middle, 0, prefill_end)
            assert intended.need(admission) == twin.step(0, middle, prefill_end)
            assert intended.table_length(admission) == twin.table_length
            chunk = situation(g, middle, end, twin.table_length, prefill_end)
            need = intended.need(chunk)
            assert need == twin.step(middle, end, prefill_end)
            assert intended.table_length(chunk) == twin.table_length
            seen.add((family_of(chunk), need))

    assert seen == {("running", 0), ("running", 1), ("checkpoint", 2)}


def test_a_longer_life_takes_no_more_than_its_steps() -> None:
    """Three chunks in a row need what each of them needs."""
    for g in GEOMETRIES[::5]:
        for ends in itertools.combinations(range(1, 11), 3):
            twin, start = Twin(g), 0
            for end in ends:
                s = situation(g, start, end, twin.table_length, 0)
                assert intended.need(s) == twin.step(start, end, 0)
                start = end


# ---- public cases -------------------------------------------------------------------------------

#: vLLM #57050's own table: 23,040 tokens computed, then a prompt of 25,121 or 704,547.
ROWS = [
    (block_size, speculative, prompt)
    for block_size in (896, 1536)
    for speculative in (0, 1, 4)
    for prompt in (25_121, 704_547)
]


@pytest.mark.parametrize(("block_size", "speculative", "prompt"), ROWS)
def test_the_rows_of_57050_need_two_blocks(block_size: int, speculative: int, prompt: int) -> None:
    """A state and a checkpoint: neither the prompt's length nor the drafts add to it."""
    g = Geometry(block_size, 128, speculative, 1, 64, False)
    length = -(-23_040 // block_size) + speculative
    s = Situation(g, Call(prompt, prompt, 23_040, 23_040), length, prompt)

    assert family_of(s) == "checkpoint"
    assert intended.need(s) == 2


def test_a_first_admission_needs_its_state_its_drafts_and_a_checkpoint() -> None:
    """Without a table everything that the step keeps is new."""
    g = Geometry(4, 2, 3, 1, 2, False)

    # vLLM #46384 (review): B 4, H 2, 6 prompt tokens, partial snapshot: one extra block.
    assert intended.need(situation(g, 0, 6, 0, 0)) == 1 + 3 + 1
    assert intended.need(situation(g, 0, 4, 0, 0)) == 1 + 3


# ---- every family, with figures worked out by hand -----------------------------------------------


#: Blocks of 16 tokens, hash units of 4; nothing is exported but at hash units.
def sizes(drafts: int, *, checkpoint: bool = False) -> Geometry:
    return Geometry(16, 4, drafts, int(checkpoint), 4, False)


def admission(
    drafts: int,
    end: int,
    *,
    local: int = 0,
    hit_blocks: int = 0,
    external: int = 0,
    **more: bool,
) -> Situation:
    checkpoint = more.pop("checkpoint", False)
    start = local + external
    return Situation(
        sizes(drafts, checkpoint=checkpoint),
        Call(end, end, start, local),
        table_length=0,
        prefill_length=100,
        num_hit_blocks=hit_blocks,
        num_external_tokens=external,
        **more,
    )


def chunk(drafts: int, start: int, end: int, columns: int, **more: object) -> Situation:
    """A request with a table of so many columns, drafts' included."""
    checkpoint = bool(more.pop("checkpoint", False))
    return Situation(
        sizes(drafts, checkpoint=checkpoint),
        Call(end, end, start, start),
        table_length=columns,
        prefill_length=100,
        **more,  # type: ignore[arg-type]
    )


#: Situation, family, blocks needed, columns after and the column to retire (-1: none).
BY_HAND: dict[str, tuple[Situation, str, int, int, int]] = {
    # 32 tokens found in blocks 0 and 1, 8 more: the state moves to column 2.
    "hit-full": (admission(0, 40, local=32, hit_blocks=2), "hit-full", 1, 3, 1),
    "hit-full with drafts": (admission(2, 40, local=32, hit_blocks=2), "hit-full", 3, 5, 1),
    "hit-full, evictable": (
        admission(2, 40, local=32, hit_blocks=2, hit_is_evictable=True),
        *("hit-full", 4, 5, 1),
    ),
    # 72 tokens keep a checkpoint at 68, in column 3 before the state's, beyond the hit's.
    "hit-full with a checkpoint": (
        admission(2, 72, local=32, hit_blocks=2, checkpoint=True),
        *("hit-full", 4, 7, 1),
    ),
    # 20 tokens found, the last 4 in block 1, of which the request writes a copy.
    "hit-partial within its block": (
        admission(0, 30, local=20, hit_blocks=2),
        *("hit-partial", 1, 2, 1),
    ),
    "hit-partial within its block, with drafts": (
        admission(2, 30, local=20, hit_blocks=2),
        *("hit-partial", 3, 4, 1),
    ),
    # The copy, and the state in column 2.
    "hit-partial beyond its block": (
        admission(0, 40, local=20, hit_blocks=2),
        *("hit-partial", 2, 3, 1),
    ),
    "hit-partial beyond its block, with drafts": (
        admission(2, 40, local=20, hit_blocks=2, hit_is_evictable=True),
        *("hit-partial", 5, 5, 1),
    ),
    # A connector fills column 1 up to 20 tokens; 30 end in the same column.
    "external-sync within its block": (admission(0, 30, external=20), "external-sync", 1, 2, -1),
    "external-sync within its block, with drafts": (
        admission(2, 30, external=20),
        *("external-sync", 3, 4, 1),
    ),
    # One block that the connector fills, one for the state that moves on, one per draft: 2 + S.
    "external-sync beyond its block": (admission(0, 40, external=20), "external-sync", 2, 3, 1),
    "external-sync beyond its block, with drafts": (
        admission(2, 40, external=20),
        *("external-sync", 4, 5, 1),
    ),
    # The hit ends in column 0, the connector's tokens in column 1: the hit is not adopted.
    "external-sync behind a hit": (
        admission(2, 40, local=12, hit_blocks=1, external=12, hit_is_evictable=True),
        *("external-sync", 4, 5, 1),
    ),
    # Both end in column 0, so the hit's block is copied and the connector fills the copy.
    "external-sync into a hit": (
        admission(2, 40, local=8, hit_blocks=1, external=4, hit_is_evictable=True),
        *("external-sync", 5, 5, 0),
    ),
    # Parked: the block that is filled, and the drafts'.
    "external-async": (
        admission(0, 20, external=20, loads_asynchronously=True),
        *("external-async", 1, 2, -1),
    ),
    "external-async with drafts": (
        admission(2, 20, external=20, loads_asynchronously=True),
        *("external-async", 3, 4, 1),
    ),
    "resumed": (admission(2, 40, preempted=True), "resumed", 3, 5, -1),
    "resumed on a hit": (
        admission(2, 40, local=32, hit_blocks=2, preempted=True),
        *("resumed", 3, 5, 1),
    ),
    "promoted within its block": (chunk(2, 20, 30, 4, parked=True), "promoted", 0, 4, -1),
    "promoted beyond its block": (chunk(2, 20, 40, 4, parked=True), "promoted", 1, 5, 1),
    # Of 20 loaded tokens 10 count: the state stays in column 1.
    "promoted on a longer table": (chunk(2, 10, 30, 4, parked=True), "promoted", 0, 4, -1),
    "own-tail within its block": (chunk(0, 20, 30, 2, owns_partial_tail=True), "own-tail", 1, 2, 1),
    "own-tail beyond its block": (chunk(2, 20, 40, 4, owns_partial_tail=True), "own-tail", 2, 5, 1),
    # Two more columns than 100 tokens require: the running state is in column 8.
    "drafts on a longer table": (chunk(2, 100, 104, 11), "drafts", 0, 11, -1),
    "drafts beyond a longer table": (chunk(2, 112, 146, 11), "drafts", 1, 12, 8),
    "drafts within their block": (chunk(2, 100, 103, 9), "drafts", 0, 9, -1),
    "drafts beyond their block": (chunk(2, 112, 115, 9), "drafts", 1, 10, 6),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_step_needs_what_is_worked_out_by_hand(name: str) -> None:
    """Blocks needed, columns after, and the column to retire, of a step of each family."""
    s, family, need, columns, to_retire = BY_HAND[name]

    assert family_of(s) == family
    assert intended.need(s) == need
    assert intended.table_length(s) == columns
    assert intended.column_to_retire(s, -1) == to_retire


def test_a_record_stays_where_nothing_is_left_behind() -> None:
    """A step within the column of its state leaves the column recorded before it."""
    within, _, _, _, _ = BY_HAND["promoted within its block"]

    assert intended.column_to_retire(within, 3) == 3
