"""The scorer's Ray actor: it decodes and scores rows, and passes errors on as the user's scorer
raised them."""

import asyncio
import json
import os
from dataclasses import replace

import psutil
import pyarrow as pa
import pytest

from refrain.engines.reward import ScorerHangs, ScorerPool, pool
from refrain.engines.store.actor import StoredRows, count_rows
from refrain.engines.store.tables import SCORING
from refrain.schemas.config import DataConfig, ModelConfig, TrainConfig
from refrain.schemas.data import Prompt
from refrain.schemas.reward import BuiltinReward, FunctionReward

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "<eos>": 1, "####": 2, "4": 3, "5": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>"
    ).save_pretrained(path)
    return path


def make_config(tokenizer_path, **changes) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(path=tokenizer_path), data=DataConfig(train=("t.jsonl",)), **changes
    )


PROMPTS = {
    key: Prompt(key, (1,), "refrain/arithmetic", truth) for key, truth in (("a", "4"), ("b", "5"))
}
RIGHT = {"response_token_ids": [2, 3, 1], "turns": [], "finish_reason": "stop"}
TABLE = pa.Table.from_pylist(
    [
        {"prompt_key": "b", "sample_index": 0} | RIGHT,
        {"prompt_key": "a", "sample_index": 1} | RIGHT,
    ],
    SCORING,
)


def rows(table: pa.Table) -> StoredRows:
    return StoredRows(table, count_rows(table))


@pytest.mark.usefixtures("ray_cluster")
async def test_rows_are_decoded_and_scored(tokenizer_path):
    pool = ScorerPool(make_config(tokenizer_path))
    await pool.start()
    try:
        rewards = await pool.score(rows(TABLE), PROMPTS)
    finally:
        await pool.shutdown()
    assert rewards.to_pylist() == [
        {"prompt_key": "b", "sample_index": 0, "reward": 0.0, "extra": '{"pred": "4"}'},
        {"prompt_key": "a", "sample_index": 1, "reward": 1.0, "extra": '{"pred": "4"}'},
    ]


@pytest.mark.usefixtures("ray_cluster")
async def test_a_users_error_arrives_as_it_is(tokenizer_path, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if ground_truth == '5': time.sleep(60)\n"
        "    return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = FunctionReward(path="mine.py", timeout_s=0.5)
    pool = ScorerPool(make_config(tokenizer_path, reward=reward))
    await pool.start()
    try:
        assert (await pool.score(rows(TABLE.slice(1)), PROMPTS))["reward"].to_pylist() == [1.0]
        with pytest.raises(ValueError, match=r"sample 0 of prompt b .*no score within 0\.5 s"):
            await pool.score(rows(TABLE), PROMPTS)
    finally:
        await pool.shutdown()


def test_a_conversation_is_scored_on_what_was_sampled(tokenizer_path, tmp_path):
    """Without its turns, the observed 5 would be the answer."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float('5' in solution_str), 'text': solution_str, **extra_info}\n"
    )
    actor = pool.RewardActor(
        ModelConfig(path=tokenizer_path), FunctionReward(path=tmp_path / "mine.py")
    )
    turns = [
        {"num_sampled": 3, "num_observed": 2, "waited_s": 0.5, "score": 0.25, "num_calls": 1},
        {"num_sampled": 1, "num_observed": 0, "waited_s": 0.5, "num_failed_calls": 2},
        {"num_sampled": 2},
    ]
    named = {"prompt_key": "a", "sample_index": 0, "finish_reason": "stop"}
    named |= {"response_token_ids": [2, 3, 1, 4, 1, 3, 2, 3]}
    prompts = {"a": replace(PROMPTS["a"], extra_info={"split": "train"})}
    scored = [
        actor.score(pa.Table.from_pylist([named | {"turns": own}], SCORING), prompts).to_pylist()
        for own in (turns, [])
    ]
    (talk,), (single,) = scored
    assert (talk["reward"], single["reward"]) == (0.0, 1.0)
    assert json.loads(single["extra"]) == {"split": "train", "text": "#### 4 5 4 #### 4"}
    extra = json.loads(talk["extra"])
    assert (extra["split"], extra["text"]) == ("train", "#### 4\n4\n#### 4")
    plain = {"score": None, "num_calls": None, "num_failed_calls": None}
    assert extra["turns"] == [
        plain | {"sampled": "#### 4", "observed": "5", "score": 0.25, "num_calls": 1},
        plain | {"sampled": "4", "observed": "", "num_failed_calls": 2},
        plain | {"sampled": "#### 4", "observed": None},
    ]


def test_actor_reports_its_progress(tokenizer_path):
    actor = pool.RewardActor(ModelConfig(path=tokenizer_path), BuiltinReward())
    for num_done in (0, 4, 8):
        assert actor.num_done() == num_done, "a call decodes two responses and scores two"
        actor.score(TABLE, PROMPTS)


@pytest.mark.usefixtures("ray_cluster")
async def test_a_scorer_that_is_stopped_is_waited_for_no_longer(tokenizer_path, monkeypatch):
    monkeypatch.setattr(pool, "QUIET_S", 3.0)
    scorers = ScorerPool(make_config(tokenizer_path, reward=BuiltinReward(timeout_s=1.0)))
    await scorers.start()
    assert scorers._actor
    pid = await scorers._actor.call("__ray_call__", lambda _: os.getpid(), timeout_s=60)
    process = psutil.Process(pid)
    process.suspend()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(
                ScorerHangs, match=r"scorer stood still .* 4 s: none of 2 .*reward\.timeout_s = 1 s"
            ):
                await scorers.score(rows(TABLE), PROMPTS)
    finally:
        await scorers.shutdown()
        process.resume()


def test_a_users_file_has_the_time_to_be_imported():
    function = FunctionReward(path="mine.py", timeout_s=7.0)
    assert pool.longest_stall_s(function) == 7.0 + pool.IMPORT_TIMEOUT_S
    assert pool.longest_stall_s(BuiltinReward(timeout_s=7.0)) == 7.0 + pool.QUIET_S
