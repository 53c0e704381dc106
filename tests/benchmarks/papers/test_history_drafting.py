"""Made-up tokens resemble those of the epoch before, and a run's drafter replays them."""

import numpy as np
import pytest

from refrain.benchmarks.papers import history_drafting
from refrain.benchmarks.papers.generate import generate, rhymerl
from refrain.benchmarks.papers.settings import RHYMERL_14B_TP2, LinearLatency
from refrain.benchmarks.papers.similar_tokens import Resemblance, similar_groups
from refrain.engines.histospec.gate import ProfiledStepTimes
from refrain.engines.histospec.library import PromptHistory
from refrain.engines.simulate.history import DRAFTINGS

SPEC = rhymerl().model_copy(update={"num_prompts": 64, "prompts_per_step": 16, "group_size": 8})
LENGTHS = [(tuple(range(650, 970, 20)), tuple(range(770, 1138, 23)))] * 4
"""Lengths of an earlier and a later epoch: spread, and longer by a fifth in the later one."""
GROUPS = similar_groups(Resemblance(), LENGTHS, 0)


PREFIX = 3
"""Tokens that the paper's routine looks up (5.1)."""


def accepted_share(groups):
    """Return the share of the later tokens that the paper's routine (5.1) finds in the earlier
    ones. It takes the longest continuation wherever the last three tokens occurred."""
    accepted = total = 0
    for earlier, later in groups:
        known = np.concatenate([np.append(response, -1) for response in earlier.responses])
        places = {}
        for end in range(PREFIX, len(known)):
            places.setdefault(tuple(known[end - PREFIX : end].tolist()), []).append(end)
        for response in later.responses:
            accepted += _num_accepted(known, places, np.asarray(response))
            total += len(response)
    return accepted / total


def _num_accepted(known, places, response):
    at, accepted = PREFIX, 0
    while at < len(response):
        ends = places.get(tuple(response[at - PREFIX : at].tolist()), ())
        run = max((_common(known[end:], response[at:]) for end in ends), default=0)
        accepted += run
        at += max(1, run)
    return accepted


def _common(one, other):
    """Return the length of the common beginning."""
    num = 16
    while True:
        size = min(num, len(one), len(other))
        differ = np.flatnonzero(one[:size] != other[:size])
        if len(differ):
            return int(differ[0])
        if size < num:
            return size
        num *= 4


def accepted(groups, policy):
    passes = history_drafting.mean_passes(
        history_drafting.replay_groups(groups, DRAFTINGS[policy], None)
    )
    return (passes.num_tokens - passes.num_passes) / passes.num_draft_tokens


def history(*responses):
    return PromptHistory("a", 1, [0], [np.array(own) for own in responses], [1.0] * len(responses))


def test_routine_finds_matching_continuations():
    """4 5 follows 1 2 3 as before. Then 9 is new, and after 1 2 3 the 4 is found again."""
    earlier, later = history([1, 2, 3, 4, 5, 6]), history([1, 2, 3, 4, 5, 9, 1, 2, 3, 4])
    assert accepted_share([(earlier, later)]) == pytest.approx(3 / 10)
    assert accepted_share([(later, later)]) == pytest.approx(7 / 10)


def test_tokens_are_as_much_alike_as_printed():
    """The paper prints 93 % by this routine (5.1), and accepts 65 to 79 % of drafts (7.2.2)."""
    few = [(own, later._replace(responses=later.responses[::4])) for own, later in GROUPS]
    assert accepted_share(few) == pytest.approx(0.93, abs=0.02)
    assert 0.65 < accepted(GROUPS, history_drafting.PAPER) < 0.79


def test_without_forks_only_growth_differs():
    same = similar_groups(Resemblance(fork_share=0.0, new_share=0.0), LENGTHS[:1], 0)
    assert accepted_share(same) > 0.9
    assert accepted_share([(earlier, earlier) for earlier, _ in same]) > 0.99


def test_responses_have_their_lengths_and_are_the_same_again():
    assert [[len(r) for r in later.responses] for _, later in GROUPS] == [list(LENGTHS[0][1])] * 4
    again = similar_groups(Resemblance(), LENGTHS, 0)
    other = similar_groups(Resemblance(), LENGTHS, 1)
    first = GROUPS[0][1].responses[0]
    assert (first == again[0][1].responses[0]).all()
    assert (first != other[0][1].responses[0]).any()


TRACE = generate(SPEC, 0, range(1, 10))


def test_lengths_are_those_of_some_prompts_in_both_epochs():
    found = history_drafting.sampled_lengths(TRACE, 9)
    assert len(found) == 16
    for earlier, later in found:
        assert len(earlier) == len(later) == 8
    assert history_drafting.sampled_lengths(TRACE, 4) == ()


def test_the_larger_the_batch_the_less_is_verified():
    levels = history_drafting.drafted_levels(TRACE, 9, RHYMERL_14B_TP2, 2, 0)
    drafted = [level.num_draft_tokens / level.num_passes for level in levels]
    tokens = [level.num_tokens / level.num_passes for level in levels]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 1.5 * drafted[-1]
    assert tokens[0] > tokens[-1] > 1.0


class TwiceAsDear(LinearLatency):
    """To verify a draft token takes twice as long as to sample a token."""

    def verify_s(self, tp_degree, batch, context_tokens, window):
        return super().verify_s(tp_degree, batch, context_tokens, 2 * window)


def test_drafts_that_never_pay_are_not_made():
    dear = TwiceAsDear(0.01, sequence_s=1.0, prefill_step_s=0.01, verifies=True, lookup_s=0.0)
    assert history_drafting.drafted_levels(TRACE, 9, dear, 2, 0) == ()


def test_a_batch_stands_for_another_of_its_kind():
    times = ProfiledStepTimes(RHYMERL_14B_TP2, 2)
    as_if = history_drafting._AsIf(times, 64)
    args = (np.array([0, 4]), np.array([0, 8]))
    own = times.step_s(64, 64 * 1000.0, 16 * args[0], 16 * args[1])
    assert as_if.step_s(4, 4 * 1000.0, *args) == pytest.approx(own)
