"""Contracts about the real manager, for CrossHair; the tree's root is in `CAPPROOF_PEER_ROOT`.

Sizes are small, since the manager makes a list entry per block. Every call has a driver of its own:
one keeps specs and pools for later requests, and CrossHair takes what differs for an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from conformance.driver import Driver
from models.loader import Core
from scripts.peer_questions import checkpoint_step, external_step

#: Greatest block size, and most tokens of a step; S is at most 1.
MOST_UNITS, MOST_TOKENS = 2, 8

# CrossHair looks for options in the packages that modules say they are of; the loader makes none.
for _package in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core", "vllm.v1.hisparse"):
    sys.modules.setdefault(_package, ModuleType(_package))

_CORE = Core(Path(os.environ["CAPPROOF_PEER_ROOT"]))
Driver(_CORE)  # loads what is imported late
# CrossHair looks at the types of everything that is called, names outside the core included.
_CORE._loading.done = False


def checkpoint_is_exact(
    unit: int, units_per_block: int, speculative: int, start_units: int, num_new: int
) -> None:
    """The estimate of a step that keeps a checkpoint is what it draws."""
    assert 1 <= unit <= MOST_UNITS and 1 <= units_per_block <= MOST_UNITS
    assert 0 <= speculative <= 1 and 1 <= start_units <= 2 and 1 <= num_new <= MOST_TOKENS
    step = checkpoint_step(Driver(_CORE), unit, units_per_block, speculative, start_units, num_new)
    assert step is None or step.estimate == step.drawn


def external_is_covered(
    unit: int, units_per_block: int, speculative: int, num_external: int, num_new: int
) -> None:
    """No step draws more than was estimated for it."""
    assert 1 <= unit <= MOST_UNITS and 1 <= units_per_block <= MOST_UNITS
    assert 0 <= speculative <= 1 and 1 <= num_external <= MOST_TOKENS
    assert 1 <= num_new <= MOST_TOKENS
    step = external_step(Driver(_CORE), unit, units_per_block, speculative, num_external, num_new)
    assert step is None or step.drawn <= step.estimate
