"""A release's own copies, on a twin of the memory: each leaves what ours leaves (vllm tier).

Blocks are copied by `copy_kv_cache_blocks_inplace` (`v1/worker/utils.py`), states are moved by
`preprocess_mamba` and `postprocess_mamba_align_gpu` (`v1/worker/mamba_utils.py`), which also decide
which columns. The latter two launch triton kernels: on a CUDA device compiled, on the CPU by
triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.bindings import Modules, accepted_arguments, one_line, taken
from conformance.kv_cache import KVCache
from conformance.life_plan import StepPlan

#: Requests in a step, and columns of a table, at most.
MAX_REQUESTS, MAX_COLUMNS = 16, 256
#: What is copied in each part of a step.
_PARTS: dict[str, Callable[[StepPlan], Sequence[Any]]] = {
    "clearing": lambda plan: plan.zeroed,
    "copies": lambda plan: plan.copies,
    "moves before": lambda plan: plan.moves_before,
    "moves after": lambda plan: plan.moves_after,
}


@contextmanager
def triton_for(device: str, release: str) -> Iterator[None]:
    """Let the release's kernels run in this process, which has not imported vLLM yet.

    vLLM asks for its own version before it uses triton, and an unpacked tree has none: for as long
    as this lasts it has. Without a device, triton interprets kernels.

    Args:
        device: `cpu` or `cuda`.
        release: As "0.33.0".
    """
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        importlib.metadata.version("vllm")
        yield
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    with tempfile.TemporaryDirectory(prefix="capproof-vllm-") as folder:
        info = Path(folder) / f"vllm-{release}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
        sys.path.append(folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


class ReleaseCopies:
    """Compares copies and moves with the release's own.

    Args:
        modules: What `bindings.import_vllm` returns.
        most: Moves of states that are compared of each part, and as often where nothing is to be
            moved; None is all.
    """

    def __init__(self, modules: Modules, most: int | None = None) -> None:
        self._most = most
        self._torch = importlib.import_module("torch")
        self._worker = modules.module("vllm.v1.worker.utils")
        self._mamba = modules.module("vllm.v1.worker.mamba_utils")
        states = modules.module("vllm.model_executor.layers.mamba.mamba_utils")
        self._copy_functions = states.MambaStateCopyFuncCalculator.mamba2_state_copy_func()
        buffers = modules.module("vllm.v1.utils")
        self._buffer = buffers.CpuGpuBuffer
        self.pins = self._torch.cuda.is_available()
        if not self.pins:
            _pin_nothing()
        self.has_triton = bool(modules.module("vllm.triton_utils").HAS_TRITON)
        self.compared = dict.fromkeys(_PARTS, 0)
        """Steps whose part was compared."""
        self.copying = dict.fromkeys(_PARTS, 0)
        """Those of them in which something is copied."""
        self.differing: list[str] = []
        """Those that differ, a line each."""
        self.refused: list[str] = []
        """What the release's own code raised."""

    @property
    def shown(self) -> str:
        """What was compared, in words."""
        said = ", ".join(
            f"{number} of {part} ({self.copying[part]} write)"
            for part, number in self.compared.items()
        )
        why = "" if self.has_triton else "; triton cannot run here, so that no move was compared"
        if self.refused:
            why += f"; {len(self.refused)} could not be run, the first: {self.refused[0]}"
        return f"copies compared with the release's own: {said}; {len(self.differing)} differ{why}"

    def around(self, cache: KVCache, twin: KVCache) -> Callable[..., None]:
        """Return what runs a part of a step on a cache, and the release's own on its twin."""
        worker = _Worker(self, twin)

        def run(part: str, plan: StepPlan, do: Callable[[], None]) -> None:
            theirs = worker.part(part, plan)
            if theirs is None or not self._wanted(part, plan):
                do()
                return
            twin.words.copy_(cache.words)
            do()
            try:
                said = theirs()
            except Exception as error:  # The release's own code, which may raise anything.
                self.refused.append(one_line(error))
                return
            self.compared[part] += 1
            self.copying[part] += bool(_PARTS[part](plan))
            if not said and not self._torch.equal(cache.words, twin.words):
                said = "memory differs"
            if said:
                self.differing.append(f"{part} of step {plan.step}, {cache.layout}: {said}")

        return run

    def _wanted(self, part: str, plan: StepPlan) -> bool:
        if part == "copies":
            return True
        done = self.copying[part]
        if not _PARTS[part](plan):
            done = self.compared[part] - done
        return self.has_triton and (self._most is None or done < self._most)


def _pin_nothing() -> None:
    """Tell the release not to pin memory, which on a platform that it does not know it would."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("vllm."):
            if hasattr(module, "PIN_MEMORY"):
                module.PIN_MEMORY = False
            if hasattr(module, "is_pin_memory_available"):
                module.is_pin_memory_available = lambda: False


class _Worker:
    """What the release's functions take for a worker, on one cache."""

    def __init__(self, copies: ReleaseCopies, cache: KVCache) -> None:
        self._torch, self._utils, self._mamba = copies._torch, copies._worker, copies._mamba
        self._cache, self._config = cache, cache.config
        spec = cache.config.kv_cache_groups[-1].kv_cache_spec
        self._functions = {spec.mamba_type: copies._copy_functions}
        self._layers = {
            name: SimpleNamespace(kv_cache=[*states]) for name, states in cache.states.items()
        }
        device = cache.words.device
        self._tables = [
            self._torch.zeros((MAX_REQUESTS, MAX_COLUMNS), dtype=self._torch.int32, device=device)
            for _ in cache.groups
        ]
        self._bufs = None
        if copies.has_triton:
            self._bufs = self._mamba.MambaBuffers.create(
                max_num_reqs=MAX_REQUESTS,
                kv_cache_config=cache.config,
                copy_funcs=self._functions,
                make_buffer=lambda *size, dtype: copies._buffer(
                    *size, dtype=dtype, device=device, pin_memory=copies.pins
                ),
                device=device,
                with_postprocess_align=spec.num_speculative_blocks > 0,
            )

    @cached_property
    def _zeroer(self) -> Any:
        """The release's `KVBlockZeroer`, of the full-attention layers."""
        group, tensors = self._config.kv_cache_groups[0], self._cache.tensors
        attention = SimpleNamespace(
            kv_cache_spec=group.kv_cache_spec,
            kv_cache_group_id=0,
            layer_names=group.layer_names,
            kernel_block_size=None,
            kernel_block_stride=0,
        )
        values = {
            "device": self._cache.words.device,
            "attn_groups_iter": [attention],
            "kernel_block_sizes": [group.kv_cache_spec.block_size],
            "static_forward_context": {
                name: SimpleNamespace(kv_cache=tensors[name]) for name in group.layer_names
            },
            "num_blocks": self._cache.num_blocks,
            "runner_only_attn_layers": set(),
        }
        zeroer = self._utils.KVBlockZeroer
        return zeroer(**taken(values, accepted_arguments(zeroer, values, "KVBlockZeroer", [])))

    def part(self, part: str, plan: StepPlan) -> Callable[[], str] | None:
        """Return what does a part of a step; None where there is nothing to do."""
        if part == "clearing":
            return lambda: self._zero(plan)
        if part == "copies":
            return lambda: self._copy(plan)
        if part == "moves before":
            return lambda: self._move_before(plan)
        if self._bufs is None or self._bufs.postprocess_align is None:
            return None
        return lambda: self._move_after(plan)

    def _zero(self, plan: StepPlan) -> str:
        self._zeroer.zero_block_ids([*plan.zeroed])
        return ""

    def _copy(self, plan: StepPlan) -> str:
        tensors = [*self._cache.tensors.values()]
        self._utils.copy_kv_cache_blocks_inplace(tensors, self._cache.num_blocks, plan.copies)
        return ""

    def _stage(self, plan: StepPlan) -> None:
        """Have what the release's functions read of a worker say what it is before the step."""
        for i, row in enumerate(plan.batch):
            for table, ids in zip(self._tables, row.tables, strict=True):
                table[i, : len(ids)] = self._torch.tensor(ids, dtype=table.dtype)
        self._batch = SimpleNamespace(
            req_ids=[row.request for row in plan.batch],
            num_accepted_tokens_cpu=self._torch.tensor(
                [row.num_accepted for row in plan.batch], dtype=self._torch.int32
            ).numpy(),
            block_table=[
                SimpleNamespace(get_device_tensor=lambda _, table=table: table)
                for table in self._tables
            ],
        )
        self._requests = {
            row.request: SimpleNamespace(
                num_computed_tokens=row.num_computed_tokens, block_ids=[*row.tables]
            )
            for row in plan.batch
        }
        self._output = SimpleNamespace(
            finished_req_ids=(),
            preempted_req_ids=None,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
            num_scheduled_tokens={r.request: r.num_scheduled_tokens for r in plan.batch},
            scheduled_spec_decode_tokens={
                r.request: [0] * r.num_draft_tokens for r in plan.batch if r.num_draft_tokens
            },
        )

    def _move_before(self, plan: StepPlan) -> str:
        assert self._bufs is not None
        self._stage(plan)
        columns = {row.request: row.state_column for row in plan.batch if row.state_column >= 0}
        self._mamba.preprocess_mamba(
            self._output,
            self._config,
            SimpleNamespace(enable_prefix_caching=True),
            columns,
            self._batch,
            self._requests,
            self._layers,
            self._functions,
            self._bufs.preprocess,
            self._bufs.postprocess_align,
        )
        ours = {row.request: row.end_column for row in plan.batch}
        return "" if columns == ours else f"columns {columns}, here {ours}"

    def _move_after(self, plan: StepPlan) -> str:
        assert self._bufs is not None
        self._stage(plan)
        number = len(plan.batch)
        self._mamba.stage_postprocess_inputs_to_gpu(
            self._bufs.postprocess_align,
            self._output,
            self._batch.req_ids,
            number,
            self._requests,
            {row.request: row.end_column for row in plan.batch},
        )
        sampled = self._torch.tensor(
            [row.num_accepted_drafts + 1 for row in plan.batch], dtype=self._torch.int32
        )
        accepted = sampled.clone()
        self._mamba.postprocess_mamba_align_gpu(
            bufs=self._bufs,
            num_reqs=number,
            num_accepted_tokens_gpu=sampled.to(self._cache.words.device),
            num_accepted_tokens_cpu_tensor=accepted,
            input_batch=self._batch,
            kv_cache_config=self._config,
            forward_context=self._layers,
            mamba_state_copy_funcs=self._functions,
        )
        if self._cache.words.is_cuda:
            self._torch.cuda.synchronize()
        ours = [row.num_accepted_after for row in plan.batch]
        return "" if accepted.tolist() == ours else f"accepted {accepted.tolist()}, here {ours}"
