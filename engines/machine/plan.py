"""Memory of every role of a run on GPUs, before anything is started. Pure.

    GPU of a trainer rank    engines.learn.footprint
    GPU of an engine         weights / TP degree, KV cache, process; parked ones: engines.pat.memory
    GPU of a drafter         its share of the GPU
    memory of a node         processes, /dev/shm, the model that is exported, index, moments
    /dev/shm of a node       weights on their way to the engines, rows of two steps
    disk                     checkpoints that are kept, and the one that is written

A checkpoint is 12 bytes a parameter (weights and AdamW's two moments in float32) and the exported
model. The index and the rows are of responses that are as long as they may be.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engines.latency.model_shape import DTYPE_BYTES, ModelShape
from engines.learn.footprint import (
    Training,
    adapter_params,
    moment_bytes,
    trainer_footprint,
)
from engines.machine.nodes import Nodes
from engines.pat.memory import (
    USABLE_SHARE,
    WORKING_BYTES,
    gpu_footprint,
    plan_parked_weights,
)
from schemas.config import TrainConfig

HOST_PROCESS_BYTES = 4e9
"""Assumed for the host memory of a process that works on a GPU: its code, CUDA's, and buffers."""
CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint, beside the exported model."""
INDEX_BYTES = 16
"""Bytes of a token in the history index (`refrain bench index`), rounded up."""
ROW_BYTES = 16
"""Bytes of a token on its way from engines to the trainer: its id, log-probability and version."""
_MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a run takes in one place."""

    place: str
    bytes: float
    usable_bytes: float | None
    """Memory that it may take there; None: it is not known."""
    parts: str
    mend: str
    """Settings that make it less."""

    @property
    def fits(self) -> bool:
        return self.usable_bytes is None or self.bytes <= self.usable_bytes

    def __str__(self) -> str:
        usable = self.usable_bytes or 0.0
        return (
            f"{self.place} needs {_gb(self.bytes)} of the {_gb(usable)} that can be used "
            f"({self.parts}): {self.mend}"
        )


def require_fits(needs: Iterable[Need]) -> None:
    """Raises ValueError that names every place that is too small, and the settings to change."""
    if lacking := [str(need) for need in needs if not need.fits]:
        raise ValueError("the run does not fit. " + "; ".join(lacking))


def plan_run(
    config: TrainConfig, shape: ModelShape, nodes: Nodes, num_processes: int
) -> tuple[Need, ...]:
    """Memory that a run takes, place by place. `num_processes`: of the node that has most of them.

    Raises ValueError when engines of several TP degrees do not fit on their GPUs.
    """
    needs = [_trainer(config, shape, nodes), _engine(config, shape, nodes)]
    if config.specactor.draft_models:
        needs.append(_drafter(config, nodes))
    return (*needs, *_hosts(config, shape, nodes, num_processes))


def plan_disk(config: TrainConfig, shape: ModelShape, disk_bytes: float | None) -> Need:
    """Checkpoints of a run. `disk_bytes`: that are free for them."""
    one, num = _checkpoint_bytes(config, shape), config.trainer.keep_checkpoints + 1
    return Need(
        "the disk of checkpoints",
        num * one,
        disk_bytes,
        f"{num} checkpoints of {_gb(one)}, one of them being written",
        "lower trainer.keep_checkpoints, or set runs_dir to a larger disk",
    )


def training_of(config: TrainConfig, shape: ModelShape) -> Training:
    """Settings that decide the memory of a rank, at worst: prompts are short."""
    trainer = config.trainer
    adapters = adapter_params(shape, trainer.lora.rank) if trainer.lora else None
    return Training(
        num_ranks=trainer.num_processes,
        micro_batch_tokens=trainer.micro_batch_tokens,
        response_tokens=trainer.micro_batch_tokens,
        gradient_checkpointing=trainer.gradient_checkpointing,
        has_reference=config.algorithm.kl_coefficient > 0.0 and adapters is None,
        num_replicas=trainer.num_replicas,
        adapter_params=adapters,
        weight_bytes=DTYPE_BYTES[trainer.dtype],
        offload_optimizer=trainer.offload_optimizer,
        reshard=trainer.reshard,
    )


def _trainer(config: TrainConfig, shape: ModelShape, nodes: Nodes) -> Need:
    training, usable = training_of(config, shape), nodes.gpu_bytes * USABLE_SHARE
    need = trainer_footprint(shape, training)
    mends = _trainer_mends(shape, training, config.max_model_len, usable)
    return Need("the GPU of a trainer rank", need.bytes, usable, str(need), mends)


def _trainer_mends(
    shape: ModelShape, training: Training, max_model_len: int, usable_bytes: float
) -> str:
    """Settings of which each alone, or else all together, make a rank small enough."""

    def fits(changed: Training) -> bool:
        return trainer_footprint(shape, changed).bytes <= usable_bytes

    def ranks(changed: Training) -> Training | None:
        num = changed.num_ranks
        while (num := 2 * num) <= _MOST_RANKS:
            if fits(more := replace(changed, num_ranks=num)):
                return more
        return None

    least = min(training.micro_batch_tokens, max_model_len)
    fewer = {"micro_batch_tokens": least, "response_tokens": least}
    choices = {
        "trainer.gradient_checkpointing=true": replace(training, gradient_checkpointing=True),
        f"trainer.micro_batch_tokens={least}": replace(training, **fewer),
        "algorithm.kl_coefficient=0": replace(training, has_reference=False),
        "trainer.num_replicas=1": replace(training, num_replicas=1),
        "trainer.reshard=true": replace(training, reshard=True),
        "trainer.offload_optimizer=true": replace(training, offload_optimizer=True),
    }
    alone = [name for name, changed in choices.items() if fits(changed)]
    if more := ranks(training):
        alone.append(f"trainer.num_processes={more.num_ranks}")
    if alone:
        return f"set {' or '.join(alone)}"
    changing = [name for name, changed in choices.items() if changed != training]
    changed = replace(
        training,
        gradient_checkpointing=True,
        has_reference=False,
        num_replicas=1,
        reshard=True,
        offload_optimizer=True,
        **fewer,
    )
    if not fits(changed):
        more = ranks(changed)
        changing.append(f"trainer.num_processes={more.num_ranks if more else _MOST_RANKS}")
    return f"set {' and '.join(changing)}, or take GPUs with more memory or a smaller model"


def _engine(config: TrainConfig, shape: ModelShape, nodes: Nodes) -> Need:
    rollout, degrees = config.rollout, config.tp_degrees
    usable = nodes.gpu_bytes * USABLE_SHARE
    kv_bytes, resident = rollout.kv_cache_bytes, True
    sample = _sample_kv_bytes(config, shape)
    if len(degrees) > 1:
        if kv_bytes is None:
            raise ValueError(
                "rollout.kv_cache_bytes is not set: engines of several TP degrees on the same GPUs "
                "cannot each take what is free; set it to what one process may have for its KV "
                "cache"
            )
        parked = config.pat.parked_weights
        choice = plan_parked_weights(parked, shape.weight_bytes, degrees, kv_bytes, nodes.gpu_bytes)
        resident = choice == "resident"
    if kv_bytes is None:
        own = nodes.gpu_bytes * rollout.gpu_memory_utilization
        left = own - shape.weight_bytes / rollout.tp_degree - WORKING_BYTES
        # vLLM starts with no less. One that is given may be less: a window needs no more.
        kv_bytes = max(sample, left)
    need = gpu_footprint(shape.weight_bytes, degrees, kv_bytes, resident=resident)
    holds = f"its cache holds {kv_bytes / sample:,.1f} samples of {config.max_model_len} tokens"
    return Need(
        "the GPU of an engine",
        need.bytes,
        usable,
        f"{need}; {holds}",
        "raise rollout.tp_degree, lower rollout.kv_cache_bytes or data.max_response_tokens, or "
        "take fewer pat.tp_degrees",
    )


def _sample_kv_bytes(config: TrainConfig, shape: ModelShape) -> float:
    """Keys and values of one sample on one GPU."""
    shards = min(config.rollout.tp_degree, shape.num_kv_heads)
    return shape.kv_bytes_per_token * config.max_model_len / shards


def _drafter(config: TrainConfig, nodes: Nodes) -> Need:
    share = config.specactor.gpu_memory_share
    return Need(
        "the GPU of a drafter",
        share * nodes.gpu_bytes,
        nodes.gpu_bytes * USABLE_SHARE,
        f"weights, KV cache and process in {share:.0%} of it",
        "lower specactor.gpu_memory_share",
    )


def _hosts(
    config: TrainConfig, shape: ModelShape, nodes: Nodes, num_processes: int
) -> Sequence[Need]:
    """Memory of the node with most processes, its /dev/shm, and the disk."""
    versions = 1 + max(1, config.max_staleness)
    tokens = config.drawn_prompts_per_step * config.rollout.group_size * config.max_model_len
    weights, rows = versions * shape.weight_bytes, 2 * ROW_BYTES * tokens
    shm = f"{_gb(weights)} of weights ({versions} at a time), {_gb(rows)} of rows of two steps"
    processes, index = num_processes * HOST_PROCESS_BYTES, INDEX_BYTES * tokens
    export = DTYPE_BYTES[config.model.dtype] * shape.num_params
    training = training_of(config, shape)
    moments = training.num_replicas * moment_bytes(shape, training)
    moments = moments if training.offload_optimizer else 0.0
    mend = "take nodes with more memory, or lower prompts_per_step"
    return (
        Need(
            "the memory of a node",
            processes + weights + rows + export + index + moments,
            nodes.host_bytes and nodes.host_bytes * USABLE_SHARE,
            f"{_gb(processes)} of {num_processes} processes, {_gb(weights + rows)} in /dev/shm, "
            f"{_gb(export)} of the model being exported, {_gb(index)} of index"
            + (f", {_gb(moments)} of the optimiser" if moments else ""),
            mend,
        ),
        Need("/dev/shm of a node", weights + rows, nodes.shm_bytes, shm, f"enlarge it, or {mend}"),
        plan_disk(config, shape, nodes.disk_bytes),
    )


def _checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> float:
    return (CHECKPOINT_BYTES + DTYPE_BYTES[config.model.dtype]) * shape.num_params


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
