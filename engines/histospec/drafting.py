"""Drafts for a whole decoding step in one compiled call.

Rows of a batch belong to different prompts, each with an index of its own whose arrays may be
memory-mapped files. `IndexTable` keeps the indexes alive and hands their addresses to the compiled
code, so nothing is copied.
"""

import math

import numpy as np
from numba import carray, float64, int32, int64, njit, types, uint16, uint64
from numba.extending import intrinsic

from engines.histospec.index import END, HistoryIndex
from engines.inference.sampling.generator import philox, stream_of

NO_INDEX = -1
NO_KEY = -(2**63)
"""A sample key whose noise is not known, or that has none."""
SHARPNESS = 2.0
"""Power of the counts that noise is added to. A policy is more certain than what was counted after
the few tokens that match: they stand for many contexts, and it sees all of its own. Measured on the
demo at temperatures 1 and 2, where 1.5 to 5 differ by 1 % (`refrain bench drafting`)."""
_UNSEEN = 0.5
"""Occurrences of tokens that were never seen after a match, all together."""
_SEEN, _SHARES = 6, 6
"""Classes of how often a node was seen (1, 2, 4 ... 32 times), and of a child's share of it."""
_NUM_COUNTED = _SEEN * (_SHARES + 1) * 2
_LEADS, _KNOWN, _MATCHES = 7, 6, 3
"""Classes of how far the child that is drawn is ahead of the next one (the last: there is no other
one), of how likely its draw is ahead of all that was never seen, and of the length of the match."""
NUM_EVIDENCE = _NUM_COUNTED + _LEADS * _KNOWN * _MATCHES
"""Classes of drafts by counts alone, then of those by counts and noise."""
_COLUMNS = 10
_TEXT, _ORDER, _WEIGHT, _TOKENS, _STARTS, _N, _NUM_TOKENS, _MIN, _MAX, _DRAFT = range(_COLUMNS)


def evidence_shares() -> np.ndarray:
    """A first guess for each class: the share of the cases, of which one more did not occur; where
    noise is known, how likely the draw is ahead of others. float64 [NUM_EVIDENCE].
    """
    seen, share, _ = np.unravel_index(np.arange(_NUM_COUNTED), (_SEEN, _SHARES + 1, 2))
    middle = np.where(share == _SHARES, 1.0, (share + 0.5) / _SHARES)
    times = 2.0**seen
    shape = (_LEADS, _KNOWN, _MATCHES)
    lead, known, _ = np.unravel_index(np.arange(NUM_EVIDENCE - _NUM_COUNTED), shape)
    ahead = np.array([0.15, 0.45, 0.7, 0.85, 0.93, 0.98])[known] * (lead + 3) / (_LEADS + 2)
    return np.concatenate([middle * times / (times + 1.0), ahead])


class IndexTable:
    """The indexes that an engine drafts from, by slot."""

    def __init__(self) -> None:
        self._indexes: dict[int, HistoryIndex] = {}
        self._free: list[int] = []
        self.rows = np.zeros((0, _COLUMNS), np.int64)

    def add(self, index: HistoryIndex) -> int:
        """The slot, until it is removed."""
        if not self._free:
            num_taken = len(self.rows)
            self.rows = np.pad(self.rows, ((0, max(16, num_taken)), (0, 0)))
            self._free = list(range(len(self.rows) - 1, num_taken - 1, -1))
        slot = self._free.pop()
        self._indexes[slot] = index
        arrays = (index.text, index.order, index.weight, index.first_tokens, index.first_starts)
        assert all(array.flags.c_contiguous for array in arrays)
        self.rows[slot] = [
            *(array.ctypes.data for array in arrays),
            *(len(index.text), len(index.first_tokens)),
            *(index.min_match, index.max_match, index.max_draft),
        ]
        return slot

    def remove(self, slot: int) -> None:
        del self._indexes[slot]
        self.rows[slot] = 0
        self._free.append(slot)


@intrinsic
def _int32_pointer(typingctx, address):  # noqa: ARG001
    return _pointer(types.int32, address)


@intrinsic
def _int64_pointer(typingctx, address):  # noqa: ARG001
    return _pointer(types.int64, address)


def _pointer(dtype, address):
    signature = types.CPointer(dtype)(address)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


@njit(inline="always")
def _compare(text, position, pattern, length):
    """Order of the text from `position` on and the pattern: -1 before, 0 alike, 1 after."""
    for k in range(length):
        token = text[position + k]
        if token != pattern[k]:
            return -1 if token < pattern[k] else 1
    return 0


@njit(inline="always")
def _place_of(tokens, token):
    """Place of a token among the distinct ones, or -1: galloping from where it would be if they
    were evenly spread, as most of a vocabulary is."""
    n = len(tokens)
    if token < tokens[0] or token > tokens[n - 1]:
        return -1
    spread = max(1, int64(tokens[n - 1]) - tokens[0])
    low = (int64(token) - tokens[0]) * (n - 1) // spread
    high, step = low + 1, 1
    while tokens[low] > token:
        low, high, step = max(0, low - step), low, 2 * step
    step = 1
    while high < n and tokens[high] <= token:
        low, high, step = high, min(n, high + step), 2 * step
    while low + 1 < high:
        middle = (low + high) // 2
        if tokens[middle] <= token:
            low = middle
        else:
            high = middle
    return low if tokens[low] == token else -1


@njit
def _match(text, order, tokens, starts, pattern, length):
    """The interval of `order` whose suffixes begin with the pattern."""
    place = _place_of(tokens, pattern[0])
    if place < 0:
        return 0, 0
    low, high = starts[place], starts[place + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], pattern, length) < 0:
            low = middle + 1
        else:
            high = middle
    start = low
    if start == end or _compare(text, order[start], pattern, length) != 0:
        return start, start
    # Most intervals are short: galloping, then halving.
    step = 1
    while low + step < end and _compare(text, order[low + step], pattern, length) == 0:
        low += step
        step *= 2
    high = min(end, low + step)
    while low + 1 < high:
        middle = (low + high) // 2
        if _compare(text, order[middle], pattern, length) == 0:
            low = middle
        else:
            high = middle
    return start, high


@njit
def _end_of(text, order, low, high, depth):
    """End of the suffixes whose token at `depth` is that of the first: galloping, then halving, as
    most children are either short or nearly the whole interval."""
    token = text[order[low] + depth]
    if text[order[high - 1] + depth] == token:
        return high
    step = 1
    while low + step < high and text[order[low + step] + depth] == token:
        low += step
        step *= 2
    high = min(high, low + step)
    while low + 1 < high:
        middle = (low + high) // 2
        if text[order[middle] + depth] == token:
            low = middle
        else:
            high = middle
    return high


@njit
def _heaviest(text, order, weight, low, high, depth):
    """The child interval with the largest sum of rewards, then occurrences, then least token."""
    best_low, best_high, best_sum = low, low, int64(-1)
    while low < high:
        end = _end_of(text, order, low, high, depth)
        if text[order[low] + depth] != END:
            total = weight[end] - weight[low]
            if total > best_sum or (total == best_sum and end - low > best_high - best_low):
                best_low, best_high, best_sum = low, end, total
        low = end
    return best_low, best_high


@njit(inline="always")
def _evidence(num_parent, num_child, matched, max_match):
    """The class of a draft token by counts alone, 0..`_NUM_COUNTED` - 1: how often what precedes it
    was seen, in which share of the cases it followed, whether the match is as long as may be."""
    seen = 0
    while seen < _SEEN - 1 and num_parent > (1 << seen):
        seen += 1
    share = num_child * _SHARES // (num_parent + 1)
    if num_child == num_parent:
        share = _SHARES
    return (seen * (_SHARES + 1) + share) * 2 + (1 if matched >= max_match else 0)


@njit(inline="always")
def _gumbel(key, position, token):
    """Noise of a token, as `engines.inference.sampling.noise` defines it but for rounding."""
    first, second = stream_of(uint64(key), uint64(position))
    high, _ = philox(first, uint64(token), second)
    return -math.log(-math.log1p(-(float64(high) + 0.5) * 2.0**-32))


@njit
def _foreseen(text, order, low, high, depth, key, position):
    """The child interval that this very sample draws if the policy is what was counted, and the
    class of this evidence but for the match."""
    best_low, best_high, num_next = low, low, 0
    best, following = -np.inf, -np.inf
    while low < high:
        end = _end_of(text, order, low, high, depth)
        token = text[order[low] + depth]
        if token != END:
            score = SHARPNESS * math.log(float64(end - low)) + _gumbel(key, position, token)
            if score > best:
                following, num_next = best, best_high - best_low
                best_low, best_high, best = low, end, score
            elif score > following:
                following, num_next = score, end - low
        low = end
    known = math.exp(-_UNSEEN * math.exp(-best))
    level = 0
    for bound in (0.3, 0.6, 0.8, 0.9, 0.96):
        level += known >= bound
    lead = _LEADS - 1
    if num_next:
        spread = SHARPNESS * math.sqrt(1.0 / (best_high - best_low) + 1.0 / num_next)
        lead = min(_LEADS - 2, int64(1.5 * (best - following) / spread))
    return best_low, best_high, lead * _KNOWN + level


@njit(inline="always")
def _arrays_of(row):
    """Text, order, weight, first tokens and their starts."""
    n, num_first = row[_N], row[_NUM_TOKENS]
    return (
        carray(_int32_pointer(row[_TEXT]), (n,), np.int32),
        carray(_int32_pointer(row[_ORDER]), (n,), np.int32),
        carray(_int64_pointer(row[_WEIGHT]), (n + 1,), np.int64),
        carray(_int32_pointer(row[_TOKENS]), (num_first,), np.int32),
        carray(_int32_pointer(row[_STARTS]), (num_first + 1,), np.int32),
    )


@njit
def _longest_match(row, context, num_tokens, at_least):
    """How many of the last tokens match, `at_least` or more, and their interval; 0 when fewer do.

    Whatever follows a longer match follows the shorter ones: the least is looked for first, then
    the most, then between them.
    """
    if row[_N] == 0:
        return 0, 0, 0
    text, order, _, tokens, starts = _arrays_of(row)
    least, most = max(row[_MIN], at_least), min(row[_MAX], num_tokens)
    matched, low, high, length, tried_most = 0, 0, 0, least, False
    while least <= most:
        pattern = context[num_tokens - length : num_tokens]
        first, end = _match(text, order, tokens, starts, pattern, length)
        if first < end:
            matched, low, high, least = length, first, end, length + 1
        elif matched == 0:
            break
        else:
            most = length - 1
        length, tried_most = (least + most + 1) // 2 if tried_most else most, True
    return matched, low, high


@njit
def _descend(row, length, low, high, position, window, key, draft, evidence):
    """Draft what follows a match of `length` tokens; returns how many tokens it is."""
    text, order, weight, _, _ = _arrays_of(row)
    drafted = 0
    while drafted < window and low < high:
        depth, num_parent = length + drafted, high - low
        if key == NO_KEY:
            low, high = _heaviest(text, order, weight, low, high, depth)
            found = _evidence(num_parent, high - low, depth, row[_MAX])
        else:
            low, high, found = _foreseen(text, order, low, high, depth, key, position + drafted)
            match = (depth > 3) + (depth >= row[_MAX])
            found = _NUM_COUNTED + found * _MATCHES + match
        if low < high:
            draft[drafted] = text[order[low] + depth]
            evidence[drafted] = found
            drafted += 1
    return drafted


@njit
def _draft_row(row, context, num_tokens, window, key, draft, evidence):
    """Draft for one row into `draft` and `evidence`; returns how many tokens they got."""
    length, low, high = _longest_match(row, context, num_tokens, 0)
    window = min(window, row[_DRAFT])
    while length >= row[_MIN] and length > 0:
        drafted = _descend(row, length, low, high, num_tokens, window, key, draft, evidence)
        if drafted:
            return drafted
        # Nothing but ends follows: a shorter match may go on.
        length -= 1
        if length >= row[_MIN]:
            text, order, _, tokens, starts = _arrays_of(row)
            pattern = context[num_tokens - length : num_tokens]
            low, high = _match(text, order, tokens, starts, pattern, length)
    return 0


@njit
def _draft_row_of_any(table, slots, context, num_tokens, window, key, draft, evidence):
    """The same by the index that has the longest match, and of these the most of it."""
    best, best_slot, best_low, best_high = 0, int64(NO_INDEX), 0, 0
    for slot in slots:
        matched, low, high = _longest_match(table[slot], context, num_tokens, best)
        if matched > best or (matched == best and high - low > best_high - best_low):
            best, best_slot, best_low, best_high = matched, int64(slot), low, high
    if best == 0:
        return 0
    row = table[best_slot]
    window = min(window, row[_DRAFT])
    return _descend(row, best, best_low, best_high, num_tokens, window, key, draft, evidence)


_ROWS = (int64[:, ::1], int32[::1], int32[:, :], int32[::1], int32[::1], int64[::1])


@njit(int32[::1](*_ROWS, int32[:, ::1], uint16[:, ::1]), cache=True)
def draft_batch(table, slots, token_ids, num_tokens, windows, keys, drafts, evidence):
    """Draft for every row; int32 [rows], tokens drafted of each.

    `table`: `IndexTable.rows`. `slots`: int32 [rows], `NO_INDEX` where there is none. `token_ids`:
    int32 [rows, any], prompt and response so far. `num_tokens`: int32 [rows], of them. `windows`:
    int32 [rows], tokens to draft at most; 0 drafts nothing. `keys`: int64 [rows], sample key of
    each, so that what it draws is drafted, or `NO_KEY`. `drafts`: int32 [rows, largest window],
    filled from the left. `evidence`: uint16 of the same shape, the class of each draft token, below
    `NUM_EVIDENCE`, by how often it followed in the history; what a class is worth is learnt
    (`engines.histospec.acceptance`).
    """
    num_rows = len(slots)
    num_drafts = np.zeros(num_rows, np.int32)
    for i in range(num_rows):
        if slots[i] >= 0 and windows[i] > 0:
            row = table[slots[i]]
            num_drafts[i] = _draft_row(
                row, token_ids[i], num_tokens[i], windows[i], keys[i], drafts[i], evidence[i]
            )
    return num_drafts


@njit(int32[::1](*_ROWS, int32[:, ::1], uint16[:, ::1]), cache=True)
def draft_batch_of_any(table, slots, token_ids, num_tokens, windows, keys, drafts, evidence):
    """Draft for every row by all of these indexes: that with the longest match drafts, of these
    the one that has most of it. `slots`: int32 [indexes]; the rest as for `draft_batch`."""
    num_drafts = np.zeros(len(windows), np.int32)
    for i in range(len(windows)):
        if windows[i] > 0:
            rest = (token_ids[i], num_tokens[i], windows[i], keys[i], drafts[i], evidence[i])
            num_drafts[i] = _draft_row_of_any(table, slots, *rest)
    return num_drafts


def without_noise(num_rows: int) -> np.ndarray:
    """Keys of rows whose noise is not known; int64 [rows]."""
    return np.full(num_rows, NO_KEY, np.int64)
