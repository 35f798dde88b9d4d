"""What a verdict is to a CI service, and the same words for it in every report.

Nothing but PROVED is shown as a pass; a refutation that is expected is shown as what it is.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from enum import Enum

from conformance.expectations import where
from conformance.obligations import NOT_APPLICABLE, Row, is_as_expected
from conformance.report import counterexample_line

#: What `--crosscheck` says where it confirms a verdict.
_CONFIRMED = "agrees"


class Outcome(Enum):
    """What a verdict is to a CI service."""

    PASSED = "passed"
    """PROVED, and nothing else was expected."""
    KNOWN = "known"
    """REFUTED, as expected: no pass, and no reason to stop a merge."""
    NOT_ABOUT = "not about"
    """NOT_APPLICABLE, as expected."""
    FAILED = "failed"
    """Another verdict than the expected one: a fault that is new, or one that is gone."""
    UNDECIDED = "undecided"
    """UNKNOWN, UNSUPPORTED or VACUOUS, or a verdict that a second check does not confirm."""


_DECIDED = {
    "PROVED": Outcome.PASSED,
    "REFUTED": Outcome.KNOWN,
    NOT_APPLICABLE: Outcome.NOT_ABOUT,
}


def outcome(row: Row) -> Outcome:
    """Return what a row is to a CI service."""
    decided = _DECIDED.get(row["verdict"])
    if decided is None:
        return Outcome.UNDECIDED
    if not is_as_expected(row):
        return Outcome.FAILED
    is_checked = "crosscheck" in row and row["verdict"] != NOT_APPLICABLE
    return Outcome.UNDECIDED if is_checked and row["crosscheck"] != _CONFIRMED else decided


def needs_attention(row: Row) -> bool:
    """Whether a row makes the exit status 1."""
    return outcome(row) in (Outcome.FAILED, Outcome.UNDECIDED)


def kind(row: Row) -> str:
    """Return the kind of step, `first+checkpoint`, behind the manager where that is another."""
    return where(row["family"], row["tags"])


def said(row: Row) -> str:
    """Return the verdict in one line, and what it should be, or why it is what it is."""
    found = outcome(row)
    text = str(row["verdict"])
    if found is Outcome.KNOWN:
        text += " as expected"
    elif found is Outcome.FAILED:
        text += f", expected {row['expected'] or 'PROVED'}"
    if found is Outcome.UNDECIDED and row["verdict"] in _DECIDED:
        text += f", not confirmed by the second check ({row['crosscheck'] or 'nothing to check'})"
    return ": ".join([text, *_why(row)])


def _why(row: Row) -> list[str]:
    if row["scenario"] is None:
        return [str(row["reason"])] if row["reason"] else []
    numbers = counterexample_line(row["scenario"], row["target"])
    is_shown = row["replay"] in (None, "reproduced")
    return [numbers if is_shown else f"{numbers} (NOT shown by the real code: {row['replay']})"]


def production_sizes(row: Row) -> str | None:
    """Return the counterexample's numbers at sizes that people run, None where there is none."""
    scenario = row["scenario_at_production_sizes"]
    return None if scenario is None else counterexample_line(scenario, row["target"])


def prove_command(row: Row) -> str:
    """Return the command that settles this obligation alone, wherever the target is at hand."""
    named = [(f"--{of}", row[of]) for of in ("target", "manager", "family", "theorem")]
    return shlex.join(["capproof", "prove", *(part for pair in named for part in pair)])


def advice(
    rows: Sequence[Row], replay_paths: Mapping[tuple[str, str], str] | None = None
) -> str | None:
    """Return one line that says what to do about what is not as expected, None where all is.

    Args:
        rows: Verdicts; the first that needs attention is what the line is about, a new refutation
            before any other.
        replay_paths: Scenario file by target and scenario name.
    """
    row = first_to_look_at(rows)
    if row is None:
        return None
    about = f"{row['theorem']} in {kind(row)} on {row['target']}"
    if outcome(row) is Outcome.UNDECIDED:
        return f"what to do: {about} is {said(row)}; see `capproof explain {row['verdict']}`"
    if row["verdict"] == "REFUTED":
        look = _replay_command(row, replay_paths or {}) or prove_command(row)
        return (
            f"what to do: {about} is broken; see it with `{look}`; then mend the code, or "
            "name with --against a tree that has the same fault"
        )
    return (
        f"what to do: {about} is {row['verdict']} now, no longer {row['expected']}; if that is "
        "meant, change what is expected (spec/expectations.toml, or the tree of --against)"
    )


def _replay_command(row: Row, paths: Mapping[tuple[str, str], str]) -> str | None:
    path = row["scenario"] and paths.get((row["target"], row["scenario"]["name"]))
    if path is None:
        return None
    return shlex.join(["capproof", "replay", "--target", row["target"], "--draw", path])


def first_to_look_at(rows: Sequence[Row]) -> Row | None:
    """Return the row that a person should look at first: a new refutation before any other."""
    wanted = [row for row in rows if needs_attention(row)]
    refuted = [row for row in wanted if row["verdict"] == "REFUTED"]
    return next(iter(refuted or wanted), None)


def surprises(rows: Sequence[Row]) -> list[list[Row]]:
    """Return what needs attention, new refutations first.

    Rows of a target that share a verdict and a reason, and have no numbers of their own, stand
    together: what cannot be lifted is seldom seen by one obligation alone.
    """
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if needs_attention(row):
            alone = None if row["reason"] and row["scenario"] is None else id(row)
            found.setdefault((row["target"], said(row), alone), []).append(row)
    return sorted(found.values(), key=lambda together: together[0]["verdict"] != "REFUTED")


def obligations_of(rows: Sequence[Row]) -> str:
    """Return in words which obligations of a target rows that stand together are."""
    row = rows[0]
    others = f" and {len(rows) - 1} other obligations" if len(rows) > 1 else ""
    return f"{row['theorem']} in {kind(row)} ({row['manager']}){others} on {row['target']}"


def printable(text: str, kept: str = "\n") -> str:
    r"""Return text in which whatever cannot be printed is escaped, as in `\x1b`.

    XML 1.0 and UTF-8 have no way to say some characters; others would hide what stands beside them.

    Args:
        text: Any text.
        kept: Unprintable characters that stay.
    """
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
    return "".join(shown)
