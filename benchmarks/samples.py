"""Looking at samples: how long does a page of a large run take?

The run is made up, and ended: most of its steps are in the archive, as in a real run. Each page has
50 samples. Seconds are medians over rounds.

    SORT_s      a page in this order, with its tokens decoded, in the terminal's process
    prompt_s    a prompt over epochs
    response_s  one sample
    command_s   the whole command `refrain samples`, with the start of Python
    command_cpu_s    its CPU seconds, on which other processes of the machine have little effect
"""

import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from refrain.benchmarks.laps import Measured, check_counts
from refrain.engines.reports.samples_page import PAGE_SIZE
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.samples import SORTS, SampleFilter
from refrain.engines.store.store import Store
from refrain.schemas.bench import BenchReport

PACKAGES = ("refrain-rl", "duckdb")
PROMPTS, GROUP, STEP_ROLLOUTS = 4096, 8, 1024
_STEPS_AT_ONCE = 50
_VOCABULARY = 36
_TIMEOUT_S = 60.0
_FILL = """
CREATE TEMP TABLE made AS
SELECT i::INTEGER AS i, (i // {step_rollouts} + 1)::INTEGER AS step, md5((i // {group} %
    {prompts})::VARCHAR) AS prompt_key, (i % {group})::INTEGER AS sample_index,
    (i // ({group} * {prompts}))::INTEGER AS epoch, (1 + hash(i) % {tokens})::INTEGER AS num
FROM range({first}, {last}) AS numbers(i);
INSERT INTO prompts SELECT DISTINCT prompt_key, [22, 17, 10, 5, 20] FROM made
    ON CONFLICT DO NOTHING;
INSERT INTO rollouts BY NAME
SELECT 'train' AS split, step, step AS origin_step, epoch, prompt_key, sample_index,
    [(hash(1000 * i + k) % {vocabulary})::INTEGER for k in range(num)] AS response_token_ids,
    [-(hash(999 * i + k) % 1000 / 400)::FLOAT for k in range(num)] AS inference_logprobs,
    num AS response_tokens, if(i % 9 = 0, 'length', 'stop') AS finish_reason,
    i % 2 AS engine, 'history' AS drafter, step - 1 AS policy_version,
    step - 1 AS last_policy_version, [{{policy_version: step - 1, num_tokens: num}}] AS
    version_spans, num AS num_draft_tokens, num // 2 AS num_accepted_tokens,
    num // 4 AS num_verifications, 0 AS num_rejections, step AS started_s, step + 1 AS finished_s
FROM made;
UPDATE rollouts SET entropy = -list_avg(inference_logprobs) WHERE entropy IS NULL;
INSERT INTO rewards
SELECT 'train', step, prompt_key, sample_index, (hash(i) % 101) / 100, '{{"format": 1.0}}'
FROM made;
DROP TABLE made;
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rollouts", type=int, default=200_000, metavar="N", help="rollouts [default: 200000]"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=256,
        metavar="N",
        help="longest response in tokens, twice the mean [default: 256]",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="[default: 5]")


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "rollouts", "tokens", "rounds")
    with TemporaryDirectory(prefix="refrain-bench-") as directory:
        run_dir = Path(directory) / "run"
        made_up_run(run_dir, args.rollouts, args.tokens)
        console.print(f"made {args.rollouts:,} rollouts")
        figures = {
            name: median(_seconds(look) for _ in range(args.rounds))
            for name, look in _looks(run_dir).items()
        }
        command = _command(run_dir)
        figures["command_cpu_s"] = median(_cpu_seconds(command) for _ in range(args.rounds))
    return figures, [{"page": name, "seconds": value} for name, value in figures.items()]


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("page", "seconds", text=("page",))
    for row in report.rows:
        table.add_row(str(row["page"]).removesuffix("_s"), f"{row['seconds']:.3f}")
    console.print(table)


def made_up_run(run_dir: Path, num_rollouts: int, tokens: int) -> None:
    """Write the directory of an ended run with these rollouts. Its tokens are the demo's."""
    import json

    from refrain.tasks.run.run_dir import CONFIG_FILE, STORE_FILE

    model = Path(__file__).resolve().parents[1] / "infra" / "demo" / "model"
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text(json.dumps({"model": {"path": str(model)}}))
    size = {"step_rollouts": STEP_ROLLOUTS, "group": GROUP, "prompts": PROMPTS, "tokens": tokens}
    batch = _STEPS_AT_ONCE * STEP_ROLLOUTS
    with Store(run_dir / STORE_FILE) as store:
        for first in range(0, num_rollouts, batch):
            last = min(first + batch, num_rollouts)
            query = _FILL.format(first=first, last=last, vocabulary=_VOCABULARY, **size)
            with store._transaction() as con:
                con.execute(query)
            store.archive_before(last // STEP_ROLLOUTS)


def _looks(run_dir: Path) -> dict[str, Callable[[], object]]:
    from refrain.flows.samples import RunSamples

    samples = RunSamples(run_dir, _TIMEOUT_S)
    (first, *_) = samples.page(SampleFilter(), "", 1).samples

    def page(wanted: SampleFilter) -> Callable[[], object]:
        def look() -> None:
            for sample in samples.page(wanted, "", PAGE_SIZE).samples:
                samples.decoder.pieces(sample.response_token_ids)

        return look

    one = SampleFilter(step=first.step, prompt=first.prompt_key, sample=first.sample_index)
    return {
        **{f"{sort}_s": page(SampleFilter(sort=sort)) for sort in SORTS},
        "prompt_s": page(SampleFilter(prompt=first.prompt_key, sort="epoch")),
        "response_s": page(one),
        "command_s": _command(run_dir),
    }


def _command(run_dir: Path) -> Callable[[], object]:
    command = [sys.executable, "-m", "refrain.flows.cli", "samples", str(run_dir)]
    return lambda: subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)


def _seconds(look: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    look()
    return time.perf_counter() - started_s


def _cpu_seconds(look: Callable[[], object]) -> float:
    """Return the CPU seconds of the processes that this starts."""
    before = os.times()
    look()
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])
