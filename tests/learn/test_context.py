"""Ranks that share each row of tokens compute what one rank computes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.draft_head.files import save
from refrain.engines.draft_head.model import DraftHead
from refrain.engines.learn.compiled import compile_layers
from refrain.engines.learn.context import CARRIES_STATE, ContextGroup, RowSplit, share_rows
from refrain.engines.learn.fidelity import check_fidelity
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.packing import MicroBatch, TokenSequence, lay_out, pack
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.rollouts import read_rollouts
from refrain.engines.learn.row_mask import PACKED
from refrain.engines.learn.sample_isolation import keeps_samples_apart
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import SpecActorConfig
from tests.learn.conftest import VOCAB_SIZE, make_batch
from tests.learn.test_attention import FEATURES, SHAPES, SMALL, model_of

SLOW = pytest.mark.slow
GROUP: Any = None
"""Stands for a process group where nothing is exchanged."""
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
    head = DraftHead(64, torch.arange(VOCAB_SIZE))
    save(head, tmp_path / "head", vocab_size=VOCAB_SIZE, window=3)
    more = {"specactor": SpecActorConfig(head=tmp_path / "head", train_head=True)}
    plain = {"minibatches_per_step": 2, "max_grad_norm": 1e9, "learning_rate": 1e-5}
    together = make_config(algorithm, micro_batch_tokens=BUDGET, **plain, **trainer)
    alone = make_config(algorithm, micro_batch_tokens=together.trainer.row_tokens, **plain)
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
    assert ranks[0]["right"]["metrics"] == pytest.approx(expected["metrics"], abs=1e-5, rel=1e-5)
    assert found["weights"] <= 1e-6
    assert found["gradients"] <= 1e-6
    assert found["canaries"] <= 1e-5
    assert found["head"] <= 1e-6
    for fault in FAULTS if faulty else ():
        wrong = largest(ranks[0][fault], expected)
        assert wrong["gradients"] > 1e-3
        assert wrong["canaries"] > 1e-3


KINDS = ("gpt_oss", "gemma2", "llama4_text", "qwen3_moe", "gpt2", "lfm2")
"""Sinks and a window, soft caps, chunks, experts, learned positions, convolutions."""
CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
UNSCALED = {"attn_temperature_tuning": False}


def compare_kinds(rank: int, meet: Path, kinds: Sequence[str], compiled: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    context = ContextGroup.of(2, timeout_s=60.0)
    found = {kind: compare(kind, context, compiled=compiled) for kind in kinds}
    torch.save(found, f"{meet}.rank{rank}")
    dist.destroy_process_group()


def compare(
    kind: str, context: ContextGroup | None, *, compiled: bool = False
) -> tuple[float, float] | str:
    """Return the largest differences of log-probabilities and of gradients, these as a share of the
    largest one, between a shared row and a whole one; or why rows are not shared."""
    policy = PolicyModel(prepare(kind)).eval()
    policy.alone = not keeps_samples_apart(policy, torch.float32)
    results = []
    for shares in (None, context):
        try:
            share_rows(policy, shares, torch.float32)
        except ValueError as error:
            return str(error)
        if shares is not None and compiled:
            compile_layers(policy, "aot_eager")
        policy.zero_grad(set_to_none=True)
        row = pack([sequence(length) for length in (2, 3, 62, 41, 7)], 90)
        one_token = pack([sequence(2)], 90)  # A rank would have none.
        for batch in (*row, *one_token):
            policy.score(batch, 0.7).logprobs.square().sum().backward()
        trained = [one for one in policy.parameters() if one.grad is not None]
        if shares is not None:
            for one in trained:
                dist.all_reduce(one.grad)
        scores = policy.score(pack([sequence(100)], 100)[0], 1.0).logprobs.detach()
        results.append((scores, [one.grad.clone() for one in trained]))
    (scores, gradients), (shared, sums) = results
    scale = max(float(one.abs().max()) for one in gradients)
    worst = (float((a - b).abs().max()) for a, b in zip(gradients, sums, strict=True))
    return float((scores - shared).abs().max()), max(worst) / scale


def sequence(length: int) -> TokenSequence:
    ids = np.random.default_rng(length).integers(1, 64, size=length).astype(np.int32)
    return TokenSequence(ids, 1 + length // 3)


def prepare(kind: str) -> Any:
    if kind == "llama4_text":
        config = AutoConfig.for_model(kind, **SMALL | FEATURES[kind] | UNSCALED)
        return AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    if kind in SHAPES | FEATURES:
        model = model_of(kind)
        model.set_attn_implementation(PACKED)
        return model
    torch.manual_seed(0)
    more = {"n_head": 4, "n_embd": 64, "n_layer": 2} if kind == "gpt2" else CONVOLUTIONS
    config = AutoConfig.for_model(kind, **SMALL | more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kinds", "compiled"),
    [
        pytest.param(KINDS, False, id="kinds"),
        pytest.param(("llama",), True, id="compiled", marks=SLOW),
    ],
)
def test_models_of_many_kinds_share_rows_or_are_refused(
    tmp_path: Path, kinds: Sequence[str], compiled: bool
) -> None:
    mp.spawn(compare_kinds, args=(tmp_path / "meet", kinds, compiled), nprocs=2)
    ranks = [torch.load(tmp_path / f"meet.rank{rank}") for rank in range(2)]
    for found in ranks:
        assert "ranks cannot share a row" in found.pop("lfm2", CARRIES_STATE)
        assert found
        for kind, (scores, gradients) in found.items():
            assert scores < 2e-5, kind
            assert gradients < 1e-5, kind


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_each_token_of_a_row_belongs_to_one_rank(lengths: list[tuple[int, int]], size: int) -> None:
    sequences = [
        TokenSequence(np.arange(one + two, dtype=np.int32) + 100 * at, one)
        for at, (one, two) in enumerate(sorted(lengths, key=lambda pair: -sum(pair)))
    ]
    row = lay_out(range(len(sequences)), sequences)
    splits = [ContextGroup(size, rank, GROUP).split(row) for rank in range(size)]
    parts = [split.own(row) for split in splits]
    for name in ("input_ids", "position_ids", "targets"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tolist() == getattr(row, name).tolist()
    places = [
        part.predict_at + split.tokens.start for part, split in zip(parts, splits, strict=True)
    ]
    assert np.concatenate(places).tolist() == row.predict_at.tolist()
    sizes = {len(part.input_ids) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert [len(part.input_ids) for part in parts] == list(splits[0].num_tokens)


def test_heads_that_ranks_cannot_share_are_named() -> None:
    split = ContextGroup(4, 0, GROUP).split(lay_out([0], [sequence(9)]))
    with pytest.raises(ValueError, match=r"\(4\) does not divide the 6 .*, for example 3"):
        split.to_heads([torch.zeros(2, 6, 8)] * 3)


def test_a_row_holds_a_sample_that_one_rank_does_not(
    make_config: Callable[..., TrainConfig],
) -> None:
    shared = make_config(micro_batch_tokens=32, num_processes=2, context_parallel=2)
    assert shared.trainer.row_tokens == shared.max_model_len
    with pytest.raises(ValueError, match=r"\(32\) is below .* raise trainer.context_parallel or"):
        make_config(micro_batch_tokens=32)
    with pytest.raises(ValueError, match=r"\(31\) \* trainer.context_parallel \(2\) is below"):
        make_config(micro_batch_tokens=31, num_processes=2, context_parallel=2)
    with pytest.raises(ValueError, match=r"context_parallel \(2\) does not divide .* \(3\)"):
        make_config(num_processes=3, context_parallel=2)


@pytest.mark.parametrize("kind", ["lfm2", "llama4_text"])
def test_a_check_refuses_models_whose_rows_cannot_be_shared(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SMALL | FEATURES.get(kind, CONVOLUTIONS))
    assert check_fidelity(config, 64) is None
    with pytest.raises(ValueError, match="but ranks cannot share a row of this model"):
        check_fidelity(config, 64, shares_rows=True)
