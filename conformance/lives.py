"""Several requests on one real `KVCacheManager`, from admission to their end, and what must hold.

A `Life` says which requests share a pool and which rules are applied to them, each a call with
integers. `SharedPool` applies them as the scheduler does (`life_scheduler.CALLERS`), and checks
after every rule: `life_checks` says what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.bindings import (
    QUEUED_COPIES,
    BindingError,
    Bindings,
    DriverError,
    accepted_arguments,
    taken,
)
from conformance.group_bindings import ALLOCATE_ARGUMENTS, GroupBindings, watching_estimates
from conformance.life import ADMITTED_FROM, Hasher, Plan, Request, Rule, Setting, Stage
from conformance.life_checks import (
    Check,
    NeverAdmitted,
    PoolRanDry,
    StepSeen,
    Violation,
    state_lost,
)
from conformance.life_plan import (
    ATTENTION_GROUP,
    Chunk,
    LifeShadow,
    StateLost,
    WorkerRow,
)
from conformance.life_planner import Planner
from conformance.life_scheduler import SchedulerStandIn, scheduler_text
from conformance.life_shadow import Shadow
from models.loader import PlaceholderUsed
from spec.families import checkpoint_position, reserves_checkpoint
from spec.logic import cdiv
from spec.vocabulary import Call, Situation

FIRST_MAMBA_GROUP = 1

#: Attempts after which a request that is alone counts as never admitted. One may be deferred by a
#: hit that was cached in the same step.
MAX_ATTEMPTS = 4


@dataclass
class _Scheduled:
    """A request of the step that is being scheduled."""

    request: Request
    start: int
    num_new: int
    num_drafts: int
    num_accepted: int
    checkpoint: int
    external_start: int
    continues_prefill: bool
    """Whether the request's last step left prefill to do. vLLM: `Request.is_prefill_chunk`."""
    samples: bool
    """Whether the step computes all tokens that are known, so that a model samples the next."""
    seen: StepSeen


class NotPossible(DriverError):
    """The rule does not apply in this state; nothing was done."""


#: Makes what keeps the contents of the blocks of a setting's pool.
NewShadow = Callable[[Setting], LifeShadow]


class SharedPool:
    """Requests that share one real `KVCacheManager`; `apply` rules to them.

    Args:
        bindings: Of the tree.
        group_bindings: Of the tree.
        setting: What is fixed.
        mamba_spec: What `Bindings.new_spec` returns for the geometry.
        reserved_at_startup: Blocks that the start-up sizing reserves for one request of the spec.
        checks: What is checked after every rule.
        most: Blocks that requests hold at most; filled by pools of the tree as they need it.
        num_gpu_blocks: Pool size, where it is another than the setting's.
        new_shadow: Makes what keeps the contents of blocks; None keeps Python values.
        kv_cache_config: That of the memory which blocks are kept in, where they are.
    """

    def __init__(
        self,
        bindings: Bindings,
        group_bindings: GroupBindings,
        setting: Setting,
        mamba_spec: Any,
        reserved_at_startup: int,
        checks: Sequence[Check],
        most: dict[Any, int],
        num_gpu_blocks: int | None = None,
        new_shadow: NewShadow | None = None,
        kv_cache_config: Any = None,
    ) -> None:
        g = setting.geometry
        if setting.num_steps_in_flight and g.num_speculative_blocks:
            raise DriverError("steps with drafts wait for each output: none is in flight")
        self.setting, self.geometry = setting, g
        self.manager = group_bindings.new_kv_cache_manager(
            g,
            mamba_spec,
            num_gpu_blocks or setting.num_gpu_blocks,
            setting.num_mamba_groups,
            kv_cache_config,
        )
        self.coordinator, self.pool = self.manager.coordinator, self.manager.block_pool
        self.managers = tuple(self.coordinator.single_type_managers)
        for manager in self.managers[FIRST_MAMBA_GROUP:]:
            bindings.set_as_coordinator_does(g, manager)
        self._statuses = group_bindings.statuses
        self._rebuild = (bindings, group_bindings, mamba_spec, reserved_at_startup)
        self.reserved_at_startup = reserved_at_startup
        """Blocks that the start-up sizing reserves for one request in one Mamba group."""
        self._text = scheduler_text(group_bindings.file)
        self._scheduler = SchedulerStandIn(
            self._text,
            g,
            self.manager,
            setting.max_num_scheduled_tokens,
            setting.num_lookahead_tokens,
        )
        self._allocate_arguments = accepted_arguments(
            self.manager.allocate_slots,
            _ALLOCATE_ARGUMENTS,
            f"{group_bindings.file}: KVCacheManager.allocate_slots",
            needed=ALLOCATE_ARGUMENTS,
        )
        self.hasher = Hasher(g.hash_block_size)
        self.requests = tuple(
            Request(f"r{i}", plan, i, self.hasher, status=self._statuses["WAITING"])
            for i, plan in enumerate(setting.plans)
        )
        self.planner = Planner(g, len(self.managers))
        self.shadow: LifeShadow = Shadow() if new_shadow is None else new_shadow(setting)
        self.scheduled: dict[int, _Scheduled] = {}
        self.in_flight: deque[tuple[_Scheduled, ...]] = deque()
        """Steps whose outputs are not known yet, the oldest first."""
        self.inflight_prefills: list[Request] = []
        self._not_zeroed: set[int] = set()
        self.admits_no_more = self.has_admitted = False
        self.is_open = False
        """Whether a step is being scheduled."""
        self.num_steps = 0
        self.largest_held = 0
        """Most blocks that were held at a time."""
        self.seen: StepSeen | None = None
        """What the rule's call of `allocate_slots` showed; None where there was none."""
        self.last_seen: dict[str, StepSeen] = {}
        """What the last call showed, by request."""
        self.is_dead = False
        """Whether an exception ended the engine."""
        self.step_of_block: dict[int, StepSeen] = {}
        """The last step of a request that held the block."""
        self.violations: list[Violation] = []
        """What the checks found, known faults among them."""
        self._checks, self._most = checks, most
        self.after_rule: Callable[[Rule, bool], None] | None = None
        """Called after each rule, with whether it is a part of another; None for nobody."""

    # ---- rules -----------------------------------------------------------------------------------

    def apply(self, rule: Rule) -> bool:
        """Apply a rule and check what must hold.

        Returns:
            Whether anything was scheduled, freed, loaded or computed; False where `allocate_slots`
            refused.

        Raises:
            NotPossible: The rule does not apply here.
            BindingError: The core tier cannot run it.
        """
        if self.is_dead:
            raise NotPossible("the engine is dead")
        try:
            return self._checked(rule, is_part=False)
        except PlaceholderUsed as error:
            raise BindingError(f"core tier: {error}") from error

    def _check(self, rule: Rule) -> None:
        held = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
        self.largest_held = max(self.largest_held, held)
        if not self.is_dead:
            for check in self._checks:
                self.violations += check(self, rule)
        # What comes of a lost state would be found again and again.
        self.is_dead |= any(v.theorem == "live-state-kept" for v in self.violations)

    def _admit(self, rule: Rule) -> bool:
        """Admit a waiting or preempted request. vLLM: `Scheduler.schedule`, waiting requests."""
        request = self._request(rule, *ADMITTED_FROM)
        if self.admits_no_more:
            raise NotPossible("the step admits nobody any more")
        if rule.num_external_tokens and self.setting.num_steps_in_flight:
            raise NotPossible("with steps in flight there is no connector")
        if request.num_stale_output_tokens:
            raise NotPossible("output from before its preemption is still to come")
        self._begin()
        hit = self.manager.get_computed_blocks(request)
        blocks, local = hit[0], hit[1]
        request.shared_prefix_boundary = hit[2] if len(hit) > 2 else 0
        external = rule.num_external_tokens
        inside = local % self.geometry.block_size
        if inside and external > inside and hasattr(self.manager, "truncate_computed_blocks"):
            local -= inside
            blocks = self.manager.truncate_computed_blocks(blocks, local)
        elif inside:
            external = 0
        # One token is left to compute.
        external = max(min(external, request.num_tokens - 1 - local), 0)
        start, is_async = local + external, rule.loads_asynchronously and external > 0
        lookahead, drafts = self.setting.num_lookahead_tokens, 0
        num_new = reserved = 0
        if is_async:
            lookahead = 0
            reserved = self._scheduler.reserved_blocks(self.inflight_prefills)
        else:
            num_new, drafts = self._new_tokens_of_waiting(request, start, rule, local, external)
            if num_new == 0:
                self.admits_no_more = True
                return False
        allocated = self._allocate(
            request,
            rule,
            num_new=num_new,
            local=local,
            blocks=blocks,
            external=external,
            lookahead=lookahead,
            is_async=is_async,
            reserved=reserved,
        )
        if allocated is None:
            self.admits_no_more = True
            return False
        request.num_computed_tokens, request.external_start = start, local
        request.row = WorkerRow(self._tables(request))
        request.adopted_blocks = frozenset(b.block_id for found in blocks.blocks for b in found)
        self.has_admitted = True
        if is_async:
            if hasattr(self.manager, "get_zeroing_block_ids_in_range"):
                self._not_zeroed |= {
                    *self.manager.get_zeroing_block_ids_in_range(request.request_id, local, start)
                }
            request.stage = Stage.LOADING
            self.inflight_prefills.append(request)
        else:
            self._schedule(request, start, num_new, drafts, rule, local)
        return True

    def _promote(self, rule: Rule) -> bool:
        """Have a request whose tokens have arrived compute. vLLM: as `admit`, tokens computed."""
        request = self._request(rule, Stage.ARRIVED)
        if self.admits_no_more:
            raise NotPossible("the step admits nobody any more")
        self._begin()
        start = request.num_computed_tokens
        num_new, drafts = self._new_tokens_of_waiting(request, start, rule)
        if num_new == 0:
            self.admits_no_more = True
            return False
        lookahead = self.setting.num_lookahead_tokens
        if self._allocate(request, rule, num_new=num_new, lookahead=lookahead) is None:
            self.admits_no_more = True
            return False
        request.row = WorkerRow(self._tables(request))
        self.has_admitted = True
        self._schedule(request, start, num_new, drafts, rule, start)
        return True

    def _run(self, rule: Rule) -> bool:
        """Schedule a running request. vLLM: `Scheduler.schedule`, running requests."""
        request = self._request(rule, Stage.RUNNING)
        if request.number in self.scheduled or self.has_admitted:
            raise NotPossible("running requests are scheduled once, before waiting ones")
        if request.samples_its_last:
            raise NotPossible("a step in flight samples its last token")
        self._begin()
        start = request.num_computed_tokens
        num_known = request.num_tokens + request.num_output_placeholders
        num_new = min(num_known + request.num_drafts - start, rule.num_tokens)
        num_new = self._scheduler.split(request, num_new)
        if num_new == 0:
            return False
        lookahead = self.setting.num_lookahead_tokens
        allocated = self._allocate(request, rule, num_new=num_new, lookahead=lookahead)
        if allocated is None:
            return False
        assert request.row is not None
        for table, new in zip(request.row.tables, allocated.blocks, strict=True):
            table.extend(block.block_id for block in new)
        drafts = max(start + num_new - num_known, 0)
        self._schedule(request, start, num_new, drafts, rule, start)
        return True

    def _step(self, rule: Rule) -> bool:
        """Run what was scheduled, and take in its output, or that of the oldest step in flight.

        vLLM: `GPUModelRunner`, `Scheduler`, `EngineCore.step_with_batch_queue`. A device runs steps
        in the order in which they were scheduled, so that what one reads may be written after it.
        """
        if not self.is_open and not self.in_flight:
            raise NotPossible("no step is being scheduled")
        copies = self._copies()
        chunks = [self._chunk(entry) for entry in self.scheduled.values()]
        for entry in self.scheduled.values():
            for held in self.held(entry.request):
                self.step_of_block.update(dict.fromkeys(held, entry.seen))
        plan = self.planner.step(
            self.num_steps,
            [(s.block_id, d.block_id) for s, d in copies],
            chunks,
            frozenset().union(*(held for r in self.requests for held in self.held(r))),
            self._zeroed(),
        )
        # A step that goes wrong whatever blocks hold is not run, so that nothing is written.
        self.is_dead |= bool(plan.lost)
        for lost in [*(plan.lost or self.shadow.run(plan))][:1]:
            self._lost(lost)
        self.pool.free_blocks([block for pair in copies for block in pair])
        if self.scheduled:
            self._sent(tuple(self.scheduled.values()))
        if len(self.in_flight) > (self.setting.num_steps_in_flight if self.scheduled else 0):
            for entry in self.in_flight.popleft():
                self._take_output(entry)
        self.scheduled.clear()
        self.is_open = self.admits_no_more = self.has_admitted = False
        self.num_steps += 1
        return True

    def _arrive(self, rule: Rule) -> bool:
        """A connector has loaded a parked request's tokens, and they are cached.

        vLLM: `Scheduler._update_from_kv_xfer_finished`, `_update_waiting_for_remote_kv`.
        """
        self._between_steps()
        request = self._request(rule, Stage.LOADING, Stage.LEAVING)
        if request.stage is Stage.LEAVING:
            self._end(request)
            return True
        assert request.row is not None
        start, end = request.external_start, request.num_computed_tokens
        self.shadow.load(
            self.planner.loaded(
                request.request_id, request.row.tables, request.tokens(end), start, end
            ),
            self.num_steps,
        )
        self.manager.cache_blocks(request, end)
        request.stage = Stage.ARRIVED
        request.status = self._statuses["PREEMPTED" if request.num_preemptions else "WAITING"]
        return True

    def _preempt(self, rule: Rule) -> bool:
        """Take a running request's blocks away. vLLM: `Scheduler._preempt_request`."""
        request = self._request(rule, Stage.RUNNING)
        if request.number in self.scheduled or self.has_admitted:
            raise NotPossible("a victim was not scheduled in this step")
        self._begin()
        self._lose_blocks(request)
        request.stage, request.status = Stage.PREEMPTED, self._statuses["PREEMPTED"]
        request.num_computed_tokens = request.num_drafts = request.num_output_placeholders = 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.admits_no_more = True
        return True

    def _finish(self, rule: Rule) -> bool:
        """End a running request: a stop token. vLLM: `Scheduler.update_from_output`."""
        self._between_steps()
        self._end(self._request(rule, Stage.RUNNING))
        return True

    def _abort(self, rule: Rule) -> bool:
        """End any request. vLLM: `Scheduler.finish_requests`."""
        self._between_steps()
        request = self.requests[rule.request]
        if request.stage in (Stage.ENDED, Stage.LEAVING):
            raise NotPossible("it has ended")
        if request.stage is Stage.LOADING:
            request.stage = Stage.LEAVING
        else:
            self._end(request)
        return True

    def _reset(self, rule: Rule) -> bool:
        """Reset the prefix cache. vLLM: `Scheduler.reset_prefix_cache`."""
        self._between_steps()
        return bool(self.manager.reset_prefix_cache())

    def _alone(self, rule: Rule) -> bool:
        """End all others, and serve one request to its end; it fits a pool of its own, or not.

        Raises:
            NotPossible: It has ended, or does not fit.
        """
        self._between_steps()
        request = self.requests[rule.request]
        if request.stage in (Stage.ENDED, Stage.LEAVING):
            raise NotPossible("it has ended")
        most = self.most_blocks(request)
        if most > self.setting.num_gpu_blocks - 1:
            raise NotPossible("it does not fit a pool of its own")
        for other in self.requests:
            if other is not request and other.stage is not Stage.ENDED:
                self._end(other)
        refused = self._serve(request, rule)
        if refused:
            stage, computed = request.stage.value, request.num_computed_tokens
            detail = (
                f"{stage} with {computed} of {request.num_tokens} tokens computed, refused "
                f"{refused} times by a pool of {self.setting.num_gpu_blocks - 1} blocks that "
                f"nobody else holds; served alone it holds {most} at most"
            )
            seen = self.last_seen.get(request.request_id)
            if seen is not None:
                detail += f"; told {seen.told}"
            self.violations.append(
                NeverAdmitted(request.request_id, self.num_steps, 0, detail, seen)
            )
            self.is_dead = True
        return True

    def _serve(self, request: Request, rule: Rule) -> int:
        """Serve a request to its end; return the refusals that ended the attempt, 0 for none."""
        budget = self.setting.max_num_scheduled_tokens
        refusals, calls = 0, replace(rule, num_tokens=budget, num_external_tokens=0)
        preemptions = 0
        while request.stage is not Stage.ENDED and not self.is_dead:
            if request.stage is Stage.LOADING:
                self._arrive(rule)
                continue
            name = {Stage.ARRIVED: "promote", Stage.RUNNING: "run"}.get(request.stage, "admit")
            done = request.waits_for_output
            if not done:
                done = self._checked(replace(calls, name=name))
            if self.is_dead:
                break
            if not done and name == "run":
                # vLLM: the last that runs is preempted, be it the request itself.
                self._checked(replace(calls, name="preempt"))
                preemptions += 1
            self._checked(replace(calls, name="step"))
            refusals = 0 if done else refusals + 1
            if refusals >= MAX_ATTEMPTS or preemptions >= MAX_ATTEMPTS:
                return max(refusals, preemptions)
        return 0

    def _checked(self, rule: Rule, is_part: bool = True) -> bool:
        self.seen = None
        done: bool = getattr(self, f"_{rule.name}")(rule)
        if rule.name != "alone":
            self._check(rule)
        if self.after_rule is not None:
            self.after_rule(rule, is_part)
        return done

    # ---- what there is to see --------------------------------------------------------------------

    def most_blocks(self, request: Request) -> int:
        """Blocks that the request holds at most, served alone on a large pool by the real code.

        With its computed tokens loaded, and with none; whichever takes more.
        """
        computed = request.num_computed_tokens
        setting = replace(self.setting, plans=(request.plan,), num_gpu_blocks=0)
        known = self._most.get((setting, computed))
        if known is None:
            known = max(self._held_alone(request.plan, number) for number in {0, computed})
            self._most[setting, computed] = known
        return known

    def _held_alone(self, plan: Plan, num_external_tokens: int) -> int:
        alone = replace(self.setting, plans=(plan,))
        columns = cdiv(plan.num_prompt_tokens + plan.max_tokens, self.geometry.block_size)
        large = 8 + (columns + 4 + self.geometry.num_speculative_blocks) * len(self.managers)
        bindings, group_bindings, *of_spec = self._rebuild
        pool = SharedPool(bindings, group_bindings, alone, *of_spec, (), {}, large)
        rule = Rule("admit", 0, self.setting.max_num_scheduled_tokens, num_external_tokens, True)
        if num_external_tokens:
            pool._checked(rule)
            pool._checked(Rule("step"))
        if pool._serve(pool.requests[0], Rule("alone")):
            raise DriverError(f"{plan} is refused by a pool of {large} blocks")
        return pool.largest_held

    def held(self, request: Request) -> list[frozenset[int]]:
        """Block ids that a request's tables list, by group."""
        tables = self.coordinator.get_blocks(request.request_id)
        return [frozenset(block.block_id for block in t if not block.is_null) for t in tables]

    def pending_copies(self) -> list[tuple[Any, Any]]:
        """Copies on write that the step will run: source and destination."""
        pairs = (getattr(manager, QUEUED_COPIES, ()) for manager in self.managers)
        return [pair for found in pairs for pair in found]

    # ---- parts -----------------------------------------------------------------------------------

    def _request(self, rule: Rule, *stages: Stage) -> Request:
        request = self.requests[rule.request]
        if request.stage not in stages:
            raise NotPossible(f"{request.request_id} is {request.stage.value}")
        return request

    def _between_steps(self) -> None:
        if self.is_open:
            raise NotPossible("a step is being scheduled")

    def _begin(self) -> None:
        if not self.is_open:
            self.is_open = True
            self.manager.new_step_starts()

    def _new_tokens_of_waiting(
        self, request: Request, start: int, rule: Rule, local: int = 0, external: int = 0
    ) -> tuple[int, int]:
        """Tokens to compute and drafts among them; 0 where the step has too few left."""
        num_new, drafts = request.num_tokens - start, 0
        num_spec = self.geometry.num_speculative_blocks
        prefills = any(entry.continues_prefill for entry in self.scheduled.values())
        if (
            self._text.pads_drafts
            and num_spec
            and num_new == 1
            and not prefills
            and (self.scheduled or start > 0)
        ):
            if 1 + num_spec > rule.num_tokens:
                return 0, 0
            num_new, drafts = 1 + num_spec, num_spec
        num_new = min(num_new, rule.num_tokens)
        if num_new > 0:
            num_new = self._scheduler.split(request, num_new, local, external)
        if drafts and num_new != 1 + drafts:
            return min(num_new, 1), 0
        return num_new, drafts

    def _allocate(
        self,
        request: Request,
        rule: Rule,
        *,
        num_new: int,
        lookahead: int,
        local: int = 0,
        blocks: Any = None,
        external: int = 0,
        is_async: bool = False,
        reserved: int = 0,
    ) -> Any:
        """Call `allocate_slots`, and note what it estimated and drew."""
        is_waiting = request.stage is not Stage.RUNNING
        values = {
            "request": request,
            "num_new_tokens": num_new,
            "num_new_computed_tokens": local,
            "new_computed_blocks": blocks,
            "num_lookahead_tokens": lookahead,
            "num_external_computed_tokens": external,
            "delay_cache_blocks": is_async,
            "full_sequence_must_fit": is_waiting and self.setting.full_sequence_must_fit,
            "reserved_blocks": reserved,
            # What is loaded later is not cleared; from 0.32.0 it is not even recorded.
            "skip_zeroing_group_ids": tuple(range(len(self.managers))) if is_async else (),
        }
        situation = self._situation(request, num_new, local, blocks, external, lookahead, is_async)
        gate, estimate, free = None, None, 0

        def note(request_id: str, is_gate: bool, num_blocks: int) -> None:
            nonlocal gate, estimate, free
            free = self.pool.get_num_free_blocks()
            if is_gate:
                gate = num_blocks
            else:
                estimate = num_blocks

        raised, allocated = None, None
        try:
            with watching_estimates(self.coordinator, note):
                allocated = self.manager.allocate_slots(**taken(values, self._allocate_arguments))
        except PlaceholderUsed:
            raise
        except Exception as error:
            raised = error
        self.seen = StepSeen(
            request=request.request_id,
            situation=situation,
            gate=gate,
            estimate=estimate,
            drawn=None if allocated is None else free - self.pool.get_num_free_blocks(),
            free=free,
            reserved=reserved,
            raised=None if raised is None else type(raised).__name__,
            num_steps_in_flight=self.setting.num_steps_in_flight,
        )
        self.last_seen[request.request_id] = self.seen
        if raised is not None:
            self.is_dead = True
            detail = f"{type(raised).__name__}: {raised}"
            self.violations.append(
                PoolRanDry(request.request_id, self.num_steps, 0, detail, self.seen)
            )
        return allocated

    def _situation(
        self,
        request: Request,
        num_new: int,
        local: int,
        blocks: Any,
        external: int,
        lookahead: int,
        is_async: bool,
    ) -> Situation:
        """The step about to be taken, in the theorems' words."""
        tables = self.coordinator.get_blocks(request.request_id)
        start = request.num_computed_tokens + local + external
        hits = [[*found] for found in blocks.blocks] if blocks is not None else []
        free = [[not b.is_null and b.ref_cnt == 0 for b in found] for found in hits]
        mamba_free = [bool(found and found[-1]) for found in free[FIRST_MAMBA_GROUP:]]
        partial = getattr(self.managers[FIRST_MAMBA_GROUP], "_partial_hit_reqs", {})
        has_table = len(tables[FIRST_MAMBA_GROUP]) > 0
        return Situation(
            geometry=self.geometry,
            call=Call(
                num_tokens=start + num_new + lookahead,
                num_tokens_main_model=start + num_new,
                total_computed_tokens=start,
                num_local_computed_tokens=request.num_computed_tokens + local,
            ),
            table_length=len(tables[FIRST_MAMBA_GROUP]),
            prefill_length=request.prefill_length,
            num_request_tokens=request.num_tokens,
            num_hit_blocks=len(hits[FIRST_MAMBA_GROUP]) if hits else 0,
            hit_is_evictable=bool(mamba_free and mamba_free[0]),
            num_external_tokens=external,
            loads_asynchronously=is_async,
            parked=request.stage is Stage.ARRIVED,
            preempted=request.stage is Stage.PREEMPTED,
            owns_partial_tail=has_table and request.request_id in partial,
            num_mamba_groups=self.setting.num_mamba_groups,
            attention_table_length=len(tables[ATTENTION_GROUP]),
            num_evictable_attention_hits=sum(free[ATTENTION_GROUP]) if free else 0,
            other_hits_are_evictable=any(mamba_free[1:]),
        )

    def _tables(self, request: Request) -> list[list[int]]:
        tables = self.coordinator.get_blocks(request.request_id)
        return [[block.block_id for block in table] for table in tables]

    def _schedule(
        self, request: Request, start: int, num_new: int, drafts: int, rule: Rule, external: int
    ) -> None:
        assert self.seen is not None
        situation, checkpoint = self.seen.situation, 0
        if reserves_checkpoint(situation):
            checkpoint = checkpoint_position(situation)
        accepted = 0 if request.stage is not Stage.RUNNING else min(rule.num_accepted, drafts)
        continues = request.stage is Stage.RUNNING and start < request.num_tokens - 1
        samples = start + num_new >= request.num_tokens + request.num_output_placeholders
        self.scheduled[request.number] = _Scheduled(
            request,
            start,
            num_new,
            drafts,
            accepted,
            checkpoint,
            external,
            continues,
            samples,
            self.seen,
        )
        request.stage, request.status = Stage.RUNNING, self._statuses["RUNNING"]
        request.num_computed_tokens, request.num_drafts = start, 0
        if not samples and request not in self.inflight_prefills:
            self.inflight_prefills.append(request)
        elif samples and request in self.inflight_prefills:
            self.inflight_prefills.remove(request)

    def _copies(self) -> list[tuple[Any, Any]]:
        taken_copies: list[tuple[Any, Any]] = []
        for manager in self.managers:
            taken_copies += getattr(manager, "take_pending_cow_copies", tuple)()
            getattr(manager, "take_pending_boundary_state_offloads", tuple)()
        return taken_copies

    def _zeroed(self) -> list[int]:
        """Blocks to clear. vLLM: `Scheduler._get_new_block_ids_to_zero`."""
        records = any(getattr(one, "records_new_block_ids", False) for one in self.managers)
        ids = self.manager.take_new_block_ids() if records else ()
        zeroed = [block for block in ids if block not in self._not_zeroed]
        self._not_zeroed.clear()
        return zeroed

    def _chunk(self, entry: _Scheduled) -> Chunk:
        request, end = entry.request, entry.start + entry.num_new
        assert request.row is not None
        return Chunk(
            request=request.request_id,
            row=request.row,
            tokens=request.tokens(max(end, request.num_tokens)),
            start=entry.start,
            end=end,
            num_drafts=entry.num_drafts,
            num_accepted_drafts=entry.num_accepted,
            held=self.held(request),
            external_start=entry.external_start,
            checkpoint=entry.checkpoint,
        )

    def _sent(self, step: tuple[_Scheduled, ...]) -> None:
        """A step is in flight. vLLM: `Scheduler`, `AsyncScheduler`, `_update_after_schedule`."""
        self.in_flight.append(step)
        for entry in step:
            request = entry.request
            request.num_computed_tokens = entry.start + entry.num_new
            request.num_in_flight_tokens += entry.num_new
            request.num_output_placeholders += entry.samples

    def _take_output(self, entry: _Scheduled) -> None:
        """The output of a step is known. vLLM: `Scheduler.update_from_output`."""
        request = entry.request
        is_stale = request.num_stale_output_tokens > 0
        request.num_in_flight_tokens -= entry.num_new
        request.num_stale_output_tokens -= entry.num_new if is_stale else 0
        if request.stage is Stage.ENDED or not entry.samples:
            return
        made = entry.num_accepted + 1
        left = request.plan.max_tokens - request.num_output_tokens
        request.num_output_tokens += min(made, left)
        request.update_hashes()
        if not is_stale:
            num_spec = self.geometry.num_speculative_blocks
            request.num_output_placeholders -= 1
            request.num_computed_tokens -= entry.num_drafts - entry.num_accepted
            if self.setting.num_steps_in_flight or (self._text.caches_after_output and num_spec):
                known = request.num_computed_tokens - request.num_in_flight_tokens
                self.manager.cache_blocks(request, known)
            request.num_drafts = num_spec
        if request.num_output_tokens >= request.plan.max_tokens:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._lose_blocks(request)
        request.stage = Stage.ENDED

    def _lose_blocks(self, request: Request) -> None:
        self.manager.free(request)
        request.row = None
        if request in self.inflight_prefills:
            self.inflight_prefills.remove(request)

    def _lost(self, lost: StateLost) -> None:
        self.violations.append(state_lost(lost, self.num_steps, self.step_of_block.get(lost.block)))


_ALLOCATE_ARGUMENTS = (
    *ALLOCATE_ARGUMENTS,
    "full_sequence_must_fit",
    "reserved_blocks",
    "skip_zeroing_group_ids",
)
