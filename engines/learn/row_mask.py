"""Find out which keys each query of a row sees, from the mask that the model itself makes.

    model ─► create_causal_mask, create_sliding_window_causal_mask, ... of transformers
                 │ a function of query and key
                 ▼
             row_mask: is that causal, a window, or chunks?  ─► RowMask ─► packed_attention
                 └ none of them: ValueError

So the trainer also knows a window that a model passes to its mask but not to its attention. A model
finds `row_mask` by the name `PACKED`.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AttentionMaskInterface, PretrainedConfig

from refrain.engines.learn.bounds import SampleBounds

PACKED = "refrain_packed"
"""Name under which transformers finds the trainer's attention and masks."""
_BOUNDS: ContextVar[SampleBounds | None] = ContextVar("bounds of the samples", default=None)
_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RowMask:
    """The mask of a row, passed where models pass a mask tensor. A query sees the keys of its own
    sample up to its own position. Raises ValueError when a model uses it as a tensor."""

    segments: SampleBounds
    model: str = ""
    """Model type, for error messages."""
    window: int | None = None
    """Number of last keys that a query sees, its own included; None: all keys."""
    chunk: int | None = None
    """Tokens per chunk, counted from the sample's first token. A query sees only its own chunk."""

    def sees(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return whether queries see keys, given their positions in a sample."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotATensorError(self.model)

    def __getitem__(self, place: Any) -> Any:
        raise NotATensorError(self.model)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del func, types
        masks = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)]
        raise NotATensorError(masks[0].model if masks else "a model")


class NotATensorError(AttributeError, ValueError):
    """A model uses its mask outside the trainer's attention."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} works on its mask itself: this trainer does not support that")


@contextmanager
def row_of(segments: SampleBounds) -> Generator[None]:
    """Tell models inside this context which samples their row contains."""
    token = _BOUNDS.set(segments)
    try:
        yield
    finally:
        _BOUNDS.reset(token)


def causal_mask(config: PretrainedConfig, **_: Any) -> RowMask:
    """Return a causal mask, whatever mask the model asks for."""
    segments = _BOUNDS.get()
    if segments is None:
        raise RuntimeError("a model makes a mask outside of `row_of`: call the model inside it")
    return RowMask(segments, config.model_type)


def row_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: _MaskFunction,
    config: PretrainedConfig,
    device: torch.device,
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> RowMask:
    """Return the mask that a model asks transformers for. Raise ValueError if `packed_attention`
    does not support it.

    `mask_function`: returns whether a query sees a key, from (batch, head, query, key).
    `local_size`: tokens of a window or chunk, if transformers knows it.
    """
    causal = causal_mask(config)
    if kv_length != q_length or not (attention_mask is None or bool(attention_mask.all())):
        raise ValueError(
            f"{config.model_type} masks tokens of a row that has no padding: this trainer does not "
            "support that"
        )
    longest = causal.segments.longest
    num_heads = getattr(config, "num_attention_heads", 1)
    # The first sample is the longest and starts at the row's start, so test the mask on it.
    keys = torch.arange(longest, device=device)
    num_seen = int(_seen(mask_function, keys[-1:], keys, num_heads).sum(-1).max())
    sizes = {num_seen, local_size or num_seen} if num_seen < longest else set()
    queries = _probes(longest, sizes, device)
    given = _seen(mask_function, queries, keys, num_heads)
    for mask in (
        causal,
        *(replace(causal, window=size) for size in sizes),
        *(replace(causal, chunk=size) for size in sizes),
    ):
        if bool((mask.sees(queries[:, None], keys) == given).all()):
            return mask
    raise ValueError(
        f"{config.model_type} makes a mask that is neither causal nor a window nor chunks: this "
        "trainer does not support it"
    )


def _probes(longest: int, sizes: Collection[int], device: torch.device) -> Int[Tensor, "queries"]:
    """Return queries near the edges of windows and chunks of these sizes."""
    edges = [0, longest // 3, longest // 2, longest - 1]
    edges += [times * size for size in sizes for times in (1, 2, 3)]
    places = {near for edge in edges for near in (edge - 1, edge, edge + 1)}
    return torch.tensor([p for p in sorted(places) if 0 <= p < longest], device=device)


def _seen(
    mask_function: _MaskFunction,
    queries: Int[Tensor, "queries"],
    keys: Int[Tensor, "keys"],
    num_heads: int,
) -> Bool[Tensor, "heads queries keys"]:
    """Return which keys the first and the last head see."""
    heads = torch.tensor([0, num_heads - 1], device=keys.device)
    rows = torch.zeros(1, dtype=torch.long, device=keys.device)
    places = (rows[:, None, None, None], heads[:, None, None], queries[:, None], keys)
    shape = (1, len(heads), len(queries), len(keys))
    return mask_function(*places).expand(shape)[0]


AttentionMaskInterface.register(PACKED, row_mask)
