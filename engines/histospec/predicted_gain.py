"""Predicted gain from drafts in the second epoch, from responses of the first. Pure.

The responses of one step to a prompt stand in for two epochs. An index of their first half drafts
the other half, each with the noise of its own sample, as one epoch's index drafts the next epoch.
Two things differ from a real second epoch: it has twice as many responses to draft from, and a
policy that has moved.

The cost of a draft token is unknown before there are drafts, so the gain is predicted for two
costs: a tenth of a row's time, as on a GPU with few rows, and eight tenths, as on a CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from refrain.engines.histospec.acceptance import Acceptance
from refrain.engines.histospec.gate import Gate
from refrain.engines.histospec.index import Turns, build_index, split_turns
from refrain.engines.histospec.library import index_sizes
from refrain.engines.histospec.matching import IndexTable
from refrain.engines.histospec.replay import replay
from refrain.engines.histospec.window import window_policy
from refrain.schemas.drafting import DraftingConfig

CHEAP, DEAR = 0.1, 0.8
"""Time of a draft token, as a share of a row's time."""


@dataclass(frozen=True)
class ResponseGroup:
    """Responses to one prompt in one step."""

    prompt_token_ids: np.ndarray
    responses: Sequence[np.ndarray]
    sample_keys: Sequence[int]
    """Key of the noise of each response."""
    turns: Sequence[Turns] = ()
    """Turns of each response. Empty: no response has turns."""


@dataclass(frozen=True)
class PredictedGain:
    """Ratio of the tokens per second with drafts to those without."""

    where_cheap: float
    where_dear: float


class RowTimes:
    """Step times of a machine on which a draft token takes this share of a row's time; see
    `gate.StepTimes`."""

    def __init__(self, share: float) -> None:
        self._share = share

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        del context_tokens, num_rows
        return batch + self._share * num_tokens


def predict_gain(groups: Sequence[ResponseGroup], config: DraftingConfig) -> PredictedGain | None:
    """Return the predicted gain, or None if no group has two responses."""
    table, prompts, responses, keys, slots, starts = IndexTable(), [], [], [], [], []
    for group in groups:
        half = len(group.responses) // 2
        if not half:
            continue
        index = build_index(
            group.prompt_token_ids,
            group.responses[:half],
            [0.0] * half,
            turns=group.turns[:half],
            **index_sizes(config),
        )
        slot = table.add(index)
        for before, sampled, start, key in _later_half(group, half):
            prompts.append(before)
            responses.append(sampled)
            keys.append(key)
            slots.append(slot)
            starts.append(start)
    if not slots:
        return None
    given = (prompts, responses, table.rows, np.array(slots, np.int32))
    speeds = []
    for share in (CHEAP, DEAR):
        acceptance, gate = Acceptance(), Gate(RowTimes(share))
        # The first pass learns the acceptance, and the second one uses it.
        for _ in range(2):
            done = replay(
                *given,
                window_policy(config.window, config.max_draft),
                gate=gate,
                acceptance=acceptance,
                sample_keys=np.array(keys, np.int64) if config.look_ahead else None,
                starts=np.array(starts, np.int32),
            )
        num_tokens = sum(map(len, responses))
        speeds.append(num_tokens / float(done.num_passes.sum() + share * done.num_drafted.sum()))
    return PredictedGain(*speeds)


def _later_half(
    group: ResponseGroup, half: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int, int]]:
    """Yield the turns of the second half: the tokens before, those sampled, where the turn starts
    (0 in a first turn), and the key of the noise."""
    turns = group.turns or [()] * len(group.responses)
    given = (group.responses, turns, group.sample_keys)
    for response, own, key in zip(*(of[half:] for of in given), strict=True):
        parts = split_turns(group.prompt_token_ids, response, own)
        for number, (before, sampled) in enumerate(parts):
            if len(sampled):
                yield before, sampled, len(before) if number else 0, key
