"""Faults of a campaign: target, kind, moment and mode.

The seed decides, and the option with the fewest draws comes next. From number `NUM_FIRST` on,
faults first fill the pairs of target and kind that are still missing. A campaign of the default
size has all pairs.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from refrain.schemas.base import Frozen


class Target(StrEnum):
    """A process of a run, or a server of the run."""

    DRIVER = "driver"
    ENGINE = "engine"
    ENGINE_CORE = "engine core"
    TP_WORKER = "TP worker"
    DRAFTER = "drafter"
    TRAINER = "trainer rank"
    STORE = "store"
    HISTORY = "history worker"
    SCORER = "scorer"
    RAYLET = "raylet"
    GCS = "GCS"
    PREFECT = "Prefect's server"
    MLFLOW = "MLflow's server"
    ENVIRONMENTS = "environments' actor"
    ENVIRONMENT_WORKER = "environments' worker"
    ENVIRONMENT_GUARD = "environments' guard"


class Fault(StrEnum):
    KILL = "killed"
    """SIGKILL."""
    STOP = "stopped"
    """SIGSTOP for longer than the run's time limits, then SIGCONT."""
    DISK_FULL = "disk full"
    """Files of the process cannot grow (RLIMIT_FSIZE) until it has ended."""
    DAMAGED = "file damaged"
    """The driver is killed, and files that the target wrote are damaged before the run is
    resumed."""
    CLOCK = "clock set back"
    """The clock of all the run's Python processes goes back by an hour."""
    HANGUP = "terminal closed"
    """SIGHUP to the driver's process group, as from a closed terminal."""
    LINE = "line damaged"
    """The driver is killed, and one line of `steps.jsonl` is damaged before the run is resumed."""
    MEMORY = "out of memory"
    """The kernel kills the process when its memory reaches the limit of its cgroup."""


class Moment(StrEnum):
    STARTING = "starting"
    ROLLOUT = "rolling out"
    PUBLICATION = "publication"
    """The first seconds of a rollout stage, in which engines load new weights."""
    SCORING = "scoring"
    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    VALIDATION = "validation"
    MIGRATION = "migration"
    SWITCH = "switch"
    DEFERRAL = "deferral"


class RunMode(StrEnum):
    SYNC = "sync"
    PIPELINED = "pipelined"
    STALE = "stale"
    """Two policy versions stale, with responses from one queue. No campaign draws it."""
    TURNS = "turns"
    """As `STALE`, with an environment. No campaign draws it."""


class Strike(Frozen):
    """One fault of a campaign."""

    number: int
    target: Target
    fault: Fault
    moment: Moment
    mode: RunMode


OF_ENVIRONMENTS = (Target.ENVIRONMENTS, Target.ENVIRONMENT_WORKER, Target.ENVIRONMENT_GUARD)
"""Targets that only runs with an environment have. No campaign draws them."""
EVERY_RUNS = tuple(target for target in Target if target not in OF_ENVIRONMENTS)
TARGETS: Mapping[Fault, tuple[Target, ...]] = {
    Fault.KILL: EVERY_RUNS,
    Fault.STOP: EVERY_RUNS,
    Fault.DISK_FULL: (Target.DRIVER, Target.TRAINER, Target.STORE, Target.HISTORY),
    Fault.DAMAGED: (Target.DRIVER, Target.TRAINER, Target.HISTORY),
    Fault.CLOCK: (Target.DRIVER,),
    Fault.HANGUP: (Target.DRIVER,),
    Fault.LINE: (Target.DRIVER,),
    Fault.MEMORY: (Target.ENGINE_CORE, Target.TRAINER, Target.STORE, Target.SCORER),
}
"""Targets that each kind of fault can hit."""
PAIRS = tuple((target, fault) for fault, targets in TARGETS.items() for target in targets)
LATER = (Fault.HANGUP, Fault.LINE, Fault.MEMORY)
"""Kinds that were added to a campaign in progress. They are drawn after its first faults."""
NUM_FIRST = 60
_WHILE_SAVED = (
    Moment.ROLLOUT,
    Moment.PUBLICATION,
    Moment.TRAINING,
    Moment.CHECKPOINTING,
    Moment.MIGRATION,
)
"""Moments at which the disk has files of an earlier step."""
_PIPELINED_ONLY = (Moment.MIGRATION, Moment.DEFERRAL)
_ONCE = (Moment.STARTING, Moment.VALIDATION)
_STARTED_ONLY = (Target.DRIVER, Target.RAYLET, Target.GCS, Target.PREFECT, Target.MLFLOW)
"""Targets that exist while the others start."""
MIN_EACH = 3
"""Draws of every kind before a target gets the kinds that it has not met."""
MAX_STEPS = 3
"""Most steps of a run that have a fault."""
T = TypeVar("T", bound=StrEnum)


def draw(num: int, seed: int) -> list[Strike]:
    """Return the first `num` faults of this seed's campaign. A longer campaign begins with the same
    faults."""
    rng = random.Random(seed)
    drawn: list[Strike] = []
    for number in range(num):
        target, fault = _missing(drawn) or _pair(rng, drawn)
        moment = _least(rng, moments(target, fault), [strike.moment for strike in drawn])
        mode = _least(rng, modes(moment), [strike.mode for strike in drawn])
        drawn.append(Strike(number=number, target=target, fault=fault, moment=moment, mode=mode))
    return drawn


def of_environments() -> list[Strike]:
    """Return kills of what answers turns and of what asks, during rollouts and while scoring."""
    asking = (Target.ENGINE, Target.ENGINE_CORE, Target.STORE, Target.DRIVER, Target.SCORER)
    pairs = [
        (target, moment)
        for moment in (Moment.ROLLOUT, Moment.SCORING)
        for target in (*OF_ENVIRONMENTS, *asking)
    ]
    return [
        Strike(number=n, target=target, fault=Fault.KILL, moment=moment, mode=RunMode.TURNS)
        for n, (target, moment) in enumerate(pairs)
    ]


def _missing(drawn: Sequence[Strike]) -> tuple[Target, Fault] | None:
    """Return the first missing pair, once the first faults are drawn."""
    come = {(strike.target, strike.fault) for strike in drawn}
    missing = (pair for pair in PAIRS if pair not in come)
    return next(missing, None) if len(drawn) >= NUM_FIRST else None


def _pair(rng: random.Random, drawn: Sequence[Strike]) -> tuple[Target, Fault]:
    target = _least(rng, EVERY_RUNS, [strike.target for strike in drawn])
    later = LATER if len(drawn) < NUM_FIRST else ()
    faults = [fault for fault in Fault if target in TARGETS[fault] and fault not in later]
    # Kinds that few targets can suffer come first, then kinds that this target has not met.
    num = Counter(strike.fault for strike in drawn)
    rare = [fault for fault in faults if num[fault] < MIN_EACH]
    met = [strike.fault for strike in drawn if rare or strike.target is target]
    return target, _least(rng, rare or faults, met)


def on_runs(strikes: Iterable[Strike]) -> list[list[Strike]]:
    """Distribute strikes over runs of their mode, in the order in which they happen. A run has at
    most one while it starts, one in its first validation, and one in each of a few steps."""
    runs: list[list[Strike]] = []
    for strike in strikes:
        for run in runs:
            if _fits(strike, run):
                run.append(strike)
                break
        else:
            runs.append([strike])
    return [sorted(run, key=_order) for run in runs]


def _fits(strike: Strike, run: Sequence[Strike]) -> bool:
    """Whether a run can take one more strike. A run has either layouts to switch to or a TP degree
    above 1."""
    every = [*run, strike]
    switches = [one.moment is Moment.SWITCH for one in every]
    own_tp = any(
        one.target is Target.TP_WORKER and not switch
        for one, switch in zip(every, switches, strict=True)
    )
    places = Counter(_place(one) for one in every)
    return (
        strike.mode is run[0].mode
        and not (any(switches) and own_tp)
        and places.pop(None, 0) <= MAX_STEPS
        and max(places.values(), default=0) <= 1
    )


def _place(strike: Strike) -> Moment | None:
    """Return the moment if a run has it only once, and None if every step has it."""
    return strike.moment if strike.moment in _ONCE else None


def _order(strike: Strike) -> tuple[int, int]:
    place = _ONCE.index(strike.moment) - len(_ONCE) if _place(strike) else first_step(strike)
    return place, strike.number


def first_step(strike: Strike) -> int:
    """Return the first step of a run in which this strike can happen."""
    if strike.fault is Fault.DAMAGED and strike.target is Target.TRAINER:
        return 4  # The run needs two checkpoints, also if it is pipelined.
    return 3 if strike.moment in _PIPELINED_ONLY else 2


def moments(target: Target, fault: Fault) -> Sequence[Moment]:
    """Return the moments at which this fault can happen to this target."""
    if fault in (Fault.DAMAGED, Fault.LINE):
        return _WHILE_SAVED
    if fault is Fault.DISK_FULL or target not in _STARTED_ONLY:
        return [moment for moment in Moment if moment is not Moment.STARTING]
    return [*Moment]


def modes(moment: Moment) -> Sequence[RunMode]:
    """Return the modes of a run that have this moment."""
    return [RunMode.PIPELINED] if moment in _PIPELINED_ONLY else [RunMode.SYNC, RunMode.PIPELINED]


def _least(rng: random.Random, among: Iterable[T], drawn: Sequence[T]) -> T:
    """Return an option that was drawn least often."""
    counts, options = Counter(drawn), list(among)
    fewest = min(counts[option] for option in options)
    return rng.choice([option for option in options if counts[option] == fewest])
