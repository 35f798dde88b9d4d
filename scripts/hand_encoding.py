"""The align-mode estimator and allocator of 0.30.0 and 0.31.0, transcribed into z3 by hand.

It is what an engineer with a solver at hand would write in an afternoon: block counts only, four
kinds of step only, and right only as long as somebody keeps it in step with the source. The
benchmarks set it beside the lifted proof; a test holds it to the same verdicts, and to the real
managers' numbers.

    python scripts/hand_encoding.py 0.31.0
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import z3

RELEASES = ("0.30.0", "0.31.0")
#: (family, tags) as in `spec.theorems.OBLIGATIONS`.
KINDS = (("first", ()), ("first", ("checkpoint",)), ("running", ()), ("checkpoint", ()))

B, H, S, K, ALIGNMENT = z3.Ints("block_size hash_block_size num_spec num_checkpoint alignment")
START, END, LENGTH, PREFILL_END = z3.Ints("computed num_tokens_main prefill_length prefill_end")
FREE, WATERMARK, RESERVED = z3.Ints("free watermark reserved")
EAGLE, COLUMN_IS_NULL = z3.Bools("drop_eagle column_is_null")


def cdiv(a: z3.ArithRef) -> z3.ArithRef:
    """Blocks that `a` tokens fill; z3's `/` rounds down for a positive divisor."""
    return (a + B - 1) / B


def number(condition: z3.BoolRef) -> z3.ArithRef:
    """1 where it holds, else 0."""
    return z3.If(condition, 1, 0)


def greatest(a: z3.ArithRef, b: z3.ArithRef | int) -> z3.ArithRef:
    """The greater of two."""
    return z3.If(a >= b, a, b)


class Encoding:
    """One release's step, for a request with or without a table.

    Args:
        release: One of `RELEASES`.
        admitted: Whether the request has a table, of the columns that its tokens fill, and S more.
    """

    def __init__(self, release: str, *, admitted: bool) -> None:
        self._caps_by_minimum = release != "0.30.0"
        self.admitted = admitted
        self.start = START if admitted else z3.IntVal(0)
        self.held = cdiv(START) + S if admitted else z3.IntVal(0)
        self.required = cdiv(END) + S
        self.reserves = self._reserves()
        self.checkpoint = z3.And(self.reserves, self._column_can_be_reserved())
        self.estimate = self._estimate()
        self.drawn, self.assertion_holds = self._allocation()
        self.need = self._need()
        self.assumptions = [
            *(B >= 1, H >= 1, B % H == 0, S >= 0, S <= 8, K >= 0, K <= 1, ALIGNMENT >= 1),
            *(LENGTH >= 1, FREE >= 0, WATERMARK >= 0, RESERVED >= 0, self.start < END),
            z3.Or(PREFILL_END == 0, self._caps_by_minimum and PREFILL_END == LENGTH),
            *([START >= 1, START < LENGTH] if admitted else []),
        ]

    def _reserves(self) -> z3.BoolRef:
        boundary = (END - 1) / H * H - z3.If(EAGLE, H, 0)
        position = greatest(boundary, 0)
        return z3.And(
            *(K > 0, END >= PREFILL_END, self.start % H == 0, cdiv(END) >= 2),
            *(self.start + H <= position, position < END),
            (position - self.start) % ALIGNMENT == 0,
            cdiv(END) - 2 > (self.start - 1) / B,
        )

    def _column_can_be_reserved(self) -> z3.BoolRef:
        column = cdiv(END) - 2
        is_speculative = z3.And(self.admitted, column >= self.held - S)
        return z3.Or(column >= self.held, COLUMN_IS_NULL, is_speculative)

    def _estimate(self) -> z3.ArithRef:
        missing, checkpoint = self.required - self.held, number(self.checkpoint)
        if self._caps_by_minimum:
            needs_all = self.checkpoint if self.admitted else True
            cap = 1 + checkpoint + z3.If(needs_all, S, 0)
            capped = z3.If(missing < cap, missing, cap)
        elif self.admitted:
            capped = z3.If(self.checkpoint, missing, 1)
        else:
            capped = 1 + checkpoint + S
        return z3.If(missing > 0, capped, missing)

    def _allocation(self) -> tuple[z3.ArithRef, z3.BoolRef]:
        checkpoint, skipped = number(self.checkpoint), self.required - S - 1
        padded = z3.If(self.held < skipped, greatest(self.held, skipped - checkpoint), self.held)
        movable = greatest(skipped - (self.held - S), 0)
        moves = z3.And(self.admitted, z3.Not(self.checkpoint))
        moved = z3.If(moves, z3.If(movable < S, movable, S), 0)
        new = greatest(self.required - padded - moved, 0)
        needs_all = z3.Or(not self.admitted, self.checkpoint)
        nothing = z3.And(self.required <= self.held, z3.Not(self.checkpoint))
        holds = z3.Or(nothing, new <= 1 + checkpoint + z3.If(needs_all, S, 0))
        return z3.If(nothing, 0, new), holds

    def _need(self) -> z3.ArithRef:
        state = number(cdiv(END) > cdiv(START)) if self.admitted else 1 + S
        return state + number(self.reserves)

    def violations(self) -> dict[str, z3.BoolRef]:
        """Formula of the steps that break each theorem, by slug; unsat is a proof."""
        passes = self.estimate + WATERMARK <= FREE - RESERVED
        goes_through = z3.And(self.assertion_holds, z3.Implies(passes, self.drawn <= FREE))
        as_intended = z3.And(self.estimate == self.need, self.drawn == self.need)
        claims = {
            "no-undercount": self.drawn <= self.estimate,
            "exact-estimate": self.estimate == self.drawn,
            "bounded-demand": self.estimate <= 1 + S + number(K > 0),
            "estimate-nonnegative": self.estimate >= 0,
            "allocation-succeeds": goes_through,
            "matches-intended": as_intended,
        }
        # The dry run differs from the estimate only in writing no checkpoint: one formula for both.
        parity = {"dry-run-parity": z3.BoolVal(False)}
        return parity | {slug: z3.Not(claim) for slug, claim in claims.items()}

    def numbers(self, values: Mapping[str, int | bool]) -> tuple[int, int, bool]:
        """Return estimate, drawn and whether a checkpoint is kept, for values by variable name."""
        sizes = (B, H, S, K, ALIGNMENT, START, END, PREFILL_END)
        pairs = [(v, z3.IntVal(values[str(v)])) for v in sizes]
        pairs += [(v, z3.BoolVal(values[str(v)])) for v in (EAGLE, COLUMN_IS_NULL)]
        outcome = (self.estimate, self.drawn, self.checkpoint)
        estimate, drawn, kept = (z3.simplify(z3.substitute(x, *pairs)) for x in outcome)
        return estimate.as_long(), drawn.as_long(), z3.is_true(kept)


def theorems() -> list[str]:
    """Return the slugs of the theorems that are transcribed."""
    return list(Encoding(RELEASES[0], admitted=False).violations())


def verdicts(release: str) -> dict[tuple[str, tuple[str, ...], str], str]:
    """Return PROVED, REFUTED or UNKNOWN by family, tags and theorem."""
    words = {"unsat": "PROVED", "sat": "REFUTED", "unknown": "UNKNOWN"}
    found = {}
    for family, tags in KINDS:
        encoding = Encoding(release, admitted=family != "first")
        reserves = family == "checkpoint" or "checkpoint" in tags
        solver = z3.SolverFor("QF_NIA")
        solver.add(*encoding.assumptions, encoding.reserves == reserves)
        for slug, violation in encoding.violations().items():
            solver.push()
            solver.add(violation)
            found[family, tags, slug] = words[str(solver.check())]
            solver.pop()
    return found


def main() -> None:
    release = sys.argv[1] if sys.argv[1:] else RELEASES[-1]
    if release not in RELEASES:
        sys.exit(f"{release} is not transcribed; one of {', '.join(RELEASES)}")
    started = time.perf_counter()
    for (family, tags, slug), verdict in verdicts(release).items():
        print(f"{verdict:8} {' '.join((family, *tags)):16} {slug}")
    print(f"{time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
