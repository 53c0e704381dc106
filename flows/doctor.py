"""Check whether runs can work on this machine, and how to fix problems."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from refrain.engines.machine.inspect_machine import inspect_machine
from refrain.engines.machine.verdicts import findings
from refrain.engines.paths import check_place
from refrain.engines.reports.tables import plain_table
from refrain.flows.output_file import JSON, check_output, write_output
from refrain.schemas.machine import Finding, MachineReport, Verdict

STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}


def launch_doctor(
    runs_dir: Path, prefect_port: int, mlflow_port: int, json_file: str | None
) -> None:
    """Check the machine and print the findings. Exit with status 1 when there is a problem. Raise
    ValueError when the JSON file cannot be written."""
    check_output(json_file, JSON, "--json")
    check_place(runs_dir, f"--runs-dir {runs_dir}")
    machine = inspect_machine(runs_dir, {"Prefect": prefect_port, "MLflow": mlflow_port})
    report = MachineReport(findings=findings(machine), machine=machine)
    print_findings(report.findings, Console(stderr=json_file == "-", highlight=False, markup=False))
    if json_file:
        write_output(json_file, report.model_dump_json(indent=2) + "\n")
    if report.has_problem:
        sys.exit(1)


def print_findings(found: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding, then the number of problems and warnings."""
    columns = ("what", "found", "", "how to fix it")
    table = plain_table(*columns, text=columns)
    for one in found:
        verdict = Text(one.verdict, STYLES[one.verdict])
        table.add_row(one.what, one.found, verdict, one.fix)
    console.print(table)
    count = {v: sum(one.verdict is v for one in found) for v in Verdict}
    problems, warnings = count[Verdict.PROBLEM], count[Verdict.WARNING]
    if problems or warnings:
        console.print(f"problems: {problems}, warnings: {warnings}")
    else:
        console.print("All is well.")
