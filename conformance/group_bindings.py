"""Find in a vLLM tree what several KV-cache groups need, and build their `KVCacheManager`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from conformance.bindings import (
    ANY_GEOMETRY,
    BindingError,
    Modules,
    accepted_arguments,
    file_of,
    find_class,
    one_line,
    taken,
)
from models.loader import COORDINATOR, KV_CACHE_MANAGER, REQUEST, CoreError, PlaceholderUsed
from spec.vocabulary import Call, Geometry

#: Statuses of a request that `KVCacheManager.allocate_slots` is called with.
STATUSES = ("WAITING", "PREEMPTED", "RUNNING")

#: Tokens; no step comes near it.
MAX_MODEL_LEN = 2**62


@dataclass(frozen=True)
class GroupBindings:
    """What it takes to build and ask a `KVCacheManager` of several KV-cache groups."""

    manager_class: Callable[..., Any]
    blocks_class: Callable[..., Any]
    """`KVCacheBlocks`."""
    statuses: Mapping[str, Any]
    """Members of `RequestStatus`, by name."""
    attention_class: Callable[..., Any]
    config_class: Callable[..., Any]
    group_class: Callable[..., Any]
    manager_arguments: frozenset[str]
    attention_arguments: frozenset[str]
    estimator_arguments: frozenset[str]
    """Arguments of the coordinator's estimator; `prefill_end` from 0.31.0."""
    state_dtype: Any
    file: str
    """File of the `KVCacheManager`."""

    def new_kv_cache_manager(
        self,
        geometry: Geometry,
        mamba_spec: Any,
        num_gpu_blocks: int,
        num_mamba_groups: int,
        kv_cache_config: Any = None,
    ) -> Any:
        """Return a `KVCacheManager` of one full-attention group and some Mamba groups.

        Args:
            geometry: Sizes; all groups have the same `block_size`.
            mamba_spec: What `Bindings.new_spec` returns for them.
            num_gpu_blocks: Blocks that the groups share, null block included.
            num_mamba_groups: Mamba groups behind the full-attention group.
            kv_cache_config: The `KVCacheConfig` of these groups whose memory is allocated; None
                makes one without memory.

        Raises:
            BindingError: Hashes are to look ahead, and those of the release do not; the manager
                cannot be built, or lacks a part that the driver asks.
        """
        # vLLM: one token behind the checkpoint is left without any lookahead.
        num_behind, name = geometry.num_tokens_behind_checkpoint, "num_hash_lookahead_tokens"
        num_lookahead = num_behind if num_behind > 1 else 0
        if num_lookahead and name not in self.manager_arguments:
            raise BindingError(f"{self.file}: this release has no KVCacheManager.{name}")
        config = kv_cache_config or self.new_kv_cache_config(
            geometry, mamba_spec, num_gpu_blocks, num_mamba_groups
        )
        values = _kv_cache_manager_values(geometry, config, num_lookahead)
        try:
            manager = self.manager_class(**taken(values, self.manager_arguments))
        except PlaceholderUsed as error:
            raise BindingError(f"core tier: {error}") from error
        except Exception as error:
            raise BindingError(f"{self.file}: KVCacheManager: {one_line(error)}") from error
        _need(manager, "KVCacheManager", "coordinator", "block_pool")
        _need(
            manager.coordinator, "KVCacheCoordinator", "single_type_managers", "retention_interval"
        )
        return manager

    def new_kv_cache_config(
        self, geometry: Geometry, mamba_spec: Any, num_gpu_blocks: int, num_mamba_groups: int
    ) -> Any:
        """Return a `KVCacheConfig` of the same groups; arguments as for the manager."""
        attention = _attention_values(geometry, self.state_dtype)
        specs = [self.attention_class(**taken(attention, self.attention_arguments))]
        specs += [mamba_spec] * num_mamba_groups
        groups = [self.group_class([f"layer {i}"], spec) for i, spec in enumerate(specs)]
        return self.config_class(
            num_blocks=num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        )


@contextmanager
def watching_estimates(coordinator: Any, note: Callable[[str, bool, int], None]) -> Iterator[None]:
    """While it lasts, note what a coordinator's estimator says; it is asked as before.

    Args:
        coordinator: A `KVCacheCoordinator`.
        note: Told the request, whether the full-sequence gate asked, and the blocks.
    """
    ask = coordinator.get_num_blocks_to_allocate

    def asked(*arguments: Any, **named: Any) -> int:
        num_blocks: int = ask(*arguments, **named)
        request = named["request_id"] if "request_id" in named else arguments[0]
        note(request, bool(named.get("apply_admission_cap", False)), num_blocks)
        return num_blocks

    coordinator.get_num_blocks_to_allocate = asked
    try:
        yield
    finally:
        del coordinator.get_num_blocks_to_allocate


@contextmanager
def watching_allocations(
    manager: Any, before: Callable[[Any, int], None], after: Callable[[bool], None]
) -> Iterator[None]:
    """While it lasts, say when slots are allocated; they are allocated as ever.

    Args:
        manager: A `KVCacheManager`.
        before: Told the request and its new tokens.
        after: Told whether blocks were given; they are not where an exception is raised.
    """
    allocate = manager.allocate_slots

    def allocated(request: Any, num_new_tokens: int, *arguments: Any, **named: Any) -> Any:
        before(request, num_new_tokens)
        blocks = None
        try:
            blocks = allocate(request, num_new_tokens, *arguments, **named)
        finally:
            after(blocks is not None)
        return blocks

    manager.allocate_slots = allocated
    try:
        yield
    finally:
        del manager.allocate_slots


def bind_groups(modules: Modules) -> GroupBindings:
    """Find what the driver needs for several KV-cache groups in a tree.

    Raises:
        BindingError: As `bind`, or a module is missing.
    """
    kv_cache_manager, coordinator, request = (
        _find_module(modules, name) for name in (KV_CACHE_MANAGER, COORDINATOR, REQUEST)
    )
    interface, file = modules.interface, file_of(kv_cache_manager)
    manager_class = find_class(kv_cache_manager, "KVCacheManager")
    attention_class = find_class(interface, "FullAttentionSpec")
    coordinator_class = find_class(coordinator, "KVCacheCoordinator")
    status_class = find_class(request, "RequestStatus")
    for name in STATUSES:
        if not hasattr(status_class, name):
            raise BindingError(f"{file_of(request)}: no RequestStatus.{name} here (renamed?)")
    config_class = find_class(interface, "KVCacheConfig")
    group_class = find_class(interface, "KVCacheGroupSpec")
    where = file_of(interface)
    for taker, names, name in (
        (config_class, _CONFIG_ARGUMENTS, f"{where}: KVCacheConfig"),
        (group_class, _GROUP_ARGUMENTS, f"{where}: KVCacheGroupSpec"),
        (
            manager_class.allocate_slots,
            ALLOCATE_ARGUMENTS,
            f"{file}: KVCacheManager.allocate_slots",
        ),
    ):
        accepted_arguments(taker, names, name, needed=names)
    return GroupBindings(
        manager_class=manager_class,
        blocks_class=find_class(kv_cache_manager, "KVCacheBlocks"),
        statuses={name: getattr(status_class, name) for name in STATUSES},
        attention_class=attention_class,
        config_class=config_class,
        group_class=group_class,
        manager_arguments=accepted_arguments(
            manager_class,
            _kv_cache_manager_values(ANY_GEOMETRY, None, 0),
            f"{file}: KVCacheManager",
            needed=["kv_cache_config", "max_model_len", "enable_caching", "hash_block_size"],
        ),
        attention_arguments=accepted_arguments(
            attention_class,
            _attention_values(ANY_GEOMETRY, None),
            f"{where}: FullAttentionSpec",
            needed=["block_size"],
        ),
        estimator_arguments=accepted_arguments(
            coordinator_class.get_num_blocks_to_allocate,
            [*_ESTIMATOR_ARGUMENTS, *(field.name for field in fields(Call))],
            f"{file_of(coordinator)}: KVCacheCoordinator.get_num_blocks_to_allocate",
            needed=_ESTIMATOR_ARGUMENTS,
        ),
        state_dtype=getattr(modules, "state_dtype", None),
        file=file,
    )


def _find_module(modules: Modules, name: str) -> Any:
    try:
        return modules.module(name)
    except CoreError as error:
        raise BindingError(str(error)) from error
    except ImportError as error:
        raise BindingError(f"vllm tier: {one_line(error)}") from error


def _need(owner: Any, name: str, *parts: str) -> None:
    for part in parts:
        if not hasattr(owner, part):
            file = file_of(sys.modules.get(owner.__module__))
            raise BindingError(f"{file}: no {name}.{part} here (renamed?)")


def _kv_cache_manager_values(geometry: Geometry, config: Any, num_lookahead: int) -> dict[str, Any]:
    return {
        "kv_cache_config": config,
        "max_model_len": MAX_MODEL_LEN,
        "scheduler_block_size": geometry.block_size,
        "hash_block_size": geometry.hash_block_size,
        "enable_caching": True,
        "num_hash_lookahead_tokens": num_lookahead,
    }


def _attention_values(geometry: Geometry, dtype: Any) -> dict[str, Any]:
    return {"block_size": geometry.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}


_CONFIG_ARGUMENTS = ("num_blocks", "kv_cache_tensors", "kv_cache_groups")
_GROUP_ARGUMENTS = ("layer_names", "kv_cache_spec")
#: Arguments of `KVCacheManager.allocate_slots` that every release takes.
ALLOCATE_ARGUMENTS = (
    "request",
    "num_new_tokens",
    "num_new_computed_tokens",
    "new_computed_blocks",
    "num_lookahead_tokens",
    "num_external_computed_tokens",
    "delay_cache_blocks",
)
_ESTIMATOR_ARGUMENTS = (
    "request_id",
    "new_computed_blocks",
    "num_encoder_tokens",
    "apply_admission_cap",
    "num_tokens",
    "num_tokens_main_model",
    "total_computed_tokens",
)
