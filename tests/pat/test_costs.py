"""Costs of a switch agree with PAT's equations 1 to 4 by hand, and with its figure 12."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.pat.costs import SwitchCosts, rms_tokens
from refrain.schemas.counts import SwitchCounts
from tests.latency.paper_latencies import PRINTED
from tests.pat.stage import LLAMA, ON_A40, costs_on_a40, switch_s

PRINTED_S = {p.note.removeprefix("TP 2 to 8: "): p.seconds for p in PRINTED if p.tp_degree == 8}
NINE = [float(12 * 1024)] * 9
SPREAD = [NINE[:3], NINE[3:5], NINE[5:7], NINE[7:]]
"""The nine samples on the four engines of TP 2."""
contexts = st.lists(st.floats(1, 20_000), max_size=6)
sources_of = st.lists(contexts, min_size=4, max_size=4).filter(any)


def as_printed(**fields) -> SwitchCosts:
    return costs_on_a40(staged=False, **fields)


def test_equations_1_and_2():
    costs = as_printed(kv_bytes_per_token=100.0, link_bytes_per_s=50.0)
    # 6 tokens of 100 bytes, halved by TP 2, at 50 bytes per second.
    assert costs.move_s(2, 8, [[1.0], [2.0, 3.0]], [[1.0, 2.0, 3.0]]) == pytest.approx(6.0)


def test_through_host_memory_engines_write_at_once():
    costs = costs_on_a40(kv_bytes_per_token=100.0, link_bytes_per_s=50.0, ahead=False)
    # The fuller source engine saves 5 tokens, halved by TP 2. The fuller target loads 4, by TP 4.
    seconds = costs.move_s(2, 4, [[1.0], [2.0, 3.0]], [[3.0, 1.0], [2.0]])
    assert seconds == pytest.approx((250 + 100) / 50)


def test_precopied_tokens_are_not_waited_for():
    costs = costs_on_a40(kv_bytes_per_token=100.0, link_bytes_per_s=50.0)
    seconds = costs.move_s(2, 4, [[1.0], [2.0, 3.0]], [[3.0, 1.0], [2.0]])
    assert seconds == pytest.approx(100 / 50)
    since_s = costs.move_s(2, 4, [[1.0], [2.0, 3.0]], [[3.0, 1.0], [2.0]], since_tokens=0.5)
    assert since_s == pytest.approx((25 + 100) / 50), "newer tokens must be waited for"
    # Engines save in parallel: the fuller one has 5 tokens, halved by TP 2.
    assert costs.ahead_s(2, [[1.0], [2.0, 3.0]]) == pytest.approx(250 / 50)
    for otherwise in ({"ahead": False}, {"staged": False}):
        assert replace(costs, **otherwise).ahead_s(2, [[1.0], [2.0, 3.0]]) == 0.0


def test_measured_switch_times_replace_assumed_ones():
    told = costs_on_a40(wake_s=0.5, link_bytes_per_s=2e9)
    assert told.as_measured(SwitchCounts()) == told
    seen = SwitchCounts((0.1, 9.0, 0.2), (1e9,))
    measured = told.as_measured(seen)
    assert (measured.wake_s, measured.link_bytes_per_s) == (0.2, 1e9)
    assert replace(measured, wake_s=0.5, link_bytes_per_s=2e9) == told


def test_the_last_switches_are_kept():
    counts = sum((SwitchCounts((float(i),)) for i in range(20)), SwitchCounts((), (1e9,)))
    assert counts == SwitchCounts(tuple(map(float, range(12, 20))), (1e9,))


def test_a_rank_has_a_head_at_least():
    costs = costs_on_a40(kv_bytes_per_token=100.0, link_bytes_per_s=50.0, num_kv_heads=2)
    assert costs.move_s(2, 8, [[4.0]], [[4.0]]) == pytest.approx(200 / 50)
    both_s = replace(costs, ahead=False).move_s(2, 8, [[4.0]], [[4.0]])
    assert both_s == pytest.approx((200 + 200) / 50)


@given(st.lists(st.floats(1, 1e5), min_size=1, max_size=50))
def test_equation_3_keeps_the_squares(batch):
    assert len(batch) * rms_tokens(batch) ** 2 == pytest.approx(sum(x * x for x in batch))
    assert rms_tokens(batch) >= math.fsum(batch) / len(batch) * (1 - 1e-9)


def test_equation_4_and_the_slowest_target():
    costs = costs_on_a40()
    long, short = [3000.0, 4000.0], [100.0]
    assert costs.recompute_s(4, [short, long, []]) == pytest.approx(
        ON_A40.prefill_s(4, 2, math.sqrt((3000**2 + 4000**2) / 2))
    )


@given(sources_of)
def test_more_context_costs_more(sources):
    costs = costs_on_a40()
    longer = [[c + 10 for c in of] for of in sources]
    before, after = ((of, [[c for b in of for c in b]]) for of in (sources, longer))
    assert costs.move_s(2, 8, *after) > costs.move_s(2, 8, *before)
    assert costs.recompute_s(8, after[1]) > costs.recompute_s(8, before[1])


def test_requests_take_along_what_is_cheaper_to_move():
    """Save by TP 2 and load by TP 4: 100 bytes a token, halved and quartered, at 50 bytes per
    second take 1.5 s a token. A prefill takes 100 s, and 0.5 s for each token beyond 100."""
    costs = costs_on_a40(Prefill(), kv_bytes_per_token=100.0, link_bytes_per_s=50.0)
    assert costs.moves_kv(2, 4, 66.0)
    assert not costs.moves_kv(2, 4, 67.0)
    assert replace(costs, link_bytes_per_s=51.0).moves_kv(2, 4, 67.0)
    assert replace(costs, kv="move").moves_kv(2, 4, 67.0)
    assert not replace(costs, kv="recompute").moves_kv(2, 4, 1.0)


class Prefill:
    def prefill_s(self, tp_degree, batch, rms_tokens):
        assert (tp_degree, batch) == (4, 1)
        return 100.0 + 0.5 * max(0.0, rms_tokens - 100.0)


def test_figure_12_recomputation():
    """The model predicts 14.2 s, a quarter less than the printed 19.01 s."""
    seconds = as_printed().recompute_s(8, [NINE])
    printed = PRINTED_S["full KV recomputation, naive restart"]
    assert 0.7 * printed < seconds < printed


@pytest.mark.parametrize(
    ("bytes_per_token", "gb_per_s"),
    [(LLAMA.kv_bytes_per_token, 3.07), (2 * LLAMA.num_layers * LLAMA.hidden_size * 2, 12.28)],
    ids=["KV heads", "hidden size, as printed"],
)
def test_figure_12_migration(bytes_per_token, gb_per_s):
    """The printed 2.36 s imply this bandwidth of one rank: 0.1 or 0.4 of PCIe 4.0 x16, which has
    31.5 GB/s."""
    costs = as_printed(kv_bytes_per_token=bytes_per_token, link_bytes_per_s=gb_per_s * 1e9)
    moved_s = costs.move_s(2, 8, SPREAD, [NINE])
    assert moved_s == pytest.approx(PRINTED_S["KV migration"], rel=0.01)
    assert moved_s < costs.recompute_s(8, [NINE])


def test_figure_12_in_all():
    parts = ["KV migration", "weight resharding", "CUDA graphs of small batches"]
    rest_s = PRINTED_S["everything"] - sum(PRINTED_S[part] for part in parts)
    costs = as_printed(wake_s=rest_s + PRINTED_S[parts[2]], weights_s=PRINTED_S[parts[1]])
    assert switch_s(costs, 2, 8, SPREAD, [NINE]) == pytest.approx(5.52, rel=0.01)
    # Standby engines keep weights and graphs. Engines save in parallel, at most 3 of 9 samples.
    assert switch_s(costs_on_a40(wake_s=rest_s), 2, 8, SPREAD, [NINE]) < 3.0
