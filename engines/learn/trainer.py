"""Trainer processes as Ray actors, and the group through which the driver uses them.

```
driver ── TrainerGroup ──┬── TrainerActor rank 0   rendezvous, weights' files, checkpoints
                         └── TrainerActor rank n   its shard (FSDP2, gloo or nccl)
```

Only the group waits, and every wait ends after `trainer.timeout_s`. The error names the first rank
that failed, or the ranks that did not answer. After an error, shut the group down and start another
one from the last checkpoint.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from refrain.engines.actors import ActorError, NoAnswer, RemoteActor
from refrain.engines.bounded import together
from refrain.engines.couriers import Couriers
from refrain.engines.garbage import freeze_garbage
from refrain.engines.learn.canaries import NUM_SHORT
from refrain.engines.learn.rendezvous import Rendezvous
from refrain.engines.machine.cuda import works_on_cpu
from refrain.engines.private import use_private_kernels
from refrain.engines.weights_file import VersionFiles
from refrain.schemas.config import TrainConfig
from refrain.schemas.weights import Canary, PolicyWeights, WeightsFile

if TYPE_CHECKING:
    from refrain.engines.learn.publishing import Receivers

SHUTDOWN_S = 5.0
"""Longest time that rank 0 has to delete its weights before it is killed."""


class TrainerError(RuntimeError):
    """A trainer process failed or did not answer in time; the message names its rank."""


class TrainerActor:
    """One rank: a `Learner` in its own process. The driver's process does not import torch."""

    def __init__(self, config: TrainConfig, rank: int, gpu: int | None = None) -> None:
        """`gpu`: number of a GPU on its node, which an engine uses in turn; None: use what Ray
        assigns."""
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        self._rank = rank
        self._world_size = config.trainer.num_processes
        self._timeout = timedelta(seconds=config.trainer.timeout_s)
        self._rendezvous = Rendezvous(self._world_size, self._timeout)
        self._trace = config.trainer.trace(config.run_dir)
        with freeze_garbage():
            import torch

            from refrain.engines.learn.learner import Learner

            use_private_kernels()
            works_on_cpu()  # Raises when a GPU was expected and torch finds none.
            if config.trainer.num_threads is not None:
                torch.set_num_threads(config.trainer.num_threads)
            self._learner = Learner(config, rank, self._world_size)
        # Engines still use one version while the next arrives; a pipeline may use older ones too.
        self._files = VersionFiles(1 + max(1, config.staleness))
        self._couriers: Couriers | None = None

    def host_rendezvous(self, one_node: bool) -> str:
        """Open the store at which the ranks meet and return its address. `one_node`: all ranks run
        on this node."""
        assert self._rank == 0
        return self._rendezvous.host(one_node=one_node)

    def join(self, address: str) -> None:
        """Form the process group with the other ranks."""
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=self._rendezvous.open(address),
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )

    def node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def restore(self, checkpoint_dir: Path | None) -> tuple[str, ...]:
        self._learner.restore(checkpoint_dir)
        return self._learner.notes

    def train_step(self, batch: pa.Table) -> dict[str, float]:
        from refrain.engines.learn.trace import traced

        with traced(self._trace, self._learner.policy_version + 1, self._rank):
            return self._learner.train_step(batch)

    def publish(
        self,
        policy_version: int,
        canary_token_ids: Sequence[Sequence[int]] | None,
        receivers: "Receivers | None" = None,
    ) -> PolicyWeights | None:
        """Write the current weights to shared memory on rank 0 and send them to `receivers`. Return
        them on rank 0, None on the other ranks."""
        if policy_version != self._learner.policy_version:
            raise ValueError(
                f"policy version {policy_version} was asked for, but the trainer holds version "
                f"{self._learner.policy_version}"
            )
        # Receiving engines take memory that canaries need, so make the canaries first. Without
        # receivers, send the weights first.
        canaries = self._canaries(canary_token_ids) if receivers else None
        not_handed, arrived = self._give_weights(policy_version, receivers)
        file = self._announced(policy_version) if self._rank == 0 else None
        short, long = canaries or self._canaries(canary_token_ids)
        warnings = self._learner.warn_of_rounding(arrived)
        if file is None:
            return None
        head = self._learner.head.publish(policy_version) if self._learner.head else None
        return PolicyWeights(policy_version, file, short, not_handed, arrived, warnings, long, head)

    def _canaries(
        self, token_ids: Sequence[Sequence[int]] | None
    ) -> tuple[tuple[Canary, ...], tuple[Canary, ...]]:
        """Return the short canaries of every sync, and the long ones."""
        few = token_ids and token_ids[:NUM_SHORT]
        return self._learner.canaries(few), self._learner.long_canaries(token_ids)

    def _give_weights(
        self, policy_version: int, receivers: "Receivers | None"
    ) -> tuple[tuple[str, ...], float | None]:
        """Gather the weights once, for the file that rank 0 writes and for the receivers. Return
        which receivers did not take them and why, and how much of the adapters' update is left
        after rounding."""
        from refrain.engines.learn.publishing import take, written

        whole = self._learner.to_publish()
        if self._rank == 0:
            whole = replace(whole, tensors=written(whole, policy_version, self._files))
        not_handed: tuple[str, ...] = ()
        if receivers is None:
            take(whole.tensors)
        else:
            self._learner.rest()
            not_handed = receivers.send(self._rank, policy_version, whole)
        return not_handed, whole.kept_update.share if whole.kept_update else None

    def _announced(self, policy_version: int) -> WeightsFile:
        """Return the weights file, and make the couriers fetch it on other nodes."""
        path = self._files.path(policy_version)
        node_id = self.node_id()
        file = WeightsFile(path, path.stat().st_size, self._files.num_kept, node_id)
        self._couriers = self._couriers or Couriers(node_id)
        self._couriers.prefetch(policy_version, file)
        return file

    def save(self, step: int, loader_state: dict[str, Any]) -> Path:
        return self._learner.save(step, loader_state)

    def leave_gpu(self, *, state: bool) -> None:
        self._learner.leave_gpu(state=state)

    def enter_gpu(self) -> None:
        self._learner.enter_gpu()

    def shutdown(self) -> None:
        """Delete the published weights and the rendezvous."""
        self._rendezvous.close()
        if self._couriers:
            self._couriers.end()
        self._files.delete()


class TrainerGroup:
    """All trainer processes of a run. Every method runs on all ranks."""

    def __init__(
        self,
        config: TrainConfig,
        name: str | None = None,
        nodes: Sequence[str] = (),
        gpus: Sequence[int] = (),
        *,
        state_leaves: bool = False,
        receivers: Callable[[], "Receivers | None"] = lambda: None,
    ) -> None:
        """Remember where the ranks run; `start` or `adopt` follows.

        `name`: prefix of the actors' names, by which other processes find them. The rank follows.
        `nodes`: node of each rank. Empty: any node.
        `gpus`: GPUs on these nodes, which ranks and engines use in turn. Empty: Ray assigns GPUs.
        `state_leaves`: move weights and moments to host memory while engines have the GPUs.
        `receivers`: return the engines that take weights from these GPUs; called each version.
        """
        self._config = config
        self._name = name
        num_ranks = config.trainer.num_processes
        self._nodes = nodes or (None,) * num_ranks
        self._gpus = gpus or (None,) * num_ranks
        self._state_leaves = state_leaves
        self._receivers = receivers
        self._actors: list[RemoteActor] = []
        self.notes: tuple[str, ...] = ()
        """`Learner.notes`; empty before `start`."""
        self.train_s = 0.0
        """Seconds of the last training step. 0 before the first."""

    def adopt(self, actors: Sequence[Any]) -> None:
        """Use ranks that another process has started."""
        self._actors = [
            RemoteActor.of(f"trainer rank {rank}", actor) for rank, actor in enumerate(actors)
        ]

    async def start(self, checkpoint_dir: Path | None) -> None:
        """Start the processes, and load the starting policy or a checkpoint.

        Raises TrainerError when a process cannot start, or when the model or checkpoint cannot be
        loaded.
        """
        assert not self._actors, "already started"
        # Ask the cluster, not CUDA: the driver may run on a node without a GPU.
        takes_gpus = self._gpus[0] is None and ray.cluster_resources().get("GPU", 0) > 0
        self._actors = [
            RemoteActor(
                f"trainer rank {rank}",
                TrainerActor,
                self._config,
                rank,
                gpu,
                num_cpus=int(not takes_gpus and gpu is None),
                num_gpus=int(takes_gpus),
                node_id=node,
                soft=gpu is None,
                found_by=self._name and f"{self._name}-{rank}",
            )
            for rank, (node, gpu) in enumerate(zip(self._nodes, self._gpus, strict=True))
        ]
        if len(self._actors) > 1:
            one_node = len(await self.nodes()) == 1
            hosted = await self._call("host_rendezvous", one_node, actors=self._actors[:1])
            await self._call("join", hosted[0])
        self.notes = (await self._call("restore", checkpoint_dir))[0]

    async def nodes(self) -> dict[str, str]:
        """Return the nodes that the trainer needs, each with the names of its ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, node in enumerate(await self._call("node_id")):
            ranks.setdefault(node, []).append(rank)
        return {node: f"trainer rank {', '.join(map(str, on))}" for node, on in ranks.items()}

    async def train_step(self, batch: pa.Table | ray.ObjectRef) -> dict[str, float]:
        """Train one policy version on the rewarded batch, or on Ray's reference to it
        (`Learner.train_step`). Every rank gets the whole batch and takes its own share, because
        advantages and denominators depend on all samples."""
        started = time.perf_counter()
        metrics = (await self._call("train_step", batch))[0]
        self.train_s = time.perf_counter() - started
        return metrics

    async def publish(
        self, policy_version: int, canary_token_ids: Sequence[Sequence[int]] | None = None
    ) -> PolicyWeights:
        """Publish the weights in the shared memory of rank 0's node, with canaries.
        `policy_version` must be the current one. Short canaries are the first of
        `canary_token_ids`; a long one is made of them all. By default `Learner` chooses the
        canaries."""
        to = self._receivers()
        return (await self._call("publish", policy_version, canary_token_ids, to))[0]

    async def save(self, step: int, loader_state: dict[str, Any]) -> Path:
        """Write a checkpoint (`Learner.save`)."""
        return (await self._call("save", step, loader_state))[0]

    async def leave_gpus(self) -> None:
        """Hand the GPUs to the engines (`Learner.leave_gpu`)."""
        await self._call("leave_gpu", state=self._state_leaves)

    async def enter_gpus(self) -> None:
        """Take the GPUs back."""
        await self._call("enter_gpu")

    async def shutdown(self) -> None:
        """End all processes. Does nothing when none is running."""
        # Only rank 0 has files to delete. Kill a rank that is still training.
        for writer in self._actors[:1]:
            with suppress(ActorError):
                await writer.call("shutdown", timeout_s=SHUTDOWN_S)
        for actor in self._actors:
            actor.kill()
        self._actors = []

    async def _call(
        self, method: str, *args: object, actors: list[RemoteActor] | None = None, **named: object
    ) -> list[Any]:
        """Call `method` on the ranks and return their results in order of rank."""
        assert self._actors, "start() comes first"
        limit_s = self._config.trainer.timeout_s
        calls: list[asyncio.Task[Any]] = []
        try:
            async with together() as group:
                for actor in actors or self._actors:
                    call = actor.call(method, *args, timeout_s=limit_s, **named)
                    calls.append(group.create_task(call))
        except NoAnswer as error:
            late = [rank for rank, call in enumerate(calls) if call.cancelled() or call.exception()]
            raise TrainerError(
                f"trainer rank(s) {late} did not finish {method} within "
                f"trainer.timeout_s = {limit_s:g} s"
            ) from error
        except ActorError as error:
            raise TrainerError(str(error)) from error
        return [call.result() for call in calls]
