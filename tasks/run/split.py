"""Split GPUs between engines and drafters before a run starts (SpecActor, Algorithm 1).

    specactor.split_gpus, profile ──► rollout.num_engines, the model's num_engines, window

The planned numbers replace `specactor.split_gpus` in the run's recorded config. A resumed run keeps
them, unless you give it another number of GPUs.
"""

from refrain.engines.learn.model_dir import check_model_dir
from refrain.engines.specactor.planner import Cluster, GpuSplit, split_gpus
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import DraftModel
from refrain.tasks.run.preflight import read_latency

EXPECTED_ACCEPTANCE = 0.7
"""Probability that a draft model's token is accepted. The run measures it only after the split."""


def with_gpu_split(config: TrainConfig) -> tuple[TrainConfig, str]:
    """Return the config with planned numbers instead of `specactor.split_gpus`, and a sentence
    about them. It is empty if there is nothing to split. Raise ValueError when no plan is
    possible."""
    specactor = config.specactor
    if specactor.split_gpus is None:
        return config, ""
    drafter = _planned_for(config)
    split = _plan(config, drafter.name, specactor.split_gpus)
    models = [
        model.model_copy(update={"num_engines": split.num_drafters}) if model == drafter else model
        for model in specactor.draft_models
    ]
    changed = {"draft_models": tuple(models), "window": split.window, "split_gpus": None}
    rollout = config.rollout.model_copy(update={"num_engines": split.num_engines})
    planned = config.model_copy(
        update={"rollout": rollout, "specactor": specactor.model_copy(update=changed)}
    )
    return planned, _sentence(config, drafter.name, split)


def _planned_for(config: TrainConfig) -> DraftModel:
    """Return the draft model to plan for: the one in use, or the first if steps begin with
    history."""
    specactor, asked = config.specactor, "specactor.split_gpus is set"
    if not specactor.draft_models:
        raise ValueError(
            f"{asked}, but there is no draft model to give GPUs to: add one to "
            "specactor.draft_models"
        )
    if config.pat.tp_degrees:
        raise ValueError(
            f"{asked}, but with pat.tp_degrees engines take whole nodes: set rollout.num_engines "
            "and the num_engines of specactor.draft_models instead"
        )
    named = [model for model in specactor.draft_models if model.name == specactor.drafter]
    return (named or list(specactor.draft_models))[0]


def _plan(config: TrainConfig, drafter: str, num_gpus: int) -> GpuSplit:
    tp_degree, context_tokens = config.rollout.tp_degree, config.typical_context_tokens
    if num_gpus <= tp_degree:
        raise ValueError(
            f"specactor.split_gpus ({num_gpus}) leaves no GPU for a drafter beside an engine with "
            f"rollout.tp_degree={tp_degree}: raise split_gpus or lower tp_degree"
        )
    check_model_dir(config.model.path)
    latency = read_latency(config)
    if latency is None:
        raise ValueError(
            "specactor.split_gpus is set but profile is not: the speed of drafter and engines is "
            f"unknown. Make a profile with refrain profile --draft-model {drafter}=PATH, and set "
            "profile=NAME"
        )
    held = int(latency.profile.kv_capacity_tokens(tp_degree) / context_tokens)
    num_requests = config.drawn_prompts_per_step * config.rollout.group_size
    return split_gpus(
        Cluster(
            num_requests,
            num_gpus,
            tp_degree,
            context_tokens,
            max_batch=max(1, min(config.rollout.max_num_seqs, held)),
            max_drafted=config.rollout.max_num_seqs,
        ),
        latency,
        drafter,
        EXPECTED_ACCEPTANCE,
        max_window=config.engine.max_draft,
    )


def _sentence(config: TrainConfig, drafter: str, split: GpuSplit) -> str:
    specactor, tp_degree = config.specactor, config.rollout.tp_degree
    taken = split.num_engines * tp_degree + split.num_drafters
    left = (specactor.split_gpus or taken) - taken
    left_over = f", {left} left over" if left else ""
    gain = split.tokens_per_s / split.plain_tokens_per_s
    later = ". If drafting pays, it does so only later in a step" if gain < 1.0 else ""
    return (
        f"split of {specactor.split_gpus} GPUs by profile={config.profile}: "
        f"rollout.num_engines={split.num_engines} of TP {tp_degree} with {split.batch} requests "
        f"each, {split.num_drafters} of drafter {drafter}, specactor.window={split.window}"
        f"{left_over}. At an acceptance of {EXPECTED_ACCEPTANCE:g} a step begins with "
        f"{split.tokens_per_s:,.0f} tokens/s, {gain:.2f} times those of engines on all GPUs "
        f"without drafts{later}"
    )
