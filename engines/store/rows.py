"""Convert finished rollouts to the Arrow table that the store inserts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from refrain.engines.store.tables import SPANS, TURNS
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import Generated, Rollout

COUNTS = ("num_draft_tokens", "num_accepted_tokens", "num_verifications", "num_rejections")
"""Counts of a response in `Generated`, and columns of the same names."""


def rollout_rows(rollouts: Sequence[Rollout]) -> pa.Table:
    """Return one row per rollout, with `prompt_token_ids` and the columns of the table `rollouts`
    except `epoch`. A rollout whose fields contradict each other is a bug of its engine."""
    for rollout in rollouts:
        _check(rollout)

    def column(value: Callable[[Rollout], Any], kind: pa.DataType) -> pa.Array:
        return pa.array(map(value, rollouts), kind, size=len(rollouts))

    generated = [rollout.generated for rollout in rollouts]
    requests = [rollout.request for rollout in rollouts]
    columns = {
        "split": column(lambda r: str(r.request.id.split), pa.string()),
        "step": column(lambda r: r.request.id.step, pa.int32()),
        "origin_step": column(lambda r: r.request.origin_step, pa.int32()),
        "prompt_key": column(lambda r: r.request.id.prompt_key, pa.string()),
        "sample_index": column(lambda r: r.request.id.sample_index, pa.int32()),
        "prompt_token_ids": _lists([r.prompt_token_ids for r in requests], np.int32),
        **generated_columns(generated),
        "entropy": column(lambda r: _entropy(r.generated.inference_logprobs), pa.float64()),
        "response_tokens": column(lambda r: r.num_tokens, pa.int32()),
        "finish_reason": column(lambda r: str(r.finish_reason), pa.string()),
        "engine": column(lambda r: r.engine, pa.int32()),
        "drafter": column(_drafter, pa.string()),
        "policy_version": column(lambda r: min(_versions(r)), pa.int32()),
        "last_policy_version": column(lambda r: max(_versions(r)), pa.int32()),
        "started_s": column(lambda r: r.started_s, pa.float64()),
        "finished_s": column(lambda r: r.finished_s, pa.float64()),
        "observed_tokens": column(lambda r: r.generated.num_observed, pa.int32()),
        "environment_score": column(lambda r: r.generated.score, pa.float64()),
        "experts": column(lambda r: r.generated.experts or None, pa.large_binary()),
    }
    return pa.table(columns)


def to_stream(table: pa.Table) -> pa.Buffer:
    """Return the table as an Arrow stream. Ray sends a small one 20 times as fast as a table."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def from_stream(stream: pa.Buffer) -> pa.Table:
    """Return the table of an Arrow stream. The table's memory is that of the stream."""
    return pa.ipc.open_stream(stream).read_all()


def generated_columns(generated: Sequence[Generated]) -> dict[str, pa.Array]:
    """Return the columns of responses, or of parts of them, that the tables of rollouts and of open
    turns share."""

    def column(value: Callable[[Generated], Any], kind: pa.DataType) -> pa.Array:
        return pa.array(map(value, generated), kind, size=len(generated))

    return {
        "response_token_ids": _lists([g.token_ids for g in generated], np.int32),
        "inference_logprobs": _lists([g.inference_logprobs for g in generated], np.float32),
        "version_spans": column(lambda g: list(map(asdict, g.spans)), SPANS),
        "turns": column(lambda g: list(map(asdict, g.turns)), TURNS),
        **{name: column(attrgetter(name), pa.int32()) for name in COUNTS},
    }


def _check(rollout: Rollout) -> None:
    generated, name = rollout.generated, rollout.request.id
    num_sampled = generated.num_sampled
    assert len(generated.inference_logprobs) == num_sampled, f"{name}: not one logprob per token"
    assert generated.spans, f"{name}: no policy version recorded"
    assert sum(span.num_tokens for span in generated.spans) == num_sampled, f"{name}: bad spans"
    if generated.turns:
        _check_turns(generated, str(name))
    scores = (generated.score, *(turn.score for turn in generated.turns))
    assert all(score is None or math.isfinite(score) for score in scores), f"{name}: bad score"


def _check_turns(generated: Generated, name: str) -> None:
    """Check that the turns cover all tokens, and that each but the last has an answer."""
    turns = generated.turns
    num_tokens = sum(turn.num_tokens for turn in turns)
    assert num_tokens == len(generated.token_ids), f"{name}: its turns do not cover its tokens"
    assert all(turn.num_sampled > 0 for turn in turns), f"{name}: a turn without a sampled token"
    assert all(turn.num_observed is not None for turn in turns[:-1]), f"{name}: a turn went on"
    assert all((turn.num_observed or 0) >= 0 for turn in turns), f"{name}: bad turns"


def _drafter(rollout: Rollout) -> str:
    setting = rollout.request.drafting
    return setting.drafter if setting else HISTORY


def _entropy(logprobs: Sequence[float]) -> float | None:
    """Estimate the policy's entropy at the rollout's temperature, without bias: the mean negative
    log-probability of the sampled tokens, in nats per token."""
    return -float(np.mean(logprobs, dtype=np.float64)) if len(logprobs) else None


def _versions(rollout: Rollout) -> list[int]:
    return [span.policy_version for span in rollout.generated.spans]


def _lists(rows: Sequence[Sequence[float]], dtype: type[np.number]) -> pa.ListArray:
    """Convert ragged rows through one flat buffer, ten times faster than Arrow's conversion."""
    parts = [np.asarray(row, dtype) for row in rows]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    flat = np.concatenate([np.empty(0, dtype), *parts])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
