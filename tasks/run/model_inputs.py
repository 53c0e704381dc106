"""Models, looked at before anything expensive is started: their weights, tokens and shapes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.data.dataset import Dataset, load_tokenizer
from engines.data.tokenizer import naming_code
from engines.data.vocabulary import (
    Vocabulary,
    check_ending_tokens,
    check_rows,
    check_same_tokens,
    read_vocabulary,
)
from engines.latency.model_shape import ModelShape
from engines.learn.checkpoint import verify_model
from engines.learn.model_dir import KNOWN_HEADS, check_model_dir, check_target_modules
from engines.learn.weight_files import stored_tensors
from engines.reading import read_json_object
from schemas.config import TrainConfig
from schemas.drafting import DraftModel
from schemas.inputs import ModelConfig
from schemas.trainer import LoraConfig

GENERATION = "generation_config.json"
_CONTEXT = 4096
"""Context of a model that does not say it."""


def check_model(model: ModelConfig, setting: str = "model.path") -> tuple[str, ...]:
    """Refuse a directory that is no model, and weights that do not fit its config or are not
    finite. Raises ValueError that names the setting. Returns what was not looked at."""
    verify_model(model.path)
    check_model_dir(model.path, setting)
    # Only here: torch takes seconds to load.
    from engines.learn.export import find_start_files
    from engines.learn.finite import check_finite
    from engines.learn.rehearsal import check_weights_fit

    try:
        _check_generation_config(model.path)
        tensors = stored_tensors(model.path)
        check_weights_fit(model, hf_config(model), tensors)
        return (*check_finite(model.path, tensors), *find_start_files(model.path).warnings)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def _check_generation_config(path: Path) -> None:
    """Raises ValueError for a file that trainer or engines would refuse or pass over."""
    from transformers import GenerationConfig

    file = path / GENERATION
    if not file.exists():
        return
    read_json_object(file)
    try:
        GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # Each value is checked in its own way.
        raise ValueError(
            f"{file} is refused by transformers: {error}. Copy it again, or take out the setting"
        ) from error


def check_head_known(given: ModelConfig | Path, max_tokens: int | None = None) -> tuple[str, ...]:
    """Raises ValueError when the trainer would compute other log-probabilities than the model: by
    its head, or by its layers. Returns sentences about what could not be compared.

    `max_tokens`: of the longest sample; the model's context by default.
    """
    from engines.learn.fidelity import check_fidelity
    from engines.learn.head import check_head

    model = ModelConfig(path=given) if isinstance(given, Path) else given
    config, trust = hf_config(model), model.trust_remote_code
    text = config.get_text_config()
    context = max_tokens or getattr(text, "max_position_embeddings", None) or _CONTEXT
    try:
        if text.model_type not in KNOWN_HEADS:
            check_head(config, trust_remote_code=trust)
        why = check_fidelity(config, context, trust_remote_code=trust)
    except Exception as error:  # Each model type checks its values in its own way.
        raise ValueError(f"model.path: {model.path} cannot be trained: {error}") from error
    if why is None:
        return ()
    return (f"model.path: no small copy of {model.path} was compared with transformers: {why}",)


def check_lora(model: ModelConfig, lora: LoraConfig | None) -> tuple[str, ...]:
    """Raises ValueError when adapters cannot be put into the model, or not be merged. Returns
    sentences about layers that get none."""
    if lora is None:
        return ()
    if not isinstance(lora.target_modules, str):
        check_target_modules(model.path, lora.target_modules)
    from engines.learn.adapters_fit import check_adapters

    return check_adapters(hf_config(model), lora, trust_remote_code=model.trust_remote_code)


def model_shape(config: TrainConfig) -> ModelShape:
    """Shape of the policy, as the engines hold it."""
    return _shape_of(config.model)


def drafter_shapes(config: TrainConfig) -> dict[str, ModelShape]:
    """Shapes of the draft models, by name."""
    models = config.specactor.draft_models
    return {model.name: _shape_of(_like(config.model, model)) for model in models}


def _shape_of(model: ModelConfig) -> ModelShape:
    values = text_config(model).to_dict() | {"dtype": model.dtype}
    return ModelShape.from_hf_config(values, str(model.path))


def _like(policy: ModelConfig, model: DraftModel) -> ModelConfig:
    """A draft model, held as the policy is."""
    return policy.model_copy(update={"path": model.path})


def check_draft_models(
    draft_models: Sequence[DraftModel],
    policy: ModelConfig,
    setting: str,
    max_tokens: int,
    lengths: str,
) -> None:
    """Raises ValueError when a draft model cannot draft for the policy, or holds no sequence of
    `max_tokens`. For the message: `setting` names the draft models, and `lengths` the settings
    whose sum `max_tokens` is."""
    if not draft_models:
        return
    of_policy = _vocabulary(policy)
    for given in draft_models:
        drafter = _like(policy, given)
        check_model(drafter, setting)
        model, of_drafter = text_config(drafter), _vocabulary(drafter)
        check_same_tokens(of_drafter, of_policy, setting)
        context = getattr(model, "max_position_embeddings", None)
        if context and max_tokens > context:
            raise ValueError(
                f"{setting}: {given.path} has a context of {context} tokens, but {lengths} is "
                f"{max_tokens}: lower one of them, or take another drafter"
            )


def _vocabulary(model: ModelConfig) -> Vocabulary:
    num_rows = text_config(model).vocab_size
    return read_vocabulary(model.path, num_rows, trust_remote_code=model.trust_remote_code)


def text_config(model: ModelConfig) -> Any:
    """Hugging Face configuration of a model directory, of its language part. Raises ValueError."""
    return hf_config(model).get_text_config()


def hf_config(model: ModelConfig) -> Any:
    """Hugging Face configuration of a model directory. Raises ValueError."""
    from transformers import AutoConfig, PretrainedConfig

    file = model.path / "config.json"
    with naming_code(model.path):
        try:
            config = AutoConfig.from_pretrained(
                model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
            )
            if not isinstance(config.get_text_config(), PretrainedConfig):
                raise TypeError("the part about its language model is no configuration")
            return config
        except Exception as error:  # Each model type checks its values in its own way.
            raise ValueError(f"{file} is refused by transformers: {error}") from error


def read_tokenizer(model: ModelConfig) -> Any:
    """Tokenizer of a model, whose tokens it has rows for. Raises ValueError."""
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    num_rows = text_config(model).vocab_size
    check_rows(tokenizer, num_rows, model.path)
    for name in ("config.json", GENERATION):
        file = model.path / name
        # As it is written: a class has a default of its own.
        ids = read_json_object(file).get("eos_token_id") if file.exists() else None
        check_ending_tokens(ids, num_rows, file)
    return tokenizer


def check_prompts_have_rows(dataset: Dataset, model: ModelConfig) -> None:
    """Raises ValueError for a prompt with a token beyond the model's embedding."""
    num_rows = text_config(model).vocab_size
    for prompt, row in zip(dataset.prompts, dataset.rows, strict=True):
        if (last := max(prompt.token_ids)) >= num_rows:
            raise ValueError(
                f"{row} has the token {last}, and {model.path} has no row for it: its embedding "
                f"has {num_rows} (vocab_size). Leave out what makes this token of the text"
            )
