"""The KV-cache tensors of a release, allocated by its own code (vllm tier).

Specs, page sizes, the layout and the views of each layer are the release's. Groups overlay each
other in one allocation, so that a block id is a page of every layer of whichever group holds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

from conformance.bindings import (
    BindingError,
    DriverError,
    Modules,
    accepted_arguments,
    file_of,
    one_line,
    taken,
)
from spec.logic import cdiv
from spec.vocabulary import Geometry

WORD_BYTES = 8
#: Words that hold a signature: the least a token's keys and values of one head take up.
SLOT_WORDS = 8
#: Layers in each group; with fewer than two nothing shows that layers do not meet.
LAYERS_PER_GROUP = 2
NUM_KV_HEADS = 2
#: Tokens that a convolution looks back, its own included.
CONV_KERNEL = 4

_UTILS = "vllm.v1.worker.utils"
_LAYOUT = "vllm.v1.kv_cache_layout"
_STATES = "vllm.model_executor.layers.mamba.mamba_utils"
_LAYER = "vllm.model_executor.layers.mamba.abstract"
#: Modules that `get_kv_cache_config_from_groups` has stood in, the newest first.
_PLANNING = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
_CONFIG = "get_kv_cache_config_from_groups"


class DeviceMemoryError(DriverError):
    """The device has not so much memory; one line with the bytes asked for."""


@dataclass(frozen=True)
class Lanes:
    """Where slots of one kind stand, in words of the allocation: one lane per layer (and head)."""

    bases: tuple[int, ...]
    """First word of block 0, by lane."""
    block_stride: int
    num_slots: int
    """Slots of a block."""
    slot_stride: int
    """Words from one slot to the next."""
    slot_words: int


@dataclass(frozen=True)
class GroupPlaces:
    """Where the contents of one group stand."""

    attention: Lanes | None = None
    """Keys and values, a slot per token."""
    window: Lanes | None = None
    """The convolution's window, a slot per token, and behind it per draft."""
    state: Lanes | None = None
    """The temporal state, one slot."""


@dataclass(frozen=True)
class KVCache:
    """An allocation, and where in it everything stands.

    Attributes:
        config: The release's `KVCacheConfig`.
        layout: Name of its `KVCacheLayout`.
        tensors: Tensors by layer, as `allocate_kv_cache` returns them.
        states: Views of the states (window, temporal state) by Mamba layer.
        words: The allocation, as int64.
        groups: Places, by group.
        num_window_tokens: Tokens in a convolution's window, without drafts.
        page_words: Words of one block of one layer.
    """

    config: Any
    layout: str
    tensors: dict[str, Any]
    states: dict[str, tuple[Any, ...]]
    words: Any
    groups: tuple[GroupPlaces, ...]
    num_window_tokens: int
    page_words: int

    @property
    def num_blocks(self) -> int:
        """Pages of each layer, that of the null block included."""
        return int(self.config.num_blocks)

    @property
    def block_stride(self) -> int:
        """Words from one block's page of a layer to the next block's."""
        return int(self.config.kv_cache_tensors[0].block_stride) // WORD_BYTES

    @property
    def layer_bases(self) -> tuple[int, ...]:
        """First word of each layer's pages, in every group."""
        tensor = self.config.kv_cache_tensors[0]
        layers = range(len(tensor.layers))
        return tuple((tensor.offset + n * tensor.layer_stride) // WORD_BYTES for n in layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the allocation."""
        return int(self.words.numel()) * WORD_BYTES


class CacheBuilder:
    """Allocates KV caches with the code of one imported vLLM.

    Args:
        modules: What `bindings.import_vllm` returns.

    Raises:
        BindingError: The release lacks what it takes; those before 0.29.0 do.
    """

    def __init__(self, modules: Modules) -> None:
        self._torch = importlib.import_module("torch")
        self._interface = modules.interface
        utils, layout, states, layer = (
            _module(modules, n) for n in (_UTILS, _LAYOUT, _STATES, _LAYER)
        )
        self._allocate = _found(utils, "allocate_kv_cache")
        self._layouts = _found(layout, "KVCacheLayout")
        self._state_shapes = _found(states, "MambaStateShapeCalculator").mamba2_state_shape
        self._bind_states = _found(layer, "MambaBase").bind_kv_cache
        planning = [m for m in (_module_or_none(modules, n) for n in _PLANNING) if m is not None]
        self._new_config = next((vars(m)[_CONFIG] for m in planning if _CONFIG in vars(m)), None)
        if self._new_config is None:
            raise BindingError(f"{file_of(planning[-1])}: no {_CONFIG} here (renamed?)")

    @property
    def layouts(self) -> list[str]:
        """Layouts that a hybrid model with padded pages may have, by name."""
        return [layout.name for layout in self._layouts if layout.is_block_compact]

    def build(
        self,
        geometry: Geometry,
        num_mamba_groups: int,
        num_gpu_blocks: int,
        layout: str,
        device: str,
    ) -> KVCache:
        """Allocate a KV cache of one full-attention group and some Mamba groups, all zero.

        Args:
            geometry: Sizes.
            num_mamba_groups: Groups.
            num_gpu_blocks: Blocks, null block included.
            layout: One of `layouts`.
            device: For torch.

        Raises:
            BindingError: The release's code cannot be called so.
            DeviceMemoryError: There is not so much memory.
        """
        try:
            groups, shapes = self._groups(geometry, num_mamba_groups)
            config = self._new_config(
                _config_read(self._layouts[layout], num_gpu_blocks), groups, 0
            )
        except Exception as error:
            raise BindingError(f"{file_of(self._interface)}: {one_line(error)}") from error
        at = {(t.size, t.offset, t.layer_stride, t.block_stride) for t in config.kv_cache_tensors}
        if len(at) != 1:
            raise BindingError(f"{file_of(self._interface)}: groups do not overlay each other")
        num_bytes = config.kv_cache_tensors[0].size
        tensors = self._allocated(config, device, layout, num_bytes)
        states = {
            name: self._states_of(tensors[name], shapes)
            for group in groups[1:]
            for name in group.layer_names
        }
        words = self._torch.empty(0, dtype=self._torch.int64, device=device)
        words.set_(next(iter(tensors.values())).untyped_storage())
        places = [GroupPlaces(attention=self._attention_lanes(groups[0], tensors))]
        places += [self._state_places(group, states) for group in groups[1:]]
        return KVCache(
            config,
            layout,
            tensors,
            states,
            words,
            tuple(places),
            CONV_KERNEL - 1,
            groups[0].kv_cache_spec.page_size_bytes // WORD_BYTES,
        )

    def _allocated(self, config: Any, device: str, layout: str, num_bytes: int) -> dict[str, Any]:
        torch = self._torch
        try:
            found: dict[str, Any] = self._allocate(
                config, torch.device(device), self._layouts[layout]
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise BindingError(f"{_UTILS}: allocate_kv_cache: {one_line(error)}") from error
            raise DeviceMemoryError(out_of_memory(device, num_bytes)) from error
        return found

    def _groups(self, g: Geometry, num_mamba_groups: int) -> tuple[list[Any], list[Any]]:
        """Groups whose pages have one size, as vLLM makes them: the Mamba page is padded.

        vLLM: `model_executor/models/config.py`, `HybridAttentionMambaModelConfig`.
        """
        dtype = self._torch.float32
        shapes = self._state_shapes(
            tp_world_size=1,
            intermediate_size=8,
            n_groups=1,
            num_heads=2,
            head_dim=4,
            state_size=4,
            conv_kernel=CONV_KERNEL,
            num_spec=g.num_speculative_blocks,
        )
        mamba = {
            "block_size": g.block_size,
            "shapes": shapes,
            "dtypes": (dtype,) * len(shapes),
            "mamba_cache_mode": "align",
            "num_speculative_blocks": g.num_speculative_blocks,
            "num_prefill_checkpoint_blocks": g.num_prefill_checkpoint_blocks,
            "prefill_checkpoint_alignment": g.prefill_checkpoint_alignment,
        }
        new_spec = self._interface.MambaSpec
        name = f"{file_of(self._interface)}: MambaSpec"
        mamba = taken(mamba, accepted_arguments(new_spec, mamba, name, ["shapes", "dtypes"]))
        content = new_spec(**mamba).page_size_bytes
        slot = SLOT_WORDS * WORD_BYTES
        slots = cdiv(content, g.block_size * NUM_KV_HEADS * slot)
        attention = self._interface.FullAttentionSpec(
            block_size=g.block_size,
            num_kv_heads=NUM_KV_HEADS,
            # Keys and values of float32.
            head_size=slots * slot // 8,
            dtype=dtype,
        )
        spec = new_spec(**mamba, page_size_padded=attention.page_size_bytes)
        specs = [attention, *[spec] * num_mamba_groups]
        group = self._interface.KVCacheGroupSpec
        return [
            group([f"layers.{LAYERS_PER_GROUP * i + n}" for n in range(LAYERS_PER_GROUP)], spec)
            for i, spec in enumerate(specs)
        ], [*zip(shapes, mamba["dtypes"], strict=True)]

    def _states_of(self, page: Any, shapes: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
        """Views of a layer's states. vLLM: `MambaBase.bind_kv_cache`."""
        layer = SimpleNamespace(
            get_state_shape=lambda: [shape for shape, _ in shapes],
            get_state_dtype=lambda: [dtype for _, dtype in shapes],
        )
        self._bind_states(layer, page)
        return tuple(layer.kv_cache)

    def _attention_lanes(self, group: Any, tensors: dict[str, Any]) -> Lanes:
        """A slot per token, layer and head. vLLM: views `[B, H, N, C]`."""
        views = [tensors[name] for name in group.layer_names]
        block, head, token = (_words(views[0], stride) for stride in views[0].stride()[:3])
        first = [_words(view, view.storage_offset()) for view in views]
        return Lanes(
            tuple(start + head * h for start in first for h in range(NUM_KV_HEADS)),
            block,
            views[0].shape[2],
            token,
            _words(views[0], views[0].shape[-1]),
        )

    def _state_places(self, group: Any, states: dict[str, tuple[Any, ...]]) -> GroupPlaces:
        windows, temporal = zip(*(states[name] for name in group.layer_names), strict=True)
        return GroupPlaces(
            window=_lanes(windows, windows[0].shape[1], windows[0].shape[2]),
            state=_lanes(temporal, 1, prod(temporal[0].shape[1:])),
        )


def out_of_memory(device: str, num_bytes: int) -> str:
    """Say that a device has too little memory, and how much was asked for."""
    return f"--device {device}: out of memory: {num_bytes:,} bytes asked for"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch says so; on the CPU it is a plain RuntimeError."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
        or "storage size calculation overflowed" in text
    )


def _lanes(views: Sequence[Any], num_slots: int, num_elements: int) -> Lanes:
    bases = tuple(_words(view, view.storage_offset()) for view in views)
    first, slot_words = views[0], _words(views[0], num_elements)
    return Lanes(bases, _words(first, first.stride(0)), num_slots, slot_words, slot_words)


def _words(view: Any, num_elements: int) -> int:
    words, rest = divmod(num_elements * view.element_size(), WORD_BYTES)
    if rest:
        raise BindingError(f"a place in the KV cache is no multiple of {WORD_BYTES} bytes")
    return words


def _config_read(layout: Any, num_gpu_blocks: int) -> Any:
    """What `get_kv_cache_config_from_groups` reads of a `VllmConfig`."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=num_gpu_blocks,
            prefix_cache_retention_interval=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )


def _module(modules: Modules, name: str) -> Any:
    try:
        return modules.module(name)
    except Exception as error:  # Importing runs the tree's own code, which may raise anything.
        reason = f"vllm tier: {name}: {one_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            reason += "; KV memory needs 0.29.0 or newer"
        raise BindingError(reason) from error


def _module_or_none(modules: Modules, name: str) -> Any:
    try:
        return modules.module(name)
    except ImportError:
        return None


def _found(module: Any, name: str) -> Any:
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None:
        raise BindingError(f"{file_of(module)}: no {name} here; KV memory needs 0.29.0 or newer")
    return found
