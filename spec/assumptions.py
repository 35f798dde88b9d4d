"""What callers keep, and why it is fair to assume it.

A theorem says nothing about a step that breaks one of these. Each names the vLLM path and symbol
that keeps it; paths are relative to the `vllm` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spec.families import is_decoding, is_overwide
from spec.logic import cdiv, choose, implies, negation
from spec.vocabulary import BoolLike, IntLike, Situation

#: Numbers of speculative blocks that a proof covers one by one.
#: More than 8 draft positions are not offered by any model that uses align mode.
SPECULATIVE_BLOCKS = tuple(range(9))
#: Numbers of checkpoint blocks; the code asks only whether there is one.
CHECKPOINT_BLOCKS = (0, 1)


#: Most tokens that a hash looks ahead: as many as drafts, see `SPECULATIVE_BLOCKS`.
HASH_LOOKAHEAD_TOKENS = SPECULATIVE_BLOCKS[-1]


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
    "A step computes at least one token, or parks the request and computes none.",
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots raises ValueError for 0 new tokens "
    "where nothing is adopted; v1/core/sched/scheduler.py, Scheduler.schedule asks 0 new tokens "
    "for an asynchronous load",
    lambda s: choose(
        s.loads_asynchronously,
        s.call.num_tokens_main_model == s.call.total_computed_tokens,
        s.call.num_tokens_main_model >= s.call.total_computed_tokens + 1,
    ),
)
LOOKAHEAD_ADDS_TOKENS = Assumption(
    "lookahead-adds-tokens",
    "num_tokens is num_tokens_main_model plus the lookahead, which is not negative.",
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: num_tokens_need_slot; "
    "v1/core/sched/scheduler.py, Scheduler.schedule keeps num_new_tokens within max_model_len",
    lambda s: s.call.num_tokens >= s.call.num_tokens_main_model,
)
COMPUTED_TOKENS_ARE_LOCAL_OR_EXTERNAL = Assumption(
    "computed-tokens-are-local-or-external",
    "Computed tokens are local ones, and those that a connector brings.",
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: num_local_computed_tokens, "
    "total_computed_tokens, which max_model_len does not cut: the prompt and so the hit lie below",
    lambda s: (
        (s.num_external_tokens >= 0)
        & (s.call.num_local_computed_tokens >= 0)
        & (s.call.total_computed_tokens == s.call.num_local_computed_tokens + s.num_external_tokens)
    ),
)
HIT_ENDS_WITH_LOCAL_TOKENS = Assumption(
    "hit-ends-with-local-tokens",
    "A hit is null blocks and then the block that its local tokens end in; with external tokens "
    "it may be shorter than the local tokens, since another group found those. Only an admission "
    "has one.",
    "v1/core/single_type_kv_cache_manager.py, MambaManager.find_longest_cache_hit; "
    "v1/core/kv_cache_manager.py, KVCacheManager.get_computed_blocks_for_connector reports the "
    "full-attention hit; KVCacheCoordinator.allocate_new_computed_blocks asserts that a running "
    "request has none",
    lambda s: choose(
        s.table_length > 0,
        (s.num_hit_blocks == 0) & (s.num_external_tokens == 0),
        choose(
            s.num_external_tokens > 0,
            (s.num_hit_blocks >= 0) & (s.num_hit_blocks <= _local_columns(s)),
            s.num_hit_blocks == _local_columns(s),
        ),
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
TABLE_HOLDS_COMPUTED_STATE = Assumption(
    "table-holds-computed-state",
    "A running or parked request has computed tokens, its table covers them and ends with the "
    "block of its running state and its speculative blocks, none of them null, and the speculative "
    "ones are its own and unhashed.",
    "the state invariant, shown inductive by the theorem state-invariant; "
    "v1/core/sched/scheduler.py, Scheduler._update_after_schedule advances num_computed_tokens by "
    "what was scheduled, and rejected drafts take some back: a table may be longer, not shorter",
    lambda s: implies(
        s.table_length > 0,
        (s.call.total_computed_tokens >= 1)
        & (
            s.table_length
            >= cdiv(s.call.total_computed_tokens, s.geometry.block_size)
            + s.geometry.num_speculative_blocks
        ),
    ),
)

TAIL_ENDS_INSIDE_BLOCK = Assumption(
    "tail-ends-inside-block",
    "A partial tail of the request's own ends inside a block.",
    "v1/core/single_type_kv_cache_manager.py, MambaManager._cache_partial_tail_block records a "
    "tail only where num_tokens % block_size is not 0 and its block is not null",
    lambda s: implies(
        s.owns_partial_tail,
        negation(s.call.total_computed_tokens % s.geometry.block_size == 0),
    ),
)
PARKED_TAIL_ENDS_TABLE = Assumption(
    "parked-tail-ends-table",
    "A partial tail that a connector loaded is the last state of its table.",
    "v1/core/single_type_kv_cache_manager.py, "
    "SingleTypeKVCacheManager.allocate_external_computed_blocks leaves null blocks before it, of "
    "which MambaManager._cache_partial_tail_block records none",
    lambda s: implies((s.parked | s.was_parked) & s.owns_partial_tail, negation(is_overwide(s))),
)
LEFT_OVER_NEEDS_CHECKPOINT_BLOCKS = Assumption(
    "left-over-needs-checkpoint-blocks",
    "An earlier estimate left a checkpoint pending only if there are checkpoint blocks.",
    "v1/core/single_type_kv_cache_manager.py, MambaManager._needs_internal_checkpoint asks for "
    "them first",
    lambda s: implies(s.has_left_over_checkpoint, s.geometry.num_prefill_checkpoint_blocks > 0),
)

REQUEST_HOLDS_ALL_TOKENS = Assumption(
    "request-holds-all-tokens",
    "A waiting request has as many tokens as it prefills, or one more; a step goes no further.",
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots: prefill_end is the greater of "
    "num_prompt_tokens and num_tokens - 1; v1/core/sched/scheduler.py, Scheduler.schedule: "
    "num_new_tokens is at most request.num_tokens - num_computed_tokens",
    lambda s: (
        (s.num_request_tokens >= s.prefill_length)
        & (s.num_request_tokens <= s.prefill_length + 1)
        & (s.call.num_tokens_main_model <= s.num_request_tokens)
    ),
)

RELEASE_IS_DENSE = Assumption(
    "release-is-dense",
    "prefill_end is 0: the release knows no sparse retention.",
    "before 0.31.0 v1/core/single_type_kv_cache_manager.py, MambaManager takes no prefill_end; "
    "from then on v1/core/kv_cache_coordinator.py, KVCacheCoordinator.get_num_blocks_to_allocate "
    "passes it",
    lambda s: s.call.prefill_end == 0,
)
HITS_ARE_WHOLE_BLOCKS = Assumption(
    "hits-are-whole-blocks",
    "A local hit ends on a block boundary.",
    "before 0.26.0 v1/core/single_type_kv_cache_manager.py, MambaManager.find_longest_cache_hit "
    "finds whole blocks only",
    lambda s: implies(
        s.table_length == 0, s.call.num_local_computed_tokens % s.geometry.block_size == 0
    ),
)
CHECKPOINT_AT_BLOCK_BOUNDARY = Assumption(
    "checkpoint-at-block-boundary",
    "Where there are checkpoint blocks, hash units are blocks: a checkpoint lies at the chunk's "
    "last block boundary, and hits end at one.",
    "0.29.0 v1/core/single_type_kv_cache_manager.py, MambaManager._needs_internal_checkpoint knows "
    "block boundaries only, and no alignment; v1/core/block_pool.py, BlockPool.get_cached_block "
    "finds hits by hash unit",
    lambda s: implies(
        s.geometry.num_prefill_checkpoint_blocks > 0,
        (s.geometry.hash_block_size == s.geometry.block_size)
        & (s.geometry.cache_hit_alignment_tokens == s.geometry.block_size)
        & (s.geometry.prefill_checkpoint_alignment == 1)
        & (s.geometry.num_tokens_behind_checkpoint == 0)
        & ((s.table_length > 0) | (s.call.num_local_computed_tokens % s.geometry.block_size == 0)),
    ),
)
CHECKPOINT_AT_HASH_BOUNDARY = Assumption(
    "checkpoint-at-hash-boundary",
    "A checkpoint lies at a multiple of hash_block_size.",
    "0.30.0 and 0.31.0 v1/core/single_type_kv_cache_manager.py, "
    "MambaManager.get_num_blocks_to_allocate passes hash_block_size to "
    "get_mamba_prefill_checkpoint_position",
    lambda s: s.geometry.cache_hit_alignment_tokens == s.geometry.hash_block_size,
)
CHECKPOINT_WHERE_HITS_END = Assumption(
    "checkpoint-where-hits-end",
    "A checkpoint lies at a multiple of hash_block_size, or of whole blocks.",
    "from 0.32.0 v1/core/kv_cache_coordinator.py, "
    "HybridKVCacheCoordinator._cache_hit_alignment_tokens is hash_block_size or "
    "scheduler_block_size, a multiple of every group's block size",
    lambda s: (
        (s.geometry.cache_hit_alignment_tokens == s.geometry.hash_block_size)
        | (s.geometry.cache_hit_alignment_tokens % s.geometry.block_size == 0)
    ),
)
ONE_TOKEN_BEHIND_CHECKPOINT = Assumption(
    "one-token-behind-checkpoint",
    "One token of the chunk lies behind its checkpoint, at least.",
    "0.30.0 and 0.31.0 v1/kv_cache_interface.py, get_mamba_prefill_checkpoint_position",
    lambda s: s.geometry.num_tokens_behind_checkpoint == 1,
)
EAGLE_DROP_LEAVES_TOKENS = Assumption(
    "eagle-drop-leaves-tokens",
    "One token of the chunk lies behind its checkpoint, at least; none with the EAGLE drop, which "
    "leaves some itself.",
    "0.32.0 v1/kv_cache_interface.py, get_mamba_prefill_checkpoint_position: proof_limit",
    lambda s: (
        s.geometry.num_tokens_behind_checkpoint
        == choose(s.geometry.drop_eagle_checkpoint_block, 0, 1)
    ),
)
LOOKAHEAD_HASH_LEAVES_TOKENS = Assumption(
    "lookahead-hash-leaves-tokens",
    "One token of the chunk, or as many as a hash looks ahead, lie behind its checkpoint, at "
    "least; none with the EAGLE drop.",
    "from 0.33.0 v1/kv_cache_interface.py, get_mamba_prefill_checkpoint_position: proof_limit; "
    "config/vllm.py, VllmConfig.num_hash_lookahead_tokens is at most num_speculative_tokens",
    lambda s: choose(
        s.geometry.drop_eagle_checkpoint_block,
        s.geometry.num_tokens_behind_checkpoint == 0,
        (s.geometry.num_tokens_behind_checkpoint >= 1)
        & (s.geometry.num_tokens_behind_checkpoint <= HASH_LOOKAHEAD_TOKENS),
    ),
)
GROUPS_SHARE_BLOCK_SIZE = Assumption(
    "groups-share-block-size",
    "The full-attention group and the Mamba groups have the same block_size.",
    "platforms/interface.py, Platform._align_hybrid_block_size sets mamba_block_size to block_size "
    "in align mode",
    lambda s: True,
)
MAMBA_GROUPS_AGREE = Assumption(
    "mamba-groups-agree",
    "All Mamba groups hold a request's states in the same columns; whether somebody references "
    "the block that a hit ends in may differ.",
    "v1/core/kv_cache_coordinator.py, KVCacheCoordinator asks and allocates every group with the "
    "same numbers; v1/core/block_pool.py, BlockPool.get_cached_block finds a hit in all groups of "
    "one spec or in none, and the first of several blocks with one hash in each",
    lambda s: True,
)
ATTENTION_COVERS_MAMBA = Assumption(
    "attention-covers-mamba",
    "The full-attention table is at least as long as the Mamba tables without their speculative "
    "blocks.",
    "the state invariant, shown inductive by the theorem state-invariant; "
    "v1/core/kv_cache_coordinator.py, KVCacheCoordinator.allocate_new_blocks gives every group "
    "num_tokens, lookahead included",
    lambda s: choose(
        s.table_length > 0,
        s.attention_table_length >= s.table_length - s.geometry.num_speculative_blocks,
        s.attention_table_length == 0,
    ),
)
ATTENTION_HIT_HOLDS_LOCAL_TOKENS = Assumption(
    "attention-hit-holds-local-tokens",
    "The full-attention group's hit is a block for every column of the local tokens, any of which "
    "may be evictable.",
    "v1/core/single_type_kv_cache_manager.py, FullAttentionManager.find_longest_cache_hit; "
    "v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator.find_longest_cache_hit cuts it to "
    "cdiv(hit_length, block_size)",
    lambda s: (
        (s.num_evictable_attention_hits >= 0)
        & (s.num_evictable_attention_hits <= choose(s.table_length > 0, 0, _local_columns(s)))
    ),
)
NULL_BLOCK_IS_NOT_FREE = Assumption(
    "null-block-is-not-free",
    "Fewer blocks are free than the pool has.",
    "v1/core/block_pool.py, BlockPool.__init__ takes the null block out of the free list for good",
    lambda s: True,
)
TOKENS_FIT_MODEL = Assumption(
    "tokens-fit-model",
    "Neither the step nor the request has more tokens than max_model_len.",
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots cuts num_tokens_need_slot and "
    "full_num_tokens there; num_tokens is what is left",
    lambda s: True,
)
RETENTION_IS_OF_COORDINATOR = Assumption(
    "retention-is-of-coordinator",
    "prefill_end is the length to prefill where the coordinator's retention_interval is 0, else 0.",
    "v1/core/kv_cache_coordinator.py, KVCacheCoordinator.get_num_blocks_to_allocate",
    lambda s: True,
)

SKIPPED_COLUMNS_ARE_NULL = Assumption(
    "skipped-columns-are-null",
    "Once skipped blocks are removed, a table holds no block before its running state, but the one "
    "of its last computed token where drafts were rejected.",
    "the theorems removal-frees-skipped and only-states-are-held, one after the other; "
    "v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots removes skipped blocks before it "
    "estimates, all of them where nothing is in flight",
    lambda s: True,
)
DECODING_STAYS_IN_A_BLOCK = Assumption(
    "decoding-stays-in-a-block",
    "A decoding step computes at most 1 + S tokens, no more than a block holds, and at most S are "
    "taken back.",
    "v1/core/sched/scheduler.py, Scheduler.schedule adds at most num_spec_tokens drafts to one "
    "token, of which Scheduler.update_from_output takes back those rejected; "
    "platforms/interface.py, Platform._align_hybrid_block_size makes block_size a multiple of the "
    "attention backend's, 16 tokens or more",
    lambda s: implies(
        (s.table_length > 0) & is_decoding(s),
        (
            s.call.num_tokens_main_model
            <= s.call.total_computed_tokens + 1 + s.geometry.num_speculative_blocks
        )
        & (s.geometry.block_size >= 1 + s.geometry.num_speculative_blocks)
        & (
            s.table_length
            <= cdiv(
                s.call.total_computed_tokens + s.geometry.num_speculative_blocks,
                s.geometry.block_size,
            )
            + s.geometry.num_speculative_blocks
        ),
    ),
)
STATES_ARE_RECORDED = Assumption(
    "states-are-recorded",
    "Columns that were retired hold no block. Where the release does not count them, a table holds "
    "none before its running state but in the column before, and in the one recorded as the next "
    "to free.",
    "the theorems only-states-are-held and retirement-recorded: a step leaves the state that it "
    "started from, which it records, and its checkpoint; "
    "v1/core/single_type_kv_cache_manager.py, MambaManager._remove_blocks_in_range counts retired "
    "columns from 0.30.0",
    lambda s: True,
)
A_STEP_IS_IN_FLIGHT = Assumption(
    "a-step-is-in-flight",
    "A step of the request is in flight, the one before it has just ended, and that one started "
    "from computed tokens.",
    "v1/engine/core.py, EngineCore.step_with_batch_queue schedules before the output of the last "
    "step is known; v1/core/sched/scheduler.py, Scheduler._update_after_schedule and "
    "update_from_output count num_in_flight_tokens",
    lambda s: (
        (s.num_in_flight_tokens >= 1)
        & (s.num_just_ended_tokens >= 1)
        & (s.num_in_flight_tokens + s.num_just_ended_tokens < s.call.total_computed_tokens)
    ),
)
STATES_IN_FLIGHT_ARE_RECORDED = Assumption(
    "states-in-flight-are-recorded",
    "Columns that were retired hold no block. Where the release does not count them, a table holds "
    "none before the state of the last token whose step has ended but the one that this step "
    "started from and its checkpoint; the column recorded as the next to free is that one, or a "
    "later one that a step in flight started from.",
    "the theorem removal-frees-ended itself, at the removal before; only-states-are-held and "
    "retirement-recorded: a step leaves the state that it started from, which it records, and its "
    "checkpoint",
    lambda s: True,
)

#: In force for every family.
ASSUMPTIONS: tuple[Assumption, ...] = (
    HASH_DIVIDES_BLOCK,
    SPECULATION_IN_RANGE,
    AT_MOST_ONE_CHECKPOINT_BLOCK,
    STEP_COMPUTES_TOKENS,
    LOOKAHEAD_ADDS_TOKENS,
    COMPUTED_TOKENS_ARE_LOCAL_OR_EXTERNAL,
    HIT_ENDS_WITH_LOCAL_TOKENS,
    RETENTION_DECIDES_PREFILL_END,
    PROMPT_HAS_TOKENS,
    TABLE_HOLDS_COMPUTED_STATE,
    TAIL_ENDS_INSIDE_BLOCK,
    PARKED_TAIL_ENDS_TABLE,
    LEFT_OVER_NEEDS_CHECKPOINT_BLOCKS,
)
#: In force besides, for some releases: `models.traits` says for which.
OF_SOME_RELEASES: tuple[Assumption, ...] = (
    RELEASE_IS_DENSE,
    HITS_ARE_WHOLE_BLOCKS,
    CHECKPOINT_AT_BLOCK_BOUNDARY,
    CHECKPOINT_AT_HASH_BOUNDARY,
    CHECKPOINT_WHERE_HITS_END,
    ONE_TOKEN_BEHIND_CHECKPOINT,
    EAGLE_DROP_LEAVES_TOKENS,
    LOOKAHEAD_HASH_LEAVES_TOKENS,
)
#: In force besides, for what is asked of the full-sequence gate.
OF_THE_GATE: tuple[Assumption, ...] = (REQUEST_HOLDS_ALL_TOKENS,)

#: In force besides, where a coordinator adds up groups.
OF_GROUPS: tuple[Assumption, ...] = (ATTENTION_COVERS_MAMBA, ATTENTION_HIT_HOLDS_LOCAL_TOKENS)
#: Made by claims themselves: `models.held` says them of the columns that a claim is about.
OF_CLAIMS: tuple[Assumption, ...] = (
    SKIPPED_COLUMNS_ARE_NULL,
    DECODING_STAYS_IN_A_BLOCK,
    STATES_ARE_RECORDED,
    A_STEP_IS_IN_FLIGHT,
    STATES_IN_FLIGHT_ARE_RECORDED,
)
#: The same, about what no situation says: `models.groups` says it of variables of its own.
OF_THE_COORDINATOR: tuple[Assumption, ...] = (
    GROUPS_SHARE_BLOCK_SIZE,
    MAMBA_GROUPS_AGREE,
    NULL_BLOCK_IS_NOT_FREE,
    TOKENS_FIT_MODEL,
    RETENTION_IS_OF_COORDINATOR,
)
#: Numbers of Mamba groups that a proof covers one by one.
MAMBA_GROUPS = (1, 2)


def _local_columns(s: Situation) -> IntLike:
    return cdiv(s.call.num_local_computed_tokens, s.geometry.block_size)
