"""Work in processes of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from conformance.parallel import ProcessLost, spread
from models import term


def double(number: int) -> int:
    return 2 * number


def num_terms(number: int) -> tuple[int, int]:
    """How many terms the process knew before, and its number."""
    before = len(term.ATOMS)
    term.int_var(f"new_{number}")
    return before, os.getpid()


def refuse_or_wait(folder: Path, refuses: bool) -> None:
    if refuses:
        while not list(folder.iterdir()):
            time.sleep(0.01)
        raise ValueError("refused")
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def end(how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_each_work_comes_with_its_result(jobs: int) -> None:
    """All of it is done, however many processes there are at a time."""
    works = [(number,) for number in range(5)]

    assert sorted(spread(double, works, jobs)) == [((number,), 2 * number) for number in range(5)]
    assert list(spread(double, [], jobs)) == []


def test_works_are_begun_in_order() -> None:
    """One process at a time gives the results in the order of the works."""
    works = [(3,), (1,), (2,)]

    assert [work for work, _ in spread(double, works, 1)] == works


def test_no_work_sees_what_another_left_behind() -> None:
    """Each process begins with the same terms, so the solver is asked the same questions."""
    found = [result for _, result in spread(num_terms, [(1,), (2,), (3,)], 1)]

    assert len({before for before, _ in found}) == 1
    assert len({number for _, number in found}) == 3


def test_what_a_work_raises_is_raised_and_ends_the_others(tmp_path: Path) -> None:
    """No process is left that nobody waits for."""
    with pytest.raises(ValueError, match="refused"):
        list(spread(refuse_or_wait, [(tmp_path, False), (tmp_path, True)], 2))

    (left,) = tmp_path.iterdir()
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.name), 0)


def test_a_killed_process_is_said_to_be_lost() -> None:
    """It gave no result, which is not taken for one."""
    with pytest.raises(ProcessLost, match="was killed"):
        list(spread(end, [("now",)], 1))


def test_who_stops_listening_ends_the_rest(tmp_path: Path) -> None:
    """An iteration that is left early leaves no process behind."""
    results = spread(double, [(1,), (2,), (3,)], 1)
    next(results)
    results.close()
