"""Summary of a run, from what its store holds. Pure."""

from collections.abc import Sequence

from schemas.step import RunSummary, StepReport


def summarise(
    steps: Sequence[StepReport],
    *,
    num_rollouts: int,
    num_tokens: int,
    epoch_drafting: Sequence[tuple[float | None, float]],
    epoch_rewards: Sequence[float],
    validation_rewards: Sequence[float],
    wall_s: float,
) -> RunSummary:
    """`num_rollouts` and `num_tokens` are of the training rollouts of `steps`; the rewards are
    means by epoch and by validation, in order; drafting by epoch is (acceptance rate, speculation
    rate)."""
    timing_s = _add_up([report.timing_s for report in steps])
    generation_s = timing_s.get("rollout", 0.0)
    return RunSummary(
        steps=len(steps),
        num_rollouts=num_rollouts,
        reward_first=epoch_rewards[0],
        reward_last=epoch_rewards[-1],
        acceptance_rate_by_epoch=tuple(acceptance for acceptance, _ in epoch_drafting),
        speculation_rate_by_epoch=tuple(speculation for _, speculation in epoch_drafting),
        validation_first=validation_rewards[0] if validation_rewards else None,
        validation_last=validation_rewards[-1] if validation_rewards else None,
        tokens_per_second=num_tokens / generation_s if generation_s else 0.0,
        wall_s=wall_s,
        timing_s=timing_s,
    )


def _add_up(timings: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for timing in timings:
        for phase, seconds in timing.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total
