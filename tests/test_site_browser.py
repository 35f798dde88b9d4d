"""The report in a real headless browser, the one that the machine has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from site_rows import TARGETS, site

from conformance.site import names, output

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Set by `.ci/run` where it could not install one: why.
_WHY_NONE = "CAPPROOF_NO_BROWSER"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of a few rows, written."""
    out = tmp_path_factory.mktemp("site")
    output.write(site(), out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The machine's browser; a CI that has none, and does not say why, fails."""
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        why = os.environ.get(_WHY_NONE)
        if os.environ.get("CI") and not why:
            pytest.fail("no browser in CI: install chromium")
        pytest.skip(why or "no browser on this machine: install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page of phone width; what it writes to the console is an error."""
    context = browser.new_context(viewport={"width": 360, "height": 740})
    opened, complaints = context.new_page(), []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("requestfailed", lambda request: complaints.append(f"{request.url} is missing"))
    yield opened
    context.close()
    assert complaints == []


def at(folder: Path, path: str) -> str:
    """The address of a file of the site."""
    name, hash_sign, place = path.partition("#")
    return (folder / name).as_uri() + hash_sign + place


def shown_verdicts(page: Any) -> list[str]:
    """The verdicts that can be seen."""
    cells = page.locator(".matrix td:not(:empty)").all()
    return [cell.inner_text() for cell in cells if cell.is_visible()]


def choose(page: Any, name: str, typed: str) -> None:
    """Choose in a filter by keyboard alone: tab to it from the page's top, and type."""
    page.evaluate("document.activeElement.blur()")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == name:
            page.keyboard.type(typed)
            return
    raise AssertionError(f"{name} is not reached by keyboard")


def test_no_page_complains_or_scrolls_sideways_on_a_phone(page: Any, folder: Path) -> None:
    """At 360 pixels each page fits, and none writes to the console or misses a file."""
    wide = []
    for file in sorted(folder.rglob("*.html")):
        page.goto(file.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        wide += [(file.name, width)] if width > 360 else []

    assert wide == []


def test_all_is_shown_until_it_is_filtered(page: Any, folder: Path) -> None:
    """The first page begins with every theorem, folded, and says how many verdicts there are."""
    page.goto(at(folder, names.INDEX))

    assert page.locator("#shown").inner_text() == "10 verdicts of 3 theorems"
    assert page.locator("details.sheet:visible").count() == 3
    assert shown_verdicts(page) == []


@pytest.mark.parametrize(
    ("name", "typed", "number", "seen"),
    [
        ("verdict", "ref", 2, {"✗ refuted"}),
        ("family", "check", 4, {"✓ proved", "✗ refuted"}),
        ("theorem", "removal", 2, {"\N{EN DASH} not about it"}),
        ("manager", "mamba", 10, {"✓ proved", "✗ refuted", "\N{EN DASH} not about it"}),
    ],
)
def test_the_matrix_is_filtered_by_keyboard(
    page: Any, folder: Path, name: str, typed: str, number: int, seen: set[str]
) -> None:
    """A filter is reached by tabbing and set by typing; what is left is shown, unfolded."""
    page.goto(at(folder, names.INDEX))
    choose(page, name, typed)

    assert page.locator("#shown").inner_text().startswith(f"{number} verdicts")
    found = shown_verdicts(page)
    assert len(found) == number
    assert set(found) == seen


def test_going_to_the_content_keeps_the_filters(page: Any, folder: Path) -> None:
    """The link past the head of the page says nothing of what is chosen."""
    page.goto(at(folder, f"{names.INDEX}#verdict=refuted"))
    before = shown_verdicts(page)
    page.locator("a.skip").focus()
    page.keyboard.press("Enter")

    assert page.url.endswith("#content")
    assert shown_verdicts(page) == before != []


def test_filters_go_together_and_are_kept_in_the_address(page: Any, folder: Path) -> None:
    """A release and a verdict are chosen at once, found again by the address, and taken back."""
    page.goto(at(folder, names.INDEX))
    choose(page, "release", "0.31")
    assert page.locator("details.sheet .chip:visible").count() == 3
    choose(page, "verdict", "proved")
    assert len(shown_verdicts(page)) == 4
    assert page.url.endswith("#release=vllm%3D%3D0.31.0&verdict=proved")

    page.reload()
    assert len(shown_verdicts(page)) == 4
    choose(page, "verdict", "ref")
    assert shown_verdicts(page) == []
    assert page.locator("#nothing").is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('shown').value.startsWith('10 ')")
    assert "#" not in page.url


def test_a_counterexample_opens_from_its_cell(page: Any, folder: Path) -> None:
    """Enter on a refuted cell opens the page with the steps and the picture of the block table."""
    page.goto(at(folder, f"{names.INDEX}#verdict=refuted"))
    page.locator(".matrix td.refuted a:visible").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/counterexamples/**")

    assert TARGETS[0] in page.locator("h1").inner_text()
    picture = page.locator("svg.capproof-picture")
    assert picture.is_visible()
    assert "breaks exact-estimate" in picture.locator("desc").text_content()


def test_the_page_works_without_script(browser: Any, folder: Path) -> None:
    """Without script the filters are gone, and every theorem can be unfolded."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(at(folder, names.INDEX))

    assert not page.locator("#filters").is_visible()
    page.locator("details.sheet summary").first.click()
    assert len(shown_verdicts(page)) == 4
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(browser: Any, folder: Path, scheme: str) -> None:
    """Text and paper differ in brightness by far, and pictures follow the scheme of the page."""
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(sorted((folder / "counterexamples").glob("*.html"))[0].as_uri())
    style = "(one, what) => getComputedStyle(document.querySelector(one))[what]"
    paper, ink, drawn = (
        sum(map(int, value[value.index("(") + 1 : -1].split(",")[:3]))
        for value in (
            page.evaluate(f"({style})('body', 'backgroundColor')"),
            page.evaluate(f"({style})('body', 'color')"),
            page.evaluate(f"({style})('.capproof-paper', 'fill')"),
        )
    )
    context.close()

    assert abs(paper - ink) > 450
    assert abs(paper - drawn) < 60


def test_pages_print(page: Any, folder: Path) -> None:
    """Printed, the first page and a counterexample are documents with something on them."""
    for file in (folder / names.INDEX, *sorted((folder / "counterexamples").glob("*.html"))):
        page.goto(file.as_uri())
        printed = page.pdf()

        assert printed.startswith(b"%PDF")
        assert len(printed) > 10_000
