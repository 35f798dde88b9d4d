from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from conftest import RELEASES
from test_lift import has_kind

from models.lift import Variant, variants_of
from models.predict import LiftedTree
from models.traits import Traits
from spec.assumptions import OF_SOME_RELEASES
from spec.theorems import ADMISSIONS, OBLIGATIONS, THEOREMS

#: By trait, the first release whose `MambaManager` has it, as its source says.
SINCE = {
    # `remove_skipped_blocks` is told `processed_computed_tokens`, and spares no drafts.
    "removes_up_to_processed": "0.26.0",
    # `_partial_hit_reqs` and `_cache_partial_tail_block` in the manager.
    "has_partial_tails": "0.26.0",
    # `_producer_partial_tail_reqs`, a dict of token counts.
    "producer_tail_is_recorded": "0.27.0",
    # The same as a dict of blocks and token counts; `finalize_partial_tail_offload`.
    "producer_tail_has_block": "0.30.0",
    # `MambaSpec.num_prefill_checkpoint_blocks`, read in `_needs_internal_checkpoint`.
    "has_checkpoint_blocks": "0.29.0",
    # `_checkpoints` instead of `_num_checkpoint_blocks`.
    "records_checkpoint_position": "0.30.0",
    # `drop_eagle_checkpoint_block`, set by the coordinator.
    "has_eagle_drop": "0.30.0",
    # An argument of `get_num_blocks_to_allocate`.
    "takes_prefill_end": "0.31.0",
    # `cache_hit_alignment_tokens` is passed to `get_mamba_prefill_checkpoint_position`.
    "aligns_checkpoints_with_hits": "0.32.0",
    # That function's `proof_limit` is `num_tokens` with the drop.
    "eagle_drop_leaves_tokens": "0.32.0",
    # Its argument `num_hash_lookahead_tokens`.
    "hashes_look_ahead": "0.33.0",
}
#: By assumption, the first and the last release that it is in force for.
IN_FORCE = {
    "release-is-dense": ("0.24.0", "0.30.0"),
    "hits-are-whole-blocks": ("0.24.0", "0.25.0"),
    "checkpoint-at-block-boundary": ("0.29.0", "0.29.0"),
    "checkpoint-at-hash-boundary": ("0.30.0", "0.31.0"),
    "checkpoint-where-hits-end": ("0.32.0", "0.33.0"),
    "one-token-behind-checkpoint": ("0.30.0", "0.31.0"),
    "eagle-drop-leaves-tokens": ("0.32.0", "0.32.0"),
    "lookahead-hash-leaves-tokens": ("0.33.0", "0.33.0"),
}
#: Theorems about tables whose skipped blocks are gone.
OF_REMOVED_TABLES = (
    "only-states-are-held",
    "removal-frees-skipped",
    "removal-frees-ended",
    "peak-within-sizing",
    "gate-covers-lifetime",
    "eventually-admitted",
)
PLAIN, EAGLE = Variant(), Variant(eagle=True)
AHEAD = Variant(looks_ahead=True)
WHOLE = Variant(whole_blocks=True)
WHOLE_EAGLE = Variant(eagle=True, whole_blocks=True)
WHOLE_AHEAD = Variant(whole_blocks=True, looks_ahead=True)
#: By release, the settings in which a family is explored.
SETTINGS = {
    **dict.fromkeys(RELEASES[:6], (PLAIN,)),
    "0.30.0": (PLAIN, EAGLE),
    "0.31.0": (PLAIN, EAGLE),
    "0.32.0": (PLAIN, EAGLE, WHOLE, WHOLE_EAGLE),
    "0.33.0": (PLAIN, EAGLE, AHEAD, WHOLE, WHOLE_EAGLE, WHOLE_AHEAD),
}


@pytest.mark.parametrize("release", RELEASES)
def test_traits_are_those_of_the_source(
    lifted_trees: Mapping[str, LiftedTree], release: str
) -> None:
    """What is read from a tree is what a reader of its source finds."""
    expected = {trait: release >= first for trait, first in SINCE.items()}

    assert vars(lifted_trees[release].traits) == expected


def test_the_table_has_every_trait() -> None:
    """No trait is left out of the table, and none is there that nobody reads."""
    assert set(SINCE) == set(Traits.__dataclass_fields__)
    assert set(IN_FORCE) == {assumption.slug for assumption in OF_SOME_RELEASES}


@pytest.mark.parametrize("release", RELEASES)
def test_assumptions_are_in_force_where_their_reason_says(
    lifted_trees: Mapping[str, LiftedTree], release: str
) -> None:
    """An assumption of some releases is assumed of these, once, and of no other."""
    found = [assumption.slug for assumption in lifted_trees[release].traits.assumptions()]

    assert sorted(found) == sorted(
        slug for slug, (first, last) in IN_FORCE.items() if first <= release <= last
    )


@pytest.mark.parametrize("assumption", OF_SOME_RELEASES, ids=lambda a: a.slug)
def test_a_reason_names_the_releases_that_it_is_about(assumption: object) -> None:
    """The first or the last release, or the one after it, stands in the reason."""
    first, last = IN_FORCE[assumption.slug]  # type: ignore[attr-defined]
    following = dict(itertools.pairwise(RELEASES)).get(last)
    if first == RELEASES[0]:
        words = [f"before {following} "]
    elif last == RELEASES[-1]:
        words = [f"from {first} "]
    else:
        words = list(dict.fromkeys((f"{first} ", f"{last} ")))

    assert all(word in assumption.reason for word in words)  # type: ignore[attr-defined]


@pytest.mark.parametrize("release", RELEASES)
def test_a_kind_of_step_is_left_out_only_where_there_is_none(
    lifted_trees: Mapping[str, LiftedTree], release: str
) -> None:
    """Partial tails came with 0.26.0, checkpoints with 0.29.0, and both at once with 0.30.0."""
    traits = lifted_trees[release].traits
    for kind in OBLIGATIONS:
        assert (traits.why_not(*kind) is None) is has_kind(release, kind), kind
        for theorem in THEOREMS:
            no_position = theorem == "checkpoint-recorded" and release < "0.30.0"
            spares_drafts = release < "0.26.0" and kind[0] not in ADMISSIONS
            no_removal = spares_drafts and theorem in OF_REMOVED_TABLES
            is_about = has_kind(release, kind) and not no_position and not no_removal
            assert (traits.why_not(*kind, theorem) is None) is is_about


@pytest.mark.parametrize("release", RELEASES)
def test_the_settings_are_all_that_a_release_has(
    lifted_trees: Mapping[str, LiftedTree], release: str
) -> None:
    """Each setting is explored once; hits that end inside a block end at hash units."""
    traits = lifted_trees[release].traits
    for family, _ in OBLIGATIONS:
        expected = [
            variant
            for variant in SETTINGS[release]
            if family != "hit-partial" or not variant.whole_blocks
        ]
        assert list(variants_of(traits, family)) == expected


@pytest.mark.parametrize("release", ["0.24.0", "0.29.0", "0.33.0"])
def test_every_assumption_in_force_is_kept_by_the_steps_that_are_explored(
    lifted_trees: Mapping[str, LiftedTree], release: str
) -> None:
    """What is assumed of a release can be kept, all at once, in each of its families."""
    tree = lifted_trees[release]
    for kind in (("first", ()), ("running", ()), ("resumed", ())):
        for variant in SETTINGS[release]:
            exploration = tree.exploration(*kind, variant)
            said = {*exploration.assumptions, *exploration.built_in}
            assert exploration.samples
            for assumption in tree.traits.assumptions():
                is_said = assumption.slug in said
                assert is_said or assumption.holds(exploration.situation) is True
