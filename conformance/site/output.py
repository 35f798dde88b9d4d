"""Write the site into a folder that holds nothing of others, so that nothing of theirs is lost.

The folder's list of files says what is ours. It is written before anything else, with all that was
and will be there; the first page comes last. So a run that is stopped leaves a folder without a
first page, which the next run recognises and completes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from conformance.files import replace_file, text_of
from conformance.site.names import INDEX

#: The list of the site's files, in its folder.
LIST = "capproof-report.json"
_SCHEMA = 1
#: What a run that was killed may leave beside a file that it was writing.
_LEFT_BEHIND = re.compile(r"\.\d+\.tmp")


class ReportError(Exception):
    """The site cannot be written; one line saying what and what to do."""


def check_folder(out: Path) -> None:
    """Refuse a folder that is not ours, or that cannot be written, before time is spent on it.

    Raises:
        ReportError: As it says.
    """
    try:
        if (out.exists() or out.is_symlink()) and not out.is_dir():
            what = "a file" if out.exists() else "a link to nothing"
            raise ReportError(f"--out {out}: {what} is there; name a folder")
        if out.is_dir():
            _refuse_others(out)
        above = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:
        raise ReportError(f"--out {out}: {error.strerror}; name another folder") from None
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ReportError(f"--out {out}: {above} cannot be written; name another folder")


def write(files: Mapping[str, str], out: Path) -> int:
    """Write the site's files, and remove those of an earlier one that are no longer made.

    Args:
        files: Text by path below ``out``, the first page among them.
        out: The folder; made where it is missing.

    Returns:
        How many files changed.

    Raises:
        ReportError: The folder is not ours, or cannot be written.
    """
    check_folder(out)
    try:
        before = _listed(out)
        changed = {path for path, text in files.items() if text_of(out / path) != text}
        stale = before - files.keys()
        if not (changed or stale) and _is_complete(out):
            return 0
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / LIST, _list({*before, *files}, is_complete=False))
        (out / INDEX).unlink(missing_ok=True)
        for path in sorted(changed - {INDEX}):
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            replace_file(out / path, files[path])
        _remove(out, stale)
        replace_file(out / INDEX, files[INDEX])
        replace_file(out / LIST, _list(set(files), is_complete=True))
    except OSError as error:
        raise ReportError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return len(changed | stale)


def _refuse_others(out: Path) -> None:
    ours = {*_listed(out), LIST}
    others = sorted(path for path, is_ours in _files_in(out) if not is_ours or path not in ours)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ReportError(
            f"--out {out}: holds {others[0]!r}{more}, not written by `capproof report`; nothing "
            "was written: move it away or name another folder"
        )


def _files_in(out: Path) -> Iterator[tuple[str, bool]]:
    """Paths of what is below a folder and is none, but for what a killed run left behind.

    And whether it can be ours: a file, or a link to one. A link to a folder leads to what is
    somebody's, and a pipe has no end.
    """
    for folder, names, files in os.walk(out):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        for name in (*links, *files):
            if not _LEFT_BEHIND.fullmatch(name):
                path = Path(folder) / name
                yield path.relative_to(out).as_posix(), path.is_file()


def _listed(out: Path) -> set[str]:
    """Paths of the files that the folder's list calls ours; none where it is no such list."""
    return {path for path in _content(out).get("files", ()) if _stays_inside(path)}


def _is_complete(out: Path) -> bool:
    return _content(out).get("complete") is True


def _content(out: Path) -> dict[str, Any]:
    if not (out / LIST).is_file():
        return {}
    try:
        content = json.loads((out / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    is_list = isinstance(content, dict) and content.get("schema") == _SCHEMA
    return content if is_list and isinstance(content.get("files"), list) else {}


def _stays_inside(path: object) -> bool:
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts


def _list(paths: set[str], *, is_complete: bool) -> str:
    content = {"schema": _SCHEMA, "complete": is_complete, "files": sorted(paths)}
    return json.dumps(content, indent=1) + "\n"


def _remove(out: Path, paths: set[str]) -> None:
    """Remove files, and the folders that hold nothing any more."""
    for path in sorted(paths):
        (out / path).unlink(missing_ok=True)
    folders = {folder for path in paths for folder in PurePosixPath(path).parents}
    for folder in sorted(folders - {PurePosixPath(".")}, key=lambda f: len(f.parts), reverse=True):
        if (out / folder).is_dir() and not any((out / folder).iterdir()):
            (out / folder).rmdir()
