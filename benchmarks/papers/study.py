"""Everything that is studied of a paper beyond its baseline, shown as it is found."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from benchmarks.papers.joint import simulate_joint
from benchmarks.papers.present.ablation import show_ablation
from benchmarks.papers.present.grid import show_grid
from benchmarks.papers.present.joint import show_joint
from benchmarks.papers.present.speculation import show_speculation
from benchmarks.papers.present.switching import show_switching
from benchmarks.papers.rhymerl import simulate_ablation
from benchmarks.papers.settings import Setting
from benchmarks.papers.specactor import simulate_speculation
from benchmarks.papers.specactor_grid import simulate_grid
from benchmarks.papers.speculation_case import Case
from benchmarks.papers.switching_study import study_switching
from engines.reports.simulation import Ablation


def study(setting: Setting, seed: int, out: Path, console: Console) -> Iterator[Ablation]:
    """The paper's parts, where it has them, and all techniques together, printed and drawn."""
    if setting.overlap:
        with _status("overlapping steps", console) as show:
            rows = simulate_ablation(setting, setting.overlap, seed, show)
        yield show_ablation(rows, console)
    if speculation := setting.speculation:
        with _status("speculation", console) as show:
            found = simulate_speculation(speculation, setting.layout, seed, show)
        yield show_speculation(found, out, console)
        with _status("assumptions", console) as show:
            case = Case.draw(speculation.specs[0], setting.layout, speculation.step, seed)
            points = simulate_grid(case, speculation.grid, show)
        yield show_grid(points, console)
    if setting.switching:
        with _status("switching", console) as show:
            studied = study_switching(setting.switching, seed, show)
        yield show_switching(studied, out, console)
    with _status("all techniques", console) as show:
        rows = list(simulate_joint(setting, seed, show))
    if rows:
        yield show_joint(rows, console)


@contextmanager
def _status(what: str, console: Console) -> Generator[Callable[[str], None]]:
    """Shows a person what is simulated now."""
    with console.status(what) if console.is_terminal else nullcontext() as status:
        yield lambda name: status.update(f"{what}: {name}") if status else None
