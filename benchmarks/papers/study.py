"""Everything that is studied of a paper beyond its baseline, shown as it is found."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from benchmarks.papers.joint_papers import simulate_joint
from benchmarks.papers.present.ablation import ablation_figures, ablation_rows, print_ablation
from benchmarks.papers.present.joint import joint_figures, joint_rows, print_joint
from benchmarks.papers.present.speculation import (
    draw_speculation,
    print_speculation,
    speculation_figures,
    speculation_rows,
)
from benchmarks.papers.present.switching import (
    draw_switching,
    print_switching,
    switching_figures,
    switching_rows,
)
from benchmarks.papers.rhymerl import simulate_ablation
from benchmarks.papers.settings import Setting
from benchmarks.papers.specactor import simulate_speculation
from benchmarks.papers.switching_study import study_switching
from engines.reports.simulation import Ablation


def ablate(setting: Setting, seed: int, out: Path, console: Console) -> Iterator[Ablation]:
    """The paper's parts, printed and drawn, where it has them."""
    if setting.overlap:
        with _status("overlapping steps", console) as show:
            rows = simulate_ablation(setting, setting.overlap, seed, show)
        print_ablation(rows, console)
        yield Ablation(ablation_figures(rows), ablation_rows(rows))
    if setting.speculation:
        with _status("speculation", console) as show:
            found = simulate_speculation(setting.speculation, setting.layout, seed, show)
        print_speculation(found, console)
        draw_speculation(found, out / "drafting.png")
        yield Ablation(speculation_figures(found), speculation_rows(found))
    if setting.switching:
        with _status("switching", console) as show:
            study = study_switching(setting.switching, seed, show)
        print_switching(study, console)
        draw_switching(study, out / "switching.png")
        yield Ablation(switching_figures(study), switching_rows(study))


def weigh_all(setting: Setting, seed: int, out: Path, console: Console) -> Iterator[Ablation]:
    """All techniques together, beside each by itself."""
    del out  # It draws nothing.
    with _status("all techniques", console) as show:
        rows = list(simulate_joint(setting, seed, show))
    if rows:
        print_joint(rows, console)
        yield Ablation(joint_figures(rows), joint_rows(rows))


@contextmanager
def _status(what: str, console: Console) -> Generator[Callable[[str], None]]:
    """Shows a person what is simulated now."""
    with console.status(what) if console.is_terminal else nullcontext() as status:
        yield lambda name: status.update(f"{what}: {name}") if status else None
