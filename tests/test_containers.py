from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import containers, term
from models.containers import (
    FIRST_FRESH_ID,
    Block,
    BlockHash,
    Log,
    Members,
    Pending,
    Pool,
    Table,
    Tables,
    modelled_state,
    state_of_earlier_steps,
)
from models.evaluate import Evaluator, value_of
from models.path import Path, following
from models.term import Unsupported

LENGTH = term.int_var("length", 0)
PLACE = term.int_var("place")
FROM, TO = term.int_var("slice_from"), term.int_var("slice_to")
COUNT = term.int_var("count")
THERE = term.bool_var("there")


def symbolic_table() -> Table:
    """Column i holds block 100 + i."""
    return Table(LENGTH, lambda column: Block(100 + column, True))


def ids(table: Any, values: dict[str, Any]) -> list[int]:
    """Block ids by column, where the variables have these values."""
    if isinstance(table, list):
        return [value_of(block.block_id, values) for block in table]
    evaluator = Evaluator(values)
    columns = range(evaluator.number(table.length))
    return [evaluator.number(table.column(column).block_id) for column in columns]


Change = Callable[[Any, Callable[[str], Any]], Any]
#: What code does with a table, `v` naming a number; they return what the table is then.
CHANGES: dict[str, Change] = {
    "append": lambda t, v: t.append(containers.NULL_BLOCK),
    "extend by a list": lambda t, v: t.extend([containers.NULL_BLOCK, containers.NULL_BLOCK]),
    "extend by itself": lambda t, v: t.extend(t[:]),
    "extend by a slice": lambda t, v: t.extend(t[v("slice_from") : v("slice_to")]),
    "store": lambda t, v: t.__setitem__(v("place"), containers.NULL_BLOCK),
    "store at the end": lambda t, v: t.__setitem__(-1, containers.NULL_BLOCK),
    "move": lambda t, v: (
        t.append(t[v("place")]),
        t.__setitem__(v("place"), containers.NULL_BLOCK),
    ),
}
READS: dict[str, Change] = {
    "all": lambda t, v: t,
    "a slice": lambda t, v: t[v("slice_from") : v("slice_to")],
    "a head": lambda t, v: t[: v("slice_to")],
    "a tail": lambda t, v: t[v("slice_from") :],
    "a column": lambda t, v: [t[v("place")]],
    "the last": lambda t, v: [t[-1]],
    "a sum": lambda t, v: [containers.NULL_BLOCK] + t[v("slice_from") :],  # noqa: RUF005
    "a longer sum": lambda t, v: t + t[: v("slice_to")],
    "after copying": lambda t, v: t.copy(),
}


def done(table: Any, changes: list[str], read: str, number: Callable[[str], Any]) -> Any:
    try:
        for change in changes:
            CHANGES[change](table, number)
        return READS[read](table, number)
    except IndexError:
        return IndexError


@settings(max_examples=500, deadline=None)
@given(
    st.integers(0, 4),
    st.lists(st.sampled_from(sorted(CHANGES)), max_size=4),
    st.sampled_from(sorted(READS)),
    st.fixed_dictionaries(
        {name: st.integers(-6, 6) for name in ("place", "slice_from", "slice_to")}
    ),
)
def test_a_table_behaves_as_a_list(
    length: int, changes: list[str], read: str, numbers: dict[str, int]
) -> None:
    """Whatever its length, a table holds the blocks that Python's list would hold."""
    values = {**numbers, "length": length}
    blocks = [Block(100 + column, True) for column in range(length)]
    expected = done(blocks, changes, read, numbers.__getitem__)
    variables = {"place": PLACE, "slice_from": FROM, "slice_to": TO}

    with following(Path(values, ())):
        found = done(symbolic_table(), changes, read, variables.__getitem__)

    if expected is IndexError or found is IndexError:
        assert found is expected
    else:
        assert ids(found, values) == ids(expected, values)


def test_a_copy_is_not_changed_with_its_table() -> None:
    """A slice and a copy keep what they held, as those of a list do."""
    table = symbolic_table()
    with following(Path({"length": 2}, ())):
        slice_before, copy_before = table[:], table.copy()
        table[0] = containers.NULL_BLOCK
        table.append(containers.NULL_BLOCK)

    for before in (slice_before, copy_before):
        assert ids(before, {"length": 2}) == [100, 101]


def test_a_table_of_known_length_is_an_ordinary_sequence() -> None:
    """With a number as length a table can be counted and walked through."""
    table = Table.of([containers.NULL_BLOCK, Block(7, True)])

    assert len(table) == 2
    assert [block.block_id for block in table] == [0, 7]
    assert list(table)[1].block_id == 7


REFUSED_OF_TABLES: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "a loop": list,
    "a step": lambda t: t[::2],
    "assignment to a slice": lambda t: t.__setitem__(slice(0, 1), []),
    "sort": lambda t: t.sort(),
    "pop": lambda t: t.pop(),
    "insert": lambda t: t.insert(0, containers.NULL_BLOCK),
    "index": lambda t: t.index(containers.NULL_BLOCK),
    "comparison": lambda t: t == [],
    "another comparison": lambda t: t != symbolic_table(),
    "extending by a text": lambda t: t.extend("ab"),
}


@pytest.mark.parametrize("name", REFUSED_OF_TABLES)
def test_what_is_not_modelled_of_a_table_is_refused(name: str) -> None:
    """A table of symbolic length never answers what depends on more than single columns."""
    with following(Path({"length": 2}, ())), pytest.raises(Unsupported):
        REFUSED_OF_TABLES[name](symbolic_table())


def test_blocks_are_the_same_if_their_ids_are() -> None:
    """Identity of blocks is equality of ids, and the null block has id 0."""
    one, other = Block(term.int_var("id_a"), True), Block(term.int_var("id_b"), True)

    assert one.is_same_block(one) is True
    assert (one != other) is term.negation(term.int_var("id_a") == term.int_var("id_b"))
    assert one.is_null is (term.int_var("id_a") == 0)
    assert (one == 3) is False
    with pytest.raises(TypeError):
        hash(one)


def test_references_and_hash_are_known_of_some_blocks_only() -> None:
    """What earlier steps left in a table is not known; what a hit or the pool gives is."""
    left, given = Block(5, True), Block(6, False, COUNT, BlockHash())

    for name in ("ref_cnt", "block_hash"):
        with pytest.raises(Unsupported, match=f"{name} of a block that earlier steps left"):
            getattr(left, name)
    given.ref_cnt += 2
    assert given.ref_cnt is COUNT + 2
    assert isinstance(given.block_hash, BlockHash)
    assert (containers.NULL_BLOCK.ref_cnt, Pool(1).get_new_blocks(1)[0].block_hash) == (0, None)
    with pytest.raises(Unsupported, match="ref_cnt"):
        containers.NULL_BLOCK.ref_cnt = 1
    with pytest.raises(Unsupported, match="block_id"):
        given.block_id = 7


def test_a_choice_of_blocks_knows_what_both_know() -> None:
    """One of two blocks has the references of the one it is, if these are known of both."""
    one, other, left = Block(5, True, 1, None), Block(6, False, COUNT), Block(7, True)
    chosen = one.choose(THERE, other)

    for there in (True, False):
        values = {"there": there, "count": 4}
        assert value_of(chosen.block_id, values) == (5 if there else 6)
        assert value_of(chosen.ref_cnt, values) == (1 if there else 4)
    for read in (lambda: chosen.block_hash, lambda: one.choose(THERE, left).ref_cnt):
        with pytest.raises(Unsupported):
            read()


@pytest.mark.parametrize("references", [0, 1, 3])
def test_touching_takes_what_nobody_references_from_the_free_list(references: int) -> None:
    """Null blocks are passed over; a block counts once as drawn, and then is referenced."""
    pool, hit = Pool(1), Block(8, False, COUNT, BlockHash())
    pool.touch(Table.of_runs((LENGTH, containers.NULL_BLOCK), (1, hit)))
    pool.touch([hit])
    values = {"count": references, "length": 3}

    assert value_of(pool.touched, values) == int(references == 0)
    assert value_of(hit.ref_cnt, values) == references + 2
    assert containers.NULL_BLOCK.ref_cnt == 0
    with pytest.raises(Unsupported, match="not known by runs"):
        pool.touch(symbolic_table())


def test_freed_blocks_are_not_drawn_again() -> None:
    """Taking blocks back is no part of what a step draws."""
    pool = Pool(1)
    pool.free_blocks(pool.get_new_blocks(3))

    assert pool.drawn == 3
    assert pool.get_new_blocks(1)[0].block_id == FIRST_FRESH_ID + 3


def test_a_hash_moves_to_its_copy() -> None:
    """The copy of a cached block is cached in its place."""
    source, target = Block(5, False, 1, BlockHash()), Block(6, True, 1, None)
    Pool(1).move_block_hashes(source, target)

    assert isinstance(target.block_hash, BlockHash)
    with pytest.raises(Unsupported, match="comparison of a blockhash"):
        _ = source.block_hash == target.block_hash


@pytest.mark.parametrize("start", range(5))
def test_a_table_known_by_runs_stays_so_in_its_tails(start: int) -> None:
    """Behind any column the runs are those that are left; a store or more blocks lose them."""
    hit = Block(8, False, 1, BlockHash())
    table = Table.of_runs((LENGTH, containers.NULL_BLOCK), (1, hit))
    values = {"length": 2, "slice_from": start}
    with following(Path(values, (FROM >= 0,))):
        tail = table[FROM:]
        assert [*ids(tail, values)] == [0, 0, 8][start:]
        assert [value_of(length, values) for length, _ in tail.runs] == [
            max(2 - start, 0),
            min(max(3 - start, 0), 1),
        ]
        assert table[:FROM].runs is None
        assert table.copy().runs == table.runs
        table.append(hit)
        assert table.runs is None


def test_a_table_in_reverse_starts_at_its_end() -> None:
    """`reversed` of a table gives its columns from the last to the first."""
    assert ids(symbolic_table().in_reverse(), {"length": 3}) == [102, 101, 100]


def test_a_block_is_looked_for_column_by_column() -> None:
    """Membership in a short table is decided as Python decides it."""
    with following(Path({"length": 2}, ())):
        assert containers.NULL_BLOCK not in symbolic_table()
        assert Block(101, True) in symbolic_table()


def test_fresh_blocks_are_fresh() -> None:
    """Blocks handed out differ from each other, over several requests of the pool."""
    pool = Pool(1)
    first, second = pool.get_new_blocks(COUNT), pool.get_new_blocks(2)
    values = {"count": 3}

    drawn = [*ids(first, values), *ids(second, values)]
    assert drawn == [*range(FIRST_FRESH_ID, FIRST_FRESH_ID + 5)]
    assert value_of(pool.drawn, values) == 5


def test_a_negative_request_gives_nothing_and_counts() -> None:
    """Asking for a negative number gives no block and raises the free count, as vLLM does."""
    pool = Pool(1)

    assert ids(pool.get_new_blocks(COUNT), {"count": -3}) == []
    assert value_of(pool.drawn, {"count": -3}) == -3


def test_a_block_is_writable_if_it_is_owned_and_not_null() -> None:
    """`is_block_writable` follows vLLM's: the null block never is."""
    pool = Pool(1)

    assert pool.is_block_writable(Block(3, THERE)) is THERE
    assert pool.is_block_writable(Block(0, True)) is False
    with pytest.raises(Unsupported, match="get_num_free_blocks"):
        pool.get_num_free_blocks()
    with pytest.raises(Unsupported):
        _ = pool == Pool(1)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_pending_entry_behaves_as_one_of_a_dict(is_there: bool) -> None:
    """Where the entry is, and where it is not, every modelled operation is that of a dict."""
    uses: list[Callable[[Any], Any]] = [
        lambda d: "r" in d,
        lambda d: d["r"],
        lambda d: d.get("r"),
        lambda d: d.get("r", 5),
        lambda d: (d.pop("r"), "r" in d),
        lambda d: (d.pop("r", None), "r" in d),
        lambda d: (d.setdefault("r", 9), d["r"]),
        lambda d: (d.__setitem__("r", 8), d["r"], "r" in d),
        lambda d: (d.__delitem__("r"), "r" in d),
    ]

    def result(use: Callable[[Any], Any], of: Any) -> Any:
        try:
            return use(of)
        except KeyError:
            return KeyError

    for use in uses:
        with following(Path({"there": is_there}, ())):
            found = result(use, Pending("r", THERE, 7))
        assert found == result(use, {"r": 7} if is_there else {})


def test_a_default_is_added_where_the_entry_is_absent() -> None:
    """A `defaultdict` stays one."""
    entries = Pending("r", False, name="lists", default=list)
    with following(Path({}, ())):
        entries["r"].append(1)
        assert entries["r"] == [1]
        assert "r" in entries


def test_what_earlier_steps_left_is_not_read() -> None:
    """State that is not modelled may be overwritten; reading it first is refused."""
    left = {
        name: state_of_earlier_steps(name, modelled_state(name, value, "r"))
        for name, value in {"numbers": {"r": 1}, "members": set(), "items": [1]}.items()
    }
    with following(Path({"has_numbers_before": True}, ())):
        assert "r" in left["numbers"]
        for read in (
            lambda: left["numbers"]["r"],
            lambda: left["numbers"].get("r"),
            lambda: "r" in left["members"],
            lambda: len(left["items"]),
            lambda: left["items"][0],
        ):
            with pytest.raises(Unsupported):
                read()
        left["numbers"]["r"] = 4
        left["members"].add("r")
        left["items"].append(2)
        left["items"] += [3]
        assert left["numbers"]["r"] == 4
        assert "r" in left["members"]


@pytest.mark.parametrize("is_of_this_step", [False, True])
def test_a_hash_was_cached_in_this_step_or_was_not(is_of_this_step: bool) -> None:
    """Of the hashes cached in this step a hit's own is known; the ones added are of later use."""
    cached = modelled_state("cached_blocks_this_step", set(), "r")
    others = modelled_state("others", set(), "r")
    with following(Path({"there": is_of_this_step}, ())):
        assert (BlockHash(THERE) in cached) is is_of_this_step
        cached.add(BlockHash())
        assert BlockHash() not in cached
        for use in (lambda: BlockHash() in others, lambda: others.add(BlockHash())):
            with pytest.raises(Unsupported):
                use()


def test_what_is_left_of_a_log_is_not_known() -> None:
    """Throwing some entries out of a log leaves a log of which nothing is known."""
    log = Log("log")
    log.append(1)
    with following(Path({}, ())), pytest.raises(Unsupported):
        len(log.without_some())


def test_dropping_asks_nothing() -> None:
    """A dropped entry is gone, whether it was there or not, and no case is told apart."""
    path = Path({"there": True}, ())
    entries = Pending("r", THERE, 7)
    with following(path):
        entries.drop("r")
        assert "r" not in entries
        with pytest.raises(Unsupported):
            entries.drop("other")

    assert path.literals == []


UNKNOWN_OF_OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an entry of another": lambda s: s["pending"].get("other"),
    "membership of another": lambda s: "other" in s["members"],
    "a table of another": lambda s: s["tables"]["other"],
    "how many are pending": lambda s: len(s["pending"]),
    "whether any is pending": lambda s: bool(s["pending"]),
    "all pending": lambda s: list(s["pending"].items()),
    "a copy of what is pending": lambda s: dict(s["pending"]),
    "how many members": lambda s: len(s["members"]),
    "all members": lambda s: sorted(s["members"]),
    "a union": lambda s: s["members"] | {"other"},
    "how many tables": lambda s: len(s["tables"]),
    "all tables": lambda s: list(s["tables"].values()),
    "whether a log is empty": lambda s: bool(s["log"]),
    "a loop over a log": lambda s: list(s["log"]),
    "a log with more": lambda s: [1] + s["log"],
    "update": lambda s: s["pending"].update({"other": 1}),
    "clearing": lambda s: s["tables"].clear(),
    "comparison": lambda s: s["pending"] == {},
}


@pytest.mark.parametrize("name", UNKNOWN_OF_OTHERS)
def test_other_requests_are_not_modelled(name: str) -> None:
    """Nothing is assumed of requests other than the one, not even that there are none."""
    state = {
        "pending": Pending("r", THERE, 7),
        "members": Members("r", "members"),
        "tables": Tables("r"),
        "log": Log("log"),
    }
    with following(Path({}, ())), pytest.raises(Unsupported):
        UNKNOWN_OF_OTHERS[name](state)


def test_an_absent_request_has_an_empty_table() -> None:
    """`req_to_blocks` adds an empty table where it is asked for one, and only there."""
    tables = Tables("r")
    with following(Path({}, ())):
        assert "r" not in tables
        assert tables.get("r") is None
        tables["r"].append(containers.NULL_BLOCK)
        assert "r" in tables
        assert tables["r"].length == 1
        assert tables.pop("r").length == 1
        assert tables.pop("r", None) is None


def test_values_are_left_as_they_are() -> None:
    """Only containers of requests are replaced by their models."""
    for value in (3, "align", None, containers.NULL_BLOCK, (1, 2)):
        assert modelled_state("name", value, "r") is value
