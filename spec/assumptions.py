"""What callers keep, and why it is fair to assume it.

A theorem says nothing about a step that breaks one of these. Each names the vLLM path and symbol
that keeps it; paths are relative to the `vllm` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spec.logic import cdiv, implies
from spec.vocabulary import BoolLike, Situation

#: Numbers of speculative blocks that a proof covers one by one.
#: More than 8 draft positions are not offered by any model that uses align mode.
SPECULATIVE_BLOCKS = tuple(range(9))
#: Numbers of checkpoint blocks; the code asks only whether there is one.
CHECKPOINT_BLOCKS = (0, 1)


@dataclass(frozen=True)
class Assumption:
    """A condition on a step that its callers keep.

    Attributes:
        slug: Name in results.
        sentence: The condition in English.
        reason: Who keeps it, at least once as `path.py, symbol` of vLLM.
        holds: The condition, for numbers and terms.
    """

    slug: str
    sentence: str
    reason: str
    holds: Callable[[Situation], BoolLike]


HASH_DIVIDES_BLOCK = Assumption(
    "hash-divides-block",
    "hash_block_size divides block_size.",
    "v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes raises ValueError otherwise; "
    "v1/core/block_pool.py, BlockPool.cache_partial_block asserts it",
    lambda s: s.geometry.block_size % s.geometry.hash_block_size == 0,
)
SPECULATION_IN_RANGE = Assumption(
    "speculation-in-range",
    "num_speculative_blocks is 0 to 8.",
    "an enumeration, not a limit of vLLM: MambaSpec.num_speculative_blocks follows "
    "config/speculative.py, SpeculativeConfig.num_speculative_tokens",
    lambda s: (
        (s.geometry.num_speculative_blocks >= SPECULATIVE_BLOCKS[0])
        & (s.geometry.num_speculative_blocks <= SPECULATIVE_BLOCKS[-1])
    ),
)
AT_MOST_ONE_CHECKPOINT_BLOCK = Assumption(
    "at-most-one-checkpoint-block",
    "num_prefill_checkpoint_blocks is 0 or 1.",
    "models/kimi_k3/nvidia/kda.py, num_prefill_checkpoint_blocks is int(alignment is not None); "
    "v1/core/single_type_kv_cache_manager.py, MambaManager asks only whether it is above 0",
    lambda s: (
        (s.geometry.num_prefill_checkpoint_blocks >= CHECKPOINT_BLOCKS[0])
        & (s.geometry.num_prefill_checkpoint_blocks <= CHECKPOINT_BLOCKS[-1])
    ),
)
STEP_COMPUTES_TOKENS = Assumption(
    "step-computes-tokens",
    "A step computes at least one token.",
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots raises ValueError for 0 new tokens "
    "where nothing is adopted",
    lambda s: s.call.num_tokens_main_model >= s.call.total_computed_tokens + 1,
)
LOOKAHEAD_ADDS_TOKENS = Assumption(
    "lookahead-adds-tokens",
    "num_tokens is num_tokens_main_model plus the lookahead, which is not negative.",
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: num_tokens_need_slot; "
    "v1/core/sched/scheduler.py, Scheduler.schedule keeps num_new_tokens within max_model_len",
    lambda s: s.call.num_tokens >= s.call.num_tokens_main_model,
)
NOTHING_EXTERNAL = Assumption(
    "nothing-external",
    "All computed tokens are local.",
    "definition of the families: no external tokens; v1/core/kv_cache_manager.py, "
    "KVCacheManager.allocate_slots: num_local_computed_tokens",
    lambda s: (
        (s.call.num_local_computed_tokens == s.call.total_computed_tokens)
        & (s.num_external_tokens == 0)
        & (s.num_hit_blocks == 0)
    ),
)
RETENTION_DECIDES_PREFILL_END = Assumption(
    "retention-decides-prefill-end",
    "prefill_end is 0 (dense retention) or the length to prefill (sparse retention).",
    "v1/core/kv_cache_coordinator.py, KVCacheCoordinator.get_num_blocks_to_allocate sets it to 0 "
    "unless retention_interval is 0; KVCacheManager.allocate_slots computes it",
    lambda s: (s.call.prefill_end == 0) | (s.call.prefill_end == s.prefill_length),
)
PROMPT_HAS_TOKENS = Assumption(
    "prompt-has-tokens",
    "There is at least one token to prefill.",
    "v1/engine/input_processor.py, InputProcessor._validate_prompt_len refuses an empty prompt; "
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: prefill_end",
    lambda s: s.prefill_length >= 1,
)
ADMISSION_STARTS_AT_ZERO = Assumption(
    "admission-starts-at-zero",
    "A request without hit, external tokens or table has computed nothing.",
    "v1/core/sched/scheduler.py, Scheduler.schedule: a waiting request starts from its hits; "
    "Scheduler._preempt_request sets num_computed_tokens to 0",
    lambda s: implies(s.table_length == 0, s.call.total_computed_tokens == 0),
)
TABLE_HOLDS_COMPUTED_STATE = Assumption(
    "table-holds-computed-state",
    "A running request has computed tokens, its table ends with the block of its running state and "
    "its speculative blocks, none of them null, and the speculative ones are its own and unhashed.",
    "the state invariant, shown inductive by the theorem state-invariant; "
    "v1/core/sched/scheduler.py, Scheduler._update_after_schedule advances num_computed_tokens by "
    "what was scheduled",
    lambda s: implies(
        s.table_length > 0,
        (s.call.total_computed_tokens >= 1)
        & (
            s.table_length
            == cdiv(s.call.total_computed_tokens, s.geometry.block_size)
            + s.geometry.num_speculative_blocks
        ),
    ),
)

LEFT_OVER_NEEDS_CHECKPOINT_BLOCKS = Assumption(
    "left-over-needs-checkpoint-blocks",
    "An earlier estimate left a checkpoint pending only if there are checkpoint blocks.",
    "v1/core/single_type_kv_cache_manager.py, MambaManager._needs_internal_checkpoint asks for "
    "them first",
    lambda s: implies(s.has_left_over_checkpoint, s.geometry.num_prefill_checkpoint_blocks > 0),
)

RELEASE_IS_DENSE = Assumption(
    "release-is-dense",
    "prefill_end is 0: the release knows no sparse retention.",
    "before 0.31.0 v1/core/single_type_kv_cache_manager.py, MambaManager takes no prefill_end; "
    "from then on v1/core/kv_cache_coordinator.py, KVCacheCoordinator.get_num_blocks_to_allocate "
    "passes it",
    lambda s: s.call.prefill_end == 0,
)

#: In force for every family that has obligations.
ASSUMPTIONS: tuple[Assumption, ...] = (
    HASH_DIVIDES_BLOCK,
    SPECULATION_IN_RANGE,
    AT_MOST_ONE_CHECKPOINT_BLOCK,
    STEP_COMPUTES_TOKENS,
    LOOKAHEAD_ADDS_TOKENS,
    NOTHING_EXTERNAL,
    RETENTION_DECIDES_PREFILL_END,
    PROMPT_HAS_TOKENS,
    ADMISSION_STARTS_AT_ZERO,
    TABLE_HOLDS_COMPUTED_STATE,
    LEFT_OVER_NEEDS_CHECKPOINT_BLOCKS,
)
#: In force besides, for trees whose estimator is not told where the prefill ends.
OF_SOME_RELEASES: tuple[Assumption, ...] = (RELEASE_IS_DENSE,)
