"""Generated traces have the statistics that the papers print."""

import numpy as np
import pytest

from refrain.benchmarks.papers.generate import (
    K,
    cut_mean,
    fit_shares,
    generate,
    pat,
    rhymerl,
    specactor,
)


def test_pat_has_the_printed_shares_within_sampling_error():
    tokens = generate(pat(), seed=0, steps=range(1, 51)).column("response_tokens")
    for limit, share in ((8 * K, 0.1085), (16 * K, 0.0218)):
        error = (share * (1 - share) / len(tokens)) ** 0.5
        assert abs((tokens > limit).mean() - share) < 3 * error


def test_a_fit_meets_both_shares():
    mu, sigma = fit_shares((100.0, 0.3), (400.0, 0.05))
    tokens = np.exp(mu + sigma * np.random.default_rng(0).standard_normal(200_000))
    assert (tokens > 100).mean() == pytest.approx(0.3, abs=0.005)
    assert (tokens > 400).mean() == pytest.approx(0.05, abs=0.003)
    assert np.minimum(tokens, 300).mean() == pytest.approx(cut_mean(mu, sigma, 300), rel=0.01)


def test_rhymerl_grows_from_1k_to_10k():
    spec = rhymerl(32 * K)
    trace = generate(spec, seed=0, steps=(1, 2, 319, 320))
    means = [trace.step(step).column("response_tokens").mean() for step in trace.steps]
    assert np.mean(means[:2]) == pytest.approx(1 * K, rel=0.1)
    assert np.mean(means[2:]) == pytest.approx(10 * K, rel=0.1)


def test_another_maximum_cuts_the_same_responses():
    long, short = (generate(rhymerl(k * K), 0, [50]).column("response_tokens") for k in (32, 8))
    assert (np.minimum(long, 8 * K) == short).all()


def ranking_groups(trace, step, num_groups):
    history = trace.history(step)
    ranks = np.argsort(np.argsort([history[key] for key in sorted(history)]))
    return ranks * num_groups // len(ranks)


@pytest.mark.parametrize(("num_groups", "math_1", "math_2"), [(8, 85.7, 83.2), (16, 79.7, 76.9)])
def test_rhymerl_keeps_ranks_as_in_its_table(num_groups, math_1, math_2):
    spec = rhymerl()
    accurate, far = [], []
    for epoch in (2, 9, 16):
        first = epoch * spec.steps_per_epoch + 1
        steps = range(first, first + 2 * spec.steps_per_epoch)
        trace = generate(spec, 0, steps)
        before = ranking_groups(trace, first + spec.steps_per_epoch, num_groups)
        after = ranking_groups(trace, first + 2 * spec.steps_per_epoch, num_groups)
        accurate.append(100 * (after <= before).mean())
        far.append(100 * (after > before + num_groups // 8).mean())
    assert math_2 - 1 < np.mean(accurate) < math_1 + 1
    assert 2.0 < np.mean(far) < 5.0


def test_specactor_has_its_step():
    spec = specactor()
    trace = generate(spec, 0, [100])
    assert len(trace) == 16384
    assert trace.column("response_tokens").max() <= 20 * K


@pytest.mark.parametrize("make", [pat, rhymerl, specactor])
def test_same_seed_same_rows(make):
    spec = make()
    once, again = generate(spec, 3, [7, 9]), generate(spec, 3, [9])
    assert once.step(9).table.equals(again.table)
    assert not once.step(9).table.equals(generate(spec, 4, [9]).table)


def test_an_epoch_has_each_prompt_once():
    spec = rhymerl().model_copy(update={"num_prompts": 1024})
    trace = generate(spec, 0, range(1, 5))
    groups = trace.table.group_by(["epoch", "prompt_key"]).aggregate([("step", "count_distinct")])
    assert groups.num_rows == 2 * 1024
    assert set(groups["step_count_distinct"].to_pylist()) == {1}


def test_impossible_traces_are_refused():
    with pytest.raises(ValueError, match="pat has steps 1 to 100: ask for some of these"):
        generate(pat(), 0, [101])
    with pytest.raises(ValueError, match="has 3 prompts, fewer than the 16 of a step"):
        generate(pat().model_copy(update={"num_prompts": 3}), 0)
    with pytest.raises(ValueError, match="a mean of 1024 tokens is not below the cut at 500"):
        generate(specactor(500), 0, [1])
