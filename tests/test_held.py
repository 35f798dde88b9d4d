"""Claims about a request's life: faults that they must find, and that the real code shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import CopyTree

from conformance.driver import core_driver
from conformance.expectations import expected, where
from conformance.generate import refutation
from conformance.replay import replay
from models.predict import LiftedTree
from models.prove import Obligation, Verdict, prove

NEWEST = "0.33.0"
INTERFACE = Path("vllm", "v1", "kv_cache_interface.py")
TARGET = "path:tree"

#: By fault: family, tags, the theorem that finds it, and what is written in place of what.
FAULTS = {
    "the request stays on the hit that it writes into": (
        ("hit-partial", ()),
        "live-state-kept",
        "self._apply_cow(request_id, block_idx, source_block, cow_block)",
        "self._pending_cow_copies.append((source_block, cow_block)); cow_block.ref_cnt += 1",
    ),
    "a running request's table moves to the copy": (
        ("own-tail", ()),
        "live-state-kept",
        "assert req_blocks[block_idx] is source_block",
        "req_blocks[block_idx] = cow_block",
    ),
    "the copy of a hit is not asked for": (
        ("hit-partial", ()),
        "live-state-kept",
        "self._apply_cow(request_id, block_idx, source_block, cow_block)",
        "req_blocks[block_idx] = cow_block; self.block_pool.free_blocks([source_block])",
    ),
    "a block is drawn and forgotten": (
        ("running", ()),
        "conservation",
        "new_blocks = self.block_pool.get_new_blocks(num_new_blocks)",
        "new_blocks = self.block_pool.get_new_blocks(num_new_blocks + 1)[1:]",
    ),
    "a draft block that is moved is given back as well": (
        ("drafts", ()),
        "conservation",
        "        req_blocks.append(block)\n",
        "        req_blocks.append(block)\n        self.block_pool.free_blocks([block])\n",
    ),
    "a draft block that is moved stays where it was as well": (
        ("drafts", ()),
        "only-states-are-held",
        "        req_blocks[block_idx] = self._null_block\n",
        "",
    ),
    "a removal leaves out its first column": (
        ("running", ()),
        "removal-frees-skipped",
        "range(last_block - 1, first_block - 1, -1)",
        "range(last_block - 1, first_block, -1)",
    ),
    "a removal ends at the first column without a block": (
        ("running", ()),
        "removal-frees-skipped",
        "if blocks[i].is_null:\n                continue\n",
        "if blocks[i].is_null:\n                break\n",
    ),
    "a removal with a step in flight ends at the first column without a block": (
        ("running", ()),
        "removal-frees-ended",
        "if blocks[i].is_null:\n                continue\n",
        "if blocks[i].is_null:\n                break\n",
    ),
    "a table that fits its tokens is asked a block more for": (
        ("running", ()),
        "eventually-admitted",
        "            return num_new_blocks + num_evictable_computed_blocks\n",
        "            return max(num_new_blocks, 0) + 2\n",
    ),
}
#: No chunks leave a state that shows them: what the last step read is freed by its record as well.
NOT_SHOWN = {
    "a removal leaves out its first column",
    "a removal ends at the first column without a block",
}


def settled(root: Path, kind: tuple[str, tuple[str, ...]], slug: str) -> Obligation:
    (found,) = prove(LiftedTree(root), managers=["mamba-align"], kinds=[kind], theorems=[slug])
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_shown_by_the_real_code(copy_tree: CopyTree, fault: str) -> None:
    """The claim is expected to hold of the release; the copy breaks it, and shows that it does."""
    kind, slug, right, wrong = FAULTS[fault]
    assert expected(f"vllm=={NEWEST}", "mamba-align", where(*kind), slug) == "PROVED"
    root = copy_tree(NEWEST, (right, wrong))

    found = settled(root, kind, slug)

    assert found.verdict is Verdict.REFUTED
    assert found.counterexample is not None
    scenario = refutation(TARGET, found, found.counterexample, {TARGET: LiftedTree(root)})
    shown = slug in replay(scenario, core_driver(root), TARGET).violated
    assert shown is (fault not in NOT_SHOWN)


def test_a_sizing_without_the_state_before_is_found_too_small(copy_tree: CopyTree) -> None:
    """The start-up sizing is the release's own: one block less, and a chunk holds more."""
    root = copy_tree(NEWEST)
    text = (root / INTERFACE).read_text()
    smaller = text.replace("2 + self.num_speculative_blocks", "1 + self.num_speculative_blocks")
    (root / INTERFACE).write_text(smaller)

    assert smaller != text
    assert settled(root, ("running", ()), "peak-within-sizing").verdict is Verdict.REFUTED
