"""All simulations of a paper beyond its baseline."""

from collections.abc import Iterator

from rich.console import Console

from refrain.benchmarks.papers.present.ablation import show_ablation
from refrain.benchmarks.papers.present.speculation import show_speculation
from refrain.benchmarks.papers.present.switching import show_switching
from refrain.benchmarks.papers.rhymerl import simulate_ablation
from refrain.benchmarks.papers.settings import Setting
from refrain.benchmarks.papers.specactor import simulate_speculation
from refrain.benchmarks.papers.switching import compare_points
from refrain.engines.reports.simulation import Ablation


def study(setting: Setting, seed: int, console: Console) -> Iterator[Ablation]:
    """Simulate and print what the setting has."""
    if setting.overlap:
        with console.status("overlapping steps") as status:
            rows = simulate_ablation(setting, setting.overlap, seed, status.update)
        yield show_ablation(rows, console)
    if step := setting.speculation_step:
        with console.status("speculation") as status:
            found = simulate_speculation(setting, step, seed, status.update)
        yield show_speculation(found, console)
    if points := setting.switching:
        with console.status("switching") as status:
            compared = compare_points(points, setting.switching_steps, seed, status.update)
        yield show_switching(compared, console)
