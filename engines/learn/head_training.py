"""A draft head in training beside its policy (`engines.draft_head.training`).

Under FSDP2 all methods are collective: every rank trains the same head on the same samples, and
needs no gradients of the others. The samples of an update are few, so sharing them out would save
little.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from refrain.engines.draft_head.model import DraftHead
from refrain.engines.draft_head.training import Agreement, SampledTokens, backpropagate, measure
from refrain.engines.learn.packing import MicroBatch, TokenSequence
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.training_state import moments

MAX_GRAD_NORM = 1.0
WARMUP_UPDATES = 10
"""Updates over which the learning rate rises: AdamW's first steps are the least certain."""

MOST_KEPT_BYTES = 4 * 2**30
"""Host memory for hidden states. Those of batches beyond it are computed in each pass."""


class HeadTraining:
    """A draft head, its optimiser and the policy that it drafts for."""

    def __init__(
        self,
        head: DraftHead,
        policy: PolicyModel,
        temperature: float,
        *,
        depth: int,
        learning_rate: float,
        num_updates: int | None = None,
        keeps_hidden: bool = False,
    ) -> None:
        """`temperature`: that of the rollouts. `depth`: tokens that the head drafts in turn.
        `num_updates`: updates over which the learning rate falls to 0, along half a cosine; None:
        it does not fall. `keeps_hidden`: keep the hidden states of batches for the next pass over
        the same batches; the policy must not change."""
        self.head = head.to(policy.device).float()
        self._policy = policy
        self._temperature = temperature
        self._depth = depth
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=learning_rate, weight_decay=0.0
        )
        self._learning_rate = learning_rate
        self._num_updates = num_updates
        self._num_done = 0
        self._keeps_hidden = keeps_hidden
        self._kept: dict[int, tuple[MicroBatch, Tensor]] = {}
        """Batches with their hidden states on the host, by the batch's `id`."""

    def set_scale(self, batch: MicroBatch) -> None:
        """Make a new head repeat the policy's hidden states at their own scale."""
        with self._sampled(batch) as tokens, torch.no_grad():
            self.head.scale.fill_(tokens.hidden.square().mean().sqrt())

    def update(self, batch: MicroBatch) -> float | None:
        """Make one update. Return its loss in nats, or None if the batch has nothing to draft or
        its loss is not finite; the head is unchanged then."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._sampled(batch) as tokens:
            logits = self._policy.logits_of(self.head.token_ids)
            loss = backpropagate(self.head, tokens, logits, self._temperature, self._depth)
        if loss is None:
            return None
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRAD_NORM)
        if not math.isfinite(loss) or not torch.isfinite(norm):
            return None
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * self._share()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._num_done += 1
        return loss

    def agreement(self, batches: Iterable[MicroBatch], seed: int = 0) -> Agreement:
        """Return the agreement on all batches. `seed`: of the noise."""
        generator = torch.Generator(self._policy.device).manual_seed(seed)
        found = []
        for batch in batches:
            with self._sampled(batch) as tokens:
                logits = self._logits, self._policy.logits_of(self.head.token_ids)
                settings = (self._temperature, self._depth, generator)
                found.append(measure(self.head, tokens, *logits, *settings))
        return reduce(add, found)

    def tensors(self) -> list[Tensor]:
        """Return the head's weights and moments."""
        return [*self.head.parameters(), *moments(self._optimizer)]

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs to go on exactly."""
        return {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_done": self._num_done,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_done = state["num_done"]

    def _share(self) -> float:
        """Return the learning rate of the next update as a share of the highest."""
        done = self._num_done
        risen = min(1.0, (done + 1) / WARMUP_UPDATES)
        if self._num_updates is None:
            return risen
        return risen * (1.0 + math.cos(math.pi * min(1.0, done / self._num_updates))) / 2.0

    @contextmanager
    def _sampled(self, batch: MicroBatch) -> Generator[SampledTokens]:
        """Provide a batch's sampled tokens, with the policy's `lm_head` unsharded meanwhile."""
        policy = self._policy
        with torch.no_grad():
            hidden = self._hidden(batch)
            with _unsharded(policy):
                token_ids = torch.from_numpy(batch.targets).to(policy.device)
                embeddings = policy.model.get_input_embeddings()(token_ids)
                after = torch.from_numpy(follows(batch)).to(policy.device)
                with torch.enable_grad():
                    yield SampledTokens(hidden.float(), embeddings.float(), token_ids, after)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        if found := self._kept.get(id(batch)):
            return found[1].to(self._policy.device)
        hidden = self._policy.hidden_states(batch)
        num_bytes = sum(kept.nbytes for _, kept in self._kept.values()) + hidden.nbytes
        if self._keeps_hidden and num_bytes <= MOST_KEPT_BYTES:
            self._kept[id(batch)] = batch, hidden.cpu()
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the policy's logits, computed in the data type of its own output layer."""
        weight = self._policy.model.get_output_embeddings().weight
        return self._policy.logits(hidden.to(weight.dtype))


@contextmanager
def _unsharded(policy: PolicyModel) -> Generator[None]:
    """Gather the policy's embedding and output layer for the block."""
    if not isinstance(policy, FSDPModule):
        yield
        return
    policy.unshard()
    try:
        yield
    finally:
        policy.reshard()


def follows(batch: MicroBatch) -> NDArray[np.bool_]:
    """Return whether each predicted token comes directly after the predicted token before it, in
    the same sample; [N]."""
    sample = np.searchsorted(np.cumsum(batch.num_tokens), batch.predict_at, side="right")
    directly = (np.diff(batch.predict_at) == 1) & (np.diff(sample) == 0)
    return np.concatenate([[False], directly])


def draw_sequences(
    sequences: Sequence[TokenSequence], max_tokens: int, seed: Sequence[int]
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Draw sequences of at most `max_tokens` tokens in all, but at least one sequence. Return them
    and the others."""
    order = np.random.default_rng(seed).permutation(len(sequences))
    shuffled = [sequences[at] for at in order]
    ends = np.cumsum([one.num_input_tokens for one in shuffled])
    num_drawn = max(1, int(np.searchsorted(ends, max_tokens, side="right")))
    return shuffled[:num_drawn], shuffled[num_drawn:]
