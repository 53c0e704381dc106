"""Random faults on real runs: is anything lost, duplicated, changed, hung or left behind?

    refrain bench chaos --seed 0 --json benchmarks/baselines/chaos.json

Faults hit small runs of the demo's model at random moments. A process is killed, or stopped for
longer than the time limits. It cannot write, finds a damaged file or a clock that was set back, or
loses its terminal or its memory. A run gets up to five faults, and is resumed when its driver has
ended. At the end the bench checks that

    - every planned sample is in the store once, with its reward
    - no step is missing, and summary and MLflow are complete
    - no process and no file is left
    - the tokens are those of an undisturbed run

A problem at the end of a run counts for all its faults; --apart shows which fault caused it. Takes
1 to 3 minutes per fault on 2 cores. With --json an interrupted campaign continues where it stopped.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from refrain.benchmarks.chaos.checks import RunTraces
from refrain.benchmarks.chaos.faults import PAIRS, RunMode, Strike, draw, of_environments, on_runs
from refrain.benchmarks.laps import Measured, Row, check_counts
from refrain.engines.durable import write_durably
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport

PACKAGES = ("refrain", "vllm", "torch", "ray", "prefect", "mlflow", "duckdb")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--faults", type=int, default=72, help="number of faults (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed that draws the faults (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        metavar="N",
        help="only the faults with these numbers, from 0",
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="all runs are two versions stale, from one queue",
    )
    parser.add_argument(
        "--environment",
        action="store_true",
        help="kills in runs with an environment, in place of drawn faults",
    )
    parser.add_argument("--apart", action="store_true", help="a run of its own for each fault")
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/chaos"), help="directory of the runs"
    )


def measure(args: Namespace, console: Console) -> Measured:
    """Raise ValueError for bad arguments, RuntimeError if an undisturbed run fails."""
    check_counts(args, "faults")
    strikes = of_environments() if args.environment else draw(args.faults, args.seed)
    if args.environment and args.stale:
        raise ValueError("--environment and --stale: runs with an environment are stale already")
    if args.only is not None:
        if unknown := set(args.only) - set(range(len(strikes))):
            raise ValueError(f"--only {min(unknown)}: faults are 0 to {len(strikes) - 1}")
        strikes = [strikes[number] for number in args.only]
    if args.stale:
        strikes = [one.model_copy(update={"mode": RunMode.STALE}) for one in strikes]
    file = Path(args.json) if args.json and args.json != "-" else None
    from refrain.benchmarks.chaos.strikes import NOTHING, carry_out

    references = _References(args.dir)

    def strike_run(run: Sequence[Strike]) -> list[Row]:
        reference, directory = references.of(run[0].mode), args.dir / str(run[0].number)
        rows = carry_out(run, reference, directory)
        for i, strike in enumerate(run):
            # An earlier strike may have removed its target or its moment: repeat it alone.
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
    """Return the rows of all strikes. Strikes that `file` has already are not repeated. The file
    gets each row as soon as it is made, so an interruption loses none."""
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
        **{
            name: sum(row[name] for row in rows if name in row)
            for name in ("turns_lost", "turns_taken_over")
            if any(name in row for row in rows)
        },
    }


def line(row: Row) -> str:
    """Return a row as a line for people."""
    what = f"{row['number']:>3}  {row['target']} {row['fault']} ({row['moment']}, {row['mode']})"
    outcome = "; ".join(row["complaints"]) or "well"
    return f"{what}: {outcome}  [{row['seconds']:.0f} s, {_resumes(row)} resumes]"


def _resumes(row: Row) -> int:
    return sum(end != 0 for end in row["ends"])


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("target", "fault", "well", text=("target", "fault"))
    rows = [(row["target"], row["fault"], bool(row["complaints"])) for row in report.rows]
    num, failed = Counter(row[:2] for row in rows), Counter(row[:2] for row in rows if row[2])
    for pair in num:
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
    """Records of undisturbed runs, made at the first request and kept in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, mode: RunMode) -> RunTraces:
        file = self._directory / f"undisturbed-{mode}.json"
        if not file.exists():
            from refrain.benchmarks.chaos.strikes import undisturbed

            record = undisturbed(mode, self._directory / f"undisturbed-{mode}")
            write_durably(file, record.model_dump_json())
        return RunTraces.model_validate_json(file.read_text())
