"""Generate steps of a recorded run again, with several engines in turn. Requests, weights and
history are those of the run. Every lap starts with a cold prefix cache."""

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from rich.console import Console

from refrain.benchmarks.demo import checkpoint_model
from refrain.benchmarks.laps import check_counts, in_turn
from refrain.benchmarks.one_step import Lap, roll_out, step_requests
from refrain.engines.gpus.placement import Wanted
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.store.store import Store, open_read_only
from refrain.flows.simulate_input import find_trace
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.drafting import DraftingConfig
from refrain.schemas.rollout import RequestId, RolloutRequest, Split
from refrain.schemas.weights import PolicyWeights
from refrain.tasks.run.gpus import wanted_by_engines
from refrain.tasks.run.ray_cluster import ray_cluster
from refrain.tasks.run.run_dir import read_config

UNDRAFTED = DraftingConfig(enabled=False)


@dataclass(frozen=True)
class Work:
    """One step of the run."""

    epoch: int
    """Number of the epoch, from 1."""
    step: int
    weights: PolicyWeights
    assignments: Sequence[tuple[int, RolloutRequest]]
    recorded: dict[RequestId, Sequence[int]]
    """Tokens that the run generated."""


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine to compare."""

    engine_class: type[VLLMEngine]
    drafting: DraftingConfig


Turn = tuple[str, Work, Lap]
"""Name of the engines, their work, and the lap."""


@dataclass(frozen=True)
class Recorded:
    """Steps of a run, and how often they are generated."""

    works: Sequence[Work]
    store: Store
    config: TrainConfig
    directory: Path
    """Directory of the indexes that engines draft from."""
    num_laps: int
    console: Console

    async def roll_out(self, kinds: Mapping[str, EngineKind]) -> list[Turn]:
        """Return the laps of these engines, by name, in turn on each work. The first lap of each
        engine is a warm-up and does not count."""
        wanted = [
            Wanted(f"{name}, {one.what}", one.num_gpus, one.setting)
            for name in kinds
            for one in wanted_by_engines(self.config)
        ]
        with ray_cluster("bench", wanted) as placement:
            num_gpus = self.config.rollout.tp_degree if placement.num_gpus else 0
            coordinators = {
                name: Coordinator(self._engines(kind, num_gpus)) for name, kind in kinds.items()
            }
            try:
                for coordinator in coordinators.values():
                    await coordinator.start()
                return [
                    turn for work in self.works for turn in await self._laps(work, coordinators)
                ]
            finally:
                for coordinator in coordinators.values():
                    await coordinator.shutdown()

    async def _laps(
        self,
        work: Work,
        coordinators: Mapping[str, Coordinator],
    ) -> list[Turn]:
        keys = sorted({request.id.prompt_key for _, request in work.assignments})
        epoch_steps = sum(report.epoch == 0 for report in self.store.steps())
        write_history(self.store, work.step, keys, epoch_steps, self.directory)
        names, turns = list(coordinators), []
        for lap in range(self.num_laps + 1):
            for name in in_turn(names, lap):
                measured = await roll_out(coordinators[name], work.weights, work.assignments)
                turns += [(name, work, measured)] if lap else []
            self.console.print(f"epoch {work.epoch}, {', '.join(names)}: lap {lap}/{self.num_laps}")
        return turns

    def _engines(self, kind: EngineKind, num_gpus: int) -> list[RayEngine]:
        engine = self.config.engine.model_copy(
            update={"drafting": kind.drafting, "history_dir": self.directory}
        )
        indexes = range(self.config.rollout.num_engines)
        return [RayEngine(i, engine, num_gpus, kind.engine_class) for i in indexes]


def add_run_arguments(parser: ArgumentParser, *, epochs: str, rounds: int) -> None:
    """Add RUN and the amount to measure, with these defaults for epochs and rounds."""
    parser.add_argument("run", metavar="RUN", help="a finished run: its directory or name")
    parser.add_argument("--epochs", default=epochs, metavar="LIST", help="[default: %(default)s]")
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help="[default: %(default)s]"
    )
    parser.add_argument(
        "--laps",
        type=int,
        default=3,
        metavar="N",
        help="laps of each engine in a round [default: 3]",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="largest batch of each engine [default: the run's]",
    )
    parser.add_argument(
        "--engines", type=int, metavar="N", help="[default: as many as the run had]"
    )


def rounds_of(args: Namespace, console: Console) -> Iterator[Recorded]:
    """Yield the work of each round. Engines are started anew for each, as one process is a few per
    cent faster than another of its kind."""
    check_counts(args, "laps", "rounds")
    file = find_trace(args.run)
    config = config_of(file.parent, args)
    epochs = [int(word) for word in args.epochs.split(",")]
    with open_read_only(file) as store, TemporaryDirectory(prefix="refrain-bench-") as directory:
        works = works_of(store, config, epochs)
        for number in range(args.rounds):
            console.print(f"round {number + 1}/{args.rounds}")
            yield Recorded(works, store, config, Path(directory), args.laps, console)


def share_identical(laps: Iterable[tuple[Work, Lap]]) -> float:
    """Return the share of sequences that equal the recorded ones token for token."""
    return fmean(work.recorded[id] == t for work, lap in laps for id, t in lap.tokens.items())


def works_of(store: Store, config: TrainConfig, epochs: Sequence[int]) -> list[Work]:
    """Return the second step of each epoch. Raise ValueError for an epoch that the run does not
    have, or whose weights are gone."""
    steps = {epoch: _step_of(store, config, epoch) for epoch in epochs}
    return [_work(store, config, epoch, step) for epoch, step in steps.items()]


def config_of(run_dir: Path, args: Namespace) -> TrainConfig:
    config = read_config(run_dir)
    changes = {"max_num_seqs": args.max_num_seqs, "num_engines": args.engines}
    given = {name: value for name, value in changes.items() if value is not None}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=given)})


def _step_of(store: Store, config: TrainConfig, epoch: int) -> int:
    """Return the second step of an epoch, or the first if there is only one."""
    steps = [report.step for report in store.steps() if report.epoch == epoch - 1]
    if not steps:
        raise ValueError(f"--epochs: {config.run_dir} has no epoch {epoch}")
    return steps[min(1, len(steps) - 1)]


def _work(store: Store, config: TrainConfig, epoch: int, step: int) -> Work:
    plan = store.plan(Split.TRAIN, step)
    assert plan is not None
    columns = ("prompt_key", "sample_index", "response_token_ids")
    rows = store.rollouts(Split.TRAIN, step, columns).to_pylist()
    texts = store.prompts()
    prompts = [Prompt(g.prompt_key, texts[g.prompt_key], "", "") for g in plan.groups]
    num_engines = config.rollout.num_engines
    planned = {g.prompt_key: g.engine % num_engines for g in plan.groups}
    requests = step_requests(config, prompts, step)
    recorded = {
        RequestId(Split.TRAIN, step, row["prompt_key"], row["sample_index"]): row[
            "response_token_ids"
        ]
        for row in rows
    }
    assignments = [(planned[request.id.prompt_key], request) for request in requests]
    return Work(epoch, step, _weights(config, step - 1), assignments, recorded)


def _weights(config: TrainConfig, policy_version: int) -> PolicyWeights:
    model = checkpoint_model(config.run_dir, policy_version)
    file = (model if policy_version else config.model.path) / "model.safetensors"
    if not file.exists():
        raise ValueError(
            f"{file} is gone, and with it the policy of that step: make the run with "
            "trainer.keep_checkpoints=1000, or ask for other --epochs"
        )
    return PolicyWeights(policy_version, file.read_bytes(), ())


def write_history(
    store: Store, step: int, prompt_keys: Sequence[str], epoch_steps: int, directory: Path
) -> None:
    """Write the indexes that the run had before this step: those of these prompts, and the shared
    one. `epoch_steps`: steps of an epoch."""
    from refrain.engines.histospec.library import IndexLibrary
    from refrain.engines.histospec.shared import SHARED_EPOCHS, SharedLibrary
    from refrain.engines.histospec.worker import histories
    from refrain.engines.histospec.workers import BUILD_PROMPTS

    shutil.rmtree(directory)
    directory.mkdir()
    steps = store.last_steps(Split.TRAIN, prompt_keys, step)
    own = store.index_rows(Split.TRAIN, steps)
    IndexLibrary(directory, DraftingConfig()).add(histories(own))
    shared = SharedLibrary(directory, DraftingConfig(), epoch_steps)
    for earlier in range(max(1, step - SHARED_EPOCHS * epoch_steps), step):
        keys = store.rewards(Split.TRAIN, earlier)["prompt_key"].unique().to_pylist()
        of_step = histories(store.index_rows(Split.TRAIN, dict.fromkeys(keys, earlier)))
        for first in range(0, len(of_step), BUILD_PROMPTS):
            shared.add(of_step[first : first + BUILD_PROMPTS])
