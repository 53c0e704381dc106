"""Estimates the seconds that each technique saved in one step's rollout. Pure.

    saved       = measured (predicted without it / predicted with all techniques - 1)
    uncertainty = |predicted with all techniques - measured|
                  and, for drafting, the standard error of passes without drafts

Both predictions replay the rollout with the same latency model (`rollout_replay`). Without a
technique:

    drafting    a pass brings one token and verifies nothing
    migration   requests stay on the engine where they began; deferred ones are still deferred
    racing      no copies; a request that a copy overtook runs at its engine's mean pace
    switching   GPUs stay in the layout in which the step began

Other moves happen at the same times. If the step was slower or faster than predicted, we assume the
same factor without the technique. The uncertainty is the model's error on this very step. Few
passes run without drafts in a later epoch, so drafting adds the error on these few passes. The
uncertainty does not tell how much the next step would differ.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import hypot, sqrt

from refrain.engines.accounting.rollout_replay import MOVED_BY, EngineCosts, Replays
from refrain.engines.accounting.step_requests import StepRequest, begin_s
from refrain.engines.latency.interface import Latency
from refrain.engines.latency.measured import MeasuredLatency
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.step import EngineShare
from refrain.schemas.timeline import MoveRecord, Saving, Savings, Technique

HOW_TO_KNOW = "give a latency model by profile=NAME (`refrain profile` makes one)"
MEASURED = "what the engines measured in this run"


def acted(requests: Iterable[StepRequest], moves: Iterable[MoveRecord]) -> list[Technique]:
    """Return the techniques that acted in the step."""
    kinds = {move.kind for move in moves}
    did = {technique: kind in kinds for technique, kind in MOVED_BY.items()}
    did[Technique.DRAFTING] = any(request.num_draft_tokens for request in requests)
    return [technique for technique in Technique if did[technique]]


def measured_s(requests: Sequence[StepRequest]) -> float:
    """Return the seconds from the first request's start to the last one's end."""
    return max(request.end_s for request in requests) - begin_s(requests)


def step_savings(
    requests: Sequence[StepRequest],
    moves: Sequence[MoveRecord],
    costs: Mapping[int, EngineCosts],
    source: str,
    max_num_seqs: int = 256,
) -> Savings | None:
    """Return the savings, or None if no technique acted.

    Args:
        moves: Moves of the step's requests, with `at_s` on the clock of their stays.
        costs: Costs of every engine that had a request.
        source: Where the costs come from, in words.
    """
    techniques = acted(requests, moves)
    if not techniques:
        return None
    rollout_s = measured_s(requests)
    replays = Replays(requests, moves, costs, max_num_seqs)
    predicted_s = replays.rollout_s()
    each = []
    for technique in techniques:
        without_s = replays.rollout_s(without=technique)
        error_s = abs(predicted_s - rollout_s)
        if technique is Technique.DRAFTING:
            error_s = hypot(error_s, without_s * max(cost.plain_error for cost in costs.values()))
        each.append(Saving(technique, rollout_s * (without_s / predicted_s - 1.0), error_s))
    return Savings(rollout_s, predicted_s, source, tuple(each))


def engine_costs(
    requests: Iterable[StepRequest],
    shares: Iterable[EngineShare],
    tp_degrees: Mapping[int, int],
    latency: Latency | None,
) -> dict[int, EngineCosts]:
    """Return the costs of every engine that had one of the requests.

    With a latency model, costs come from it. Without one, they come from the engine's own
    measurements, or from an engine of the same TP degree if it has measured too little. Raise
    ValueError if neither is known.
    """
    own = {share.engine: share for share in shares}
    measured = {
        tp_degrees.get(engine, 1): share.drafting
        for engine, share in own.items()
        if share.drafting.step_costs
    }
    prompts: dict[int, list[int]] = defaultdict(list)
    for request in requests:
        for stay in request.stays:
            prompts[stay.engine].append(request.prompt_tokens or 0)
    costs = {}
    for engine, lengths in prompts.items():
        tp_degree, share = tp_degrees.get(engine, 1), own.get(engine)
        counts = share.drafting if share else DraftingCounts()
        source = counts if counts.step_costs else measured.get(tp_degree)
        if latency:
            model, plain_error = latency, 0.0
        elif source:
            model, plain_error = MeasuredLatency(source.step_costs), source.plain_error
        else:
            raise ValueError(f"engine {engine} has not measured the time of its steps")
        rest_s = share.rest_s if share else None
        if rest_s is None:
            rms_tokens = sqrt(sum(n * n for n in lengths) / len(lengths))
            rest_s = latency.prefill_s(tp_degree, len(lengths), rms_tokens) if latency else 0.0
        draft_s = counts.draft_s / counts.num_steps if counts.num_steps else 0.0
        costs[engine] = EngineCosts(model, tp_degree, draft_s, rest_s, plain_error)
    return costs


def saving_words(savings: Savings) -> list[str]:
    """Return a sentence for each technique, or one that says why nothing is known."""
    if savings.unknown:
        return [savings.unknown]
    return [_words(saving, savings.measured_s) for saving in savings.each]


def saving_metrics(savings: Savings | None) -> dict[str, float]:
    """Return `saved_s/TECHNIQUE` and its uncertainty for each known saving."""
    metrics = {}
    for saving in savings.each if savings else ():
        metrics[f"saved_s/{saving.technique}"] = saving.saved_s
        metrics[f"saved_s/{saving.technique}_uncertainty"] = saving.uncertainty_s
    return metrics


def _words(saving: Saving, rollout_s: float) -> str:
    if not saving.clear:
        # Adding 0.0 turns -0.0 into 0.0.
        saved_s = round(saving.saved_s, 2) + 0.0
        return (
            f"{saving.technique}: not distinguishable from none ({saved_s:+.2f} ± "
            f"{saving.uncertainty_s:.2f} s)"
        )
    verb = "saved" if saving.saved_s >= 0 else "cost"
    return (
        f"{saving.technique}: {verb} {abs(saving.saved_s):.2f} ± {saving.uncertainty_s:.2f} s: the "
        f"rollout took {rollout_s:.2f} s, and {rollout_s + saving.saved_s:.2f} s are predicted "
        "without"
    )
