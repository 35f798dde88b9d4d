"""The objects that a manager counts with, of symbolic size: block tables, pool, pending checkpoints.

Only what the accounting reads is modelled; anything else asked of them is `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

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


class Block(_Modelled):
    """A KV-cache block: its id (0 is the null block), and whether its owner may move it."""

    def __init__(self, block_id: IntLike, writable: BoolLike) -> None:
        self.block_id, self.writable = block_id, writable

    @property
    def is_null(self) -> BoolLike:
        """Whether this is the null block."""
        return self.block_id == NULL_BLOCK_ID

    def is_same_block(self, other: Any) -> BoolLike:
        """Identity: ids are unique in a pool."""
        return self.block_id == other.block_id if isinstance(other, Block) else False

    __eq__ = is_same_block  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __ne__(self, other: object) -> Any:
        return term.negation(self.is_same_block(other))

    def choose(self, condition: BoolLike, otherwise: Block) -> Block:
        """This block where ``condition`` holds, else the other."""
        return Block(
            term.choose(condition, self.block_id, otherwise.block_id),
            term.choose(condition, self.writable, otherwise.writable),
        )


NULL_BLOCK = Block(NULL_BLOCK_ID, False)


class Table(_Modelled):
    """A list of blocks of symbolic length.

    Args:
        length: Columns; a number or a term.
        at: Block of a column, for any index term inside the table.
    """

    def __init__(self, length: IntLike = 0, at: Callable[[IntLike], Block] | None = None) -> None:
        self.length = length
        self._at = at or (lambda index: NULL_BLOCK)

    @classmethod
    def filled(cls, block: Block, length: IntLike) -> Table:
        """``length`` columns of one block."""
        return cls(length, lambda index: block)

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
        column, before = self._inside(index), self._at
        self._at = lambda i: block.choose(i == column, before(i))

    def __len__(self) -> int:
        raise Unsupported("the length of a symbolic table as a number")

    def __bool__(self) -> bool:
        return bool(self.length > 0)

    def __iter__(self) -> Iterator[Block]:
        if not isinstance(self.length, int):
            raise Unsupported("a loop over a symbolic table")
        return (self._at(index) for index in range(self.length))

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

    def copy(self) -> Table:
        """A table that later changes do not touch."""
        return Table(self.length, self._at)

    def _slice(self, index: slice) -> Table:
        if index.step is not None:
            raise Unsupported("a slice with a step of a symbolic table")
        start = self._clamped(0 if index.start is None else index.start)
        stop = self._clamped(self.length if index.stop is None else index.stop)
        length, at = term.choose(stop > start, stop - start, 0), self._at
        return Table(length, lambda i: at(i + start))

    def _clamped(self, index: IntLike) -> IntLike:
        index = term.choose(index < 0, index + self.length, index)
        index = term.choose(index < 0, 0, index)
        return term.choose(index > self.length, self.length, index)

    def _inside(self, index: IntLike) -> IntLike:
        if index < 0:
            index = index + self.length
        if index < 0 or index >= self.length:
            raise IndexError("list index out of range")
        return index


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
    """A block pool large enough for anything; it counts what is asked of it.

    Blocks are unlimited here: what a short pool does is the theorem `allocation-succeeds`.
    """

    enable_caching = True
    metrics_collector = None
    enable_kv_cache_events = False

    def __init__(self, hash_block_size: IntLike, num_gpu_blocks: IntLike) -> None:
        self.hash_block_size, self.num_gpu_blocks = hash_block_size, num_gpu_blocks
        self.num_hash_lookahead_tokens = 0
        self.null_block = NULL_BLOCK
        self.drawn: IntLike = 0

    def get_new_blocks(self, num_blocks: IntLike) -> Table:
        """Hand out blocks nobody else holds.

        A negative count gives nothing and raises the free count, as `FreeKVCacheBlockQueue.popleft_n`
        does.
        """
        first = FIRST_FRESH_ID + self.drawn
        self.drawn = self.drawn + num_blocks
        length = term.choose(num_blocks > 0, num_blocks, 0)
        return Table(length, lambda index: Block(first + index, True))

    def is_block_writable(self, block: Block) -> BoolLike:
        """`BlockPool.is_block_writable`: not null, one owner, not hashed."""
        return term.conjunction((term.negation(block.is_null), block.writable))


class Pending(dict[str, Any]):
    """A dict keyed by request id in which the one request may or may not be, as a formula says."""

    def __init__(self, request_id: str, present: BoolLike, value: Any) -> None:
        super().__init__()
        self._request_id, self.present, self.value = request_id, present, value

    def _mine(self, key: str) -> bool:
        if key != self._request_id:
            raise Unsupported("a second request")
        return bool(self.present)

    def __contains__(self, key: object) -> bool:
        return self._mine(str(key))

    def __getitem__(self, key: str) -> Any:
        if not self._mine(key):
            raise KeyError(key)
        return self.value

    def get(self, key: str, default: Any = None) -> Any:
        """`dict.get`."""
        return self.value if self._mine(key) else default

    def __setitem__(self, key: str, value: Any) -> None:
        if key != self._request_id:
            raise Unsupported("a second request")
        self.present, self.value = True, value

    def pop(self, key: str, default: Any = None) -> Any:  # type: ignore[override]
        """`dict.pop` with a default."""
        value = self.get(key, default)
        self.present = False
        return value

    def __iter__(self) -> NoReturn:
        raise Unsupported("a loop over pending checkpoints")

    __len__ = __iter__  # type: ignore[assignment]
    items = keys = values = __iter__  # type: ignore[assignment]
