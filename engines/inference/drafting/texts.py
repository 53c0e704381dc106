"""The tokens of an engine's running requests as one array, for drafting beside the scheduler."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Texts:
    """Prompt and response of each running request. The rows are dense: when a request ends, the
    last row takes its place."""

    def __init__(self, max_num_requests: int, max_tokens: int) -> None:
        self.tokens = np.zeros((max_num_requests, max_tokens), np.int32)
        """int32 [rows, tokens]. Only the first tokens of a row are valid (`lengths`)."""
        self.ids: list[str] = []
        """Request of each row."""
        self._rows: dict[str, int] = {}
        self._requests: list[Any] = []
        """vLLM's `Request` of each row."""
        self._lengths = np.zeros(max_num_requests, np.int32)

    def has(self, id: str) -> bool:
        return id in self._rows

    def begin(self, id: str, request: Any) -> None:
        """Add a request. Its tokens follow with `grow`."""
        self._rows[id] = row = len(self.ids)
        self.ids.append(id)
        self._requests.append(request)
        # The tokens of a prompt are no output: `grow` reports the response's alone.
        num = request.num_prompt_tokens
        self.tokens[row, :num] = request.prompt_token_ids
        self._lengths[row] = num

    def grow(self, id: str) -> bool:
        """Take over the tokens that vLLM has appended. Return whether there are any."""
        row = self._rows[id]
        tokens, known = self._requests[row]._all_token_ids, int(self._lengths[row])
        if (num := len(tokens)) == known:
            return False
        self.tokens[row, known:num] = tokens[known:]
        self._lengths[row] = num
        return True

    def end(self, id: str) -> None:
        """Remove a request."""
        row, last = self._rows.pop(id), len(self.ids) - 1
        if row < last:
            num = self._lengths[last]
            self.tokens[row, :num] = self.tokens[last, :num]
            self._lengths[row] = num
            self.ids[row], self._requests[row] = self.ids[last], self._requests[last]
            self._rows[self.ids[row]] = row
        self.ids.pop()
        self._requests.pop()

    def lengths(self, ids: Sequence[str]) -> np.ndarray:
        """Return the tokens of prompt and response; int32 [requests]. 0 for unknown requests."""
        rows = (self._rows.get(id) for id in ids)
        return np.array([0 if row is None else self._lengths[row] for row in rows], np.int32)

    def num_prompt(self, id: str) -> int:
        row = self._rows.get(id)
        return 0 if row is None else self._requests[row].num_prompt_tokens

    def num_computed(self, id: str) -> int:
        """Return about how many tokens have keys and values; -1 for an unknown request."""
        row = self._rows.get(id)
        return -1 if row is None else int(self._lengths[row]) - 1

    def num_right(
        self, ids: Sequence[str], starts: np.ndarray, drafts: np.ndarray, num: np.ndarray
    ) -> np.ndarray:
        """Return how many tokens of each draft are in the text, up to the first other one; int32
        [requests].

        `starts`: int32 [requests], tokens that the draft follows.
        `drafts`: int32 [requests, any], of which the first `num` are valid.
        """
        columns = np.arange(drafts.shape[1])
        at = starts[:, None] + columns
        rows = np.array([self._rows[id] for id in ids])[:, None]
        known = (at < self.lengths(ids)[:, None]) & (columns < num[:, None])
        text = self.tokens[rows, np.minimum(at, self.tokens.shape[1] - 1)]
        return np.cumprod(known & (text == drafts), axis=1).sum(axis=1).astype(np.int32)
