"""Simulates a rollout stage in virtual time: a pool, its requests, and a policy that may reshape
it."""

import math
from dataclasses import dataclass, field

import numpy as np

from refrain.engines.control.controller import Controller
from refrain.engines.control.outlook import Outlook
from refrain.engines.control.reshaping import WAIT_SHARES, MissedSavings, Reshaping
from refrain.engines.control.state import Forecaster
from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.hardware import A40
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.pat.costs import SwitchCosts
from refrain.engines.pat.layouts import plan_pools
from refrain.engines.rollout.moves import EngineView, Reshape, RolloutView
from refrain.schemas.rollout import RequestId, Split

LLAMA = SHAPES["LLaMA3.1-8B"]
ON_A40 = AnalyticLatency(LLAMA, A40)
A40_LINK = 3.1e9
"""Bytes per second of one rank, fitted to the migration time in PAT's figure 12."""
(POOL,), _ = plan_pools(4, 2, (4, 8), 8)
PROMPT_TOKENS = 500


def request(index: int) -> RequestId:
    return RequestId(Split.TRAIN, 0, f"prompt-{index}", 0)


def costs_on_a40(latency=ON_A40, **fields) -> SwitchCosts:
    at = {
        "kv_bytes_per_token": LLAMA.kv_bytes_per_token,
        "num_kv_heads": LLAMA.num_kv_heads,
        "link_bytes_per_s": A40_LINK,
        "wake_s": 1.0,
    }
    return SwitchCosts(latency, **(at | fields))


@dataclass(frozen=True)
class Known:
    """Known response lengths, by the index of the request."""

    lengths: list[int]
    is_known = True

    def tokens(self, generated, scenario=0.0):
        del scenario
        return {
            id: max(1.0, self.lengths[int(id.prompt_key.split("-")[1])] - num)
            for id, num in generated.items()
        }


class PromptsOf(dict):
    """Prompt lengths, all equal."""

    def __missing__(self, key: str) -> int:
        return PROMPT_TOKENS


def switching(
    lengths=(),
    latency=ON_A40,
    costs=None,
    *,
    remaining=None,
    wait_shares=WAIT_SHARES,
    pools=None,
    opens=False,
    missed_savings=None,
    **known,
) -> Controller:
    """Return a controller that only switches, with known lengths by default. `known`: settings of
    drafting."""
    costs = costs or costs_on_a40(latency)
    outlook = Outlook(Forecaster(latency), remaining or Known(lengths), PromptsOf(), **known)
    reshaping = Reshaping(
        costs,
        {pool.index: pool for pool in pools or (POOL,)},
        wait_shares=wait_shares,
        missed_savings=MissedSavings() if missed_savings is None else missed_savings,
    )
    return Controller(reshaping, outlook, margin=0.0, max_requests=math.inf, opens=opens)


def current_s(controller: Controller, view: RolloutView) -> float:
    """Return the seconds until all requests are finished without a switch."""
    return controller.outlook.forecast(view).end_s


def switched_s(controller: Controller, view: RolloutView, tp_degree: int) -> float:
    """Return the seconds until all requests are finished with a switch now."""
    look = controller.reshaping.look(POOL, controller.outlook.forecast(view))
    return look.stays - max(look.gain(tp_degree, move_kv=kv) for kv in (True, False))


def view_of(tp_degree: int, batches: dict[int, dict[int, int]], elapsed_s=0.0, pool=POOL):
    """Return a view of the layout `tp_degree`. `batches`: response tokens so far, by place of the
    engine in the layout and by request."""
    return RolloutView(
        elapsed_s,
        tuple(
            EngineView(
                engine,
                {request(i): int(num) for i, num in batches.get(place, {}).items()},
                tp_degree=tp_degree,
            )
            for place, engine in enumerate(pool.engines[tp_degree])
        ),
        num_finished=0,
        num_rollouts=1000,
    )


@dataclass
class Played:
    seconds: float = 0.0
    switches: list[tuple[float, int]] = field(default_factory=list)
    """(time in seconds, new TP degree)"""


def dealt(ids: dict[int, float], num_engines: int) -> dict[int, dict[int, float]]:
    ranked = sorted(ids, key=lambda i: -ids[i])
    return {e: {i: ids[i] for i in ranked[e::num_engines]} for e in range(num_engines)}


def play(decide, lengths, latency=ON_A40, costs=None, tick_s=0.5, begin=POOL.base) -> Played:
    """Simulate a stage that begins at this TP degree. `decide(view)` returns moves, as policies
    do."""
    costs = costs or costs_on_a40(latency)
    tp, num_engines = begin, len(POOL.engines[begin])
    batches = dealt(dict.fromkeys(range(len(lengths)), 0.0), num_engines)
    played = Played()
    while any(batches.values()):
        for move in decide(view_of(tp, batches, played.seconds)):
            sources, tp_before, tp = batches, tp, move.tp_degree
            together = {i: num for batch in sources.values() for i, num in batch.items()}
            batches = dealt(together, len(POOL.engines[tp]))
            played.seconds += switch_s(costs, tp_before, tp, contexts(sources), contexts(batches))
            played.switches.append((played.seconds, tp))
        tick = min(tick_s, max(_seconds_left(latency, tp, b, lengths) for b in batches.values()))
        played.seconds += tick
        batches = {e: _decoded(latency, tp, batch, lengths, tick) for e, batch in batches.items()}
    return played


def switch_s(costs, from_tp, to_tp, sources, targets) -> float:
    """Return the seconds of a switch that takes the faster way."""
    if not any(targets):
        return costs.control_s
    moved_s = costs.move_s(from_tp, to_tp, sources, targets)
    both_s = {True: moved_s, False: costs.recompute_s(to_tp, targets)}
    return costs.control_s + min(both_s[way] for way in costs.ways)


def contexts(batches) -> list[list[float]]:
    return [[PROMPT_TOKENS + num for num in batch.values()] for batch in batches.values()]


def _step_s(latency, tp, batch) -> float:
    return latency.decode_s(tp, len(batch), sum(PROMPT_TOKENS + num for num in batch.values()))


def _seconds_left(latency, tp, batch, lengths) -> float:
    if not batch:
        return 0.0
    return _step_s(latency, tp, batch) * max(lengths[i] - num for i, num in batch.items())


def _decoded(latency, tp, batch, lengths, seconds):
    if not batch:
        return batch
    steps = seconds / _step_s(latency, tp, batch)
    after = {i: num + steps for i, num in batch.items()}
    return {i: num for i, num in after.items() if num < lengths[i] - 1e-6}


def switch_at(seconds: float, tp_degree: int):
    """Return a policy that switches once, at that time."""
    left = [Reshape(POOL.index, tp_degree)]
    return lambda view: [left.pop()] if left and view.elapsed_s >= seconds else []


def long_tailed(num_requests: int, seed: int, median=1500.0, spread=1.0) -> list[int]:
    random = np.random.default_rng(seed)
    lengths = median * np.exp(spread * random.standard_normal(num_requests))
    return np.clip(lengths, 10, 16_000).astype(int).tolist()
