"""Check the weights, tokens and shapes of models before anything expensive starts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refrain.engines.data.dataset import Dataset, load_tokenizer
from refrain.engines.data.tokenizer import naming_code
from refrain.engines.data.vocabulary import (
    Vocabulary,
    check_ending_tokens,
    check_rows,
    check_same_tokens,
    read_vocabulary,
)
from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.learn.checkpoint import verify_model
from refrain.engines.learn.model_dir import check_model_dir, check_target_modules
from refrain.engines.learn.weight_files import stored_tensors
from refrain.engines.user_files import read_json_object
from refrain.schemas.config import TrainConfig
from refrain.schemas.inputs import ModelConfig
from refrain.schemas.trainer import LoraConfig

GENERATION = "generation_config.json"
_ROWS_READ_AT_ONCE = 2048
"""Rows of a chunk of DuckDB."""
MAX_EXPERT_BYTES = 2**31 - 1
"""Bytes of a column of such a chunk that DuckDB can give to Arrow."""
_CONTEXT = 4096
"""Context in tokens of a model whose config has none."""


def check_model(model: ModelConfig, setting: str = "model.path") -> tuple[str, ...]:
    """Check that a directory is a model, and that its weights are finite and fit its config. Raise
    ValueError that names the setting. Return warnings about parts that were not checked."""
    verify_model(model.path)
    check_model_dir(model.path, setting)
    # Imported here, because torch takes seconds to load.
    from refrain.engines.learn.export import find_start_files
    from refrain.engines.learn.finite import check_finite
    from refrain.engines.learn.weights_fit import check_weights_fit

    try:
        _check_generation_config(model.path)
        tensors = stored_tensors(model.path)
        check_weights_fit(model, hf_config(model), tensors)
        return (*check_finite(model.path, tensors), *find_start_files(model.path).warnings)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def _check_generation_config(path: Path) -> None:
    """Raise ValueError for a file that the trainer or the engines would refuse or ignore."""
    from transformers import GenerationConfig

    file = path / GENERATION
    if not file.exists():
        return
    read_json_object(file)
    try:
        GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # Each setting may raise another kind of error.
        raise ValueError(
            f"{file} is refused by transformers: {error}. Copy it again, or remove the setting"
        ) from error


def check_against_transformers(
    given: ModelConfig | Path,
    max_tokens: int | None = None,
    *,
    context_parallel: int = 1,
    setting: str = "model.path",
) -> tuple[str, ...]:
    """Raise ValueError when the head or the layers of the trainer would compute other
    log-probabilities than the model's. Return warnings when they could not be compared.

    `max_tokens`: length of the longest sample. Default: the model's context. `context_parallel`:
    ranks that share a row; raise ValueError if they cannot. `setting`: names the model in messages.
    """
    from refrain.engines.learn.context import uneven_heads
    from refrain.engines.learn.fidelity import check_fidelity

    model = ModelConfig(path=given) if isinstance(given, Path) else given
    config, trust = hf_config(model), model.trust_remote_code
    text = config.get_text_config()
    if context_parallel > 1 and text.num_attention_heads % context_parallel:
        problem = uneven_heads(text.num_attention_heads, context_parallel)
        raise ValueError(f"{setting}: {model.path}: {problem}")
    context = max_tokens or getattr(text, "max_position_embeddings", None) or _CONTEXT
    try:
        why = check_fidelity(
            config, context, trust_remote_code=trust, shares_rows=context_parallel > 1
        )
    except Exception as error:  # Each model type may raise another kind of error.
        raise ValueError(f"{setting}: {model.path} cannot be trained: {error}") from error
    if why is None:
        return ()
    return (f"{setting}: {model.path} could not be compared with transformers: {why}",)


def check_lora(model: ModelConfig, lora: LoraConfig | None) -> tuple[str, ...]:
    """Raise ValueError when LoRA adapters cannot be added to the model or merged. Return warnings
    about layers without adapters."""
    if lora is None:
        return ()
    if not isinstance(lora.target_modules, str):
        check_target_modules(model.path, lora.target_modules)
    from refrain.engines.learn.adapters_fit import check_adapters

    return check_adapters(hf_config(model), lora, trust_remote_code=model.trust_remote_code)


def check_routing_replay(config: TrainConfig) -> None:
    """Raise ValueError when the experts of a rollout cannot be replayed in this model, or when
    those of a step may be too many to read at once."""
    if not config.trainer.routing_replay:
        return
    from refrain.engines.learn.routing_replay import check_replay

    model = config.model
    layers, top_k = check_replay(hf_config(model), trust_remote_code=model.trust_remote_code)
    num_samples = min(config.prompts_per_step * config.rollout.group_size, _ROWS_READ_AT_ONCE)
    num_bytes = num_samples * config.max_model_len * layers * top_k
    if num_bytes >= MAX_EXPERT_BYTES:
        raise ValueError(
            f"trainer.routing_replay: {num_samples} responses of up to {config.max_model_len} "
            f"tokens have {num_bytes / 2**30:.1f} GiB of experts, and the trainer reads less than "
            "2 GiB at once. Lower prompts_per_step, rollout.group_size or "
            "data.max_response_tokens, or leave the setting out"
        )


def model_shape(config: TrainConfig) -> ModelShape:
    """Return the shape of the policy in the engines' dtype."""
    return _shape_of(config.model)


def drafter_shapes(config: TrainConfig) -> dict[str, ModelShape]:
    """Return the shapes of the draft models by name."""
    models = config.specactor.draft_models
    return {model.name: _shape_of(_like(config.model, model.path)) for model in models}


def _shape_of(model: ModelConfig) -> ModelShape:
    values = text_config(model).to_dict() | {"dtype": model.dtype}
    return ModelShape.from_hf_config(values, str(model.path))


def _like(policy: ModelConfig, path: Path) -> ModelConfig:
    """Return the config of another model, with the policy's dtype and other settings."""
    return policy.model_copy(update={"path": path})


def check_beside(
    paths: Sequence[Path], policy: ModelConfig, setting: str, max_tokens: int, lengths: str
) -> None:
    """Raise ValueError when a model cannot draft for the policy or teach it, or when its context is
    shorter than `max_tokens`.

    For the message, `setting` names the setting of these models, and `lengths` the settings that
    add up to `max_tokens`.
    """
    if not paths:
        return
    of_policy = _vocabulary(policy)
    for path in paths:
        given = _like(policy, path)
        check_model(given, setting)
        model, of_given = text_config(given), _vocabulary(given)
        check_same_tokens(of_given, of_policy, setting)
        context = getattr(model, "max_position_embeddings", None)
        if context and max_tokens > context:
            raise ValueError(
                f"{setting}: {path} has a context of {context} tokens, but {lengths} is "
                f"{max_tokens}: lower one of these settings, or use another model there"
            )


def check_teacher_server(config: TrainConfig, tokenizer: Any) -> None:
    """Raise ValueError when a teacher's server does not answer or cannot teach the policy, whose
    tokenizer is given."""
    if server := config.algorithm.teacher_server:
        from refrain.engines.learn.teacher.start_check import check_teacher

        check_teacher(server, tokenizer, text_config(config.model).vocab_size, config.max_model_len)


def check_draft_head(directory: Path | None, policy: ModelConfig) -> None:
    """Raise ValueError when the draft head in a directory does not fit the policy."""
    if directory is None:
        return
    # Imported here, because torch takes seconds to load.
    from refrain.engines.draft_head.files import load

    model = text_config(policy)
    try:
        load(directory, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
    except ValueError as error:
        raise ValueError(f"specactor.head: {error}") from error


def _vocabulary(model: ModelConfig) -> Vocabulary:
    num_rows = text_config(model).vocab_size
    return read_vocabulary(model.path, num_rows, trust_remote_code=model.trust_remote_code)


def text_config(model: ModelConfig) -> Any:
    """Return the Hugging Face config of a model's language part. Raise ValueError when it cannot be
    read."""
    return hf_config(model).get_text_config()


def hf_config(model: ModelConfig) -> Any:
    """Return the Hugging Face config of a model directory. Raise ValueError when it cannot be
    read."""
    from transformers import AutoConfig, PretrainedConfig

    file = model.path / "config.json"
    with naming_code(model.path):
        try:
            config = AutoConfig.from_pretrained(
                model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
            )
            if not isinstance(config.get_text_config(), PretrainedConfig):
                raise TypeError("the config of its language part is not a PretrainedConfig")
            return config
        except Exception as error:  # Each model type may raise another kind of error.
            raise ValueError(f"{file} is refused by transformers: {error}") from error


def read_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer of a model. Raise ValueError when the model's embedding has no row for
    one of its tokens."""
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    num_rows = text_config(model).vocab_size
    check_rows(tokenizer, num_rows, model.path)
    for name in ("config.json", GENERATION):
        file = model.path / name
        # Read the file itself, because the config classes fill in defaults.
        ids = read_json_object(file).get("eos_token_id") if file.exists() else None
        check_ending_tokens(ids, num_rows, file)
    return tokenizer


def check_prompts_have_rows(dataset: Dataset, model: ModelConfig) -> None:
    """Raise ValueError for a prompt with a token that the model's embedding has no row for."""
    num_rows = text_config(model).vocab_size
    for prompt, row in zip(dataset.prompts, dataset.rows, strict=True):
        if (last := max(prompt.token_ids)) >= num_rows:
            raise ValueError(
                f"{row} has the token {last}, but the embedding of {model.path} has only "
                f"{num_rows} rows (vocab_size). Remove the text that becomes this token"
            )
