"""What everything with a name is, on one screen."""

from __future__ import annotations

import re
import textwrap

import pytest

from conformance import cli
from conformance.expectations import expectations, where
from conformance.explain import VERDICTS, explanation, nearest
from conformance.history import refutations, refuted_in, releases_in_words
from conformance.targets import KNOWN_RELEASES
from models.prove import Verdict
from spec.families import FAMILIES
from spec.theorems import MANAGERS, OBLIGATIONS, THEOREMS

Output = pytest.CaptureFixture[str]
#: Lines of a screen of 100 columns.
SCREEN = 50


def expanded(line: str, managers: tuple[str, ...]) -> set[tuple[str, str, str]]:
    """Target, manager and name that a line of a history stands for; `*` is left as it is."""
    places, _, names = line.partition(": ")
    found = set()
    for place in places.split("; "):
        ranges, _, manager = place.partition(" (")
        for one in ranges.split(", "):
            first, _, last = one.partition(" to ")
            at = KNOWN_RELEASES.index(first), KNOWN_RELEASES.index(last or first)
            for release in KNOWN_RELEASES[at[0] : at[1] + 1]:
                of = (manager.rstrip(")"),) if manager else managers
                found |= {(f"vllm=={release}", m, name) for m in of for name in names.split(", ")}
    return found


@pytest.mark.parametrize("slug", THEOREMS)
def test_where_a_theorem_is_refuted_is_what_the_file_expects(slug: str) -> None:
    """Ranges and stars, written out, are exactly the refutations of `spec/expectations.toml`."""
    said = set()
    about = [kind for kind in OBLIGATIONS if THEOREMS[slug].why_not(*kind) is None]
    for line in refutations(slug):
        for target, manager, name in expanded(line, THEOREMS[slug].managers):
            if name == "all kinds of step":
                kinds = [where(*kind) for kind in about]
            elif name.endswith("*"):
                kinds = [where(*kind) for kind in about if kind[0] == name[:-1]]
            else:
                kinds = [name]
            said |= {(target, manager, kind) for kind in kinds}

    names = {where(*kind) for kind in about}
    assert said == {
        (target, manager, family)
        for (target, manager, family, theorem), verdict in expectations().items()
        if theorem == slug and verdict == "REFUTED" and family in names
    }


@pytest.mark.parametrize("slug", FAMILIES)
def test_what_is_refuted_of_a_family_is_what_the_file_expects(slug: str) -> None:
    """A theorem is named for a release where one kind of the family's steps is refuted."""
    said = set()
    for line in refuted_in(slug):
        place, _, theorems = line.partition(": ")
        for theorem in theorems.split(", "):
            said |= expanded(f"{place}: {theorem}", THEOREMS[theorem].managers)

    assert said == {
        (target, manager, theorem)
        for (target, manager, family, theorem), verdict in expectations().items()
        if family.partition("+")[0] == slug and verdict == "REFUTED"
    }


def test_the_history_of_57050_can_be_read(capsys: Output) -> None:
    """The theorem that found it says in which release, and in which kinds of step."""
    assert cli.run(["explain", "bounded-demand"]) == 0

    out = capsys.readouterr().out
    assert "Expected to be refuted in:" in out
    assert {line[:10] for line in out.splitlines() if line.startswith("  0.")} == {"  0.30.0: "}
    assert cli.run(["explain", "dry-run-pure"]) == 0
    assert "Expected to be refuted in no known release." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("releases", "words"),
    [
        (KNOWN_RELEASES, f"{KNOWN_RELEASES[0]} to {KNOWN_RELEASES[-1]}"),
        (KNOWN_RELEASES[2:3], KNOWN_RELEASES[2]),
        ((*KNOWN_RELEASES[:2], *KNOWN_RELEASES[3:4]), "0.24.0 to 0.25.0, 0.27.0"),
        ((), ""),
    ],
)
def test_neighbouring_releases_are_a_range(releases: tuple[str, ...], words: str) -> None:
    """A gap ends a range."""
    assert releases_in_words(releases) == words


def test_every_verdict_has_a_word(capsys: Output) -> None:
    """Each verdict that a row can have is explained, and says whether it can be expected."""
    assert {verdict.value for verdict in Verdict} == VERDICTS.keys()
    for verdict, (sentence, _) in VERDICTS.items():
        assert cli.run(["explain", verdict]) == 0
        assert capsys.readouterr().out.startswith(f"{verdict}: {sentence}\n")
    never = {verdict for verdict in VERDICTS if "cannot be expected" in _flat(verdict)}
    assert never == {"UNKNOWN", "UNSUPPORTED", "VACUOUS"}


def _flat(slug: str) -> str:
    return " ".join((explanation(slug) or "").split())


@pytest.mark.parametrize("slug", [*THEOREMS, *FAMILIES, *MANAGERS, *VERDICTS])
def test_an_explanation_fits_a_screen(slug: str) -> None:
    """Nobody has to scroll to read what a claim is."""
    text = explanation(slug)

    assert text is not None
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 100) or [""]]
    assert len(lines) <= SCREEN


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("exact-estimat", "exact-estimate"), ("refuted", "REFUTED"), ("parity", "dry-run-parity")],
)
def test_the_nearest_names_are_told(capsys: Output, typed: str, meant: str) -> None:
    """A name that is none ends in one line with names that are, and exit status 2."""
    assert cli.run(["explain", typed]) == 2

    err = capsys.readouterr().err
    assert re.fullmatch(rf"capproof: unknown theorem, .* {typed!r}; the nearest: [^\n]+\n", err)
    assert meant in nearest(typed)
    assert meant in err


@pytest.mark.parametrize("typed", ["", "x" * 100_000, "\x1b[31m\n", "<script>", "é"])
def test_any_name_gets_one_line(capsys: Output, typed: str) -> None:
    """Whatever is typed, the answer is short and holds nothing that a terminal obeys."""
    assert cli.run(["explain", typed]) == 2

    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert len(err) < 300
    assert "\x1b" not in err
