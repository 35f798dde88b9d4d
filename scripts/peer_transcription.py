"""Two steps of the align-mode manager, transcribed into plain Python by hand, for CrossHair.

A transcription: right only as long as somebody keeps it in step with vLLM's source
(`vllm/v1/core/single_type_kv_cache_manager.py`, `MambaManager`). Block counts alone, no hits, no
drafts, dense retention, checkpoint alignment 1, no EAGLE. A test holds it to the real managers.
"""

from __future__ import annotations

#: The one block size, and hash block size, of the contracts that do not leave them open.
FIXED_BLOCK_SIZE, FIXED_HASH_BLOCK_SIZE = 16, 4


def keeps_checkpoint(block: int, unit: int, start: int, end: int) -> bool:
    """Whether a chunk of a running request keeps an internal checkpoint."""
    position = (end - 1) // unit * unit
    column = -(-end // block) - 2
    reachable = start % unit == 0 and start + unit <= position < end
    return reachable and column > (start - 1) // block


def checkpoint_step(
    block: int, speculative: int, start: int, end: int, *, caps_by_minimum: bool
) -> tuple[int, int]:
    """Return estimate and blocks drawn of a chunk that keeps a checkpoint; 0.31.0 caps, if so."""
    held = -(-start // block) + speculative
    required = -(-end // block) + speculative
    estimate = required - held
    if caps_by_minimum and estimate > 0:
        estimate = min(estimate, 2 + speculative)
    skipped = required - speculative - 1
    padded = max(held, skipped - 1) if held < skipped else held
    return estimate, max(required - padded, 0)


def external_step(block: int, speculative: int, external: int, end: int) -> tuple[int, int]:
    """Return estimate and blocks drawn of an admission whose first tokens a connector brings."""
    required = -(-end // block) + speculative
    estimate = min(required, 1 + speculative)
    held = -(-external // block)
    loaded = held - (external - 1) // block
    padded = max(held, required - speculative - 1)
    return estimate, loaded + max(required - padded, 0)


# ---- contracts: what comes first is supposed, what comes last is claimed -------------------------


def overcount(per_block: int, unit: int, speculative: int, start: int, end: int) -> None:
    """0.30.0: the estimate of a step that keeps a checkpoint is what it draws."""
    assert per_block >= 1 and unit >= 1 and 0 <= speculative <= 2 and 1 <= start < end
    block = per_block * unit
    if keeps_checkpoint(block, unit, start, end):
        estimate, drawn = checkpoint_step(block, speculative, start, end, caps_by_minimum=False)
        assert estimate == drawn


def undercount(block: int, speculative: int, external: int, end: int) -> None:
    """No step draws more than was estimated for it."""
    assert block >= 1 and 0 <= speculative <= 2 and 1 <= external < end
    estimate, drawn = external_step(block, speculative, external, end)
    assert drawn <= estimate


def exact(per_block: int, unit: int, speculative: int, start: int, end: int) -> None:
    """0.31.0: the estimate of a step that keeps a checkpoint is what it draws."""
    assert per_block >= 1 and unit >= 1 and 0 <= speculative <= 2 and 1 <= start < end
    block = per_block * unit
    if keeps_checkpoint(block, unit, start, end):
        estimate, drawn = checkpoint_step(block, speculative, start, end, caps_by_minimum=True)
        assert estimate == drawn


def exact_of_one_block_size(speculative: int, start: int, end: int) -> None:
    """The same for one block size."""
    assert 0 <= speculative <= 2 and 1 <= start < end
    block, unit = FIXED_BLOCK_SIZE, FIXED_HASH_BLOCK_SIZE
    if keeps_checkpoint(block, unit, start, end):
        estimate, drawn = checkpoint_step(block, speculative, start, end, caps_by_minimum=True)
        assert estimate == drawn
