from __future__ import annotations

import html
import json
import os
import posixpath
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from site_rows import COUNTEREXAMPLE, TARGETS, pages, row, rows, scenario, site, trees

from conformance import cli
from conformance.commands import report
from conformance.expectations import cause
from conformance.scenario import ScenarioError, loads
from conformance.site import charts, guides, names, output
from conformance.site.build import build
from conformance.site.counterexamples import drivers_of
from conformance.site.formulas import CLAIM, WITNESS, formula_of
from conformance.site.least import GROUPS
from conformance.site.lives import example_of_a_life
from conformance.targets import resolve
from models import prove
from spec.theorems import THEOREMS


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """A site of a few rows."""
    return site()


def counterexample(files: dict[str, str]) -> str:
    (path,) = (path for path in files if re.match(r"counterexamples/.*\.html", path))
    return path


def test_a_site_has_a_page_for_each_theorem_and_each_counterexample(files: dict[str, str]) -> None:
    """There is a first page, charts, a page per theorem and one per distinct counterexample."""
    assert {names.INDEX, names.CHARTS, names.STYLE, names.SCRIPT} <= files.keys()
    assert [path for path in files if path.startswith("theorems/")] == [
        f"theorems/{slug}.html"
        for slug in ("exact-estimate", "bounded-demand", "removal-keeps-state")
    ]
    page = counterexample(files)
    assert [path for path in files if path.startswith("counterexamples/")] == [
        page,
        page.replace(".html", ".json"),
        page.replace(".html", "-at-production-sizes-1.json"),
    ]
    (kept,) = loads(files[page.replace(".html", ".json")], name="kept")
    assert kept.name == COUNTEREXAMPLE


def test_a_counterexample_is_told_in_order(files: dict[str, str]) -> None:
    """Result, claims, steps, actual and expected, picture, why it is minimal, how to reproduce."""
    text = files[counterexample(files)]
    told = (
        "✗ refuted",
        "estimate 3, drawn 2, needed 2",
        "The claims",
        "Steps",
        "Actual and expected",
        "✗ differs",
        'class="capproof-picture"',
        "Why it is minimal",
        f"capproof replay counterexamples/{COUNTEREXAMPLE}",
        "gen-tests --standalone",
    )
    places = [text.find(one) for one in told]

    assert -1 not in places
    assert places == sorted(places)
    assert "bounded-demand" in text


def test_cells_lead_to_counterexamples_and_to_rows(files: dict[str, str]) -> None:
    """A refuted cell leads to its counterexample, a kind of step to its place in the theorem."""
    cell = re.compile(r'<td class="([\w-]+)">(?:<a href="([^"]+)">)?(.) ([^<]+)(?:</a>)?</td>')
    found = cell.findall(files[names.INDEX])
    heads = re.findall(r'<th scope="row"><a href="([^"]+)">', files[names.INDEX])

    assert {(kind, sign, word) for kind, _, sign, word in found} == {
        ("proved", "✓", "proved"),
        ("refuted", "✗", "refuted"),
        ("not-applicable", "\N{EN DASH}", "not about it"),
    }
    assert {href for kind, href, *_ in found if kind == "refuted"} == {counterexample(files)}
    assert {href for kind, href, *_ in found if kind != "refuted"} == {""}
    assert heads
    assert all(re.fullmatch(r"theorems/[\w-]+\.html#[\w-]+", href) for href in heads)


def test_releases_that_a_claim_is_not_about_for_one_reason_share_a_row() -> None:
    """Neighbours are named as a range; another reason, and a verdict, have rows of their own."""
    said = ["no blocks", "no blocks", "no hits", None]
    found = [
        row(
            f"vllm==0.{24 + i}.0",
            "hit-full",
            "no-undercount",
            "NOT_APPLICABLE" if reason else "PROVED",
            reason=reason,
        )
        for i, reason in enumerate(said)
    ]

    page = build(found, [])[names.of_theorem("no-undercount")]

    assert re.findall(r"<td>(0\.[^<]*)</td>", page) == ["0.24.0 to 0.25.0", "0.26.0", "0.27.0"]


def test_every_link_leads_somewhere_and_every_place_is_named_once(files: dict[str, str]) -> None:
    """Each relative link is a file of the site, each place in a link stands on its page."""
    seen = pages(files)
    broken = []
    for page in seen.values():
        assert len(set(page.ids)) == len(page.ids), page.path
        for link in page.links:
            if re.match("https?://", link):
                continue
            path, _, place = link.partition("#")
            to = posixpath.normpath(posixpath.join(posixpath.dirname(page.path), path or page.path))
            to = page.path if not path else to
            if to not in files or (place and place not in seen[to].ids):
                broken.append((page.path, link))

    assert broken == []


def test_nothing_is_fetched_and_nothing_foreign_runs(files: dict[str, str]) -> None:
    """Pages forbid all but the site's own script and styles, and name no address to load."""
    for page in pages(files).values():
        assert ("meta", "http-equiv", "Content-Security-Policy") in page.attributes
        loaded = [
            v
            for tag, name, v in page.attributes
            if name == "src" or (tag, name) == ("link", "href")
        ]
        assert all(re.fullmatch(r"(\.\./)*site\.(js|css)", one) for one in loaded), page.path
    for path, text in files.items():
        if not path.startswith("docs/"):
            assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/)", text), path


def test_hostile_texts_stay_texts(files: dict[str, str]) -> None:
    """Markup, long numbers and paths in texts neither run nor leave the folder."""
    bad = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    target = f"path:/../../{bad}"
    known = scenario()
    steps = [{**step, "why": bad} for step in known["steps"]]
    steps[-1] |= {"num_tokens": 2**53, "num_tokens_main_model": 2**53}
    prediction = known["predicted"][TARGETS[0]]
    hostile = scenario(source=bad, steps=steps, predicted={target: {**prediction, "drawn": 2**53}})
    given = [
        row(target, "checkpoint", "exact-estimate", "REFUTED", scenario=hostile, replay=bad),
        row(target, "running", "exact-estimate", "UNSUPPORTED", reason=bad, scope=bad),
        row(target, "first", "exact-estimate", "NOT_APPLICABLE", reason=bad, expected=bad),
    ]
    made = site(given, [replace(trees()[0], target=target)])

    assert all(re.fullmatch(r"[a-z0-9/-]+\.(html|json|css|js)", path) for path in made)
    for page in pages(made).values():
        assert page.tags.count("script") == (page.path == names.INDEX), page.path
        assert "img" not in page.tags
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in pages(made)[counterexample(made)].text


@pytest.mark.parametrize("name", ["<b>", "../../outside", "a" * 10_000])
def test_a_scenario_that_is_none_is_refused(name: str) -> None:
    """A counterexample whose name is no slug is refused, not drawn."""
    given = [
        row(TARGETS[0], "checkpoint", "exact-estimate", "REFUTED", scenario=scenario(name=name))
    ]

    with pytest.raises(ScenarioError, match="counterexample in"):
        site(given)


def test_same_rows_give_the_same_bytes(files: dict[str, str]) -> None:
    """A second run writes what the first one wrote."""
    assert site() == files


def test_a_verdict_that_is_not_expected_is_marked() -> None:
    """What is not as expected, or undecided, is said by a sign and in words."""
    given = [
        row(TARGETS[0], "running", "exact-estimate", "UNKNOWN", expected="PROVED", reason="gave up")
    ]
    made = site(given)

    assert 'class="odd unexpected"' in made[names.INDEX]
    assert "! expected PROVED" in made["theorems/exact-estimate.html"]
    assert "gave up" in made["theorems/exact-estimate.html"]


def test_the_line_of_the_fault_takes_off() -> None:
    """The chart shows what the real managers say: 761 blocks in 0.30.0, and 2 in 0.31.0."""
    chart = charts.estimate_by_length(drivers_of(trees()))

    assert chart is not None
    assert chart.head == (
        "tokens",
        "estimate, 0.30.0",
        "estimate, 0.31.0",
        "drawn, 0.30.0 to 0.31.0",
    )
    assert ("704,547", "761", "2", "2") in chart.lines
    assert "<script" not in chart.svg
    assert 'role="img"' in chart.svg


@pytest.mark.parametrize("slug", THEOREMS)
def test_formulas_are_those_of_the_catalogue(slug: str) -> None:
    """A theorem's formulas are Python, with every function of the catalogue that they call."""
    for position in (CLAIM, WITNESS):
        text = formula_of(slug, position)
        called = set(re.findall(r"\b(_[a-z_]+)\(", text))

        assert text
        assert called <= set(re.findall(r"^def (_[a-z_]+)\(", text, re.MULTILINE))


def test_the_order_of_least_numbers_is_the_provers() -> None:
    """What a page says of a counterexample's numbers is the order in which they are made least."""
    said = [name for group in GROUPS for name in group]

    assert sorted(said) == sorted(prove._LEAST_FIRST)
    first_of = [prove._LEAST_FIRST.index(group[0]) for group in GROUPS]
    assert first_of == sorted(first_of)


def test_a_counterexample_ends_with_what_earlier_checks_missed(files: dict[str, str]) -> None:
    """The last section of its page, where somebody has looked."""
    (page,) = (text for path, text in files.items() if re.match(r"counterexamples/.*\.html", path))
    heads = re.findall(r"<h2>(.*)</h2>", page)

    assert heads[-1] == "Why earlier checks missed it"
    assert "runs a sliding window, which has no checkpoint blocks" in page.partition(heads[-1])[2]


def test_the_page_about_lives_ends_with_one_that_is_drawn(files: dict[str, str]) -> None:
    """On the first release that breaks a check in it, with every request's table."""
    page = files[names.of_doc("lives.md")]

    assert "examples/life.json on 0.30.0, which breaks matches-intended" in page
    assert "request r1: a prompt of 13 tokens, 2 to make" in page.partition("A life, drawn")[2]
    assert not any("A life, drawn" in text for path, text in files.items() if text is not page)


def test_no_life_is_drawn_on_what_lives_are_not_described_for(tmp_path: Path) -> None:
    """Old releases and trees on this machine have none, nor has a folder without the example."""
    old = resolve("vllm==0.27.0")
    mine = replace(resolve("vllm==0.30.0"), target="path:mine", release=None)
    drivers = drivers_of([old, mine])

    assert example_of_a_life(guides.DOCS, [old, mine], drivers) is None
    assert example_of_a_life(tmp_path, [resolve("vllm==0.30.0")], {}) is None


def test_a_cause_keeps_the_spelling_of_names(files: dict[str, str]) -> None:
    """A sentence begins with a capital, and vLLM is vLLM all the same."""
    page = files[names.of_theorem("exact-estimate")]

    assert "<li>vLLM PR 57050: the estimate of a checkpoint step is not capped" in page
    assert "VLLM" not in page


def test_findings_are_found_by_the_theorems_that_they_name() -> None:
    """A theorem's page leads to the findings whose table names it, with their public reports."""
    (first, *_) = guides.findings()["exact-estimate"]

    assert first.href.startswith("docs/findings/")
    assert cause(TARGETS[0], "mamba-align", "checkpoint", "bounded-demand") is not None


def test_every_finding_is_listed_once() -> None:
    """The list of findings leads to each page of them, by its title."""
    listed = re.findall(r"- \[(.*)\]\((findings/.*)\)", (guides.DOCS / "findings.md").read_text())
    pages = sorted(file for file in (guides.DOCS / "findings").iterdir())

    assert sorted(path for _, path in listed) == [f"findings/{page.name}" for page in pages]
    for title, path in listed:
        assert (guides.DOCS / path).read_text().startswith(f"# {title}\n")


# ---- the folder ----------------------------------------------------------------------------------

SMALL = {names.INDEX: "first", "theorems/a.html": "a", "site.css": "style"}


def content(out: Path) -> dict[str, str]:
    files = (file for file in out.rglob("*") if file.is_file())
    return {file.relative_to(out).as_posix(): file.read_text() for file in files}


@pytest.mark.parametrize("foreign", ["notes.txt", "theorems/b.html", "index.html"])
def test_a_folder_of_others_is_refused_and_left_alone(tmp_path: Path, foreign: str) -> None:
    """A file that no earlier site listed is never replaced or removed, and nothing is written."""
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text("mine")

    with pytest.raises(output.ReportError, match=re.escape(foreign)):
        output.write(SMALL, tmp_path)
    assert content(tmp_path) == {foreign: "mine"}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A folder that is a link out of the site's is not written into."""
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (out / "theorems").symlink_to(outside)

    with pytest.raises(output.ReportError, match="theorems"):
        output.write(SMALL, out)
    assert content(outside) == {}


def test_a_listed_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    """No site has a link to a folder, whatever its list says: what it leads to is somebody's."""
    outside, out = tmp_path / "outside", tmp_path / "out"
    output.write(SMALL, out)
    outside.mkdir()
    (outside / "a.html").write_text("mine")
    shutil.rmtree(out / "theorems")
    (out / "theorems").symlink_to(outside)
    listed = json.loads((out / output.LIST).read_text())
    listed["files"] += ["theorems"]
    (out / output.LIST).write_text(json.dumps(listed))

    with pytest.raises(output.ReportError, match="theorems"):
        output.write({names.INDEX: "second"}, out)
    assert content(outside) == {"a.html": "mine"}


def test_what_is_no_file_is_refused_unread(tmp_path: Path) -> None:
    """A pipe where the list or a page belongs would keep its reader waiting for ever."""
    os.mkfifo(tmp_path / output.LIST)

    with pytest.raises(output.ReportError, match=re.escape(output.LIST)):
        output.check_folder(tmp_path)


def test_a_link_to_nothing_is_no_folder(tmp_path: Path) -> None:
    """It is refused before anything is proved."""
    (tmp_path / "out").symlink_to(tmp_path / "gone")

    with pytest.raises(output.ReportError, match="a link to nothing is there"):
        output.check_folder(tmp_path / "out")


def test_an_earlier_site_is_replaced(tmp_path: Path) -> None:
    """Pages that are no longer made are removed, and what is the same is not written again."""
    assert output.write(SMALL, tmp_path) == 3
    assert output.write(SMALL, tmp_path) == 0
    assert output.write({names.INDEX: "second"}, tmp_path) == 3

    assert content(tmp_path).keys() == {names.INDEX, output.LIST}
    assert not (tmp_path / "theorems").exists()


def test_a_list_cannot_name_files_outside(tmp_path: Path) -> None:
    """A list that was tampered with removes nothing outside the folder."""
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_text("mine")
    output.write(SMALL, out)
    listed = json.loads((out / output.LIST).read_text())
    listed["files"] += ["../other.txt", str(other), "\ud800"]
    (out / output.LIST).write_text(json.dumps(listed))

    output.write({names.INDEX: "second"}, out)
    assert other.read_text() == "mine"


@pytest.mark.parametrize("after", range(1, 5))
def test_a_run_that_is_stopped_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Ctrl-C leaves no first page to be mistaken for a whole site, and the folder stays ours."""
    old = {names.INDEX: "old", "theorems/gone.html": "gone", "site.css": "old"}
    output.write(old, tmp_path)
    real, calls = output.replace_file, []

    def stopping(path: Path, text: str) -> None:
        calls.append(path)
        if len(calls) == after:
            raise KeyboardInterrupt
        real(path, text)

    monkeypatch.setattr(output, "replace_file", stopping)
    with pytest.raises(KeyboardInterrupt):
        output.write(SMALL, tmp_path)
    monkeypatch.setattr(output, "replace_file", real)

    assert content(tmp_path).get(names.INDEX) in (
        "old" if after == 1 else None,
        *(["first"] * (after > 4)),
    )
    output.write(SMALL, tmp_path)
    assert content(tmp_path).items() >= SMALL.items()
    assert "theorems/gone.html" not in content(tmp_path)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_writes_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`capproof report` writes the site of the targets that it is given, and says where."""
    monkeypatch.setattr(report, "settle_all", lambda *arguments, **options: rows())
    out = tmp_path / "site"
    options = [word for target in TARGETS for word in ("--target", target)]

    assert cli.run(["report", "--out", str(out), *options]) == 0
    assert (out / names.INDEX).is_file()
    assert f"{out / names.INDEX}: " in capsys.readouterr().out


def test_what_a_page_says_to_run_runs(
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the site's folder the commands of a counterexample replay it, and render its test."""
    output.write(files, tmp_path / "site")
    monkeypatch.chdir(tmp_path / "site")
    text = files[counterexample(files)]
    commands = re.findall(r'<pre class="command"><code>capproof ([^<]*)</code>', text)

    assert [command.split()[0] for command in commands] == ["replay", "gen-tests"]
    lines = [html.unescape(command).replace("\\\n", "") for command in commands]
    assert [cli.run(shlex.split(line)) for line in lines] == [0, 0]
    assert "exact-estimate is broken" in capsys.readouterr().out
    assert "def test_" in Path("test_block_estimate.py").read_text()


@pytest.mark.parametrize(
    ("out", "reason"),
    [("file", "a file is there"), ("file/below", "name another"), ("mine", "holds")],
)
def test_the_command_refuses_a_place_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, reason: str
) -> None:
    """What cannot be written, or is not ours, ends with status 2 before anything is proved."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")

    assert cli.run(["report", "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
