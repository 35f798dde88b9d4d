"""Reading and replacing files of text."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def text_of(path: Path) -> str | None:
    """Return a file's text, None where there is no such file or it is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def replace_file(path: Path, text: str) -> None:
    """Write a file: a reader sees the old one or the new one, never half of one.

    Who may read and write it stays as it was.

    Raises:
        OSError: It cannot be written; then it is as it was.
    """
    temporary = path.with_name(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
