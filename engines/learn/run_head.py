"""The draft head of a run, trained along with the policy (`specactor.train_head`).

    update of the policy ─► measure the head on some rollouts ─► train it on others ─► measure again
                                                                   │
                      engines load RUN/head/<policy version> ◄─────┘ with the policy's weights

The policy's new weights give the hidden states and the targets, because they generate next.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refrain.engines.draft_head.files import load, read_settings, save
from refrain.engines.learn.head_training import HeadTraining, draw_sequences
from refrain.engines.learn.packing import MicroBatch, TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel
from refrain.schemas.config import TrainConfig

HEADS = "head"
"""Directory of a run's heads."""
TRAINED_TOKENS, MEASURED_TOKENS = 4096, 1024
"""Most tokens of a step, prompts included, that the head is trained and measured on. A step changes
the policy little, so a few updates keep up with it, and they cost a forward pass each."""
UPDATE_TOKENS = 1024
"""Tokens of an update, or those of the longest sample."""
LEARNING_RATE = 3e-4
_STATE = "draft_head"


class RunHead:
    """A draft head in training. Every rank calls `train` with the same rollouts."""

    def __init__(self, config: TrainConfig, policy: PolicyModel) -> None:
        """Load the head of `specactor.head`. Raise ValueError if it does not fit the policy."""
        directory = config.specactor.head
        assert directory, "checked with the config"
        text = policy.model.config.get_text_config()
        sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
        self._window = read_settings(directory).window
        self.training = HeadTraining(
            load(directory, **sizes),
            policy,
            config.rollout.temperature,
            depth=self._window,
            learning_rate=LEARNING_RATE,
        )
        self._policy = policy
        self._seed = config.seed
        self._directory = config.run_dir / HEADS
        self._num_kept = 1 + max(1, config.staleness)
        """Engines may use as many older versions of the policy, so of the head."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on with the head of a checkpoint, if it has one (`head_state`). Raise ValueError if it
        has another size than that of `specactor.head`."""
        if not (state := saved.get(_STATE)):
            return
        try:
            self.training.restore(state)
        except RuntimeError as error:
            raise ValueError(
                "specactor.head has another size than the head that this run has trained: set it "
                f"back to the head that the run began with ({error})"
            ) from error

    def train(self, rollouts: Sequence[TokenSequence], policy_version: int) -> dict[str, float]:
        """Train on some of a step's rollouts. Return `draft_head/...` metrics."""
        seed = (self._seed, policy_version)
        measured, others = draw_sequences(rollouts, MEASURED_TOKENS, seed)
        trained, _ = draw_sequences(others or measured, TRAINED_TOKENS, seed)
        tests = self._packed(measured)
        before = self.training.agreement(tests)
        losses = [self.training.update(batch) for batch in self._packed(trained)]
        known = [loss for loss in losses if loss is not None]
        after = self.training.agreement(tests)
        return {
            "draft_head/loss": float(np.mean(known)) if known else 0.0,
            "draft_head/skipped_updates": float(len(losses) - len(known)),
            "draft_head/accept_length_before": before.acceptance_length,
            "draft_head/accept_length_after": after.acceptance_length,
        }

    def _packed(self, sequences: Sequence[TokenSequence]) -> list[MicroBatch]:
        longest = max(one.num_input_tokens for one in sequences)
        return pack(sequences, max(UPDATE_TOKENS, longest), alone=self._policy.alone)

    def publish(self, policy_version: int) -> Path:
        """Write the head for the engines and return its directory. Delete those that no engine
        needs. Only one rank calls this."""
        directory = self._directory / str(policy_version)
        vocab_size = self._policy.vocab_size
        save(self.training.head, directory, vocab_size=vocab_size, window=self._window)
        for other in self._directory.iterdir():
            if other.name.isdecimal() and int(other.name) <= policy_version - self._num_kept:
                shutil.rmtree(other)
        return directory


def head_state(head: RunHead | None) -> dict[str, Any]:
    """Return the part of a checkpoint that is about the head, empty without one."""
    return {_STATE: head.training.state()} if head else {}
