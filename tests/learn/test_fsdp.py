"""Two trainer processes with FSDP2 over gloo do what one process does."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from engines.learn.learner import Learner
from engines.learn.packing import TokenSequence, pack
from engines.learn.policy import load_policy
from schemas.config import TrainConfig
from tests.learn.conftest import make_batch

pytestmark = pytest.mark.engine

ALGORITHMS = (
    {"kl_coefficient": 0.1, "loss_aggregation": "sequence_mean"},
    {"type": "gspo", "clip_low": 0.2, "clip_high": 0.2},
)


def train(config: TrainConfig, rank: int, world_size: int, start: Path | None) -> dict:
    """Two steps and a checkpoint, or one step from a checkpoint."""
    learner = Learner(config, rank, world_size)
    learner.restore(start)
    seeds = (0, 1) if start is None else (2,)
    # Nine samples, cut small: the ranks need different numbers of passes.
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


def run_rank(rank: int, config: TrainConfig, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    first = train(config, rank, 2, None)
    resumed = [train(config, rank, 2, first["path"]) for _ in range(2)]
    torch.save([first, *resumed], f"{rendezvous}.rank{rank}")
    dist.destroy_process_group()


def train_on_two(config: TrainConfig, rendezvous: Path) -> list[tuple[dict, dict]]:
    """What both ranks had at the end of a run, and of two continuations of it."""
    mp.spawn(run_rank, args=(config, rendezvous), nprocs=2)
    ranks = [torch.load(f"{rendezvous}.rank{rank}", weights_only=False) for rank in range(2)]
    return list(zip(*ranks, strict=True))


def assert_same(two: tuple[dict, dict], one: dict) -> None:
    assert two[0]["metrics"] == two[1]["metrics"]
    for mine, expected in zip(two[0]["metrics"], one["metrics"], strict=True):
        assert mine == pytest.approx(expected, abs=1e-4)
    weights = safetensors.torch.load(two[0]["weights"])
    expected = safetensors.torch.load(one["weights"])
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0.0)
    for mine, canary in zip(two[0]["canaries"], one["canaries"], strict=True):
        assert mine.token_ids == canary.token_ids
        assert mine.trainer_logprobs == pytest.approx(canary.trainer_logprobs, abs=1e-3)


def largest_move(result: dict, config: TrainConfig) -> float:
    before = safetensors.torch.load_file(config.model.path / "model.safetensors")
    after = safetensors.torch.load(result["weights"])
    return max(float((after[name] - before[name]).abs().max()) for name in before)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["grpo", "gspo"])
def test_two_processes_update_as_one_and_checkpoints_fit_both(
    make_config: Callable[..., TrainConfig], tmp_path: Path, algorithm: dict
) -> None:
    # Adam turns rounding noise in a gradient near zero into a step of up to the learning rate.
    config = make_config(
        algorithm, micro_batch_tokens=64, minibatches_per_step=2, learning_rate=3e-5
    )
    alone = train(config.model_copy(update={"name": "one"}), 0, 1, None)
    together = config.model_copy(update={"name": "two"})
    first, resumed, again = train_on_two(together, tmp_path / "rendezvous")
    assert_same(first, alone)
    assert first[1]["weights"] == b""
    assert largest_move(first[0], config) > 5e-5  # far more than the tolerance
    assert resumed[0]["weights"] == again[0]["weights"]
    assert_same(resumed, train(config, 0, 1, first[0]["path"]))


def watch_layers(rank: int, model_dir: Path, rendezvous: Path) -> None:
    """What is whole, and of which type, while each layer is at work."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    policy = load_policy(
        model_dir,
        device=torch.device("cpu"),
        mesh=init_device_mesh("cpu", (2,)),
        gradient_checkpointing=False,
        compute_dtype=torch.bfloat16,
    )
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


def test_no_layer_keeps_a_copy_in_the_data_type_that_is_computed_in(
    model_dir: Path, tmp_path: Path
) -> None:
    mp.spawn(watch_layers, args=(model_dir, tmp_path / "meet"), nprocs=2)
    seen, gradients, stored = torch.load(f"{tmp_path / 'meet'}.rank0", weights_only=False)
    assert set(seen) == {(1, torch.bfloat16)}
    assert len(seen) == 3 * 2
    assert (gradients, stored) == ({torch.float32}, torch.float32)
