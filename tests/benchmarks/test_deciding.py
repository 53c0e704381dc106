"""`refrain bench deciding` at reduced size: it times each round of a run's controller."""

from argparse import Namespace

from rich.console import Console

from refrain.benchmarks import deciding
from refrain.engines.control.controller import Controller


def test_every_pool_is_looked_at_in_a_round(monkeypatch):
    monkeypatch.setattr(deciding, "SIZES", ((16, 40), (32, 8)))
    looked_at, decide = [], Controller.decide

    def decides(self, view):
        moves = decide(self, view)
        looked_at.append((len(view.engines), dict(self._ends_s)))
        return moves

    monkeypatch.setattr(Controller, "decide", decides)
    figures, rows = deciding.measure(Namespace(rounds=1), Console(quiet=True))
    assert {row["round"] for row in rows} == {1}, "the first round is not left out"
    for num_engines, num_decisions in ((16, 4), (32, 2)):
        own = [row for row in rows if row["num_engines"] == num_engines]
        assert len(own) == num_decisions
        assert figures[f"decision_cpu_ms_{num_engines}"] > 0
        assert figures[f"moves_{num_engines}"] == sum(row["moves"] for row in own)
        last = [looked for engines, looked in looked_at if engines == num_engines][-1]
        assert set(last) == set(range(num_engines // 4))
