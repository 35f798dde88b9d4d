"""Drive vLLM's own scheduler through a workload, and say what becomes of the requests.

The loop is the engine's: `schedule()`, then what a model would have answered, then
`update_from_output()`, at once or some steps later. No model is run: a request that has computed
all its tokens is given one more. A process can import only one vLLM, so each tree has a process of
its own, which reads a workload object from each line of its standard input and answers it with one
line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.bindings import BindingError, DriverError, import_vllm, one_line
from conformance.engine_bindings import EngineBindings, Refused, SchedulerUnderTest
from conformance.group_bindings import watching_allocations, watching_estimates
from conformance.replay import ask_process, own_standard_output
from conformance.workload import (
    Arrival,
    End,
    Outcome,
    Workload,
    WorkloadError,
    loads,
    to_json,
)

#: Token of every answer; no prompt holds it.
SAMPLED_TOKEN = 0


@dataclass(frozen=True)
class Allocation:
    """One call of `allocate_slots`, in blocks unless said otherwise."""

    step: int
    """Of the scheduler, from 1."""
    request: str
    num_computed_tokens: int
    """Tokens that the request has computed before."""
    num_new_tokens: int
    free: int
    """Free blocks when the last estimate was made."""
    gate: int | None = None
    """None where the full-sequence gate was not asked."""
    estimate: int | None = None
    """None where it did not come to the check of the step."""
    drawn: int | None = None
    """None where it was refused, or raised."""


@dataclass(frozen=True)
class Answer:
    """What a process says of one workload: an outcome, or why there is none."""

    outcome: Outcome | None
    reason: str = ""
    allocations: tuple[Allocation, ...] = ()
    """What was asked for, in the order of the steps; empty where nobody asked."""


class Progress:
    """Notices that nothing new happens. Steps are counted; no clock is read.

    A step brings something new if the state after it was not seen before. A scheduler that does
    nothing, and one that goes round in circles, both come back to states that were seen.
    """

    def __init__(self, stall_after: int) -> None:
        self._stall_after = stall_after
        self._seen: set[Any] = set()
        self.steps = 0
        self.last_new_step = 0
        """Steps made when something new was seen last."""

    def step(self, state: Any) -> None:
        """Note the state after one more step."""
        self.steps += 1
        if state not in self._seen:
            self._seen.add(state)
            self.last_new_step = self.steps

    @property
    def has_stalled(self) -> bool:
        """Whether the last `stall_after` steps brought nothing new."""
        return self.steps - self.last_new_step >= self._stall_after


@dataclass(frozen=True)
class Asked:
    """One answer of the coordinator's estimator."""

    request: str
    is_gate: bool
    """Whether the full-sequence gate asked (vLLM: `apply_admission_cap`)."""
    num_blocks: int
    free: int
    """Free blocks when it was asked."""


class Run:
    """One workload on one scheduler."""

    def __init__(self, workload: Workload, parts: SchedulerUnderTest) -> None:
        self.workload = workload
        self._parts = parts
        self._scheduler = parts.scheduler
        self._connector = None if workload.engine.shipped_connector else parts.scheduler.connector
        self._manager = parts.scheduler.kv_cache_manager
        self._to_come = list(workload.arrivals)
        self._arrivals = {arrival.name: arrival for arrival in workload.arrivals}
        self._tokens = {name: n for n, name in enumerate(_prompts(workload.arrivals), start=1)}
        self._progress = Progress(workload.stall_after)
        self._asked: list[Asked] = []
        self.allocations: list[Allocation] = []
        """What was asked for so far, with what came of it."""
        self._is_allocating = False
        self._preemptions = 0
        self._live: dict[str, Any] = {}
        self._in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        """What steps scheduled, and what a model samples in them, the oldest first."""

    def outcome(self) -> Outcome:
        """Make steps until all requests are finished, the engine stalls, or it raises.

        Raises:
            DriverError: The prefix cache is to be cleared, and cannot be.
        """
        progress = self._progress
        with (
            watching_estimates(self._manager.coordinator, self._note),
            watching_allocations(self._manager, self._allocates, self._allocated),
        ):
            while self._to_come or self._live:
                self._let_arrive()
                try:
                    self._step()
                except Exception as error:  # What the scheduler raises ends the engine.
                    return Outcome(
                        End.RAISED,
                        progress.steps + 1,
                        error=one_line(error),
                        preemptions=self._preemptions,
                    )
                progress.step(self._state())
                if progress.has_stalled and not self._waits_for_step():
                    return self._stalled()
        return Outcome(End.FINISHED, progress.steps, preemptions=self._preemptions)

    # ---- one step ----

    def _let_arrive(self) -> None:
        for arrival in [arrival for arrival in self._to_come if self._is_due(arrival)]:
            if arrival.resets_prefix_cache and not self._scheduler.reset_prefix_cache():
                # A connector may still be storing blocks of a request that has ended.
                if not self._live and not self._progress.has_stalled:
                    continue
                raise DriverError(f"{arrival.name}: the prefix cache cannot be cleared, it is used")
            self._to_come.remove(arrival)
            if self._connector is not None:
                self._connector.serve(
                    arrival.name,
                    arrival.num_external_tokens,
                    asynchronously=arrival.loads_asynchronously,
                )
            tokens = [self._tokens[arrival.prompt or arrival.name]] * arrival.num_prompt_tokens
            request = self._parts.new_request(arrival.name, tokens, arrival.max_tokens)
            self._live[arrival.name] = request
            self._scheduler.add_request(request)

    def _is_due(self, arrival: Arrival) -> bool:
        is_after = not arrival.after or (
            arrival.after not in self._live
            and all(other.name != arrival.after for other in self._to_come)
        )
        return is_after and self._progress.steps >= arrival.after_step

    def _waits_for_step(self) -> bool:
        """Whether a request is still to come that arrives by the number of steps."""
        return any(
            arrival.after_step > self._progress.steps
            for arrival in self._to_come
            if not arrival.after
        )

    def _step(self) -> None:
        self._asked.clear()
        scheduled = self._scheduler.schedule()
        sampled = {name: self._sampled(name, scheduled) for name in scheduled.num_scheduled_tokens}
        self._in_flight.append((scheduled, sampled))
        # vLLM: `EngineCore.step_with_batch_queue`.
        if len(self._in_flight) > self.workload.engine.num_steps_in_flight:
            self._end_oldest_step()

    def _end_oldest_step(self) -> None:
        scheduled, sampled = self._in_flight.popleft()
        output = self._parts.new_output(sampled, self._parts.report(scheduled))
        self._scheduler.update_from_output(scheduled, output)
        num_drafts = self.workload.engine.num_speculative_tokens
        drafts = {name: [SAMPLED_TOKEN] * num_drafts for name in sampled if sampled[name]}
        if num_drafts and drafts:
            self._scheduler.update_draft_token_ids(self._parts.new_drafts(drafts))
        for name in [name for name, request in self._live.items() if request.is_finished()]:
            self._preemptions += self._live.pop(name).num_preemptions

    def _sampled(self, name: str, scheduled: Any) -> list[int]:
        """The tokens that a model would have sampled: none before the prefill has ended."""
        request = self._live[name]
        drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        # vLLM: `schedule` counts what it schedules as computed, drafts included.
        if request.num_computed_tokens - drafts < request.num_tokens:
            return []
        accepted = min(self._arrivals[name].num_accepted_tokens, drafts)
        return [SAMPLED_TOKEN] * (1 + accepted)

    # ---- what is seen ----

    def _state(self) -> Any:
        """What progress changes: requests by number, status, tokens and blocks, and the pool."""
        requests = tuple(
            (
                name,
                request.status.name,
                request.num_computed_tokens,
                request.num_output_tokens,
                tuple(map(len, self._manager.get_block_ids(name))),
            )
            for name, request in self._live.items()
        )
        return len(self._to_come), requests, self._free()

    def _free(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())

    def _stalled(self) -> Outcome:
        waiting = [name for name, r in self._live.items() if r.status.name != "RUNNING"]
        name = (waiting or list(self._live))[0]
        request = self._live[name]
        asked = [asked for asked in self._asked if asked.request == name]
        gates = [asked.num_blocks for asked in asked if asked.is_gate]
        estimates = [asked.num_blocks for asked in asked if not asked.is_gate]
        return Outcome(
            End.STALLED,
            self._progress.last_new_step,
            request=name,
            status=request.status.name,
            gate=gates[-1] if gates else None,
            estimate=estimates[-1] if estimates else None,
            free=asked[-1].free if asked else self._free(),
            num_computed_tokens=request.num_computed_tokens,
            preemptions=self._preemptions + sum(r.num_preemptions for r in self._live.values()),
        )

    def _note(self, request: str, is_gate: bool, num_blocks: int) -> None:
        self._asked.append(Asked(request, is_gate, num_blocks, self._free()))
        if self._is_allocating:
            told = {"gate" if is_gate else "estimate": num_blocks, "free": self._free()}
            self.allocations[-1] = replace(self.allocations[-1], **told)

    def _allocates(self, request: Any, num_new_tokens: int) -> None:
        self._is_allocating = True
        step, computed = self._progress.steps + 1, request.num_computed_tokens
        self.allocations.append(
            Allocation(step, request.request_id, computed, num_new_tokens, self._free())
        )

    def _allocated(self, is_given: bool) -> None:
        self._is_allocating = False
        last = self.allocations[-1]
        if is_given:
            self.allocations[-1] = replace(last, drawn=last.free - self._free())


def _prompts(arrivals: Iterable[Arrival]) -> list[str]:
    return list(dict.fromkeys(arrival.prompt or arrival.name for arrival in arrivals))


def run(workload: Workload, bindings: EngineBindings, with_allocations: bool = False) -> Answer:
    """Run a workload on the vLLM that is imported.

    Args:
        workload: What arrives.
        bindings: Of the vLLM.
        with_allocations: Whether to tell what was asked for, too.

    Raises:
        BindingError: The release cannot be driven so.
        DriverError: The workload asks for what cannot be done.
    """
    try:
        parts = bindings.new_scheduler(workload.engine)
    except Refused as error:
        return Answer(Outcome(End.REFUSED, 0, error=str(error)))
    try:
        made = Run(workload, parts)
        outcome = replace(made.outcome(), least_num_gpu_blocks=parts.least_num_gpu_blocks)
        return Answer(outcome, allocations=tuple(made.allocations if with_allocations else ()))
    finally:
        parts.scheduler.shutdown()


# ---- a process per tree --------------------------------------------------------------------------


def run_in(
    tree_root: Path, workloads: Sequence[Workload], with_allocations: bool = False
) -> list[Answer]:
    """Run workloads on a tree, all in one process; the answers come in the same order.

    Args:
        tree_root: Folder holding `vllm/`.
        workloads: What to run.
        with_allocations: Whether to tell what was asked for, too.
    """
    options = ["--with-allocations"] if with_allocations else []
    answers, reason = ask_process(
        ["conformance.engine", "--root", str(tree_root), *options],
        Path(tree_root),
        [json.dumps(to_json(workload)) for workload in workloads],
    )
    found = [_from_json(answer) for answer in answers]
    return found + [Answer(None, reason) for _ in workloads[len(found) :]]


def _answer(workload: Workload, bindings: EngineBindings, with_allocations: bool) -> Answer:
    try:
        return run(workload, bindings, with_allocations)
    except DriverError as error:
        return Answer(None, str(error))


def _from_json(content: dict[str, Any]) -> Answer:
    outcome = content["outcome"]
    if outcome is not None:
        outcome = Outcome(**{**outcome, "end": End(outcome["end"])})
    allocations = tuple(Allocation(**one) for one in content["allocations"])
    return Answer(outcome, content["reason"], allocations)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the workloads on standard input, line by line; 2 where the tree cannot be driven."""
    parser = argparse.ArgumentParser(prog="python -m conformance.engine", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder holding vllm/")
    parser.add_argument("--with-allocations", action="store_true", help="what was asked for, too")
    options = parser.parse_args(arguments)
    answers = own_standard_output()
    try:
        bindings = EngineBindings(import_vllm(options.root))
        for number, line in enumerate(sys.stdin, start=1):
            workload = loads(line, name=f"standard input, line {number}")
            answer = asdict(_answer(workload, bindings, options.with_allocations))
            print(json.dumps(answer), file=answers, flush=True)
    except (WorkloadError, BindingError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
