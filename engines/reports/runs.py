"""Show runs in the terminal: a table of all runs, one run in full, and a live view."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from refrain.engines.failures import LOG_FILE
from refrain.engines.reports.progress import accepted_text, clock, left_text
from refrain.engines.reports.tables import plain_table, printable
from refrain.schemas.config import TrainConfig
from refrain.schemas.evaluation import EvaluationReport
from refrain.schemas.inputs import sources_of
from refrain.schemas.progress import Ending, Rolling, RunProgress
from refrain.schemas.resume import Crash, SettingChange
from refrain.schemas.step import RunSummary, StepReport

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_COLUMNS = 60
"""Longest curve in characters. With more steps, each character is a mean of adjacent steps."""
PHASES = ("sync", "rollout", "reward", "train", "step")
"""Keys of `StepReport.timing_s` that tables show."""


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Interrupted, cancelled or killed. You can resume it."""
    FAILED = "failed"
    """Ended with an error. You can resume it after fixing the cause."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of one run, read from its directory by `tasks.run.record`."""

    run_dir: Path
    live: bool
    """Whether a process is running it."""
    config: TrainConfig | None
    """None if it cannot be read."""
    progress: RunProgress | None
    """None for a run of an earlier version."""
    summary: RunSummary | None
    """None before the end, or if it cannot be read."""
    steps: Sequence[StepReport]
    """Finished steps, in order."""
    checkpoint: Path | None
    """Last checkpoint."""
    mlflow_run: str | None
    modified_s: float
    """Unix time of the last start: when the config was written."""
    read_errors: Sequence[str] = ()
    """Messages about parts of the directory that cannot be read."""
    changes: Sequence[SettingChange] = ()
    """Settings that changed when the run was resumed."""
    crashes: Sequence[Crash] = ()
    """Crashes from which the run recovered by itself."""

    @property
    def name(self) -> str:
        return self.run_dir.name

    @property
    def state(self) -> RunState:
        if self.live:
            return RunState.RUNNING
        ending = self.progress.ending if self.progress else None
        if self.summary or ending is Ending.FINISHED:
            return RunState.FINISHED
        return RunState.FAILED if ending is Ending.FAILED else RunState.STOPPED

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the whole run. None: unknown."""
        if self.progress:
            return self.progress.num_steps
        return self.summary.steps if self.summary else None

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def started_s(self) -> float:
        """Unix time of the first start; for a run of an earlier version, of the last start."""
        return self.progress.first_started_s if self.progress else self.modified_s

    @property
    def failures(self) -> Mapping[str, int]:
        """Number of failures to record the run (MLflow, pages, terminal), by kind."""
        return self.progress.failures if self.progress else {}

    def wall_s(self, now_s: float) -> float | None:
        """Return the seconds that the run's processes took. None: unknown."""
        if self.progress is None:
            return self.summary.wall_s if self.summary else None
        if self.live:
            return self.progress.wall_by(now_s)
        return self.progress.wall_s

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step, in order."""
        return [step.reward_mean for step in self.steps]


STATES = {
    RunState.RUNNING: ("running", "green"),
    RunState.FINISHED: ("finished", ""),
    RunState.STOPPED: ("stopped, resumable", "yellow"),
    RunState.FAILED: ("failed", "red"),
}
"""Words and style of each state."""


def print_runs(records: Sequence[RunRecord], console: Console, now_s: float) -> None:
    """Print one line per run, then messages about files that cannot be read."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("run", "staleness", "state", "step", "epochs", "reward", "started", "wall time"):
        table.add_column(name, no_wrap=name != "run", justify="right" if name == "step" else "left")
    for record in records:
        config, wall_s = record.config, record.wall_s(now_s)
        words, style = STATES[record.state]
        table.add_row(
            record.name,
            str(config.staleness) if config else "?",
            words,
            _step_of(record),
            str(config.num_epochs) if config else "?",
            f"{record.rewards[-1]:.3f}" if record.steps else "-",
            _moment(record.started_s),
            clock(wall_s) if wall_s is not None else "-",
            style=style,
        )
    console.print(table)
    for record in records:
        _print_read_errors(record, console)


def print_run(record: RunRecord, console: Console, now_s: float, num_rows: int | None) -> None:
    """Show a run in full, with its last `num_rows` steps. None: all steps."""
    console.print(f"{record.name}: {STATES[record.state][0]}", style="bold")
    console.print(_facts(record, now_s))
    _print_read_errors(record, console)
    if record.steps:
        shown = record.steps if num_rows is None else record.steps[-num_rows:]
        console.print(step_table(shown))
        if len(shown) < len(record.steps):
            console.print(f"the last {len(shown)} of {len(record.steps)} steps; --all shows all")
        console.print(f"reward  {reward_curve(record.rewards)}")
    console.print(_where(record))
    for line in next_commands(record):
        console.print(line, soft_wrap=True)


def step_table(steps: Iterable[StepReport]) -> Table:
    """Return a table with one row per step. Idle is a share of the engines' time since the previous
    step."""
    names = ("step", "epoch", "reward", "length", "tokens/s", "accepted", "a pass", "idle")
    table = plain_table(*names, *(f"{phase} s" for phase in PHASES))
    for step in steps:
        table.add_row(*step_cells(step))
    return table


def step_cells(step: StepReport) -> list[str]:
    metrics = step.metrics
    return [
        str(step.step),
        str(step.epoch),
        f"{step.reward_mean:.3f}",
        _number(metrics, "response_length/mean", ",.1f"),
        _number(metrics, "rollout/tokens_per_s", ",.0f"),
        _number(metrics, "rollout/spec_accept_rate", ".0%"),
        _number(metrics, "rollout/spec_accept_length", ".1f"),
        _number(metrics, "rollout/bubble_share", ".0%"),
        *(_number(step.timing_s, phase, ".1f") for phase in PHASES),
    ]


def sparkline(values: Sequence[float], num_columns: int = CURVE_COLUMNS) -> str:
    """Draw values as blocks between the lowest and the highest value. If there are more values than
    columns, average adjacent ones."""
    if not values:
        return ""
    num = min(len(values), num_columns)
    cuts = [round(i * len(values) / num) for i in range(num + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def reward_curve(rewards: Sequence[float]) -> str:
    return f"{rewards[0]:.3f} {sparkline(rewards)} {rewards[-1]:.3f}"


def live_view(record: RunRecord, now_s: float) -> RenderableType:
    """Return the live view of a running run."""
    assert record.progress is not None
    so_far = f"  step {_step_of(record)}  {clock(record.wall_s(now_s) or 0.0)}  "
    parts: list[RenderableType] = [
        Text.assemble((record.name, "bold"), so_far, record.progress.phase)
    ]
    if record.progress.rolling:
        parts.append(_rolling(record.progress.rolling))
    if record.steps:
        parts.append(step_table(record.steps[-8:]))
        parts.append(f"reward  {reward_curve(record.rewards)}")
    return Group(*parts)


def rolling_text(rolling: Rolling) -> str:
    return (
        f"{rolling.label}: {rolling.num_finished}/{rolling.num_rollouts} rollouts, "
        f"{rolling.tokens_per_second:,.0f} tokens/s{accepted_text(rolling)}, "
        f"{rolling.idle_share:.0%} of engines idle{left_text(rolling)}"
    )


def next_commands(record: RunRecord) -> list[str]:
    """Return commands that the user may want next, with the run's error if it failed."""
    run = record.run_dir
    if record.state is RunState.RUNNING:
        return [f"watch it: refrain show {run} --follow"]
    if record.state is RunState.FINISHED:
        return [f"evaluate it: refrain evaluate {run} DATA"] if record.checkpoint else []
    error = record.progress.error if record.progress else None
    failed = [f"it failed with: {error}"] if record.state is RunState.FAILED else []
    return [*failed, f"go on: refrain train --resume {run}"]


def _facts(record: RunRecord, now_s: float) -> Table:
    wall_s = record.wall_s(now_s)
    table = plain_table("what", "value", text=("what", "value"), header=False)
    table.add_row("step", _step_of(record))
    if record.progress and record.progress.phase and record.state is not RunState.FINISHED:
        table.add_row("now" if record.live else "last", record.progress.phase)
    if record.config:
        for name, value in config_facts(record.config).items():
            table.add_row(name, value)
    for change in record.changes:
        table.add_row("resumed with", f"{change} ({_moment(change.at_s)})")
    for crash in record.crashes:
        table.add_row("crashed", f"{crash} ({_moment(crash.at_s)})")
    table.add_row("started", _moment(record.started_s))
    table.add_row("wall time", clock(wall_s) if wall_s is not None else "-")
    summary = record.summary
    if record.failures:
        num = ", ".join(f"{what}: {count:,}" for what, count in record.failures.items())
        table.add_row("failures of its record", f"{num} ({record.run_dir / LOG_FILE})")
    for sentence in summary.missing if summary else ():
        table.add_row("missing", sentence)
    if summary and summary.validation_first is not None and summary.validation_last is not None:
        change = f"{summary.validation_first:.3f} -> {summary.validation_last:.3f}"
        table.add_row("validation reward", change)
    return table


def config_facts(config: TrainConfig) -> dict[str, str]:
    """Return the main settings by name."""
    rollout, data = config.rollout, config.data
    sources = [f"{one.name} (weight {one.weight:g})" for one in sources_of(data.train) if one.name]
    return {
        "run": f"staleness {config.staleness}, {config.num_epochs} epochs, seed {config.seed}",
        "model": f"{config.model.path} ({config.model.dtype})",
        "data": ", ".join(sources or map(str, data.train_files)),
        "batch": f"{config.prompts_per_step} prompts x {rollout.group_size} samples",
        "engines": f"{rollout.num_engines} of TP {rollout.tp_degree}",
        "algorithm": f"{config.algorithm.type}, learning rate {config.trainer.learning_rate:g}",
        "drafting": "from history" if config.drafting.enabled else "off",
    }


def _where(record: RunRecord) -> Table:
    table = plain_table("what", "value", text=("what", "value"), header=False)
    table.add_row("files", str(record.run_dir))
    if record.checkpoint:
        table.add_row("last checkpoint", str(record.checkpoint))
    if record.mlflow_run:
        table.add_row("MLflow run", f"{record.mlflow_run} (plans, rollouts, timelines, metrics)")
    return table


def _rolling(rolling: Rolling) -> Table:
    line = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=rolling.num_rollouts, completed=rolling.num_finished, width=30)
    line.add_row(bar, rolling_text(rolling))
    return line


def _print_read_errors(record: RunRecord, console: Console) -> None:
    for error in record.read_errors:
        console.print(f"{record.name}: {error}", style="yellow", soft_wrap=True)


def _step_of(record: RunRecord) -> str:
    return f"{record.last_step}/{record.num_steps or '?'}"


def _number(values: Mapping[str, float], name: str, form: str) -> str:
    return format(values[name], form) if name in values else "-"


def _moment(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))


def print_evaluation(report: EvaluationReport, console: Console) -> None:
    """Print one row per data source. `maj@n` needs a scorer that returns answers. A mean over
    several prompts has its standard error after it."""
    names = (f"mean@{report.samples}", f"best@{report.samples}", f"maj@{report.samples}")
    table = plain_table("data source", "prompts", *names, text=("data source",))
    for source in report.sources:
        values = [_number(source.figures, name, ".3f") for name in names]
        error = source.figures.get(f"std_error@{report.samples}")
        values[0] += "" if error is None else f"±{error:.3f}"
        table.add_row(printable(source.data_source), f"{source.num_prompts:,}", *values)
    console.print(table)
    console.print(
        f"{report.model}, policy version {report.policy_version}, seed {report.seed}: "
        f"{report.mean_response_tokens:.1f} tokens a response, {report.clip_ratio:.1%} cut at the "
        f"limit, {report.tokens_per_second:,.0f} tokens/s",
        soft_wrap=True,
    )
    console.print(f"responses: {report.run_dir}/refrain.duckdb", soft_wrap=True)
