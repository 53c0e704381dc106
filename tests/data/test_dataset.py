"""Data sets: what is read, and what a person is told when a file is wrong."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engines.data.dataset import load_dataset, load_tokenizer
from schemas.keys import prompt_key

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "user": 1, "assistant": 2, "hello": 3, "world": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.chat_template = TEMPLATE
    return fast


def make_row(text="hello", **changes):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 0, "split": "train"},
    }
    return {name: value for name, value in (row | changes).items() if value is not ...}


def write(path, rows):
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case _:
            path.write_text(json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_each_format_gives_the_same_prompts(tmp_path, tokenizer, suffix):
    rows = [make_row("hello", more=[1]), make_row("hello world", more=[2])]
    dataset = load_dataset([write(tmp_path / f"train{suffix}", rows)], tokenizer, 10)
    assert [prompt.token_ids for prompt in dataset.prompts] == [(1, 3, 2), (1, 3, 4, 2)]
    first = dataset.prompts[0]
    assert first.key == prompt_key((1, 3, 2))
    assert (first.data_source, first.ground_truth) == ("openai/gsm8k", "72")
    assert first.extra_info == {"index": 0, "split": "train"}
    assert dataset.data_sources == {"openai/gsm8k"}
    assert dataset.by_key[first.key] is first


def test_a_json_file_may_hold_lines(tmp_path, tokenizer):
    path = tmp_path / "train.json"
    path.write_text("\n".join(json.dumps(make_row(text)) for text in ("hello", "world")) + "\n\n")
    assert len(load_dataset([path], tokenizer, 10).prompts) == 2


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("ground_truth", ["72", ["72", "73"], '{"inputs": ["1"]}', ""])
def test_the_ground_truth_is_left_alone(tmp_path, tokenizer, suffix, ground_truth):
    row = make_row(reward_model={"style": "rule", "ground_truth": ground_truth})
    dataset = load_dataset([write(tmp_path / f"t{suffix}", [row])], tokenizer, 10)
    assert dataset.prompts[0].ground_truth == ground_truth


def test_repeated_prompts_are_dropped_and_counted_across_files(tmp_path, tokenizer):
    first = write(tmp_path / "a.jsonl", [make_row("hello"), make_row("world")])
    other = make_row("hello", reward_model={"ground_truth": "other"})
    second = write(tmp_path / "b.jsonl", [other, make_row("hello world")])
    dataset = load_dataset([first, second], tokenizer, 10)
    assert (len(dataset.prompts), dataset.num_duplicates) == (3, 1)
    assert dataset.prompts[0].ground_truth == "72", "the first one stays"


def test_extra_info_is_optional(tmp_path, tokenizer):
    path = write(tmp_path / "t.jsonl", [make_row(extra_info=...)])
    assert load_dataset([path], tokenizer, 10).prompts[0].extra_info == {}


BAD_ROWS = [
    ({"prompt": ...}, "no `prompt`: add a list"),
    ({"prompt": "What is 2 + 2?"}, "`prompt` is 'What is 2"),
    ({"prompt": []}, "list of messages such as"),
    ({"prompt": [{"role": "user"}]}, "list of messages such as"),
    ({"data_source": ...}, "no `data_source`"),
    ({"reward_model": ...}, "no `reward_model.ground_truth`"),
    ({"reward_model": {"style": "rule"}}, "no `reward_model.ground_truth`"),
    ({"extra_info": [1]}, "`extra_info` is a list"),
    ({"prompt": [{"role": "user", "content": "hello " * 20}]}, r"22 tokens, .*_tokens \(10\)"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, tokenizer, change, message):
    path = write(tmp_path / "t.jsonl", [make_row("world"), make_row(**change)])
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset([path], tokenizer, 10)
    assert f"{path} has bad rows" in str(caught.value)
    assert "row 2: " in str(caught.value)


def test_a_parquet_file_without_a_column_names_the_row(tmp_path, tokenizer):
    path = write(tmp_path / "t.parquet", [make_row(prompt=...)])
    with pytest.raises(ValueError, match="row 1: no `prompt`"):
        load_dataset([path], tokenizer, 10)


def test_up_to_five_bad_rows_are_shown_together(tmp_path, tokenizer):
    path = write(tmp_path / "t.jsonl", [make_row(prompt=...) for _ in range(8)])
    with pytest.raises(ValueError, match=r"row 5: .*\n.*not read") as caught:
        load_dataset([path], tokenizer, 10)
    assert "row 6" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path, tokenizer):
    def load(name, text=None):
        if text is not None:
            (tmp_path / name).write_text(text)
        return load_dataset([tmp_path / name], tokenizer, 10)

    with pytest.raises(ValueError, match=r"none.jsonl does not exist"):
        load("none.jsonl")
    with pytest.raises(ValueError, match=r"ends in '.csv': use .parquet"):
        load("rows.csv", "a,b")
    with pytest.raises(ValueError, match=r"bad.parquet is not a Parquet file"):
        load("bad.parquet", "not one")
    with pytest.raises(ValueError, match=r"bad.jsonl line 2 is not JSON"):
        load("bad.jsonl", json.dumps(make_row()) + "\n{")
    with pytest.raises(ValueError, match=r"list.json holds int where a row"):
        load("list.json", "[1]")
    for name, text in (("empty.jsonl", ""), ("empty.json", "[]")):
        with pytest.raises(ValueError, match=f"{name} has no rows"):
            load(name, text)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty.parquet has no rows"):
        load("empty.parquet")


def test_a_tokenizer_without_a_chat_template(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "with")
    assert load_tokenizer(tmp_path / "with").chat_template == TEMPLATE
    tokenizer.chat_template = None
    try:
        tokenizer.save_pretrained(tmp_path / "without")
        with pytest.raises(ValueError, match=r"without has no chat template.*chat_template.jinja"):
            load_tokenizer(tmp_path / "without")
    finally:
        tokenizer.chat_template = TEMPLATE
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_template_may_refuse_a_conversation(tmp_path, tokenizer):
    path = write(tmp_path / "t.jsonl", [make_row()])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(ValueError, match=r"row 1: the chat template refuses.*must alternate"):
            load_dataset([path], tokenizer, 10)
    finally:
        tokenizer.chat_template = TEMPLATE
