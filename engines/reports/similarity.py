"""Tables and a picture of what repeats from epoch to epoch: text, lengths and their ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from refrain.engines.accounting.epoch_similarity import (
    GROWN,
    LengthChanges,
    RankChanges,
    Similarity,
)
from refrain.engines.reports.tables import plain_table

STRETCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Longest stretch in tokens of each row of the table. The last row has no limit."""
WIDTH_IN, HEIGHT_IN, DPI = 11.0, 6.4, 100
COLOUR, SOFT = "#2b6cb0", "#a9b0b8"


def stretches(similarity: Similarity) -> list[tuple[str, float, float]]:
    """Return rows of (tokens, share of the stretches, share of their tokens), as in figure 8."""
    lengths, rows, low = similarity.segments, [], 1
    for high in (*STRETCHES, None):
        here = lengths[(lengths >= low) & (lengths <= (high or lengths.max(initial=0)))]
        name = f"{low}+" if high is None else f"{low}" if high == low else f"{low} to {high}"
        rows.append(
            (name, len(here) / max(1, len(lengths)), int(here.sum()) / max(1, int(lengths.sum())))
        )
        low = (high or low) + 1
    return rows


def tables(
    similar: Sequence[Similarity],
    changes: Sequence[RankChanges],
    lengths: Sequence[LengthChanges],
) -> Iterator[tuple[str, Table]]:
    """Yield titles and tables."""
    yield "tokens of a response, and medians compared with the last epoch", _lengths(lengths)
    returning = plain_table("epoch", "responses", "found again", "p10", "median", "p90")
    for one in similar:
        quantiles = np.quantile(one.rates, (0.1, 0.5, 0.9)) if len(one.rates) else (0.0,) * 3
        shares = (f"{share:.1%}" for share in (one.share, *quantiles))
        returning.add_row(f"{one.epoch + 1}", f"{len(one.rates):,}", *shares)
    yield "tokens found in the last epoch's responses (RhymeRL, figure 6)", returning
    of_length = plain_table("tokens", "stretches", "their tokens", text=["tokens"])
    for name, num, tokens in stretches(similar[-1]):
        of_length.add_row(name, f"{num:.1%}", f"{tokens:.1%}")
    yield f"stretches found in epoch {similar[-1].epoch + 1} (figure 8)", of_length
    ranks = plain_table("epoch", "groups", "accurate", "not last", "within alpha", "outgrown")
    for one in changes:
        shares = (one.accurate, one.not_last, one.within, one.outgrown)
        ranks.add_row(
            f"{one.epoch + 1}", f"{one.num_groups}", *(f"{share:.2%}" for share in shares)
        )
    yield "responses compared with their ranking group (figure 9, table of 6.3)", ranks


def _lengths(lengths: Sequence[LengthChanges]) -> Table:
    columns = ("epoch", "p5", "median", "p95", "p99", "longest", "ranks alike")
    table = plain_table(*columns, f"grown {GROWN}x", f"shrunk {GROWN}x")
    for one in lengths:
        correlation = "-" if one.rank_correlation is None else f"{one.rank_correlation:.3f}"
        shares = ("-" if share is None else f"{share:.1%}" for share in (one.grown, one.shrunk))
        tokens = (f"{tokens:,.0f}" for tokens in one.tokens)
        table.add_row(f"{one.epoch + 1}", *tokens, correlation, *shares)
    return table


def draw(similar: Sequence[Similarity], changes: Sequence[RankChanges], path: Path) -> None:
    """Draw the picture of these results."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    (share, rates), (lengths, ranks) = figure.subplots(2, 2)
    epochs = [one.epoch + 1 for one in similar]
    share.plot(epochs, [one.share for one in similar], "o-", color=COLOUR)
    share.set(ylim=(0, 1), title="tokens found in the last epoch", xlabel="epoch")
    rates.hist(similar[-1].rates, bins=40, range=(0, 1), color=COLOUR)
    rates.set(title=f"share found, by response, epoch {epochs[-1]}", ylabel="responses")
    names, num, tokens = zip(*stretches(similar[-1]), strict=True)
    places = np.arange(len(names))
    lengths.bar(places - 0.2, num, 0.4, color=SOFT, label="of the stretches")
    lengths.bar(places + 0.2, tokens, 0.4, color=COLOUR, label="of their tokens")
    lengths.set_xticks(places, names, rotation=30)
    lengths.set(title=f"stretches by length, epoch {epochs[-1]}", ylim=(0, 1))
    lengths.legend(frameon=False)
    for num_groups in sorted({one.num_groups for one in changes}):
        own = [one for one in changes if one.num_groups == num_groups]
        at = [one.epoch + 1 for one in own]
        ranks.plot(at, [1 - one.accurate for one in own], "o-", label=f"{num_groups} groups")
        ranks.plot(at, [one.outgrown for one in own], "x--", label=f"{num_groups}: outgrown")
    ranks.set(title="responses beyond their ranking group", xlabel="epoch", ylim=(0, None))
    ranks.legend(frameon=False)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def figures(
    similar: Sequence[Similarity],
    changes: Sequence[RankChanges],
    lengths: Sequence[LengthChanges],
) -> dict[str, float]:
    """Return means over the epochs by flat name."""
    means = {"found_share": float(np.mean([one.share for one in similar]))}
    for name in ("rank_correlation", "grown", "shrunk"):
        known = [value for one in lengths if (value := getattr(one, name)) is not None]
        means |= {name: float(np.mean(known))} if known else {}
    for num_groups in sorted({one.num_groups for one in changes}):
        own = [one for one in changes if one.num_groups == num_groups]
        for name in ("accurate", "not_last", "within", "outgrown"):
            mean = float(np.mean([getattr(one, name) for one in own]))
            means[f"{name}_share_{num_groups}_groups"] = mean
    return means


def rows(
    similar: Sequence[Similarity],
    changes: Sequence[RankChanges],
    lengths: Sequence[LengthChanges],
) -> list[dict[str, Any]]:
    """Return the JSON rows: lengths of each epoch, similarity of each epoch after the first, and
    rank changes of each such epoch and number of ranking groups."""
    found = [
        {
            "epoch": one.epoch + 1,
            "found_share": one.share,
            "stretches": [list(row) for row in stretches(one)],
        }
        for one in similar
    ]
    return [
        *(asdict(one) | {"epoch": one.epoch + 1, "tokens": list(one.tokens)} for one in lengths),
        *found,
        *(asdict(one) | {"epoch": one.epoch + 1} for one in changes),
    ]
