"""Spread work over processes, which Ctrl-C ends together with this one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar

_Work = TypeVar("_Work", bound=tuple[Any, ...])
_Result = TypeVar("_Result")


def spread(
    do: Callable[..., _Result], works: Sequence[_Work], jobs: int
) -> Iterator[tuple[_Work, _Result]]:
    """Yield works with their results, as they are done; the first are begun first.

    Args:
        do: Called in another process with a work's parts as arguments.
        works: What is to be done.
        jobs: Number of processes.

    Raises:
        Exception: What ``do`` raised; the rest is then not done.
    """
    from multiprocessing import resource_tracker

    import joblib

    resource_tracker.ensure_running()  # starting it later would unblock the signal
    # Workers inherit the mask, so that Ctrl-C ends this process in one line, and it ends them.
    others = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        parallel = joblib.Parallel(
            n_jobs=min(jobs, len(works)),
            return_as="generator_unordered",
            batch_size=1,  # and few dispatched ahead: loky cannot be stopped in silence with many
        )
        found = parallel(joblib.delayed(_done)(do, work) for work in works)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, others)
    with closing(found):
        yield from found


def _done(do: Callable[..., _Result], work: _Work) -> tuple[_Work, _Result]:
    return work, do(*work)
