"""The memory plan of GPUs that engines and trainer use in turn, phase by phase."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import refrain.tasks.run.engines
import refrain.tasks.run.machine
from refrain.engines.actors import RemoteActor
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.gpus.reservation import ReservedGpus
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from refrain.engines.machine.nodes import Nodes
from refrain.engines.machine.plan import Need, memory_needs, require_fits, share_gpu, training_of
from refrain.engines.machine.shared_gpu import SharedGpu
from refrain.engines.machine.trainer_memory import resting_bytes, trainer_footprint
from refrain.engines.pat.memory import CONTEXT_BYTES, NCCL_BYTES, PARKED_BYTES, WORKING_BYTES
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.engines import make_generation
from refrain.tasks.run.gpus import num_devices
from refrain.tasks.run.machine import plan_training
from refrain.tasks.run.preflight import check_ways_of_weights
from tests.conftest import REPOSITORY
from tests.tasks.test_memory_plan import needs, refusal, write_model

PRESETS = REPOSITORY / "infra" / "presets"
PHASES = tuple(f"a shared GPU ({name})" for name in ("generating", "training", "taking weights"))
GENERATING, TRAINING, TAKING_WEIGHTS = PHASES
HANDING_OVER = "a shared GPU (handing over weights)"
IPC = "rollout.weight_sync=ipc"
HOLDER = RemoteActor.of("holder", None)
ONE_H100, ONE_4090 = "1xH100-80GB", "1xRTX4090-24GB"
SMALL_GPU = ("rollout.gpu_memory_utilization=0.9", "trainer.micro_batch_tokens=5120")
"""Changes that the preset recommends for 24 GB."""
TRAINER_PROCESS = CONTEXT_BYTES + NCCL_BYTES


def one_gpu(directory: Path, model: str, *overrides: str, name: str = "one_gpu") -> TrainConfig:
    path = directory / model
    if not path.exists():
        write_model(path, model)
    return load_config(PRESETS / f"{name}.yaml", [f"model.path={path}", *overrides])


def shared(config: TrainConfig, model: str, gpu_bytes: float = 80e9) -> SharedGpu:
    return share_gpu(config, SHAPES[model], gpu_bytes)


@pytest.mark.parametrize(
    ("preset", "gpus"), [("one_gpu", 1), ("shared_8", 8), ("sync", 8), ("pipelined", 8)]
)
def test_each_gpu_of_a_run_is_counted_once(preset: str, gpus: int, tmp_path: Path) -> None:
    """Engines and trainer may share a GPU. Count it once, since throughput is divided by GPUs."""
    assert num_devices(one_gpu(tmp_path, "Qwen3-8B", name=preset)) == gpus


def test_the_presets_fit_the_gpus_that_they_name(tmp_path: Path) -> None:
    for model, changes in (("Qwen3-1.7B", ()), ("Qwen3-8B", ("trainer.lora.rank=32",))):
        planned = needs(one_gpu(tmp_path, model, *changes), ONE_H100)
        assert tuple(planned)[:3] == PHASES
        assert "trainer, whose other" in planned[GENERATING].parts
    eight = needs(one_gpu(tmp_path, "Qwen3-8B", name="shared_8"), "8xH100-80GB")
    assert tuple(eight)[:3] == PHASES
    assert eight["the memory of a node"].bytes > 8 * 12e9


@pytest.mark.parametrize(
    ("model", "overrides", "fits"),
    [
        ("Qwen3-0.6B", (), True),
        ("Qwen3-1.7B", (), False),
        ("Qwen3-1.7B", ("trainer.lora.rank=32",), True),
        ("Qwen3-4B", ("trainer.lora.rank=32",), False),
        ("Qwen3-4B", ("trainer.lora.rank=32", "trainer.dtype=bfloat16"), True),
        ("Qwen3-8B", ("trainer.lora.rank=32", "trainer.dtype=bfloat16"), False),
    ],
)
def test_plan_of_runs_on_24_gb(
    model: str, overrides: tuple[str, ...], fits: bool, tmp_path: Path
) -> None:
    config = one_gpu(tmp_path, model, *SMALL_GPU, *overrides)
    if fits:
        assert needs(config, ONE_4090)
    else:
        assert f"{TRAINING} needs" in refusal(config, ONE_4090)


def test_phases_by_hand(tmp_path: Path) -> None:
    """1.7B parameters on one GPU: with room for engine and trainer state, and without."""
    shape, kv = SHAPES["Qwen3-1.7B"], 20e9
    config = one_gpu(tmp_path, shape.name, f"rollout.kv_cache_bytes={kv:.0f}")
    at_work = trainer_footprint(shape, training_of(config, shape)).bytes
    state = 12 * shape.num_params
    phases = {phase.name: phase.bytes for phase in shared(config, shape.name).phases}
    engine = shape.weight_bytes + WORKING_BYTES
    assert phases == pytest.approx(
        {
            "generating": engine + kv + TRAINER_PROCESS + state,
            "training": at_work + PARKED_BYTES,
            "taking weights": engine + TRAINER_PROCESS + state,
        }
    )
    tight = shared(config, shape.name, 48e9)
    assert tight.state_leaves
    assert tight.phases[0].bytes == pytest.approx(engine + kv + TRAINER_PROCESS)
    assert tight.phases[2].bytes == pytest.approx(engine + TRAINER_PROCESS)


def test_a_state_that_leaves_is_in_host_memory(tmp_path: Path) -> None:
    shape = SHAPES["Qwen3-1.7B"]
    stays = one_gpu(tmp_path, shape.name, "rollout.kv_cache_bytes=20_000_000_000")
    leaves = one_gpu(tmp_path, shape.name, "rollout.kv_cache_bytes=60_000_000_000")
    of_host = [needs(c, ONE_H100)["the memory of a node"].bytes for c in (stays, leaves)]
    assert of_host[1] - of_host[0] == pytest.approx(12 * shape.num_params)


def test_moments_elsewhere_are_counted_once(tmp_path: Path) -> None:
    name = "Qwen3-1.7B"
    here = needs(one_gpu(tmp_path, name), ONE_H100)
    away = needs(one_gpu(tmp_path, name, "trainer.offload_optimizer=true"), ONE_H100)
    host = "the memory of a node"
    assert away[host].bytes == pytest.approx(here[host].bytes)
    assert away[TRAINING].bytes < here[TRAINING].bytes


def test_ranks_share_what_rests() -> None:
    shape: ModelShape = SHAPES["Qwen3-8B"]
    config = TrainConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train": ["t"]}, "trainer": {"num_processes": 8}}
    )
    training = training_of(config, shape)
    assert resting_bytes(shape, training) == 12 * shape.num_params / 8
    with_reference = replace(training, reference_params=shape.num_params, num_replicas=2)
    assert resting_bytes(shape, with_reference) == 16 * shape.num_params / 4


def test_split_gpus_are_planned_as_before(tmp_path: Path) -> None:
    model = "Qwen3-1.7B"
    planned = needs(one_gpu(tmp_path, model, "placement=split"), "2xH100")
    assert list(planned)[:2] == ["the GPU of a trainer rank", "the GPU of an engine"]
    with pytest.raises(ValueError, match="1 GPU"):
        plan_training(one_gpu(tmp_path, model, "placement=split"), "1xH100")


@pytest.mark.parametrize(
    ("model", "gpus", "overrides"),
    [
        ("Qwen3-8B", ONE_H100, ()),
        ("Qwen3-1.7B", ONE_4090, SMALL_GPU),
        ("Qwen3-1.7B", ONE_4090, (*SMALL_GPU, "trainer.dtype=bfloat16")),
        ("Qwen3-4B", ONE_4090, SMALL_GPU),
        ("Qwen3-4B", ONE_4090, (*SMALL_GPU, "trainer.lora.rank=32")),
        ("Qwen3-0.6B", ONE_4090, ()),
    ],
)
def test_each_way_out_that_a_refusal_names_is_one(
    model: str, gpus: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    said = refusal(one_gpu(tmp_path, model, *overrides), gpus)
    ways = said.rsplit("set ", 1)[1].split(" or ")
    for way in ways:
        settings = re.split(" and | with ", way)
        more = next((s.split("=")[1] for s in settings if "num_processes" in s), "1")
        changed = one_gpu(tmp_path, model, *overrides, *settings)
        assert needs(changed, f"{more}{gpus[1:]}"), way
    assert len(ways) <= 3


def test_refusal_names_settings_for_one_gpu(tmp_path: Path) -> None:
    said = refusal(one_gpu(tmp_path, "Qwen3-8B"), ONE_H100)
    assert said.endswith(
        "set trainer.lora.rank=32 or trainer.num_processes=4 with rollout.num_engines=4"
    )
    said = refusal(one_gpu(tmp_path, "Qwen3-4B", *SMALL_GPU), ONE_4090)
    assert "set trainer.lora.rank=32 and trainer.dtype=bfloat16 or" in said


def test_too_little_host_memory_is_refused(tmp_path: Path) -> None:
    config = one_gpu(tmp_path, "Qwen3-1.7B")

    def planned(host_bytes: float) -> tuple[Need, ...]:
        return memory_needs(config, SHAPES["Qwen3-1.7B"], Nodes(1, 1, 80e9, host_bytes), 2)

    require_fits(planned(48e9))
    with pytest.raises(ValueError, match=r"the memory of a node .* 20\.6 GB of the trainer's"):
        require_fits(planned(32e9))


async def test_a_run_does_as_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's state stays if both fit. Engines that start again ask for their own share."""
    total = 80 * 10**9
    reserved = {
        "rollout engine 0": ReservedGpus("n", (0,), total, total, RemoteActor.of("holder", None))
    }

    async def reserve(*_: object) -> dict[str, ReservedGpus]:
        return reserved

    monkeypatch.setattr(refrain.tasks.run.engines, "_reserve", reserve)
    for kv_bytes, leaves, share in ((20e9, False, 0.343), (60e9, True, 0.92), (None, True, 0.92)):
        changes = () if kv_bytes is None else (f"rollout.kv_cache_bytes={kv_bytes:.0f}",)
        config = one_gpu(tmp_path, "Qwen3-1.7B", *changes)
        made = await make_generation(config, None, 0, GpuPlacement(num_gpus=1), print)
        assert made.trainer_leaves is leaves
        (engine,) = made.coordinator._engines.values()
        rollout = engine.engine._config.rollout
        assert rollout.gpu_memory_utilization == pytest.approx(share, abs=0.001)
    # Stand-ins do not know the memory of the GPU.
    reserved["rollout engine 0"] = ReservedGpus("n", (0,), 0, 0, RemoteActor.of("holder", None))
    made = await make_generation(config, None, 0, GpuPlacement(num_gpus=1), print)
    assert made.trainer_leaves


def test_plan_counts_both_copies_of_the_weights(tmp_path: Path) -> None:
    """A model of 1.7B parameters, whose embedding is larger than the buffer."""
    shape = SHAPES["Qwen3-1.7B"]
    by_file = one_gpu(tmp_path, shape.name)
    assert HANDING_OVER not in needs(by_file, ONE_H100)
    planned = needs(one_gpu(tmp_path, shape.name, IPC), ONE_H100)
    embedding = 2 * 151_936 * 2048
    assert planned[HANDING_OVER].bytes == pytest.approx(
        shape.weight_bytes + WORKING_BYTES + TRAINER_PROCESS + 12 * shape.num_params + 5 * embedding
    )
    # An engine that restarts loads weights from the file, as before.
    assert planned[TAKING_WEIGHTS] == needs(by_file, ONE_H100)[TAKING_WEIGHTS]
    assert list(planned)[:4] == [GENERATING, TRAINING, HANDING_OVER, TAKING_WEIGHTS]


def test_both_copies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    changes = (*SMALL_GPU, "trainer.lora.rank=32", "trainer.dtype=bfloat16")
    assert needs(one_gpu(tmp_path, "Qwen3-4B", *changes), ONE_4090)
    said = refusal(one_gpu(tmp_path, "Qwen3-4B", *changes, IPC), ONE_4090)
    assert said.count(" needs ") == 1
    assert f"{HANDING_OVER} needs" in said
    assert said.endswith("set rollout.weight_sync=file")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((IPC, "placement=split"), "on separate ones: set staleness=0 and placement=shared"),
        ((IPC, "placement=auto", "staleness=1"), "on separate ones"),
        ((IPC, "rollout.num_engines=2"), r"\(1\) is less than the engines' 2 GPUs"),
        ((IPC, "rollout.tp_degree=4"), r"set trainer.num_processes=4"),
        ((IPC, "rollout.num_engines=2", "trainer.num_processes=2"), None),
        ((IPC,), None),
        (("placement=split",), None),
    ],
)
def test_weights_stay_on_a_gpu_only_where_both_have_it(
    overrides: tuple[str, ...], said: str | None, tmp_path: Path
) -> None:
    config = one_gpu(tmp_path, "Qwen3-1.7B", *overrides)
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        check_ways_of_weights(config)


async def test_weights_do_not_stay_on_a_gpu_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 0)
    config = one_gpu(tmp_path, "Qwen3-1.7B", IPC)
    with pytest.raises(ValueError, match=r"this machine has no GPU.*set rollout\.weight_sync=file"):
        plan_training(config)
    with pytest.raises(ValueError, match=r"there are no GPUs: set rollout\.weight_sync=file"):
        await make_generation(config, None, 0, GpuPlacement(), print)


async def test_the_trainer_hands_weights_to_the_engines_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of other layouts get nothing: they have no memory for weights at that time."""
    total, gpus = 80 * 10**9, (0, 1)
    reserved = {"pool 0 (pat.gpus_per_node)": ReservedGpus("n", gpus, total, total, HOLDER)}

    async def reserve(*_: object) -> dict[str, ReservedGpus]:
        return reserved

    monkeypatch.setattr(refrain.tasks.run.engines, "_reserve", reserve)
    changes = ("rollout.num_engines=2", "pat.tp_degrees=[2]", "pat.gpus_per_node=2")
    cache = "rollout.kv_cache_bytes=20_000_000_000"
    for way, expected in (("ipc", {0: "actor 0"}), ("file", None)):
        how = f"rollout.weight_sync={way}"
        config = one_gpu(tmp_path, "Qwen3-1.7B", *changes, cache, how)
        made = await make_generation(config, None, 0, GpuPlacement(num_gpus=2), print)
        for index, tracked in made.coordinator._engines.items():
            if index != 1:
                tracked.engine._actor = RemoteActor.of("one", f"actor {index}")
        handed = made.hand_over()
        assert (handed and dict(handed.engines)) == expected
