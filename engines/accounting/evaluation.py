"""Figures of an evaluation, by data source. Pure."""

from collections import Counter
from collections.abc import Mapping

import pyarrow as pa

from engines.reward import sample_figures
from schemas.config import TrainConfig
from schemas.evaluation import EvaluationReport, SourceFigures
from schemas.step import RewardedBatch, RolloutBatch


def evaluation_report(
    config: TrainConfig,
    batch: RolloutBatch,
    rewarded: RewardedBatch,
    rewards: pa.Table,
    data_sources: Mapping[str, str],
) -> EvaluationReport:
    """Report on the durable `rewards` (`Store.rewards`), by the data source of each prompt key."""
    return EvaluationReport(
        name=config.name,
        model=config.model.path,
        policy_version=batch.policy_version,
        data=config.data.validation,
        seed=config.seed,
        samples=config.validation_samples,
        num_rollouts=batch.num_rollouts,
        reward_mean=rewarded.reward_mean,
        sources=_sources(rewards, data_sources),
        mean_response_tokens=batch.mean_response_tokens,
        clip_ratio=batch.clip_ratio,
        tokens_per_second=batch.num_tokens / batch.generation_s if batch.generation_s else 0.0,
        run_dir=config.run_dir,
    )


def _sources(rewards: pa.Table, data_sources: Mapping[str, str]) -> tuple[SourceFigures, ...]:
    by_source: dict[str, dict[str, float]] = {}
    for name, value in sample_figures(rewards, data_sources).items():
        source, _, figure = name.rpartition("/")
        by_source.setdefault(source, {})[figure] = value
    num_prompts = Counter(data_sources[key] for key in rewards["prompt_key"].unique().to_pylist())
    return tuple(
        SourceFigures(data_source=source, num_prompts=num_prompts[source], figures=figures)
        for source, figures in sorted(by_source.items())
    )
