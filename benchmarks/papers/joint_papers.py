"""All techniques together in the settings of each paper."""

from collections.abc import Iterator

from benchmarks.papers.joint import JointRow
from benchmarks.papers.joint_pipeline import rhymerl_rows
from benchmarks.papers.joint_scenes import Progress, pat_rows, specactor_rows
from benchmarks.papers.settings import Setting

NUM_PAT_STEPS = 3


def simulate_joint(setting: Setting, seed: int, progress: Progress) -> Iterator[JointRow]:
    """The first rows are of the setting that the paper's figures are of."""
    if plan := setting.switching:
        points = tuple(dict.fromkeys((plan.best, *plan.parts)))
        yield from pat_rows(points, plan.steps[:NUM_PAT_STEPS], seed, progress)
    if (overlap := setting.overlap) and overlap.joint_steps:
        yield from rhymerl_rows(setting, overlap, seed, progress)
    if (speculation := setting.speculation) and speculation.joint:
        spec, step = speculation.specs[0], speculation.step
        yield from specactor_rows(spec, setting.layout, step, seed, progress)
