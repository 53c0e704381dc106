"""The trainer computes with the experts that a rollout brings, and with its own where it brings
none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.learn.learner import Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.routing_replay import check_replay, experts_of, replayed_share
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.model_inputs import check_routing_replay
from tests.accounting.test_metric_names import NAMES
from tests.learn.conftest import VOCAB_SIZE, make_batch, started

LAYERS, TOP_K, NUM_EXPERTS = 2, 2, 4
BUDGET = 96
"""Tokens of a micro-batch: several samples share one."""
MakeConfig = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def policy_of(path: Path, **loading: bool) -> PolicyModel:
    given = {"replays_routing": True} | loading
    return load_policy(path, Loading(torch.device("cpu"), max_tokens=64, **given))


def sequences(seed: int = 0) -> list[TokenSequence]:
    """Return samples of different lengths without experts."""
    rng = np.random.default_rng(seed)
    lengths = (12, 40, 25, 33, 8)
    return [TokenSequence(rng.integers(VOCAB_SIZE, size=n).astype(np.int32), 4) for n in lengths]


def with_experts(given: list[TokenSequence], seed: int = 1) -> list[TokenSequence]:
    """Return the samples with experts drawn at random, two different ones a layer."""
    rng = np.random.default_rng(seed)

    def drawn(num: int) -> bytes:
        order = rng.random((num, LAYERS, NUM_EXPERTS)).argsort(-1)[..., :TOP_K]
        return (order + 1).astype(np.uint8).tobytes()

    return [replace(one, experts=drawn(one.num_input_tokens)) for one in given]


def own_experts(policy: PolicyModel, given: list[TokenSequence]) -> list[TokenSequence]:
    """Return the samples with the experts that transformers' own routers choose, one sample at a
    time."""
    found: list[list[torch.Tensor]] = []
    routers = [one for one in policy.modules() if type(one).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [one.register_forward_hook(lambda *a: found[-1].append(a[2][2])) for one in routers]
    for one in given:
        found.append([])
        score_sequences(policy, [one], BUDGET, 1.0)
    for hook in hooks:
        hook.remove()
    assert all(len(each) == LAYERS for each in found)
    data = [(torch.stack(each, 1) + 1).to(torch.uint8).numpy().tobytes() for each in found]
    return [replace(one, experts=own) for one, own in zip(given, data, strict=True)]


def joined(values: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(values)


def test_own_experts_change_nothing_and_others_do(mixture_dir: Path) -> None:
    policy, given = policy_of(mixture_dir), sequences()
    assert policy.replay
    free = joined(score_sequences(policy, given, BUDGET, 1.0))
    assert policy.replay.take_counts() == (0, 0)
    own = own_experts(policy, given)
    np.testing.assert_array_equal(joined(score_sequences(policy, own, BUDGET, 1.0)), free)
    num_choices = LAYERS * sum(one.num_input_tokens for one in given)
    assert policy.replay.take_counts() == (num_choices, 0)
    others = joined(score_sequences(policy, with_experts(given), BUDGET, 1.0))
    assert np.abs(others - free).max() > 0.1
    given_, changed = policy.replay.take_counts()
    assert given_ == num_choices
    # Two of four experts, drawn at random, are the same two once in six times.
    assert 0.6 < changed / num_choices < 0.95
    # The next samples without experts choose freely again.
    np.testing.assert_array_equal(joined(score_sequences(policy, given, BUDGET, 1.0)), free)


def test_each_sample_of_a_row_has_its_own_experts(mixture_dir: Path) -> None:
    """Packed samples get what each gets in a row of its own."""
    policy, given = policy_of(mixture_dir), with_experts(sequences())
    assert len(pack(given, BUDGET)) < len(given)
    packed = score_sequences(policy, given, BUDGET, 1.0)
    for one, values in zip(given, packed, strict=True):
        (alone,) = score_sequences(policy, [one], BUDGET, 1.0)
        np.testing.assert_allclose(values, alone, atol=1e-5)
    wrong = [replace(one, experts=one.experts[LAYERS * TOP_K :]) for one in given]
    shifted = score_sequences(policy, wrong, BUDGET, 1.0)
    assert np.abs(joined(shifted) - joined(packed)).max() > 0.1


def test_unknown_experts_are_chosen_by_the_trainer(mixture_dir: Path) -> None:
    """A token counts as replayed only if it is known in all layers."""
    policy, given = policy_of(mixture_dir), sequences()
    width = LAYERS * TOP_K
    free = joined(score_sequences(policy, given, BUDGET, 1.0))
    unknown = [replace(one, experts=bytes(width)) for one in given]
    assert policy.replay
    np.testing.assert_array_equal(joined(score_sequences(policy, unknown, BUDGET, 1.0)), free)
    assert policy.replay.take_counts() == (0, 0)
    assert replayed_share(unknown, policy.replay.shape) == 0.0
    half = [replace(one, experts=one.experts[: 4 * width]) for one in with_experts(given)]
    num_tokens = sum(one.num_input_tokens for one in given)
    assert replayed_share(half, policy.replay.shape) == pytest.approx(4 * len(given) / num_tokens)
    score_sequences(policy, half, BUDGET, 1.0)
    assert policy.replay.take_counts()[0] == LAYERS * 4 * len(given)


def test_gradients_reach_the_routers_and_survive_recomputation(mixture_dir: Path) -> None:
    """Checkpointed layers run again in the backward pass, when the row is long set."""
    (batch,) = pack(with_experts(sequences()), 4 * BUDGET)
    gradients = []
    for recompute in (False, True):
        policy = policy_of(mixture_dir, gradient_checkpointing=recompute)
        policy.score(batch, 1.0).logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    plain, recomputed = gradients
    routers = [name for name in plain if name.endswith("gate.weight")]
    assert len(routers) == LAYERS
    for name, gradient in plain.items():
        assert gradient is not None, name
        np.testing.assert_allclose(gradient, recomputed[name], atol=1e-4)
    # A router's softmax covers all experts, so those of other tokens get a gradient too.
    assert all(bool((plain[name].abs().sum(-1) > 0).all()) for name in routers)


def trained(config: TrainConfig, path: Path, *, experts: bool) -> tuple[Learner, dict[str, float]]:
    model = config.model.model_copy(update={"path": path})
    learner, batch = started(config.model_copy(update={"model": model})), make_batch()
    if experts:
        rng, rows = np.random.default_rng(3), batch.to_pylist()
        num = [len(row["prompt_token_ids"]) + len(row["response_token_ids"]) - 1 for row in rows]
        chosen = [rng.random((n, LAYERS, NUM_EXPERTS)).argsort(-1)[..., :TOP_K] + 1 for n in num]
        column = [each.astype(np.uint8).tobytes() for each in chosen]
        rows = [row | {"experts": own} for row, own in zip(rows, column, strict=True)]
        batch = batch.from_pylist(rows, batch.schema)
    return learner, learner.train_step(batch)


def test_a_step_reports_what_it_replayed(make_config: MakeConfig, mixture_dir: Path) -> None:
    """Off, the column of experts changes no weight and adds no metric."""
    off, without = trained(make_config(), mixture_dir, experts=False)
    ignored, same = trained(make_config(), mixture_dir, experts=True)
    assert same == without
    assert not any(name.startswith("routing/") for name in same)
    assert ignored.weights_buffer() == off.weights_buffer()
    on, metrics = trained(make_config(routing_replay=True), mixture_dir, experts=True)
    assert {name for name in metrics if name.startswith("routing/")} <= NAMES
    assert metrics["routing/replayed_share"] == 1.0
    assert 0.6 < metrics["routing/changed_share"] < 0.95
    assert on.weights_buffer() != off.weights_buffer()
    free, lacking = trained(make_config(routing_replay=True), mixture_dir, experts=False)
    assert lacking["routing/replayed_share"] == lacking["routing/changed_share"] == 0.0
    assert free.weights_buffer() == off.weights_buffer()


def test_experts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 bytes of experts.* 2 layers with 2 experts"):
        experts_of(bytes(7), (2, 2), 3)
    padded = experts_of(bytes([1, 2, 3, 4]), (2, 2), 3)
    assert padded.tolist() == [[[1, 2], [3, 4]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_mixtures_can_be_replayed(kind: str) -> None:
    check_replay(AutoConfig.for_model(kind, **({"n_routed_experts": 8} if "deep" in kind else {})))


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("qwen3", {}, "has no routers whose choice could be replayed"),
        ("phimoe", {}, "do not follow a given choice"),
        ("qwen3_moe", {"num_experts": 512}, "has 512 experts a layer.* at most 255"),
    ],
)
def test_other_models_are_refused_before_a_run(
    kind: str, changes: dict, why: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind, **changes).save_pretrained(tmp_path)
    config = make_config(routing_replay=True)
    model = config.model.model_copy(update={"path": tmp_path})
    with pytest.raises(ValueError, match=rf"trainer.routing_replay.*{why}"):
        check_routing_replay(config.model_copy(update={"model": model}))
    off = config.trainer.model_copy(update={"routing_replay": False})
    check_routing_replay(config.model_copy(update={"model": model, "trainer": off}))


def test_more_experts_than_can_be_read_are_refused(
    make_config: MakeConfig, mixture_dir: Path
) -> None:
    config = make_config(routing_replay=True, micro_batch_tokens=2**20)
    model = config.model.model_copy(update={"path": mixture_dir})
    config = config.model_copy(update={"model": model})
    check_routing_replay(config)
    data = config.data.model_copy(update={"max_response_tokens": 2**19})
    rollout = config.rollout.model_copy(update={"group_size": 1024})
    more = config.model_copy(update={"data": data, "rollout": rollout, "prompts_per_step": 64})
    with pytest.raises(ValueError, match=r"2048 responses of up to 524320 tokens have 4.0 GiB"):
        check_routing_replay(more)


def test_settings_that_it_cannot_work_with_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"trainer.routing_replay.*set compile: false"):
        make_config(routing_replay=True, compile=True)
    values = make_config(routing_replay=True).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ValueError, match=r"routing_replay needs rollout.model_runner: v1. Set v1"):
        TrainConfig.model_validate(values | {"rollout": {"model_runner": "v2"}})
    assert TrainConfig.model_validate(values).engine.record_experts
