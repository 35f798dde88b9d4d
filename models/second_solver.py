"""A second opinion from another solver, on exported SMT-LIB 2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from models.smt import Answer

_PURIFIED = {"decision": "internal", "nl-ext-purify": "true"}
_TANGENTS = {"decision": "internal", "nl-ext-tplanes": "true", "simplification": "none"}
#: Options of cvc5's, and for how many seconds, attempt by attempt. Giving each product a name of
#: its own settles nearly all questions in a second; with its defaults cvc5 takes a hundred times as
#: long for some, or finds no end. It refuses to where the contents of a block table are looked up
#: by a product, which is an error and so UNKNOWN. What all attempts leave open is UNKNOWN, never
#: agreement.
ATTEMPTS: tuple[tuple[Mapping[str, str], float], ...] = (
    (_PURIFIED, 10.0),
    ({"decision": "justification"}, 20.0),
    (_TANGENTS, 20.0),
    ({**_PURIFIED, "decision": "justification"}, 60.0),
)


class SecondSolverMissing(Exception):
    """cvc5 is not installed; one line saying how to get it."""


def require() -> Any:
    """Return the module of the second solver.

    Raises:
        SecondSolverMissing: cvc5 is not installed.
    """
    try:
        import cvc5  # type: ignore[import-untyped]
    except ImportError:
        raise SecondSolverMissing(
            "--crosscheck needs a second solver: pip install cvc5==1.4.2 (make test does)"
        ) from None
    return cvc5


@cache
def ask(script: str) -> Answer:
    """Return what cvc5 says about an SMT-LIB 2 script with one ``check-sat``.

    Raises:
        SecondSolverMissing: cvc5 is not installed.
    """
    answers = (_attempt(script, *attempt) for attempt in ATTEMPTS)
    return next((answer for answer in answers if answer is not Answer.UNKNOWN), Answer.UNKNOWN)


def _attempt(script: str, options: Mapping[str, str], seconds: float) -> Answer:
    cvc5 = require()
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("tlimit-per", str(int(seconds * 1000)))
    for name, value in options.items():
        solver.setOption(name, value)
    parser = cvc5.InputParser(solver)
    text = f"(set-logic ALL)\n{script}"
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "question")
    said = ""
    while not (command := parser.nextCommand()).isNull():
        said = command.invoke(solver, parser.getSymbolManager()).strip() or said
    return {"sat": Answer.SAT, "unsat": Answer.UNSAT}.get(said, Answer.UNKNOWN)
