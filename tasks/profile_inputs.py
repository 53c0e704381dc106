"""Check a profile's settings, without Prefect: what is refused has made nothing yet."""

from engines.gpus.placement import Wanted
from engines.inference.engine.supported import check_version
from engines.latency.grid import decode_grid
from schemas.inputs import ModelConfig
from schemas.profile import ProfileConfig
from tasks.profile_shards import check_shards, measured_by
from tasks.run.machine import check_gpus
from tasks.run.model_inputs import check_draft_models, check_model, text_config

LONGEST_DEFAULT_CONTEXT = 16_384
_BESIDE = ".measuring"


def read_profile_inputs(config: ProfileConfig) -> int:
    """The longest context to measure. Raises ValueError for what cannot be measured."""
    check_version()
    measured = ModelConfig(
        path=config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    check_model(measured, "--model")
    model = text_config(measured)
    context = getattr(model, "max_position_embeddings", LONGEST_DEFAULT_CONTEXT)
    max_window = max(config.windows, default=0)
    # The drafts of the last step, and vLLM's own look-ahead of as many.
    ahead = 2 * max_window
    room = context - ahead
    if config.max_context and config.max_context > room:
        raise ValueError(
            f"max_context is {config.max_context}, but {config.model} has a context of {context} "
            f"tokens, {room} beside draft windows of {max_window}: lower it"
        )
    check_shards(config)
    for tp_degree in config.tp_degrees:
        if model.num_attention_heads % tp_degree:
            raise ValueError(
                f"tp_degree {tp_degree} does not divide the {model.num_attention_heads} attention "
                f"heads of {config.model}"
            )
    longest = config.max_context or min(room, LONGEST_DEFAULT_CONTEXT)
    check_draft_models(
        config.draft_models,
        measured,
        "draft_models",
        longest + ahead,
        "max_context + twice the longest of windows",
    )
    decode_grid(1, config.max_batch, longest, config.max_batch * longest, room_to_grow(config))
    check_gpus(gpus_wanted(config))
    return longest


def gpus_wanted(config: ProfileConfig) -> list[Wanted]:
    """GPUs of those processes that take most: they are there at a time when they are of one
    kind."""
    tp_degree = max(measured_by(config, tp_degree)[1] for tp_degree in config.tp_degrees)
    setting = "num_engines x the largest of tp_degrees"
    kinds = [[Wanted(f"engine {i}", tp_degree, setting) for i in range(config.num_engines)]]
    for model in config.draft_models:
        setting = "num_engines of a draft model"
        own = [Wanted(f"{model.name} {i}", 1, setting) for i in range(model.num_engines)]
        kinds.append(own)
    return max(kinds, key=lambda own: sum(one.num_gpus for one in own))


def room_to_grow(config: ProfileConfig) -> int:
    """Tokens by which a sequence grows while it is measured, with warm-up."""
    return config.decode_steps + 8


def beside(config: ProfileConfig) -> ProfileConfig:
    """Config of the profile that is measured anew while the earlier one is in use."""
    longest = 64 - len(_BESIDE)
    return config.model_copy(update={"name": config.run_dir.name[:longest] + _BESIDE})
