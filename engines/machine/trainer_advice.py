"""Find settings that make a trainer rank small enough. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.machine.trainer_memory import Training, adapter_params, trainer_footprint
from refrain.schemas.config import TrainConfig
from refrain.schemas.trainer import LoraConfig

_LORA_RANK = LoraConfig().rank
_MOST_RANKS = 1024


def trainer_advice(
    shape: ModelShape, training: Training, config: TrainConfig, usable_bytes: float
) -> str:
    """Return settings that make a rank fit: any one of them, or else all of them together.

    When engines and trainer take turns, more ranks need more engines. So LoRA and bfloat16 are
    offered too. Sharing rows among the ranks is offered when no smaller change is enough.
    """

    def fits(changed: Training) -> bool:
        return trainer_footprint(shape, changed).bytes <= usable_bytes

    def ranks(changed: Training) -> str | None:
        num = changed.num_ranks
        while (num := 2 * num) <= _MOST_RANKS:
            if fits(replace(changed, num_ranks=num)):
                return _num_processes(config, num)
        return None

    choices = _smaller(training, config)
    alone = [name for name, changed in choices.items() if fits(changed)]
    if config.takes_turns and not alone:
        alone = _least(
            [n for n, changed in _lesser(config, shape, training).items() if fits(changed)]
        )
    if not alone:
        alone = [name for name, one in _shared_rows(config, shape, training) if fits(one)][:1]
    if more := ranks(training):
        alone.append(more)
    if alone:
        return f"set {' or '.join(alone)}"
    changing = [name for name, changed in choices.items() if changed != training]
    smallest = _all_of(training, choices.values())
    if not fits(smallest):
        changing.append(ranks(smallest) or _num_processes(config, _MOST_RANKS))
    return f"set {' and '.join(changing)}, or take GPUs with more memory or a smaller model"


def _smaller(training: Training, config: TrainConfig) -> dict[str, Training]:
    """Return variants that need less memory, by the one setting that makes each."""
    least = min(training.micro_batch_tokens, -(-config.max_model_len // training.context_parallel))
    fewer = replace(training, micro_batch_tokens=least, response_tokens=least)
    return {
        "trainer.gradient_checkpointing=true": replace(training, gradient_checkpointing=True),
        f"trainer.micro_batch_tokens={least}": fewer,
        _without_reference(config): replace(training, reference_params=0),
        "trainer.num_replicas=1": replace(training, num_replicas=1),
        "trainer.offload_optimizer=true": replace(training, offload_optimizer=True),
    }


def _shared_rows(
    config: TrainConfig, shape: ModelShape, training: Training
) -> Iterator[tuple[str, Training]]:
    """Yield variants in which more of the ranks share a row that holds the longest sample."""
    for num in range(training.context_parallel + 1, training.num_ranks + 1):
        if training.num_ranks % num or shape.num_heads % num:
            continue
        least = min(training.micro_batch_tokens, -(-config.max_model_len // num))
        name = f"trainer.context_parallel={num} and trainer.micro_batch_tokens={least}"
        sizes = {"micro_batch_tokens": least, "response_tokens": least}
        yield name, replace(training, context_parallel=num, **sizes)


def _without_reference(config: TrainConfig) -> str:
    """Return the settings that need no model beside the policy."""
    if config.algorithm.teacher:
        return "algorithm.teacher_server in place of algorithm.teacher"
    names = ("kl_coefficient", "reward_kl_coefficient")
    used = [name for name in names if getattr(config.algorithm, name) > 0.0]
    return " and ".join(f"algorithm.{name}=0" for name in used or names[:1])


def _all_of(training: Training, choices: Iterable[Training]) -> Training:
    """Return the training settings with the changes of all choices."""
    changes: dict[str, Any] = {}
    for choice in choices:
        for field in fields(Training):
            value = getattr(choice, field.name)
            if value != getattr(training, field.name):
                changes[field.name] = value
    return replace(training, **changes)


def _lesser(config: TrainConfig, shape: ModelShape, training: Training) -> dict[str, Training]:
    """Return variants that train an adapter, in bfloat16, or both, by their settings."""
    lora, narrow = f"trainer.lora.rank={_LORA_RANK}", "trainer.dtype=bfloat16"
    in_half = replace(training, weight_bytes=2)
    if training.adapter_params is not None:
        return {narrow: in_half}
    adapters = {"adapter_params": adapter_params(shape, _LORA_RANK)}
    if config.algorithm.teacher is None:
        adapters["reference_params"] = 0
    return {
        lora: replace(training, **adapters),
        narrow: in_half,
        f"{lora} and {narrow}": replace(in_half, **adapters),
    }


def _least(names: list[str]) -> list[str]:
    """Return the names that contain no other name. Others combine several settings."""
    return [name for name in names if not any(other in name for other in names if other != name)]


def _num_processes(config: TrainConfig, num: int) -> str:
    """Return the setting for `num` ranks. If engines share the ranks' GPUs, add enough engines."""
    rollout, said = config.rollout, f"trainer.num_processes={num}"
    if not config.takes_turns or num <= rollout.num_engines * rollout.tp_degree:
        return said
    return f"{said} with rollout.num_engines={-(-num // rollout.tp_degree)}"
