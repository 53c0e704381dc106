"""Example states for the controller: engines with requests, pools and drafters."""

import math
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st

from refrain.engines.control.controller import Controller
from refrain.engines.control.outlook import Outlook
from refrain.engines.control.reshaping import Reshaping
from refrain.engines.control.state import Forecaster
from refrain.engines.pat.costs import SwitchCosts
from refrain.engines.pat.remaining import Maximum
from refrain.engines.rollout.moves import EngineView, RolloutView
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import DraftProgress, DraftSetting, RequestId, Split

MAX_TOKENS = 8000
SMALL, LARGE = DraftSetting("small", 4), DraftSetting("large", 4)
POOLS = {
    0: Pool(0, {2: (0, 1, 2, 3), 4: (8, 9), 8: (10,)}),
    1: Pool(1, {2: (4, 5, 6, 7), 4: (11, 12), 8: (13,)}),
}
EXPECTED = {"small": 0.6, "large": 0.8}


@dataclass(frozen=True)
class Machine:
    """Divides the work by the TP degree and adds a cost per GPU, so that TP pays in small
    batches."""

    step_s: float = 4e-3
    weights_s: float = 20e-3
    each_s: float = 0.2e-3
    hop_s: float = 0.1e-3

    def decode_s(self, tp_degree, batch, context_tokens):
        return self.verify_s(tp_degree, batch, context_tokens, 0)

    def verify_s(self, tp_degree, batch, context_tokens, window):
        work_s = self.weights_s + 1e-7 * context_tokens + self.each_s * batch * (window + 1)
        return self.step_s + work_s / tp_degree + self.hop_s * tp_degree * (1 + batch / 16)

    def prefill_s(self, tp_degree, batch, rms_tokens):
        return 0.01 + 1e-4 * batch * rms_tokens / tp_degree

    def draft_s(self, drafter, batch, window):
        del batch
        return window * (1e-3 if drafter == "small" else 3e-3)


MACHINE = Machine()


def request(index: int) -> RequestId:
    return RequestId(Split.TRAIN, 1, f"p{index}", 0)


def view_of(tokens: dict[int, dict[int, int]], tp_degrees=None, drafting=None, elapsed_s=0.0):
    """Return a view. `tokens`: by engine and request. `drafting`: by engine, for all its
    requests."""
    tp_degrees, drafting = tp_degrees or {}, drafting or {}
    engines = tuple(
        EngineView(
            engine,
            {request(i): num for i, num in of.items()},
            {request(i): drafting[engine] for i in of} if engine in drafting else {},
            tp_degrees.get(engine, 2),
        )
        for engine, of in tokens.items()
    )
    return RolloutView(elapsed_s, engines, 0, 100)


def told(setting: DraftSetting, acceptance: float) -> DraftProgress:
    num_accepted = round(1000 * acceptance)
    return DraftProgress(setting, 1500, num_accepted, 1000 - num_accepted)


def outlook(**changes) -> Outlook:
    given = {"expected_acceptance": EXPECTED, **changes}
    return Outlook(Forecaster(MACHINE), Maximum(MAX_TOKENS), defaultdict(lambda: 100), **given)


def costs(wake_s=1.0) -> SwitchCosts:
    return SwitchCosts(MACHINE, 1e5, 8, 1e9, wake_s)


def controller_of(idles=True, margin=0.0, wake_s=1.0, pools=POOLS, **changes) -> Controller:
    reshaping = Reshaping(costs(wake_s), pools, idles)
    given = {"margin": margin, "max_requests": math.inf, **changes}
    return Controller(reshaping, outlook(), **given)


some_tokens = st.lists(
    st.dictionaries(st.integers(0, 40), st.integers(1, MAX_TOKENS - 50), max_size=6),
    min_size=8,
    max_size=8,
).map(lambda engines: _each_once(engines))


def _each_once(engines):
    """Number the requests so that each is on one engine only."""
    return {
        index: {100 * index + i: tokens for i, tokens in of.items()}
        for index, of in enumerate(engines)
    }
