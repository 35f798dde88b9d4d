"""What the align-mode manager of a tree knows, read from the tree itself.

Releases differ in what their estimator is told, in where a checkpoint may lie, and in the records
that they keep per request. None of it is looked up by version, so a tree between two releases, or
after the last one, is read as what it is.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from models.loader import Core
from spec import assumptions
from spec.assumptions import Assumption
from spec.theorems import ADMISSIONS

#: Theorems about tables without the states that a removal takes away.
_OF_REMOVED_TABLES = frozenset(
    (
        "only-states-are-held",
        "removal-frees-skipped",
        "removal-frees-ended",
        "peak-within-sizing",
        "gate-covers-lifetime",
        "eventually-admitted",
    )
)
_POSITION_HELPER = "get_mamba_prefill_checkpoint_position"


@dataclass(frozen=True)
class Traits:
    """What a tree's `MambaManager` knows, by the release that brought it."""

    removes_up_to_processed: bool
    """0.26.0: a removal is told which tokens are processed; before, it spares S of those that may
    be in flight."""
    has_partial_tails: bool
    """0.26.0: hits that end inside a block, and copies on write of a request's own tail."""
    producer_tail_is_recorded: bool
    """0.27.0: a tail that the request cached itself is remembered for a connector."""
    producer_tail_has_block: bool
    """0.30.0: with its block; before, its tokens only."""
    has_checkpoint_blocks: bool
    """0.29.0: blocks for internal checkpoints."""
    records_checkpoint_position: bool
    """0.30.0: a pending checkpoint's position and column; before, how many blocks it takes."""
    has_eagle_drop: bool
    """0.30.0: a checkpoint one unit lower under EAGLE."""
    takes_prefill_end: bool
    """0.31.0: the estimator is told where the prefill ends."""
    aligns_checkpoints_with_hits: bool
    """0.32.0: a checkpoint lies where hits may end; before, at a hash boundary."""
    eagle_drop_leaves_tokens: bool
    """0.32.0: with the EAGLE drop no further token need lie behind a checkpoint."""
    hashes_look_ahead: bool
    """0.33.0: a hash may cover tokens behind its own."""

    @property
    def keeps_checkpoints_at_blocks(self) -> bool:
        """0.29.0: a checkpoint lies at a block boundary; recorded is only that there is one."""
        return self.has_checkpoint_blocks and not self.records_checkpoint_position

    def assumptions(self) -> tuple[Assumption, ...]:
        """Return what else is assumed for this tree."""
        found = [] if self.takes_prefill_end else [assumptions.RELEASE_IS_DENSE]
        if not self.has_partial_tails:
            found.append(assumptions.HITS_ARE_WHOLE_BLOCKS)
        if not self.has_checkpoint_blocks:
            return tuple(found)
        if not self.records_checkpoint_position:
            return (*found, assumptions.CHECKPOINT_AT_BLOCK_BOUNDARY)
        if self.aligns_checkpoints_with_hits:
            found.append(assumptions.CHECKPOINT_WHERE_HITS_END)
        else:
            found.append(assumptions.CHECKPOINT_AT_HASH_BOUNDARY)
        if self.hashes_look_ahead:
            found.append(assumptions.LOOKAHEAD_HASH_LEAVES_TOKENS)
        elif self.eagle_drop_leaves_tokens:
            found.append(assumptions.EAGLE_DROP_LEAVES_TOKENS)
        else:
            found.append(assumptions.ONE_TOKEN_BEHIND_CHECKPOINT)
        return tuple(found)

    def why_not(self, family: str, tags: tuple[str, ...], theorem: str = "") -> str | None:
        """Return why an obligation is not about this tree, None where it is."""
        starts_inside = family in ("hit-partial", "own-tail") or "own-tail" in tags
        if starts_inside and not self.has_partial_tails:
            return "no hit ends inside a block before 0.26.0"
        keeps_checkpoint = family == "checkpoint" or "checkpoint" in tags
        if keeps_checkpoint and not self.has_checkpoint_blocks:
            return "there are no checkpoint blocks before 0.29.0"
        if keeps_checkpoint and starts_inside and not self.records_checkpoint_position:
            return "0.29.0 keeps a checkpoint only where a chunk starts on a block boundary"
        has_table = family not in ADMISSIONS
        if has_table and not self.removes_up_to_processed and theorem in _OF_REMOVED_TABLES:
            return "before 0.26.0 a removal spares the states of the last S tokens"
        if theorem == "checkpoint-recorded" and not self.records_checkpoint_position:
            return "before 0.30.0 no position of a checkpoint is recorded"
        return None


def traits_of(core: Core) -> Traits:
    """Read the traits of a tree.

    Raises:
        CoreError: The tree lacks a class or a method that every release has.
    """
    estimator = core.symbol_of_manager("MambaManager", "get_num_blocks_to_allocate")
    core.symbol_of_manager("MambaManager", "allocate_new_blocks")
    names = core.names_in_class("MambaManager")
    has_checkpoint_blocks = "num_prefill_checkpoint_blocks" in names
    has_position = "_checkpoints" in names and hasattr(core.interface, _POSITION_HELPER)
    helper = getattr(core.interface, _POSITION_HELPER, None)
    removal = core.symbol_of_manager("MambaManager", "remove_skipped_blocks")
    return Traits(
        removes_up_to_processed="processed_computed_tokens"
        in inspect.signature(removal).parameters,
        has_partial_tails="_partial_hit_reqs" in names,
        producer_tail_is_recorded="_producer_partial_tail_reqs" in names,
        producer_tail_has_block="finalize_partial_tail_offload" in names,
        has_checkpoint_blocks=has_checkpoint_blocks,
        records_checkpoint_position=has_position,
        has_eagle_drop="drop_eagle_checkpoint_block" in names,
        takes_prefill_end="prefill_end" in inspect.signature(estimator).parameters,
        aligns_checkpoints_with_hits="cache_hit_alignment_tokens"
        in core.names_in_method("MambaManager", "get_num_blocks_to_allocate"),
        eagle_drop_leaves_tokens=helper is not None and _leaves_tokens(helper),
        hashes_look_ahead=helper is not None
        and "num_hash_lookahead_tokens" in inspect.signature(helper).parameters,
    )


def _leaves_tokens(helper: Any) -> bool:
    """Whether two units of tokens keep a checkpoint behind the first under the EAGLE drop."""
    unit = 4
    position: int = helper(2 * unit, unit, True)
    return position == unit
