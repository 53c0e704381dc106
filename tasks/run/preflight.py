"""Check a run's config, model, data and scorer before anything expensive starts."""

import json
import math
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from refrain.engines.data.dataset import Dataset, check_shared, load_dataset
from refrain.engines.data.loader import PromptLoader
from refrain.engines.data.messages import PromptSettings
from refrain.engines.data.sources import load_sources, portions_of
from refrain.engines.data.template import templates
from refrain.engines.environment.process import EnvironmentSetup
from refrain.engines.inference.engine.supported import check_version
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.latency.profile_file import (
    find_profile,
    model_hash,
    read_profile,
    require_points,
)
from refrain.engines.learn.own_functions import own_functions
from refrain.engines.learn.setting_warnings import setting_warnings
from refrain.engines.pat.layouts import plan_pools, require_divisible
from refrain.engines.reward import check_ground_truth, check_reward, check_reward_file
from refrain.engines.specactor.ladder import Ladder
from refrain.engines.tracking.forward import require_trackers
from refrain.schemas.config import TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.drafting import HISTORY, NGRAM
from refrain.schemas.inputs import DataSource, sources_of
from refrain.schemas.latency import PointKind
from refrain.schemas.reward import RewardConfig
from refrain.schemas.rollout import Split
from refrain.schemas.secret import fill_in, secrets_of
from refrain.tasks.run.environments import read_environment
from refrain.tasks.run.model_inputs import (
    check_against_transformers,
    check_beside,
    check_draft_head,
    check_lora,
    check_model,
    check_prompts_have_rows,
    check_routing_replay,
    check_teacher_server,
    model_shape,
    read_tokenizer,
    text_config,
)


@dataclass(frozen=True)
class Inputs:
    """A run's validated inputs."""

    datasets: dict[Split, Dataset]
    prompts: dict[str, Prompt]
    """Prompts of all splits, by key. For scoring, use `prompts_of` instead."""
    loader: PromptLoader
    tokenizer: Any
    latency: FittedLatency | None = None
    """Latency model of the profile in `TrainConfig.profile`. None: no profile is set."""
    ladder: Ladder | None = None
    """Draft ladder. None: there are no draft models, or the profile has not measured them."""
    environment: EnvironmentSetup | None = None
    """What the environment's file defines. None: there is no environment."""
    warnings: tuple[str, ...] = ()
    """Sentences about settings and data that are allowed but may be mistakes."""

    @cached_property
    def mean_prompt_tokens(self) -> float:
        """Mean length of all prompts in tokens. 0 without prompts."""
        lengths = [len(prompt.token_ids) for prompt in self.prompts.values()]
        return sum(lengths) / max(1, len(lengths))

    def prompts_of(self, split: Split) -> dict[str, Prompt]:
        """Return the prompts of a split by key, with its data source and extra information. These
        may differ between splits that have the same prompt."""
        dataset = self.datasets.get(split)
        return dataset.by_key if dataset else self.prompts


def read_inputs(config: TrainConfig) -> Inputs:
    """Check vLLM, the model, the data and the scorer, and read them. Raise ValueError that says
    what is wrong, where, and how to fix it."""
    check_version()
    require_trackers(config.trackers)
    return _read_inputs(config.model_dump_json(), json.dumps(secrets_of(config)))


def check_engine_fits(config: TrainConfig) -> None:
    """Raise ValueError when the model's context or attention heads do not fit the config."""
    model = text_config(config.model)
    if model.num_attention_heads < 1:
        raise ValueError(
            f"{config.model.path / 'config.json'} has {model.num_attention_heads} "
            "num_attention_heads: copy it again"
        )
    context = getattr(model, "max_position_embeddings", None)
    rope = getattr(model, "rope_parameters", None) or {}
    # With dynamic RoPE, engines have no positions beyond the context (`engines.learn.rope`).
    stretched = rope.get("factor") and "dynamic" not in rope.get("rope_type", "")
    if context and not stretched and config.max_model_len > context:
        raise ValueError(
            f"data.max_prompt_tokens + data.max_response_tokens is {config.max_model_len}, but "
            f"{config.model.path} has a context of {context} tokens: lower one of them"
        )
    rollout = config.rollout
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise ValueError(
            f"rollout.max_num_batched_tokens ({rollout.max_num_batched_tokens}) is less than "
            f"rollout.max_num_seqs ({rollout.max_num_seqs}): raise the first or lower the second"
        )
    if config.pat.tp_degrees:
        require_divisible(model_shape(config), config.pat.tp_degrees)
        plan_pools(
            config.rollout.num_engines,
            config.rollout.tp_degree,
            config.pat.tp_degrees,
            config.pat.gpus_per_node,
        )
    if model.num_attention_heads % config.rollout.tp_degree:
        raise ValueError(
            f"rollout.tp_degree ({config.rollout.tp_degree}) does not divide the "
            f"{model.num_attention_heads} attention heads of {config.model.path}"
        )


def check_ways_of_weights(config: TrainConfig) -> None:
    """Raise ValueError when rollout.weight_sync is ipc, but engines and trainer share no GPUs."""
    if config.rollout.weight_sync == "file":
        return
    if not config.takes_turns:
        raise ValueError(
            "rollout.weight_sync is ipc, which needs engines and trainer on the same GPUs, but "
            "they are on separate ones: set staleness=0 and placement=shared, or "
            "rollout.weight_sync=file"
        )
    num_gpus = config.rollout.num_engines * config.rollout.tp_degree
    if config.trainer.num_processes < num_gpus:
        raise ValueError(
            "rollout.weight_sync is ipc, but trainer.num_processes "
            f"({config.trainer.num_processes}) is less than the engines' {num_gpus} "
            "GPUs (rollout.num_engines x rollout.tp_degree): set "
            f"trainer.num_processes={num_gpus}, or rollout.weight_sync=file"
        )


@lru_cache(maxsize=1)
def _read_inputs(config_json: str, secrets_json: str) -> Inputs:
    # Cached, because the command line plans before it starts Prefect, and the flow plans again.
    values = fill_in(json.loads(config_json), json.loads(secrets_json))
    config = TrainConfig.model_validate(values)
    for name, reward in _rewards(config).items():
        with _of_source(name):
            check_reward_file(reward)
    own_functions(config.algorithm.file)
    unseen = check_model(config.model)
    check_engine_fits(config)
    sharing = config.trainer.context_parallel
    unseen += check_against_transformers(
        config.model, config.max_model_len, context_parallel=sharing
    )
    unseen += check_lora(config.model, config.trainer.lora)
    check_routing_replay(config)
    check_ways_of_weights(config)
    check_draft_head(config.specactor.head, config.model)
    teacher = config.algorithm.teacher
    if teacher and sharing > 1:
        given = config.model.model_copy(update={"path": teacher})
        unseen += check_against_transformers(
            given, config.max_model_len, context_parallel=sharing, setting="algorithm.teacher"
        )
    beside = {
        "specactor.draft_models": [model.path for model in config.specactor.draft_models],
        "algorithm.teacher": [teacher] if teacher else [],
    }
    lengths = "data.max_prompt_tokens + data.max_response_tokens"
    for setting, paths in beside.items():
        check_beside(paths, config.model, setting, config.max_model_len, lengths)
    tokenizer = read_tokenizer(config.model)
    with closing(templates):
        environment, settings, unsaid = read_environment(config, tokenizer, _settings(config))
        datasets = _datasets(config, tokenizer, settings)
    _check_rewards(config, datasets)
    train = datasets[Split.TRAIN]
    loader = PromptLoader(
        [prompt.key for prompt in train.prompts],
        prompts_per_step=config.drawn_prompts_per_step,
        num_epochs=config.num_epochs,
        shuffle=config.data.shuffle,
        seed=config.seed,
        max_steps=config.max_steps,
        portions=portions_of(sources_of(config.data.train), train),
        curriculum=config.data.curriculum,
    )
    prompts = {key: p for dataset in datasets.values() for key, p in dataset.by_key.items()}
    latency = read_latency(config)
    for dataset in datasets.values():
        check_prompts_have_rows(dataset, config.model)
    check_teacher_server(config, tokenizer)
    warnings = (*unseen, *unsaid, *_warnings(datasets), *setting_warnings(config))
    ladder = _ladder(config, latency)
    return Inputs(datasets, prompts, loader, tokenizer, latency, ladder, environment, warnings)


def _datasets(
    config: TrainConfig, tokenizer: Any, settings: PromptSettings
) -> dict[Split, Dataset]:
    """Read each source of both splits once."""
    rewards, max_tokens = _rewards(config), config.data.max_prompt_tokens

    @lru_cache
    def load(files: tuple[Path, ...], reward: str) -> Dataset:
        check = partial(check_ground_truth, rewards[reward])
        return load_dataset(files, tokenizer, max_tokens, check, settings)

    def load_source(source: DataSource) -> Dataset:
        return load(source.files, source.name if source.reward else "")

    given = {Split.TRAIN: config.data.train, Split.VALIDATION: config.data.validation}
    return {
        split: load_sources(sources_of(sources), load_source)
        for split, sources in given.items()
        if sources
    }


def _rewards(config: TrainConfig) -> dict[str, RewardConfig]:
    """Return the rewards by source. Without a name: that of all other sources."""
    return {"": config.reward} | config.data.own_rewards


def _check_rewards(config: TrainConfig, datasets: Mapping[Split, Dataset]) -> None:
    """Raise ValueError when prompts have no scorer, or a reward cannot be used."""
    rewards = _rewards(config)
    data_sources: dict[str, set[str]] = {name: set() for name in rewards}
    for dataset in datasets.values():
        for prompt in dataset.prompts:
            own = prompt.source if prompt.source in rewards else ""
            data_sources[own].add(prompt.data_source)
    for name, reward in rewards.items():
        with _of_source(name):
            check_reward(reward, data_sources[name], config.data.surroundings)


@contextmanager
def _of_source(name: str) -> Generator[None]:
    """Name the source in errors about its reward."""
    try:
        yield
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"source {name!r} of data.train or data.validation: {error}") from error


def _settings(config: TrainConfig) -> PromptSettings:
    data = config.data
    return PromptSettings(
        data.system_prompt,
        data.template_arguments,
        data.overlong == "drop",
        data.date,
    )


def _warnings(datasets: Mapping[Split, Dataset]) -> tuple[str, ...]:
    """Return warnings about prompts that are left out, or that both splits have. Raise ValueError
    when the splits have different ground truths for a prompt."""
    train, validation = datasets[Split.TRAIN], datasets.get(Split.VALIDATION)
    said = [
        f"{split}: {number:,} {what} prompts left out"
        for split, dataset in datasets.items()
        for what, number in (("repeated", dataset.num_duplicates), ("long", dataset.num_overlong))
        if number
    ]
    if validation and (shared := check_shared(train, validation)):
        first, second = shared[0]
        said.append(
            f"{len(shared)} of {len(validation.prompts)} validation prompts are trained on, the "
            f"first is {first} and {second}: the validation is not fully held out"
        )
    return tuple(said)


def read_latency(config: TrainConfig) -> FittedLatency | None:
    """Return the latency model of the run's profile, or None without a profile.

    Raise ValueError when a profile is needed but not set, when it is of another model, or when it
    lacks points that the enabled techniques need.
    """
    command = _profile_command(config)
    if config.profile is None:
        if config.pat.tp_degrees:
            raise ValueError(
                "pat.tp_degrees is set but profile is not: without it, it is unknown when a switch "
                f"pays. Make a profile with {command}, and set profile=NAME"
            )
        return None
    path = find_profile(config.profile, config.runs_dir)
    profile = read_profile(path)
    if profile.model_hash != model_hash(config.model.path):
        raise ValueError(
            f"profile: {path} is of another model, {profile.model_name}: make one of "
            f"{config.model.path} with {command}"
        )
    kinds = [PointKind.DECODE]
    if config.pat.tp_degrees:
        kinds.append(PointKind.PREFILL)
    if config.engine.speculates:
        kinds.append(PointKind.VERIFY)
    advice = f"make it again with {command}, or switch off the techniques that need them"
    drafters = [model.name for model in config.specactor.draft_models]
    require_points(profile, path, config.tp_degrees, kinds, advice, drafters)
    return FittedLatency(profile)


def _profile_command(config: TrainConfig) -> str:
    """Return the shell command that measures the profile for the config."""
    given = [f"--draft-model {model.name}={model.path}" for model in config.specactor.draft_models]
    tp_degrees = ",".join(map(str, config.tp_degrees))
    model = f"--model {config.model.path} --dtype {config.model.dtype}"
    return " ".join([f"refrain profile {model} --tp {tp_degrees}", *given])


def _ladder(config: TrainConfig, latency: FittedLatency | None) -> Ladder | None:
    """Return the ladder of the run's drafters that the profile has measured, with history first.
    None: there is no profile or no draft model."""
    if latency is None or not config.specactor.draft_models:
        return None
    specactor, rollout = config.specactor, config.rollout
    drafters = tuple(name for name in specactor.drafters if name in latency.drafters)
    if config.drafting.enabled and NGRAM in drafters:
        drafters = (HISTORY, *drafters)
    return Ladder(
        latency,
        rollout.tp_degree,
        drafters,
        config.typical_context_tokens,
        max_window=config.engine.max_draft,
        ahead={
            model.name: math.ceil(rollout.num_engines / model.num_engines)
            for model in specactor.draft_models
        },
        max_drafted=rollout.max_num_seqs,
    )
