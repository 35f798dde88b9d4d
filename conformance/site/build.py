"""Put the site together: every page's text by its path, from verdicts and trees alone."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from conformance.expectations import cause, where
from conformance.explain import about_exceptions, assumptions_of, is_of_several_groups
from conformance.history import kinds_in_words
from conformance.obligations import Row, is_as_expected, project_version, summary
from conformance.render import TEMPLATES
from conformance.site import charts, guides, names, verdicts
from conformance.site.counterexamples import Counterexample, counterexamples, drivers_of, grouped
from conformance.site.formulas import WITNESS, formula_of
from conformance.site.least import ORDER
from conformance.site.lives import ABOUT_LIVES, example_of_a_life
from conformance.site.verdicts import Sheet
from conformance.targets import Tree
from models.smt import SOLVER_VERSION
from spec.families import FAMILIES
from spec.theorems import MANAGERS, OBLIGATIONS

_TEMPLATES = TEMPLATES / "site"


def build(
    rows: Sequence[Row],
    trees: Sequence[Tree],
    on_progress: Callable[[str], None] = lambda text: None,
    *,
    docs: Path = guides.DOCS,
) -> dict[str, str]:
    """Return the text of each file of the site, by its path.

    Args:
        rows: Verdicts of the targets.
        trees: The targets, whose managers replay the counterexamples.
        on_progress: Told what is being worked on.
        docs: Folder with the documentation.

    Raises:
        ScenarioError: A row's counterexample is no scenario.
    """
    pages = grouped(rows)
    sheets = verdicts.sheets(rows, pages)
    drivers = drivers_of(trees)
    on_progress("drawing charts")
    by_length = charts.estimate_by_length(drivers)
    by_target = charts.verdicts_by_target(rows)
    drawn = [*([by_length] if by_length else []), by_target, charts.time_by_family(rows)]
    guide_pages = guides.guides(docs)
    site = _Site(rows, has_guides=bool(guide_pages))
    files = {
        names.STYLE: (_TEMPLATES / names.STYLE).read_text(encoding="utf-8"),
        names.SCRIPT: (_TEMPLATES / names.SCRIPT).read_text(encoding="utf-8"),
        names.CHARTS: site.page("charts.html.jinja", names.CHARTS, charts=drawn),
    }
    life = example_of_a_life(docs, trees, drivers)
    for file, guide in guide_pages.items():
        pictures = [life] if life is not None and file == ABOUT_LIVES else []
        files[guide.path] = site.page("guide.html.jinja", guide.path, guide=guide, lives=pictures)
    found = guides.findings(docs) if guide_pages else {}
    for sheet in sheets:
        files[sheet.page] = _theorem(site, sheet, found.get(sheet.theorem.slug, []))
    for number, one in enumerate(counterexamples(pages, drivers), start=1):
        on_progress(f"counterexample {number} of {len(pages)}")
        driver = drivers[one.target]
        command = None if isinstance(driver, str) else one.standalone_command(driver)
        files |= _counterexample(site, one, command)
    files[names.INDEX] = site.page(
        "index.html.jinja",
        names.INDEX,
        sheets=sheets,
        totals=summary(rows),
        chart=by_length,
        counts=by_target,
        families=[slug for slug in FAMILIES if any(row["family"] == slug for row in rows)],
        managers=[slug for slug in MANAGERS if any(row["manager"] == slug for row in rows)],
        guides={
            guide_pages[file].path: text
            for file, text in guides.NAMED.items()
            if file in guide_pages
        },
    )
    return files


def _theorem(site: _Site, sheet: Sheet, found: Sequence[guides.Finding]) -> str:
    theorem = sheet.theorem
    assumptions = assumptions_of(theorem)
    numbers = {one.slug: number for number, one in enumerate(assumptions, start=1)}
    about = [kind for kind in OBLIGATIONS if theorem.why_not(*kind) is None]
    return site.page(
        "theorem.html.jinja",
        sheet.page,
        sheet=sheet,
        theorem=theorem,
        formula=formula_of(theorem.slug),
        witness=formula_of(theorem.slug, WITNESS),
        about_exceptions=about_exceptions(theorem),
        kinds=kinds_in_words(about),
        assumptions=assumptions,
        used_in=lambda row: in_ranges(
            numbers[slug] for slug in row["assumptions"] if slug in numbers
        ),
        is_of_several_groups=is_of_several_groups,
        used=sheet.used(assumptions),
        findings=found,
        causes=_causes(sheet),
    )


def in_ranges(found: Iterable[int]) -> str:
    """Return numbers in ascending order, neighbours as a range: `1-3, 7`."""
    ranges: list[list[int]] = []
    for number in sorted(set(found)):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in ranges)


def _causes(sheet: Sheet) -> dict[str, list[str]]:
    """Public reports, or causes, of refutations, each with the targets that it is given for."""
    found: dict[str, dict[str, None]] = {}
    for row in sheet.rows:
        if row["verdict"] == "REFUTED":
            kind = where(row["family"], row["tags"])
            said = cause(row["target"], row["manager"], kind, row["theorem"])
            if said is not None:
                found.setdefault(said, {})[row["target"]] = None
    return {said: list(targets) for said, targets in found.items()}


def _counterexample(site: _Site, one: Counterexample, command: str | None) -> dict[str, str]:
    return {
        f"{one.path}.html": site.page(
            "counterexample.html.jinja",
            f"{one.path}.html",
            one=one,
            picture=Markup(one.picture),
            standalone=command,
            order=ORDER,
        ),
        one.file: one.text,
        **{at_scale.file: at_scale.text for at_scale in one.at_production_sizes},
    }


class _Site:
    """What all pages share."""

    def __init__(self, rows: Sequence[Row], *, has_guides: bool) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_TEMPLATES),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=True,
        )
        self._environment.filters |= {"short": names.short, "listed": names.listed}
        self._shared: dict[str, Any] = {
            "targets": list(dict.fromkeys(row["target"] for row in rows)),
            "versions": f"capproof {project_version()}, z3 {SOLVER_VERSION}",
            "surprises": sum(not is_as_expected(row) for row in rows),
            "has_guides": has_guides,
            "safe": Markup,
            "words": verdicts.WORDS,
            "of_theorem": names.of_theorem,
            "of_doc": names.of_doc,
        }

    def page(self, template: str, path: str, **content: Any) -> str:
        """Return a page's text.

        Args:
            template: Its template.
            path: Its path, from which links start.
            content: What the template is told.
        """
        folder = posixpath.dirname(path)

        def link(to: str) -> str:
            to, hash_sign, place = to.partition("#")
            return posixpath.relpath(to, folder or ".") + hash_sign + place

        made = self._environment.get_template(template)
        return made.render(**self._shared, **content, link=link, path=path)
