"""An engine leaves its GPU, and takes turns on it with the trainer."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.fleet import FEW, MOST_FLIPS, Fleet
from tests.gpu.needs import REHEARSAL, needs


@needs("cuda", "vllm", "transformers", seconds=60)
def test_parked_engine_frees_the_gpu_and_continues(fleet: Fleet, figures: Callable) -> None:
    from tests.gpu.local_engine import parted

    engine, few = fleet["off"], fleet.requests(2)[:FEW]
    before, _ = engine.roll_out(few)
    used = _free_bytes()
    _, park_s = engine.timed(engine.engine.park())
    freed = _free_bytes() - used
    has_weights, wake_s = engine.timed(engine.engine.wake())
    after, _ = engine.roll_out(few)
    assert has_weights
    num_flips, num = parted(after, before)
    assert num_flips <= MOST_FLIPS * num
    figures(engine_park_s=park_s, engine_wake_s=wake_s, engine_park_frees_gb=freed / 1e9)
    if not REHEARSAL:
        assert freed > 2**30


@needs("cuda", "vllm", "transformers", "jaxtyping", seconds=120)
def test_engine_and_trainer_in_turn(
    fleet: Fleet, figures: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and trainer take turns on the GPU, and the trainer hands its weights over by CUDA IPC.

    The engine's tokens stay the same. The first hand-over also loads code, so the second is timed.
    """
    from refrain.engines.learn.learner import Learner
    from refrain.schemas.weights import PolicyWeights
    from tests.gpu.local_engine import parted

    engine, few = fleet["off"], fleet.requests(3)[:FEW]
    _stand_in(engine, monkeypatch)
    _, file_s = engine.timed(engine.engine.load_weights(fleet.weights))
    before, _ = engine.roll_out(few)
    at_work = _free_bytes()
    _, sleep_s = engine.timed(engine.engine.sleep())
    asleep = _free_bytes()
    learner = Learner(fleet.config)
    learner.restore(None)
    canaries = learner.canaries(fleet.canaries)
    learner.leave_gpu(state=True)
    alone = _free_bytes()
    for _ in range(2):
        enter_s = _timed(learner.enter_gpu)
        learner.rest()
        there = _free_bytes()
        handed_s = _timed(lambda: _hand_over(engine, learner))
        both = _free_bytes()
        leave_s = _timed(lambda: learner.leave_gpu(state=True))
        assert not (engine.wait(engine.engine.wake()))
        # There is no file: the engine must use the handed weights.
        weights = PolicyWeights(0, b"", canaries)
        error, load_s = engine.timed(engine.engine.load_weights(weights))
        after, _ = engine.roll_out(few)
        engine.wait(engine.engine.sleep())
        left = _free_bytes()
    engine.wait(engine.engine.wake())
    engine.wait(engine.engine.load_weights(fleet.weights))
    assert error < 1.0
    num_flips, num = parted(after, before)
    assert num_flips <= (0 if REHEARSAL else MOST_FLIPS * num)
    figures(
        turn_engine_sleep_s=sleep_s,
        turn_engine_frees_gb=(asleep - at_work) / 1e9,
        turn_trainer_enter_s=enter_s,
        turn_trainer_leave_s=leave_s,
        turn_trainer_takes_gb=(alone - there) / 1e9,
        turn_trainer_keeps_gb=(asleep - alone) / 1e9,
        hand_over_s=handed_s,
        hand_over_s_per_gb=handed_s / (_num_bytes(learner) / 1e9),
        hand_over_file_s=file_s,
        hand_over_kv_cache_and_canary_s=load_s,
        hand_over_takes_gb=(there - both) / 1e9,
        hand_over_keeps_gb=(alone - left) / 1e9,
    )
    if not REHEARSAL:
        assert asleep - alone < 2**30
        assert abs(alone - left) < 2**30


def _stand_in(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if REHEARSAL:
        from tests.stand_in_ipc import replacements, stand_in_worker

        for replacement in replacements("GPU-0"):
            monkeypatch.setattr(*replacement)
        engine.wait(engine.engine._llm.collective_rpc(stand_in_worker, args=("GPU-0",)))


def _hand_over(engine: Any, learner: Any) -> None:
    """Hand the learner's weights to the engine."""
    from refrain.engines.inference.weights.hand_over import EnginesOfTrainer, HandOver

    class Here(EnginesOfTrainer):
        """Call the engine in this process."""

        def _call(self, method: str, *args: Any) -> None:
            engine.wait(engine.engine.take_handed(method, *args))

    class ToOne(HandOver):
        def client(self, policy_version: int) -> EnginesOfTrainer:
            return Here(self, policy_version)

    assert ToOne({}, 0.0).send(0, learner.policy_version, learner.to_publish()) == ()


def _num_bytes(learner: Any) -> int:
    learner.enter_gpu()
    whole = learner.to_publish()
    return sum(torch.Size(shape).numel() for shape in whole.shapes.values()) * whole.dtype.itemsize


def _timed(do: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    do()
    return time.perf_counter() - started_s


def _free_bytes() -> int:
    """Return the GPU's free memory."""
    return 0 if REHEARSAL else torch.cuda.mem_get_info()[0]
