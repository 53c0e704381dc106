"""Check a profile's settings before anything is started. Needs no Prefect."""

from refrain.engines.gpus.placement import Wanted
from refrain.engines.inference.engine.supported import check_version
from refrain.engines.latency.grid import decode_grid
from refrain.schemas.inputs import ModelConfig
from refrain.schemas.profile import ProfileConfig
from refrain.tasks.profile_shards import check_shards, measured_by
from refrain.tasks.run.machine import check_gpus
from refrain.tasks.run.model_inputs import check_beside, check_model, text_config

LONGEST_DEFAULT_CONTEXT = 16_384
_BESIDE = ".measuring"


def read_profile_inputs(config: ProfileConfig) -> int:
    """Return the longest context to measure, in tokens. Raise ValueError for settings that cannot
    be measured."""
    check_version()
    measured = ModelConfig(
        path=config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    check_model(measured, "--model")
    model = text_config(measured)
    context = getattr(model, "max_position_embeddings", LONGEST_DEFAULT_CONTEXT)
    max_window = max(config.windows, default=0)
    # Room for the drafts of the last step, and for vLLM's look-ahead of the same size.
    ahead = 2 * max_window
    room = context - ahead
    if config.max_context and config.max_context > room:
        raise ValueError(
            f"max_context is {config.max_context}, but {config.model} has a context of {context} "
            f"tokens, and {room} with draft windows of {max_window}: lower max_context"
        )
    check_shards(config)
    for tp_degree in config.tp_degrees:
        if model.num_attention_heads % tp_degree:
            raise ValueError(
                f"tp_degree {tp_degree} does not divide the {model.num_attention_heads} attention "
                f"heads of {config.model}"
            )
    longest = config.max_context or min(room, LONGEST_DEFAULT_CONTEXT)
    check_beside(
        [model.path for model in config.draft_models],
        measured,
        "draft_models",
        longest + ahead,
        "max_context + twice the longest of windows",
    )
    decode_grid(1, config.max_batch, longest, config.max_batch * longest, room_to_grow(config))
    check_gpus(gpus_wanted(config))
    return longest


def gpus_wanted(config: ProfileConfig) -> list[Wanted]:
    """Return the GPUs of the kind of process that needs most. Only one kind (engines, or the
    processes of one draft model) runs at a time."""
    tp_degree = max(measured_by(config, tp_degree)[1] for tp_degree in config.tp_degrees)
    setting = "num_engines x the largest of tp_degrees"
    kinds = [[Wanted(f"engine {i}", tp_degree, setting) for i in range(config.num_engines)]]
    for model in config.draft_models:
        setting = "num_engines of a draft model"
        own = [Wanted(f"{model.name} {i}", 1, setting) for i in range(model.num_engines)]
        kinds.append(own)
    return max(kinds, key=lambda own: sum(one.num_gpus for one in own))


def room_to_grow(config: ProfileConfig) -> int:
    """Return the tokens by which a sequence grows during a measurement, warm-up included."""
    return config.decode_steps + 8


def beside(config: ProfileConfig) -> ProfileConfig:
    """Return the config of a new profile that is measured while the earlier one stays in use."""
    longest = 64 - len(_BESIDE)
    return config.model_copy(update={"name": config.run_dir.name[:longest] + _BESIDE})
