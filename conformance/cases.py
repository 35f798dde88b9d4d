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
    """

    id: str
    source: str
    geometry: Geometry
    chunks: tuple[int, ...]
    seen: Mapping[str, tuple[int, int]]


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
    return Case(report["id"], report["source"], geometry, tuple(row["chunks"]), seen)
