"""A step's drafter is chosen by the draft ladder and by the acceptance of earlier steps."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from refrain.engines.control.techniques import StepInputs, plan_policies
from refrain.engines.specactor.best_of_n import BestOfN
from refrain.engines.specactor.health import DrafterHealth
from refrain.engines.specactor.ladder import Ladder
from refrain.engines.specactor.reconfigure import Reconfiguration
from refrain.schemas.config import TrainConfig
from refrain.schemas.drafting import DraftingConfig
from refrain.schemas.rollout import DraftSetting, Split
from refrain.schemas.step import PromptGroup, StepPlan
from refrain.tasks.run.model_inputs import check_beside
from refrain.tasks.run.policies import (
    choose_drafting,
    choose_trials,
    known_acceptances,
    settings_of,
)
from refrain.tasks.run.preflight import Inputs, _ladder
from tests.conftest import DEMO
from tests.flows.commands import altered_model
from tests.specactor.latencies import AffineLatency

LADDER = Ladder(AffineLatency(10e-3, 1e-4, 5e-5), 1, ("ngram", "small"), 300.0, 8, {"small": 2})
MODEL = {"name": "small", "path": str(DEMO / "drafter")}


def config(**specactor) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(DEMO / "model"), "dtype": "float32"},
            "data": {"train": [str(DEMO / "data" / "train.parquet")], "max_response_tokens": 256},
            "rollout": {"num_engines": 2},
            "specactor": {"draft_models": [MODEL]} | specactor,
        }
    )


@dataclass
class StandIn:
    """The parts of a run that the code under test reads."""

    config: TrainConfig
    inputs: Inputs
    health: DrafterHealth = field(default_factory=DrafterHealth)

    async def drafter_health(self, _: int) -> DrafterHealth:
        return self.health

    def saw(self, version: int, drafter: str, p: float) -> None:
        self.health.add(version, drafter, round(10_000 * p), 10_000 - round(10_000 * p))


def run_of(ladder: Ladder | None = None, **specactor) -> StandIn:
    return StandIn(config(**specactor), Inputs({}, {}, None, None, ladder=ladder))


def drafting_of(run: StandIn) -> DraftSetting | None:
    return choose_drafting(run, run.health, 64)


def trials_of(run: StandIn, step: int) -> dict[str, int]:
    return choose_trials(run, run.health, step, 100)


def plan(drafting: DraftSetting | None = None, trials: dict[str, int] | None = None) -> StepPlan:
    return StepPlan(
        split=Split.TRAIN,
        step=4,
        epoch=0,
        policy_version=3,
        created_s=0.0,
        group_size=4,
        groups=(PromptGroup(prompt_key="a", engine=0, expected_tokens=None),),
        drafting=drafting,
        trials=trials or {},
    )


def test_without_ladder_the_configured_drafter_is_used():
    assert drafting_of(run_of()) is None
    assert drafting_of(run_of(drafter="small")) == DraftSetting("small", 4, coupled=False)
    narrow = run_of(drafter="small", window=3)
    assert drafting_of(narrow) == DraftSetting("small", 3, coupled=False)
    assert drafting_of(run_of(drafter="ngram")) == DraftSetting("ngram", 4, coupled=True)


def test_with_a_ladder_it_is_the_best_of_the_last_steps():
    run = run_of(LADDER)
    assert drafting_of(run) is None, "drafts before any acceptance is known"
    run.saw(0, "small", 0.85)
    chosen = drafting_of(run)
    assert chosen is not None
    window = LADDER.best("small", 0.85, 32).window
    assert chosen == DraftSetting("small", window, coupled=False), "64 requests on two engines"
    run.saw(1, "small", 0.1)
    assert drafting_of(run) is None, "drafts after the acceptance has collapsed"
    run.saw(1, "ngram", 0.9)
    assert drafting_of(run).drafter == "ngram"


def test_the_ladder_knows_how_the_run_drafts():
    """Three engines share two processes of the model. N-grams and history draft in turn."""
    run = config(draft_models=[MODEL | {"num_engines": 2}]).model_copy(
        update={"rollout": config().rollout.model_copy(update={"num_engines": 3})}
    )
    ladder = _ladder(run, SimpleNamespace(drafters=("ngram", "small")))
    assert ladder.ahead == {"small": 2}
    assert ladder.max_drafted == run.rollout.max_num_seqs
    in_turn = {drafter for drafter in ladder.drafters if ladder.setting(drafter, 4).coupled}
    assert in_turn == {"histospec", "ngram"}


def test_the_history_is_on_the_ladder_and_drafts_in_its_own_way():
    costs = {"histospec": (0.0, 1e-6), "small": (1e-3, 1e-6)}
    latency = AffineLatency(10e-3, 1e-4, 5e-5, costs)
    run = run_of(Ladder(latency, 1, ("histospec", "small"), 300.0, 8, {"small": 2}))
    run.saw(0, "small", 0.5)
    assert drafting_of(run).drafter == "small"
    run.saw(1, "histospec", 0.8)
    assert drafting_of(run) is None


def test_unused_drafters_are_tried_now_and_then():
    run = run_of(LADDER)
    run.saw(0, "small", 0.85)
    assert trials_of(run, 4) == {"ngram": 2}
    assert trials_of(run, 5) == {}
    assert trials_of(run_of(), 4) == {}
    small, ngram = DraftSetting("small", 4, coupled=False), DraftSetting("ngram", 4)
    assert settings_of(run, plan(small, {"ngram": 1})) == [ngram, small, small, small]


def test_speculation_policies_need_draft_models():
    def policies(run: StandIn) -> list[type]:
        inputs = StepInputs(plan=plan(), ladder=run.inputs.ladder)
        return [type(policy) for policy in plan_policies(run.config, inputs)]

    assert policies(run_of(LADDER, draft_models=[])) == []
    assert policies(run_of()) == [BestOfN]
    assert policies(run_of(LADDER)) == [Reconfiguration, BestOfN]
    assert policies(run_of(LADDER, race=False)) == [Reconfiguration]


def test_a_freed_engine_races_with_what_is_expected_to_be_the_fastest():
    """The ladder sets the windows. History takes part. An n-gram comes first if it is the best."""

    def raced(run: StandIn, **acceptances: float) -> list[DraftSetting]:
        inputs = StepInputs(plan=plan(), ladder=run.inputs.ladder, acceptances=acceptances)
        (races,) = (p for p in plan_policies(run.config, inputs) if isinstance(p, BestOfN))
        return list(races._settings.values())

    unknown = raced(run_of())
    assert [setting.drafter for setting in unknown] == ["histospec", "small", "ngram"]
    assert unknown[1] == DraftSetting("small", 4, coupled=False)
    known = raced(run_of(LADDER), small=0.85, ngram=0.1)
    assert [setting.drafter for setting in known] == ["small", "ngram", "histospec"]
    assert known[0] == LADDER.best_setting("small", 0.85, 8)
    assert known[0].window != 4
    assert raced(run_of(LADDER), small=0.3, ngram=0.9)[0].drafter == "ngram"


async def test_known_acceptances_are_of_the_last_steps():
    run = run_of(LADDER)
    assert await known_acceptances(run, plan(), 4) == {}
    run.saw(0, "small", 0.85)
    assert await known_acceptances(run, plan(), 4) == {"small": pytest.approx(0.85, abs=0.01)}
    assert await known_acceptances(run_of(), plan(), 4) == {}


def test_a_drafter_of_another_vocabulary_or_context_is_refused(tmp_path):
    padded = altered_model(tmp_path / "padded", vocab_size=99)
    run = config(draft_models=[MODEL | {"path": str(padded)}])
    paths = [model.path for model in run.specactor.draft_models]
    check_beside(paths, run.model, "specactor", 384, "it")
    tokenizer = padded / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"7"', '"seven"'))
    with pytest.raises(ValueError, match=r"is 'seven' in .* and '7' in"):
        check_beside(paths, run.model, "specactor", 384, "it")
    paths = [model.path for model in config().specactor.draft_models]
    with pytest.raises(ValueError, match="has a context of 1024 tokens, but it is 2048"):
        check_beside(paths, run.model, "specactor", 2048, "it")


@pytest.mark.parametrize(
    ("specactor", "message"),
    [
        ({"drafter": "large"}, "there is no 'large'; it is one of histospec, ngram, small"),
        ({"draft_models": [MODEL, MODEL]}, "each needs a name of its own"),
        ({"draft_models": [MODEL | {"name": "ngram"}]}, "other than histospec, head, ngram"),
    ],
)
def test_names_that_mean_nothing_are_refused(specactor, message):
    with pytest.raises(ValueError, match=message):
        config(**specactor)


def test_a_head_drafts_beside_history():
    run = run_of(draft_models=[], head="/head")
    assert drafting_of(run) == DraftSetting("head", 4)
    assert drafting_of(run_of(draft_models=[], head="/head", drafter="ngram")).drafter == "ngram"
    assert run.config.engine.model_copy(
        update={"drafting": DraftingConfig(enabled=False)}
    ).speculates


def test_a_head_works_with_any_tp_degree_but_in_one_layout():
    given = config(draft_models=[], head="/head").model_dump(mode="json", exclude_defaults=True)
    wide = TrainConfig.model_validate(given | {"rollout": {"tp_degree": 2}})
    assert wide.tp_degrees == (2,)
    with pytest.raises(ValueError, match="head drafts in one layout of the engines"):
        TrainConfig.model_validate(given | {"pat": {"tp_degrees": [2]}})
