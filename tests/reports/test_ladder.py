"""The draft ladder of a profile, as rungs, as a table and as a picture."""

from dataclasses import dataclass
from functools import partial
from io import StringIO

import pytest
from rich.console import Console

from refrain.engines.latency.drafting_pace import pace
from refrain.engines.latency.forecast import step_s
from refrain.engines.reports.profile import (
    ACCEPTANCES,
    draw_ladder,
    ladder_rungs,
    ladder_table,
    profiled_ladder,
)
from refrain.schemas.latency import PointKind, Profile
from refrain.schemas.rollout import DraftSetting
from tests.latency.machines import AffineMachine, measure


@dataclass
class Machine(AffineMachine):
    """A machine whose small model drafts a token in `share` of a decoding step. Lookups are nearly
    free."""

    share: float = 0.2

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        decode_s = self.decode_s(1, batch, 1024.0 * batch)
        return window * {"small": self.share * decode_s, "ngram": 1e-6}[drafter]


def profile_with(machine: Machine, *drafters: str, max_batch: int = 256) -> Profile:
    profile = measure(machine, tp_degrees=(1, 2), drafters=drafters)
    points = tuple(point for point in profile.points if point.batch <= max_batch)
    return profile.model_copy(update={"points": points})


def test_a_rung_is_the_best_speed_up_of_its_drafter():
    machine = Machine()
    rungs = ladder_rungs(profile_with(machine, "small", "ngram"))
    assert len({rung[:3] for rung in rungs}) == len(rungs) == 4 * 3 * len(ACCEPTANCES)
    for rung in rungs:
        b, p, w = rung.batch, rung.acceptance, rung.window
        drafter = "ngram" if rung.drafter == "histospec" else rung.drafter
        plain_s = machine.decode_s(1, b, 1024.0 * b)
        verify_s = partial(step_s, machine, 1, b, 1024.0 * b)
        if rung.drafter == "small" and w:
            setting = DraftSetting("small", w, coupled=False)
            ahead = pace((setting, p), b, machine.draft_s("small", b, 1), verify_s)
            assert rung.speedup == pytest.approx(ahead.tokens_per_s * plain_s, rel=2e-2)
        else:
            tokens = sum(p**k for k in range(w + 1))
            spent_s = verify_s(w) + machine.draft_s(drafter, b, w)
            assert rung.speedup == pytest.approx(tokens * plain_s / spent_s, rel=1e-2)
        assert rung.speedup >= 1.0
        assert (rung.speedup > 1.0) == (w > 0)


def test_the_history_stands_where_ngram_does():
    ladder = profiled_ladder(profile_with(Machine(), "small", "ngram"))
    assert ladder is not None
    assert ladder.drafters == ("histospec", "ngram", "small")
    assert ladder.best("histospec", 0.7, 16) == ladder.best("ngram", 0.7, 16)
    without = profiled_ladder(profile_with(Machine(), "small"))
    assert without is not None
    assert without.drafters == ("small",)


@pytest.mark.parametrize(
    ("max_batch", "shown"), [(256, [1, 16, 64, 256]), (128, [1, 16, 64, 128]), (8, [1, 8])]
)
def test_batches_are_those_of_the_profile(max_batch, shown):
    rungs = ladder_rungs(profile_with(Machine(), "ngram", max_batch=max_batch))
    assert sorted({rung.batch for rung in rungs}) == shown


def test_table_marks_drafters_that_do_not_pay():
    console = Console(width=80, file=StringIO(), record=True)
    console.print(ladder_table(ladder_rungs(profile_with(Machine(share=1.0), "small", "ngram"))))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + 4 * 3
    assert lines[0].split() == ["gain", "(window)", "drafter", "20%", "40%", "60%", "80%"]
    (small,) = [line for line in lines if line.strip().startswith("batch 16 ") and "small" in line]
    assert small.count("no gain") == len(ACCEPTANCES)
    (ngram,) = [line for line in lines if line.strip().startswith("batch 16 ") and "ngram" in line]
    assert "no gain" not in ngram


def test_a_profile_without_drafting_has_no_ladder():
    profile = profile_with(Machine())
    assert profiled_ladder(profile) is None
    assert ladder_rungs(profile) == []
    verified = profile_with(Machine(), "ngram")
    without = tuple(p for p in verified.points if p.kind is not PointKind.VERIFY)
    assert ladder_rungs(verified.model_copy(update={"points": without})) == []


def test_a_picture_of_one_batch_and_of_four(tmp_path):
    for max_batch in (256, 2):
        path = tmp_path / f"{max_batch}.png"
        draw_ladder(profile_with(Machine(), "small", "ngram", max_batch=max_batch), path)
    sizes = {path.stat().st_size for path in tmp_path.iterdir()}
    assert len(sizes) == 2
    assert min(sizes) > 5000
