"""One trainer process without Ray: it takes rewarded rollouts and makes the next policy version."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from refrain.engines.learn import checkpoint, training_state
from refrain.engines.learn.canaries import LongCanaries
from refrain.engines.learn.compiled import compile_policy
from refrain.engines.learn.context import ContextGroup, share_rows
from refrain.engines.learn.determinism import check_steady
from refrain.engines.learn.diagnostics import summarise
from refrain.engines.learn.export import StartFiles, find_start_files, write_export
from refrain.engines.learn.gradient import (
    Reference,
    accumulate_gradient,
    clip_gradient,
    reference_kl,
    with_old_logprobs,
    with_teacher_logprobs,
)
from refrain.engines.learn.host_copies import HostCopies
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.lora import adapter_tensors, merged_at_work, write_adapter
from refrain.engines.learn.minibatch import Share, assign_share, cut_minibatches
from refrain.engines.learn.packing import TokenSequence
from refrain.engines.learn.policy import PolicyModel, score_sequences
from refrain.engines.learn.precision import ComputeIn
from refrain.engines.learn.publishing import WholeTensors, whole_tensors
from refrain.engines.learn.recomputation import num_kept_layers
from refrain.engines.learn.rollouts import choose_canaries, read_rollouts
from refrain.engines.learn.rounding_loss import LOW, warning_of
from refrain.engines.learn.routing_replay import replay_metrics
from refrain.engines.learn.run_head import RunHead, head_state
from refrain.engines.learn.sample_isolation import ALONE, keeps_samples_apart
from refrain.engines.learn.schedule import learning_rate_share
from refrain.engines.learn.sharding import make_mesh
from refrain.engines.learn.training_samples import TrainingSample, read_training_samples
from refrain.engines.learn.training_state import MOMENTS
from refrain.schemas.config import TrainConfig
from refrain.schemas.trainer import LoraConfig
from refrain.schemas.weights import Canary

ADAM_BETA1 = 0.9
"""AdamW's share of the mean gradient that an update keeps, as everywhere."""
MAX_SKIPPED_UPDATES = 3
"""Updates in a row that may be skipped because loss or gradient are not finite. A policy that gets
no more updates has diverged."""


class Learner:
    """Policy gradients with AdamW on one rank of `world_size` trainer processes.

    Call `restore` first. With more than one process, the caller initialises torch.distributed
    before, and FSDP2 shards the model. All methods but `policy_version` are then collective: every
    rank calls them with the same arguments and gets the same result, unless the docstring says
    otherwise. A single GPU gets a mesh of one, for FSDP2's mixed precision.
    """

    def __init__(self, config: TrainConfig, rank: int = 0, world_size: int = 1) -> None:
        assert 0 <= rank < world_size
        self.policy_version = 0
        """Number of training steps that made the current weights."""
        self.head: RunHead | None = None
        """The draft head, if it is trained along."""
        self._canary_token_ids: Sequence[Sequence[int]] = ()
        self._config = config
        self._rank = rank
        self._world_size = world_size
        num_sharing = config.trainer.context_parallel
        self._sharing = (rank // num_sharing, world_size // num_sharing)
        """Index of this rank's context group, and number of groups: each takes a share."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._host_copies = HostCopies()
        self._has_gpu = True
        self._has_warned = False
        self._num_skipped = 0
        """Updates skipped since the last one that was made."""

    def leave_gpu(self, *, state: bool) -> None:
        """Free the gradients and, with `state`, move weights and moments to host memory. Do not
        train until `enter_gpu`. With `state`, do nothing at all until then."""
        self._has_gpu = False
        self.rest()
        if state:
            self._host_copies.offload(self._state())

    def rest(self) -> None:
        """Free the gradients, and the memory that torch has cached."""
        self._optimizer.zero_grad(set_to_none=True)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def enter_gpu(self) -> None:
        """Move the state back to the GPU, bit for bit."""
        self._host_copies.restore()
        self._has_gpu = True

    def _state(self) -> Iterator[Tensor]:
        """Yield the weights and moments that are on this rank's device."""
        models = [self._policy, *([self._reference.policy] if self._reference else [])]
        moments = training_state.moments(self._optimizer)
        head = self.head.training.tensors() if self.head else []
        for tensor in chain(*(model.parameters() for model in models), moments, head):
            if tensor.device.type == self._device.type:
                yield tensor

    def restore(self, checkpoint_dir: Path | None) -> None:
        """Load the starting policy, or restore a checkpoint bit for bit. Every rank must be able to
        read it.

        Raises ValueError when the model cannot be loaded or the checkpoint is damaged.
        """
        config = self._config.trainer
        training_state.seed_everything(self._config.seed, self._rank)
        share = (self._rank, self._world_size)
        state = checkpoint.verify(checkpoint_dir, "", *share) if checkpoint_dir else None
        self._context = ContextGroup.of(config.context_parallel, config.timeout_s)
        self._policy = self._load(config.lora)
        shape = self._policy.model.config.get_text_config().to_dict()
        self._long_canaries = LongCanaries(shape, self._config.max_model_len)
        self._reference = None
        if self._config.algorithm.needs_reference:
            teacher = self._config.algorithm.teacher
            own = config.lora is None or teacher is not None
            self._reference = Reference(self._load(None, teacher) if own else self._policy, own)
        trained = [one for one in self._policy.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained,
            lr=config.learning_rate,
            betas=(ADAM_BETA1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._scheduler = LambdaLR(self._optimizer, lambda done: learning_rate_share(done, config))
        if self._config.specactor.train_head:
            self.head = RunHead(self._config, self._policy)
        if checkpoint_dir and state:
            self._resume(checkpoint_dir, state)

    def _load(self, lora: LoraConfig | None, path: Path | None = None) -> PolicyModel:
        config = self._config.trainer
        loading = Loading(
            self._device,
            mesh=make_mesh(self._device, self._world_size, config.num_replicas),
            gradient_checkpointing=bool(config.gradient_checkpointing),
            kept_layers=num_kept_layers(self._config, self._device),
            dtype=getattr(torch, config.dtype),
            compute_dtype=self._compute_dtype,
            lora=lora,
            seed=self._config.seed,
            trust_remote_code=self._config.model.trust_remote_code,
            replays_routing=config.routing_replay and path is None,
            max_tokens=self._config.max_model_len,
        )
        policy = load_policy(path or self._config.model.path, loading)
        policy.alone = not keeps_samples_apart(policy, self._compute_dtype)
        check_steady(policy, self._compute_dtype)
        share_rows(policy, self._context, self._compute_dtype)
        compile_policy(policy, config.compile, self._compute_dtype)
        return policy

    def _resume(self, checkpoint_dir: Path, state: checkpoint.CheckpointState) -> None:
        saved = training_state.read(checkpoint_dir / checkpoint.TRAINING_STATE_FILE)
        training_state.apply(
            saved,
            checkpoint_dir / checkpoint.TRAINING_DIR,
            self._policy,
            self._optimizer,
            self._scheduler,
            rank=self._rank,
            world_size=self._world_size,
        )
        self._place_moments("cpu" if self._config.trainer.offload_optimizer else None)
        if self.head:
            self.head.restore(saved)
        self.policy_version = state.policy_version

    def train_step(self, batch: pa.Table) -> dict[str, float]:
        """Train one policy version on the whole batch, a table of `engines.store.tables.TRAINING`.
        Its rows may come in any order; every rank gets the same batch.

        Returns means over the step's updates (`engines.learn.diagnostics`), with veRL's names for
        veRL's metrics. `actor/skipped_updates` counts updates skipped because their loss or
        gradient was not finite; no mean includes them. A batch without a token to train on leaves
        the weights unchanged and returns only the metrics of `read_training_samples`.

        Raises StalenessError when a token's policy version is not allowed. The weights are then
        unchanged. Raises FloatingPointError after more than `MAX_SKIPPED_UPDATES` skipped updates
        in a row, and RuntimeError while engines have the GPU.
        """
        if not self._has_gpu:
            raise RuntimeError("engines have the GPU: call enter_gpu before training")
        rollouts = read_rollouts(batch)
        kl = reference_kl(self._reference, rollouts, self._config, *self._sharing)
        samples, metrics = read_training_samples(rollouts, self._config, self.policy_version, kl)
        minibatches = cut_minibatches(
            samples, self._config.num_minibatches, seed=(self._config.seed, self.policy_version)
        )
        shares = self._assign_shares(minibatches)
        passes = range(self._config.trainer.passes_per_step)
        updates = [self._update(share) for _ in passes for share in shares]
        self.policy_version += 1
        self._canary_token_ids = choose_canaries(rollouts)
        self._long_canaries.train_on(rollouts)
        if self.head:
            metrics |= self.head.train(rollouts, self.policy_version)
        metrics |= replay_metrics(self._policy.replay, rollouts, self._device)
        return self._summarise(updates, shares) | metrics

    def _assign_shares(self, minibatches: Sequence[Sequence[TrainingSample]]) -> list[Share]:
        """Return this rank's shares, with the log-probabilities of the teacher on a server and of
        the old policy where needed."""
        alone = self._policy.alone
        shares = [
            assign_share(own, self._config, *self._sharing, alone=alone) for own in minibatches
        ]
        shares = with_teacher_logprobs(self._config.algorithm.teacher_server, shares)
        if self._config.algorithm.tis_cap is None:
            return shares
        return with_old_logprobs(self._policy, shares, self._config)

    def _summarise(
        self, updates: Sequence[dict[str, float] | None], shares: Sequence[Share]
    ) -> dict[str, float]:
        """Return the metrics of the updates; None stands for a skipped update."""
        knows_old = any(share.old_logprobs is not None for share in shares)
        measured = len(shares) if knows_old else 1
        made = [update for update in updates if update is not None]
        num_measured = sum(update is not None for update in updates[:measured])
        # Skipped updates leave the weights unchanged, so the first real update starts from the old
        # policy.
        metrics = summarise(made, max(1, num_measured))
        if updates:
            metrics["actor/skipped_updates"] = float(len(updates) - len(made))
        return metrics

    def _update(self, share: Share) -> dict[str, float] | None:
        """Make one optimiser update. Return its metrics, or None when it is skipped."""
        self._optimizer.zero_grad(set_to_none=True)
        metrics = accumulate_gradient(
            self._policy, self._reference, share, self._config, self._world_size
        )
        norm = clip_gradient(self._policy, self._config.trainer.max_grad_norm)
        if not math.isfinite(norm) or not math.isfinite(metrics["actor/pg_loss"]):
            return self._skip(norm, metrics["actor/pg_loss"])
        self._num_skipped = 0
        metrics["actor/grad_norm"] = norm
        metrics["actor/lr"] = float(self._scheduler.get_last_lr()[0])
        if self._config.trainer.offload_optimizer:
            self._place_moments(self._device)
        self._optimizer.step()
        self._scheduler.step()
        if self._config.trainer.offload_optimizer:
            self._optimizer.zero_grad(set_to_none=True)
            self._place_moments("cpu")
        return metrics

    def _skip(self, norm: float, loss: float) -> None:
        """Skip an update. Raise FloatingPointError after too many in a row."""
        self._optimizer.zero_grad(set_to_none=True)
        self._num_skipped += 1
        if self._num_skipped > MAX_SKIPPED_UPDATES:
            raise FloatingPointError(
                f"the loss is {loss} and its gradient's norm {norm} after {self.policy_version} "
                f"training steps. This is update {self._num_skipped} in a row that is not finite, "
                f"and at most {MAX_SKIPPED_UPDATES} may be. The policy was not updated. Look "
                "at actor/grad_norm and mismatch/k3 of the steps before, and lower "
                "trainer.learning_rate"
            )

    def _place_moments(self, device: torch.device | str | None) -> None:
        """Move AdamW's moments to a device; None leaves them where they are."""
        for state in self._optimizer.state.values() if device else ():
            for moment in MOMENTS:
                state[moment] = state[moment].to(device)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user about the loaded policy."""
        return (ALONE,) if self._policy.alone else ()

    @property
    def _compute_dtype(self) -> torch.dtype:
        """The engine's data type on a GPU, else float32. Weights and optimiser state stay
        float32."""
        on_gpu = self._device.type == "cuda"
        return getattr(torch, self._config.model.dtype) if on_gpu else torch.float32

    def logprobs(
        self, token_ids: Sequence[Sequence[int] | NDArray[np.int32]], temperature: float = 1.0
    ) -> list[NDArray[np.float32]]:
        """Return an array for each sequence, [len(sequence) - 1], with the log-probabilities of its
        tokens after the first. A sequence needs at least two tokens and must fit a micro-batch."""
        sequences = [TokenSequence(np.asarray(ids, np.int32), 1) for ids in token_ids]
        budget = self._config.trainer.row_tokens
        return score_sequences(self._policy, sequences, budget, temperature)

    def canaries(self, token_ids: Sequence[Sequence[int]] | None = None) -> tuple[Canary, ...]:
        """Return canaries: sequences with this policy's log-probabilities at temperature 1, in
        float32 and in the engines' data type. They are cut so that they share a row, as samples do.
        By default they are the beginnings of rollouts that this process last trained on."""
        given = self._canary_token_ids if token_ids is None else token_ids
        room = self._config.trainer.row_tokens // max(1, len(given))
        return self._scored([ids[: max(2, room)] for ids in given])

    def long_canaries(self, token_ids: Sequence[Sequence[int]] | None = None) -> tuple[Canary, ...]:
        """Return a long canary and a short one that lies behind it in its row, or nothing when they
        are not due (`LongCanaries`). If the row is too short for both, the long one is cut for the
        row. By default they come from rollouts that this process last trained on."""
        taken = self._long_canaries.take(token_ids)
        if not taken:
            return ()
        budget = self._config.trainer.row_tokens
        long, behind = taken[0], taken[1][: max(2, budget // 2)]
        room = budget - len(behind) + 2
        in_row = self._scored([long[:room], behind])
        whole = in_row[:1] if room >= len(long) else self._scored([long])
        return (*whole, in_row[1])

    def _scored(self, chosen: Sequence[Sequence[int] | NDArray[np.int32]]) -> tuple[Canary, ...]:
        with merged_at_work(self._policy.model), self._policy.uncompiled():
            with ComputeIn(torch.float32):
                exact = self.logprobs(chosen)
            with ComputeIn(getattr(torch, self._config.model.dtype)):
                rounded = self.logprobs(chosen)
        return tuple(
            Canary(tuple(map(int, ids)), tuple(own.tolist()), tuple(other.tolist()))
            for ids, own, other in zip(chosen, exact, rounded, strict=True)
        )

    def to_publish(self) -> WholeTensors:
        """Return the policy for the engines. Every rank must take its tensors."""
        assert not self._host_copies.hold_something, "weights are not on the GPU"
        return whole_tensors(self._policy.model, getattr(torch, self._config.model.dtype))

    def warn_of_rounding(self, arrived: float | None) -> tuple[str, ...]:
        """Warn once when rounding costs engines too much of the adapters' update."""
        if self._has_warned or arrived is None or arrived >= LOW:
            return ()
        self._has_warned = True
        return (warning_of(arrived, self._config.model.dtype),)

    def weights_buffer(self) -> bytes:
        """Return the policy as one safetensors file in the engines' data type, for a single engine.
        Ranks other than 0 return empty bytes."""
        dtype = getattr(torch, self._config.model.dtype)
        tensors = training_state.host_tensors(self._policy, dtype, keep=self._rank == 0)
        return safetensors.torch.save(tensors, {"format": "pt"}) if self._rank == 0 else b""

    def save(self, step: int, loader_state: dict[str, Any]) -> Path:
        """Write `global_step_<step>/` atomically and remove checkpoints beyond `keep_checkpoints`.

        Returns the checkpoint's directory. It is complete when any rank returns.
        """
        assert not self._host_copies.hold_something, "weights are not on the GPU"
        directory = checkpoint.checkpoints_dir(self._config)
        small = training_state.capture(self._optimizer, self._scheduler) | head_state(self.head)
        trained = training_state.trained_tensors(self._policy, self._optimizer)
        dtype = getattr(torch, self._config.model.dtype)
        export = training_state.host_tensors(self._policy, dtype, keep=self._rank == 0)
        adapter = adapter_tensors(self._policy.model)
        if self._rank == 0:
            state = checkpoint.CheckpointState(
                step=step, policy_version=self.policy_version, loader_state=loader_state
            )

            files = find_start_files(self._config.model.path, directory)

            def write(path: Path) -> dict[str, str]:
                shards = training_state.write_shards(path / checkpoint.TRAINING_DIR, trained)
                self._write_whole(path, small, export, files, adapter)
                return {f"{checkpoint.TRAINING_DIR}/{name}": one for name, one in shards.items()}

            tensor_bytes = sum(map(training_state.num_bytes, (trained, export, adapter)))
            checkpoint.write_checkpoint(directory, state, write, tensor_bytes + files.num_bytes)
            checkpoint.prune_checkpoints(directory, self._config.trainer.keep_checkpoints)
        else:
            unfinished = checkpoint.unfinished_dir(directory, step)
            training_state.write_shards(unfinished / checkpoint.TRAINING_DIR, trained)
        if self._world_size > 1:
            dist.barrier()
        return directory / checkpoint.checkpoint_name(step)

    def _write_whole(
        self,
        path: Path,
        small: dict[str, Any],
        export: dict[str, Tensor],
        files: StartFiles,
        adapter: dict[str, Tensor],
    ) -> None:
        # Open the file in Python: torch's own writer gives no clear error when the disk is full.
        with (path / checkpoint.TRAINING_STATE_FILE).open("wb") as file:
            torch.save(small, file)
        start, lora = self._config.model.path, self._config.trainer.lora
        write_export(self._policy.model, export, files, path / checkpoint.MODEL_DIR)
        if lora:
            write_adapter(adapter, lora, start, path / checkpoint.ADAPTER_DIR)
