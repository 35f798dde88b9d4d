"""One request on vLLM's own `KVCacheManager`: a full-attention group and Mamba groups, one pool.

All groups have the same block size, and all Mamba groups the same spec. The coordinator's own sums
are what is estimated; `KVCacheManager.allocate_slots` itself checks, adopts and allocates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

from conformance.bindings import BindingError, Bindings, DriverError
from conformance.group_bindings import GroupBindings, watching_estimates
from conformance.layout import MAMBA, TableSeen, attention_table, mamba_table
from conformance.pools import PoolShelf
from conformance.request import REQUEST_ID, RequestUnderTest
from spec.vocabulary import Call, Geometry, Situation, Step

#: The full-attention group; the Mamba groups follow.
ATTENTION_GROUP = 0
FIRST_MAMBA_GROUP = 1


class GroupsUnderTest(RequestUnderTest):
    """One request on several KV-cache groups.

    What is seen of the table, checkpoints and copies is seen of the first Mamba group; blocks are
    counted over all groups.
    """

    def __init__(
        self,
        bindings: Bindings,
        group_bindings: GroupBindings,
        geometry: Geometry,
        kv_cache_manager: Any,
        shelf: PoolShelf,
        reserved_at_startup: int,
    ) -> None:
        coordinator = kv_cache_manager.coordinator
        managers = tuple(coordinator.single_type_managers)
        first = managers[FIRST_MAMBA_GROUP]
        pool = kv_cache_manager.block_pool
        super().__init__(bindings, geometry, first, pool, shelf, reserved_at_startup)
        self.kv_cache_manager = kv_cache_manager
        self._groups = group_bindings
        self._asked = self._coordinator = coordinator
        self._managers = managers
        self._attention, self._mamba = managers[ATTENTION_GROUP], managers[FIRST_MAMBA_GROUP:]
        for manager in self._mamba:
            bindings.set_as_coordinator_does(geometry, manager)
        name = "cache_hit_alignment_tokens"
        if hasattr(self._attention, name):
            setattr(self._attention, name, geometry.cache_hit_alignment_tokens)
        self._num_evictable_attention_hits, self._other_hits_are_evictable = 0, False
        self._prefill_length = self._num_request_tokens = self._last_estimate = 0
        self._reserved_blocks, self._full_sequence_must_fit = 0, False

    def apply(
        self,
        call: Call,
        *,
        num_evictable_attention_hits: int = 0,
        other_hits_are_evictable: bool = False,
        prefill_length: int | None = None,
        num_request_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        **others: Any,
    ) -> Step:
        """Perform one step with `KVCacheManager.allocate_slots`, asking for its estimates first.

        Args:
            call: Arguments of the step, in tokens.
            num_evictable_attention_hits: Blocks of the full-attention group's hit, the last of it,
                that nobody references. It holds all local tokens of an admission.
            other_hits_are_evictable: Whether nobody references the hit's last block in the Mamba
                groups behind the first.
            prefill_length: Tokens to prefill; None where the step ends the prefill. Under sparse
                retention it is `call.prefill_end`.
            num_request_tokens: Tokens that the full-sequence gate is asked about first; 0 asks
                nothing.
            full_sequence_must_fit: Whether `allocate_slots` itself asks the gate, and may refuse.
            reserved_blocks: Free blocks that `allocate_slots` is told to leave for others.
            others: As for `RequestUnderTest.apply`.

        Returns:
            As `RequestUnderTest.apply`, and whether `allocate_slots` refused the step.

        Raises:
            DriverError: As `RequestUnderTest.apply`, or `allocate_slots` cannot be called so.
        """
        self._num_evictable_attention_hits = num_evictable_attention_hits
        self._other_hits_are_evictable = other_hits_are_evictable
        length = call.num_tokens_main_model if prefill_length is None else prefill_length
        self._prefill_length = call.prefill_end or length
        self._num_request_tokens = num_request_tokens
        self._check_call(
            call, others.get("num_hit_blocks", 0), others.get("num_external_tokens", 0)
        )
        # vLLM: the coordinator passes the prefill's end on under sparse retention only.
        self._coordinator.retention_interval = 0 if call.prefill_end > 0 else None
        self._reserved_blocks = reserved_blocks
        self._full_sequence_must_fit = full_sequence_must_fit
        asked = {"num_request_tokens": num_request_tokens, "reserved_blocks": reserved_blocks}
        step = super().apply(call, **asked, **others)
        return replace(step, attention_table_length=self._attention_columns())

    def situation(
        self,
        call: Call,
        prefill_length: int,
        *,
        num_evictable_attention_hits: int = 0,
        other_hits_are_evictable: bool = False,
        **others: Any,
    ) -> Situation:
        """Return what decides the family of a step that is about to be applied so."""
        return replace(
            super().situation(call, prefill_length, **others),
            num_mamba_groups=len(self._mamba),
            attention_table_length=self._attention_columns(),
            num_evictable_attention_hits=num_evictable_attention_hits,
            other_hits_are_evictable=other_hits_are_evictable,
        )

    def tables(self) -> tuple[TableSeen, ...]:
        """Return what each column of the request's tables holds, a table for each group."""
        names, several = self._names(), len(self._mamba) > 1
        return (
            attention_table(self._attention, names),
            *(
                mamba_table(manager, names, f"{MAMBA} {i}" if several else MAMBA)
                for i, manager in enumerate(self._mamba, start=1)
            ),
        )

    def _attention_columns(self) -> int:
        return len(self._attention.req_to_blocks.get(REQUEST_ID, ()))

    def _hit(self, num_tokens: int, num_blocks: int, is_evictable: bool) -> tuple[list[Any], ...]:
        """The hit of each group: all its blocks in full attention, one in the Mamba groups."""
        if self._table():
            return tuple([] for _ in self._managers)
        block_size, num_evictable = self.geometry.block_size, self._num_evictable_attention_hits
        columns = -(-num_tokens // block_size)
        hit = [self._cached_blocks(ATTENTION_GROUP, num_tokens, columns, columns, num_evictable)]
        num_tokens = min(num_tokens, num_blocks * block_size)
        for group_id in range(FIRST_MAMBA_GROUP, len(self._managers)):
            is_free = (
                is_evictable if group_id == FIRST_MAMBA_GROUP else self._other_hits_are_evictable
            )
            hit.append(self._cached_blocks(group_id, num_tokens, num_blocks, 1, int(is_free)))
        return tuple(hit)

    def _hit_of(self, manager: Any, hit: tuple[list[Any], ...]) -> Sequence[Any]:
        return hit[self._managers.index(manager)]

    def _defer(
        self,
        call: Call,
        hit: tuple[list[Any], ...],
        num_external_tokens: int,
        loads_asynchronously: bool,
    ) -> None:
        """Have `allocate_slots` put the step off.

        Raises:
            DriverError: It does not.
        """
        if self._act(call, hit, num_external_tokens, loads_asynchronously) is not None:
            reason = f"allocate_slots lets pass what is told {self._last_estimate} blocks"
            raise DriverError(f"{self._groups.file}: {reason} of {self.pool.num_gpu_blocks}")

    def _blocks_of(self, hit: tuple[list[Any], ...]) -> Iterable[Any]:
        return chain.from_iterable(hit)

    def _arguments(self, call: Call) -> dict[str, int]:
        """What the coordinator's estimator is asked, beside the hit."""
        values = {
            "num_tokens": call.num_tokens,
            "num_tokens_main_model": call.num_tokens_main_model,
            "total_computed_tokens": call.total_computed_tokens,
            "num_local_computed_tokens": call.num_local_computed_tokens,
            "prefill_end": self._prefill_length,
            "num_encoder_tokens": 0,
        }
        return {k: v for k, v in values.items() if k in self._groups.estimator_arguments}

    def _act(
        self,
        call: Call,
        hit: tuple[list[Any], ...],
        num_external_tokens: int,
        loads_asynchronously: bool,
    ) -> Sequence[Any] | None:
        """Have `allocate_slots` do the step; the blocks returned are the first Mamba group's.

        Raises:
            DriverError: It estimated something else than what was asked for before.
        """
        total, main = call.total_computed_tokens, call.num_tokens_main_model
        is_admission = not self._table()
        values = {
            "request": self._request(call, is_admission),
            "num_new_tokens": main - total,
            "num_new_computed_tokens": call.num_local_computed_tokens if is_admission else 0,
            "new_computed_blocks": self._groups.blocks_class(hit) if any(hit) else None,
            "num_lookahead_tokens": call.num_tokens - main,
            "num_external_computed_tokens": num_external_tokens,
            "reserved_blocks": self._reserved_blocks,
            # No block is cached, so that no tokens need hashes.
            "delay_cache_blocks": True,
        }
        if self._full_sequence_must_fit:
            values["full_sequence_must_fit"] = True
        allocated = self._watching_the_estimate(values)
        return None if allocated is None else allocated.blocks[FIRST_MAMBA_GROUP]

    def _watching_the_estimate(self, values: dict[str, Any]) -> Any:
        """Call `allocate_slots`, and see to it that it checks the estimate of this step."""
        estimates: list[int] = []

        def note(request_id: str, is_gate: bool, num_blocks: int) -> None:
            if not is_gate:
                estimates.append(num_blocks)

        with watching_estimates(self._coordinator, note):
            allocated = self.kv_cache_manager.allocate_slots(**values)
        refused_by_gate = self._full_sequence_must_fit and allocated is None and not estimates
        if not refused_by_gate and estimates != [self._last_estimate]:
            raise DriverError(
                f"{self._groups.file}: allocate_slots estimated {estimates}, and the same question "
                f"before it gave {self._last_estimate}"
            )
        return allocated

    def _estimate(self, arguments: dict[str, int], hit: Any, *, is_dry_run: bool) -> Any:
        estimate = super()._estimate(arguments, hit, is_dry_run=is_dry_run)
        if not is_dry_run:
            self._last_estimate = estimate
        return estimate

    def _request(self, call: Call, is_admission: bool) -> _Request:
        """What `allocate_slots` reads of the `Request`, as the scheduler has it before the step."""
        if is_admission:
            status = "PREEMPTED" if self._was_preempted else "WAITING"
        else:
            # vLLM: a request whose external tokens have arrived waits once more.
            status = "WAITING" if self._is_parked else "RUNNING"
        return _Request(
            request_id=REQUEST_ID,
            status=self._groups.statuses[status],
            num_computed_tokens=0 if is_admission else call.total_computed_tokens,
            num_prompt_tokens=self._prefill_length,
            num_tokens=self._num_request_tokens or self._prefill_length,
            num_in_flight_tokens=0,
        )

    def _cache_computed(self, request: Any, num_tokens: int) -> None:
        """Have all groups cache; full attention adds a hash only, and copies nothing."""
        self._coordinator.retention_interval = None
        values = {"request": request, "num_computed_tokens": num_tokens}
        self._cache(self._coordinator, "cache_blocks", values)

    def _check_call(self, call: Call, num_hit_blocks: int, num_external_tokens: int) -> None:
        """Refuse what no caller can ask of `allocate_slots`."""
        total, local = call.total_computed_tokens, call.num_local_computed_tokens
        if local + num_external_tokens != total:
            raise DriverError(
                f"{local} local and {num_external_tokens} external tokens are not {total}"
            )
        columns = -(-local // self.geometry.block_size)
        if not self._table():
            if local and not num_hit_blocks and not num_external_tokens:
                raise DriverError(f"no hit holds the {local} local tokens")
            if local % self.geometry.hash_block_size:
                raise DriverError(f"a hit of {local} tokens is not a multiple of hash_block_size")
        else:
            columns = 0
        if self._num_evictable_attention_hits > columns:
            reason = f"{self._num_evictable_attention_hits} evictable blocks"
            raise DriverError(f"{reason} of {columns} of the full-attention hit")
        last = max(self._prefill_length, self._num_request_tokens - 1)
        if call.prefill_end > 0 and last != call.prefill_end:
            raise DriverError(f"prefill_end {call.prefill_end}: the request prefills {last} tokens")


class _Request(SimpleNamespace):
    """Stands in for a `Request`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BindingError(f"allocate_slots reads Request.{name}, which the driver does not know")
