"""What the lifted code of a tree does in one situation made of numbers, and what that breaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import intended
from models.evaluate import Evaluator
from models.lift import Exploration, explore, lifted_core, summary_of
from models.prove import in_numbers
from spec.families import family_of, reserves_checkpoint
from spec.theorems import OBLIGATIONS, THEOREMS, Need, Pool
from spec.vocabulary import Situation, Step


class LiftedTree:
    """The explored step of a tree, family by family, each explored once.

    Args:
        root: Folder holding `vllm/`.

    Raises:
        CoreError: The tree cannot be loaded.
    """

    def __init__(self, root: Path) -> None:
        self._core = lifted_core(root)
        self._explored: dict[tuple[str, tuple[str, ...], bool], Exploration] = {}

    def exploration(self, family: str, tags: tuple[str, ...], *, eagle: bool) -> Exploration:
        """Return all paths of a family.

        Raises:
            NotUnderstood: The lifter does not understand the code.
        """
        key = (family, tags, eagle)
        if key not in self._explored:
            self._explored[key] = explore(self._core, family, tags, eagle=eagle)
        return self._explored[key]

    def explorations(self) -> Iterator[tuple[str, tuple[str, ...], bool, Exploration]]:
        """Yield family, tags, EAGLE drop and paths of everything that has obligations."""
        for family, tags in OBLIGATIONS:
            for eagle in (False, True):
                yield family, tags, eagle, self.exploration(family, tags, eagle=eagle)

    def predict(self, situation: Situation, *, checkpoint_before: bool) -> Step | None:
        """Return what is seen of the step, None where the release cannot be asked this.

        Args:
            situation: Made of numbers, of a family that has obligations.
            checkpoint_before: Whether the step before kept an internal checkpoint.
        """
        exploration = self.exploration(
            *obligation_of(situation), eagle=bool(situation.geometry.drop_eagle_checkpoint_block)
        )
        values = {**values_of(situation), "has_checkpoint_before": checkpoint_before}
        path = summary_of(exploration, values)
        return None if path is None else in_numbers(path.step, Evaluator(values))


def obligation_of(situation: Situation) -> tuple[str, tuple[str, ...]]:
    """Return the family and tags under which a situation's obligations are listed."""
    family = family_of(situation)
    tags = ("checkpoint",) if family == "first" and reserves_checkpoint(situation) else ()
    return family, tags


def values_of(situation: Situation) -> Mapping[str, Any]:
    """Return a situation's numbers by the names of the variables that stand for them."""
    call, geometry = situation.call, situation.geometry
    return {
        **vars(geometry),
        "num_tokens": call.num_tokens,
        "num_tokens_main_model": call.num_tokens_main_model,
        "num_computed_tokens": call.total_computed_tokens,
        "prefill_end": call.prefill_end,
        "prefill_length": situation.prefill_length,
    }


def violated(situation: Situation, step: Step) -> tuple[str, ...]:
    """Return the theorems that a step made of numbers breaks, on the least pool that passes."""
    pool = Pool(max(step.estimate, 0), 0, 0)
    need = Need(intended.need(situation))
    return tuple(
        slug
        for slug, theorem in THEOREMS.items()
        if (step.raised is None or theorem.survives_exception)
        and not theorem.holds(situation, step, pool, need)
    )


def after(situation: Situation, *, num_tokens: int, prefill_length: int) -> Situation:
    """Return the situation of the next prefill chunk of the same request, up to ``num_tokens``."""
    computed = situation.call.num_tokens_main_model
    call = replace(
        situation.call,
        num_tokens=num_tokens,
        num_tokens_main_model=num_tokens,
        total_computed_tokens=computed,
        num_local_computed_tokens=computed,
    )
    return replace(
        situation,
        call=call,
        table_length=intended.table_length(situation),
        prefill_length=prefill_length,
    )
