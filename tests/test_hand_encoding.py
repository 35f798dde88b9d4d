from __future__ import annotations

import importlib.util
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from conformance.driver import core_driver
from models.predict import LiftedTree
from models.prove import prove
from spec.vocabulary import Call, Geometry

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "hand_encoding.py"
RELEASES = ("0.30.0", "0.31.0")
#: Families of the transcribed kinds of step.
FAMILIES = ("first", "running", "checkpoint")
#: Steps per release, half of them on a request that has a table.
NUM_STEPS = 300


@pytest.fixture(scope="module")
def hand() -> ModuleType:
    found = importlib.util.spec_from_file_location("hand_encoding", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("release", RELEASES)
def test_verdicts_are_those_of_the_lifted_prover(
    trees: Mapping[str, Path], hand: ModuleType, release: str
) -> None:
    """A transcription and the source itself lead to the same verdict, theorem by theorem."""
    lifted = {
        (obligation.family, obligation.tags, obligation.theorem): obligation.verdict.value
        for obligation in prove(
            LiftedTree(trees[release]), families=FAMILIES, theorems=hand.theorems()
        )
        if (obligation.family, obligation.tags) in hand.KINDS
    }

    assert hand.verdicts(release) == lifted


def random_sizes(rng: random.Random) -> tuple[Geometry, int, int]:
    """Return sizes, and the ends of two chunks."""
    hash_block_size = rng.randint(1, 4)
    geometry = Geometry(
        block_size=hash_block_size * rng.randint(1, 3),
        hash_block_size=hash_block_size,
        num_speculative_blocks=rng.randint(0, 8),
        num_prefill_checkpoint_blocks=rng.randint(0, 1),
        prefill_checkpoint_alignment=rng.choice([1, hash_block_size, 3]),
        drop_eagle_checkpoint_block=rng.random() < 0.5,
    )
    first = rng.choice([rng.randint(1, 40), hash_block_size * rng.randint(1, 10)])
    return geometry, first, first + rng.randint(1, 60)


@pytest.mark.parametrize("release", RELEASES)
def test_numbers_are_those_of_the_real_manager(
    trees: Mapping[str, Path], hand: ModuleType, release: str
) -> None:
    """On random sizes the transcription says what the release's own manager does."""
    rng = random.Random(release)
    driver = core_driver(trees[release])
    kinds = {admitted: hand.Encoding(release, admitted=admitted) for admitted in (False, True)}
    kept = 0
    for _ in range(NUM_STEPS // 2):
        geometry, first, second = random_sizes(rng)
        # 0.30.0 is not told where the prefill ends.
        prefill_end = second if release != "0.30.0" and rng.random() < 0.5 else 0
        request = driver.request(geometry, 64)
        for admitted, start, end in ((False, 0, first), (True, first, second)):
            table = request.observe().table
            step = request.apply(Call(end, end, start, start, prefill_end))
            column = -(-end // geometry.block_size) - 2
            values = {
                "block_size": geometry.block_size,
                "hash_block_size": geometry.hash_block_size,
                "num_spec": geometry.num_speculative_blocks,
                "num_checkpoint": geometry.num_prefill_checkpoint_blocks,
                "alignment": geometry.prefill_checkpoint_alignment,
                "drop_eagle": geometry.drop_eagle_checkpoint_block,
                "computed": start,
                "num_tokens_main": end,
                "prefill_end": prefill_end,
                "column_is_null": 0 <= column < len(table) and table[column] == 0,
            }
            estimate, drawn, keeps = kinds[admitted].numbers(values)

            assert (estimate, drawn) == (step.estimate, step.drawn), (geometry, start, end)
            kept += keeps

    assert kept >= NUM_STEPS // 20, "too few steps keep a checkpoint to say anything"
