"""What a theorem, a family, a manager, an assumption or a verdict says, as text on one screen."""

from __future__ import annotations

import difflib
import textwrap

from conformance.history import kinds_in_words, refutations, refuted_in
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


#: Columns of a list that is broken into lines.
_WIDTH = 100
#: Names that an unknown one is told.
_NUM_NEAREST = 3

_NEVER_EXPECTED = "It cannot be expected of any release: the exit status is 1 wherever it comes up."
#: What a verdict says, and what follows from it.
VERDICTS: dict[str, tuple[str, str]] = {
    "PROVED": (
        "No step of this kind breaks the claim, for all sizes of the scope that is given.",
        "Every path of the release's own source was asked for a step that keeps the assumptions "
        "and breaks the claim, and there is none; and the interesting case does occur. "
        "Nothing else is shown as a pass. `capproof prove --crosscheck` asks a second solver.",
    ),
    "REFUTED": (
        "A step breaks the claim, and here are its numbers.",
        "The counterexample was made least, evaluated again in plain Python and replayed on the "
        "real manager; `capproof replay FILE --draw` shows it. The exit status is 1 unless "
        "spec/expectations.toml, or the target of --against, has it too.",
    ),
    "UNKNOWN": (
        "The solver neither found a step that breaks the claim nor that there is none.",
        "The row gives its reason and its budget. Where all steps of small sizes were looked at, "
        f"the row says so: evidence, and no proof. {_NEVER_EXPECTED}",
    ),
    "UNSUPPORTED": (
        "The source uses something that the lifter does not understand; nothing is known.",
        f"The row names the construct, the file and the line. {_NEVER_EXPECTED}",
    ),
    "VACUOUS": (
        "No step breaks the claim, but the case that it is about cannot occur.",
        "Such a proof says nothing: a premise excludes too much, or the source no longer does what "
        f"the claim is about. {_NEVER_EXPECTED}",
    ),
    "NOT_APPLICABLE": (
        "The claim is not about such steps, or the release has none; the row gives the reason.",
        "It counts neither as a pass nor as a failure.",
    ),
}
_FAMILY = "The step belongs to the family of its obligation."


def explanation(slug: str) -> str | None:
    """Return the text of a slug or a verdict, None where nothing has that name."""
    if slug in THEOREMS:
        return _theorem(THEOREMS[slug])
    if slug in FAMILIES:
        return _family(FAMILIES[slug])
    if slug in MANAGERS:
        return f"{slug}: {MANAGERS[slug]}"
    if slug in VERDICTS:
        sentence, follows = VERDICTS[slug]
        return f"{slug}: {sentence}\n\n{textwrap.fill(follows, _WIDTH)}"
    if slug == "family":
        return f"family: {_FAMILY}\n\nA definition, not a rule."
    return next((_assumption(a) for a in _ALL_ASSUMPTIONS if a.slug == slug), None)


def nearest(slug: str) -> list[str]:
    """Return the names that look most like one that is none, the nearest first."""
    names = [*THEOREMS, *FAMILIES, *MANAGERS, *VERDICTS, *(a.slug for a in _ALL_ASSUMPTIONS)]
    folded = {name.lower(): name for name in names}
    found = difflib.get_close_matches(slug.lower()[:100], folded, _NUM_NEAREST, cutoff=0)
    return [folded[name] for name in found]


def _theorem(theorem: Theorem) -> str:
    about = [kind for kind in OBLIGATIONS if theorem.why_not(*kind) is None]
    elsewhere = [f"Not the others: {theorem.not_elsewhere}."] if theorem.not_elsewhere else []
    in_force = [
        f"{assumption.slug}{' (several groups)' if is_of_several_groups(assumption) else ''}"
        for assumption in assumptions_of(theorem)
    ]
    return "\n".join(
        (
            f"{theorem.slug}: {theorem.sentence}",
            "",
            theorem.unsat_iff,
            about_exceptions(theorem),
            *_listed(f"Families: {kinds_in_words(about)}.{_star(kinds_in_words(about))}", ""),
            *elsewhere,
            *(
                f"Not {family} with {tag}: {reason}."
                for (family, tag), reason in theorem.not_with.items()
                if theorem.why_not(family) is None
            ),
            f"Managers: {', '.join(theorem.managers)}.",
            f"Source: {theorem.source}.",
            "",
            *_refuted("Expected to be refuted in", refutations(theorem.slug)),
            "",
            "Assumptions (`capproof explain` each):",
            *_listed(", ".join(in_force)),
        )
    )


def assumptions_of(theorem: Theorem) -> list[Assumption]:
    """Return what may be in force where a theorem is proved, by release and kind of step."""
    return [one for one in _ALL_ASSUMPTIONS if _is_in_force(one, theorem)]


def is_of_several_groups(assumption: Assumption) -> bool:
    """Return whether an assumption is in force only where several groups share a pool."""
    return assumption in _OF_SEVERAL


def about_exceptions(theorem: Theorem) -> str:
    """Return in a sentence whether a theorem says something of steps that raise."""
    if theorem.survives_exception:
        return "Steps that raise are covered too."
    return "Steps that raise are left to allocation-succeeds."


def _refuted(head: str, lines: list[str]) -> list[str]:
    """Where something is refuted in known releases, below a head."""
    if not lines:
        return [f"{head} no known release."]
    broken = [part for line in lines for part in _listed(line)]
    return [f"{head}:{_star(''.join(lines))}", *broken]


def _star(text: str) -> str:
    return " (* is with any tags.)" if "*" in text else ""


def _listed(text: str, indent: str = "  ") -> list[str]:
    """A text in lines, names whole."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
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
    told_apart = [f"Told apart: with {'; with '.join(tags)}.", ""] if tags else []
    return "\n".join(
        (
            f"{family.slug}: {family.sentence}",
            "",
            *told_apart,
            *_refuted("Claims about it are expected to be refuted in", refuted_in(family.slug)),
        )
    )


def _assumption(assumption: Assumption) -> str:
    return f"{assumption.slug}: {assumption.sentence}\n\nKept by: {assumption.reason}."
