"""Drafting counts of a step add up."""

from schemas.counts import DraftingCounts


def test_counts_add_up_and_the_latest_costs_are_kept():
    early = DraftingCounts(num_steps=3, draft_s=0.5, decode_s=1.0, step_costs=(1.0,))
    late = DraftingCounts(num_steps=4, verify_s=2.0, step_costs=(2.0,))
    both = DraftingCounts(7, draft_s=0.5, decode_s=1.0, verify_s=2.0, step_costs=(2.0,))
    assert early + late == both
    assert (late + DraftingCounts()).step_costs == (2.0,)
