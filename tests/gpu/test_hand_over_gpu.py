"""Weights from the trainer to an engine on the same card by CUDA IPC, as a turn ends: what comes,
how long it takes, and what memory comes back."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import write_model
from tests.gpu.needs import REHEARSAL, needs

SHAPE = "qwen3-tiny" if REHEARSAL else "qwen3-1.7b"
PROMPT_TOKENS, RESPONSE_TOKENS = (16, 24) if REHEARSAL else (64, 128)
NUM_TIMES = 2
"""Hand-overs: the first one also loads code."""
KV_CACHE_BYTES = 2**28 if REHEARSAL else 2**33
MOST_FLIPS = 0.05


@needs("cuda", "vllm", "transformers", "jaxtyping", seconds=120)
def test_weights_stay_on_the_card_and_memory_comes_back(
    tmp_path: Path, device: str, figures: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.inference.engine.vllm_engine import VLLMEngine
    from engines.learn.learner import Learner
    from schemas.weights import PolicyWeights
    from tests.gpu.local_engine import make_requests, parted, policy_weights, started, train_config

    model = write_model(SHAPE, device, torch.bfloat16, tmp_path / "model")
    config = train_config(
        model,
        tmp_path,
        PROMPT_TOKENS,
        response_tokens=RESPONSE_TOKENS,
        weights="ipc",
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    requests = make_requests(4, 4, PROMPT_TOKENS, RESPONSE_TOKENS, 512)
    prompts = [request.prompt_token_ids for request in requests[::4]]
    by_file = policy_weights(config, prompts)
    off = config.drafting.model_copy(update={"enabled": False})
    engine_config = config.engine.model_copy(update={"drafting": off, "takes_turns": True})
    with started(VLLMEngine, engine_config) as engine:
        _stand_in(engine, monkeypatch)
        _, file_s = engine.timed(engine.engine.load_weights(by_file))
        before, _ = engine.roll_out(requests)
        engine.wait(engine.engine.sleep())
        learner = Learner(config)
        learner.restore(None)
        canaries = learner.canaries(prompts)
        learner.leave_gpu(state=True)
        alone = _free_bytes()
        for _ in range(NUM_TIMES):
            learner.enter_gpu()
            learner.rest()
            trained = _free_bytes()
            num_gb = _num_bytes(learner) / 1e9
            handed_s = _hand_over(engine, learner)
            both = _free_bytes()
            learner.leave_gpu(state=True)
            engine.wait(engine.engine.wake())
            # Without a file to take them from.
            weights = PolicyWeights(0, b"", canaries)
            error, load_s = engine.timed(engine.engine.load_weights(weights))
            after, _ = engine.roll_out(requests)
            engine.wait(engine.engine.sleep())
            left = _free_bytes()
    assert error < 1.0
    num_flips, num = parted(after, before)
    assert num_flips <= (0 if REHEARSAL else MOST_FLIPS * num)
    figures(
        hand_over_s_per_gb=handed_s / num_gb,
        hand_over_s=handed_s,
        hand_over_file_s=file_s,
        hand_over_kv_cache_and_canary_s=load_s,
        hand_over_takes_gb=(trained - both) / 1e9,
        hand_over_keeps_gb=(alone - left) / 1e9,
    )
    if not REHEARSAL:
        assert abs(alone - left) < 2**30


def _stand_in(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if REHEARSAL:
        from tests.stand_in_ipc import replacements, stand_in_worker

        for replacement in replacements("GPU-0"):
            monkeypatch.setattr(*replacement)
        engine.wait(engine.engine._llm.collective_rpc(stand_in_worker, args=("GPU-0",)))


def _hand_over(engine: Any, learner: Any) -> float:
    """Hand the learner's weights over; the seconds that it took."""
    from engines.inference.weights.hand_over import EnginesOfTrainer, HandOver

    class Here(EnginesOfTrainer):
        """The engine of this process."""

        def _call(self, method: str, *args: Any) -> None:
            engine.wait(engine.engine.take_handed(method, *args))

    class ToOne(HandOver):
        def client(self, policy_version: int) -> EnginesOfTrainer:
            return Here(self, policy_version)

    started_s = time.perf_counter()
    assert ToOne({}, 0.0).send(0, learner.policy_version, learner.to_publish()) == ()
    return time.perf_counter() - started_s


def _num_bytes(learner: Any) -> int:
    whole = learner.to_publish()
    return sum(torch.Size(shape).numel() for shape in whole.shapes.values()) * whole.dtype.itemsize


def _free_bytes() -> int:
    """Free memory of the card."""
    return 0 if REHEARSAL else torch.cuda.mem_get_info()[0]
