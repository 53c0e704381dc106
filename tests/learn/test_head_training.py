"""Draft heads learn from a policy's own tokens, sharded or not, and leave the policy alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.distributed.device_mesh import DeviceMesh

from refrain.engines.draft_head.files import load, save
from refrain.engines.draft_head.model import DraftHead
from refrain.engines.learn import head_training
from refrain.engines.learn.head_training import HeadTraining, draw_sequences, follows
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.packing import TokenSequence, pack
from refrain.engines.learn.trainer import TrainerActor
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import SpecActorConfig
from tests.learn.conftest import VOCAB_SIZE, make_batch, started

DEPTH = 3
VOCABULARY = torch.arange(0, VOCAB_SIZE, 2)


def sequences() -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 30, 12)
    rows = [rng.integers(VOCAB_SIZE, size=num).astype(np.int32) for num in lengths]
    return [TokenSequence(row, int(rng.integers(1, 4))) for row in rows]


def training_of(model_dir: Path, mesh: DeviceMesh | None = None, **more: bool) -> HeadTraining:
    policy = load_policy(model_dir, Loading(torch.device("cpu"), mesh))
    torch.manual_seed(0)
    head = DraftHead(64, VOCABULARY)
    return HeadTraining(head, policy, 0.7, depth=DEPTH, learning_rate=1e-2, **more)


def test_a_token_follows_within_its_sample_and_its_turn() -> None:
    ids = np.arange(6, dtype=np.int32)
    turns = np.array([True, True, False, True, True])
    rows = [TokenSequence(ids, 1, sampled=turns), TokenSequence(ids, 1), TokenSequence(ids, 4)]
    (batch,) = pack(rows, 100)
    by_sample = ([0, 1, 0, 1], [0, 1, 1, 1, 1], [0, 1])
    assert follows(batch).tolist() == [bool(one) for own in by_sample for one in own]


def test_the_loss_falls_and_the_policy_stays(model_dir: Path) -> None:
    training = training_of(model_dir)
    policy = training._policy
    before = {name: one.clone() for name, one in policy.named_parameters()}
    batches = pack(sequences(), 128)
    training.set_scale(batches[0])
    agreed = training.agreement(batches)
    losses = [training.update(batch) for _ in range(8) for batch in batches]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < 0.7 * losses[0]
    assert training.agreement(batches).acceptance_length > agreed.acceptance_length
    for name, one in policy.named_parameters():
        assert torch.equal(one, before[name])
        assert one.grad is None


def test_a_sharded_policy_trains_the_same_head(model_dir: Path, mesh: DeviceMesh) -> None:
    whole, sharded = training_of(model_dir), training_of(model_dir, mesh)
    for batch in pack(sequences(), 128):
        assert sharded.update(batch) == pytest.approx(whole.update(batch), abs=1e-5)
    weights = (one.head.state_dict() for one in (sharded, whole))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("room", [0, 20_000, 2**20])
def test_kept_hidden_states_change_no_update(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(head_training, "MOST_KEPT_BYTES", room)
    batches = pack(sequences(), 40)
    plain, keeping = training_of(model_dir), training_of(model_dir, keeps_hidden=True)
    for batch in 3 * batches:
        assert keeping.update(batch) == plain.update(batch)
    num_bytes = sum(kept.nbytes for _, kept in keeping._kept.values())
    assert num_bytes <= room
    assert (len(keeping._kept) == len(batches)) == (room == 2**20)


def test_a_batch_without_drafts_is_skipped(model_dir: Path) -> None:
    training = training_of(model_dir)
    before = training.state()["head"]["scale"].clone()
    (batch,) = pack([TokenSequence(np.arange(4, dtype=np.int32), 3)], 100)
    assert training.update(batch) is None
    assert torch.equal(training.head.scale, before)


def test_a_draw_keeps_to_its_tokens() -> None:
    rows = sequences()
    drawn, others = draw_sequences(rows, 60, (0, 1))
    assert len(drawn) + len(others) == len(rows)
    num = sum(one.num_input_tokens for one in drawn)
    assert 60 - max(one.num_input_tokens for one in rows) < num <= 60
    assert len(draw_sequences(rows, 1, (0,))[0]) == 1


@pytest.fixture
def config(make_config: Callable[..., TrainConfig], tmp_path: Path) -> TrainConfig:
    save(DraftHead(64, VOCABULARY), tmp_path / "head", vocab_size=VOCAB_SIZE, window=DEPTH)
    specactor = SpecActorConfig(head=tmp_path / "head", train_head=True)
    return make_config().model_copy(update={"specactor": specactor})


def head_of(learner: Learner) -> dict:
    assert learner.head
    return learner.head.training.state()


def steps(learner: Learner, versions: range) -> list[dict[str, float]]:
    return [learner.train_step(make_batch(v, 2, 3, policy_version=v)) for v in versions]


def test_a_head_that_is_trained_along_leaves_the_policy_as_it_is(config: TrainConfig) -> None:
    frozen = config.specactor.model_copy(update={"train_head": False})
    with_head, without = (
        started(one) for one in (config, config.model_copy(update={"specactor": frozen}))
    )
    found = steps(with_head, range(2))
    assert without.head is None
    for mine, other in zip(found, steps(without, range(2)), strict=True):
        assert other.items() <= mine.items()
        assert mine["draft_head/loss"] > 0.0
        assert 1.0 <= mine["draft_head/accept_length_before"] <= 1.0 + DEPTH
    assert with_head.weights_buffer() == without.weights_buffer()


def test_a_resumed_run_trains_the_same_head(config: TrainConfig) -> None:
    learner = started(config)
    steps(learner, range(1))
    path = learner.save(1, {})
    metrics = steps(learner, range(1, 3))
    resumed = started(config, path)
    assert steps(resumed, range(1, 3)) == metrics
    torch.testing.assert_close(head_of(resumed), head_of(learner), atol=0.0, rtol=0.0)


def test_a_head_of_another_size_is_refused(config: TrainConfig) -> None:
    learner = started(config)
    path = learner.save(0, {})
    assert config.specactor.head
    save(DraftHead(64, VOCABULARY, 8), config.specactor.head, vocab_size=VOCAB_SIZE, window=DEPTH)
    with pytest.raises(ValueError, match=r"specactor\.head has another size"):
        started(config, path)


def test_engines_find_the_heads_of_the_last_versions(config: TrainConfig) -> None:
    learner = started(config)
    assert learner.head
    published = [learner.head.publish(version) for version in range(3)]
    steps(learner, range(1))
    published.append(learner.head.publish(3))
    assert [path.is_dir() for path in published] == [False, False, True, True]
    newest = load(published[-1], hidden_size=64, vocab_size=VOCAB_SIZE)
    torch.testing.assert_close(newest.state_dict(), learner.head.training.head.state_dict())


def test_weights_are_published_with_the_head(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = TrainerActor(config, 0)
    monkeypatch.setattr(actor, "_announced", actor._files.path)  # Couriers need Ray.
    actor.restore(None)
    try:
        weights = actor.publish(0, [[1, 2, 3]])
    finally:
        actor.shutdown()
    assert weights
    assert weights.draft_head == config.run_dir / "head" / "0"
    load(weights.draft_head, hidden_size=64, vocab_size=VOCAB_SIZE)


def test_training_needs_a_head_to_begin_with() -> None:
    with pytest.raises(ValidationError, match="refrain drafter train"):
        SpecActorConfig(train_head=True)
