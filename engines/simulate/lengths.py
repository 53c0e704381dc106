"""The response lengths of each prompt in the earlier steps of a trace, as a run knows them."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from refrain.engines.simulate.trace import Trace
from refrain.engines.simulate.turns import turn_sums
from refrain.schemas.rollout import LengthHistory


class TraceLengths:
    """The responses of every group of a trace, as a run knows them after the group's step."""

    def __init__(self, trace: Trace) -> None:
        keys = trace.table["prompt_key"].combine_chunks().dictionary_encode()
        prompts, steps = keys.indices.to_numpy(), trace.column("step")
        lengths = trace.column("response_tokens")
        _, observed, waited_s = turn_sums(trace.table)
        order = np.lexsort((lengths, steps, prompts))
        prompts, steps, rows = prompts[order], steps[order], [lengths, observed, waited_s]
        columns_CR = np.array([of[order] for of in rows], dtype=float)
        cuts = np.flatnonzero((np.diff(prompts) != 0) | (np.diff(steps) != 0)) + 1
        firsts = [0, *cuts.tolist()]
        names = keys.dictionary.to_pylist()
        self._groups: dict[str, list[tuple[int, LengthHistory]]] = {}
        for first, group in zip(firsts, np.split(columns_CR, cuts, axis=1), strict=True):
            of_prompt = self._groups.setdefault(names[prompts[first]], [])
            of_prompt.append((int(steps[first]), _history(*group)))

    def before(self, step: int, prompt_keys: Iterable[str]) -> dict[str, LengthHistory]:
        """Return each prompt's lengths in its last two steps before this one."""
        history = {}
        for key in prompt_keys:
            earlier = [group for before, group in self._groups[key] if before < step]
            if earlier:
                previous = earlier[-2].median_tokens if len(earlier) > 1 else None
                history[key] = replace(earlier[-1], previous_median_tokens=previous)
        return history


def _history(lengths: np.ndarray, observed: np.ndarray, waited_s: np.ndarray) -> LengthHistory:
    """Return the history of a group. Its lengths ascend."""
    return LengthHistory(
        median_tokens=float(np.median(lengths)),
        longest_tokens=int(lengths[-1]),
        mean_wait_s=float(waited_s.mean()),
        observed_per_token=float(observed.sum() / lengths.sum()),
    )
