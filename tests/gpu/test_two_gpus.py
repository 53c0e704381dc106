"""Two GPUs: requests that move from TP 1 to TP 2 keep their tokens, and two trainer ranks compute
the updates of one."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import write_model
from tests.gpu.needs import REHEARSAL, needs

SHAPE = "qwen3-tiny" if REHEARSAL else "qwen3-0.6b"
PROMPT_TOKENS, RESPONSE_TOKENS = (32, 160) if REHEARSAL else (64, 512)
MOVED_AT = 8
"""Response tokens that every request has before we withdraw them."""
TIMEOUT_S = 120.0


@needs("cuda", "vllm", "transformers", gpus=2, seconds=150)
def test_a_switch_of_tp_degree_changes_no_token(
    tmp_path: Path, device: str, figures: Callable
) -> None:
    """Run in float32. The TP 2 engine is parked while the TP 1 engine uses the first GPU."""
    from tests.gpu.local_engine import make_requests, policy_weights, started, train_config

    model = write_model(SHAPE, device, torch.float32, tmp_path / "model")
    cache = {"kv_cache_bytes": 2**28 if REHEARSAL else 2 * 2**30, "dtype": "float32"}
    tokens = {"response_tokens": RESPONSE_TOKENS}
    config = train_config(model, tmp_path, PROMPT_TOKENS, **tokens, **cache)
    requests = make_requests(4, 1, PROMPT_TOKENS, RESPONSE_TOKENS, 512)
    weights = policy_weights(config, [requests[0].prompt_token_ids])
    with ExitStack() as stack:
        high, low = (
            stack.enter_context(started(_engine_of(tp_degree), _layout(config, tp_degree)))
            for tp_degree in (2, 1)
        )
        errors = [engine.wait(engine.engine.load_weights(weights)) for engine in (high, low)]
        high.wait(high.engine.park())
        expected, _ = low.roll_out(requests)
        for keep_kv in (False, True):
            low.wait(low.engine.load_weights(weights))
            moved, leave_s = low.timed(_leave(low, requests, keep_kv))
            _, park_s = low.timed(low.engine.park())
            _, wake_s = high.timed(high.engine.wake())
            finished, _ = high.roll_out(moved)
            high.wait(high.engine.park())
            low.wait(low.engine.wake())
            how = "kv" if keep_kv else "recompute"
            figures(**{f"switch_{how}_s": leave_s + park_s + wake_s})
            assert [request.kv is not None for request in moved] == [keep_kv] * len(requests)
            assert {id: row["response_token_ids"] for id, row in finished.items()} == {
                id: row["response_token_ids"] for id, row in expected.items()
            }
    assert max(errors) < 1e-3


def _engine_of(tp_degree: int) -> Callable[..., Any]:
    """Return a maker of engines on the first GPUs."""
    from refrain.engines.inference.engine.vllm_engine import VLLMEngine
    from refrain.schemas.engine import EngineSetup

    devices = () if REHEARSAL else tuple(range(tp_degree))
    return partial(VLLMEngine, setup=EngineSetup(devices=devices))


def _layout(config: Any, tp_degree: int) -> Any:
    rollout = config.rollout.model_copy(update={"tp_degree": tp_degree})
    changes = {"rollout": rollout, "pooled": True}
    off = config.engine.drafting.model_copy(update={"enabled": False})
    return config.engine.model_copy(update={**changes, "drafting": off})


async def _leave(engine: Any, requests: Sequence[Any], keep_kv: bool) -> list[Any]:
    """Submit the requests, and withdraw all in the middle of their responses."""
    ids = [request.id for request in requests]
    await engine.engine.submit(requests)
    num_begun = 0
    while num_begun < len(ids):
        await asyncio.sleep(0.005)
        assert engine.engine._running.keys() == set(ids), "a request finished before it was moved"
        begun = [r.generated for r in await engine.engine.copy(ids) if r.generated]
        num_begun = sum(len(generated.token_ids) >= MOVED_AT for generated in begun)
    return await engine.engine.withdraw(ids, keep_kv=keep_kv)


@needs("cuda", "transformers", "pydantic", "pyarrow", "jaxtyping", gpus=2, seconds=90)
def test_two_trainer_ranks_update_as_one(tmp_path: Path, figures: Callable) -> None:
    """Compare metrics and log-probabilities after two updates with FSDP2, in float32."""
    import torch.multiprocessing as mp

    write_model("qwen3-tiny", "cpu", torch.float32, tmp_path / "model")
    mp.spawn(_rank, args=(1, tmp_path), nprocs=1)
    mp.spawn(_rank, args=(2, tmp_path), nprocs=2)
    one, *two = (torch.load(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    for rank in two:
        for metrics, expected in zip(rank["metrics"], one["metrics"], strict=True):
            assert metrics == pytest.approx(expected, abs=1e-3)
        assert torch.allclose(rank["logprobs"], one["logprobs"], atol=1e-3)
    # Negative control: the updates change far more than the tolerance.
    assert (one["logprobs"] - one["start"]).abs().max() > 1e-2
    figures(fsdp_2_ranks_error=(two[0]["logprobs"] - one["logprobs"]).abs().max().item())


def _rank(rank: int, world_size: int, directory: Path) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from refrain.engines.learn.learner import Learner
    from tests.gpu.local_engine import train_config
    from tests.learn.conftest import make_batch

    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    if world_size > 1:
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{directory / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
    config = train_config(directory / "model", directory, 32, response_tokens=32, dtype="float32")
    trainer = config.trainer.model_copy(update={"learning_rate": 1e-4, "micro_batch_tokens": 64})
    learner = Learner(config.model_copy(update={"trainer": trainer}), rank, world_size)
    learner.restore(None)
    text = [list(range(2, 40))]
    start = torch.as_tensor(learner.logprobs(text)[0])
    metrics = [
        learner.train_step(make_batch(seed, num_groups=3, group_size=3, policy_version=seed))
        for seed in (0, 1)
    ]
    logprobs = torch.as_tensor(learner.logprobs(text)[0])
    told = {"metrics": metrics, "logprobs": logprobs, "start": start}
    torch.save(told, directory / f"{world_size}-{rank}")
    if world_size > 1:
        dist.destroy_process_group()
