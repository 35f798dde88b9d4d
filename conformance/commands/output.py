"""What commands share on their way out: a console, files, progress, and an end on Ctrl-C."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from conformance.commands.arguments import GENERATED_TESTS, CannotRun
from conformance.ending import COULD_NOT_RUN
from conformance.files import replace_file
from conformance.targets import cache_root

#: Columns of a table that goes into a pipe or a file.
_PIPE_WIDTH = 160


def write_whole(file: Path, text: str) -> None:
    """Write a file that readers see whole or not at all, unless a pipe or device stands there."""
    try:
        if file.exists() and not file.is_file():
            file.write_text(text, encoding="utf-8")
            return
        file = file.resolve()
        replace_file(file, text)
    except OSError as error:
        raise CannotRun(f"{file}: cannot be written: {error.strerror}") from None


def keep_scenarios(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Write counterexamples where `replay` can read them; committed ones are named as they are.

    Returns:
        The file by target and scenario name.
    """
    from conformance.scenario import dump, loads

    paths = {}
    for row in rows:
        if row["scenario"] is None:
            continue
        name = row["scenario"]["name"]
        (found,) = loads(json.dumps(row["scenario"]), name=name)
        file = GENERATED_TESTS / "scenarios" / "refutations" / f"{name}.json"
        if not _holds(file, found):
            file = cache_root() / "scenarios" / f"{name}.json"
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                dump(found, file)
            except OSError:
                continue  # --json holds the scenario all the same
        is_near = file.is_relative_to(Path.cwd())
        paths[row["target"], name] = os.path.relpath(file) if is_near else str(file)
    return paths


def _holds(file: Path, scenario: Any) -> bool:
    """Whether a committed file takes the same steps as a scenario, and predicts the same for it."""
    from conformance.scenario import ScenarioError, load

    try:
        (committed,) = load(file)
    except (ScenarioError, ValueError):
        return False
    return bool(
        (committed.geometry, committed.steps) == (scenario.geometry, scenario.steps)
        and scenario.predicted.items() <= (committed.predicted or {}).items()
    )


def print_line(console: Any, line: str) -> None:
    """Print a line as it is: no markup in it, and not folded."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def new_console() -> Any:
    """A console whose reader may leave: what follows is dropped, and the exit status stays."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            drop_output()

    if sys.stdout is not None and sys.stdout.isatty():
        return Output(emoji=False)
    return Output(emoji=False, width=_PIPE_WIDTH, force_terminal=False)


@contextmanager
def cannot_run_on(*errors: type[Exception]) -> Iterator[None]:
    """Turn these errors, and source that the lifter does not understand, into `CannotRun`."""
    from models.lift import NotUnderstood

    try:
        yield
    except (*errors, NotUnderstood) as error:
        raise CannotRun(str(error)) from error


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being worked on: one line that is rewritten on a terminal, nothing in a pipe."""
    from rich.console import Console

    with status_on(Console(stderr=True)) as on_progress:
        yield on_progress


@contextmanager
def status_on(console: Any) -> Iterator[Callable[[str], None]]:
    """What is being worked on, below the lines that are printed; nothing in a pipe."""
    from rich.text import Text

    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


def fail(reason: str) -> int:
    """Say in one line on stderr why a command could not run; return the exit status for that."""
    click.echo(f"capproof: {' '.join(reason.split())}", err=True)
    return COULD_NOT_RUN


def drop_output() -> None:
    """Nobody reads what is written from here on, which is no failure."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
