"""Made-up views of rollouts."""

from refrain.engines.rollout.moves import EngineView, RolloutView
from refrain.schemas.rollout import DraftProgress, DraftSetting, RequestId, Split

SMALL = DraftSetting("small", 4)
LARGE = DraftSetting("large", 3)
NGRAM = DraftSetting("ngram", 6, coupled=False)


def request(index: int) -> RequestId:
    return RequestId(Split.TRAIN, 0, f"prompt-{index}", 0)


def drafted(acceptance: float | None, setting: DraftSetting | None = SMALL) -> DraftProgress:
    """Return progress with this acceptance. None: nothing is verified yet."""
    if acceptance is None:
        return DraftProgress(setting)
    num_accepted = round(1000 * acceptance)
    return DraftProgress(setting, 1500, num_accepted, 1000 - num_accepted)


def view_of(engines: dict[int, dict[int, DraftProgress | None]], num_tokens: int = 0):
    """Return a view from progress by engine and request. None: the engine has not reported how it
    drafts."""
    return RolloutView(
        0.0,
        tuple(
            EngineView(
                engine,
                {request(i): num_tokens for i in of},
                {request(i): told for i, told in of.items() if told is not None},
            )
            for engine, of in engines.items()
        ),
        num_finished=0,
        num_rollouts=100,
    )
