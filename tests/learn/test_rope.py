"""A rope treats each sample as the engines do, whatever other samples are in the row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.learn.loading import Loading, give_memory, load_policy, prepared
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import PolicyModel, score_sequences
from tests.learn.test_attention import SMALL
from tests.learn.test_sample_isolation import in_eager_mode

CPU = torch.device("cpu")
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1, 1.5, 2, 4, 8, 16, 16, 16],
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "phi3": LONGROPE | {"partial_rotary_factor": 1.0},
    "llama": LONGROPE,
    "phimoe": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.5},
}


@pytest.fixture
def model_of(tmp_path: Path):
    def make(kind: str, rope: dict[str, Any]) -> Path:
        torch.manual_seed(0)
        shape = SMALL | {"rope_parameters": rope, "original_max_position_embeddings": 64}
        config = AutoConfig.for_model(kind, **shape)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return tmp_path

    return make


def samples_of(*lengths: int) -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    return [TokenSequence(rng.integers(1, 64, one + 1).astype(np.int32), 1) for one in lengths]


def scored(policy: PolicyModel, samples: list[TokenSequence]) -> list[np.ndarray]:
    return score_sequences(policy, samples, 4096, 1.0)


def transformers_own(path: Path, sample: TokenSequence) -> np.ndarray:
    return in_eager_mode(PolicyModel(AutoModelForCausalLM.from_pretrained(path)), sample)


@pytest.mark.parametrize("kind", ROPES)
def test_a_short_sample_is_the_same_beside_a_long_one(kind: str, model_of) -> None:
    policy = load_policy(model_of(kind, ROPES[kind]), Loading(CPU))
    long, short = samples_of(150, 40)
    _, beside = scored(policy, [long, short])
    (alone,) = scored(policy, [short])
    np.testing.assert_allclose(beside, alone, atol=1e-4)


def test_engines_choose_factors_by_the_longest_that_they_may_be_given(model_of) -> None:
    """vLLM chooses by the longest request that it accepts. transformers chooses by the sample, so
    it would use the short factors here."""
    path, (sample,) = model_of("phi3", ROPES["phi3"]), samples_of(40)
    by_limit = {
        limit: scored(load_policy(path, Loading(CPU, max_tokens=limit)), [sample])[0]
        for limit in (64, 65, None)
    }
    np.testing.assert_allclose(by_limit[64], transformers_own(path, sample), atol=1e-4)
    assert np.abs(by_limit[64] - by_limit[65]).max() > 0.01
    np.testing.assert_array_equal(by_limit[65], by_limit[None])


def test_a_model_that_gets_memory_late_has_the_same_factors(model_of) -> None:
    path, samples = model_of("phi3", ROPES["phi3"]), samples_of(150, 40)
    policy = load_policy(path, Loading(CPU))
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        late = prepared(AutoModelForCausalLM.from_config(config), Loading(CPU))
    give_memory(late, CPU)
    late.load_state_dict(policy.state_dict())
    late.model.set_attn_implementation(policy.model.config._attn_implementation)
    for one, other in zip(scored(policy, samples), scored(late, samples), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_sample_beyond_the_positions_of_a_dynamic_rope_is_refused(model_of) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = model_of("llama", rope)
    policy = load_policy(path, Loading(CPU, max_tokens=512))
    (within,) = samples_of(511)
    own = transformers_own(path, within)
    np.testing.assert_allclose(scored(policy, [within])[0], own, atol=1e-4)
    with pytest.raises(ValueError, match="a sample of 513 tokens is longer than the 512 positions"):
        scored(policy, samples_of(513))
    with pytest.raises(ValueError, match="a sample of 600 tokens is longer than the 512 positions"):
        load_policy(path, Loading(CPU, max_tokens=600))
