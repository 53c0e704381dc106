"""Compiled layers make the update that eager ones make, and rows of all lengths share one
compilation."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from refrain.engines.learn.compiled import check_compiled, compile_layers, is_worthwhile
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import MicroBatch, TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel, token_scores
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import VOCAB_SIZE, make_batch, started
from tests.learn.test_attention import model_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest would format every event of the compiler's trace.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    counters.clear()


def row(seed: int) -> MicroBatch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 60, size=rng.integers(2, 5))
    ids = (rng.integers(VOCAB_SIZE, size=length).astype(np.int32) for length in lengths)
    return pack([TokenSequence(one, 3) for one in ids], 256)[0]


def gradient(policy: PolicyModel) -> Tensor:
    return torch.cat([one.grad.flatten() for one in policy.parameters() if one.grad is not None])


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_rows_of_all_lengths_and_layers_share_a_compilation(model_dir: Path) -> None:
    loading = Loading(CPU, gradient_checkpointing=True)
    eager, compiled = (load_policy(model_dir, loading) for _ in range(2))
    compile_layers(compiled, "eager")
    seen = []
    for seed in range(4):
        for policy in (eager, compiled):
            scores = policy.score(row(seed), 0.7, entropy_gradient=True)
            (scores.logprobs - scores.entropies).sum().backward()
        seen.append(num_graphs())
    assert seen == [5, 5, 5, 5]  # Four of a layer, one of the scores.
    expected = gradient(eager)
    assert (gradient(compiled) - expected).norm() < 1e-6 * expected.norm()
    with torch.no_grad(), compiled.uncompiled():
        found = compiled.score(row(0), 1.0).logprobs
        assert found.equal(eager.score(row(0), 1.0).logprobs)
    assert num_graphs() == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "trainer"),
    [
        ({"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, {}),
        ({"kl_coefficient": 0.1}, {"lora": {"rank": 4}, "gradient_checkpointing": True}),
    ],
)
def test_a_compiled_learner_makes_the_same_update(
    make_config: Callable[..., TrainConfig], algorithm: dict, trainer: dict
) -> None:
    """With the compiler that the trainer uses, here for a CPU."""
    learners = [
        started(make_config(algorithm, learning_rate=1e-4, compile=compile, **trainer))
        for compile in (False, True)
    ]
    metrics = [learner.train_step(make_batch()) for learner in learners]
    compiled_once = num_graphs()
    metrics += [learner.train_step(make_batch(1, policy_version=1)) for learner in learners]
    assert num_graphs() == compiled_once > 5
    for eager, compiled in (metrics[:2], metrics[2:]):
        assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-4)
    torch.testing.assert_close(*map(weights, learners), atol=1e-6, rtol=0.0)
    one, other = (learner.canaries() for learner in learners)
    for eager, compiled in zip(one, other, strict=True):
        assert compiled.trainer_logprobs == pytest.approx(eager.trainer_logprobs, abs=1e-5)


def weights(learner: Learner) -> dict[str, Tensor]:
    return safetensors.torch.load(learner.weights_buffer())


def wrong(graph: Any, _: Any) -> Callable[..., list[Tensor]]:
    def shifted(value: Any) -> Any:
        return 1.5 * value if isinstance(value, Tensor) and value.is_floating_point() else value

    return lambda *args: [shifted(one) for one in graph(*args)]


def missing(*_: Any) -> Callable[..., Any]:
    raise RuntimeError("no C++ compiler")


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (wrong, "compute other values when"),
        (missing, r"raised: RuntimeError: no C\+\+ compiler\. "),
    ],
)
def test_a_policy_that_does_not_compile_is_refused(
    model_dir: Path, backend: Any, said: str
) -> None:
    policy = load_policy(model_dir, Loading(CPU))
    policy.is_compiled = True
    policy.token_scores = torch.compile(token_scores, backend=backend)
    with pytest.raises(ValueError, match=f"Qwen3ForCausalLM .*{said}.*compile=false"):
        check_compiled(policy, torch.float32)


def test_auto_compiles_dense_models_on_cuda(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, mixture = load_policy(model_dir, Loading(CPU)), PolicyModel(model_of("qwen3_moe"))
    assert not is_worthwhile(dense)
    monkeypatch.setattr(PolicyModel, "device", torch.device("cuda"))
    assert is_worthwhile(dense)
    assert not is_worthwhile(mixture)
    dense.alone = True
    assert not is_worthwhile(dense)
