"""Ranks that share each row of tokens compute what one rank computes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from refrain.engines.draft_head.files import save
from refrain.engines.draft_head.model import DraftHead
from refrain.engines.learn.context import ContextGroup, RowSplit, share_rows
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.packing import MicroBatch, TokenSequence, lay_out, pack
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.rollouts import read_rollouts
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import SpecActorConfig
from tests.learn.conftest import VOCAB_SIZE, make_batch, started
from tests.learn.test_attention import model_of

SLOW = pytest.mark.slow
BUDGET = 32
"""Tokens of a rank. The longest sample of the batch has more."""
EVERY_PASS: dict[str, Any] = {
    "kl_coefficient": 0.1,
    "reward_kl_coefficient": 0.1,
    "entropy_coefficient": 0.01,
    "tis_cap": 2.0,
}
"""The policy, the reference and the old policy score the samples."""
BY_SEQUENCE = {"type": "gspo", "clip_low": 0.2, "clip_high": 0.2}
"""One ratio for a whole response, whose tokens are on several ranks."""


def one_step(
    config: TrainConfig, rank: int = 0, world_size: int = 1, fault: str | None = None
) -> dict[str, Any]:
    """Train a step. Return metrics, the last update's gradients, new weights, canaries and head."""
    learner = Learner(config, rank, world_size)
    learner.restore(None)
    RowSplit.own = FAULTS[fault] if fault else OWN
    batch = make_batch(3, num_groups=3, group_size=3)
    metrics = learner.train_step(batch)
    named = dict(learner._policy.model.named_parameters())
    head = learner.head.training.tensors() if learner.head else []
    return {
        "metrics": metrics,
        "gradients": {name: whole(one.grad) for name, one in named.items()},
        "weights": {name: whole(one.detach()) for name, one in named.items()},
        "canaries": [one.trainer_logprobs for one in learner.canaries()],
        "head": [one.detach().clone() for one in head],
    }


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


OWN = RowSplit.own


def rolled(self: RowSplit, batch: MicroBatch) -> MicroBatch:
    """Take the token after the border from this rank's own part, as a shift of the part would."""
    part = OWN(self, batch)
    targets = part.targets.copy()
    targets[-1:] = part.input_ids[0]
    return replace(part, targets=targets)


def restarted(self: RowSplit, batch: MicroBatch) -> MicroBatch:
    """Count positions from the border."""
    part = OWN(self, batch)
    return replace(part, position_ids=part.position_ids - part.position_ids[0])


FAULTS = {"rolled": rolled, "restarted": restarted}


def run_rank(rank: int, config: TrainConfig, world_size: int, meet: Path, faulty: bool) -> None:
    torch.set_num_threads(1)
    init = {"init_method": f"file://{meet}", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **init)
    found = {"right": one_step(config, rank, world_size)}
    for name in FAULTS if faulty else ():
        found[name] = one_step(config, rank, world_size, name)
        with pytest.raises(ValueError, match="computes other values when 2 ranks share a row"):
            Learner(config, rank, world_size).restore(None)
        RowSplit.own = OWN
    torch.save(found, f"{meet}.rank{rank}")
    dist.destroy_process_group()


def configs(
    make_config: Callable[..., TrainConfig], tmp_path: Path, algorithm: dict, **trainer: Any
) -> tuple[TrainConfig, TrainConfig]:
    """Return the settings of one process and those of ranks that share rows of the same size."""
    save(DraftHead(64), tmp_path / "head", vocab_size=VOCAB_SIZE, window=3)
    more = {"specactor": SpecActorConfig(head=tmp_path / "head", train_head=True)}
    given = {"minibatches_per_step": 2, "max_grad_norm": 1e9, "learning_rate": 1e-5}
    together = make_config(algorithm, micro_batch_tokens=BUDGET, **given, **trainer)
    alone = make_config(algorithm, micro_batch_tokens=together.trainer.row_tokens, **given)
    return alone.model_copy(update=more), together.model_copy(update=more)


def largest(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of each kind of result; of gradients as a share of the
    largest gradient."""
    scale = max(float(one.abs().max()) for one in expected["gradients"].values())
    pairs = {
        "metrics": [(list(one["metrics"].values()),) for one in (found, expected)],
        "gradients": [[g / scale for g in one["gradients"].values()] for one in (found, expected)],
        "weights": [list(one["weights"].values()) for one in (found, expected)],
        "canaries": [one["canaries"] for one in (found, expected)],
        "head": [one["head"] for one in (found, expected)],
    }
    return {
        name: max(
            float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max())
            for a, b in zip(*pair, strict=True)
        )
        for name, pair in pairs.items()
    }


CASES = {
    "every pass": (EVERY_PASS, {"num_processes": 2, "context_parallel": 2}),
    "one ratio a response": (BY_SEQUENCE, {"num_processes": 2, "context_parallel": 2}),
    "two groups": (EVERY_PASS, {"num_processes": 4, "context_parallel": 2}),
    "two groups and replicas": (
        EVERY_PASS,
        {"num_processes": 4, "context_parallel": 2, "num_replicas": 2, "passes_per_step": 2},
    ),
}


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", [*list(CASES)[:1], *(pytest.param(name, marks=SLOW) for name in list(CASES)[1:])]
)
def test_ranks_that_share_rows_update_as_one(
    make_config: Callable[..., TrainConfig], tmp_path: Path, name: str
) -> None:
    algorithm, trainer = CASES[name]
    num_ranks, faulty = trainer["num_processes"], name == "every pass"
    config, together = configs(make_config, tmp_path, algorithm, **trainer)
    assert max(one.num_input_tokens for one in read_rollouts(make_batch(3, 3, 3))) > BUDGET
    if "passes_per_step" in trainer:
        passes = {"passes_per_step": trainer["passes_per_step"]}
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update=passes)})
    expected = one_step(config)
    mp.spawn(run_rank, args=(together, num_ranks, tmp_path / "meet", faulty), nprocs=num_ranks)
    files = [tmp_path / f"meet.rank{rank}" for rank in range(num_ranks)]
    ranks = [torch.load(file, weights_only=False) for file in files]
    assert all(one["right"]["metrics"] == ranks[0]["right"]["metrics"] for one in ranks)
    found = largest(ranks[0]["right"], expected)
    print(name, found)
    assert ranks[0]["right"]["metrics"] == pytest.approx(expected["metrics"], abs=1e-5, rel=1e-5)
    assert found["weights"] <= 1e-6
    assert found["gradients"] <= 1e-6
    assert found["canaries"] <= 1e-5
    assert found["head"] <= 1e-6
    for fault in FAULTS if faulty else ():
        wrong = largest(ranks[0][fault], expected)
        print(fault, wrong)
        assert wrong["gradients"] > 1e-3
        assert wrong["canaries"] > 1e-3
