"""Replay of known responses whose samples draft for each other. Pure."""

from collections.abc import Sequence

import numpy as np

from refrain.engines.histospec.replay import Replay, Tokens, count_accepted, known_sequences
from refrain.engines.histospec.siblings import NO_SLOT, SiblingIndex
from refrain.engines.histospec.window import WindowPolicy


def replay_siblings(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    groups: Sequence[str],
    policy: WindowPolicy,
    max_num_seqs: int,
    index: SiblingIndex,
) -> Replay:
    """Return the counts of drafts that siblings would have made for each other.

    The responses are known and not empty. They run in lockstep as in `engines.histospec.replay`, at
    most `max_num_seqs` at a time. When one ends, the next in order begins. `groups` names the group
    of each response. Afterwards the index still holds the responses.
    """
    token_ids, at, ends = known_sequences(prompts, responses, policy.cap)
    windows = policy.first(len(ends))
    counts = np.zeros((4, len(ends)), np.int64)
    slots = np.full(len(ends), NO_SLOT, np.int32)
    while len(live := np.flatnonzero(at < ends)[:max_num_seqs]):
        for i in live[slots[live] == NO_SLOT]:
            slots[i] = index.add(groups[i], int(at[i]))
        # Pass all rows, to copy no tokens. Rows that do not run have no slot.
        index.extend(slots, token_ids, at)
        drafts = np.zeros((len(ends), policy.cap), np.int32)
        wanted = np.minimum(windows, ends - at - 1)
        drafted = index.draft(slots, token_ids, at, wanted, drafts)
        accepted = count_accepted(drafts, drafted, token_ids, at)[live]
        drafted = drafted[live]
        counts[:, live] += [np.ones_like(drafted), drafted > 0, drafted, accepted]
        windows[live] = policy.next(windows[live], drafted, accepted)
        at[live] += accepted + 1
        for i in live[at[live] >= ends[live]]:
            index.remove(int(slots[i]))
            slots[i] = NO_SLOT
    return Replay(*counts)
