"""The release's own `KVCacheManager` on terms, over groups that are stood in for.

A stand-in answers each question with a variable. What proofs about a group's manager say of these
variables holds if the coordinator asks the manager what those proofs are about, so it also notes
where it is asked anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from models import term
from models.loader import INTERFACE, KV_CACHE_MANAGER, Core
from models.loader import REQUEST as REQUESTS
from models.step import REQUEST, hide
from models.term import BoolLike, IntLike, Unsupported
from spec.vocabulary import Situation, Step

#: What a stand-in answers, as fields of a `Step`.
ANSWERS = ("gate", "dry_run", "estimate", "drawn")


class Standin:
    """A group's manager as the coordinator sees it: it answers with variables.

    Args:
        core: The tree, whose signatures say what an argument means.
        name: Prefix of the variables.
        situation: What the group's exploration was about.
        asks_gate: Whether that asked the gate.
        hits: What it takes for the local hit.
        calls: Where calls are noted, of all groups in their order: a group's name and what is
            called.
    """

    def __init__(
        self,
        core: Core,
        name: str,
        situation: Situation,
        *,
        asks_gate: bool,
        hits: Any,
        calls: list[tuple[str, str]],
    ) -> None:
        self.block_size = situation.geometry.block_size
        has_table = not isinstance(situation.table_length, int)
        self.num_cached_block = {REQUEST: 0} if has_table else {}
        self.mismatches: list[BoolLike] = []
        self._calls, self.name = calls, name
        self._situation, self._asks_gate = situation, asks_gate
        self._hits = hits
        self._signatures = {
            method: inspect.signature(getattr(core.symbol_of("MambaManager"), method))
            for method in _ASKED_OF_MANAGERS
        }

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> IntLike:
        """Answer the gate, the dry run or the estimate, whichever the arguments ask for."""
        asked = self._named("get_num_blocks_to_allocate", args, kwargs)
        whole = self._situation.num_request_tokens
        is_gate = self._asks_gate and asked["num_tokens"] is whole
        dry = asked.pop("apply_admission_cap")
        what = "gate" if is_gate else "dry_run" if dry else "estimate"
        other = {"num_tokens": whole, "num_tokens_main_model": whole} if is_gate else {}
        self._note(what, asked, **other)
        return term.int_var(f"{self.name}_{what}")

    def add_local_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """`SingleTypeKVCacheManager.add_local_computed_blocks`."""
        method = "add_local_computed_blocks"
        self._note(method, self._named(method, args, kwargs))

    def allocate_external_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """`SingleTypeKVCacheManager.allocate_external_computed_blocks`."""
        method = "allocate_external_computed_blocks"
        asked = self._named(method, args, kwargs)
        asked.pop("record_for_zeroing", None)  # no block is counted for it
        self._note(method, asked)

    def allocate_new_blocks(self, *args: Any, **kwargs: Any) -> list[Any]:
        """`SingleTypeKVCacheManager.allocate_new_blocks`."""
        method = "allocate_new_blocks"
        self._note(method, self._named(method, args, kwargs))
        return []

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Leave the table as it is: it is any that a removal may leave."""
        self._calls.append((self.name, "remove_skipped_blocks"))

    def drawn(self) -> IntLike:
        """Blocks that the step draws."""
        return term.int_var(f"{self.name}_drawn")

    def _named(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        found = self._signatures[method].bind(self, *args, **kwargs)
        found.apply_defaults()
        _, *named = found.arguments.items()
        return dict(named)

    def _note(self, what: str, asked: Mapping[str, Any], **other: Any) -> None:
        """Remember a call, and where it asks anything else than the exploration was about."""
        self._calls.append((self.name, what))
        expected = {
            **vars(self._situation.call),
            "num_external_computed_tokens": self._situation.num_external_tokens,
            "new_computed_blocks": self._hits,
            "request_id": REQUEST,
            **other,
        }
        for key, value in asked.items():
            if key not in expected:
                raise Unsupported(f"{what} takes {key}, which is not modelled")
            if isinstance(value, int | term.Int):
                self.mismatches.append(term.negation(value == expected[key]))
            elif value is not expected[key]:
                raise Unsupported(f"{what} is given other {key} than the groups'")


#: Methods of a manager that the coordinator calls in a step.
_ASKED_OF_MANAGERS = (
    "get_num_blocks_to_allocate",
    "add_local_computed_blocks",
    "allocate_external_computed_blocks",
    "allocate_new_blocks",
)
#: Attributes of `KVCacheManager` and of the coordinator whose values are known here.
_KNOWN_TO_MANAGER = frozenset(
    {
        "block_pool",
        "coordinator",
        "empty_kv_cache_blocks",
        "enable_caching",
        "max_model_len",
        "retained_hit_group_ids",
        "watermark_blocks",
    }
)
_KNOWN_TO_COORDINATOR = frozenset(
    {"single_type_managers", "retention_interval", "get_num_blocks_to_allocate"}
)


class SlotsRun:
    """The release's own `KVCacheManager`, over groups that are stood in for.

    Args:
        core: The tree.
        situation: What the step is asked, and the state that it starts from.
        num_mamba_groups: Groups beside the full-attention group.
        asks_gate: Whether the full-sequence gate is asked.
    """

    def __init__(
        self, core: Core, situation: Situation, num_mamba_groups: int, *, asks_gate: bool = False
    ) -> None:
        self._core, self._situation, self._asks_gate = core, situation, asks_gate
        self._manager = _kv_cache_manager(core, num_mamba_groups)
        empty = self._manager.empty_kv_cache_blocks
        self._hits = empty
        if (
            not isinstance(situation.num_hit_blocks, int)
            and situation.call.num_local_computed_tokens > 0
        ):
            hits = tuple(_Hits() for _ in empty.blocks)
            self._hits = core.symbol(KV_CACHE_MANAGER, "KVCacheBlocks")(hits)
        self._calls: list[tuple[str, str]] = []
        self.groups = tuple(
            Standin(core, name, situation, asks_gate=asks_gate, hits=hits, calls=self._calls)
            for name, hits in zip(names_of_groups(num_mamba_groups), self._hits.blocks, strict=True)
        )
        self._answers: list[IntLike] = []
        coordinator = self._manager.coordinator
        self._ask = coordinator.get_num_blocks_to_allocate
        coordinator.get_num_blocks_to_allocate = self._recorded
        coordinator.single_type_managers = self.groups
        coordinator.retention_interval = term.int_var("retention_interval", 0)
        pool = SimpleNamespace(get_num_free_blocks=lambda: term.int_var("free_blocks", 0))
        self._manager.block_pool = pool
        self._manager.max_model_len = term.int_var("max_model_len", 1)
        self._manager.watermark_blocks = term.int_var("watermark_blocks", 0)
        self._manager.retained_hit_group_ids = ()
        for owner, known in (
            (coordinator, _KNOWN_TO_COORDINATOR),
            (self._manager, _KNOWN_TO_MANAGER),
        ):
            hide(owner, frozenset(vars(owner).keys() - known))

    def step(self) -> Step:
        """Ask a dry run, and then for slots, as the scheduler does.

        Caching what is computed takes no blocks, so it is put off.
        """
        s, call = self._situation, self._situation.call
        is_admission = isinstance(s.table_length, int)
        local = call.num_local_computed_tokens if is_admission else 0
        self._dry_run()
        blocks = self._manager.allocate_slots(
            self._request(),
            call.num_tokens_main_model - call.total_computed_tokens,
            num_new_computed_tokens=local,
            new_computed_blocks=self._hits if is_admission else None,
            num_lookahead_tokens=call.num_tokens - call.num_tokens_main_model,
            num_external_computed_tokens=s.num_external_tokens,
            delay_cache_blocks=True,
            full_sequence_must_fit=self._asks_gate,
            reserved_blocks=term.int_var("reserved_blocks", 0),
        )
        dry_run, *gate, estimate = (*self._answers, 0)[: 2 + self._asks_gate]
        if blocks is not None:
            self._check_calls()
        return Step(
            gate=gate[0] if gate else 0,
            dry_run=dry_run,
            estimate=estimate,
            drawn=sum(group.drawn() for group in self.groups),
            table_length=s.table_length,
            dry_run_left_state=True,
            refused=blocks is None,
        )

    def failed(self, error: Exception) -> Step:
        """What was seen until ``error`` ended the step."""
        dry_run, estimate = (*self._answers, 0, 0)[:2]
        length = self._situation.table_length
        return Step(dry_run, estimate, 0, length, True, raised=type(error).__name__)

    def mismatches(self) -> BoolLike:
        """Where a group was asked anything else than its exploration was about."""
        return term.disjunction(found for group in self.groups for found in group.mismatches)

    def _recorded(self, *args: Any, **kwargs: Any) -> IntLike:
        answer: IntLike = self._ask(*args, **kwargs)
        self._answers.append(answer)
        return answer

    def _dry_run(self) -> None:
        call = self._situation.call
        values = {
            "request_id": REQUEST,
            "new_computed_blocks": self._hits.blocks,
            "num_encoder_tokens": 0,
            "apply_admission_cap": True,
            **vars(call),
            "prefill_end": self._situation.prefill_length,
        }
        known = inspect.signature(self._ask).parameters
        self._recorded(**{name: value for name, value in values.items() if name in known})

    def _request(self) -> SimpleNamespace:
        """What `allocate_slots` reads of a `Request`."""
        s = self._situation
        status = self._core.symbol(REQUESTS, "RequestStatus")
        waits = isinstance(s.table_length, int) or s.parked is True
        waiting = status.PREEMPTED if s.preempted is True else status.WAITING
        computed = 0 if isinstance(s.table_length, int) else s.call.total_computed_tokens
        return SimpleNamespace(
            request_id=REQUEST,
            status=waiting if waits else status.RUNNING,
            num_computed_tokens=computed,
            num_prompt_tokens=s.prefill_length,
            num_tokens=s.num_request_tokens if self._asks_gate else s.prefill_length,
            num_in_flight_tokens=term.int_var("num_in_flight_tokens", 0),
        )

    def _check_calls(self) -> None:
        s = self._situation
        external = bool(s.num_external_tokens > 0)
        adopts = external or bool(s.num_hit_blocks > 0)
        expected = [
            "dry_run",
            *(["gate"] if self._asks_gate else []),
            "remove_skipped_blocks",
            "estimate",
            *(["add_local_computed_blocks"] if adopts else []),
            *(["allocate_external_computed_blocks"] if external else []),
            "allocate_new_blocks",
        ]
        for group in self.groups:
            calls = [what for name, what in self._calls if name == group.name]
            if calls != expected:
                raise Unsupported(
                    f"a group is called {', '.join(calls)} and not {', '.join(expected)}"
                )
        # A block drawn for one group could be the hit that another has not touched yet.
        order = [what for _, what in self._calls if what.endswith("_computed_blocks")]
        if order != sorted(order, key=lambda what: what != "add_local_computed_blocks"):
            raise Unsupported("a group draws external blocks before another has touched its hit")


class _Hits:
    """A group's local hit, which the coordinator only hands on."""


def names_of_groups(num_mamba_groups: int) -> tuple[str, ...]:
    """Return a name for the full-attention group and for each Mamba group."""
    return ("attention", "mamba", *(f"mamba_{i}" for i in range(2, num_mamba_groups + 1)))


def _kv_cache_manager(core: Core, num_mamba_groups: int) -> Any:
    """A `KVCacheManager` made by its own ``__init__``; no answer depends on the sizes it is given.

    Raises:
        CoreError: A class is not where vLLM keeps it.
    """
    interface = partial(core.symbol, INTERFACE)
    sizes = {"block_size": _ANY_SIZE}
    attention = interface("FullAttentionSpec")(**sizes, num_kv_heads=1, head_size=1, dtype=None)
    mamba = interface("MambaSpec")(
        **sizes, shapes=((1, 1),), dtypes=(None,), mamba_cache_mode="align"
    )
    group = interface("KVCacheGroupSpec")
    names = names_of_groups(num_mamba_groups)
    groups = [group([name], mamba if i else attention) for i, name in enumerate(names)]
    config = interface("KVCacheConfig")(
        num_blocks=_ANY_SIZE, kv_cache_tensors=[], kv_cache_groups=groups
    )
    kind = core.symbol(KV_CACHE_MANAGER, "KVCacheManager")
    values = {
        "kv_cache_config": config,
        "enable_caching": True,
        **dict.fromkeys(
            (
                "max_model_len",
                "scheduler_block_size",
                "hash_block_size",
                "max_num_batched_tokens",
                "max_in_flight_tokens",
            ),
            _ANY_SIZE,
        ),
    }
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in values.items() if name in known})


#: Tokens or blocks, in what is built only to be given other sizes.
_ANY_SIZE = 16
