"""How a command ends: its exit status, and one line after Ctrl-C.

Nothing large is imported here, so that the handler is in place before anything that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

AS_EXPECTED, NOT_AS_EXPECTED, COULD_NOT_RUN = 0, 1, 2


@contextmanager
def ctrl_c_ends_imports() -> Iterator[None]:
    """End the process on Ctrl-C while modules are imported.

    An exception may be caught by the module that is being imported, or leave half of it behind.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stopped() -> int:
    """Say that Ctrl-C ended the command; return the exit status for that."""
    if sys.stderr is not None:
        said = "capproof: stopped; nothing half-written is left, run the same command again\n"
        sys.stderr.write(said)
        sys.stderr.flush()
    return COULD_NOT_RUN


def _end(*_: object) -> None:
    os._exit(stopped())
