"""Plots of the documentation, drawn from benchmarks/baselines: make plots.

Each picture has one function. It draws what its baselines say, so a test can tell that a picture in
docs/ is older than its baseline.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from refrain.benchmarks import demo, real_learning
from refrain.schemas.bench import BenchReport

BASELINES = Path(__file__).parent / "baselines"
GREY = "#a9b0b8"


@cache
def baseline(name: str) -> BenchReport:
    values = json.loads((BASELINES / f"{name}.json").read_text())
    return BenchReport.model_validate(values)


def draw_demo(path: Path) -> None:
    demo.plot(baseline("demo").rows, path)


def draw_real(path: Path) -> None:
    report = baseline("real")
    temperatures = list(dict.fromkeys(row["temperature"] for row in report.rows))
    num_epochs = max(row["epoch"] for row in report.rows)
    title = "SmolLM2-135M-Instruct, 2 CPU cores"
    draw_over_entropy(report.figures, temperatures, num_epochs, title, path)


def ending(temperature: float) -> str:
    """Return the suffix of a figure's name: t04 for 0.4."""
    return f"t{round(10 * temperature):02d}"


def draw_over_entropy(
    measured: dict[str, float],
    temperatures: Sequence[float],
    num_epochs: int,
    title: str,
    path: Path,
) -> None:
    """Plot the speed-up over entropy, one line per epoch."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for epoch in range(1, num_epochs + 1):
        ends = [f"{ending(temperature)}_epoch_{epoch}" for temperature in temperatures]
        nats = [measured[f"nats_{end}"] for end in ends]
        for other, style in (("off", "o-"), ("stock", "x--")):
            speed = [measured[f"on_over_{other}_{end}"] for end in ends]
            label = f"epoch {epoch}, over {'stock vLLM' if other == 'stock' else 'drafting off'}"
            axes.plot(nats, speed, style, color=f"C{epoch - 1}", label=label)
    cheap = [measured[f"if_cheap_{end}"] for end in ends]
    label = f"epoch {num_epochs}, if verifying is cheap (replayed)"
    axes.plot(nats, cheap, "s:", color="#666666", label=label)
    axes.axhline(1.0, color="#a9b0b8", linewidth=1)
    axes.set(xlabel="entropy, nats a token", ylabel="tokens/s with drafting, ratio", title=title)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_real_learning(path: Path) -> None:
    real_learning.draw(baseline("real_learning").rows, path)


def draw_speedups(path: Path) -> None:
    """Plot tokens/s over stock vLLM by epoch, for both shipped tasks."""
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    tasks = (("demo", "rollout"), ("second task", "rollout_long_tail"))
    for axes, (title, name) in zip(panels, tasks, strict=True):
        report = baseline(name)
        epochs = sorted({row["epoch"] for row in report.rows})
        for engine, label in (("on", "drafts from history"), ("off", "without drafts")):
            speed = [report.figures[f"speedup_{engine}_epoch_{epoch}"] for epoch in epochs]
            axes.plot(epochs, speed, "o-", label=label)
        axes.axhline(1.0, color=GREY, linewidth=1, label="stock vLLM")
        axes.set(xlabel="epoch", title=title, xticks=epochs)
    panels[0].set(ylabel="tokens/s over stock vLLM", ylim=(0, None))
    panels[0].legend(frameon=False, loc="lower right")
    save(figure, path)


def draw_algorithms(path: Path) -> None:
    """Plot the rise of held-out reward of each algorithm, a point for each seed that all have."""
    rows = [row for row in baseline("learning").rows if row["mode"] == "sync" and row["seed"] < 3]
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        rises = [row["rise"] for row in rows if row["algorithm"] == name]
        axes.barh(place, np.mean(rises), color="C0", alpha=0.35)
        axes.plot(rises, [place] * len(rises), "o", color="C0", markersize=4)
    axes.set(xlabel="rise of held-out reward in two epochs", yticks=range(len(names)))
    axes.set_yticklabels(names)
    axes.invert_yaxis()
    save(figure, path)


def draw_pipelines(path: Path) -> None:
    """Plot the samples/s of pipelined runs over those of synchronous ones."""
    bars = (
        ("demo, 2 engines", "pipeline", "histopipe_speedup_2_engines"),
        ("demo, 4 engines", "pipeline", "histopipe_speedup_4_engines"),
        ("queue, staleness 1, trainer's own core", "pipeline_queue", "queue_speedup"),
        ("queue, staleness 2, trainer's own core", "pipeline_queue", "queue_2_speedup"),
        ("second task, 2 engines", "pipeline_long_tail", "histopipe_speedup_2_engines"),
        *(
            (
                f"second task, {num} engines, trainer's own core",
                "pipeline_split_cores",
                f"histopipe_speedup_{num}_engines",
            )
            for num in (2, 4)
        ),
    )
    figure = Figure(figsize=(7.0, 2.8), layout="constrained")
    axes = figure.subplots()
    speed = [baseline(name).figures[key] for _, name, key in bars]
    drawn = axes.barh(range(len(bars)), speed, color="C0", alpha=0.6)
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.axvline(1.0, color=GREY, linewidth=1)
    axes.set(xlabel="samples/s over staleness=0", yticks=range(len(bars)), xlim=(0, 2))
    axes.set_yticklabels([label for label, _, _ in bars])
    axes.invert_yaxis()
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    axes: Sequence[Axes] = figure.axes
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


PLOTS: dict[str, Callable[[Path], None]] = {
    "demo.png": draw_demo,
    "real.png": draw_real,
    "real_learning.png": draw_real_learning,
    "results_algorithms.png": draw_algorithms,
    "results_pipelines.png": draw_pipelines,
    "results_speedups.png": draw_speedups,
}
"""Drawing function of each picture in docs/."""


def main(folder: str = "docs") -> None:
    for name, draw in PLOTS.items():
        draw(Path(folder) / name)
        print(Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
