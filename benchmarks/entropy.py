"""Compare drafters on a synthetic policy of known entropy, at temperature 1.

The policy is a Markov chain of second order that learns from rewards (`benchmarks.synthetic`). It
samples with an engine's noise. The drafters are those of `refrain bench drafting`. On a trained
model a drafter may gain more or less.
"""

import math
from argparse import ArgumentParser, Namespace

from rich.console import Console

from refrain.benchmarks import drafting
from refrain.benchmarks.drafting import PACKAGES as PACKAGES
from refrain.benchmarks.laps import Measured, check_counts
from refrain.benchmarks.synthetic import CLASSES, SEED, VOCABULARY, draw
from refrain.schemas.bench import BenchReport

GROUP_SIZE = 8
STEPS = 4
"""Number of steps in an epoch."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--entropy",
        type=float,
        default=0.55,
        metavar="NATS",
        help="mean entropy per token, over all contexts [default: 0.55]",
    )
    parser.add_argument(
        "--epochs", type=int, default=5, metavar="N", help="epochs of the policy [default: 5]"
    )
    parser.add_argument(
        "--prompts", type=int, default=256, metavar="N", help="prompts of an epoch [default: 256]"
    )
    drafting.add_engine(parser)


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "max_num_seqs", "prompts")
    most = math.log(VOCABULARY)
    if not 0.0 < args.entropy < most:
        raise ValueError(f"--entropy {args.entropy}: give nats above 0 and below {most:.2f}")
    if args.epochs < 2:
        raise ValueError(f"--epochs {args.epochs}: give at least 2: the first has no history")
    if args.prompts % (CLASSES * STEPS):
        raise ValueError(f"--prompts {args.prompts}: give a multiple of {CLASSES * STEPS}")
    times = drafting.read_times(args.profile, args.tp) if args.profile else None
    drawn = draw(args.entropy, args.epochs, args.prompts, GROUP_SIZE, args.prompts // STEPS)
    epochs = range(2, args.epochs + 1)
    replay = (drawn.trace, epochs, SEED, times, args.max_num_seqs, console)
    figures, rows = drafting.replayed(*replay)
    known = {
        "entropy_first": drawn.entropies[1],
        "entropy_last": drawn.entropies[-1],
        "right_first": drawn.right_shares[0],
        "right_last": drawn.right_shares[-1],
    }
    return known | figures, rows


def show(report: BenchReport, console: Console) -> None:
    figures = report.figures
    console.print(
        f"{figures['entropy_first']:.2f} to {figures['entropy_last']:.2f} nats a token; "
        f"{figures['right_first']:.0%} to {figures['right_last']:.0%} of the responses are right"
    )
    drafting.show(report, console)
