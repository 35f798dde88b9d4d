"""Whether two trees do the same in every step of a kind, and what tells them apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from models import smt, term
from models.containers import Block, BlockHash, Members, Pending, Table
from models.lift import Exploration, NotUnderstood, PathSummary
from models.step import REQUEST
from models.term import BoolLike

#: One path, and what the step leaves there.
_Seen = tuple[PathSummary, Mapping[str, Any]]


class NotComparable(NotUnderstood):
    """Two values that the comparison of states does not know."""


@dataclass(frozen=True)
class Behaviour:
    """All steps of one case of one tree.

    Attributes:
        exploration: Its paths, shown to be complete.
        left: By path, what the step leaves: the manager's attributes, what it returned, and what it
            gave back to the pool; nothing where groups are put together.
    """

    exploration: Exploration
    left: tuple[Mapping[str, Any], ...]


def is_same(a: Behaviour, b: Behaviour) -> bool:
    """Whether it is proved that two trees' steps are the same."""
    return Comparison(a, b).tell_apart(differs).answer is smt.Answer.UNSAT


def difference(a: Behaviour, b: Behaviour) -> list[str]:
    """Return in what two trees' steps that are not shown to be the same may differ."""
    comparison, found = Comparison(a, b), []
    step = comparison.tell_apart(step_differs)
    if step.answer is not smt.Answer.UNSAT:
        found.append(f"another step ({step.reason or 'shown by a model'})")
    for name in a.left[0]:
        result = comparison.tell_apart(part_differs(name))
        if result.answer is not smt.Answer.UNSAT:
            found.append(f"leaves other {name} ({result.reason or 'shown by a model'})")
    return found


class Comparison:
    """All steps of one case of two trees, side by side."""

    def __init__(self, a: Behaviour, b: Behaviour) -> None:
        ours, theirs = a.exploration.assumptions, b.exploration.assumptions
        if any(ours.get(slug) is not theirs.get(slug) for slug in {*ours, *theirs}):
            raise NotComparable("the two trees are not asked about the same steps")
        self._question = smt.Question(a.exploration.assumptions)
        pairs = itertools.product(
            zip(a.exploration.paths, a.left, strict=True),
            zip(b.exploration.paths, b.left, strict=True),
        )
        self._pairs = [
            (term.conjunction((one[0].condition, other[0].condition)), one, other)
            for one, other in pairs
            if not _exclude_each_other(one[0], other[0])
        ]

    def tell_apart(self, differs: Callable[[_Seen, _Seen], BoolLike]) -> smt.Result:
        """Ask for a situation in which two steps differ.

        Unsat iff they agree in every step; a model is a step in which they differ.
        """
        return self._question.ask(
            term.disjunction(
                term.conjunction((both, differs(one, other)))
                for both, one, other in self._pairs
                if both is not False
            )
        )


def _exclude_each_other(one: PathSummary, other: PathSummary) -> bool:
    """Whether one path decides something one way and the other the other: terms are interned."""
    against = {id(term.negation(literal)) for literal in _literals(one)}
    return any(id(literal) in against for literal in _literals(other))


def _literals(path: PathSummary) -> tuple[BoolLike, ...]:
    """What holds on a path: its decisions, or where paths were put together those of each."""
    return path.decisions or term.conjuncts(path.condition)


def differs(one: _Seen, other: _Seen) -> BoolLike:
    """Return where two steps differ in what the theorems speak of, or in what they leave."""
    return term.disjunction((step_differs(one, other), state_differs(one, other)))


def step_differs(one: _Seen, other: _Seen) -> BoolLike:
    """Return where two steps differ in what is seen of them, beside what they leave."""
    a, b = one[0].step, other[0].step
    if a.raised != b.raised or a.refused != b.refused:
        return True
    names = ["gate", "dry_run", "estimate", "drawn", "dry_run_left_state"]
    if a.raised is None:
        names += ["table_length", "attention_table_length", "deferred"]
    return _differ((getattr(a, name), getattr(b, name)) for name in names)


def state_differs(one: _Seen, other: _Seen) -> BoolLike:
    """Return where two steps differ in what they leave, or hand to the worker."""
    return term.disjunction(part_differs(name)(one, other) for name in one[1])


def part_differs(name: str) -> Callable[[_Seen, _Seen], BoolLike]:
    """Return where two steps differ in one part of what they leave; nowhere if one raised."""

    def differs(one: _Seen, other: _Seen) -> BoolLike:
        if one[0].step.raised or other[0].step.raised:
            return False
        return _differ([(one[1][name], other[1][name])])

    return differs


def _differ(pairs: Iterable[tuple[Any, Any]]) -> BoolLike:
    return term.disjunction(term.negation(_equal(a, b)) for a, b in pairs)


def _equal(a: Any, b: Any) -> BoolLike:
    """Whether two values of a manager are the same: numbers, terms and containers of them."""
    if a is b:
        return True
    if isinstance(a, Table) or isinstance(b, Table) or _are_blocks(a, b):
        return _same_table(*(x if isinstance(x, Table) else _as_table(x) for x in (a, b)))
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {REQUEST} if isinstance(a, Pending) or isinstance(b, Pending) else {*a, *b}
        return term.conjunction(_same_entry(a, b, key) for key in keys)
    if isinstance(a, Block) and isinstance(b, Block):
        parts = [(a.block_id, b.block_id), (a.writable, b.writable)]
        # A choice between two blocks knows less of them; who changes a block is watched besides.
        if a._refs is not None and b._refs is not None:
            parts.append((a._refs, b._refs))
        if a._hash is not ... and b._hash is not ...:
            parts.append((a._hash, b._hash))
        return term.conjunction(_equal(*part) for part in parts)
    if isinstance(a, BlockHash) and isinstance(b, BlockHash):
        return _equal(a.is_of_this_step, b.is_of_this_step)
    if a is None or b is None:
        return False
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        same_length = len(a) == len(b)
        return same_length and term.conjunction(map(_equal, a, b))
    if isinstance(a, bool | term.Bool) and isinstance(b, bool | term.Bool):
        return term.negation(a ^ b)
    if isinstance(a, int | term.Int) and isinstance(b, int | term.Int):
        return a == b
    if isinstance(a, Members) and isinstance(b, Members):
        return a.is_known == b.is_known and set.__eq__(a, b)
    if isinstance(a, set | frozenset | str) and isinstance(b, set | frozenset | str):
        return a == b
    raise NotComparable(f"comparing {type(a).__name__} with {type(b).__name__}")


def _are_blocks(a: Any, b: Any) -> bool:
    lists = isinstance(a, list) and isinstance(b, list)
    return lists and bool(a or b) and all(isinstance(x, Block) for x in (*a, *b))


def _as_table(blocks: Any) -> Table:
    if not isinstance(blocks, list) or not all(isinstance(block, Block) for block in blocks):
        raise NotComparable("comparing a table with something else than blocks")
    return Table.of(blocks)


def _same_table(a: Table, b: Table) -> BoolLike:
    column = term.int_var("any_column", 0)
    same_block = _equal(a.column(column), b.column(column))
    return term.conjunction((a.length == b.length, (column >= a.length) | same_block))


def _same_entry(a: dict[str, Any], b: dict[str, Any], key: str) -> BoolLike:
    (in_a, value_a), (in_b, value_b) = _entry(a, key), _entry(b, key)
    same_presence = _equal(in_a, in_b)
    if value_a is None and value_b is None:
        return same_presence
    # A value that only one of the two knows was written by one step and left alone by the other.
    same_value = value_a is not None and value_b is not None and _equal(value_a, value_b)
    return term.conjunction((same_presence, term.negation(in_a) | same_value))


def _entry(mapping: dict[str, Any], key: str) -> tuple[BoolLike, Any]:
    """Whether a key is there, and its value; an empty table counts as none."""
    if isinstance(mapping, Pending):
        return mapping.present, mapping.value
    value = dict.get(mapping, key)
    if isinstance(value, Table) and isinstance(value.length, int) and value.length == 0:
        return False, None
    return key in dict.keys(mapping), value
