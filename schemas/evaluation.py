"""An evaluation: what is asked for, and what came out."""

from pathlib import Path

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from schemas.base import Frozen


class EvaluateConfig(Frozen):
    """How good is a model on these prompts? Its responses are scored as a run's validation is."""

    checkpoint: str
    """A run's checkpoint (`runs/NAME/checkpoints/global_step_N`), a run's name or directory (its
    last checkpoint), or any Hugging Face directory."""
    data: tuple[Path, ...] = ()
    """Files with prompts, as for training. Default: the validation files of the config."""
    samples: PositiveInt | None = None
    """Responses per prompt (`mean@n`). Default: the config's `validation_samples`."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of sampling. Default: the config's, so that a checkpoint is sampled as in its run."""
    config: str | None = None
    """A run, or a YAML file as for training: its sections `data`, `rollout` and `reward`, its data
    type, samples and seed. Default: those of the run that the checkpoint belongs to."""
    overrides: tuple[str, ...] = ()
    """Single settings of these sections, as in `rollout.temperature=0.6`."""
    name: str | None = None
    """Name of the evaluation and its directory. Default: the checkpoint's and the data's names."""
    log_to_run: bool = False
    """Add the figures to the MLflow run of the run that the checkpoint belongs to."""
    runs_dir: Path = Path("runs")
    """Directory that holds the runs, and the evaluations in `evaluations`."""


class SourceFigures(Frozen):
    """Figures of the prompts of one data source."""

    data_source: str
    num_prompts: NonNegativeInt
    figures: dict[str, float]
    """`mean@n` with its `std_error@n`, `best@n`, `pass@k` of rewards of 0 and 1 and, where scorers
    tell the answer, `maj@n`."""


class EvaluationReport(Frozen):
    """Result of an evaluation."""

    name: str
    model: Path
    policy_version: NonNegativeInt
    """Training steps behind the checkpoint; 0 for a model that is no run's."""
    data: tuple[Path, ...]
    seed: int
    samples: NonNegativeInt
    """Responses per prompt."""
    num_rollouts: NonNegativeInt
    reward_mean: float
    sources: tuple[SourceFigures, ...]
    mean_response_tokens: NonNegativeFloat
    clip_ratio: NonNegativeFloat
    """Share of responses cut at the limit."""
    tokens_per_second: NonNegativeFloat
    """Response tokens over the seconds spent generating."""
    run_dir: Path
    """Directory with every response and its reward, in `refrain.duckdb`."""

    @property
    def figures(self) -> dict[str, float]:
        """Figures of all data sources, named `{data source}/mean@n` and so on."""
        return {
            f"{source.data_source}/{name}": value
            for source in self.sources
            for name, value in source.figures.items()
        }
