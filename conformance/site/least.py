"""In which order the numbers of a counterexample are made least, in words."""

from __future__ import annotations

#: Groups of numbers, the first made least first: names that `models.prove` gives them, and words.
GROUPS: dict[tuple[str, ...], str] = {
    (
        "has_checkpoint_before",
        "has_column_to_retire_before",
        "was_parked",
    ): "whether earlier steps left a checkpoint pending, a column to free, or a load",
    (
        "hit_is_of_this_step",
        "hit_is_evictable",
        "other_hits_are_evictable",
    ): "whether a hit is of this same step, or evictable",
    ("num_prefill_checkpoint_blocks",): "K, the checkpoint blocks",
    ("num_speculative_blocks",): "S, the speculative blocks",
    ("prefill_end",): "where the prefill ends, 0 under dense retention",
    ("block_size",): "B, the block size",
    ("hash_block_size",): "H, the hash block size",
    (
        "prefill_checkpoint_alignment",
        "num_blocks_per_hit_unit",
        "num_tokens_behind_checkpoint",
    ): "where checkpoints and hits may lie",
    (
        "num_excess_columns",
        "num_excess_attention_columns",
    ): "columns beyond those that the computed tokens require",
    ("num_external_tokens",): "external tokens",
    ("num_hit_blocks", "num_evictable_attention_hits"): "blocks of the hit",
    ("num_local_computed_tokens", "num_computed_tokens"): "tokens computed before the step",
    ("num_tokens_main_model", "num_tokens"): "tokens after the step, then its lookahead",
    ("prefill_length", "num_request_tokens"): "the length of the prompt and of the request",
    (
        "num_in_flight_tokens",
        "num_just_ended_tokens",
    ): "tokens of steps in flight, then of the step that has just ended",
    (
        "free_blocks",
        "watermark_blocks",
        "reserved_blocks",
    ): "free, watermark and reserved blocks",
}
#: The same as a list of words.
ORDER = tuple(GROUPS.values())
