"""A request on a vLLM engine, with the tokens that it generated on other engines before."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from operator import lt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refrain.schemas.rollout import Generated, RolloutRequest, VersionSpan

_ARRIVALS = count()


class Running:
    """A request on this engine."""

    def __init__(self, request: RolloutRequest, policy_version: int, started_s: float) -> None:
        self.request = request
        self.policy_version = policy_version
        self.started_s = started_s
        self.arrival = next(_ARRIVALS)
        """Number of its arrival in this process. A later turn has that of its conversation."""
        self.withdrawn = False
        self.continuation: RolloutRequest | None = None
        self.num_cached_tokens: int | None = None
        """Tokens with keys and values when it arrived. None: not known yet."""

    @property
    def tokens_before(self) -> Sequence[int]:
        return self.request.generated.token_ids if self.request.generated else []

    @property
    def num_before(self) -> int:
        return len(self.tokens_before)

    @property
    def num_sampled_before(self) -> int:
        """Tokens of the response that the policy had sampled before this submission."""
        return self.request.generated.num_sampled if self.request.generated else 0

    @property
    def turn_starts_at(self) -> int:
        """Position of the first token of the turn that is being sampled, the prompt included."""
        ended = self.request.generated.turns if self.request.generated else ()
        return len(self.request.prompt_token_ids) + sum(turn.num_tokens for turn in ended)

    @property
    def in_later_turn(self) -> bool:
        """Whether the turn that is being sampled is not the first."""
        return bool(self.request.generated and self.request.generated.turns)

    def with_answer(self, request: RolloutRequest) -> "Running":
        """Return the next turn of this request, on the same engine."""
        request = replace(request, drafting=self.request.drafting)
        running = Running(request, self.policy_version, self.started_s)
        running.arrival, running.num_cached_tokens = self.arrival, self.num_cached_tokens
        return running

    def num_with_kv(self, num_new: int) -> int:
        """Return how many tokens have keys and values once `num_new` were generated here.

        The last token has none yet.
        """
        return len(self.request.prompt_token_ids) + self.num_before + num_new - 1

    def generated_with(self, output: Any) -> Generated:
        """Return the whole response, tokens from other engines included.

        `output`: vLLM's `CompletionOutput`.
        """
        drafts = output.spec_decode_metrics
        whole = self._generated(output.token_ids, output.logprobs, output.routed_experts)
        if not drafts:
            return whole
        # `histogram[n]`: the number of verifications that accepted n tokens.
        num_accepted = sum(n * times for n, times in enumerate(drafts.histogram))
        return replace(
            whole,
            num_draft_tokens=whole.num_draft_tokens + drafts.num_draft_tokens,
            num_accepted_tokens=whole.num_accepted_tokens + num_accepted,
            num_verifications=whole.num_verifications + sum(drafts.histogram),
            num_rejections=whole.num_rejections
            + sum(map(lt, drafts.per_step_accepted, drafts.per_step_drafted)),
        )

    def generated_so_far(self, state: Any) -> Generated:
        """Return the response so far, without this engine's drafting counts.

        `state`: vLLM's `RequestState`.
        """
        chunks = state.routed_experts_chunks
        return self._generated(
            state.detokenizer.output_token_ids,
            state.logprobs_processor.logprobs,
            np.concatenate(chunks) if chunks else None,
        )

    def continued_by(self, generated: Generated) -> RolloutRequest:
        return replace(self.request, generated=generated if generated.token_ids else None, kv=None)

    def _generated(
        self, token_ids: Sequence[int], logprobs: Any, experts: NDArray[np.uint8] | None
    ) -> Generated:
        """Append these tokens to those generated before. `experts`: of all positions from the
        prompt's first on, [positions, layers, top_k]; None: not recorded."""
        before = self.request.generated or Generated(array("i"), array("f"), ())
        new_logprobs = array("f", logprobs.logprobs if logprobs is not None else ())
        assert len(new_logprobs) == len(token_ids)
        spans = list(before.spans)
        if spans and spans[-1].policy_version == self.policy_version:
            spans[-1] = VersionSpan(self.policy_version, spans[-1].num_tokens + len(token_ids))
        elif token_ids:
            spans.append(VersionSpan(self.policy_version, len(token_ids)))
        return replace(
            before,
            token_ids=array("i", before.token_ids) + array("i", token_ids),
            inference_logprobs=array("f", before.inference_logprobs) + new_logprobs,
            spans=tuple(spans),
            experts=before.experts if experts is None else _continued(before.experts, experts),
        )


def _continued(before: bytes, experts: NDArray[np.uint8]) -> bytes:
    """Return the experts from other engines, and those from here for the positions after. The
    former belong to the passes that gave the log-probabilities."""
    num_known = len(before) // experts[0].size
    return before + experts[num_known:].tobytes()


def states_of(llm: Any) -> dict[str, Any]:
    """Return vLLM's `RequestState` of each request, by name. `llm`: vLLM's `AsyncLLM`."""
    return {state.external_req_id: state for state in llm.output_processor.request_states.values()}


def num_new_of(llm: Any) -> dict[str, int]:
    """Return the tokens from this engine by name. With final-only outputs only vLLM's state has
    them."""
    states = states_of(llm).items()
    return {name: s.detokenizer.num_output_tokens() for name, s in states if s.detokenizer}
