"""Compare refrain's engines with stock vLLM on one GPU.

All engines start once, and take turns with the same requests. Other tests park and wake an engine,
and hand weights from the trainer to it.

    stock    unchanged vLLM: its own runner, asynchronous scheduling
    off      refrain without drafts; takes turns with the trainer
    on       refrain with drafts
    slow     as `off`, but vLLM schedules each step (see `decode_steps`)
    mp       as `off`, but the worker has a process of its own; only on cards with much memory
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import write_model
from tests.gpu.needs import REHEARSAL, needs

SHAPE = "qwen3-tiny" if REHEARSAL else "qwen3-1.7b"
PROMPT_TOKENS, RESPONSE_TOKENS = (16, 24) if REHEARSAL else (64, 256)
NUM_PROMPTS, GROUP_SIZE = (2, 4) if REHEARSAL else (32, 8)
FEW = 4 if REHEARSAL else 16
"""Number of requests in a small batch."""
LAPS = 1 if REHEARSAL else 3
MOST_FLIPS = 0.05
"""Flips per token that rounding can explain. With another sampler there would be almost 1."""
KV_CACHE_BYTES = 2**28 if REHEARSAL else 11 * 2**30
SHARE = 0.92 if REHEARSAL else 0.25
"""Share of the GPU's memory that must be free when an engine starts."""
MUCH_MEMORY = 120e9
RollOut = Callable[[list], tuple[Any, float]]


class Fleet:
    """Engines by name, and the requests that all of them generate."""

    def __init__(self, directory: Path, device: str) -> None:
        from tests.gpu.local_engine import policy_weights, train_config

        model = write_model(SHAPE, device, torch.bfloat16, directory / "model")
        self.config = train_config(
            model,
            directory,
            PROMPT_TOKENS,
            response_tokens=RESPONSE_TOKENS,
            weight_sync="ipc",
            kv_cache_bytes=KV_CACHE_BYTES,
            gpu_memory_utilization=SHARE,
        )
        self.canaries = [r.prompt_token_ids for r in self.requests(0)[::GROUP_SIZE][:4]]
        self.weights = policy_weights(self.config, self.canaries)
        self.history = directory / "history"
        self.history.mkdir()

    def requests(self, epoch: int) -> list:
        """Return all requests. Each epoch has other noise."""
        from tests.gpu.local_engine import make_requests

        vocab_size = 512 if REHEARSAL else 151_936
        return make_requests(
            NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS, vocab_size, epoch
        )

    def __getitem__(self, name: str) -> Any:
        return self._engines[name]

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    @contextmanager
    def started(self) -> Iterator["Fleet"]:
        from engines.inference.engine.vllm_engine import VLLMEngine
        from tests.gpu.local_engine import all_started

        kinds = {
            "off": (VLLMEngine, self._config(False, takes_turns=True)),
            "on": (VLLMEngine, self._config(True, history_dir=self.history)),
            "stock": (_stock(), self._config(False)),
            "slow": (_other("tests.gpu.slow_scheduler.make_scheduler"), self._config(False)),
        }
        if _card_bytes() >= MUCH_MEMORY:
            kinds["mp"] = (_other(distributed_executor_backend="mp"), self._config(False))
        with all_started(list(kinds.values())) as engines:
            self._engines = dict(zip(kinds, engines, strict=True))
            yield self

    def _config(self, drafts: bool, **changes: Any) -> Any:
        from schemas.drafting import DraftingConfig

        way = "ipc" if changes.get("takes_turns") else "file"
        rollout = self.config.rollout.model_copy(update={"weight_sync": way})
        drafting = DraftingConfig(enabled=drafts)
        return self.config.engine.model_copy(
            update={"rollout": rollout, "drafting": drafting, **changes}
        )


def _other(scheduler_cls: str = "", **args: Any) -> Any:
    """Return refrain's engine with other arguments of vLLM."""
    from engines.inference.engine.vllm_engine import VLLMEngine

    if scheduler_cls:
        args["scheduler_cls"] = scheduler_cls

    class Other(VLLMEngine):
        def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
            return super()._engine_args(on_cpu) | args

    return Other


def _card_bytes() -> int:
    return 0 if REHEARSAL else torch.cuda.mem_get_info()[1]


def _stock() -> Any:
    from benchmarks.stock import StockEngine
    from engines.inference.engine.vllm_engine import CheckpointEngine

    class Stock(CheckpointEngine, StockEngine):
        """Stock vLLM with the weights of the model directory.

        It skips vLLM's kernel warm-up of half a minute: the first requests warm the kernels up.
        """

        def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
            less = {} if on_cpu else {"kernel_config": {"enable_jit_warmup": False}}
            return super()._engine_args(on_cpu) | less

    return Stock


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("engines"), device).started() as fleet:
        yield fleet


@needs("cuda", "vllm", "transformers", "numba", seconds=240)
@pytest.mark.parametrize("name", ["off", "on", "stock"])
def test_start_and_weights(name: str, fleet: Fleet, figures: Callable) -> None:
    """The engines start in parallel, so the first test waits for all of them."""
    from schemas.weights import PolicyWeights

    engine = fleet[name]
    told = {"start_s": engine.start_s}
    if name == "stock":
        engine.wait(engine.engine.load_weights(PolicyWeights(0, None, ())))
    else:
        _, told["first_weight_sync_s"] = engine.timed(engine.engine.load_weights(fleet.weights))
        error, told["weight_sync_s"] = engine.timed(engine.engine.load_weights(fleet.weights))
        told["canary_error"] = error
        assert error < 1.0
    _, told["first_request_s"] = engine.roll_out(fleet.requests(0)[:1])
    figures(**{f"engine_{name}_{key}": value for key, value in told.items()})


@needs("cuda", "vllm", "transformers", "numba", seconds=60)
@pytest.mark.parametrize("num_rows", [FEW, NUM_PROMPTS * GROUP_SIZE])
def test_decoding_in_turn(num_rows: int, fleet: Fleet, figures: Callable) -> None:
    """Measure a first epoch, in which the engine with drafts has no history.

    Stock vLLM gets its requests in two ways: one call of `generate` each, as users do, and in a
    batch, as refrain does.
    """
    ways = {
        "stock": fleet["stock"].roll_out,
        "stock_batch": _in_batches(fleet["stock"]),
        "off": fleet["off"].roll_out,
        "on": fleet["on"].roll_out,
    }
    speeds = _in_turn(ways, lambda lap: fleet.requests(100 + lap)[:num_rows])
    best = max(speeds["stock"], speeds["stock_batch"])
    for name, speed in speeds.items():
        figures(**{f"engine_{name}_{num_rows}_rows_tokens_per_s": speed})
        figures(**{f"engine_{name}_{num_rows}_rows_step_ms": 1e3 * num_rows / speed})
    figures(**{f"engine_off_over_stock_{num_rows}_rows": speeds["off"] / best})
    figures(**{f"engine_first_epoch_over_stock_{num_rows}_rows": speeds["on"] / best})


@needs("cuda", "vllm", "transformers", "numba", seconds=60)
@pytest.mark.parametrize("num_rows", [FEW, NUM_PROMPTS * GROUP_SIZE])
def test_drafts_that_are_right_and_what_they_flip(
    num_rows: int, fleet: Fleet, figures: Callable
) -> None:
    """Draft earlier samples from themselves. The tokens are the same, except at near ties."""
    from tests.gpu.local_engine import num_tokens, parted, write_history

    requests = fleet.requests(1)[:num_rows]
    expected, _ = fleet["off"].roll_out(requests)
    again, off_s = fleet["off"].roll_out(requests)
    write_history(fleet.history, expected.values())
    drafted, on_s = fleet["on"].roll_out(requests)
    sums = {
        name: sum(row[name] for row in drafted.values())
        for name in ("num_draft_tokens", "num_accepted_tokens")
    }
    assert sums["num_accepted_tokens"] > num_tokens(drafted) / 2
    figures(
        **{
            f"engine_right_drafts_{num_rows}_rows_tokens_per_s": num_tokens(drafted) / on_s,
            f"engine_right_drafts_{num_rows}_rows_over_off": off_s / on_s,
            f"engine_right_drafts_{num_rows}_rows_acceptance": (
                sums["num_accepted_tokens"] / max(1, sums["num_draft_tokens"])
            ),
        }
    )
    for axis, rows in (("again", again), ("draft", drafted)):
        num_flips, num = parted(rows, expected)
        figures(**{f"flips_engine_{axis}_{num_rows}_rows_per_million": 1e6 * num_flips / num})
        # A rehearsal runs in float32, which has no near ties among so few tokens.
        assert num_flips <= (0 if REHEARSAL else MOST_FLIPS * num)


@needs("cuda", "vllm", "transformers", "numba", seconds=60)
@pytest.mark.parametrize("num_rows", [FEW, NUM_PROMPTS * GROUP_SIZE])
def test_drafts_that_are_wrong(num_rows: int, fleet: Fleet, figures: Callable) -> None:
    """The history has other noise, so drafts are wrong: random weights repeat nothing.

    The gate should notice this and stop verifying drafts.
    """
    ways = {name: fleet[name].roll_out for name in ("off", "on")}
    speeds = _in_turn(ways, lambda lap: fleet.requests(200 + lap)[:num_rows])
    figures(**{f"engine_wrong_drafts_{num_rows}_rows_over_off": speeds["on"] / speeds["off"]})


def _in_batches(engine: Any) -> RollOut:
    def roll_out(requests: list) -> tuple[Any, float]:
        engine.engine.in_batches = True
        try:
            return engine.roll_out(requests)
        finally:
            engine.engine.in_batches = False

    return roll_out


@needs("cuda", "vllm", "transformers", "numba", seconds=40)
@pytest.mark.parametrize("num_rows", [FEW, NUM_PROMPTS * GROUP_SIZE])
def test_what_scheduling_costs(num_rows: int, fleet: Fleet, figures: Callable) -> None:
    """A step with our scheduling, with vLLM's, and with the worker in a process of its own.

    The tokens are the same.
    """
    from tests.gpu.local_engine import parted

    names = [name for name in ("off", "slow", "mp") if name in fleet]
    for name in names[1:]:
        fleet[name].wait(fleet[name].engine.load_weights(fleet.weights))
    rows = {name: fleet[name].roll_out(fleet.requests(0)[:num_rows])[0] for name in names}
    speeds = _in_turn(
        {name: fleet[name].roll_out for name in names},
        lambda lap: fleet.requests(300 + lap)[:num_rows],
    )
    for name, speed in speeds.items():
        figures(**{f"step_{name}_{num_rows}_rows_ms": 1e3 * num_rows / speed})
        num_flips, num = parted(rows[name], rows["off"])
        figures(**{f"flips_step_{name}_{num_rows}_rows_per_million": 1e6 * num_flips / num})
        assert num_flips <= (0 if REHEARSAL else MOST_FLIPS * num)


def _in_turn(ways: dict[str, RollOut], requests_of: Callable[[int], list]) -> dict[str, float]:
    """Return the median tokens per second of each way. The first lap is a warm-up."""
    from tests.gpu.local_engine import num_tokens

    speeds = defaultdict(list)
    for lap in range(LAPS + 1):
        requests = requests_of(lap)
        for name, roll_out in ways.items():
            rows, seconds = roll_out(requests)
            if lap:
                speeds[name].append(num_tokens(rows) / seconds)
    return {name: statistics.median(laps) for name, laps in speeds.items()}


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
    from engines.learn.learner import Learner
    from schemas.weights import PolicyWeights
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
    from engines.inference.weights.hand_over import EnginesOfTrainer, HandOver

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
