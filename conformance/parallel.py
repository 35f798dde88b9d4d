"""Do pieces of work in processes of their own, which Ctrl-C ends together with this one.

What a solver was asked before leads it to other answers, and some take it a hundred times as long.
So each piece of work begins in a process that has asked it nothing: what comes of it depends
neither on the other pieces nor on how many run at once.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

#: Imported once, by the process that all others are copies of.
_PRELOADED = ("conformance.obligations", "conformance.generate", "models.compare", "models.prove")

_Work = TypeVar("_Work", bound=tuple[Any, ...])
_Result = TypeVar("_Result")


class ProcessLost(Exception):
    """A process ended without a result; one line."""


def spread(
    do: Callable[..., _Result], works: Sequence[_Work], jobs: int
) -> Iterator[tuple[_Work, _Result]]:
    """Yield works with their results, as they are done; the first are begun first.

    Args:
        do: Called in another process with a work's parts as arguments.
        works: What is to be done.
        jobs: Number of processes at a time.

    Raises:
        Exception: What ``do`` raised; the rest is then not done.
        ProcessLost: A process was killed.
    """
    waiting = list(reversed(works))
    running: dict[Connection, tuple[_Work, Any]] = {}
    try:
        while waiting or running:
            with _ctrl_c_put_off():
                while waiting and len(running) < jobs:
                    work = waiting.pop()
                    receiving, process = _started(do, work)
                    running[receiving] = work, process
            for receiving in wait(list(running)):
                work, process = running[receiving]
                result, error = _received(receiving)
                process.join()
                del running[receiving]
                if error is not None:
                    raise error
                yield work, result
    finally:
        for _, process in running.values():
            process.kill()
        for _, process in running.values():
            process.join()


def _started(do: Callable[..., Any], work: tuple[Any, ...]) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload(list(_PRELOADED))
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(sending, do, work), daemon=True)
    process.start()
    sending.close()
    return receiving, process


def _received(receiving: Connection) -> tuple[Any, Exception | None]:
    try:
        with receiving:
            return receiving.recv()
    except EOFError:
        return None, ProcessLost("a process was killed; is there enough memory for --jobs?")


def _do(sending: Connection, do: Callable[..., Any], work: tuple[Any, ...]) -> None:
    try:
        answer = do(*work), None
    except Exception as error:
        answer = None, error
    with sending, suppress(BrokenPipeError):  # nobody waits any more
        sending.send(answer)


@contextmanager
def _ctrl_c_put_off() -> Iterator[None]:
    """Processes that are started inside never see Ctrl-C, since they inherit what is blocked."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it later would unblock the signal
    others = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, others)
