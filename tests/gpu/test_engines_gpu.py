"""refrain's engines compared with stock vLLM on one GPU (see `fleet`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.gpu.fleet import FEW, NUM_ROWS, Fleet, in_batches, in_turn
from tests.gpu.needs import REHEARSAL, needs

if TYPE_CHECKING:
    from tests.gpu.local_engine import Row, Rows

AS = {"on": "", "v2_on": "v2_", "v2_head": "v2_head_"}
"""How the figures of an engine begin."""


@needs("cuda", "vllm", "transformers", "numba", seconds=30)
@pytest.mark.parametrize("name", ["off", "on", "stock"])
def test_start_and_weights(name: str, fleet: Fleet, figures: Callable) -> None:
    """The engines start in parallel, which the first test with engines waits for."""
    engine = fleet[name]
    told = {"start_s": engine.start_s, "first_request_s": fleet.first_request_s[name]}
    if name != "stock":
        told["first_weight_sync_s"] = fleet.first_sync_s[name]
        error, told["weight_sync_s"] = engine.timed(engine.engine.load_weights(fleet.weights))
        told["canary_error"] = error
        assert error < 1.0
    figures(**{f"engine_{name}_{key}": value for key, value in told.items()})


@needs("cuda", "vllm", "transformers", "numba", seconds=60)
@pytest.mark.parametrize("num_rows", [FEW, NUM_ROWS])
def test_decoding_in_turn(num_rows: int, fleet: Fleet, figures: Callable) -> None:
    """Measure a first epoch, in which the engine with drafts has no history.

    Stock vLLM gets its requests in two ways: one call of `generate` each, as users do, and in a
    batch, as refrain does.
    """
    ways = {
        "stock": fleet["stock"].roll_out,
        "stock_batch": in_batches(fleet["stock"]),
        "off": fleet["off"].roll_out,
        **{name: fleet[name].roll_out for name in fleet.drafting},
    }
    speeds = in_turn(ways, lambda lap: fleet.requests(100 + lap)[:num_rows])
    best = max(speeds["stock"], speeds["stock_batch"])
    for name, speed in speeds.items():
        figures(**{f"engine_{name}_{num_rows}_rows_tokens_per_s": speed})
        figures(**{f"engine_{name}_{num_rows}_rows_step_ms": 1e3 * num_rows / speed})
    figures(**{f"engine_off_over_stock_{num_rows}_rows": speeds["off"] / best})
    for name in fleet.drafting:
        what = f"engine_{AS[name]}first_epoch_over_stock_{num_rows}_rows"
        figures(**{what: speeds[name] / best})


@needs("cuda", "vllm", "transformers", "numba", seconds=150)
@pytest.mark.parametrize("num_rows", [FEW, NUM_ROWS])
def test_drafts_that_are_right(num_rows: int, fleet: Fleet, figures: Callable) -> None:
    """Draft earlier samples from themselves, or with a head that is right. The tokens are the same,
    also where a part of the drafts is wrong.

    With random weights in bfloat16 a response would soon differ, by rounding alone, from its
    earlier self. So the weights are those of a model without near ties.
    """
    from tests.gpu.local_engine import num_tokens, parted, write_history

    requests = fleet.requests(1)[:num_rows]
    for name in ("off", *fleet.drafting):
        fleet.load(name, fleet.echo)
    expected, _ = fleet["off"].roll_out(requests)
    again, off_s = fleet["off"].roll_out(requests)
    write_history(fleet.history, expected.values())
    others = [again]
    for name in fleet.drafting:
        # The gate learns that these drafts pay.
        fleet[name].roll_out(requests)
        rows, on_s = fleet[name].roll_out(requests)
        others.append(rows)
        num, right = _drafted(rows)
        told = {
            "tokens_per_s": num_tokens(rows) / on_s,
            "over_off": off_s / on_s,
            "acceptance": right / max(1, num),
        }
        what = f"engine_{AS[name]}right_drafts_{num_rows}_rows"
        figures(**{f"{what}_{key}": value for key, value in told.items()})
        # On a CPU the short drafts of a head may not pay.
        least = 0.0 if REHEARSAL and name == "v2_head" else num_tokens(rows) / 2
        assert right >= least
    write_history(fleet.history, [_with_others(row) for row in expected.values()])
    for name in [name for name in fleet.drafting if name != "v2_head"]:
        rows, _ = fleet[name].roll_out(requests)
        others.append(rows)
        num, right = _drafted(rows)
        assert num > right
    for name in ("off", *fleet.drafting):
        fleet.load(name, fleet.weights)
    for rows in others:
        num_flips, _ = parted(rows, expected)
        assert not num_flips


def _drafted(rows: "Rows") -> tuple[int, int]:
    """Return how many draft tokens were verified, and how many of them were right."""
    num, right = (
        sum(row[column] for row in rows.values())
        for column in ("num_draft_tokens", "num_accepted_tokens")
    )
    return num, right


def _with_others(row: "Row") -> "Row":
    """Return a response in which each fifth token is another one."""
    tokens = [one if i % 5 else one + 1 for i, one in enumerate(row["response_token_ids"])]
    return row | {"response_token_ids": tokens}


@needs("cuda", "vllm", "transformers", "numba", seconds=60)
@pytest.mark.parametrize("num_rows", [FEW, NUM_ROWS])
def test_drafts_that_are_wrong(num_rows: int, fleet: Fleet, figures: Callable) -> None:
    """The history has other noise, so drafts are wrong: random weights repeat nothing. The head is
    that of the other weights.

    The gate should notice this and stop verifying drafts.
    """
    ways = {name: fleet[name].roll_out for name in ("off", *fleet.drafting)}
    speeds = in_turn(ways, lambda lap: fleet.requests(200 + lap)[:num_rows])
    for name in fleet.drafting:
        what = f"engine_{AS[name]}wrong_drafts_{num_rows}_rows_over_off"
        figures(**{what: speeds[name] / speeds["off"]})
