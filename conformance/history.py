"""Where claims are expected to be refuted, in few words: releases as ranges, kinds as families."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from conformance.expectations import expectations, where
from conformance.targets import KNOWN_RELEASES
from spec.theorems import OBLIGATIONS, THEOREMS

#: A family with its tags.
Kind = tuple[str, tuple[str, ...]]
_Releases = tuple[str, ...]
_Name = TypeVar("_Name")


def refutations(theorem: str) -> list[str]:
    """Return where a theorem is expected to be refuted: releases, managers and kinds of step.

    Args:
        theorem: A slug of the catalogue.

    Returns:
        A line for each group of kinds that share their releases and managers.
    """
    about = [kind for kind in OBLIGATIONS if THEOREMS[theorem].why_not(*kind) is None]
    managers = THEOREMS[theorem].managers
    found = _grouped((kind, {m: _releases(m, kind, theorem) for m in managers}) for kind in about)
    return [f"{place}: {kinds_in_words(kinds, about)}" for place, kinds in found]


def refuted_in(family: str) -> list[str]:
    """Return which theorems are expected to be refuted in steps of a family, and where.

    Args:
        family: Slug of the family.

    Returns:
        A line for each group of theorems that share their releases and managers.
    """
    found = _grouped(
        (slug, {m: _releases_of_any(m, family, slug) for m in theorem.managers})
        for slug, theorem in THEOREMS.items()
    )
    return [f"{place}: {', '.join(slugs)}" for place, slugs in found]


def kinds_in_words(kinds: Collection[Kind], about: Collection[Kind] = OBLIGATIONS) -> str:
    """Return kinds of step as a list of families, `*` standing for any tags.

    Args:
        kinds: Families with tags.
        about: All that could be among them.
    """
    if set(kinds) == set(OBLIGATIONS):
        return "all kinds of step"
    return ", ".join(
        _of_family(family, kinds, about) for family in dict.fromkeys(f for f, _ in kinds)
    )


def releases_in_words(releases: Collection[str]) -> str:
    """Return releases as ranges of known ones."""
    ranges: list[list[str]] = []
    for i, release in enumerate(KNOWN_RELEASES):
        if release not in releases:
            continue
        if ranges and i > 0 and ranges[-1][-1] == KNOWN_RELEASES[i - 1]:
            ranges[-1].append(release)
        else:
            ranges.append([release])
    return ", ".join(r[0] if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in ranges)


def _of_family(family: str, kinds: Collection[Kind], about: Collection[Kind]) -> str:
    chosen = [kind for kind in kinds if kind[0] == family]
    possible = [kind for kind in about if kind[0] == family]
    if len(chosen) == len(possible) > 1:
        return f"{family}*"
    return ", ".join(where(*kind) for kind in chosen)


def _grouped(found: Iterable[tuple[_Name, dict[str, _Releases]]]) -> list[tuple[str, list[_Name]]]:
    """Put together what is refuted in the same releases and managers, in the order of the first."""
    groups: dict[str, list[_Name]] = {}
    for name, by_manager in found:
        if any(by_manager.values()):
            groups.setdefault(_place(by_manager), []).append(name)
    return list(groups.items())


def _place(by_manager: dict[str, _Releases]) -> str:
    """Releases, and the manager where they are not the same for all that a theorem is about."""
    if len(set(by_manager.values())) == 1:
        return releases_in_words(next(iter(by_manager.values())))
    shown = [(manager, releases) for manager, releases in by_manager.items() if releases]
    return "; ".join(f"{releases_in_words(releases)} ({manager})" for manager, releases in shown)


def _releases_of_any(manager: str, family: str, theorem: str) -> _Releases:
    kinds = [kind for kind in OBLIGATIONS if kind[0] == family]
    found = {release for kind in kinds for release in _releases(manager, kind, theorem)}
    return tuple(release for release in KNOWN_RELEASES if release in found)


def _releases(manager: str, kind: Kind, theorem: str) -> _Releases:
    known = expectations()
    return tuple(
        release
        for release in KNOWN_RELEASES
        if known.get((f"vllm=={release}", manager, where(*kind), theorem)) == "REFUTED"
    )
