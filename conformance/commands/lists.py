"""`capproof targets` and `capproof explain`: what is known, and what it means."""

from __future__ import annotations

import click

from conformance.commands.arguments import CannotRun
from conformance.ending import AS_EXPECTED
from conformance.targets import DEFAULT_TARGETS, KNOWN_RELEASES, cache_root, cached, fetch


@click.command("targets")
@click.option("--fetch", "to_fetch", metavar="T", help="Fetch a release again.")
def list_targets(to_fetch: str | None) -> int:
    """List the releases that are known and cached."""
    if to_fetch is not None:
        tree = fetch(to_fetch)
        click.echo(f"{tree.target}  {tree.root}")
        return AS_EXPECTED
    present = cached()
    known = [f"vllm=={release}" for release in KNOWN_RELEASES]
    for target in sorted({*known, *present}, key=_version_key):
        notes = ["known" if target in known else "not described yet"]
        notes.append("cached" if target in present else "not cached")
        notes += ["default"] if target in DEFAULT_TARGETS else []
        click.echo(f"{target}  {', '.join(notes)}")
    click.echo(f"cache: {cache_root()}")
    return AS_EXPECTED


@click.command()
@click.argument("slug", metavar="SLUG")
def explain(slug: str) -> int:
    """Explain a theorem, a family, an assumption, a manager or a verdict."""
    from conformance.explain import explanation, nearest

    text = explanation(slug)
    if text is None:
        raise CannotRun(
            f"unknown theorem, family, assumption, manager or verdict {slug[:60]!r}; the nearest: "
            f"{', '.join(nearest(slug))}"
        )
    click.echo(text)
    return AS_EXPECTED


def _version_key(target: str) -> tuple[int, ...]:
    release = target.rpartition("==")[2]
    return tuple(int(part) if part.isdigit() else 0 for part in release.split("."))
