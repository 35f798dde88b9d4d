"""The picture of a life on the page about lives: the example, lived on one of the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.driver import Driver, DriverError
from conformance.life import Life
from conformance.life_files import NOT_LIVED, LifeSeen, load, run_life
from conformance.life_picture import life_pictures
from conformance.site import names
from conformance.svg import svg_of_all
from conformance.targets import KNOWN_RELEASES, Tree

#: The page, and the life, below the documentation.
ABOUT_LIVES, EXAMPLE = "lives.md", "examples/life.json"


@dataclass(frozen=True)
class LifeDrawn:
    """A life on a target."""

    words: str
    """What is seen of it."""
    svg: str


def example_of_a_life(
    docs: Path, trees: Sequence[Tree], drivers: Mapping[str, Driver | str]
) -> LifeDrawn | None:
    """Return the example on the first release that breaks a check in it, else on the first.

    Args:
        docs: Folder with the documentation.
        trees: The targets; only known releases are lived on.
        drivers: By target, what builds its managers, or why nothing can be built.

    Returns:
        None where there is no example, or no release that lives are described for.
    """
    file = docs / EXAMPLE
    if not file.is_file():
        return None
    life = load(file)
    seen = [(tree.target, _seen(life, tree, drivers[tree.target])) for tree in trees]
    lived = [(target, found) for target, found in seen if found is not None]
    broken = [(target, found) for target, found in lived if found.violations]
    for target, found in (broken or lived)[:1]:
        checks = ", ".join(dict.fromkeys(v.theorem for v in found.violations)) or "no check"
        words = f"{EXAMPLE} on {names.short(target)}, which breaks {checks}: a table for each "
        words += "request, and a row for each rule that touched it."
        svg = svg_of_all(f"{file.name} on {target}", life_pictures(found.requests))
        return LifeDrawn(words, svg)
    return None


def _seen(life: Life, tree: Tree, driver: Driver | str) -> LifeSeen | None:
    if isinstance(driver, str) or tree.release not in set(KNOWN_RELEASES) - set(NOT_LIVED):
        return None
    try:
        return run_life(driver, life, tree.target, with_tables=True)
    except DriverError:
        return None
