"""The files that `capproof prove` writes for a CI service, by option of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from conformance.obligations import Row

#: Options that each name a file.
OPTIONS = ("--junit", "--markdown", "--sarif")


def same_file(outputs: Mapping[str, Path | None]) -> tuple[str, str] | None:
    """Return two options that name one file, None where there are none.

    What is no ordinary file, as a pipe or a device, may be named twice.
    """
    seen: dict[Path, str] = {}
    for option, file in outputs.items():
        if file is None or (file.exists() and not file.is_file()):
            continue
        other = seen.setdefault(file.resolve(), option)
        if other != option:
            return other, option
    return None


def reports(
    outputs: Mapping[str, Path | None], rows: Sequence[Row], roots: Mapping[str, Path]
) -> Iterator[tuple[Path, str]]:
    """Yield each file that is asked for, with its text.

    Args:
        outputs: File by option, of `OPTIONS` and others.
        rows: Verdicts.
        roots: Folder that holds `vllm/`, by target.
    """
    from conformance.junit import junit
    from conformance.markdown_summary import markdown_summary
    from conformance.sarif import sarif

    writers: dict[str, Callable[[], str]] = {
        "--junit": lambda: junit(rows),
        "--markdown": lambda: markdown_summary(rows),
        "--sarif": lambda: sarif(rows, roots),
    }
    for option in OPTIONS:
        file = outputs.get(option)
        if file is not None:
            yield file, writers[option]()
