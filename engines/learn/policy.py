"""The policy: a Hugging Face causal language model that scores packed tokens.

```
PolicyModel                FSDP unit: embeddings, last norm, head
└─ model                   Hugging Face model, master weights
   └─ decoder layers       one FSDP unit each
```

The head runs on positions that predict a sampled token only. Observed tokens are context: their own
predictions have no logits and no gradient. For a large vocabulary it runs in chunks, which the
backward pass recomputes: all logits of a micro-batch would need more memory than the model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from refrain.engines.learn.bounds import SampleBounds
from refrain.engines.learn.head import Head, decoder_of
from refrain.engines.learn.packing import MicroBatch, TokenSequence, pack
from refrain.engines.learn.recurrent import has_recurrent_layers, recurrent_bounds
from refrain.engines.learn.rope import beyond, most_positions
from refrain.engines.learn.routing_replay import RoutingReplay
from refrain.engines.learn.row_mask import row_of
from refrain.engines.machine.trainer_memory import MAX_LOGITS

if TYPE_CHECKING:
    from refrain.engines.learn.context import ContextGroup, RowSplit


class TokenScores(NamedTuple):
    """Scores of the predicted tokens of a micro-batch under the policy."""

    logprobs: Float[Tensor, "tokens"]
    """Log-probability of each token under softmax(logits / T)."""
    entropies: Float[Tensor, "tokens"]
    """Entropy of the distribution of each token, in nats. It has a gradient only if the caller asks
    for one."""


class PolicyModel(nn.Module):
    """A causal language model with one method for training: `score`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        names = model._no_split_modules or ()
        self.layers = tuple(one for one in model.modules() if type(one).__name__ in names)
        """Decoder layers: FSDP2's units, and what `engines.learn.compiled` compiles."""
        self._head = Head.of(model.config)
        self._most_positions = most_positions(model.config)
        self.is_recurrent = has_recurrent_layers(model.config)
        self.alone = False
        """Whether each sample needs its own row (`engines.learn.sample_isolation`)."""
        self.replay: RoutingReplay | None = None
        """Replays the engine's choice of experts; None: the policy chooses."""
        self.context: ContextGroup | None = None
        """Ranks that share each row with this rank (`engines.learn.context`); None: it shares none.
        With a group, `score` and `hidden_states` are collective over it: its ranks give the same
        micro-batch, and get the values of all its tokens."""
        self.is_compiled = False
        """Whether `engines.learn.compiled` compiled the layers."""
        self.token_scores: Callable[..., tuple[Tensor, Tensor]] = token_scores

    @property
    def device(self) -> torch.device:
        return self.model.device

    def uncompiled(self) -> AbstractContextManager[None]:
        """Return a context in which all layers compute eagerly."""
        if not self.is_compiled:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    @property
    def masks_all_pairs(self) -> bool:
        """Whether the model uses its own attention, with a mask of all pairs of tokens."""
        return self.model.config._attn_implementation == "eager"

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def score(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> TokenScores:
        """Score `batch.targets` under softmax(logits / temperature). Raise ValueError for a sample
        that is too long for the engines' positions."""
        own, split = self._split(batch)
        targets = torch.from_numpy(own.targets).to(self.device)
        scores = self(*self._row(own, split), targets, temperature, entropy_gradient)
        return scores if split is None else TokenScores(*map(split.whole, scores))

    def _split(self, batch: MicroBatch) -> tuple[MicroBatch, "RowSplit | None"]:
        """Return this rank's part of a row, and how the ranks share it."""
        if self.context is None:
            return batch, None
        filled = self.context.filled(batch)
        split = self.context.split(filled)
        return split.own(filled), split

    def _row(
        self, batch: MicroBatch, split: "RowSplit | None"
    ) -> tuple[Tensor, Tensor, Tensor, SampleBounds]:
        if self.replay is not None:
            self.replay.use_of(batch, self.device)
        longest = max(batch.num_tokens)
        if self._most_positions is not None and longest > self._most_positions:
            raise ValueError(beyond(longest, self._most_positions))
        arrays = (batch.input_ids, batch.position_ids, batch.predict_at)
        input_ids, position_ids, predict_at = (
            torch.from_numpy(array).to(self.device) for array in arrays
        )
        segments = SampleBounds.of(batch.num_tokens, self.device, split)
        return input_ids, position_ids, predict_at, segments

    def hidden_states(self, batch: MicroBatch) -> Float[Tensor, "tokens width"]:
        """Return the input of the output layer for each of `batch.targets`."""
        own, split = self._split(batch)
        hidden = self._hidden(*self._row(own, split))
        return hidden if split is None else split.whole(hidden)

    def logits(self, hidden: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens vocab"]:
        """Return the logits of hidden states, float32. With FSDP2, unshard the policy before."""
        return self._head.logits(self.model.get_output_embeddings()(hidden))

    def logits_of(self, token_ids: Int[Tensor, "ids"]) -> Callable[[Tensor], Tensor]:
        """Return a function as `logits` for these tokens alone. Call it again after an update."""
        layer: Any = self.model.get_output_embeddings()
        weight = layer.weight[token_ids]
        bias = None if layer.bias is None else layer.bias[token_ids]
        return lambda hidden: self._head.logits(linear(hidden.to(weight.dtype), weight, bias))

    def _hidden(
        self,
        input_ids: Int[Tensor, "row"],
        position_ids: Int[Tensor, "row"],
        predict_at: Int[Tensor, "tokens"],
        segments: SampleBounds,
    ) -> Float[Tensor, "tokens width"]:
        # Without this mask, models would look for samples in the positions of a part of the row.
        mask = None if segments.split is None else torch.ones_like(input_ids)[None]
        bounds = {}
        if self.is_recurrent:
            bounds = recurrent_bounds(segments.bounds, len(input_ids))
        with row_of(segments):
            output = decoder_of(self.model)(
                input_ids=input_ids[None],
                attention_mask=mask,
                position_ids=position_ids[None],
                use_cache=False,
                **bounds,
            )
        return output.last_hidden_state[0, predict_at]

    def forward(
        self,
        input_ids: Int[Tensor, "row"],
        position_ids: Int[Tensor, "row"],
        predict_at: Int[Tensor, "tokens"],
        segments: SampleBounds,
        targets: Int[Tensor, "tokens"],
        temperature: float,
        entropy_gradient: bool = False,
    ) -> TokenScores:
        hidden = self._hidden(input_ids, position_ids, predict_at, segments)
        chunk_tokens = max(1, MAX_LOGITS // self.vocab_size)
        settings = (temperature, entropy_gradient)
        if len(targets) <= chunk_tokens:
            return TokenScores(*self._score_chunk(hidden, targets, *settings))
        chunks = [
            checkpoint(self._score_chunk, *chunk, *settings, use_reentrant=False)
            for chunk in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        ]
        return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

    def _score_chunk(
        self,
        hidden: Float[Tensor, "chunk width"],
        targets: Int[Tensor, "chunk"],
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Float[Tensor, "chunk"], Float[Tensor, "chunk"]]:
        outputs = self.model.get_output_embeddings()(hidden)
        return self.token_scores(self._head, outputs, targets, temperature, entropy_gradient)


def token_scores(
    head: Head,
    outputs: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, "tokens"],
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Return log-probabilities of the targets, and entropies. `outputs`: of the output layer."""
    logits = head.logits(outputs) / temperature
    log_normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities = torch.exp(logits - log_normaliser[:, None])
        entropies = log_normaliser - (probabilities * logits).sum(-1)
    return logprobs, entropies


@torch.no_grad()
def score_sequences(
    policy: PolicyModel,
    sequences: Sequence[TokenSequence],
    micro_batch_tokens: int,
    temperature: float,
) -> list[NDArray[np.float32]]:
    """Return the log-probabilities of each sequence's sampled tokens, without a gradient."""
    by_sample: dict[int, NDArray[np.float32]] = {}
    for batch in pack(sequences, micro_batch_tokens, alone=policy.alone):
        values = policy.score(batch, temperature).logprobs.cpu().numpy()
        ends = np.cumsum([sequences[sample].num_response_tokens for sample in batch.samples])
        by_sample.update(zip(batch.samples, np.split(values, ends[:-1]), strict=True))
    return [by_sample[sample] for sample in range(len(sequences))]
