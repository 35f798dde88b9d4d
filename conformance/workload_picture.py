"""Pictures of a workload: for each request, free blocks against what it was told, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from conformance.engine import Allocation, Answer
from conformance.picture import MAX_ROWS, Picture, Row, tokens_in_words
from conformance.workload import Arrival, End, Outcome, Workload


@dataclass(frozen=True)
class _Asking:
    """An allocation that was asked for in one step, or in several, with the same answer."""

    asked: Allocation
    last_step: int

    @property
    def name(self) -> str:
        first = self.asked.step
        return f"step {first}" if first == self.last_step else f"steps {first} to {self.last_step}"


def workload_pictures(workload: Workload, answer: Answer) -> list[Picture]:
    """Return what is drawn of the requests that asked for blocks."""
    found = []
    for arrival in workload.arrivals:
        asked = [one for one in answer.allocations if one.request == arrival.name]
        if asked:
            is_last = asked[-1] is answer.allocations[-1]
            found.append(_picture(arrival, list(_merged(asked)), _mark(answer, arrival, is_last)))
    return found


def _picture(arrival: Arrival, askings: Sequence[_Asking], mark: str) -> Picture:
    shown = askings[-MAX_ROWS:]
    rows = [_row(asking) for asking in shown]
    rows[-1] = replace(rows[-1], mark=mark)
    prompt = tokens_in_words(arrival.num_prompt_tokens)
    words = f"a prompt of {prompt}, {arrival.max_tokens:,} to make"
    title = f"request {arrival.name}: {words}"
    return Picture(title, (), tuple(rows), len(askings) - len(shown), "rows")


def _merged(asked: Iterable[Allocation]) -> Iterator[_Asking]:
    before: _Asking | None = None
    for one in asked:
        if before is not None and replace(one, step=before.asked.step) == before.asked:
            before = replace(before, last_step=one.step)
            continue
        if before is not None:
            yield before
        before = _Asking(one, one.step)
    if before is not None:
        yield before


def _row(asking: _Asking) -> Row:
    asked = asking.asked
    what = tokens_in_words(asked.num_new_tokens) if asked.num_new_tokens else "a load"
    gate = "" if asked.gate is None else f", gate {asked.gate:,}"
    refused = "" if asked.drawn is not None else ", no blocks given"
    return Row(
        name=asking.name,
        head=f"{asking.name}: {what} behind {asked.num_computed_tokens:,}{gate}{refused}",
        lines=(),
        free=asked.free,
        estimate=asked.gate if asked.estimate is None else asked.estimate,
        drawn=asked.drawn,
        mark="",
    )


def _mark(answer: Answer, arrival: Arrival, is_last: bool) -> str:
    outcome: Outcome | None = answer.outcome
    if outcome is None:
        return ""
    if outcome.end is End.STALLED and outcome.request == arrival.name:
        return f"stalled, {outcome.status}"
    return f"raised {outcome.error}" if outcome.end is End.RAISED and is_last else ""
