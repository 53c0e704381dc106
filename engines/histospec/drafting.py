"""Drafts for all rows of a decoding step in one compiled call. For each row the call finds the last
tokens in an index (`engines.histospec.matching`) and drafts the tokens that followed them. It looks
for the tokens before a later turn of a conversation as the index stores them (`index.as_context`).
"""

import math

import numpy as np
from numba import float64, int32, int64, njit, uint16, uint64

from refrain.engines.histospec.index import END
from refrain.engines.histospec.matching import (
    DRAFT,
    MAX,
    MIN,
    arrays_of,
    few_matches,
    first_tokens_of,
    longest_match,
    match,
    match_of,
    often_of_few,
)
from refrain.engines.noise.generator import philox, stream_of

NO_KEY = -(2**63)
"""Sample key of a row whose noise is unknown, or that has none."""
SHARPNESS = 2.0
"""Power to which counts are raised before noise is added. The policy is more certain than the
counts: they mix all contexts that share the few matching tokens, while the policy sees its whole
context. Measured on the demo at temperatures 1 and 2, where 1.5 to 5 differ by 1 % (`refrain bench
drafting`)."""
LONGEST_ALONE = np.zeros(0)
"""Value of `worth` with which only the longest match drafts."""
_UNSEEN = 0.5
"""Occurrences credited to all tokens together that never followed the match."""
_SEEN, _SHARES = 6, 6
"""Number of classes for how often a node was seen (1, 2, 4 ... 32 times), and for the share of its
occurrences that a child has."""
_LEADS, _KNOWN = 7, 6
"""Number of classes for the lead of the drawn child over the runner-up (the last class: there is no
runner-up), and for the probability that its draw beats every token that was never seen."""
_PLACES = 12
"""Number of classes for where a draft token stands: the length of the match (4, 8, 16 tokens and
above), and the number of draft tokens before it (1, 4). The same counts are better evidence after a
long match, or when the draft has been right for many tokens."""
_DRAFTED_PLACES = 3
_COUNTED, _FORESEEN = (_SEEN, _SHARES + 1, _PLACES), (_LEADS, _KNOWN, _PLACES)
_NUM_COUNTED = math.prod(_COUNTED)
NUM_EVIDENCE = _NUM_COUNTED + math.prod(_FORESEEN)
"""Number of evidence classes: first those by counts alone, then those by counts and noise."""
ENOUGH = 8
"""Number of matches that is evidence enough. Where the longest match has fewer, the longest one
with this many drafts too, if there is one. The draft with more expected accepted tokens is taken.
"""
SURE = 0.9
"""Share of its window that a row must expect to be accepted to skip further drafting."""


def evidence_shares() -> np.ndarray:
    """Return a first guess of the acceptance of each class; float64 [NUM_EVIDENCE].

    By counts: the share of the occurrences, as if there had been one more without the token. By
    counts and noise: how likely the drawn token is ahead of all others.
    """
    seen, share, _ = np.unravel_index(np.arange(_NUM_COUNTED), _COUNTED)
    middle = np.where(share == _SHARES, 1.0, (share + 0.5) / _SHARES)
    times = 2.0**seen
    lead, known, _ = np.unravel_index(np.arange(math.prod(_FORESEEN)), _FORESEEN)
    ahead = np.array([0.15, 0.45, 0.7, 0.85, 0.93, 0.98])[known] * (lead + 3) / (_LEADS + 2)
    return np.concatenate([middle * times / (times + 1.0), ahead])


def evidence_factors() -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of each class, as ones and zeros; float64 [classes of the kind, factors].
    The first array is for drafts by counts, the second for drafts by counts and noise. The first
    column is 1 for all classes. The other columns mark the class of each of the two numbers, of the
    match length, and of the number of draft tokens before."""
    by_counts, by_noise = (_factors_of(shape) for shape in (_COUNTED, _FORESEEN))
    return by_counts, by_noise


def _factors_of(shape: tuple[int, int, int]) -> np.ndarray:
    first, second, place = np.unravel_index(np.arange(math.prod(shape)), shape)
    match, drafted = np.divmod(place, _DRAFTED_PLACES)
    sizes = (*shape[:2], _PLACES // _DRAFTED_PLACES, _DRAFTED_PLACES)
    indexes = (first, second, match, drafted)
    columns = [np.eye(size)[index] for size, index in zip(sizes, indexes, strict=True)]
    return np.hstack([np.ones((len(place), 1)), *columns])


@njit
def _end_of(text, order, low, high, depth):
    """Return the end of the suffixes that have the same token at `depth` as the first one. Gallop,
    then bisect, because most children are either short or nearly the whole interval."""
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
    """Return the child interval with the largest sum of rewards. Ties go to more occurrences, then
    to the smaller token."""
    best_low, best_high, best_sum = low, low, int64(-1)
    while low < high:
        end = _end_of(text, order, low, high, depth)
        if text[order[low] + depth] >= 0:
            total = weight[end] - weight[low]
            if total > best_sum or (total == best_sum and end - low > best_high - best_low):
                best_low, best_high, best_sum = low, end, total
        low = end
    return best_low, best_high


@njit(inline="always")
def _counted(num_parent, num_child):
    """Return the class by counts, without the place: how often the tokens before were seen, and the
    share of those cases in which this token followed."""
    seen = 0
    while seen < _SEEN - 1 and num_parent > (1 << seen):
        seen += 1
    share = num_child * _SHARES // (num_parent + 1)
    if num_child == num_parent:
        share = _SHARES
    return seen * (_SHARES + 1) + share


@njit(inline="always")
def _place(length, drafted):
    """Return the class of a draft token's place, 0..`_PLACES` - 1."""
    match = (length >= 4) + (length >= 8) + (length >= 16)
    return match * _DRAFTED_PLACES + (drafted >= 1) + (drafted >= 4)


@njit(inline="always")
def _gumbel(key, position, token):
    """Return a token's noise, as `engines.inference.sampling.noise` defines it up to rounding."""
    first, second = stream_of(uint64(key), uint64(position))
    high, _ = philox(first, uint64(token), second)
    return -math.log(-math.log1p(-(float64(high) + 0.5) * 2.0**-32))


@njit
def _foreseen(text, order, low, high, depth, key, position):
    """Return the child interval that this sample would draw if the policy equalled the counts, and
    the class of this evidence without its place."""
    best_low, best_high, num_next = low, low, 0
    best, following = -np.inf, -np.inf
    while low < high:
        end = _end_of(text, order, low, high, depth)
        token = text[order[low] + depth]
        if token >= 0:
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


@njit
def _descend(row, length, low, high, is_few, few, position, window, key, draft, evidence):
    """Draft the tokens that follow a match of `length` tokens; return how many. With `is_few`,
    `low` and `high` are an interval of `few`, else of `order`."""
    text, order, weight = arrays_of(row)
    if is_few:
        order, weight, _ = few
    window, drafted = min(window, row[DRAFT]), 0
    while drafted < window and low < high:
        depth, num_parent = length + drafted, high - low
        if key == NO_KEY:
            low, high = _heaviest(text, order, weight, low, high, depth)
            found = _counted(num_parent, high - low)
        else:
            low, high, found = _foreseen(text, order, low, high, depth, key, position + drafted)
        if low < high:
            draft[drafted] = text[order[low] + depth]
            found = found * _PLACES + _place(length, drafted)
            evidence[drafted] = found if key == NO_KEY else _NUM_COUNTED + found
            drafted += 1
    return drafted


@njit(inline="always")
def _expected(evidence, drafted, worth):
    """Return the expected number of accepted tokens of a draft."""
    total, all_right = 0.0, 1.0
    for k in range(drafted):
        all_right *= worth[evidence[k]]
        total += all_right
    return total


@njit
def _draft_after(row, context, num_tokens, found, few, worth, spare, *rest):
    """Draft the tokens that follow a match; return how many. If a shorter match that was seen more
    often has more expected accepted tokens, draft from that one instead.

    `found`: result of `longest_match`.
    `spare`: int32 [2, window], scratch space.
    """
    length, low, high, is_few, fewest = found
    position, window, key, draft, evidence = rest
    drafted = _descend(row, length, low, high, is_few, few, *rest)
    if not drafted or not len(worth) or high - low >= ENOUGH or fewest[1] - fewest[0] < ENOUGH:
        return drafted
    expected = _expected(evidence, drafted, worth)
    if expected >= SURE * window:
        return drafted
    if is_few:
        low = int64(0)
        length, high = often_of_few(row, *fewest, length - 1, ENOUGH, few)
    else:
        length, low, high = match_of(row, context, num_tokens, length - 1, ENOUGH)
    other = (position, window, key, spare[0], spare[1])
    count = _descend(row, length, low, high, is_few, few, *other)
    if _expected(spare[1], count, worth) > expected:
        draft[:count], evidence[:count] = spare[0, :count], spare[1, :count]
        return count
    return drafted


@njit
def _draft_row(row, context, num_tokens, first, few, worth, spare, *rest):
    """Draft for one row into `draft` and `evidence`; return the number of tokens."""
    found = longest_match(row, context, num_tokens, first, 0, few)
    while found[0] >= row[MIN] and found[0] > 0:
        args = (context, num_tokens, found, few, worth, spare, *rest)
        drafted = _draft_after(row, *args)
        if drafted:
            return drafted
        # Only ends of responses follow this match, so try a shorter one.
        length = found[0] - 1
        low, high = int64(0), int64(0)
        if length >= row[MIN]:
            low, high = match(row, context, num_tokens, length)
        found = (length, low, high, False, found[4])
    return 0


@njit
def _draft_row_of_any(table, slots, context, num_tokens, firsts, few, *rest):
    """Draft for one row from the index with the longest match, or the most of equally long ones;
    return the number of tokens."""
    best, most, best_k = int64(0), int64(0), -1
    text = (context, num_tokens)
    for k in range(len(slots)):
        row = table[slots[k]]
        matched, low, high, _, _ = longest_match(row, *text, firsts[k], best, few)
        if matched > best or (matched == best and high - low > most):
            best, most, best_k = matched, high - low, k
    if best == 0:
        return 0
    # Later indexes may have overwritten `few`, so search again.
    row = table[slots[best_k]]
    found = longest_match(row, *text, firsts[best_k], best, few)
    return _draft_after(row, *text, found, few, *rest)


@njit
def _contexts(table, token_ids, num_tokens, windows, starts):
    """Return the last tokens of each row as indexes store them, int32 [rows, longest match], and
    how many there are, int64 [rows]."""
    longest = int64(0)
    for slot in range(len(table)):
        longest = max(longest, table[slot, MAX])
    contexts = np.zeros((len(windows), longest), np.int32)
    lengths = np.minimum(num_tokens, longest)
    for i in range(len(windows)):
        first = num_tokens[i] - lengths[i]
        for k in range(lengths[i] if windows[i] > 0 else 0):
            token = token_ids[i, first + k]
            contexts[i, k] = token if first + k >= starts[i] else END - 1 - token
    return contexts, lengths


_ROWS = (int64[:, ::1], int32[::1], int32[:, :], int32[::1], int32[::1], int64[::1], int32[::1])
_DRAFTS = (int32[:, ::1], uint16[:, ::1])


@njit(int32[::1](*_ROWS, float64[::1], *_DRAFTS), cache=True)
def draft_batch(
    table, slots, token_ids, num_tokens, windows, keys, starts, worth, drafts, evidence
):
    """Draft for every row; return int32 [rows], the number of tokens drafted for each.

    `table`: `IndexTable.rows`.
    `slots`: int32 [rows], `NO_INDEX` where a row has no index.
    `token_ids`: int32 [rows, any], prompt and response so far.
    `num_tokens`: int32 [rows], how many of `token_ids` are valid.
    `windows`: int32 [rows], most tokens to draft; 0 drafts nothing.
    `keys`: int64 [rows], sample key of each row, to draft what its noise will draw, or `NO_KEY`.
    `starts`: int32 [rows], where the turn begins that a row is in. 0: it is the first one.
    `worth`: float64 [NUM_EVIDENCE], probability by class that a token is accepted when those before
        it were. If empty, the longest match alone drafts.
    `drafts`: int32 [rows, largest window], filled from the left.
    `evidence`: uint16 [rows, largest window], class of each draft token, below `NUM_EVIDENCE`.
        `engines.histospec.acceptance` learns how often each class is accepted.
    """
    num_drafts = np.zeros(len(slots), np.int32)
    few = few_matches()
    choice = worth, np.zeros((2, drafts.shape[1]), np.int32)
    contexts, lengths = _contexts(table, token_ids, num_tokens, windows, starts)
    firsts = first_tokens_of(table, slots.reshape(-1, 1), contexts, lengths, windows)
    for i in range(len(slots)):
        if windows[i] > 0 and firsts[i, 0, 1]:
            text = (contexts[i], lengths[i], firsts[i, 0])
            rest = (num_tokens[i], windows[i], keys[i], drafts[i], evidence[i])
            num_drafts[i] = _draft_row(table[slots[i]], *text, few, *choice, *rest)
    return num_drafts


@njit(int32[::1](*_ROWS, *_DRAFTS), cache=True)
def draft_batch_of_any(
    table, slots, token_ids, num_tokens, windows, keys, starts, drafts, evidence
):
    """Draft for every row from whichever of these indexes has the longest match, or the most of
    equally long ones. Only that match drafts. `slots`: int32 [indexes]. The other arguments are
    those of `draft_batch`."""
    num_drafts = np.zeros(len(windows), np.int32)
    few = few_matches()
    alone = np.zeros(0), np.zeros((2, 0), np.int32)
    contexts, lengths = _contexts(table, token_ids, num_tokens, windows, starts)
    firsts = first_tokens_of(table, slots.reshape(1, -1), contexts, lengths, windows)
    for i in range(len(windows)):
        if windows[i] > 0 and firsts[i, :, 1].any():
            text = (contexts[i], lengths[i], firsts[i])
            rest = (num_tokens[i], windows[i], keys[i], drafts[i], evidence[i])
            num_drafts[i] = _draft_row_of_any(table, slots, *text, few, *alone, *rest)
    return num_drafts


def without_noise(num_rows: int) -> np.ndarray:
    """Return sample keys for rows whose noise is unknown; int64 [rows]."""
    return np.full(num_rows, NO_KEY, np.int64)


def without_turns(num_rows: int) -> np.ndarray:
    """Return `starts` of rows that are in their first turn; int32 [rows]."""
    return np.zeros(num_rows, np.int32)
