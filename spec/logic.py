"""Connectives and arithmetic that read the same for Python values and for terms.

``&`` and ``|`` already do for bools and formulas; the rest is here.
"""

from __future__ import annotations

from typing import Any

from spec.vocabulary import BoolLike, IntLike


def negation(claim: BoolLike) -> BoolLike:
    """Return what holds exactly where ``claim`` does not."""
    return claim ^ True


def implies(premise: BoolLike, conclusion: BoolLike) -> BoolLike:
    """Return what holds unless ``premise`` does and ``conclusion`` does not."""
    return negation(premise) | conclusion


def choose(condition: BoolLike, then: Any, otherwise: Any) -> Any:
    """Return ``then`` where ``condition`` holds, else ``otherwise``."""
    if isinstance(condition, bool):
        return then if condition else otherwise
    return condition.choose(then, otherwise)


def count(condition: BoolLike) -> IntLike:
    """Return 1 where ``condition`` holds, else 0."""
    return choose(condition, 1, 0)


def least(a: IntLike, b: IntLike) -> IntLike:
    """Return the smaller of two."""
    return choose(a <= b, a, b)


def greatest(a: IntLike, b: IntLike) -> IntLike:
    """Return the greater of two."""
    return choose(a >= b, a, b)


def cdiv(a: IntLike, b: IntLike) -> IntLike:
    """Return ``a / b`` rounded up, for a positive ``b``: blocks that ``a`` tokens fill."""
    return -(-a // b)
