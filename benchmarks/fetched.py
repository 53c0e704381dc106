"""Finished rollouts of real engines with their tokens, to compare them."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.rollout import FinishedRollout, FinishReason, Generated, RequestId, VersionSpan


@dataclass(frozen=True, slots=True)
class FetchedRollout:
    """One finished sample, as its engine told and stored it."""

    id: RequestId
    engine: int
    prompt_token_ids: tuple[int, ...]
    generated: Generated
    drafter: str
    finish_reason: FinishReason
    num_cached_tokens: int
    started_s: float
    finished_s: float


async def fetch(finished: Sequence[FinishedRollout]) -> list[FetchedRollout]:
    """The same rollouts in the same order."""
    tables = {id(rollout.rows): rollout.rows for rollout in finished}
    rows = {key: (await reference).to_pylist() for key, reference in tables.items()}
    return [_fetched(rollout, rows[id(rollout.rows)][rollout.row]) for rollout in finished]


def _fetched(rollout: FinishedRollout, row: dict) -> FetchedRollout:
    generated = Generated(
        token_ids=row["response_token_ids"],
        inference_logprobs=row["inference_logprobs"],
        spans=tuple(VersionSpan(**span) for span in row["version_spans"]),
        num_draft_tokens=row["num_draft_tokens"],
        num_accepted_tokens=row["num_accepted_tokens"],
        num_verifications=row["num_verifications"],
    )
    assert len(generated.token_ids) == rollout.num_tokens
    return FetchedRollout(
        id=rollout.id,
        engine=rollout.engine,
        prompt_token_ids=tuple(row["prompt_token_ids"]),
        generated=generated,
        drafter=row["drafter"],
        finish_reason=rollout.finish_reason,
        num_cached_tokens=rollout.num_cached_tokens,
        started_s=row["started_s"],
        finished_s=row["finished_s"],
    )
