"""The page of a step, the link to its run in MLflow, and the table of moves."""

from refrain.engines.reports.markdown import record_link, step_page
from refrain.engines.reports.timeline import move_rows
from refrain.schemas.config import TrainConfig
from refrain.schemas.counts import DraftingCounts, MoveCounts
from refrain.schemas.rollout import DraftSetting, RequestId, Split
from refrain.schemas.step import (
    EngineShare,
    PromptGroup,
    RankingGroup,
    RolloutBatch,
    StepPlan,
    StepReport,
)
from refrain.schemas.timeline import MoveKind, MoveRecord, Saving, Savings, Technique, Timeline

CONFIG = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"train": ["d"]}})
PLAN = StepPlan(
    split=Split.TRAIN,
    step=7,
    epoch=1,
    policy_version=6,
    created_s=0.0,
    group_size=8,
    groups=(PromptGroup(prompt_key="p", engine=0, expected_tokens=50.0, expected_passes=20.0),) * 3,
)
BATCH = RolloutBatch(
    split=Split.TRAIN,
    step=7,
    policy_version=6,
    num_rollouts=24,
    num_tokens=1200,
    mean_response_tokens=50.0,
    max_response_tokens=99,
    clip_ratio=0.125,
    num_draft_tokens=1000,
    num_accepted_tokens=800,
    num_verifications=300,
    moves=MoveCounts(num_migrated=4, num_deferred=2),
    generation_s=2.0,
    bubble_share=0.5,
    sync_s=0.25,
    canary_error=1e-6,
    shares=(
        EngineShare(
            engine=0,
            num_rollouts=24,
            num_tokens=1200,
            busy_s=1.5,
            idle_s=0.5,
            drafting=DraftingCounts(draft_s=0.15),
        ),
    ),
)
REPORT = StepReport(
    step=7, epoch=1, reward_mean=0.6125, metrics={}, timing_s={"rollout": 2.0, "step": 3.5}
)


def page(plan=PLAN, batch=BATCH, config=CONFIG, savings=None):
    return step_page(config, plan, batch, REPORT, 32, "RECORD", savings)


def test_page_links_to_the_traces_of_its_step():
    for step, is_linked in ((7, True), (8, False)):
        trainer = CONFIG.trainer.model_copy(update={"trace_step": step})
        text = page(config=CONFIG.model_copy(update={"trainer": trainer}))
        assert (f"traces/step_{step}](file:///" in text) == is_linked


def test_page_shows_the_plan_and_its_result():
    text = page()
    for words in (
        "# Step 7 of 32, epoch 2 of 1",
        "Reward **0.613**. RECORD",
        "3 prompts x 8 samples, with policy version 6",
        "1 engines of TP 1",
        "drafts: from history (`histospec`)",
        "expected: 50 tokens a response in 20 passes, from 3 known prompts",
        "2 samples deferred from the previous step",
        "24 rollouts, 1,200 tokens, 600 tokens/s",
        "12.5% were cut",
        "idle for 25% of the rollout, 50% of the time",
        "| the whole step | 3.50 |",
    ):
        assert words in text
    assert "ranking group" not in text
    assert "HistoPipe" not in text


def test_page_shows_expected_ends_of_engines():
    ending = PLAN.model_copy(update={"expected_s": 11.04, "equal_s": 1234.5})
    expected = "engines are expected to end after 11.0 s"
    assert f"{expected}, with equal passes after 1,234.5 s" in page(plan=ending)
    equal = page(plan=ending.model_copy(update={"equal_s": 11.04}))
    assert expected in equal
    assert "with equal passes" not in equal
    assert "expected to end" not in page()


def test_page_shows_the_effect_of_each_technique():
    assert (
        "drafting: 800 of 1,200 forward passes saved (3.00 tokens a pass), 80% of drafts accepted; "
        "drafting took 10.0% of the engines' time"
    ) in page()
    group = RankingGroup(
        engines=(0, 1),
        num_prompts=3,
        representative_tokens=50.0,
        representative_passes=20.0,
        longest_tokens=99,
    )
    ranked = PLAN.model_copy(update={"ranking_groups": (group,)})
    assert "| 0 | 0, 1 | 3 | 50 | 20 | 99 |" in page(ranked)
    assert "HistoPipe: 4 requests migrated, 2 deferred to the next step" in page(ranked)
    setting = PLAN.model_copy(update={"drafting": DraftSetting("small", 4, coupled=False)})
    assert "drafts: by `small`, window 4, ahead" in page(setting)
    undrafted = BATCH.model_copy(update={"num_draft_tokens": 0, "num_accepted_tokens": 0})
    assert "nothing was drafted" in page(batch=undrafted)


def test_page_shows_the_savings_of_each_technique():
    assert "saved" not in page().split("## What each technique did")[1].split("\n", 2)[0]
    assert "## What each technique saved" not in page()
    each = (Saving(Technique.DRAFTING, 1.0, 0.25),)
    text = page(savings=Savings(2.0, 1.75, "profile=mine", each))
    assert "## What each technique saved\n\n- drafting: saved 1.00 ± 0.25 s" in text
    assert "Predicted without it by profile=mine" in text
    unknown = page(savings=Savings(2.0, unknown="not known; give profile=NAME"))
    assert "- not known; give profile=NAME" in unknown
    assert "Predicted" not in unknown


def test_page_links_to_mlflow_server_if_any():
    linked = record_link("http://127.0.0.1:5000/", "runs", "3", "abc")
    assert (
        "](http://127.0.0.1:5000/#/experiments/3/runs/abc?workflowType=machine_learning)" in linked
    )
    for page in (None, "sqlite:///mlflow.db"):
        said = record_link(page, "my-runs", "3", "abc")
        assert "refrain ui --runs-dir my-runs" in said
        assert "abc" in said


def test_moves_are_rows_in_order_of_time():
    def move(prompt, at_s, kind):
        return MoveRecord(RequestId(Split.TRAIN, 7, prompt, 0), 0, 1, kind, at_s, 33)

    moves = (move("b", 12.5, MoveKind.DEFERRED), move("a", 11.0, MoveKind.MIGRATED))
    rows = move_rows(Timeline(10.0, 20.0, (0, 1), (), moves))
    assert rows[0] == {
        "request": "train/7/a/0",
        "kind": "migrated",
        "from_engine": 0,
        "to_engine": 1,
        "at_s": 1.0,
        "num_tokens": 33,
    }
    assert [(row["kind"], row["at_s"]) for row in rows] == [("migrated", 1.0), ("deferred", 2.5)]


def test_page_shows_lost_engines():
    (share,) = BATCH.shares
    gone = share.model_copy(update={"engine": 3, "gone": True, "num_restarts": 1})
    text = page(batch=BATCH.model_copy(update={"shares": (share, gone)}))
    assert "**1 engine restarts**" in text
    assert "**gone with a node: engine 3**" in text
    assert "gone" not in page()
