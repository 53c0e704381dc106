"""Methods for profiling inside vLLM's workers, added through `worker_extension_cls`."""

import time
from typing import Any

import numpy as np

from refrain.engines.inference.engine.worker import WorkerExtension
from refrain.engines.inference.profiling.engine import NGRAM_SIZES


class ProfilingWorkerExtension(WorkerExtension):
    """Worker that can draft junk tokens and time the n-gram drafter."""

    def draft_junk(self, window: int) -> None:
        """From now on draft `window` times token 0 for each request.

        Verification costs the same for all tokens.
        """

        def propose(_: int, sampled_token_ids: list, *args: Any, **kwargs: Any) -> list[list[int]]:
            del args, kwargs
            return [[0] * window if tokens else [] for tokens in sampled_token_ids]

        self.model_runner.drafter.propose = propose

    def time_ngram(self, batch: int, context_tokens: int, window: int, num_calls: int) -> float:
        """Return the mean seconds that vLLM's n-gram drafter takes for a batch.

        The contexts are random, but their last tokens equal their first ones. So the drafter
        searches the whole context and finds a match.
        """
        drafter = self.model_runner.drafter
        rng = np.random.default_rng(0)
        texts = rng.integers(1, 2**15, (batch, self.model_runner.max_model_len), dtype=np.int32)
        longest = NGRAM_SIZES[1]
        context_tokens = max(context_tokens, 2 * longest)
        texts[:, context_tokens - longest : context_tokens] = texts[:, :longest]
        lengths = np.full(batch, context_tokens, dtype=np.int32)
        sampled = [[0]] * batch
        propose = type(drafter).propose
        drafts = propose(drafter, window, sampled, lengths, texts)
        assert all(len(draft) == window for draft in drafts)
        started_s = time.perf_counter()
        for _ in range(num_calls):
            propose(drafter, window, sampled, lengths, texts)
        return (time.perf_counter() - started_s) / num_calls
