"""All techniques of a run together, beside each of them by itself, in the papers' settings.

config of a scene ─┬─ nothing
                   ├─ each technique that it switches on, without the others; from the static TP
                   │  degree that is the best with it, if it is not one that changes them
                   ├─ joint: all of them
                   ├─ the same where switches take no time, in PAT's settings
                   └─ the same from the best layout, as hindsight says; both with lengths known or
                      not, whichever is faster
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.papers.joint_pipeline import PipelineScene, pipeline_scene
from benchmarks.papers.joint_scenes import pat_scene, specactor_scene
from benchmarks.papers.pat import TP_DEGREES, machine
from benchmarks.papers.real_run import ALL, NOTHING, RESHAPE
from benchmarks.papers.scene import Scene
from benchmarks.papers.settings import Setting
from benchmarks.papers.specactor import RANKED
from engines.simulate.cluster import PLACEMENTS

NUM_PAT_STEPS = 3
FREE, HINDSIGHT = "joint, switches free", "joint, best beginning in hindsight"
OTHERS = (NOTHING, ALL, FREE, HINDSIGHT)
"""Rows that are no technique by itself."""
Progress = Callable[[str], None]
Scenes = Sequence[Scene] | Sequence[PipelineScene]


@dataclass(frozen=True, slots=True)
class JointRow:
    """A setting with one technique, with all, or with none."""

    joint_setting: str
    technique: str
    seconds: float
    speedup: float
    """Over nothing."""
    over_best_single: float | None
    """Speed-up of all together over the fastest technique; without switches' costs, too."""
    of_best_static: bool = False
    """Whether a technique that changes no layout has the static one that is the best with it."""


def simulate_joint(setting: Setting, seed: int, progress: Progress) -> Iterator[JointRow]:
    """The first rows are of the setting that the paper's figures are of."""
    for name, scenes, static in _scenes(setting, seed):
        yield from weigh(name, scenes, progress, static)


def weigh(
    name: str, scenes: Scenes, progress: Progress, static: Sequence[Scenes] = ()
) -> list[JointRow]:
    """`scenes`: of the same techniques; seconds are their mean. `static`: the same in each of
    several layouts: of a technique that changes none the best of these counts."""
    seconds = {}
    for technique in (NOTHING, *scenes[0].techniques, ALL):
        progress(f"{name}, {technique}")
        layouts = static if static and technique not in (RESHAPE, ALL) else [scenes]
        seconds[technique] = min(
            fmean(scene.seconds(technique) for scene in layout) for layout in layouts
        )
    if static:
        progress(f"{name}, {FREE}")
        own = [scene for scene in scenes if isinstance(scene, Scene)]
        free = [scene.free_switches() for scene in own]
        known = [replace(scene, exact=True) for scene in free]
        seconds[FREE] = min(fmean(s.seconds(ALL) for s in of) for of in (free, known))
        seconds[HINDSIGHT] = fmean(scene.best_opening_s() for scene in own)
    return rows_of(name, seconds, bool(static))


def rows_of(
    setting: str, seconds: Mapping[str, float], of_best_static: bool = False
) -> list[JointRow]:
    """`seconds`: by technique, of the same work."""
    best_s = min(own_s for name, own_s in seconds.items() if name not in OTHERS)
    return [
        JointRow(
            setting,
            name,
            own_s,
            seconds[NOTHING] / own_s,
            best_s / own_s if name in OTHERS[1:] else None,
            of_best_static,
        )
        for name, own_s in seconds.items()
    ]


def _scenes(setting: Setting, seed: int) -> Iterator[tuple[str, Scenes, Sequence[Scenes]]]:
    if plan := setting.switching:
        steps = plan.steps[:NUM_PAT_STEPS]
        for point in dict.fromkeys((plan.best, *plan.parts)):
            static = [
                [pat_scene(point, step, seed, tp, ()) for step in steps]
                for tp in TP_DEGREES
                if machine(point).fits(tp)
            ]
            yield point.name, [pat_scene(point, step, seed) for step in steps], static
    if (overlap := setting.overlap) and overlap.joint_steps:
        for prompts in overlap.prompts_per_step:
            spec = setting.spec.model_copy(update={"prompts_per_step": prompts})
            scene = pipeline_scene(replace(setting, spec=spec), overlap, seed)
            yield f"{setting.name}, a quarter of {prompts} prompts", [scene], ()
    if (speculation := setting.speculation) and speculation.joint:
        spec = speculation.specs[0]
        about = (spec, setting.layout, speculation.step, seed)
        yield spec.name, [specactor_scene(*about)], ()
        yield f"{spec.name}, {RANKED}", [specactor_scene(*about, PLACEMENTS[RANKED])], ()
