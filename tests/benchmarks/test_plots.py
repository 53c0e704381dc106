"""The pictures of docs/ that show baselines are those that the baselines make now."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from refrain.benchmarks import plots
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
TOLERANCE = 1e-4
"""Mean difference of two pictures, of 1. A fifth of what a changed bar makes."""


def difference(one: Path, other: Path) -> float:
    first, second = imread(one)[..., :3], imread(other)[..., :3]
    return float(np.abs(first - second).mean()) if first.shape == second.shape else 1.0


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_picture_is_as_new_as_its_baseline(name: str, tmp_path: Path) -> None:
    plots.PLOTS[name](tmp_path / name)
    assert difference(tmp_path / name, DOCS / name) < TOLERANCE, "run make plots"


def test_a_picture_of_another_baseline_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = plots.baseline("pipeline_queue")
    other = real.model_copy(update={"figures": real.figures | {"queue_speedup": 1.6}})
    kept = plots.baseline
    monkeypatch.setattr(
        plots, "baseline", lambda name: other if name == "pipeline_queue" else kept(name)
    )
    plots.draw_pipelines(tmp_path / "now.png")
    assert difference(tmp_path / "now.png", DOCS / "results_pipelines.png") > 5 * TOLERANCE
