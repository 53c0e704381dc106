"""A real engine writes a trace of one step's first forward passes, and samples the same tokens."""

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.engine.trace import NUM_PASSES
from refrain.schemas.trainer import TraceConfig
from tests.inference.real import CONFIG, requests, roll_out, tokens_of, weights_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


async def test_an_engine_traces_a_step(ray_cluster, learner, prompts, tmp_path: Path) -> None:
    assert ray_cluster.is_initialized()
    trace = TraceConfig(step=1, directory=tmp_path / "traces")
    engine = RayEngine(0, CONFIG.engine.model_copy(update={"trace": trace}), num_gpus=0)
    weights, ours = weights_of(learner, prompts), requests(prompts[:2])
    other_step = [replace(one, id=replace(one.id, step=2)) for one in ours]
    await asyncio.wait_for(engine.start(), 300.0)
    try:
        plain, _ = await roll_out([engine], weights, [(0, request) for request in other_step])
        assert not list(tmp_path.rglob("*.gz"))
        traced, _ = await roll_out([engine], weights, [(0, request) for request in ours])
    finally:
        await engine.shutdown()
    tokens = tokens_of(plain)
    assert tokens_of(traced) == {
        one.id: tokens[two.id] for one, two in zip(ours, other_step, strict=True)
    }
    (file,) = trace.directory.glob("engine-0*.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    passes = [one for one in events if str(one.get("name")).startswith("execute_")]
    assert 0 < len(passes) <= NUM_PASSES
