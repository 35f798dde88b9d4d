"""What a theorem, a family, a manager or an assumption says, as text."""

from __future__ import annotations

from spec.assumptions import (
    ASSUMPTIONS,
    OF_CLAIMS,
    OF_GROUPS,
    OF_SOME_RELEASES,
    OF_THE_COORDINATOR,
    OF_THE_GATE,
    Assumption,
)
from spec.families import FAMILIES, Family
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS, Theorem

_OF_SEVERAL = (*OF_GROUPS, *OF_THE_COORDINATOR)
_ALL_ASSUMPTIONS = (*ASSUMPTIONS, *OF_SOME_RELEASES, *OF_THE_GATE, *OF_CLAIMS, *_OF_SEVERAL)


def explanation(slug: str) -> str | None:
    """Return the text of a slug, None where nothing has that name."""
    if slug in THEOREMS:
        return _theorem(THEOREMS[slug])
    if slug in FAMILIES:
        return _family(FAMILIES[slug])
    if slug in MANAGERS:
        return f"{slug}: {MANAGERS[slug]}"
    if slug == "family":
        return (
            "family: The step belongs to the family of its obligation.\n\nA definition, not a rule."
        )
    return next((_assumption(a) for a in _ALL_ASSUMPTIONS if a.slug == slug), None)


def _theorem(theorem: Theorem) -> str:
    families = ", ".join(
        " with ".join((family, *tags))
        for family, tags in OBLIGATIONS
        if theorem.why_not(family, tags) is None
    )
    elsewhere = [f"Not the others: {theorem.not_elsewhere}."] if theorem.not_elsewhere else []
    scope = (
        "Steps that raise are covered too."
        if theorem.survives_exception
        else "Steps that raise are left to allocation-succeeds."
    )
    return "\n".join(
        (
            f"{theorem.slug}: {theorem.sentence}",
            "",
            theorem.unsat_iff,
            scope,
            f"Families: {families}.",
            *elsewhere,
            *(
                f"Not {family} with {tag}: {reason}."
                for (family, tag), reason in theorem.not_with.items()
                if theorem.why_not(family) is None
            ),
            f"Managers: {', '.join(theorem.managers)}.",
            f"Source: {theorem.source}.",
            "",
            "Assumptions:",
            *(
                f"  {assumption.slug}: {assumption.sentence}"
                f"{' (several groups)' if assumption in _OF_SEVERAL else ''}"
                for assumption in _ALL_ASSUMPTIONS
                if _is_in_force(assumption, theorem)
            ),
        )
    )


def _is_in_force(assumption: Assumption, theorem: Theorem) -> bool:
    if assumption in OF_CLAIMS:
        return assumption in theorem.premises
    is_of_groups = assumption in _OF_SEVERAL
    return (theorem.asks_gate or assumption not in OF_THE_GATE) and (
        not is_of_groups or "coordinator" in theorem.managers
    )


def _family(family: Family) -> str:
    tags = [" and ".join(tags) for slug, tags in OBLIGATIONS if slug == family.slug and tags]
    told_apart = f"\n\nTold apart: with {'; with '.join(tags)}." if tags else ""
    return f"{family.slug}: {family.sentence}{told_apart}"


def _assumption(assumption: Assumption) -> str:
    return f"{assumption.slug}: {assumption.sentence}\n\nKept by: {assumption.reason}."
