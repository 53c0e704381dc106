"""Samples share a row if the model keeps them apart. Otherwise each has a row of its own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.learn.attention import PACKED
from refrain.engines.learn.determinism import check_steady
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.minibatch import assign_share
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.sample_isolation import ALONE, keeps_samples_apart
from refrain.engines.learn.training_samples import read_training_samples
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import make_batch, on_policy, own_logprobs, started
from tests.learn.test_attention import FEATURES, SHAPES, SMALL
from tests.learn.test_training_samples import make_rollouts

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    },
}
MakeConfig = Callable[..., TrainConfig]


def config_of(kind: str, **more: object) -> Any:
    return AutoConfig.for_model(kind, **SMALL | (HYBRIDS | SHAPES | FEATURES)[kind] | more)


def policy_of(kind: str, dtype: torch.dtype = torch.float32, **more: object) -> PolicyModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of(kind, **more), attn_implementation=PACKED, dtype=dtype
    )
    return PolicyModel(model.eval())


def sequences_of(lengths: list[int]) -> list[TokenSequence]:
    rng = np.random.default_rng(1)
    return [TokenSequence(rng.integers(1, 64, length).astype(np.int32), 2) for length in lengths]


def in_eager_mode(policy: PolicyModel, sequence: TokenSequence) -> np.ndarray:
    """Return log-probabilities of the response by transformers, with the sequence alone."""
    policy.model.set_attn_implementation("eager")
    values = own_logprobs(policy.model, sequence.token_ids)
    policy.model.set_attn_implementation(PACKED)
    return values[sequence.num_prompt_tokens - 1 :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SHAPES)
def test_attention_keeps_samples_apart(kind: str, dtype: torch.dtype) -> None:
    assert keeps_samples_apart(policy_of(kind, dtype), dtype)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_samples_of_hybrid_models_have_rows_of_their_own(kind: str) -> None:
    policy = policy_of(kind)
    assert not keeps_samples_apart(policy, torch.float32)
    sequences = sequences_of([40, 33, 17, 5])
    expected = [in_eager_mode(policy, sequence) for sequence in sequences]
    policy.alone = True
    for found, own in zip(score_sequences(policy, sequences, 256, 1.0), expected, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-4)
    # Negative control: in a shared row, only the first sample comes out right.
    policy.alone = False
    first, *others = score_sequences(policy, sequences, 256, 1.0)
    np.testing.assert_allclose(first, expected[0], atol=1e-4)
    assert all(np.abs(f - e).max() > 1e-2 for f, e in zip(others, expected[1:], strict=True))


def test_position_dependent_temperature_needs_separate_rows() -> None:
    """The temperature acts from position `floor_scale` on, beyond the samples that the check tries.
    So the check goes by the setting."""
    policy = policy_of("llama4_text", attn_temperature_tuning=True, floor_scale=8192)
    assert not keeps_samples_apart(policy, torch.float32)
    policy = policy_of("llama4_text", attn_temperature_tuning=False)
    assert keeps_samples_apart(policy, torch.float32)


OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
}


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_models_with_attention_of_their_own_have_a_row_for_each_sample(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    common = {"hidden_size": 64, "vocab_size": 64, "num_attention_heads": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **common | OWN_ATTENTION[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, Loading(torch.device("cpu")))
    assert policy.masks_all_pairs
    assert not keeps_samples_apart(policy, torch.float32)
    policy.alone = True
    check_steady(policy, torch.float32)
    sequences = sequences_of([40, 33, 5])
    plain = PolicyModel(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
    for found, sequence in zip(
        score_sequences(policy, sequences, 256, 1.0), sequences, strict=True
    ):
        np.testing.assert_allclose(found, in_eager_mode(plain, sequence), atol=1e-4)


@pytest.mark.parametrize("alone", [True, False])
def test_rows_of_one_sample_hold_the_same_samples(alone: bool) -> None:
    sequences = sequences_of([40, 33, 17, 5])
    rows = [batch.samples for batch in pack(sequences, 256, alone=alone)]
    assert rows == ([(0,), (1,), (2,), (3,)] if alone else [(0, 1, 2, 3)])


def test_ranks_of_a_hybrid_model_make_as_many_passes(make_config: MakeConfig) -> None:
    """In every pass, FSDP waits for all ranks."""
    config = make_config()
    samples, _ = read_training_samples(
        make_rollouts([[0] * 9, [0] * 4, [0] * 3], [1] * 3), config, 0
    )
    for alone in (True, False):
        shares = [assign_share(samples, config, rank, 2, alone=alone) for rank in range(2)]
        own = [len(pack(share.sequences, 256, alone=alone)) for share in shares]
        assert own == ([1, 2] if alone else [1, 1])
        passes = [num + share.num_idle_passes for num, share in zip(own, shares, strict=True)]
        assert passes[0] == passes[1]


def learner_of(
    make_config: MakeConfig, tokenizer_dir: Path, path: Path, kind: str, **trainer: object
) -> Learner:
    if not path.exists():
        policy_of(kind).model.save_pretrained(path)
        for file in tokenizer_dir.glob("*token*"):
            shutil.copy(file, path)
    config = make_config(**trainer)
    model = config.model.model_copy(update={"path": path})
    return started(config.model_copy(update={"model": model}))


def test_hybrid_model_trains_as_with_separate_samples(
    make_config: MakeConfig, model_dir: Path, tmp_path: Path
) -> None:
    one, other = (
        learner_of(make_config, model_dir, tmp_path / "m", "lfm2", micro_batch_tokens=budget)
        for budget in (64, 8192)
    )
    assert one.notes == other.notes == (ALONE,)
    batch = on_policy(make_batch(), one, 0.7)
    first, second = one.train_step(batch), other.train_step(batch)
    assert first == pytest.approx(second, abs=1e-4)
    assert first["actor/rollout_logprob_diff"] < 1e-5


def test_attention_only_model_packs_samples(make_config: MakeConfig) -> None:
    assert started(make_config()).notes == ()


def test_canaries_share_a_row_as_samples_do(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So canaries reveal a model that does not keep samples apart."""
    learner = started(make_config(micro_batch_tokens=80))
    rng = np.random.default_rng(0)
    given = [rng.integers(64, size=length).tolist() for length in (60, 75, 3)]
    rows: list[int] = []
    score = PolicyModel.score

    def watch(policy, batch, temperature):
        rows.append(len(batch.samples))
        return score(policy, batch, temperature)

    monkeypatch.setattr(PolicyModel, "score", watch)
    canaries = learner.canaries(given)
    assert rows == [3, 3]  # Once in float32, once in the engines' data type.
    assert [list(one.token_ids) for one in canaries] == [given[0][:26], given[1][:26], given[2]]
    for canary in canaries:
        (alone,) = learner.logprobs([canary.token_ids])
        np.testing.assert_allclose(canary.trainer_logprobs, alone, atol=1e-5)
