"""What a release's own scheduler decides about a step, taken from its `scheduler.py`.

The scheduler itself imports most of vLLM. The few functions that decide how many tokens a step
computes, and how many blocks are left for others, read nothing but numbers: they are compiled from
the tree's text and run on a stand-in for `self`. What is not taken but followed by hand stands in
`CALLERS`, each rule with the vLLM path and symbol that it was read from.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.bindings import BindingError
from spec.logic import cdiv
from spec.vocabulary import Geometry

_SCHEDULER = "sched/scheduler.py"
_SPLIT = "_mamba_block_aligned_split"
_REMAINING = "_request_remaining_blocks"
#: 0.31.0 has it as a method; from 0.32.0 it is an attribute that `__init__` computes.
_DRAFT_STEP = "_spec_decode_step_blocks"


@dataclass(frozen=True)
class CallerRule:
    """How the scheduler or the worker goes about a step, as read from their source."""

    slug: str
    sentence: str
    source: str
    """vLLM path and symbol."""


#: What the harness follows by hand, and reviewed against 0.29.0 to 0.33.0.
CALLERS = (
    CallerRule(
        "running-before-waiting",
        "A step schedules running requests before waiting ones; after a refusal or a preemption "
        "it admits nobody.",
        "v1/core/sched/scheduler.py, Scheduler.schedule (`if not preempted_reqs`, `break`)",
    ),
    CallerRule(
        "victim-not-yet-scheduled",
        "A request that is preempted was not scheduled earlier in the same step. First come, first "
        "served: the victim is the last that runs. Under the priority policy this is false.",
        "v1/core/sched/scheduler.py, Scheduler.schedule (`preempted_req = self.running[-1]`)",
    ),
    CallerRule(
        "external-behind-whole-blocks",
        "External tokens that reach beyond a local hit inside a block replace that block's part of "
        "the hit; those that do not are not loaded.",
        "v1/core/sched/scheduler.py, Scheduler.schedule (`block_aligned_local`)",
    ),
    CallerRule(
        "one-token-left-to-compute",
        "A connector leaves at least the last token to compute: the state of a Mamba layer cannot "
        "be rewound by one.",
        "distributed/kv_transfer/kv_connector/v1/nixl, _truncate_mamba_request_for_prefill",
    ),
    CallerRule(
        "copies-before-states",
        "A step runs its copies on write first, then moves each request's state to the column of "
        "its end, then computes.",
        "v1/worker/gpu_model_runner.py, GPUModelRunner._update_states, execute_model; "
        "v1/worker/mamba_utils.py, preprocess_mamba",
    ),
    CallerRule(
        "cleared-before-copies",
        "Blocks that full attention has drawn since the last step are cleared before anything else "
        "runs, but for those that an asynchronous load fills.",
        "v1/core/sched/scheduler.py, Scheduler._get_new_block_ids_to_zero, _skip_zero_block_ids; "
        "v1/worker/utils.py, KVBlockZeroer",
    ),
    CallerRule(
        "state-read",
        "A step reads its state from the column that the request's last step ended in, as many "
        "columns further on as drafts were accepted; a new or resumed request's from the column "
        "where its computed tokens end. Columns are those of the worker's table, which is only "
        "ever appended to.",
        "v1/worker/mamba_utils.py, preprocess_mamba (`prev_state_idx`, `accept_token_bias`)",
    ),
    CallerRule(
        "states-written",
        "A step writes the state of its end to the column where its tokens end, drafts included, "
        "and that of each draft one column further on. If the accepted tokens reach a block "
        "boundary, the state there is copied to the boundary's column.",
        "v1/worker/mamba_utils.py, preprocess_mamba, postprocess_mamba_fused_kernel",
    ),
    CallerRule(
        "checkpoint-written",
        "A prefill chunk writes its internal checkpoint, where one is valid, to the column before "
        "the one of its end.",
        "model_executor/layers/mamba/checkpoint.py, compute_mamba_prefill_checkpoints",
    ),
    CallerRule(
        "output-comes-later",
        "With steps in flight a step is scheduled before the output of the last is known: computed "
        "tokens count what is in flight, and so does the token that it samples. What is cached "
        "when an output is known ends where nothing is in flight. A device runs steps in order.",
        "v1/engine/core.py, EngineCore.step_with_batch_queue; v1/core/sched/async_scheduler.py, "
        "AsyncScheduler._update_after_schedule, _update_request_with_output; from 0.33.0 "
        "v1/core/sched/scheduler.py, Scheduler.update_from_output",
    ),
    CallerRule(
        "no-step-for-nothing",
        "A request whose last token is sampled by a step in flight is not scheduled again, and one "
        "that was preempted is not admitted before its output from before has come.",
        "v1/core/sched/scheduler.py, Scheduler.schedule (`num_output_placeholders`, "
        "`num_stale_output_tokens`)",
    ),
    CallerRule(
        "freed-after-the-load",
        "A request that is aborted while its tokens are loaded keeps its blocks until they are.",
        "v1/core/sched/scheduler.py, Scheduler.finish_requests (`delay_free_blocks`)",
    ),
)


@dataclass(frozen=True)
class SchedulerText:
    """Functions and facts of one tree's scheduler."""

    split: Callable[..., int]
    """`_mamba_block_aligned_split`."""
    remaining: Callable[..., int]
    """`_request_remaining_blocks`."""
    draft_step: Callable[..., int] | None
    """`_spec_decode_step_blocks` where it is a method."""
    reserves_draft_step: bool
    """Whether an asynchronous load leaves blocks for a step with drafts; from 0.31.0."""
    pads_drafts: bool
    """Whether a request admitted with one token left gets placeholder drafts; from 0.29.0 with
    the two cases that are followed here."""
    caches_after_output: bool
    """Whether blocks are cached once more when a step's output is known; from 0.33.0."""


@lru_cache(maxsize=64)
def scheduler_text(core_file: str) -> SchedulerText:
    """Take what is needed from the scheduler beside a file of the KV-cache core.

    Raises:
        BindingError: It is missing, or lacks one of the functions.
    """
    path = Path(core_file).parent / _SCHEDULER
    try:
        text = path.read_text()
    except OSError as error:
        raise BindingError(f"{path}: cannot be read: {error.strerror}") from None
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(text, filename=str(path)))
        if isinstance(node, ast.FunctionDef)
    }
    for name in (_SPLIT, _REMAINING, "update_from_output"):
        if name not in functions:
            raise BindingError(f"{path}: no Scheduler.{name} here (renamed?)")
    called = {
        node.attr
        for node in ast.walk(functions["update_from_output"])
        if isinstance(node, ast.Attribute)
    }
    namespace = _namespace(path)
    compiled = {
        name: _compiled(functions[name], namespace, path)
        for name in (_SPLIT, _REMAINING, _DRAFT_STEP)
        if name in functions
    }
    return SchedulerText(
        split=compiled[_SPLIT],
        remaining=compiled[_REMAINING],
        draft_step=compiled.get(_DRAFT_STEP),
        reserves_draft_step=_DRAFT_STEP in text,
        pads_drafts=text.count("pad_spec_decode") > 4,
        caches_after_output="cache_blocks" in called,
    )


class SchedulerStandIn:
    """Answers what the functions read of a `Scheduler`.

    Args:
        text: The tree's.
        geometry: Sizes.
        kv_cache_manager: The real one.
        max_num_scheduled_tokens: Tokens that one step may compute.
        num_lookahead_tokens: Tokens behind a step's end that get slots, for the draft model.
    """

    def __init__(
        self,
        text: SchedulerText,
        geometry: Geometry,
        kv_cache_manager: Any,
        max_num_scheduled_tokens: int,
        num_lookahead_tokens: int,
    ) -> None:
        g = geometry
        is_fine = bool(getattr(kv_cache_manager.coordinator, "enable_partial_hash_hits", False))
        self._text = text
        self._self = SimpleNamespace(
            kv_cache_manager=kv_cache_manager,
            max_model_len=kv_cache_manager.max_model_len,
            max_num_scheduled_tokens=max_num_scheduled_tokens,
            cache_config=SimpleNamespace(block_size=g.block_size),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=g.block_size,
            hash_block_size=g.hash_block_size,
            use_eagle=False,
            use_eagle_block_drop=False,
            num_hash_lookahead_tokens=0,
            num_spec_tokens=g.num_speculative_blocks,
            num_lookahead_tokens=num_lookahead_tokens,
            mamba_partial_cache_hit=is_fine and g.hash_block_size < g.block_size,
            mamba_fine_grained_prefix_cache=False,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=g.num_prefill_checkpoint_blocks > 0,
            mamba_prefill_checkpoint_alignment=g.prefill_checkpoint_alignment,
        )
        self._self._spec_decode_step_blocks = self._draft_step_blocks

    def split(self, request: Any, num_new: int, num_local: int = 0, num_external: int = 0) -> int:
        """Return the tokens of a chunk, clipped to where a state must be kept."""
        return self._text.split(self._self, request, num_new, num_local, num_external)

    def reserved_blocks(self, inflight_prefills: Any) -> int:
        """Return the blocks that an asynchronous load must leave free for others."""
        left = sum(self._text.remaining(self._self, request) for request in inflight_prefills)
        return left + (self._draft_step_blocks() if self._text.reserves_draft_step else 0)

    def _draft_step_blocks(self) -> int:
        """vLLM: `Scheduler.__init__`, `_spec_decode_step_blocks`: those of full attention."""
        if self._text.draft_step is not None:
            return self._text.draft_step(self._self)
        num_spec, num_lookahead = self._self.num_spec_tokens, self._self.num_lookahead_tokens
        return cdiv(1 + num_spec + num_lookahead, self._self.block_size) if num_spec else 0


def _namespace(path: Path) -> Mapping[str, Any]:
    """The two functions of `kv_cache_interface.py` that the split calls, and `cdiv`."""
    interface = path.parents[2] / "kv_cache_interface.py"
    names = ("get_mamba_prefill_checkpoint_position", "is_mamba_prefill_checkpoint_valid")
    namespace: dict[str, Any] = {"cdiv": cdiv}
    for node in ast.parse(interface.read_bytes(), filename=str(interface)).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            namespace[node.name] = _compiled(node, namespace, interface)
    return namespace


def _compiled(node: ast.FunctionDef, namespace: Mapping[str, Any], path: Path) -> Any:
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module([node], []), str(path), "exec", flags=flags, dont_inherit=True)
    found = dict(namespace)
    exec(code, found)
    return found[node.name]
