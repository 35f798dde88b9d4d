"""The objects that a manager counts with, of symbolic size: tables, pool, state by request.

Only what the accounting reads is modelled; anything else asked of them is `Unsupported`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from models import term
from models.term import BoolLike, IntLike, Unsupported

NULL_BLOCK_ID = 0
#: Ids of blocks handed out during a step start here; ids of the table before it lie below.
FIRST_FRESH_ID = 1_000_000_000


class _Modelled:
    """Refuses whatever the model does not cover, by name."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"{type(self).__name__}.{name} is not modelled")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise Unsupported(f"comparison of a {type(self).__name__.lower()}")

    __hash__ = None  # type: ignore[assignment]


class BlockHash(_Modelled):
    """The hash under which a block is cached.

    Args:
        is_of_this_step: Whether it was cached in this same step, by another request.
    """

    def __init__(self, is_of_this_step: BoolLike = False) -> None:
        self.is_of_this_step = is_of_this_step


class Block(_Modelled):
    """A KV-cache block.

    Args:
        block_id: 0 is the null block.
        writable: Whether its owner may move it: one owner, and not hashed.
        ref_cnt: Requests that reference it; None where that is not modelled.
        block_hash: The hash it is cached under, None without one; `...` where that is not modelled.
    """

    __slots__ = ("_hash", "_refs", "block_id", "writable")
    block_id: IntLike
    writable: BoolLike
    _refs: IntLike | None
    _hash: Any

    def __init__(
        self,
        block_id: IntLike,
        writable: BoolLike,
        ref_cnt: IntLike | None = None,
        block_hash: Any = ...,
    ) -> None:
        for name, value in zip(
            ("block_id", "writable", "_refs", "_hash"),
            (block_id, writable, ref_cnt, block_hash),
            strict=True,
        ):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "ref_cnt" or self is NULL_BLOCK:
            raise Unsupported(f"storing Block.{name} is not modelled")
        object.__setattr__(self, "_refs", value)

    @property
    def ref_cnt(self) -> IntLike:
        """Requests that reference the block."""
        if self._refs is None:
            raise Unsupported("ref_cnt of a block that earlier steps left is not modelled")
        refs: IntLike = self._refs
        return refs

    @property
    def block_hash(self) -> Any:
        """The hash that the block is cached under, None without one."""
        if self._hash is ...:
            raise Unsupported("block_hash of a block that earlier steps left is not modelled")
        return self._hash

    def cached_under(self, block_hash: BlockHash | None) -> None:
        """Give the block a hash, or take it away."""
        object.__setattr__(self, "_hash", block_hash)

    @property
    def is_null(self) -> BoolLike:
        """Whether this is the null block."""
        return self.block_id == NULL_BLOCK_ID

    def is_same_block(self, other: Any) -> BoolLike:
        """Identity: ids are unique in a pool."""
        return self.block_id == other.block_id if isinstance(other, Block) else False

    __eq__ = is_same_block  # type: ignore[assignment]
    __hash__ = None

    def __ne__(self, other: object) -> Any:
        return term.negation(self.is_same_block(other))

    def choose(self, condition: BoolLike, otherwise: Block) -> Block:
        """This block where ``condition`` holds, else the other."""
        if self is otherwise:
            return self
        one, other = self._refs, otherwise._refs
        unknown = one is None or other is None
        return Block(
            term.choose(condition, self.block_id, otherwise.block_id),
            term.choose(condition, self.writable, otherwise.writable),
            None if unknown else term.choose(condition, one, other),
        )


#: vLLM does not maintain its `ref_cnt`, and asks for `is_null` besides.
NULL_BLOCK = Block(NULL_BLOCK_ID, False, 0)


class Sweep:
    """Columns of a table that a loop may store into, whichever it does.

    Args:
        name: Of the variables that say which.
        low: First column.
        high: Last column.
    """

    current: Sweep | None = None

    def __init__(self, name: str, low: IntLike, high: IntLike) -> None:
        self.name, self._low, self._high = name, low, high
        self.column: IntLike = term.int_var(name)

    def holds(self, column: IntLike) -> BoolLike:
        """Whether a column lies in the range."""
        return term.conjunction((column >= self._low, column <= self._high))

    def stores_into(self, column: IntLike) -> BoolLike:
        """Whether a column is one that is stored into: the loop's own, where its body does."""
        is_another = term.cell(f"{self.name}_into", column) == 1
        is_one = term.disjunction((column == self.column, is_another))
        return term.conjunction((self.holds(column), is_one))

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """While the loop's body runs, a store into its column is one into any of the range."""
        Sweep.current = self
        try:
            yield
        finally:
            Sweep.current = None


class Table(_Modelled):
    """A list of blocks of symbolic length.

    Args:
        length: Columns; a number or a term.
        at: Block of a column, for any index term inside the table.
        runs: The same as (length, block) in order, where it is known so.
    """

    def __init__(
        self,
        length: IntLike = 0,
        at: Callable[[IntLike], Block] | None = None,
        runs: tuple[tuple[IntLike, Block], ...] | None = None,
    ) -> None:
        self.length = length
        self._at = at or (lambda index: NULL_BLOCK)
        self.runs = runs

    @classmethod
    def filled(cls, block: Block, length: IntLike) -> Table:
        """``length`` columns of one block."""
        return cls(length, lambda index: block, ((length, block),))

    @classmethod
    def of_runs(cls, *runs: tuple[IntLike, Block]) -> Table:
        """Columns of one block after columns of another; no length may be negative."""
        table = cls(runs=())
        for length, block in runs:
            table.extend(cls.filled(block, length))
        table.runs = runs
        return table

    @classmethod
    def of(cls, blocks: list[Block]) -> Table:
        """The table of a Python list."""
        table = cls()
        for block in blocks:
            table.append(block)
        return table

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        return self._at(self._inside(index))

    def __setitem__(self, index: Any, block: Block) -> None:
        if isinstance(index, slice):
            raise Unsupported("assignment to a slice of a symbolic table")
        column, before, sweep = self._inside(index), self._at, Sweep.current
        if sweep is not None:
            if index is not sweep.column:
                raise Unsupported("a loop over a symbolic range stores into another column")
            self._at = lambda i: block.choose(sweep.stores_into(i), before(i))
        else:
            self._at = lambda i: block.choose(i == column, before(i))
        self.runs = None

    def __len__(self) -> int:
        if not isinstance(self.length, int):
            raise Unsupported("the length of a symbolic table as a number")
        return self.length

    def __bool__(self) -> bool:
        return bool(self.length > 0)

    def __iter__(self) -> Iterator[Block]:
        index = 0
        while index < self.length:  # decided round by round; the path gives up on long ones
            yield self._at(index)
            index += 1

    def __add__(self, tail: Any) -> Table:
        joined = Table(self.length, self._at)
        joined.extend(tail)
        return joined

    def __radd__(self, head: list[Block]) -> Table:
        return Table.of(head) + self

    def column(self, index: IntLike) -> Block:
        """The block at an index known to lie inside, or of no interest elsewhere."""
        return self._at(index)

    def append(self, block: Block) -> None:
        """Add a column."""
        self.extend(Table.filled(block, 1))

    def extend(self, tail: Any) -> None:
        """Add the columns of a list or a table."""
        if isinstance(tail, list):
            for block in tail:
                self.append(block)
            return
        if not isinstance(tail, Table):
            raise Unsupported(f"extending a symbolic table by a {type(tail).__name__}")
        head, rest, split = self._at, tail._at, self.length
        self._at = lambda i: _either(i < split, lambda: head(i), lambda: rest(i - split))
        self.length = split + tail.length
        self.runs = None

    def __iadd__(self, tail: Any) -> Table:
        self.extend(tail)
        return self

    def copy(self) -> Table:
        """A table that later changes do not touch."""
        return Table(self.length, self._at, self.runs)

    def in_reverse(self) -> Table:
        """The columns from the last to the first."""
        last, at = self.length - 1, self._at
        return Table(self.length, lambda i: at(last - i))

    def _slice(self, index: slice) -> Table:
        if index.step is not None:
            raise Unsupported("a slice with a step of a symbolic table")
        start = self._clamped(0 if index.start is None else index.start)
        stop = self._clamped(self.length if index.stop is None else index.stop)
        length, at = term.choose(stop > start, stop - start, 0), self._at
        runs = None if self.runs is None or index.stop is not None else _behind(self.runs, start)
        return Table(length, lambda i: at(i + start), runs)

    def _clamped(self, index: IntLike) -> IntLike:
        from_start = term.choose(index < 0, index + self.length, index)
        not_before = term.choose(from_start < 0, 0, from_start)
        clamped: IntLike = term.choose(not_before > self.length, self.length, not_before)
        return clamped

    def _inside(self, index: IntLike) -> IntLike:
        if index < 0:
            index = index + self.length
        if index < 0 or index >= self.length:
            raise IndexError("list index out of range")
        return index


def _behind(runs: tuple[tuple[IntLike, Block], ...], start: IntLike) -> Any:
    """What is left of runs without their first ``start`` columns."""
    left = []
    for length, block in runs:
        cut = term.choose(start < length, start, length)
        left.append((length - cut, block))
        start = start - cut
    return tuple(left)


def _repeated(blocks: list[Any], times: IntLike) -> Table:
    if len(blocks) != 1 or not isinstance(blocks[0], Block):
        raise Unsupported("a list of other than one block, repeated a symbolic number of times")
    return Table.filled(blocks[0], term.choose(times > 0, times, 0))


term.repeat_list = _repeated


def _either(
    condition: BoolLike, then: Callable[[], Block], otherwise: Callable[[], Block]
) -> Block:
    if isinstance(condition, term.Bool):
        known = term.implied(condition)
        condition = condition if known is None else known
    if isinstance(condition, bool):
        return then() if condition else otherwise()
    return then().choose(condition, otherwise())


class Pool(_Modelled):
    """A block pool large enough for anything; it counts what is asked of it, in blocks.

    `drawn` counts blocks handed out, `touched` those of a hit that nobody referenced, `adopted` all
    of a hit. Blocks are unlimited: what a short pool does is the theorem `allocation-succeeds`.
    """

    enable_caching = True
    metrics_collector = None
    enable_kv_cache_events = False

    def __init__(self, hash_block_size: IntLike, num_hash_lookahead_tokens: IntLike = 0) -> None:
        self.hash_block_size = hash_block_size
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.null_block = NULL_BLOCK
        self.num_gpu_blocks = term.int_var("num_gpu_blocks", 1)
        self.drawn: IntLike = 0
        self.touched: IntLike = 0
        self.adopted: IntLike = 0
        self.has_taken_back = False

    def get_new_blocks(self, num_blocks: IntLike) -> Table:
        """Hand out blocks nobody else holds.

        A negative count gives nothing and raises the free count, as
        `FreeKVCacheBlockQueue.popleft_n` does.
        """
        first = FIRST_FRESH_ID + self.drawn
        self.drawn = self.drawn + num_blocks
        length = term.choose(num_blocks > 0, num_blocks, 0)
        return Table(length, lambda index: Block(first + index, True, 1, None))

    def touch(self, blocks: Any) -> None:
        """Reference blocks; one that nobody did leaves the free list."""
        for length, block in _runs_of(blocks):
            if block is NULL_BLOCK:
                continue
            was_free = term.conjunction((block.ref_cnt == 0, term.negation(block.is_null)))
            self.touched = self.touched + term.choose(was_free, length, 0)
            self.adopted = self.adopted + term.choose(block.is_null, 0, length)
            block.ref_cnt = block.ref_cnt + length

    def free_blocks(self, blocks: Any) -> None:
        """Take blocks back: no later step of this request finds them in its table."""
        self.has_taken_back = True

    def move_block_hashes(self, source: Block, target: Block) -> None:
        """`BlockPool.move_block_hashes`: the target is cached in place of the source."""
        target.cached_under(BlockHash())

    def is_block_writable(self, block: Block) -> BoolLike:
        """`BlockPool.is_block_writable`: not null, one owner, not hashed."""
        return term.conjunction((term.negation(block.is_null), block.writable))


def _runs_of(blocks: Any) -> Any:
    """A list or a table as (length, block), where it is known so."""
    if isinstance(blocks, Table):
        if blocks.runs is None:
            raise Unsupported("touching the blocks of a table that is not known by runs")
        return blocks.runs
    return [(1, block) for block in blocks]


_C = TypeVar("_C", bound=type)
#: What Python needs of every object, and what no answer depends on.
_HARMLESS = frozenset(
    ["__new__", "__init__", "__getattribute__", "__repr__", "__sizeof__", "__class_getitem__"]
)


def _refuse_the_rest(cls: _C) -> _C:
    """Refuse, while lifted code runs, what a subclass of a builtin container does not define."""
    for name, method in vars(cls.__bases__[0]).items():
        if callable(method) and name not in {*vars(cls), *_HARMLESS} and name != "__hash__":
            setattr(cls, name, _refusing(name, method))
    return cls


def _refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if term.decide is not None:
            raise Unsupported(f"{name} of {self.name} is not modelled")
        return method(self, *args, **kwargs)

    return refuse


_ABSENT = object()
#: Attribute that holds the hashes of blocks that were cached in this step.
_OF_THIS_STEP = "cached_blocks_this_step"


@_refuse_the_rest
class Pending(dict[str, Any]):
    """A dict keyed by request id in which the one request may or may not be, as a formula says.

    Args:
        request_id: The one request.
        present: Whether it is in.
        value: What is there if it is.
        name: Attribute of the manager, for messages.
        value_is_known: False where earlier steps left a value that is not modelled; reading it is
            refused, writing it is not.
        default: Makes the value that reading an absent key adds (`collections.defaultdict`).
    """

    def __init__(
        self,
        request_id: str,
        present: BoolLike,
        value: Any = None,
        *,
        name: str = "pending checkpoints",
        value_is_known: bool = True,
        default: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self.name, self._request_id = name, request_id
        self.present, self.value = present, value
        self._value_is_known, self._default = value_is_known, default

    def _is_in(self, key: object) -> bool:
        if key != self._request_id:
            raise Unsupported(f"{self.name} of a second request")
        return bool(self.present)

    def _known_value(self) -> Any:
        if not self._value_is_known:
            raise Unsupported(f"{self.name}: what earlier steps left there is not modelled")
        return self.value

    def __contains__(self, key: object) -> bool:
        return self._is_in(key)

    def __getitem__(self, key: str) -> Any:
        return self._known_value() if self._is_in(key) else self.__missing__(key)

    def __missing__(self, key: str) -> Any:
        if self._default is None:
            raise KeyError(key)
        self[key] = self._default()
        return self.value

    def get(self, key: str, default: Any = None) -> Any:
        """`dict.get`."""
        return self._known_value() if self._is_in(key) else default

    def setdefault(self, key: str, default: Any = None) -> Any:
        """`dict.setdefault`."""
        if not self._is_in(key):
            self[key] = default
        return self._known_value()

    def __setitem__(self, key: str, value: Any) -> None:
        if key != self._request_id:
            raise Unsupported(f"{self.name} of a second request")
        self.present, self.value, self._value_is_known = True, value, True

    def pop(self, key: str, default: Any = _ABSENT) -> Any:
        """`dict.pop`."""
        if self._is_in(key):
            self.present = False
            return self._known_value()
        if default is _ABSENT:
            raise KeyError(key)
        return default

    def drop(self, key: str) -> None:
        """`dict.pop` with a default, for who does not look at the value: no case distinction."""
        if key != self._request_id:
            raise Unsupported(f"{self.name} of a second request")
        self.present = False

    def __delitem__(self, key: str) -> None:
        if not self._is_in(key):
            raise KeyError(key)
        self.present = False


@_refuse_the_rest
class Members(set[str]):
    """A set of request ids of which only the one request is modelled.

    Args:
        request_id: The one request.
        name: Attribute of the manager, for messages.
    """

    def __init__(self, request_id: str, name: str) -> None:
        super().__init__()
        self.name, self._request_id = name, request_id
        self.is_known = True

    def _mine(self, key: object) -> str:
        if key != self._request_id:
            raise Unsupported(f"{self.name} was asked about something else than the request")
        return self._request_id

    def __contains__(self, key: object) -> bool:
        if isinstance(key, BlockHash) and self.name == _OF_THIS_STEP:
            return bool(key.is_of_this_step)
        if not self.is_known:
            raise Unsupported(f"{self.name}: what earlier steps left there is not modelled")
        return super().__contains__(self._mine(key))

    def add(self, key: Any) -> None:
        """`set.add`."""
        if isinstance(key, BlockHash) and self.name == _OF_THIS_STEP:
            return  # the request asks about it in a later step only
        super().add(self._mine(key))
        self.is_known = True

    def discard(self, key: object) -> None:
        """`set.discard`."""
        super().discard(self._mine(key))
        self.is_known = True

    def remove(self, key: str) -> None:
        """`set.remove`."""
        if key not in self:
            raise KeyError(key)
        super().remove(key)


@_refuse_the_rest
class Log(list[Any]):
    """A list of which nothing is known but what this step adds.

    Args:
        name: Attribute of the manager, for messages.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def append(self, item: Any) -> None:
        """`list.append`."""
        super().append(item)

    def extend(self, items: Any) -> None:
        """`list.extend`; what a table of symbolic length adds is there as one item."""
        of_any_column = getattr(items, "of_any_column", None)
        item = None if of_any_column is None else of_any_column()
        super().extend(items if item is None else [item])

    def without_some(self) -> Log:
        """What is left when a part is thrown out that nobody can name."""
        return Log(self.name)

    def __radd__(self, items: Any) -> NoReturn:
        raise Unsupported(f"what {self.name} holds is not modelled")

    def __iadd__(self, items: Any) -> Log:  # type: ignore[misc]
        self.extend(items)
        return self


@_refuse_the_rest
class Tables(dict[str, Any]):
    """`req_to_blocks`: an absent request has an empty table; other requests are not modelled."""

    name = "req_to_blocks"

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self._request_id = request_id

    def _mine(self, key: object) -> str:
        if key != self._request_id:
            raise Unsupported(f"{self.name} of a second request")
        return self._request_id

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._mine(key))

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(self._mine(key))

    def __missing__(self, key: str) -> Any:
        self[key] = Table()
        return self[key]

    def __setitem__(self, key: str, table: Any) -> None:
        if not isinstance(table, Table | list):
            raise Unsupported(f"a table that is a {type(table).__name__}")
        super().__setitem__(self._mine(key), table)

    def get(self, key: str, default: Any = None) -> Any:
        """`dict.get`."""
        return super().get(self._mine(key), default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """`dict.setdefault`."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """`dict.pop`."""
        return super().pop(self._mine(key), *default)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(self._mine(key))


def modelled_state(name: str, value: Any, request_id: str) -> Any:
    """Return a manager's fresh attribute as a container of one request; other values as they are.

    Raises:
        Unsupported: A container that is not modelled.
    """
    if name == Tables.name:
        return Tables(request_id)
    kind = type(value)
    if kind is dict or kind is defaultdict:
        default = getattr(value, "default_factory", None)
        return Pending(request_id, False, name=name, default=default)
    if kind is set:
        return Members(request_id, name)
    return Log(name) if kind is list else value


def state_of_earlier_steps(name: str, value: Any) -> Any:
    """Return what earlier steps may have left in an attribute: anything."""
    if isinstance(value, Pending):
        present = term.bool_var(f"has_{name}_before")
        return Pending(value._request_id, present, name=name, value_is_known=False)
    if isinstance(value, Members):
        value.is_known = False
    return value
