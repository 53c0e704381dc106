"""The response lengths of each prompt in the earlier steps of a trace, as a run knows them."""

from collections.abc import Iterable

import numpy as np

from engines.simulate.trace import Trace
from schemas.rollout import LengthHistory


class TraceLengths:
    """The median and the longest response of every group of a trace."""

    def __init__(self, trace: Trace) -> None:
        keys = trace.table["prompt_key"].combine_chunks().dictionary_encode()
        prompts, steps = keys.indices.to_numpy(), trace.column("step")
        lengths = trace.column("response_tokens")
        order = np.lexsort((lengths, steps, prompts))
        prompts, steps, lengths = prompts[order], steps[order], lengths[order]
        cuts = np.flatnonzero((np.diff(prompts) != 0) | (np.diff(steps) != 0)) + 1
        firsts = [0, *cuts.tolist()]
        names = keys.dictionary.to_pylist()
        self._groups: dict[str, list[tuple[int, float, int]]] = {}
        for first, group in zip(firsts, np.split(lengths, cuts), strict=True):
            of_prompt = self._groups.setdefault(names[prompts[first]], [])
            of_prompt.append((int(steps[first]), float(np.median(group)), int(group[-1])))

    def before(self, step: int, prompt_keys: Iterable[str]) -> dict[str, LengthHistory]:
        """Return each prompt's lengths in its last two steps before this one."""
        history = {}
        for key in prompt_keys:
            earlier = [group for group in self._groups[key] if group[0] < step]
            if earlier:
                _, median, longest = earlier[-1]
                previous = earlier[-2][1] if len(earlier) > 1 else None
                history[key] = LengthHistory(median, longest, previous)
        return history
