"""Faults drawn at random, on real runs: is anything lost, doubled, changed, hung or left behind?

    refrain bench chaos --seed 0 --json benchmarks/baselines/chaos.json

Faults strike small runs of the demo's model at a moment of their own: a process is killed, is
stopped for longer than the bounds, cannot write, finds a damaged file or a clock that went back,
loses its terminal or its memory. A run meets up to five, and is resumed when its driver has ended.
Then every planned sample must be in its store once, with its reward, the steps without a hole,
summary and MLflow complete, no process and no file left, and the tokens those of a run that nothing
disturbed. What is wrong at the end of a run counts for all its faults; --apart shows which it was.
Takes 1 to 3 minutes a fault on 2 cores. With --json, what was interrupted goes on where it was.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.chaos.checks import RunTraces
from benchmarks.chaos.faults import PAIRS, RunMode, Strike, draw, on_runs
from benchmarks.laps import Measured, Row, check_counts
from engines.durable import write_durably
from engines.reports.tables import plain_table
from schemas.bench import BenchReport

PACKAGES = ("refrain", "vllm", "torch", "ray", "prefect", "mlflow", "duckdb")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, default=72, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws them (default: %(default)s)")
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="N", help="those of these numbers, from 0"
    )
    parser.add_argument("--apart", action="store_true", help="each fault on a run of its own")
    parser.add_argument("--dir", type=Path, default=Path("runs/chaos"), help="of the runs")


def measure(args: Namespace, console: Console) -> Measured:
    """Raises ValueError for bad arguments, RuntimeError when an undisturbed run fails."""
    check_counts(args, "faults")
    strikes = draw(args.faults, args.seed)
    if args.only is not None:
        if unknown := set(args.only) - set(range(args.faults)):
            raise ValueError(f"--only {min(unknown)}: faults are 0 to {args.faults - 1}")
        strikes = [strikes[number] for number in args.only]
    file = Path(args.json) if args.json and args.json != "-" else None
    from benchmarks.chaos.strikes import NOTHING, carry_out

    references = _References(args.dir)

    def strike_run(run: Sequence[Strike]) -> list[Row]:
        reference, directory = references.of(run[0].mode), args.dir / str(run[0].number)
        rows = carry_out(run, reference, directory)
        for i, strike in enumerate(run):
            # One before it may have taken its target or its moment.
            if rows[i]["struck"] == NOTHING and len(run) > 1:
                [rows[i]] = carry_out([strike], reference, args.dir / str(strike.number))
        for row in rows:
            console.print(line(row))
        return rows

    rows = go_on(strikes, strike_run, file, deal=_apart if args.apart else on_runs)
    return figures(rows), rows


def _apart(strikes: Sequence[Strike]) -> list[list[Strike]]:
    return [[strike] for strike in strikes]


def go_on(
    strikes: Sequence[Strike],
    strike_run: Callable[[Sequence[Strike]], Sequence[Row]],
    file: Path | None,
    deal: Callable[[Sequence[Strike]], list[list[Strike]]] = on_runs,
) -> list[Row]:
    """Rows of all strikes, of which those that `file` has are not made again; it has every row
    that was made, whatever ends this."""
    known = BenchReport.model_validate_json(file.read_text()).rows if file and file.exists() else ()
    rows: dict[int, Row] = {}
    for strike in strikes:
        made = [row for row in known if strike.model_dump(mode="json").items() <= row.items()]
        if made:
            rows[strike.number] = dict(made[0])
    for run in deal([strike for strike in strikes if strike.number not in rows]):
        rows |= {strike.number: row for strike, row in zip(run, strike_run(run), strict=True)}
        if file:
            _write(file, [rows[number] for number in sorted(rows)])
    return [rows[strike.number] for strike in strikes]


def _write(file: Path, rows: Sequence[Row]) -> None:
    report = BenchReport(
        name="chaos", figures=figures(rows), rows=tuple(rows), command="", versions={}
    )
    write_durably(file, report.model_dump_json(indent=1))


def figures(rows: Sequence[Row]) -> dict[str, int | float]:
    return {
        "faults": len(rows),
        "failures": sum(bool(row["complaints"]) for row in rows),
        "pairs_defined": len(PAIRS),
        "pairs_drawn": len({(row["target"], row["fault"]) for row in rows}),
        "runs": len({row["run"] for row in rows}),
        "resumes": sum(map(_resumes, rows)),
    }


def line(row: Row) -> str:
    """A row for people."""
    what = f"{row['number']:>3}  {row['target']} {row['fault']} ({row['moment']}, {row['mode']})"
    outcome = "; ".join(row["complaints"]) or "well"
    return f"{what}: {outcome}  [{row['seconds']:.0f} s, {_resumes(row)} resumes]"


def _resumes(row: Row) -> int:
    return sum(end != 0 for end in row["ends"])


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("target", "fault", "well", text=("target", "fault"))
    rows = [(row["target"], row["fault"], bool(row["complaints"])) for row in report.rows]
    num, failed = Counter(row[:2] for row in rows), Counter(row[:2] for row in rows if row[2])
    for pair in PAIRS:
        table.add_row(*pair, f"{num[pair] - failed[pair]} of {num[pair]}")
    console.print(table)
    for row in report.rows:
        if row["complaints"]:
            console.print(line(row))
    made = report.figures
    console.print(
        f"{made['faults']} faults, {made['failures']} failures; {made['pairs_drawn']} of "
        f"{made['pairs_defined']} pairs of target and fault"
    )


class _References:
    """Records of undisturbed runs, made when they are first asked for and kept in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, mode: RunMode) -> RunTraces:
        file = self._directory / f"undisturbed-{mode}.json"
        if not file.exists():
            from benchmarks.chaos.strikes import undisturbed

            record = undisturbed(mode, self._directory / f"undisturbed-{mode}")
            write_durably(file, record.model_dump_json())
        return RunTraces.model_validate_json(file.read_text())
