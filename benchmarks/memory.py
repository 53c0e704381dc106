"""Memory of a trainer rank, without a GPU: FSDP2's memory tracker against the plan's arithmetic.

The models have 8B parameters on 4 ranks and 32B on 16. A micro-batch is one sample of 1K + 8K
tokens, in bf16 with gradient checkpointing. `peak_8b_4_ranks_gb` and `peak_32b_16_ranks_gb` are the
bytes of live tensors at the peak of a step, in units of 10^9. `planned_over_tracked_*` is the
prediction of `engines.machine.trainer_memory`, divided by that. The CUDA context, NCCL and the
allocator's unusable memory come on top; the plan includes them.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

from rich.console import Console
from rich.progress import track

from refrain.benchmarks.laps import Measured, Row
from refrain.engines.latency.model_shape import SHAPES, ModelShape
from refrain.engines.machine.trainer_memory import Training, trainer_footprint
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport

PACKAGES = ("refrain", "torch", "transformers")
PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 8192
CASES = {"8b": ("Qwen3-8B", 4), "32b": ("Qwen3-32B", 16)}
"""Model and number of ranks, by the name in the figures."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--no-gradient-checkpointing",
        action="store_true",
        help="keep activations instead of recomputing them",
    )


def measure(args: Namespace, console: Console) -> Measured:
    figures: dict[str, int | float] = {}
    rows: list[Row] = []
    for name in track(CASES, "tracked", console=console, transient=True):
        model, num_ranks = CASES[name]
        row = compare(SHAPES[model], num_ranks, not args.no_gradient_checkpointing)
        figures[f"peak_{name}_{num_ranks}_ranks_gb"] = row["tracked_gb"]
        figures[f"planned_over_tracked_{name}"] = row["planned_gb"] / row["tracked_gb"]
        rows.append({"model": model, "num_ranks": num_ranks} | row)
    return figures, rows


def compare(shape: ModelShape, num_ranks: int, gradient_checkpointing: bool) -> Row:
    """Return tracked and planned bytes of a rank."""
    from refrain.benchmarks.tracked_memory import track_peak

    lengths = (PROMPT_TOKENS, RESPONSE_TOKENS)
    tracked = track_peak(
        qwen3_config(shape), num_ranks, lengths, gradient_checkpointing=gradient_checkpointing
    )
    training = Training(num_ranks, sum(lengths), RESPONSE_TOKENS, gradient_checkpointing)
    planned = trainer_footprint(shape, training)
    total = tracked.pop("Total")
    return {
        "tracked_gb": total / 1e9,
        "planned_gb": planned.tensor_bytes / 1e9,
        "peak": planned.peak,
        "tracked": {kind: num / 1e9 for kind, num in tracked.items() if num},
    }


def qwen3_config(shape: ModelShape) -> dict[str, Any]:
    """Return the content of a `config.json` of this shape."""
    return {
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": 40_960,
    }


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("model", "ranks", "tracked GB", "planned GB", "peak in", text=("model",))
    for row in report.rows:
        numbers = (f"{row[column]:.1f}" for column in ("tracked_gb", "planned_gb"))
        table.add_row(str(row["model"]), str(row["num_ranks"]), *numbers, f"the {row['peak']}")
    console.print(table)
