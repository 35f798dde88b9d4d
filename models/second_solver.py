"""A second opinion from another solver, on exported SMT-LIB 2."""

from __future__ import annotations

from functools import cache

from models.smt import Answer

#: Milliseconds per question; a question that takes longer is UNKNOWN, never agreement.
TIME_LIMIT_MS = 60_000


class SecondSolverMissing(Exception):
    """cvc5 is not installed; one line saying how to get it."""


@cache
def ask(script: str) -> Answer:
    """Return what cvc5 says about an SMT-LIB 2 script with one ``check-sat``.

    Raises:
        SecondSolverMissing: cvc5 is not installed.
    """
    try:
        import cvc5  # type: ignore[import-untyped]
    except ImportError:
        raise SecondSolverMissing(
            "--crosscheck needs a second solver: pip install cvc5==1.4.2 (make test does)"
        ) from None
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("tlimit-per", str(TIME_LIMIT_MS))
    parser = cvc5.InputParser(solver)
    text = f"(set-logic ALL)\n{script}"
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "question")
    said = ""
    while not (command := parser.nextCommand()).isNull():
        said = command.invoke(solver, parser.getSymbolManager()).strip() or said
    return {"sat": Answer.SAT, "unsat": Answer.UNSAT}.get(said, Answer.UNKNOWN)
