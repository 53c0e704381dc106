"""The scorer in its Ray actor: rows in, rows out, errors as the user should see them."""

import pyarrow as pa
import pytest

from engines.reward import ScorerPool
from engines.store.actor import StoredRows, count_rows
from schemas.config import DataConfig, ModelConfig, TrainConfig
from schemas.data import Prompt
from schemas.reward import FunctionReward

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
TABLE = pa.table(
    {
        "prompt_key": ["b", "a"],
        "sample_index": pa.array([0, 1], pa.int32()),
        "response_token_ids": pa.array([[2, 3, 1], [2, 3, 1]], pa.list_(pa.int32())),
    }
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
