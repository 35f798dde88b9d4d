"""Build requests on the real managers of one vLLM tree.

The same code drives both tiers. In the core tier the modules come from `models.loader.Core`, with
nothing installed and many trees in one process; in the vllm tier they are real imports, one tree
per process. What releases call things is found by `conformance.bindings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.bindings import BindingError, DriverError, Modules, bind, import_vllm
from conformance.group_bindings import GroupBindings, bind_groups
from conformance.groups import GroupsUnderTest
from conformance.life import Setting
from conformance.life_checks import CHECKS, Check
from conformance.lives import NewShadow, SharedPool
from conformance.pools import PoolShelf
from conformance.request import MAX_TABLE_COLUMNS, LimitError, Observation, RequestUnderTest
from models.loader import Core, CoreError
from models.sizing import reserved_at_startup
from spec.vocabulary import Geometry

__all__ = [
    "MAX_POOL_BLOCKS",
    "MAX_TABLE_COLUMNS",
    "BindingError",
    "Driver",
    "DriverError",
    "LimitError",
    "Observation",
    "RequestUnderTest",
    "core_driver",
    "vllm_driver",
]

#: Blocks in the largest pool that is built; one block costs about 150 bytes.
MAX_POOL_BLOCKS = 2**22

#: Specs that are kept for later requests.
_MAX_SPECS = 4096


class Driver:
    """Builds requests on the real manager of one tree.

    Args:
        modules: A `models.loader.Core`, or what `import_vllm` returns.

    Raises:
        BindingError: The tree lacks something that the driver needs.
    """

    def __init__(self, modules: Modules) -> None:
        self.bindings = bind(modules)
        self.location = str(getattr(modules, "root", None) or getattr(modules, "location", "?"))
        self._specs: dict[Geometry, tuple[Any, int]] = {}
        self._pools = PoolShelf(self.bindings)
        self.modules = modules
        self._group_bindings: GroupBindings | None = None
        self._most: dict[Any, int] = {}

    def request(
        self, geometry: Geometry, num_gpu_blocks: int, num_mamba_groups: int = 0
    ) -> RequestUnderTest:
        """Return a request without a block table, on a pool and a manager of its own.

        Args:
            geometry: Sizes, as plain ints.
            num_gpu_blocks: Pool size in blocks, null block included.
            num_mamba_groups: Mamba groups that share the pool with a full-attention group, asked
                through `KVCacheManager`; 0 asks one `MambaManager` by itself.

        Raises:
            BindingError: The release has no such feature as the geometry asks for.
            LimitError: The pool is larger than the driver builds.
        """
        if num_gpu_blocks > MAX_POOL_BLOCKS:
            raise LimitError(
                f"a pool of {num_gpu_blocks} blocks: at most {MAX_POOL_BLOCKS} are built"
            )
        if num_mamba_groups > 0:
            return self._request_on_groups(geometry, num_gpu_blocks, num_mamba_groups)
        # vLLM: one token behind the checkpoint is left without any lookahead.
        num_behind = geometry.num_tokens_behind_checkpoint
        num_lookahead = num_behind if num_behind > 1 else 0
        pool = self._pools.take(num_gpu_blocks, geometry.hash_block_size, num_lookahead)
        spec, reserved = self._spec(geometry)
        manager = self.bindings.new_manager(geometry, spec, pool)
        return RequestUnderTest(self.bindings, geometry, manager, pool, self._pools, reserved)

    def _request_on_groups(
        self, geometry: Geometry, num_gpu_blocks: int, num_mamba_groups: int
    ) -> GroupsUnderTest:
        if self._group_bindings is None:
            self._group_bindings = bind_groups(self.modules)
        spec, reserved = self._spec(geometry)
        manager = self._group_bindings.new_kv_cache_manager(
            geometry, spec, num_gpu_blocks, num_mamba_groups
        )
        bindings = self.bindings, self._group_bindings
        return GroupsUnderTest(*bindings, geometry, manager, self._pools, reserved)

    def shared_pool(
        self,
        setting: Setting,
        checks: Sequence[Check] = CHECKS,
        new_shadow: NewShadow | None = None,
        kv_cache_config: Any = None,
    ) -> SharedPool:
        """Return several requests on one `KVCacheManager`, none of them admitted yet.

        Args:
            setting: What is fixed over their lives.
            checks: What is checked after every rule.
            new_shadow: Makes what keeps the contents of blocks; None keeps Python values.
            kv_cache_config: That of the memory which blocks are kept in, where they are.

        Raises:
            BindingError: The release lacks something that the setting or the harness needs.
        """
        if self._group_bindings is None:
            self._group_bindings = bind_groups(self.modules)
        bindings = self.bindings, self._group_bindings
        spec = self._spec(setting.geometry)
        return SharedPool(
            *bindings,
            setting,
            *spec,
            checks,
            self._most,
            new_shadow=new_shadow,
            kv_cache_config=kv_cache_config,
        )

    def _spec(self, geometry: Geometry) -> tuple[Any, int]:
        """The spec of a Mamba group, and the blocks that its start-up sizing reserves."""
        found = self._specs.get(geometry)
        if found is None:
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            spec = self.bindings.new_spec(geometry)
            found = self._specs[geometry] = spec, reserved_at_startup(spec)
        return found


def core_driver(root: Path) -> Driver:
    """Return a driver for a tree's own managers under placeholders: the core tier.

    Raises:
        BindingError: The tree has no KV-cache core that can be loaded and driven.
    """
    try:
        return Driver(Core(Path(root)))
    except CoreError as error:
        raise BindingError(str(error)) from error


def vllm_driver(root: Path | None = None) -> Driver:
    """Return a driver for the vLLM that this process imports: the vllm tier.

    Raises:
        BindingError: It cannot be imported, lies outside `root`, or cannot be driven.
    """
    return Driver(import_vllm(root))
