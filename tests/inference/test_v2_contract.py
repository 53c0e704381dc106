"""vLLM's V2 runner calls the methods that engines replace, in the order that they rely on."""

import ast

from tests.inference.v2_contract import RUNNER
from tests.inference.vllm_source import Source


def calls_in(method: str) -> list[str]:
    """Return the calls of a method of the runner, in the order of the source."""
    (node,) = (
        node
        for node in Source.of(RUNNER).node.body
        if isinstance(node, ast.FunctionDef) and node.name == method
    )
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    return [ast.unparse(one) for one in sorted(calls, key=lambda one: (one.lineno, one.col_offset))]


def test_requests_lose_their_slots_before_others_get_them() -> None:
    """`KVOfV2Runner` forgets the blocks of ended requests, then `DeviceDrafter` learns of new ones.
    The draft tokens are read after that."""
    calls = calls_in("execute_model")
    order = [
        "self.finish_requests(scheduler_output)",
        "self.add_requests(scheduler_output)",
        "self.update_requests(scheduler_output)",
        "self.block_tables.apply_staged_writes()",
        "self.kv_connector.no_forward(scheduler_output)",
        "self.prepare_inputs(scheduler_output, batch_req_state, batch_desc, num_active_loras)",
    ]
    assert [calls.index(one) for one in order] == sorted(calls.index(one) for one in order)


def test_samplers_are_called_as_they_were() -> None:
    calls = calls_in("sample")
    assert "self.sampler(logits, input_batch)" in calls
    (rejection,) = (one for one in calls if one.startswith("self.rejection_sampler("))
    assert rejection == (
        "self.rejection_sampler(logits, input_batch, self.speculator.draft_logits, invalid_drafts)"
    )


def test_a_step_ends_with_the_number_of_computed_tokens_on_the_device() -> None:
    calls = calls_in("postprocess_sampled")
    (update,) = (one for one in calls if one.startswith("post_update("))
    assert "self.req_states.num_computed_tokens.gpu" in update
    assert "num_rejected" in update


def test_drafts_are_made_from_the_tokens_of_the_step() -> None:
    """`DeviceDrafter` reads the response with the tokens that were just drawn, and its drafts are
    what the next step verifies."""
    calls = calls_in("sample_tokens")
    (drawn,) = (one for one in calls if one.startswith("self.postprocess_sampled("))
    (drafted,) = (one for one in calls if one.startswith("self.speculator.propose("))
    assert calls.index(drawn) < calls.index(drafted)
    arguments = "input_batch, attn_metadata, slot_mappings_by_layer, spec_hidden_states, "
    assert f"propose({arguments}aux_hidden_states, num_sampled, num_rejected," in drafted
