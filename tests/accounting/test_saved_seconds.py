"""The reported seconds that drafting saved, against the true ones of a simulated engine. Over the
epochs, nearly all passes have drafts, and the machine gets slower."""

from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from refrain.engines.accounting.savings import engine_costs, step_savings
from refrain.engines.accounting.step_requests import Stay, StepRequest
from refrain.engines.histospec.step_times import MeasuredStepTimes, pass_content
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.step import EngineShare

MAX_PASS_TOKENS = 1024
PROMPT_TOKENS = 64
WINDOW = 6
LAPS = 4
"""Laps in an epoch."""


@dataclass
class Engine:
    """An engine that mixes chunked prefill with decoding, as vLLM does."""

    rng: np.random.Generator
    times: MeasuredStepTimes
    slowness: float = 1.0
    now_s: float = 0.0
    ends_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    last_drafts: float = 0.0

    def pass_s(self, content: np.ndarray) -> float:
        """Return the seconds of a pass. They are noisy, and not linear, as on a CPU."""
        _, few, beyond, context, prompts, _, drafts = content
        seconds = (
            3e-3 + 4e-4 * (few + beyond) ** 0.75 + 1e-7 * context + 3e-5 * prompts + 2.5e-5 * drafts
        )
        # The host still handles the tokens of the last pass.
        seconds, self.last_drafts = seconds + 6e-6 * self.last_drafts, drafts
        return self.slowness * seconds * self.rng.choice([0.9, 1.0, 1.1])

    def lap(self, lengths: np.ndarray, known: float) -> tuple[float, list[StepRequest]]:
        """Roll out these responses. Each request drafts in a share `known` of its passes, 0: never.
        Return the seconds and the requests."""
        began_s, num = self.now_s, len(lengths)
        prompts = np.full(num, PROMPT_TOKENS)
        computed, done, passes = np.zeros(num, int), np.zeros(num, int), np.zeros(num, int)
        drafted, self.ends_s = np.zeros(num, int), np.zeros(num)
        while (running := np.flatnonzero(done < lengths)).size:
            decodes = computed[running] >= PROMPT_TOKENS
            batch = int(decodes.sum())
            due = self.times.plain_is_due(self.now_s)
            drafts = WINDOW * (self.rng.random(len(running)) < known) * decodes * (not due)
            room = MAX_PASS_TOKENS - batch - drafts.sum()
            before = np.cumsum(np.where(decodes, 0, PROMPT_TOKENS)) - PROMPT_TOKENS
            chunks = np.clip(room - before, 0, PROMPT_TOKENS - computed[running])
            scheduled = np.where(decodes, 1 + drafts, chunks)
            held = pass_content(scheduled, computed[running], prompts[running])
            self.times.pass_begins(self.now_s)
            self.now_s += self.pass_s(held)
            self.times.pass_ended(self.now_s, held)
            accepted = np.minimum(drafts, self.rng.geometric(0.15, len(running)) - 1)
            gained = np.where(decodes, 1 + accepted, computed[running] + chunks >= PROMPT_TOKENS)
            gained = np.minimum(gained, (lengths - done)[running])
            computed[running] += np.where(decodes, gained, chunks)
            done[running] += gained
            passes[running] += gained > 0
            drafted[running] += drafts
            self.ends_s[running[done[running] >= lengths[running]]] = self.now_s
        return self.now_s - began_s, [
            StepRequest(
                RequestId(Split.TRAIN, 1, "prompt", number),
                (Stay(0, began_s, end_s),),
                *("stop", int(length), int(length), PROMPT_TOKENS),
                *(int(num_drafted), int(length - num_passes)),
            )
            for number, end_s, length, num_drafted, num_passes in zip(
                count(), self.ends_s, lengths, drafted, passes, strict=False
            )
        ]

    def share(self, busy_s: float) -> EngineShare:
        drafting = DraftingCounts(
            **self.times.take(),
            step_costs=self.times.costs,
            plain_error=self.times.plain_error,
        )
        return EngineShare(engine=0, num_rollouts=1, num_tokens=1, busy_s=busy_s, drafting=drafting)


def epochs(seed: int, plain_share: float) -> list[tuple[float, float, float]]:
    """Return, for each of twelve epochs, the reported seconds saved, the true ones, and the
    reported uncertainty."""
    rng = np.random.default_rng(seed)
    on, off = Engine(rng, MeasuredStepTimes(plain_share)), Engine(rng, MeasuredStepTimes())
    found = []
    for epoch in range(12):
        known = 0.0 if epoch == 0 else 0.5 + 0.04 * epoch
        on.slowness = off.slowness = 1.0 + 0.02 * epoch
        said, truth, error = [], [], []
        for _ in range(LAPS):
            lengths = np.minimum(200, 1 + rng.geometric(1 / 50, 256))
            took_s, requests = on.lap(lengths, known)
            costs = engine_costs(requests, [on.share(took_s)], {}, None)
            savings = step_savings(requests, (), costs, "")
            off_s, _ = off.lap(lengths, 0.0)
            if savings:
                said.append(savings.each[0].saved_s)
                error.append(savings.each[0].uncertainty_s)
                truth.append(off_s - took_s)
        if said:
            found.append((np.mean(said), np.mean(truth), np.mean(error)))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_reported_drafting_savings_equal_measured_savings(seed):
    for said_s, true_s, error_s in epochs(seed, plain_share=1 / 16):
        assert 0.8 < said_s / true_s < 1.25
        assert abs(said_s - true_s) < 3 * error_s
