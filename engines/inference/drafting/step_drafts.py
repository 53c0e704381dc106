"""Drafts that go along with a step, from the scheduler to all ranks."""

from dataclasses import dataclass

import numpy as np

START, NUM, TOKENS = 0, 1, 2
"""Columns of `StepDrafts.packed`: tokens of the request that the draft follows, length of the
draft, and the first of its tokens."""


@dataclass(frozen=True, slots=True)
class StepDrafts:
    ids: list[str]
    """Requests, by vLLM's names."""
    packed: np.ndarray
    """int32 [drafts, 2 + most tokens]: see `START`, `NUM`, `TOKENS`."""
