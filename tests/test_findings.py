"""What docs/findings/ says of the newest release.

Shown by vLLM's own `allocate_slots`, mended in a patched copy, and the mend proved.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import CopyTree

from conformance.replay import PROJECT_ROOT, tier_environment
from conformance.targets import resolve
from models.predict import LiftedTree
from models.prove import Verdict, prove

#: The newest release that is described.
NEWEST = "0.33.0"
#: The state that a connector loads takes a block of its own unless the hit's block is that block.
COUNT_THE_LOADED_BLOCK = (
    (
        "            num_tokens = num_tokens_main_model\n",
        """            num_tokens = num_tokens_main_model
            num_adopted = cdiv(total_computed_tokens, self.block_size)
            is_loaded = (
                total_computed_tokens > num_local_computed_tokens
                and len(new_computed_blocks) < num_adopted
            )
            if is_loaded:
                new_computed_blocks = [self._null_block] * num_adopted
""",
    ),
    (
        """            has_partial_hit = (
                self._has_partial_local_hit(
                    new_computed_blocks, num_local_computed_tokens
                )
""",
        """            has_partial_hit = (
                not is_loaded
                and self._has_partial_local_hit(
                    new_computed_blocks, num_local_computed_tokens
                )
""",
    ),
    (
        "            return num_new_blocks + num_evictable_computed_blocks\n",
        """            return (
                num_new_blocks + int(is_loaded) + num_evictable_computed_blocks
            )
""",
    ),
)
#: A table that is longer than required needs nothing; it gives nothing back either.
NEVER_LESS_THAN_NOTHING = (
    "            num_evictable_computed_blocks = self._get_num_evictable_blocks(\n",
    """            num_new_blocks = max(num_new_blocks, 0)
            num_evictable_computed_blocks = self._get_num_evictable_blocks(
""",
)
#: Of several groups as well where all releases are gone through.
MANAGERS = () if os.environ.get("CAPPROOF_ALL_RELEASES") else ("mamba-align",)
SAFE = ("no-undercount", "exact-estimate", "allocation-succeeds", "estimate-nonnegative")

#: One full-attention and one align group; a prompt whose first tokens a connector brings.
ALLOCATE_SLOTS = """
import inspect, sys, torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec,
)
from vllm.v1.request import Request

def call(function, **values):
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})

def answer(block_size, external, new, num_blocks):
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    mamba = MambaSpec(
        block_size=block_size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    groups = [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["mamba"], mamba)]
    manager = call(
        KVCacheManager,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        max_model_len=2**20,
        enable_caching=True,
        hash_block_size=block_size,
        scheduler_block_size=block_size,
        max_num_batched_tokens=2**20,
        max_in_flight_tokens=2**20,
    )
    request = call(
        Request,
        request_id="request",
        prompt_token_ids=[0] * (external + new),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        eos_token_id=0,
    )
    try:
        blocks = manager.allocate_slots(
            request, new, num_external_computed_tokens=external, full_sequence_must_fit=True
        )
        return "refused" if blocks is None else "admitted"
    except ValueError as error:
        return str(error)

for question in sys.argv[1:]:
    print(answer(*map(int, question.split(","))))
"""


def allocate_slots(questions: Iterable[tuple[int, ...]]) -> list[str]:
    """Ask the newest release's `KVCacheManager` for a request's first slots, in one process.

    Args:
        questions: Tokens per block of both groups, tokens that a connector brings, tokens to
            compute behind them, and blocks in the pool, null block included.
    """
    root = resolve(f"vllm=={NEWEST}").root
    asked = [",".join(map(str, question)) for question in questions]
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ALLOCATE_SLOTS), *asked],
        capture_output=True,
        text=True,
        cwd=PROJECT_ROOT,
        env=tier_environment(root),
        timeout=300,
        check=True,
    )
    return process.stdout.strip().splitlines()[-len(asked) :]


def verdicts(root: Path, *families: str) -> dict[str, set[str]]:
    """Verdicts of the theorems that keep the pool from running dry, by kind of step."""
    found: dict[str, set[str]] = {}
    for o in prove(LiftedTree(root), managers=MANAGERS, families=families, theorems=SAFE):
        found.setdefault("+".join((o.family, *o.tags)), set()).add(o.verdict.value)
    return found


def test_the_newest_release_runs_dry_where_a_connector_brings_the_first_tokens() -> None:
    """Gate and check pass, and the allocation that follows finds no block left."""
    pytest.importorskip("torch")
    sizes = {(16, 40, 60): 9, (896, 23_040, 2_048): 30}

    answers = allocate_slots(
        (*asked, num_blocks + more) for asked, num_blocks in sizes.items() for more in (-1, 0, 1)
    )

    assert answers == 2 * ["refused", "Cannot get 1 free blocks from the pool", "admitted"]


def test_counting_the_block_that_a_connector_fills_mends_it(copy_tree: CopyTree) -> None:
    """With the loaded state's block in the estimate, it is exact for all sizes."""
    root = copy_tree(NEWEST, *COUNT_THE_LOADED_BLOCK)

    found = verdicts(root, "external-sync", "external-async")

    assert set(found) == {"external-sync", "external-sync+checkpoint", "external-async"}
    assert set().union(*found.values()) == {Verdict.PROVED.value}


def test_an_estimate_that_never_falls_below_nothing_is_exact(copy_tree: CopyTree) -> None:
    """A table that rejected drafts left too long is asked nothing for, and takes nothing."""
    root = copy_tree(NEWEST, NEVER_LESS_THAN_NOTHING)

    found = verdicts(root, "drafts")

    assert set().union(*found.values()) == {Verdict.PROVED.value}


#: With a block for the copy of a block that is written into.
RESERVE_A_COPY = ("2 + self.num_speculative_blocks", "3 + self.num_speculative_blocks")
#: What is within the sizing then, by family.
WITHIN = {
    "hit-partial": {"peak-within-sizing", "eventually-admitted"},
    "own-tail": {"peak-within-sizing", "eventually-admitted"},
    "external-sync": {"peak-within-sizing"},
}


@pytest.mark.parametrize("family", WITHIN)
def test_a_block_reserved_for_a_copy_mends_the_sizing(copy_tree: CopyTree, family: str) -> None:
    """With one block more at start-up, a request holds and asks for no more than that."""
    root = copy_tree(NEWEST)
    file = root / "vllm" / "v1" / "kv_cache_interface.py"
    text = file.read_text()
    assert RESERVE_A_COPY[0] in text
    file.write_text(text.replace(*RESERVE_A_COPY))

    kinds = [(family, ()), (family, ("checkpoint",))]
    found = [*prove(LiftedTree(root), kinds=kinds, theorems=tuple(WITHIN[family]))]

    assert {o.theorem for o in found} == WITHIN[family]
    assert {o.verdict for o in found} == {Verdict.PROVED}
