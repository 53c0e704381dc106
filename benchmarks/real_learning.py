"""A real pretrained model learns: held-out reward, and the gain from drafts as the policy changes.

    refrain bench real_learning --json benchmarks/baselines/real_learning.json

Each algorithm has one run of CONFIG, with the model and the data of its page. A run is validated
before its first step and after each epoch. The bench prints the rise of its held-out reward with
the standard error of that rise. Rewards are paired by prompt, so the error is that of the mean
difference over prompts. The rows of an epoch show how far the policy moved in it. `kl` is the mean
over the validation's tokens of log p - log p_before, by the checkpoints at the two ends of the
epoch (an estimate of KL(now, before), in nats per token). History is older than that by half an
epoch on average.

Complete runs under `--runs-dir` are read and not repeated. On a GPU the same command takes minutes:
add `--set model.dtype=bfloat16`.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console

from refrain.benchmarks.demo import checkpoint_model, train_once
from refrain.benchmarks.laps import Measured, Row, rows_with
from refrain.engines.reports.tables import plain_table
from refrain.engines.store.archive import query_all
from refrain.schemas.algorithm import AlgorithmType
from refrain.schemas.bench import BenchReport
from refrain.tasks.run.run_dir import STORE_FILE

PACKAGES = ("refrain-rl", "vllm", "torch", "transformers", "reasoning-gym")
STEPS = """
    SELECT step, epoch, avg(reward) AS reward, avg(response_tokens) AS response_tokens,
           -sum(list_sum(inference_logprobs)) / sum(response_tokens) AS nats,
           sum(response_tokens)::BIGINT AS num_tokens,
           sum(num_accepted_tokens)::BIGINT AS num_accepted,
           sum(num_draft_tokens)::BIGINT AS num_drafted,
           sum(num_verifications)::BIGINT AS num_verifications
    FROM rollouts JOIN rewards USING (split, step, prompt_key, sample_index)
    WHERE split = 'train' GROUP BY step, epoch ORDER BY step
"""
HELD_OUT = """
    SELECT step AS version, prompt_key, avg(reward) AS reward
    FROM rewards WHERE split = 'validation' GROUP BY step, prompt_key ORDER BY step, prompt_key
"""
RESPONSES = """
    SELECT prompt_token_ids, response_token_ids, inference_logprobs
    FROM rollouts JOIN prompts USING (prompt_key)
    WHERE split = 'validation' AND step = {version}
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        default="examples/smollm2/train.yaml",
        help="[default: %(default)s]",
    )
    parser.add_argument(
        "--algorithms", nargs="+", choices=get_args(AlgorithmType), default=["grpo", "rloo"]
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="[default: 0]")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/real_learning"), metavar="DIR")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="a PNG that shows the reward over steps"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings for all runs"
    )


def measure(args: Namespace, console: Console) -> Measured:
    rows: list[Row] = []
    found: dict[str, float] = {}
    for number, algorithm in enumerate(args.algorithms):
        console.print(f"{number + 1}/{len(args.algorithms)}: {algorithm}")
        run_dir = _run(args, algorithm, console)
        own = read_rows(run_dir)
        found |= {f"{name}_{algorithm}": value for name, value in figures(own).items()}
        rows += [{"algorithm": algorithm} | row for row in own]
    if args.plot:
        draw(rows, args.plot)
    return found, rows


def _run(args: Namespace, algorithm: str, console: Console) -> Path:
    settings = [f"algorithm.type={algorithm}", *args.set]
    return train_once(args.config, algorithm, args.seed, args.runs_dir, settings, console.file)


def read_rows(run_dir: Path) -> list[Row]:
    """Return the rows of a run's steps, validations and epochs; `kind` distinguishes them."""
    store = run_dir / STORE_FILE
    steps = query_all(store, STEPS).to_pylist()
    held_out = held_out_rows(query_all(store, HELD_OUT).to_pylist())
    versions = [row["version"] for row in held_out]
    config = json.loads((run_dir / "config.json").read_text())
    epochs = [epoch_row(rows_with(steps, epoch=epoch)) for epoch in _values(steps, "epoch")]
    for row, before, now in zip(epochs, versions, versions[1:], strict=False):
        responses = query_all(store, RESPONSES.format(version=now)).to_pylist()
        model = config["model"]["path"] if before == 0 else checkpoint_model(run_dir, before)
        row["kl"] = moved(model, responses)
    return [
        *({"kind": "step"} | row for row in steps),
        *({"kind": "held_out"} | row for row in held_out),
        *({"kind": "epoch"} | row for row in epochs),
    ]


def _values(rows: Sequence[Row], column: str) -> list:
    return list(dict.fromkeys(row[column] for row in rows))


def held_out_rows(rewards: Sequence[Row]) -> list[Row]:
    """Return the mean reward of each validation, and its rise since the first one with the standard
    error of that rise, over prompts."""
    found = []
    first = np.array([row["reward"] for row in rewards if row["version"] == 0])
    for version in _values(rewards, "version"):
        own = np.array([row["reward"] for row in rewards if row["version"] == version])
        rise = own - first
        found.append(
            {
                "version": version,
                "held_out": float(own.mean()),
                "rise": float(rise.mean()),
                "rise_error": float(rise.std(ddof=1) / np.sqrt(len(rise))),
            }
        )
    return found


def epoch_row(steps: Sequence[Row]) -> Row:
    """Summarise the steps of an epoch. Nats are per token, as the mean over its steps."""
    num = {name: sum(row[name] for row in steps) for name in steps[0] if name.startswith("num_")}
    return {
        "epoch": steps[0]["epoch"],
        "reward": float(np.mean([row["reward"] for row in steps])),
        "nats": float(np.mean([row["nats"] for row in steps])),
        "from_drafts": num["num_accepted"] / num["num_tokens"],
        "acceptance_rate": num["num_accepted"] / max(1, num["num_drafted"]),
        "acceptance_length": 1 + num["num_accepted"] / max(1, num["num_verifications"]),
    }


def moved(model_dir: Path, responses: Sequence[Row]) -> float:
    """Return the mean of log p - log p_before over tokens of these responses, which carry their log
    p. `model_dir`: the policy before."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    differences = []
    for row in responses:
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        before = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
        differences.append(np.array(row["inference_logprobs"]) - before.numpy())
    return float(np.concatenate(differences).mean())


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of one run."""
    held_out = rows_with(rows, kind="held_out")
    first, last = held_out[0], held_out[-1]
    found = {
        "num_steps": len(rows_with(rows, kind="step")),
        "held_out_first": first["held_out"],
        "held_out_last": last["held_out"],
        "rise": last["rise"],
        "rise_over_error": last["rise"] / last["rise_error"],
    }
    for row in rows_with(rows, kind="epoch"):
        names = ("reward", "nats", "kl", "from_drafts", "acceptance_rate")
        found |= {f"{name}_epoch_{row['epoch'] + 1}": row[name] for name in names}
    return found


def show(report: BenchReport, console: Console) -> None:
    columns = ("epoch", "reward", "held out", "nats", "KL", "from drafts", "accepted")
    table = plain_table("algorithm", *columns, text=("algorithm",))
    for algorithm in _values(report.rows, "algorithm"):
        own = rows_with(report.rows, algorithm=algorithm)
        held_out = rows_with(own, kind="held_out")
        table.add_row(algorithm, "", "", f"{held_out[0]['held_out']:.3f}", "", "", "", "")
        for row, after in zip(rows_with(own, kind="epoch"), held_out[1:], strict=True):
            table.add_row(
                "",
                str(row["epoch"] + 1),
                f"{row['reward']:.3f}",
                f"{after['held_out']:.3f}",
                f"{row['nats']:.2f}",
                f"{row['kl']:.3f}",
                f"{row['from_drafts']:.0%}",
                f"{row['acceptance_rate']:.0%}",
            )
    console.print(table)
    for algorithm in _values(report.rows, "algorithm"):
        rise, ratio = (
            report.figures[f"{name}_{algorithm}"] for name in ("rise", "rise_over_error")
        )
        console.print(f"{algorithm}: held-out reward {rise:+.3f}, {ratio:.1f} standard errors")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the rewards of steps and of validations, with their standard errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, algorithm in enumerate(_values(rows, "algorithm")):
        own, color = rows_with(rows, algorithm=algorithm), f"C{number}"
        steps, held_out = rows_with(own, kind="step"), rows_with(own, kind="held_out")
        axes.plot(
            [row["step"] for row in steps],
            [row["reward"] for row in steps],
            color=color,
            alpha=0.45,
            linewidth=1,
            label=f"{algorithm}, prompts of a step",
        )
        axes.errorbar(
            [row["version"] for row in held_out],
            [row["held_out"] for row in held_out],
            [row["rise_error"] for row in held_out],
            fmt="o-",
            color=color,
            capsize=3,
            label=f"{algorithm}, held out",
        )
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})
