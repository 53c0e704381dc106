"""Tokens that a run's drafter brings in RhymeRL's setting, by batch size.

    lengths of the trace ─► tokens that resemble (`similar_tokens`) ─► index, windows and gate of a
        run, replayed as if so many requests ran together ─► tokens and drafts of a pass

`engines.simulate.history` does the same with the real tokens of a trace. Deviations: `NUM_PROMPTS`
prompts, evenly spaced by length, stand for all of a step, and their means for every request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refrain.benchmarks.papers.similar_tokens import Resemblance, similar_groups
from refrain.engines.histospec.gate import Gate, ProfiledStepTimes, StepTimes
from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.library import PromptHistory, index_sizes
from refrain.engines.histospec.matching import IndexTable
from refrain.engines.histospec.replay import Replay, replay
from refrain.engines.histospec.window import window_policy
from refrain.engines.latency.interface import Latency
from refrain.engines.simulate.history import DRAFTINGS
from refrain.engines.simulate.member import Passes
from refrain.engines.simulate.trace import Trace
from refrain.schemas.drafting import DraftingConfig

SHIPPED, PAPER = "goodput", "paper"
"""Window policies: of a run by default, and the paper's."""
BATCHES = (1, 4, 16, 32, 64, 128, 256)
"""Batch sizes whose gate is replayed."""
NUM_PROMPTS = 16
Groups = Sequence[tuple[PromptHistory, PromptHistory]]
Lengths = tuple[int, ...]
"""Response tokens of a group."""


@dataclass(frozen=True)
class _AsIf:
    """Step times of another batch size, with requests like those of this batch."""

    times: StepTimes
    batch: int

    def step_s(
        self, batch: int, context_tokens: float, num_rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        scale = self.batch / batch
        return self.times.step_s(
            self.batch, context_tokens * scale, num_rows * scale, num_tokens * scale
        )


def drafted_levels(
    trace: Trace, step: int, latency: Latency, tp_degree: int, seed: int
) -> tuple[Passes, ...]:
    """Return the mean passes under the gate of each batch size. Leave out passes without drafts."""
    groups = similar_groups(Resemblance(), sampled_lengths(trace, step), seed)
    times, config = ProfiledStepTimes(latency, tp_degree), DRAFTINGS[SHIPPED]
    found = (mean_passes(replay_groups(groups, config, _AsIf(times, n))) for n in BATCHES)
    return tuple(passes for passes in found if passes.num_draft_tokens)


def sampled_lengths(trace: Trace, step: int) -> tuple[tuple[Lengths, Lengths], ...]:
    """Return the last earlier group and this step's group, of some of its prompts."""
    now, before = _by_prompt(trace.step(step)), _by_prompt(trace.before(step))
    keys = sorted(now.keys() & before.keys(), key=lambda key: (sum(now[key]), key))
    places = np.linspace(0, len(keys) - 1, min(NUM_PROMPTS, len(keys))).round().astype(int)
    return tuple((before[keys[place]], now[keys[place]]) for place in places)


def _by_prompt(rows: Trace) -> dict[str, Lengths]:
    found: dict[str, list[int]] = {}
    keys, tokens = rows.table["prompt_key"].to_pylist(), rows.column("response_tokens").tolist()
    for key, num in zip(keys, tokens, strict=True):
        found.setdefault(key, []).append(num)
    return {key: tuple(own) for key, own in found.items()}


def replay_groups(groups: Groups, config: DraftingConfig, times: StepTimes | None) -> Replay:
    """Replay all later responses in one batch, with drafts from the earlier ones of their prompts.
    `times`: for the gate. None: everything is verified."""
    table, prompts, responses, slots = IndexTable(), [], [], []
    for earlier, later in groups:
        index = build_index(
            earlier.prompt_token_ids,
            earlier.responses,
            earlier.rewards,
            turns=earlier.turns,
            **index_sizes(config),
        )
        slot = table.add(index)
        for response in later.responses:
            # The first token comes from the prefill.
            prompts.append(np.append(later.prompt_token_ids, response[:1]).astype(np.int32))
            responses.append(response[1:])
            slots.append(slot)
    return replay(
        prompts,
        responses,
        table.rows,
        np.array(slots, np.int32),
        window_policy(config.window, config.max_draft),
        gate=Gate(times),
    )


def mean_passes(counts: Replay) -> Passes:
    num_passes, num_accepted = int(counts.num_passes.sum()), int(counts.num_accepted.sum())
    return Passes(
        num_passes,
        num_passes + num_accepted,
        int(counts.num_verifications.sum()),
        int(counts.num_drafted.sum()),
    )
