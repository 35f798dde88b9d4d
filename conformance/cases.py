"""Public bug reports as inputs, with the numbers that were seen on the real manager."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spec.vocabulary import Geometry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES_FILE = Path(__file__).with_name("cases.toml")


@dataclass(frozen=True)
class Case:
    """One row of a public report.

    Attributes:
        chunks: Tokens that have a slot after each step; the last one was reported.
        seen: By release, the estimate and the blocks drawn in the last step.
        num_external_tokens: Tokens that are loaded before, while the request is parked; the first
            of `chunks` then ends where they do.
        num_computed_tokens: Tokens computed before the last step where drafts were rejected; 0 is
            all of the chunk before.
        num_prompt_tokens: The prompt, where the last step goes on behind it; 0 is all of `chunks`.
        owns_partial_tail: Whether the last step finds the request's own partial tail cached.
        has_step_in_flight: Whether each step is scheduled while the one before has not ended.
    """

    id: str
    source: str
    geometry: Geometry
    chunks: tuple[int, ...]
    seen: Mapping[str, tuple[int, int]]
    num_external_tokens: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    owns_partial_tail: bool = False
    has_step_in_flight: bool = False


@cache
def known_cases() -> tuple[Case, ...]:
    """Return the rows of all reports in `cases.toml`, in its order."""
    content = tomllib.loads(CASES_FILE.read_text(encoding="utf-8"))
    return tuple(_case(report, row) for report in content["case"] for row in report["rows"])


def _case(report: Mapping[str, Any], row: Mapping[str, Any]) -> Case:
    geometry = Geometry(
        block_size=row["block_size"],
        hash_block_size=report["hash_block_size"],
        num_speculative_blocks=row["num_speculative_blocks"],
        num_prefill_checkpoint_blocks=report["num_prefill_checkpoint_blocks"],
        prefill_checkpoint_alignment=report["prefill_checkpoint_alignment"],
        drop_eagle_checkpoint_block=report.get("drop_eagle_checkpoint_block", False),
    )
    seen = {release: (estimate, drawn) for release, (estimate, drawn) in row["seen"].items()}
    others = {name: row[name] for name in _OF_SOME_ROWS if name in row}
    return Case(report["id"], report["source"], geometry, tuple(row["chunks"]), seen, **others)


_OF_SOME_ROWS = (
    "num_external_tokens",
    "num_computed_tokens",
    "num_prompt_tokens",
    "owns_partial_tail",
    "has_step_in_flight",
)
