"""What commands share on their way in: options, and refusing what cannot be run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from conformance.targets import Tree, resolve
from spec.families import FAMILIES
from spec.theorems import MANAGERS, THEOREMS

GENERATED_TESTS = Path(__file__).resolve().parents[2] / "generated_tests"


class CannotRun(Exception):
    """The command cannot run; one line saying what and what to do."""


targets_option = click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="T",
    help="vllm==X.Y.Z, path:DIR or installed; may be repeated.",
)
tier_option = click.option(
    "--tier",
    type=click.Choice(["core", "vllm"]),
    default="core",
    help="core: the tree's managers under placeholders; vllm: everything imported for real.",
)
no_cache_option = click.option(
    "--no-cache", is_flag=True, help="Prove again even if nothing changed."
)


def check_names(managers: Sequence[str], families: Sequence[str], theorems: Sequence[str]) -> None:
    """Refuse a manager, a family or a theorem that is not in the catalogue, with those that are."""
    for manager in managers:
        if manager not in MANAGERS:
            raise CannotRun(f"unknown manager {manager!r}; modelled: {', '.join(MANAGERS)}")
    for family in families:
        if family not in FAMILIES:
            raise CannotRun(f"unknown family {family!r}; families: {', '.join(FAMILIES)}")
    for theorem in theorems:
        if theorem not in THEOREMS:
            raise CannotRun(f"unknown theorem {theorem!r}; theorems: {', '.join(THEOREMS)}")


def check_writable(option: str, file: Path | None) -> None:
    """Refuse an output file before any time is spent on what goes into it."""
    if file is None:
        return
    given = f"{option} {file}"
    try:
        if file.is_dir():
            raise CannotRun(f"{given}: a folder is there; name a file")
        if not file.parent.is_dir():
            raise CannotRun(f"{given}: {file.parent} is no folder; make it, or name another")
        is_new = not file.exists()
    except OSError as error:
        raise CannotRun(f"{given}: {error.strerror}; name another file") from None
    if not os.access(file.parent if is_new else file, os.W_OK):
        raise CannotRun(f"{given}: cannot be written; name another file")


def resolved(targets: Sequence[str]) -> list[Tree]:
    """Return the trees of targets, each once; a release that is not cached is fetched."""
    for target in targets:
        if not target.strip().isprintable():
            raise CannotRun(f"target {target!r}: holds an unprintable character; rename the folder")
    return [resolve(target) for target in dict.fromkeys(target.strip() for target in targets)]
