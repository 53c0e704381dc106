"""Plan the memory of a run on GPUs before anything starts. Pure.

    GPU of a trainer rank    see engines.machine.trainer_memory
    GPU of an engine         weights / TP degree, KV cache, process, indexes for drafts on it
                             (rollout.model_runner: v2); parked ones: engines.pat.memory
    GPU shared by both       phase by phase, see engines.machine.shared_gpu
    GPU of a drafter         weights, process, KV cache of at least one sample of full length
    memory of a node         processes, /dev/shm, the model during export, index, and the moments or
                             the whole trainer state if they are offloaded
    /dev/shm of a node       weights on their way to the engines, rows of two steps
    disk                     kept checkpoints and the one being written

A checkpoint takes 12 bytes per parameter (weights and AdamW's two moments in float32) and the
exported model. For the index and the rows, the plan assumes that all responses have full length.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from refrain.engines.latency.model_shape import DTYPE_BYTES, ModelShape
from refrain.engines.machine.nodes import Nodes
from refrain.engines.machine.shared_gpu import HANDING_OVER, TRAINING, SharedGpu, handed_bytes
from refrain.engines.machine.trainer_advice import trainer_advice
from refrain.engines.machine.trainer_memory import (
    Training,
    adapter_params,
    draft_head_params,
    moment_bytes,
    resting_bytes,
    trainer_footprint,
    with_kept_layers,
)
from refrain.engines.pat.memory import (
    USABLE_SHARE,
    WORKING_BYTES,
    Footprint,
    gpu_footprint,
    plan_parked_weights,
)
from refrain.engines.user_files import read_json_object
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import DEVICE_INDEX_BYTES, DRAFTER_MEMORY_SHARE

HOST_PROCESS_BYTES = 4e9
"""Assumed host memory of a GPU process: its code, CUDA's code, and buffers."""
CHECKPOINT_BYTES = 12
"""Bytes per parameter in a checkpoint, without the exported model."""
INDEX_BYTES = 16
"""Bytes per token in the history index (`refrain bench index`), rounded up."""
ROW_BYTES = 16
"""Bytes per token on its way from engines to the trainer: its id, log-probability and version."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a run needs in one place."""

    place: str
    bytes: float
    usable_bytes: float | None
    """Memory that the run can use there; None: unknown."""
    parts: str
    """The parts of `bytes`, in words."""
    fix: str
    """Settings that lower the need."""

    @property
    def fits(self) -> bool:
        return self.usable_bytes is None or self.bytes <= self.usable_bytes

    def __str__(self) -> str:
        usable = self.usable_bytes or 0.0
        return (
            f"{self.place} needs {_gb(self.bytes)} of the {_gb(usable)} that can be used "
            f"({self.parts}): {self.fix}"
        )


def require_fits(needs: Iterable[Need]) -> None:
    """Raise ValueError when a place is too small. The error names all of them with the settings to
    change."""
    if lacking := [str(need) for need in needs if not need.fits]:
        raise ValueError("the run does not fit. " + "; ".join(lacking))


def memory_needs(
    config: TrainConfig,
    shape: ModelShape,
    nodes: Nodes,
    num_processes: int,
    drafters: Mapping[str, ModelShape] = {},
) -> tuple[Need, ...]:
    """Return the memory that a run needs in each place.

    `num_processes`: processes of the node that has the most. `drafters`: draft models by name.
    Raise ValueError when engines of several TP degrees do not fit on their GPUs.
    """
    if config.takes_turns:
        needs = _shared(config, shape, nodes)
    else:
        needs = [_trainer(config, shape, nodes), _engine(config, shape, nodes)]
    needs += [_drafter(config, name, drafter, nodes) for name, drafter in drafters.items()]
    return (*needs, *_hosts(config, shape, nodes, num_processes))


def plan_disk(config: TrainConfig, shape: ModelShape, disk_bytes: float | None) -> Need:
    """Return the disk space for checkpoints. `disk_bytes`: free space of the disk."""
    one, num = _checkpoint_bytes(config, shape), config.trainer.keep_checkpoints + 1
    return Need(
        "the disk of checkpoints",
        num * one,
        disk_bytes,
        f"{num} checkpoints of {_gb(one)}, one of them being written",
        "lower trainer.keep_checkpoints, or set runs_dir to a larger disk",
    )


def training_of(config: TrainConfig, shape: ModelShape) -> Training:
    """Return the settings that decide a rank's memory, in the worst case: micro-batches of response
    tokens only."""
    trainer = config.trainer
    adapters = adapter_params(shape, trainer.lora.rank) if trainer.lora else None
    return Training(
        num_ranks=trainer.num_processes,
        micro_batch_tokens=trainer.micro_batch_tokens,
        response_tokens=trainer.micro_batch_tokens,
        gradient_checkpointing=bool(trainer.gradient_checkpointing),
        reference_params=_reference_params(config, shape),
        entropy_gradient=config.algorithm.entropy_coefficient > 0.0,
        num_replicas=trainer.num_replicas,
        context_parallel=trainer.context_parallel,
        adapter_params=adapters,
        weight_bytes=DTYPE_BYTES[trainer.dtype],
        offload_optimizer=trainer.offload_optimizer,
        draft_head_params=draft_head_params(shape) if config.specactor.train_head else 0,
    )


def kept_layers(config: TrainConfig, shape: ModelShape, gpu_bytes: float) -> int:
    """Return how many layers may keep their activations with `gradient_checkpointing: auto`: the
    memory plan with all layers computed again, and what is then left of the GPU."""
    room = gpu_bytes * USABLE_SHARE
    if config.takes_turns:
        room -= share_gpu(config, shape, gpu_bytes).asleep_bytes
    return with_kept_layers(shape, training_of(config, shape), room).kept_layers


def _reference_params(config: TrainConfig, shape: ModelShape) -> int:
    """Return the parameters of the model that the trainer holds beside the policy. The policy
    without its adapters takes no memory of its own. Raise ValueError for an unreadable teacher."""
    if teacher := config.algorithm.teacher:
        values = read_json_object(teacher / "config.json")
        return ModelShape.from_hf_config(values.get("text_config", values)).num_params
    own = config.algorithm.penalises_kl and not config.trainer.lora
    return shape.num_params if own else 0


def share_gpu(config: TrainConfig, shape: ModelShape, gpu_bytes: float) -> SharedGpu:
    """Return the memory of an engine and a trainer rank that take turns on a GPU. Raise ValueError
    as `memory_needs` does."""
    training = training_of(config, shape)
    return SharedGpu(
        engine=_engine_footprint(config, shape, gpu_bytes),
        num_layouts=len(config.tp_degrees),
        trainer=trainer_footprint(shape, training),
        resting_bytes=resting_bytes(shape, training),
        gpu_bytes=gpu_bytes,
        handed_bytes=handed_bytes(shape) if config.rollout.weight_sync == "ipc" else None,
    )


def _shared(config: TrainConfig, shape: ModelShape, nodes: Nodes) -> list[Need]:
    """Return the need of each phase of a shared GPU."""
    gpu = share_gpu(config, shape, nodes.gpu_bytes)
    training = training_of(config, shape)
    free = gpu.usable_bytes - gpu.asleep_bytes
    of_trainer = trainer_advice(shape, training, config, free)
    of_engine = _engine_advice(config, shape, nodes, gpu.trainer.process_bytes)
    fixes = {TRAINING: of_trainer, HANDING_OVER: "set rollout.weight_sync=file"}
    return [
        Need(
            f"a shared GPU ({phase.name})",
            phase.bytes,
            gpu.usable_bytes,
            phase.parts
            + (f"; {_holds(config, shape, gpu.engine)}" if not index else "")
            + (_row(config) if phase.name == TRAINING else ""),
            fixes.get(phase.name, of_engine),
        )
        for index, phase in enumerate(gpu.phases)
    ]


def _trainer(config: TrainConfig, shape: ModelShape, nodes: Nodes) -> Need:
    training, usable = training_of(config, shape), nodes.gpu_bytes * USABLE_SHARE
    need = trainer_footprint(shape, training)
    fixes = trainer_advice(shape, training, config, usable)
    return Need("the GPU of a trainer rank", need.bytes, usable, f"{need}{_row(config)}", fixes)


def _row(config: TrainConfig) -> str:
    """Return how ranks share a row, in words; nothing if they do not."""
    trainer = config.trainer
    if trainer.context_parallel == 1:
        return ""
    return f"; {trainer.context_parallel} ranks share a row of {trainer.row_tokens:,} tokens"


def _engine(config: TrainConfig, shape: ModelShape, nodes: Nodes) -> Need:
    need = _engine_footprint(config, shape, nodes.gpu_bytes)
    return Need(
        "the GPU of an engine",
        need.bytes,
        nodes.gpu_bytes * USABLE_SHARE,
        f"{need}; {_holds(config, shape, need)}",
        _engine_advice(config, shape, nodes, 0.0),
    )


def _engine_footprint(config: TrainConfig, shape: ModelShape, gpu_bytes: float) -> Footprint:
    rollout, degrees, index_bytes = config.rollout, config.tp_degrees, _index_bytes(config)
    kv_bytes, resident = rollout.kv_cache_bytes, True
    if len(degrees) > 1:
        if kv_bytes is None:
            raise ValueError(
                "rollout.kv_cache_bytes is not set. Engines of several TP degrees share GPUs, so "
                "none of them may take all free memory. Set it to the bytes of one process's KV "
                "cache"
            )
        left = gpu_bytes - index_bytes / USABLE_SHARE
        choice = plan_parked_weights(shape.weight_bytes, degrees, kv_bytes, left)
        resident = choice == "resident"
    if kv_bytes is None:
        own = gpu_bytes * rollout.gpu_memory_utilization
        left = own - shape.weight_bytes / rollout.tp_degree - WORKING_BYTES
        # vLLM does not start with less. A configured size may be smaller: models with a sliding
        # window need less than a full sample.
        kv_bytes = max(_sample_kv_bytes(config, shape), left)
    footprint = gpu_footprint(shape.weight_bytes, degrees, kv_bytes, resident=resident)
    return replace(footprint, index_bytes=index_bytes)


def _index_bytes(config: TrainConfig) -> float:
    """Return the most bytes of history indexes on the GPU of an engine."""
    on_device = config.rollout.model_runner == "v2" and config.drafting.enabled
    return float(DEVICE_INDEX_BYTES) if on_device else 0.0


def _engine_advice(
    config: TrainConfig, shape: ModelShape, nodes: Nodes, others_bytes: float
) -> str:
    """Return settings that make an engine smaller: a lower share of its GPU if this is enough."""
    rollout = config.rollout
    others_bytes += _index_bytes(config)
    share = math.floor(100 * (USABLE_SHARE - others_bytes / nodes.gpu_bytes)) / 100
    least = shape.weight_bytes / rollout.tp_degree + WORKING_BYTES + _sample_kv_bytes(config, shape)
    if rollout.kv_cache_bytes is None and least <= share * nodes.gpu_bytes:
        return f"set rollout.gpu_memory_utilization={share:g}"
    return (
        "raise rollout.tp_degree, lower rollout.kv_cache_bytes or data.max_response_tokens, or "
        "take fewer pat.tp_degrees"
    )


def _holds(config: TrainConfig, shape: ModelShape, engine: Footprint) -> str:
    num = engine.kv_cache_bytes / _sample_kv_bytes(config, shape)
    return f"its cache holds {num:,.1f} samples of {config.max_model_len} tokens"


def _sample_kv_bytes(config: TrainConfig, shape: ModelShape) -> float:
    """Return the KV cache bytes of one sample on one GPU."""
    shards = min(config.rollout.tp_degree, shape.num_kv_heads)
    return shape.kv_bytes_per_token * config.max_model_len / shards


def undrafted(
    config: TrainConfig, drafters: Mapping[str, ModelShape], nodes: Nodes
) -> tuple[str, ...]:
    """Return a sentence for each drafter whose cache cannot hold all responses that it drafts for.

    The responses are taken halfway through their full length.
    """
    context_tokens = config.typical_context_tokens
    said = []
    for name, shape in drafters.items():
        num_held = int(_held_tokens(shape, nodes) / context_tokens)
        each, num_engines = _served(config, name)
        num_served = each * num_engines
        if num_held >= num_served:
            continue
        held_engines = num_held // each
        enough = -(-config.rollout.num_engines // held_engines) if held_engines else 0
        fix = f"its num_engines={enough}" if enough else "a smaller draft model"
        said.append(
            f"Drafter {name} has memory for {num_held:,} of the {num_served:,} responses that it "
            f"drafts for, once they have {context_tokens:,.0f} tokens. The others get no drafts "
            f"until there is room; {fix} would be enough."
        )
    return tuple(said)


def _drafter(config: TrainConfig, name: str, drafter: ModelShape, nodes: Nodes) -> Need:
    """Return the need of a draft model's own GPU. Responses outside its cache get no drafts."""
    sample = drafter.kv_bytes_per_token * config.max_model_len
    num_held = _held_tokens(drafter, nodes) / config.max_model_len
    each, num_engines = _served(config, name)
    return Need(
        f"the GPU of drafter {name}",
        drafter.weight_bytes + WORKING_BYTES + sample,
        DRAFTER_MEMORY_SHARE * nodes.gpu_bytes,
        f"{_gb(drafter.weight_bytes)} of weights, {_gb(WORKING_BYTES)} of its process, "
        f"{_gb(sample)} for a sample; its cache holds {num_held:,.1f} samples of "
        f"{config.max_model_len} tokens, and it drafts for up to {each * num_engines:,}",
        "take a smaller draft model",
    )


def _held_tokens(drafter: ModelShape, nodes: Nodes) -> float:
    """Return the tokens that a drafter process's cache holds."""
    own = DRAFTER_MEMORY_SHARE * nodes.gpu_bytes
    left = own - drafter.weight_bytes - WORKING_BYTES
    return max(0.0, left) / drafter.kv_bytes_per_token


def _served(config: TrainConfig, name: str) -> tuple[int, int]:
    """Return how many responses an engine has at once, and how many engines a drafter process
    serves."""
    rollout = config.rollout
    num_processes = sum(one.name == name for one in config.engine.drafter_processes)
    of_steps = config.drawn_prompts_per_step * rollout.group_size * (1 + config.staleness)
    each = min(rollout.max_num_seqs, -(-of_steps // rollout.num_engines))
    return each, -(-rollout.num_engines // num_processes)


def _hosts(
    config: TrainConfig, shape: ModelShape, nodes: Nodes, num_processes: int
) -> Sequence[Need]:
    """Return the needs of the node with the most processes: memory, /dev/shm and disk."""
    versions = 1 + max(1, config.staleness)
    tokens = config.drawn_prompts_per_step * config.rollout.group_size * config.max_model_len
    weights, rows = versions * shape.weight_bytes, 2 * ROW_BYTES * tokens
    shm = f"{_gb(weights)} of weights ({versions} at a time), {_gb(rows)} of rows of two steps"
    processes, index = num_processes * HOST_PROCESS_BYTES, INDEX_BYTES * tokens
    export = DTYPE_BYTES[config.model.dtype] * shape.num_params
    away = _away_bytes(config, shape, nodes)
    fix = "take nodes with more memory, or lower prompts_per_step"
    return (
        Need(
            "the memory of a node",
            processes + weights + rows + export + index + away,
            nodes.host_bytes and nodes.host_bytes * USABLE_SHARE,
            f"{_gb(processes)} of {num_processes} processes, {_gb(weights + rows)} in /dev/shm, "
            f"{_gb(export)} of the model being exported, {_gb(index)} of index"
            + (f", {_gb(away)} of the trainer's state" if away else ""),
            fix,
        ),
        Need("/dev/shm of a node", weights + rows, nodes.shm_bytes, shm, f"enlarge it, or {fix}"),
        plan_disk(config, shape, nodes.disk_bytes),
    )


def _away_bytes(config: TrainConfig, shape: ModelShape, nodes: Nodes) -> float:
    """Return the bytes of trainer state in host memory, on the node that has the most."""
    training = training_of(config, shape)
    moments = training.num_replicas * moment_bytes(shape, training)
    away = moments if training.offload_optimizer else 0.0
    if config.takes_turns and share_gpu(config, shape, nodes.gpu_bytes).state_leaves:
        away += min(training.num_ranks, nodes.num_gpus) * resting_bytes(shape, training)
    return away


def _checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> float:
    return (CHECKPOINT_BYTES + DTYPE_BYTES[config.model.dtype]) * shape.num_params


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
