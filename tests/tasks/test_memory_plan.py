"""The memory plan of a run. A run that does not fit is refused with the setting to change."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import refrain.tasks.run.machine
from refrain.benchmarks.memory import qwen3_config
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.machine.nodes import Nodes, parse_nodes
from refrain.engines.machine.plan import Need, memory_needs, require_fits
from refrain.engines.pat.memory import WORKING_BYTES
from refrain.flows.cli import main
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import DEVICE_INDEX_BYTES
from refrain.tasks.run.machine import plan_training
from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import write_config

PRESETS = {
    name: REPOSITORY / "infra" / "presets" / f"{name}.yaml" for name in ("sync", "pipelined")
}
H100S = "8xH100-80GB"
GIB = 2**30


@pytest.fixture(name="model")
def an_8b_model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "8b", "Qwen3-8B")


def write_model(directory: Path, name: str) -> Path:
    """Write a model directory without weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(qwen3_config(SHAPES[name])))
    return directory


def readme_example(directory: Path) -> Path:
    text = (REPOSITORY / "README.md").read_text()
    (example,) = re.findall(r"```yaml\n(# my\.yaml.*?)```", text, re.DOTALL)
    path = directory / "my.yaml"
    path.write_text(example)
    return path


def preset(model: Path, *overrides: str, name: str = "sync") -> TrainConfig:
    return load_config(PRESETS[name], [f"model.path={model}", *overrides])


def needs(config: TrainConfig, gpus: str = H100S) -> dict[str, Need]:
    return {need.place: need for need in plan_training(config, gpus).needs}


def refusal(config: TrainConfig, gpus: str = H100S) -> str:
    with pytest.raises(ValueError, match=r"does not fit|no room") as error:
        plan_training(config, gpus)
    return str(error.value)


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_fit_on_the_machine_that_they_name(name: str, model: Path) -> None:
    planned = needs(preset(model, name=name))
    assert planned["the GPU of a trainer rank"].bytes < 72e9
    assert planned["the GPU of an engine"].usable_bytes == 0.95 * 80e9


def test_the_example_of_the_readme_fits(tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", "Qwen3-1.7B")
    config = load_config(readme_example(tmp_path), [f"model.path={small}"])
    assert "the disk of checkpoints" in needs(config, "1xH100-80GB")


@pytest.mark.parametrize("name", PRESETS)
def test_the_cluster_has_room_for_the_presets(name: str, model: Path) -> None:
    """The cluster's files name no GPU model. Assume 80 GB, as the presets do."""
    files = REPOSITORY / "infra" / "cluster" / "kubernetes"
    (ray,) = yaml.safe_load_all((files / "ray.yaml").read_text())
    workers = ray["spec"]["workerGroupSpecs"][0]
    pod = workers["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    (shm,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shared-memory")
    disk = next(yaml.safe_load_all((files / "storage.yaml").read_text()))
    nodes = Nodes(
        num_nodes=workers["replicas"],
        num_gpus=int(limits["nvidia.com/gpu"]),
        gpu_bytes=80e9,
        host_bytes=_bytes(limits["memory"]),
        shm_bytes=_bytes(shm["sizeLimit"]),
        disk_bytes=_bytes(disk["spec"]["resources"]["requests"]["storage"]),
    )
    planned = memory_needs(preset(model, name=name), SHAPES["Qwen3-8B"], nodes, nodes.num_gpus)
    require_fits(planned)
    assert all(need.usable_bytes for need in planned)
    with pytest.raises(ValueError, match=r"/dev/shm of a node needs .* that can be used"):
        require_fits(_with_shm(planned, 8e9))


def _bytes(quantity: str) -> int:
    units = {"Gi": GIB, "Ti": 1024 * GIB}
    return int(quantity[:-2]) * units[quantity[-2:]]


def _with_shm(planned: Any, room: float) -> list[Need]:
    return [
        Need(n.place, n.bytes, room if "/dev/shm" in n.place else None, n.parts, n.fix)
        for n in planned
    ]


@pytest.mark.parametrize(
    ("overrides", "gpus", "place", "fix"),
    [
        (
            ["trainer.gradient_checkpointing=false"],
            H100S,
            "the GPU of a trainer rank",
            "trainer.gradient_checkpointing=true",
        ),
        (
            ["trainer.num_processes=2"],
            H100S,
            "the GPU of a trainer rank",
            r"set trainer\.offload_optimizer=true or trainer\.num_processes=4$",
        ),
        (
            ["trainer.micro_batch_tokens=100000"],
            H100S,
            "the GPU of a trainer rank",
            r"set trainer\.micro_batch_tokens=9216 or trainer\.num_processes=16$",
        ),
        ([], "8xL4-20GB", "the GPU of an engine", "raise rollout.tp_degree"),
        (
            ["rollout.kv_cache_bytes=70_000_000_000"],
            H100S,
            "the GPU of an engine",
            "lower rollout.kv_cache_bytes",
        ),
    ],
)
def test_run_that_does_not_fit_names_the_setting(
    overrides: list[str], gpus: str, place: str, fix: str, model: Path
) -> None:
    said = refusal(preset(model, *overrides), gpus)
    assert re.search(rf"{place} needs \d+\.\d GB of the \d+\.\d GB that can be used", said)
    assert re.search(fix, said), said


def test_proposed_settings_fit(model: Path) -> None:
    few = "trainer.num_processes=2"
    for proposed in refusal(preset(model, few)).rsplit("set ", 1)[1].split(" or "):
        assert needs(preset(model, few, proposed))
    huge = preset(model, "trainer.num_processes=1", "trainer.gradient_checkpointing=false")
    said = refusal(huge, "16xH100-40GB").rsplit("set ", 1)[1].split(",")[0]
    assert " and " in said
    assert needs(preset(model, *said.split(" and ")), "32xH100-40GB")


def test_a_teacher_that_does_not_fit_may_be_on_a_server(model: Path) -> None:
    said = refusal(preset(model, f"algorithm.teacher={model}"), "8xH100-57GB")
    assert "algorithm.teacher_server in place of algorithm.teacher" in said


def test_ranks_share_rows_of_samples_that_no_rank_can_hold(model: Path) -> None:
    long = ("data.max_response_tokens=200000", "trainer.micro_batch_tokens=210000")
    said = refusal(preset(model, *long))
    fix = "trainer.context_parallel=4 and trainer.micro_batch_tokens=50256"
    assert said.endswith(f": set {fix}")
    place = "the GPU of a trainer rank"
    shared = needs(preset(model, *long, *fix.split(" and ")))
    assert "4 ranks share a row of 201,024 tokens" in shared[place].parts
    turns = needs(preset(model, "placement=shared", "trainer.context_parallel=2"))
    assert "2 ranks share a row of" in turns["a shared GPU (training)"].parts
    assert "share a row" not in needs(preset(model))[place].parts


def test_adapters_and_moments_elsewhere_leave_room(model: Path) -> None:
    few = "trainer.num_processes=2"
    refusal(preset(model, few))
    lora = needs(preset(model, "trainer.num_processes=1", 'trainer.lora={"rank": 32}'))
    # The weights in float32 are still on the GPU.
    assert 33e9 < lora["the GPU of a trainer rank"].bytes < 60e9
    away = needs(preset(model, few, "trainer.offload_optimizer=true"))
    here = needs(preset(model, "trainer.num_processes=4"))
    moved = away["the memory of a node"].bytes - here["the memory of a node"].bytes
    assert moved == pytest.approx(8 * SHAPES["Qwen3-8B"].num_params, rel=0.2)


def test_a_32b_model_wants_two_nodes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "32b", "Qwen3-32B")
    large = preset(model, "rollout.tp_degree=4", "trainer.num_processes=16")
    assert "no room" in refusal(large, H100S)
    assert needs(large, "4x8xH100-80GB")
    alone = preset(model, "trainer.num_processes=16")
    assert "the GPU of an engine" in refusal(alone, "32xA100-64GB")


def test_engines_of_several_layouts_and_drafters_are_planned(model: Path) -> None:
    layouts = ["pat.tp_degrees=[2]", "rollout.kv_cache_bytes=30_000_000_000"]
    alone = needs(preset(model, layouts[1]))["the GPU of an engine"]
    both = needs(preset(model, *layouts))["the GPU of an engine"]
    assert both.bytes > alone.bytes + SHAPES["Qwen3-8B"].weight_bytes / 2
    # With a larger cache, there is no room for the weights of parked engines.
    layouts[1] = "rollout.kv_cache_bytes=50_000_000_000"
    reloaded = needs(preset(model, *layouts))["the GPU of an engine"]
    assert reloaded.bytes - 20e9 < both.bytes - 8e9
    with pytest.raises(ValueError, match=r"rollout\.kv_cache_bytes is not set"):
        needs(preset(model, layouts[0]))


def test_a_drafter_has_its_gpu_and_room_for_a_sample_at_least(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = f'specactor.draft_models=[{{"name": "small", "path": "{model}"}}]'
    own = SHAPES["Qwen3-8B"]
    drafter = needs(preset(model, small), "9xH100")["the GPU of drafter small"]
    sample = 9216 * own.kv_bytes_per_token
    assert drafter.bytes == pytest.approx(own.weight_bytes + WORKING_BYTES + sample)
    assert drafter.usable_bytes == 0.9 * 80e9
    held = (0.9 * 80e9 - own.weight_bytes - WORKING_BYTES) / sample
    assert f"its cache holds {held:,.1f} samples of 9216 tokens" in drafter.parts
    monkeypatch.setattr("refrain.engines.machine.plan.DRAFTER_MEMORY_SHARE", 0.2)
    said = refusal(preset(model, small), "9xH100")
    assert "the GPU of drafter small needs 21.7 GB of the 16.0 GB" in said
    assert "take a smaller draft model" in said


def test_small_drafter_cache_is_reported(model: Path) -> None:
    """Four engines run 256 requests each; the drafter's cache holds only 80 of them."""
    models = 'specactor.draft_models=[{"name": "small", "path": "%s", "num_engines": %d}]'
    own = SHAPES["Qwen3-8B"]
    halfway = 1024 + 8192 / 2
    held = int((0.9 * 80e9 - own.weight_bytes - WORKING_BYTES) / own.kv_bytes_per_token / halfway)

    def says(num_processes: int, *overrides: str) -> str:
        config = preset(model, models % (model, num_processes), *overrides)
        return plan_training(config, "16xH100").says

    few = ("prompts_per_step=4", "rollout.group_size=16")
    assert "Drafter" not in says(1, *few)
    assert 32 < held < 128
    more = ("prompts_per_step=8", "rollout.group_size=16")
    told = says(1, *more)
    assert f"Drafter small has memory for {held} of the 128 responses" in told
    assert "once they have 5,120 tokens" in told
    (enough,) = re.findall(r"its num_engines=(\d+) would be enough", told)
    assert "Drafter" not in says(int(enough), *more)
    assert "Drafter" in says(int(enough) - 1, *more)
    assert "a smaller draft model would be enough" in says(4, "prompts_per_step=512")


def test_an_engine_has_room_for_one_sample_at_least(model: Path) -> None:
    tight = preset(model, "rollout.gpu_memory_utilization=0.2")
    engine = needs(tight)["the GPU of an engine"]
    assert engine.bytes > 0.2 * 80e9
    assert "its cache holds 1.0 samples of 9216 tokens" in engine.parts


def test_drafts_on_the_device_take_memory_beside_vllms(model: Path) -> None:
    """Their indexes are not in vLLM's share. `v1` drafts on the host."""

    def engine(*changes: str) -> Need:
        return needs(preset(model, *changes))["the GPU of an engine"]

    v1, v2 = engine(), engine("rollout.model_runner=v2")
    assert v2.bytes - v1.bytes == DEVICE_INDEX_BYTES
    assert "0.5 GB of history indexes" in v2.parts
    assert engine("rollout.model_runner=v2", "drafting.enabled=false").bytes == v1.bytes
    full = ("rollout.gpu_memory_utilization=0.95", "rollout.model_runner=v2")
    assert engine(full[0]).fits
    assert "set rollout.gpu_memory_utilization=0.94" in refusal(preset(model, *full))


def test_checkpoints_are_counted_with_the_one_that_is_written(model: Path) -> None:
    disk = needs(preset(model, "trainer.keep_checkpoints=3"))["the disk of checkpoints"]
    assert disk.bytes == pytest.approx(4 * 14 * 8.19e9, rel=1e-3)


def test_machines_by_name() -> None:
    assert parse_nodes("2x8xH100-80GB") == Nodes(2, 8, 80e9)
    assert parse_nodes("16xh200") == Nodes(1, 16, 141e9)
    assert parse_nodes("4xMI300X-192GB") == Nodes(1, 4, 192e9)
    for text in ("H100", "8x", "8xMI300X", "0xH100", "8xH100-0GB", "8xH100-80"):
        with pytest.raises(ValueError, match="--gpus"):
            parse_nodes(text)


def test_the_command_line_prints_the_plan_of_a_named_machine(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    done = CliRunner().invoke(main, ["train", str(path), "--check", "--gpus", H100S])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"Planned for {H100S}."
    assert "a shared GPU (training)" in done.output
    done = CliRunner().invoke(main, ["train", str(path), "--gpus", H100S])
    assert (done.exit_code, "with --check only" in done.output) == (2, True)


def test_this_machine_is_planned_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 8)
    monkeypatch.setattr(refrain.tasks.run.machine, "gpu_memory", lambda: 80e9)
    monkeypatch.setattr(refrain.tasks.run.machine, "host_memory", lambda: (512e9, 500e9))
    config = load_config(write_config(tmp_path), ["placement=split"])
    plan = plan_training(config)
    assert len(plan.needs) == 5
    assert all(need.usable_bytes for need in plan.needs)
    monkeypatch.setattr(refrain.tasks.run.machine, "gpu_memory", lambda: 4e9)
    with pytest.raises(ValueError, match="the GPU of an engine needs"):
        refrain.tasks.run.machine.plan_training(config)


def test_the_demo_is_planned_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 0)
    assert (DEMO / "model").is_dir()
    plan = plan_training(load_config(write_config(tmp_path), []))
    assert [need.place for need in plan.needs] == [
        "the memory of this machine",
        "the disk of checkpoints",
    ]
    monkeypatch.setattr(refrain.tasks.run.machine, "_disk_bytes", lambda _: 0.0)
    with pytest.raises(ValueError, match=r"lower trainer\.keep_checkpoints"):
        plan_training(load_config(write_config(tmp_path), []))
