"""Several trainer processes with FSDP2 over gloo compute the same as one process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.checksums import sha256_of_all
from refrain.engines.draft_head.files import save
from refrain.engines.draft_head.model import DraftHead
from refrain.engines.learn import training_state
from refrain.engines.learn.checkpoint import MODEL_DIR
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import SpecActorConfig
from refrain.schemas.inputs import ModelConfig
from tests.learn.conftest import VOCAB_SIZE, make_batch
from tests.learn.test_attention import SHAPES, SMALL
from tests.learn.test_export import assert_as_it_came_in

pytestmark = pytest.mark.engine

SLOW = pytest.mark.slow
ALGORITHMS = (
    {"kl_coefficient": 0.1, "reward_kl_coefficient": 0.1, "loss_aggregation": "sequence_mean"},
    {"type": "gspo", "clip_low": 0.2, "clip_high": 0.2},
)


def train(config: TrainConfig, rank: int, world_size: int, start: Path | None) -> dict:
    """Train two steps, or one step from the checkpoint `start`. Then save a checkpoint."""
    learner = Learner(config, rank, world_size)
    learner.restore(start)
    seeds = (0, 1) if start is None else (2,)
    # Nine samples in small micro-batches: the ranks need different numbers of passes.
    metrics = [
        learner.train_step(make_batch(seed, num_groups=3, group_size=3, policy_version=seed))
        for seed in seeds
    ]
    return {
        "metrics": metrics,
        "weights": learner.weights_buffer(),
        "canaries": learner.canaries(),
        "path": learner.save(learner.policy_version, {"at": len(seeds)}),
    }


def run_rank(
    rank: int, config: TrainConfig, world_size: int, start: Path | None, rendezvous: Path
) -> None:
    torch.set_num_threads(1)
    init = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **init)
    first = train(config, rank, world_size, start)
    again = [] if start else [train(config, rank, world_size, first["path"]) for _ in range(2)]
    torch.save([first, *again], f"{rendezvous}.rank{rank}")
    dist.destroy_process_group()


def train_on(
    world_size: int, config: TrainConfig, rendezvous: Path, start: Path | None = None
) -> list[tuple[dict, ...]]:
    """Return the results of each rank: of a run and of two continuations of its checkpoint. With
    `start`: of one continuation of `start`."""
    mp.spawn(run_rank, args=(config, world_size, start, rendezvous), nprocs=world_size)
    files = [f"{rendezvous}.rank{rank}" for rank in range(world_size)]
    ranks = [torch.load(file, weights_only=False) for file in files]
    return list(zip(*ranks, strict=True))


def assert_same(ranks: tuple[dict, ...], one: dict) -> None:
    assert all(other["metrics"] == ranks[0]["metrics"] for other in ranks)
    for mine, expected in zip(ranks[0]["metrics"], one["metrics"], strict=True):
        assert mine == pytest.approx(expected, abs=1e-4)
    weights = safetensors.torch.load(ranks[0]["weights"])
    expected = safetensors.torch.load(one["weights"])
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0.0)
    for mine, canary in zip(ranks[0]["canaries"], one["canaries"], strict=True):
        assert mine.token_ids == canary.token_ids
        assert mine.trainer_logprobs == pytest.approx(canary.trainer_logprobs, abs=1e-3)


def largest_move(result: dict, config: TrainConfig) -> float:
    before = safetensors.torch.load_file(config.model.path / "model.safetensors")
    after = safetensors.torch.load(result["weights"])
    return max(float((after[name] - before[name]).abs().max()) for name in before)


def make_run(make_config: Callable[..., TrainConfig], name: str, **given: Any) -> TrainConfig:
    # Adam turns rounding noise in a gradient near zero into a step of up to the learning rate.
    trainer = {"micro_batch_tokens": 64, "minibatches_per_step": 2, "learning_rate": 3e-5}
    config = make_config(given.pop("algorithm", None), **trainer | given)
    return config.model_copy(update={"name": name})


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(ALGORITHMS[0], id="grpo"), pytest.param(ALGORITHMS[1], id="gspo", marks=SLOW)],
)
def test_processes_update_as_one_and_checkpoints_fit_any_number(
    make_config: Callable[..., TrainConfig], tmp_path: Path, algorithm: dict
) -> None:
    config = make_run(make_config, "one", algorithm=algorithm)
    alone = train(config, 0, 1, None)
    together = make_run(make_config, "two", algorithm=algorithm)
    first, resumed, again = train_on(2, together, tmp_path / "two")
    assert_same(first, alone)
    for result in (*first, alone):
        assert_as_it_came_in(config.model.path, result["path"] / MODEL_DIR)
    assert first[1]["weights"] == b""
    assert largest_move(first[0], config) > 5e-5  # Far more than the tolerance.
    assert resumed[0]["weights"] == again[0]["weights"]
    assert_same(resumed, train(config, 0, 1, first[0]["path"]))
    if algorithm is ALGORITHMS[0]:
        (on_three,) = train_on(3, together, tmp_path / "three", first[0]["path"])
        assert_same(on_three, train(config, 0, 1, alone["path"]))


OTHERS = {
    "two replicas": (4, {"num_processes": 4, "num_replicas": 2}),
    "moments in host memory": (2, {"offload_optimizer": True}),
    "adapters": (2, {"lora": {"rank": 4}, "learning_rate": 3e-4}),
}
"""Number of processes, and settings that must not change the update."""


@pytest.mark.parametrize(
    "name", [*list(OTHERS)[:1], *(pytest.param(name, marks=SLOW) for name in list(OTHERS)[1:])]
)
def test_ways_to_save_memory_change_no_update(
    make_config: Callable[..., TrainConfig], tmp_path: Path, name: str
) -> None:
    world_size, given = OTHERS[name]
    algorithm = ALGORITHMS[0]
    plain = {setting: given[setting] for setting in ("lora", "learning_rate") if setting in given}
    head = DraftHead(64, torch.arange(VOCAB_SIZE))
    save(head, tmp_path / "head", vocab_size=VOCAB_SIZE, window=3)
    specactor = SpecActorConfig(head=tmp_path / "head", train_head=True)
    config, together = (
        make_run(make_config, name, algorithm=algorithm, **own).model_copy(
            update={"specactor": specactor}
        )
        for name, own in (("alone", plain), ("together", given))
    )
    alone = train(config, 0, 1, None)
    first, resumed, _ = train_on(world_size, together, tmp_path / "meet")
    assert_same(first, alone)
    assert_same(resumed, train(config, 0, 1, alone["path"]))


@pytest.mark.slow
def test_adapters_of_experts_and_ends_are_trained_sharded_as_in_one_process(
    make_config: Callable[..., TrainConfig], model_dir: Path, tmp_path: Path
) -> None:
    start = Path(shutil.copytree(model_dir, tmp_path / "start"))
    config = AutoConfig.for_model("qwen3_moe", **SMALL | SHAPES["qwen3_moe"])
    AutoModelForCausalLM.from_config(config).save_pretrained(start)
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj", "gate", "embed_tokens", "lm_head")
    given = {"lora": {"rank": 4, "target_modules": targets}, "learning_rate": 3e-4}
    alone, together = (
        make_run(make_config, name, **given).model_copy(
            update={"model": ModelConfig(path=start, dtype="float32")}
        )
        for name in ("alone", "together")
    )
    expected = train(alone, 0, 1, None)
    first, resumed, _ = train_on(2, together, tmp_path / "meet")
    assert_same(first, expected)
    assert_same(resumed, train(alone, 0, 1, expected["path"]))
    files = [one["path"] / "adapter" / "adapter_model.safetensors" for one in (first[0], expected)]
    found, due = map(safetensors.torch.load_file, files)
    torch.testing.assert_close(found, due, atol=1e-5, rtol=0.0)


def load_shards(rank: int, model_dir: Path, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    policy = load_policy(model_dir, Loading(torch.device("cpu"), init_device_mesh("cpu", (2,))))
    assert all(isinstance(one, DTensor) for one in policy.parameters())
    whole = {name: one.full_tensor() for name, one in policy.model.named_parameters()}
    buffers = {name: one.clone() for name, one in policy.model.named_buffers()}
    torch.save(whole | buffers, f"{rendezvous}.rank{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "kind",
    ["qwen3_moe", *(pytest.param(kind, marks=SLOW) for kind in ("llama", "qwen3", "gemma2"))],
)
def test_each_rank_reads_its_own_share(tmp_path: Path, kind: str) -> None:
    """Covers tied and untied weights, buffers that are in no file, and experts, which the files
    hold one by one."""
    tied = {"tie_word_embeddings": kind != "llama"}
    config = AutoConfig.for_model(kind, **SMALL | SHAPES[kind] | tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    mp.spawn(load_shards, args=(tmp_path / "model", tmp_path / "meet"), nprocs=2)
    alone = load_policy(tmp_path / "model", Loading(torch.device("cpu"))).model
    expected = dict(alone.named_parameters()) | dict(alone.named_buffers())
    for rank in range(2):
        found = torch.load(f"{tmp_path / 'meet'}.rank{rank}")
        torch.testing.assert_close(found, expected, atol=0.0, rtol=0.0)


def watch_layers(rank: int, model_dir: Path, rendezvous: Path) -> None:
    """Record, while each layer computes, how many layers are gathered and in which data type."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    loading = Loading(torch.device("cpu"), mesh, compute_dtype=torch.bfloat16)
    policy = load_policy(model_dir, loading)
    layers = policy.model.get_decoder().layers
    seen: list[tuple[int, torch.dtype]] = []

    def look(attention: torch.nn.Module, *_: object) -> None:
        whole = [one for one in layers if not isinstance(weight_of(one), DTensor)]
        seen.append((len(whole), attention.q_proj.weight.dtype))

    for layer in layers:
        layer.self_attn.register_forward_hook(look)
    for batch in pack([TokenSequence(np.arange(1, 40, dtype=np.int32), 5)] * 3, 60):
        policy.score(batch, temperature=1.0).logprobs.sum().backward()
    gradients = {weight_of(layer).grad.dtype for layer in layers}
    torch.save((seen, gradients, weight_of(layers[0]).dtype), f"{rendezvous}.rank{rank}")
    dist.destroy_process_group()


def weight_of(layer: torch.nn.Module) -> torch.Tensor:
    return layer.self_attn.q_proj.weight


def test_layers_keep_no_copy_in_compute_dtype(model_dir: Path, tmp_path: Path) -> None:
    mp.spawn(watch_layers, args=(model_dir, tmp_path / "meet"), nprocs=2)
    seen, gradients, stored = torch.load(f"{tmp_path / 'meet'}.rank0", weights_only=False)
    assert set(seen) == {(1, torch.bfloat16)}
    assert len(seen) == 3 * 2
    assert (gradients, stored) == ({torch.float32}, torch.float32)


def save_and_load(rank: int, model_dir: Path, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    policy = load_policy(model_dir, Loading(torch.device("cpu"), init_device_mesh("cpu", (3,))))
    experts = policy.model.get_decoder().layers[0].mlp.experts.gate_up_proj
    tensors = training_state.trained_tensors(policy, torch.optim.AdamW(policy.parameters()))
    before = {name: tensor.full_tensor().clone() for name, tensor in tensors.items()}
    directory = model_dir.parent / "training"
    written = training_state.write_shards(directory, tensors)
    files = sha256_of_all(directory.iterdir())
    assert written == {file.name: sha256 for file, sha256 in files.items()}
    assert len(written) == 3
    dist.barrier()
    for tensor in tensors.values():
        tensor.fill_(7.0)
    training_state.read_shards(directory, tensors)
    after = {name: tensor.full_tensor() for name, tensor in tensors.items()}
    torch.save((experts.to_local().shape[0], before, after), f"{rendezvous}.rank{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_rank_without_a_share_of_a_tensor_saves_and_loads(tmp_path: Path) -> None:
    """Three ranks share four experts as two, two and none."""
    config = AutoConfig.for_model("qwen3_moe", **SMALL | SHAPES["qwen3_moe"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    mp.spawn(save_and_load, args=(tmp_path / "model", tmp_path / "meet"), nprocs=3)
    ranks = [torch.load(f"{tmp_path / 'meet'}.rank{rank}") for rank in range(3)]
    assert [num_experts for num_experts, _, _ in ranks] == [2, 2, 0]
    for _, before, after in ranks:
        torch.testing.assert_close(after, before, atol=0.0, rtol=0.0)


def test_one_rank_mesh_updates_as_no_mesh(
    make_config: Callable[..., TrainConfig], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a single GPU, the trainer uses a mesh of one rank."""
    plain = make_run(make_config, "plain", algorithm=ALGORITHMS[0])
    without = train(plain, 0, 1, None)
    monkeypatch.setattr("refrain.engines.learn.learner.make_mesh", lambda *_: mesh)
    with_mesh = train(make_run(make_config, "mesh", algorithm=ALGORITHMS[0]), 0, 1, None)
    assert_same((with_mesh,), without)
    resumed = train(plain, 0, 1, with_mesh["path"])
    assert_same((resumed,), train(plain, 0, 1, without["path"]))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_mesh_of_one_computes_in_bfloat16(tmp_path: Path, mesh: DeviceMesh, kind: str) -> None:
    """The trainer does not use autocast: the experts' grouped product would refuse float32 hidden
    states under it."""
    config = AutoConfig.for_model(kind, **SMALL | SHAPES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (batch,) = pack([TokenSequence(np.arange(1, 40, dtype=np.int32), 5)] * 3, 200)
    loading = Loading(torch.device("cpu"), mesh, compute_dtype=torch.bfloat16)
    policy = load_policy(tmp_path, loading)
    found = policy.score(batch, temperature=1.0).logprobs
    found.sum().backward()
    assert {parameter.grad.dtype for parameter in policy.parameters()} == {torch.float32}
    exact = load_policy(tmp_path, Loading(torch.device("cpu"))).score(batch, temperature=1.0)
    difference = (found - exact.logprobs).abs().mean()
    assert 1e-4 < difference < 0.2
