"""Settings and result of an evaluation."""

from pathlib import Path

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from refrain.schemas.base import Frozen


class EvaluateConfig(Frozen):
    """Score a model's responses to some prompts, as a run's validation does."""

    checkpoint: str
    """Model to evaluate: a checkpoint of a run (`runs/NAME/checkpoints/global_step_N`), a run's
    name or directory (its last checkpoint), or any Hugging Face directory."""
    data: tuple[Path, ...] = ()
    """Files with prompts, in the format of training, for example `test.parquet`. Default: the
    validation files of the config."""
    samples: PositiveInt | None = None
    """Responses per prompt, the n of `mean@n`, for example `8`. Raise it for a smaller standard
    error, or for `pass@k`. Default: the config's `validation_samples`."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of sampling, for example `1`. Change it to draw other responses. Default: the config's,
    so that a checkpoint is sampled as in its run."""
    config: str | None = None
    """Run, or YAML file as for training. Its sections `data`, `rollout` and `reward`, data type,
    samples and seed apply. Name one for a model that no run made. Default: the run that the
    checkpoint belongs to."""
    overrides: tuple[str, ...] = ()
    """Single settings of these sections, for example `rollout.temperature=0.6`."""
    name: str | None = None
    """Name of the evaluation and of its directory, for example `demo-warm`. Set it to evaluate the
    same data twice. Default: the names of checkpoint and data."""
    log_to_run: bool = False
    """Log the figures to MLflow's run of the training run that the checkpoint belongs to, too."""
    runs_dir: Path = Path("runs")
    """Directory that holds the runs; evaluations go to its folder `evaluations`."""


class SourceFigures(Frozen):
    """Figures for the prompts of one data source."""

    data_source: str
    num_prompts: NonNegativeInt
    figures: dict[str, float]
    """`mean@n` and its `std_error@n`, `best@n`, `pass@k` if rewards are 0 and 1, and `maj@n` if
    scorers return the answer."""


class EvaluationReport(Frozen):
    """Result of an evaluation."""

    name: str
    model: Path
    policy_version: NonNegativeInt
    """Training steps of the checkpoint; 0 for a model that no run trained."""
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
    """Response tokens divided by the seconds spent generating."""
    run_dir: Path
    """Directory with every response and its reward, in `refrain.duckdb`."""
