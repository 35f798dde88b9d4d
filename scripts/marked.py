"""Sections of a page that one script writes and the others leave alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Marked:
    """A section between two lines that nobody reads."""

    begin: str
    end: str

    def of(self, text: str) -> str:
        """Return the section with its markers, nothing where a page has none."""
        if self.begin not in text:
            return ""
        inside = text.partition(self.begin)[2].partition(self.end)[0]
        return f"{self.begin}{inside}{self.end}"

    def put(self, text: str, section: str) -> str:
        """Return the page with another section; it goes to the end where there was none."""
        new = f"{self.begin}\n\n{section}\n\n{self.end}"
        old = self.of(text)
        return (
            text.replace(old, new)
            if old
            else "\n\n".join(filter(None, [text.rstrip(), new])) + "\n"
        )

    def keep(self, text: str, before: str) -> str:
        """Return a page that is written anew with the section that it had before, at its end."""
        old = self.of(before)
        return f"{text.rstrip()}\n\n{old}\n" if old else text


#: What people have, in `docs/benchmarks.md`.
PEERS = Marked("<!-- peers: written by scripts/bench_peers.py -->", "<!-- end of peers -->")
