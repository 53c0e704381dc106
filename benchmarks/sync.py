"""Weight sync from the trainer to two real engines of its node, without GPUs: copied bytes and
time.

The model is random and has about 1 GB in float32. In a lap the trainer writes its weights to shared
memory, and both engines load them at the same time (`sync`). In turn with that, the bench copies as
many bytes twice, one copy after the other: to new memory, as any receiver of a model needs
(`copies`), and to memory that was written before (`warm`).

    copies_per_engine      bytes written to the file and copied out of it / bytes of the model
    kept_per_engine        bytes that vLLM copies besides: to its own memory, and to the layout of
                           its CPU kernels, which it needs for any weights
    file_bytes_per_node    size of the version's files on the node / bytes of the model
    over_two_copies        median of `sync` / median of `copies`
    over_two_warm_copies   median of `sync` / median of `warm`

Before that, couriers of 2, 8 and 64 nodes, all in this process, pass on a small file:

    origin_copies_N_nodes  bytes that the trainer's node sends / bytes of the file; without a tree
                           it would be N - 1
    hops_N_nodes           hops of a part on its longest way

torch's dispatcher counts the bytes, in the trainer and in a worker. At the end the bench checks the
canary.
"""

import asyncio
import shutil
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from refrain.benchmarks.copies import CopiedBytes, CountingEngine
from refrain.benchmarks.laps import Measured, Row, check_counts, in_turn, median_of
from refrain.benchmarks.nodes import count_copies
from refrain.benchmarks.stand_ins import MODEL
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.publishing import publish
from refrain.engines.reports.tables import plain_table
from refrain.engines.weights_file import VersionFiles
from refrain.schemas.bench import BenchReport
from refrain.schemas.config import TrainConfig
from refrain.schemas.weights import Canary, PolicyWeights, WeightsFile
from refrain.tasks.run.ray_cluster import ray_cluster

PACKAGES = ("refrain", "torch", "ray", "safetensors", "vllm")
NUM_NODES = (2, 8, 64)
NUM_ENGINES = 2
NUM_KEPT = 2
WARM_UP = 3
"""Versions before the first lap. Later versions overwrite memory of older ones."""
OF = ("sync", "copies", "warm")
_CANARY = tuple(range(5, 37))


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--laps", type=int, default=7, metavar="N", help="laps of each kind of copy [default: 7]"
    )
    parser.add_argument(
        "--layers", type=int, default=16, metavar="N", help="layers of the model [default: 16]"
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "laps", "layers")
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        config = _config(_make_model(Path(directory) / "model", args.layers))
        return asyncio.run(_measure(config, args.laps, console))


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("figure", "value", text=("figure",))
    for name, value in report.figures.items():
        table.add_row(name, f"{value:,.4g}")
    console.print(table)


def _make_model(path: Path, num_layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32_000,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors" and not (path / file.name).exists():
            shutil.copyfile(file, path / file.name)
    return path


def _config(model: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": ["none"], "max_prompt_tokens": 64, "max_response_tokens": 64},
            "rollout": {"num_engines": NUM_ENGINES, "max_num_seqs": 4, "kv_cache_bytes": 2**26},
        }
    )


class _Policy:
    """A policy that changes without training, and its files."""

    def __init__(self, config: TrainConfig) -> None:
        self._learner = Learner(config)
        self._learner.restore(None)
        self.files = VersionFiles(NUM_KEPT)
        self._version = 0
        parts = self._learner.to_publish().tensors
        self.num_bytes = sum(tensor.nbytes for _, tensor in parts)

    def move(self) -> None:
        self._version += 1
        with torch.no_grad():
            for parameter in self._learner._policy.parameters():
                parameter.mul_(1.01)

    def publish(self, canaries: Sequence[Canary] = ()) -> PolicyWeights:
        path = publish(self._learner.to_publish(), self._version, self.files)
        file = WeightsFile(path, path.stat().st_size, NUM_KEPT)
        return PolicyWeights(self._version, file, tuple(canaries))

    def canaries(self) -> tuple[Canary, ...]:
        return self._learner.canaries([_CANARY])


async def _measure(config: TrainConfig, num_laps: int, console: Console) -> Measured:
    passed_on = [await count_copies(num_nodes) for num_nodes in NUM_NODES]
    policy = _Policy(config)
    with ray_cluster("bench"), _deleted(policy.files):
        engines = [RayEngine(i, config.engine, 0, CountingEngine) for i in range(NUM_ENGINES)]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            for _ in range(WARM_UP):
                await _sync(policy, engines)
            counted = await _count(policy, engines[0])
            rows: list[Row] = []
            for lap in range(num_laps):
                for of in in_turn(OF, lap):
                    row = {"of": of, "lap": lap}
                    timed = await _sync(policy, engines) if of == "sync" else _copy(policy, of)
                    rows.append(row | timed)
                console.print(f"lap {lap + 1}/{num_laps}")
            checked = policy.publish(policy.canaries())
            errors = [await engine.load_weights(checked) for engine in engines]
        finally:
            for engine in engines:
                await engine.shutdown()
    figures = {name: value for counts in passed_on for name, value in counts.items()}
    return figures | counted | _figures(rows) | {"canary_error": max(errors)}, rows


@contextmanager
def _deleted(files: VersionFiles) -> Iterator[None]:
    try:
        yield
    finally:
        files.delete()


async def _sync(policy: _Policy, engines: Sequence[RayEngine]) -> dict[str, float]:
    """Return the seconds until both engines have the next version."""
    policy.move()
    started_s = time.perf_counter()
    weights = policy.publish()
    written_s = time.perf_counter() - started_s
    await asyncio.gather(*(engine.load_weights(weights) for engine in engines))
    return {"seconds": time.perf_counter() - started_s, "written_s": written_s}


def _copy(policy: _Policy, of: str) -> dict[str, float]:
    """Return the seconds for two copies of as many bytes."""
    source = torch.ones(policy.num_bytes // 4)
    places = [torch.ones_like(source) for _ in range(2)] if of == "warm" else []
    started_s = time.perf_counter()
    if places:
        for place in places:
            place.copy_(source)
    else:
        places += [source.clone(), source.clone()]
    return {"seconds": time.perf_counter() - started_s}


async def _count(policy: _Policy, engine: RayEngine) -> dict[str, int | float]:
    """Return the bytes copied for one sync of one engine."""
    policy.move()
    with CopiedBytes() as written:
        weights: Any = policy.publish()
    path = weights.source.path
    (told,) = await engine._call("count_copies", str(path))
    from_file, others, packed = told
    of_version = [file for file in path.parent.iterdir() if file.stem == path.stem]
    model = policy.num_bytes
    return {
        "model_bytes": model,
        "copies_per_engine": (written.others + from_file) / model,
        "kept_per_engine": (others + packed) / model,
        "file_bytes_per_node": sum(file.stat().st_size for file in of_version) / model,
    }


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    sync_s, copies_s, warm_s = (median_of(rows, "seconds", of=of) for of in OF)
    return {
        "sync_s": sync_s,
        "written_s": median_of(rows, "written_s", of="sync"),
        "two_copies_s": copies_s,
        "two_warm_copies_s": warm_s,
        "over_two_copies": sync_s / copies_s,
        "over_two_warm_copies": sync_s / warm_s,
    }
