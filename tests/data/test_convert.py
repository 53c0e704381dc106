"""`refrain data` converts public data sets and users' files into veRL's rows."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from refrain.engines.answers.builtin import builtin_scorer
from refrain.engines.data.convert import PUBLIC, Columns, convert_rows, take_over
from refrain.engines.data.dataset import read_rows
from refrain.engines.data.hub import is_hub_name, with_local_model
from refrain.flows.cli import main
from refrain.schemas.config import DataConfig, TrainConfig

GSM8K = [
    {"question": "48 clips, then half as many?", "answer": "<<48/2=24>>24 more.\n#### 72"},
    {"question": "What is left of $12,500?", "answer": "all\n#### 12,500"},
]
MATH = [{"problem": "Half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1"}]


def convert(name, rows):
    return convert_rows(rows, PUBLIC[name].convert, "train").rows


def test_rows_of_gsm8k_are_as_verl_has_them():
    first, second = convert("gsm8k", GSM8K)
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert first == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"48 clips, then half as many? {instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0},
    }
    assert second["reward_model"]["ground_truth"] == "12500"


@pytest.mark.parametrize(
    ("name", "rows", "response"),
    [
        ("gsm8k", GSM8K, "so\n#### 72"),
        ("math", MATH, r"\boxed{0.5}"),
        ("aime", [{"problem": "?", "answer": 204}], r"\boxed{204}"),
    ],
)
def test_their_right_answers_are_scored_as_right(name, rows, response):
    row = convert(name, rows)[0]
    scorer = builtin_scorer(row["data_source"])
    assert scorer(response, row["reward_model"]["ground_truth"])["score"] == 1.0
    assert scorer(r"#### 1 \boxed{1}", row["reward_model"]["ground_truth"])["score"] == 0.0


def test_a_prompt_comes_once():
    converted = convert_rows([*GSM8K, GSM8K[0]], PUBLIC["gsm8k"].convert, "train")
    assert (len(converted.rows), converted.num_repeated) == (2, 1)


def test_rows_of_one_prompt_with_other_extra_info_are_all_taken_over():
    row = convert("gsm8k", GSM8K)[0]
    rows = [row | {"extra_info": {"target": target}} for target in (1, 2, 1)] + [row]
    converted = convert_rows(rows, take_over, "train")
    assert (len(converted.rows), converted.num_repeated) == (3, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": "no mark"}, r"row 2: `answer` holds no answer: 'no mark'"),
        ({"question": "?"}, "no column `answer`: the row has question"),
        ({"question": "", "answer": "#### 1"}, "`question` is '': make it a text"),
    ],
)
def test_a_bad_row_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        convert("gsm8k", [GSM8K[0], row])


def test_verls_own_rows_are_taken_over():
    row = convert("gsm8k", GSM8K)[0]
    assert take_over(row | {"level": 3}, "train", 7) == row
    with pytest.raises(ValueError, match="no `data_source`, no `prompt`, no `reward_model`"):
        take_over({"question": "?"}, "train", 0)


def run(*args):
    return CliRunner().invoke(main, ["data", *map(str, args)])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_raw_files_become_files_to_train_on(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", GSM8K)
    test = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist(GSM8K[:1]), test)
    done = run("gsm8k", "--from", train, "--from", test, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "train.parquet: 2 prompts" in done.output
    assert "refrain train CONFIG" in done.output
    assert list(read_rows(tmp_path / "out" / "train.parquet")) == [
        {name: row[name] for name in row if name != "ability"} for row in convert("gsm8k", GSM8K)
    ]
    assert len(list(read_rows(tmp_path / "out" / "test.parquet"))) == 1
    again = run("gsm8k", "--from", train, "--out", tmp_path / "out")
    assert (again.exit_code, "--overwrite" in again.output) == (2, True)
    assert run("gsm8k", "--from", train, "--out", tmp_path / "out", "--overwrite").exit_code == 0


def test_files_of_ones_own_name_their_columns(tmp_path):
    own = [{"task": "1 + 1?", "result": "#### 2"}]
    file = write_jsonl(tmp_path / "mine.jsonl", own)
    named = ("--question", "task", "--answer", "result")
    bare = run(file, "--out", tmp_path / "out")
    assert "row 1: no `data_source`" in bare.output
    assert "all of --prompt" in run(file, *named, "--out", tmp_path / "out").output
    done = run(file, *named, "--data-source", "openai/gsm8k", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (row,) = read_rows(tmp_path / "out" / "mine.parquet")
    assert row["reward_model"]["ground_truth"] == "2"


def test_unknown_data_sets_and_files_are_refused(tmp_path):
    assert "is neither a file nor one of gsm8k, math" in run("gsm9k").output
    missing = run("gsm8k", "--from", tmp_path / "none.jsonl", "--out", tmp_path)
    assert "none.jsonl does not exist" in missing.output


def test_columns_may_hold_numbers():
    columns = Columns("q", "a", "math_dapo", "")
    assert columns.convert({"q": "?", "a": 3}, "train", 0)["reward_model"]["ground_truth"] == "3"


def test_names_on_the_hub_are_told_from_paths():
    assert all(map(is_hub_name, ("Qwen/Qwen3-1.7B", "a/b")))
    assert not any(map(is_hub_name, ("./a", "/a/b", "a/b/c", "a", "../a", "~/a", "a/")))


def hub_config(path="Qwen/Qwen3-1.7B"):
    return TrainConfig.model_validate({"model": {"path": path}, "data": {"train": "t.jsonl"}})


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("empty_cache")
def test_errors_distinguish_offline_from_unreachable(monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        ValueError, match=r"the Hub cannot be reached for the model Qwen/Qwen3-1\.7B"
    ):
        with_local_model(hub_config())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        with_local_model(hub_config())


def test_a_model_in_the_cache_needs_no_network(empty_cache, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = empty_cache / "models--Qwen--Qwen3-1.7B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert with_local_model(hub_config()).model.path == snapshot


def test_a_directory_is_no_name(tmp_path):
    assert with_local_model(hub_config(tmp_path)) == hub_config(tmp_path)


def test_single_file_need_not_be_a_list():
    assert (
        DataConfig.model_validate({"train": "mine.jsonl"}).train
        == DataConfig(train=("mine.jsonl",)).train
    )


SOLVED = [
    {"problem": f"{n} + 1?", "solution": f"so \\boxed{{{n + 1}}}", "level": n} for n in range(5)
]


@pytest.fixture
def local_set(tmp_path, monkeypatch):
    """Return a data set in a directory. `datasets` reads it like one from the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "owner" / "sums"
    directory.mkdir(parents=True)
    for split, rows in (("train", SOLVED), ("test", SOLVED[:2])):
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{split}-00000-of-00001.parquet")
    return directory


def test_any_set_of_the_hub_is_converted_by_its_columns(tmp_path, local_set):
    columns = ("--prompt", "problem", "--answer", "solution", "--out", tmp_path / "out")
    done = run(
        local_set, *columns, "--split", "train[:3]", "--split", "test", "--instruction", "Box it."
    )
    assert done.exit_code == 0, done.output
    assert "no built-in scorer for sums: score with reward.type: function" in done.output
    rows = list(read_rows(tmp_path / "out" / "train-3.parquet"))
    assert [row["prompt"][0]["content"] for row in rows] == [f"{n} + 1? Box it." for n in range(3)]
    assert rows[1]["reward_model"]["ground_truth"] == "2"
    assert len(list(read_rows(tmp_path / "out" / "test.parquet"))) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--prompt", "question", "--answer", "solution"),
            "no column `question`: the row has problem, solution, level",
        ),
        (
            (),
            "name the columns to convert with --prompt and --answer; the row has problem, solution",
        ),
        (("--prompt", "problem"), "give all of --prompt and --answer"),
        (("--split", "validation"), 'Unknown split "validation". Should be one of'),
        (("--subset", "hard"), "choose with --subset and --split"),
    ],
)
def test_errors_of_a_set_name_what_exists(tmp_path, local_set, args, message):
    done = run(local_set, *args, "--out", tmp_path / "out")
    assert (done.exit_code, message in done.output) == (2, True), done.output
    assert not (tmp_path / "out").exists()


def test_prompts_may_be_messages():
    columns = Columns("chat", "a", "mine", "Be brief.")
    chat = [{"role": "system", "content": "Sums."}, {"role": "user", "content": "1 + 1?"}]
    row = columns.convert({"chat": chat, "a": "2"}, "train", 0)
    assert row["prompt"] == [chat[0], {"role": "user", "content": "1 + 1? Be brief."}]
    ended = [*chat, {"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="`chat` ends with a message of the assistant"):
        columns.convert({"chat": ended, "a": "2"}, "train", 0)
