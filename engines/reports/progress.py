"""Show a run's progress: a live line in a terminal, plain lines elsewhere."""

from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from refrain.engines.failures import Failures
from refrain.engines.reports.tables import printable
from refrain.schemas.progress import Rolling
from refrain.schemas.step import RunSummary, StepReport


class Progress(Protocol):
    """Receiver of reports from a running run."""

    def phase(self, text: str) -> None:
        """Show the current phase."""
        ...

    def warn(self, text: str) -> None:
        """Show a problem that does not end the run."""
        ...

    def rolling(self, rolling: Rolling) -> None:
        """Show the progress of the rollout stage."""
        ...

    def step(self, report: StepReport, num_steps: int) -> None: ...


class TerminalProgress:
    """Printer of one lasting line per step. In a terminal it adds a live line below."""

    def __init__(self, console: Console | None = None) -> None:
        # Texts may contain brackets, for example `[/tmp]`: do not read them as markup.
        self._console = console or Console(markup=False)
        self._text = ""
        self._step_s: list[float] = []
        self._live = Live("", console=self._console, refresh_per_second=4, transient=True)
        if self._console.is_terminal:
            self._live.start()

    def phase(self, text: str) -> None:
        text = printable(text, lines=True)
        self._text = text
        if self._live.is_started:
            self._live.update(f"  {text}")
        else:
            self._console.print(text)

    def warn(self, text: str) -> None:
        """Print a line that stays."""
        text = printable(text, lines=True)
        self._console.print(text, style="yellow", soft_wrap=True, highlight=False)

    def rolling(self, rolling: Rolling) -> None:
        if self._live.is_started:
            self._live.update(
                f"  {self._text}: {rolling.num_finished}/{rolling.num_rollouts} rollouts, "
                f"{rolling.num_in_flight_tokens:,} tokens in flight"
                f"{accepted_text(rolling)}{left_text(rolling)}"
            )

    def counting(self, done: int, total: int, what: str, left_s: float) -> None:
        """Show the progress of a long operation. Without a terminal, print a line every tenth of
        it."""
        line = f"{self._text.split(':')[0]}: {done}/{total} {what}, {left_s:.0f} s left"
        if self._live.is_started:
            self._live.update(f"  {line}")
        elif done * 10 // total > (done - 1) * 10 // total:
            self._console.print(line)

    def step(self, report: StepReport, num_steps: int) -> None:
        self._step_s.append(report.timing_s["step"])
        # Average the last few steps only, because lengths and times drift over a run.
        recent = self._step_s[-8:]
        left_s = (num_steps - report.step) * sum(recent) / len(recent)
        self._console.print(
            f"{step_line(report, num_steps)}  left {clock(left_s)}",
            highlight=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()


class Everywhere:
    """Sender of each report to several places. If one place fails (for example a closed terminal),
    this counts as a failure of the record, and the run goes on."""

    def __init__(self, failures: Failures, *places: Progress) -> None:
        self._failures, self._places = failures, places

    def _each(self, report: Callable[[Progress], None]) -> None:
        for place in self._places:
            with self._failures.contained("showing progress"):
                report(place)

    def phase(self, text: str) -> None:
        self._each(lambda place: place.phase(text))

    def warn(self, text: str) -> None:
        self._each(lambda place: place.warn(text))

    def rolling(self, rolling: Rolling) -> None:
        self._each(lambda place: place.rolling(rolling))

    def step(self, report: StepReport, num_steps: int) -> None:
        self._each(lambda place: place.step(report, num_steps))


def accepted_text(rolling: Rolling) -> str:
    accepted = rolling.acceptance_rate
    return "" if accepted is None else f", {accepted:.0%} of drafts accepted"


def left_text(rolling: Rolling) -> str:
    """Return when the stage ends, for example `, about 40 s left`. Empty while unknown."""
    left_s = rolling.left_s
    if left_s is None:
        return ""
    return f", about {left_s:.0f} s left" if left_s < 120 else f", about {left_s / 60:.0f} min left"


def step_line(report: StepReport, num_steps: int) -> str:
    """Return a finished step as one line."""
    metrics = report.metrics
    return (
        f"step {report.step:>4}/{num_steps}  reward {report.reward_mean:.3f}  "
        f"length {metrics['response_length/mean']:.1f}  "
        f"{metrics.get('rollout/tokens_per_s', 0.0):,.0f} tokens/s  "
        f"{_accepted(metrics)}step {report.timing_s['step']:.1f} s"
    )


def print_summary(summary: RunSummary) -> None:
    """Print the short table at the end of a run."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("steps", str(summary.steps))
    table.add_row("rollouts", f"{summary.num_rollouts:,}")
    table.add_row("reward", f"{summary.reward_first:.3f} -> {summary.reward_last:.3f}")
    if summary.validation_first is not None and summary.validation_last is not None:
        change = f"{summary.validation_first:.3f} -> {summary.validation_last:.3f}"
        table.add_row("validation reward", change)
    if any(summary.speculation_rate_by_epoch):
        shares = ", ".join(f"{rate:.0%}" for rate in summary.speculation_rate_by_epoch)
        table.add_row("from drafts, by epoch", shares)
    table.add_row("tokens/s", f"{summary.tokens_per_second:,.0f}")
    table.add_row("wall time", clock(summary.wall_s))
    phases = {name: s for name, s in summary.timing_s.items() if name != "step"}
    table.add_row("by phase", ", ".join(f"{name} {clock(s)}" for name, s in phases.items()))
    if summary.failures:
        counts = ", ".join(f"{what}: {count:,}" for what, count in summary.failures.items())
        table.add_row("failures of its record", counts)
    Console().print(table)


def _accepted(metrics: Mapping[str, float]) -> str:
    if "rollout/spec_accept_rate" not in metrics:
        return ""
    share, length = metrics["rollout/spec_accept_rate"], metrics["rollout/spec_accept_length"]
    return f"accepted {share:.0%} ({length:.1f} a pass)  "


def clock(seconds: float) -> str:
    """Return HH:MM:SS. Hours may exceed 24."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
