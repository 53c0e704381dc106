"""Data sets: the prompts that are read, and the errors for files and rows that are wrong."""

import json
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refrain.engines.data.dataset import check_shared, load_dataset, load_tokenizer
from refrain.engines.data.messages import PromptSettings
from refrain.engines.reward import check_ground_truth
from refrain.schemas.keys import prompt_key, sample_key
from refrain.schemas.reward import BuiltinReward, FunctionReward

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


def texts(dataset):
    words = ("[UNK]", "user", "assistant", "hello", "world")
    return [" ".join(words[token] for token in prompt.token_ids) for prompt in dataset.prompts]


def test_long_prompts_are_left_out_where_that_is_asked_for(tmp_path, tokenizer):
    rows = [make_row("hello world hello"), make_row("hello"), make_row("world world world")]
    path = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(ValueError, match=r"row 1: .* 5 tokens, .*or set data\.overlong=drop"):
        load_dataset([path], tokenizer, 4)
    dataset = load_dataset([path], tokenizer, 4, settings=PromptSettings(drops_overlong=True))
    assert texts(dataset) == ["user hello assistant"]
    assert (dataset.num_overlong, dataset.num_duplicates) == (2, 0)
    with pytest.raises(ValueError, match=r"every prompt is longer than .* \(2\): raise it"):
        load_dataset([path], tokenizer, 2, settings=PromptSettings(drops_overlong=True))


def test_a_system_prompt_comes_before_rows_that_have_none(tmp_path, tokenizer):
    own = [{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}]
    path = write(tmp_path / "t.jsonl", [make_row("hello"), make_row(prompt=own)])
    dataset = load_dataset([path], tokenizer, 10, settings=PromptSettings("hello hello"))
    assert texts(dataset) == [
        "[UNK] hello hello user hello assistant",
        "[UNK] world user hello assistant",
    ]
    added = {"role": "system", "content": "hello hello"}
    assert [prompt.messages for prompt in dataset.prompts] == [[added, own[1]], own]


def test_arguments_reach_the_chat_template(tmp_path, tokenizer, monkeypatch):
    template = TEMPLATE + "{% if enable_thinking %} world{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    path = write(tmp_path / "t.jsonl", [make_row("hello")])
    for thinks, end in ((True, " world"), (False, "")):
        settings = PromptSettings(template_arguments={"enable_thinking": thinks})
        dataset = load_dataset([path], tokenizer, 10, settings=settings)
        assert texts(dataset) == [f"user hello assistant{end}"]


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
def test_ground_truth_is_not_changed(tmp_path, tokenizer, suffix, ground_truth):
    row = make_row(reward_model={"style": "rule", "ground_truth": ground_truth})
    dataset = load_dataset([write(tmp_path / f"t{suffix}", [row])], tokenizer, 10)
    assert dataset.prompts[0].ground_truth == ground_truth


def truth(text, ground_truth, **changes):
    return make_row(text, reward_model={"ground_truth": ground_truth}, **changes)


def test_ground_truths_of_a_json_file_are_as_they_are_written(tmp_path, tokenizer):
    """One column holds several types, and a text that could be taken for a date."""
    truths = ["1", ["a", "b"], 1, 2.5, "2024-01-01"]
    words = ("hello", "world", "hello hello", "hello world", "world world")
    rows = [
        make_row(text, reward_model={"ground_truth": truth})
        for text, truth in zip(words, truths, strict=True)
    ]
    for number, own in enumerate([rows, rows[4:]]):
        dataset = load_dataset([write(tmp_path / f"t{number}.jsonl", own)], tokenizer, 10)
        read = [prompt.ground_truth for prompt in dataset.prompts]
        assert list(map(repr, read)) == list(map(repr, truths[-len(own) :]))


def test_repeated_prompts_are_dropped_and_counted_across_files(tmp_path, tokenizer):
    first = write(tmp_path / "a.jsonl", [make_row("hello"), make_row("world")])
    again = make_row("hello", extra_info={"index": 7})
    second = write(tmp_path / "b.jsonl", [again, make_row("hello world")])
    dataset = load_dataset([first, second], tokenizer, 10)
    assert (len(dataset.prompts), dataset.num_duplicates) == (3, 1)
    assert dataset.prompts[0].extra_info["index"] == 0, "the first row must stay"
    assert [str(row) for row in dataset.rows] == [
        f"{first} row 1",
        f"{first} row 2",
        f"{second} row 2",
    ]


@pytest.mark.parametrize(
    ("later", "what"),
    [
        (truth("hello", "777"), "ground_truth '72' and '777'"),
        (truth("hello", ["72"]), r"ground_truth '72' and \['72'\]"),
        (make_row("hello", data_source="other"), "data_source 'openai/gsm8k' and 'other'"),
    ],
)
def test_repeated_prompts_that_contradict_each_other_are_refused(tmp_path, tokenizer, later, what):
    """Otherwise one of the two would silently score the responses of both."""
    first = write(tmp_path / "a.jsonl", [make_row("world"), make_row("hello")])
    second = write(tmp_path / "b.jsonl", [make_row("world"), later])
    with pytest.raises(ValueError, match=rf"a.jsonl row 2 and \S*b.jsonl row 2: {what}") as e:
        load_dataset([first, second], tokenizer, 10)
    assert "row 1" not in str(e.value)


def test_rows_with_other_extra_info_are_separate_samples(tmp_path, tokenizer):
    """If the second row were dropped as a repeat, no scorer would see its `extra_info`."""
    rows = [
        make_row("hello", extra_info={"index": 0, "target": 1}),
        make_row("world"),
        make_row("hello", extra_info={"index": 1, "target": 2}),
        truth("hello", "777", extra_info={"index": 2, "target": {"deep": [{"er": 3}]}}),
        make_row("hello", extra_info={"index": 3, "target": 2}),
    ]
    kinds = [("a.jsonl", rows), ("b.parquet", rows[:3])]
    read = {
        name: load_dataset([write(tmp_path / name, own)], tokenizer, 10).prompts
        for name, own in kinds
    }
    assert [one.extra_info.get("target") for one in read["a.jsonl"]] == [
        1,
        None,
        2,
        {"deep": [{"er": 3}]},
    ]
    assert read["a.jsonl"][3].ground_truth == "777"
    keys = [one.key for one in read["a.jsonl"]]
    assert len(set(keys)) == 4
    assert [one.key for one in read["b.parquet"]] == keys[:3], "a key must not depend on the file"
    # Keys must not change between releases. The first row's key depends on its tokens only.
    assert keys[:2] == [prompt_key((1, 3, 2)), prompt_key((1, 4, 2))]
    assert keys[2] == "2928da19a9b39e3a6f31c59c2a831af4"
    both = load_dataset([tmp_path / "b.parquet", tmp_path / "a.jsonl"], tokenizer, 10)
    assert [one.key for one in both.prompts] == keys
    assert both.num_duplicates == 4


def test_each_sample_of_a_prompt_has_noise_and_rewards_of_its_own(tmp_path, tokenizer):
    rows = [make_row("hello", extra_info={"target": number}) for number in range(3)]
    dataset = load_dataset([write(tmp_path / "a.jsonl", rows)], tokenizer, 10)
    assert {one.token_ids for one in dataset.prompts} == {(1, 3, 2)}
    assert len({sample_key(0, 1, "train", one.key, 0) for one in dataset.prompts}) == 3
    assert [dataset.by_key[one.key].extra_info["target"] for one in dataset.prompts] == [0, 1, 2]


def test_validation_rows_compare_by_extra_info(tmp_path, tokenizer):
    train = [truth("hello", str(n), extra_info={"target": n}) for n in range(2)]
    other = truth("hello", "5", extra_info={"target": 5})
    loaded = load_dataset([write(tmp_path / "t.jsonl", train)], tokenizer, 10)
    held_out = load_dataset([write(tmp_path / "v.jsonl", [other, train[1]])], tokenizer, 10)
    pairs = [tuple(map(str, pair)) for pair in check_shared(loaded, held_out)]
    files = f"{tmp_path}/t.jsonl row", f"{tmp_path}/v.jsonl row"
    assert pairs == [(f"{files[0]} 1", f"{files[1]} 1"), (f"{files[0]} 2", f"{files[1]} 2")]
    wrong = truth("hello", "777", extra_info={"target": 1})
    with pytest.raises(ValueError, match=r"t.jsonl row 2 and \S*w.jsonl row 1: .*'1' and '777'"):
        check_shared(loaded, load_dataset([write(tmp_path / "w.jsonl", [wrong])], tokenizer, 10))


def test_no_more_contradictions_are_shown_than_a_person_reads(tmp_path, tokenizer):
    rows = [truth("hello", str(number)) for number in range(9)]
    with pytest.raises(ValueError, match=r"do not agree \(8; rows(.|\n)*\(3 more\)$") as e:
        load_dataset([write(tmp_path / "a.jsonl", rows)], tokenizer, 10)
    assert str(e.value).count("ground_truth") == 5


def test_prompts_in_both_data_sets_are_named(tmp_path, tokenizer):
    train = load_dataset(
        [write(tmp_path / "t.jsonl", [make_row("world"), make_row("hello")])], tokenizer, 10
    )
    held_out = write(tmp_path / "v.jsonl", [make_row("hello", data_source="held/out")])
    (pair,) = check_shared(train, load_dataset([held_out], tokenizer, 10))
    assert [str(row) for row in pair] == [f"{tmp_path}/t.jsonl row 2", f"{tmp_path}/v.jsonl row 1"]
    other = load_dataset([write(tmp_path / "o.jsonl", [make_row("hello hello")])], tokenizer, 10)
    assert check_shared(train, other) == []


def test_a_validation_prompt_with_another_truth_in_training_is_refused(tmp_path, tokenizer):
    """Otherwise a training row with truth 2 would be scored against 777."""
    train = load_dataset([write(tmp_path / "t.jsonl", [truth("hello", "2")])], tokenizer, 10)
    held_out = write(tmp_path / "v.jsonl", [make_row("world"), truth("hello", "777")])
    with pytest.raises(ValueError, match=r"t.jsonl row 1 and \S*v.jsonl row 2: .*'2' and '777'"):
        check_shared(train, load_dataset([held_out], tokenizer, 10))


def test_extra_info_is_optional(tmp_path, tokenizer):
    path = write(tmp_path / "t.jsonl", [make_row(extra_info=...)])
    assert load_dataset([path], tokenizer, 10).prompts[0].extra_info == {}


BAD_ROWS = [
    ({"prompt": ...}, "no `prompt`: add a list"),
    ({"prompt": "What is 2 + 2?"}, "`prompt` is 'What is 2"),
    ({"prompt": []}, "list of messages such as"),
    ({"prompt": [{"role": "user"}]}, "list of messages such as"),
    ({"data_source": ...}, "no `data_source`"),
    ({"data_source": " \n"}, "no `data_source`"),
    ({"data_source": "x" * 1001}, "`data_source` has 1,001 characters, more than 1,000"),
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
    with pytest.raises(ValueError, match=r"list.json row 1 is of type int: make"):
        load("list.json", "[1]")
    for name, text in (("empty.jsonl", ""), ("empty.json", "[]")):
        with pytest.raises(ValueError, match=f"{name} has no rows"):
            load(name, text)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty.parquet has no rows"):
        load("empty.parquet")


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "1" * 5000
GOOD, BAD = json.dumps(make_row("hello")), json.dumps(make_row("world", extra_info="BAD"))


@pytest.mark.parametrize("joined", ["\n{}\n\n{}\n", "[{},\n{}]"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"a": "\\ud800"}', r"'\\ud800' holds '\\ud800', which is .* half of a surrogate pair"),
        ('{"\\ud800": 1}', r"holds '\\ud800'"),
        ("{'a': 1}", "is not JSON: Expecting property name"),
        ('{"a": "\xff"}', r"holds '\\udcff', which is a byte that is not UTF-8"),
        (f'{{"a": {DEEP}}}', "is nested too deep: make it a JSON string"),
        (
            f'{{"a": {"[" * 200 + "]" * 200}}}',
            "is nested over 64 levels deep: make it a JSON string",
        ),
        (f'{{"a": {LONG}}}', "holds a number that is too long: Exceeds the limit"),
    ],
    ids=lambda text: text[:20],
)
def test_unusable_value_is_named(tmp_path, tokenizer, joined, value, message):
    path = tmp_path / "rows.json"
    text = joined.format(GOOD, BAD.replace('"BAD"', value))
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"(?s){path}.*(row 2|line 4):? .*{message}"):
        load_dataset([path], tokenizer, 10)


@pytest.mark.parametrize("end", ["", ",", ",]", "{}]", "] {}"])
def test_a_list_that_is_cut_off_names_the_row(tmp_path, tokenizer, end):
    path = tmp_path / "rows.json"
    path.write_text(f" [ {GOOD}{end}")
    with pytest.raises(ValueError, match=f"{path} (row [12] is not JSON|goes on after its list)"):
        load_dataset([path], tokenizer, 10)


@pytest.mark.parametrize(("file", "separator"), [("a.jsonl", "\n"), ("a.json", ",")])
def test_a_byte_order_mark_and_blank_space_are_no_fault(tmp_path, tokenizer, file, separator):
    other = BAD.replace('"BAD"', "{}")
    text = f"\n {GOOD} {separator}\r\n {other} \n"
    path = tmp_path / file
    path.write_text(f"[{text}]\n" if separator == "," else text, encoding="utf-8-sig")
    assert len(load_dataset([path], tokenizer, 10).prompts) == 2


def test_bytes_of_a_parquet_file_that_are_not_utf8_name_the_row(tmp_path, tokenizer):
    texts = pa.array([b"a", b"\xff"] * 700)
    # pyarrow does not check that the bytes are UTF-8.
    strings = pa.StringArray.from_buffers(1400, *texts.buffers()[1:], texts.buffers()[0])
    rows = pa.Table.from_pylist([make_row(data_source=...)] * 1400)
    path = tmp_path / "rows.parquet"
    pq.write_table(rows.append_column("data_source", strings).slice(1025), path)
    with pytest.raises(ValueError, match=f"{path} row 1 is damaged: .*utf-8"):
        load_dataset([path], tokenizer, 10)


def test_a_parquet_file_that_was_cut_in_its_middle_is_named(tmp_path, tokenizer):
    rows = [make_row(str(i)) for i in range(3000)]
    path = write(tmp_path / "rows.parquet", rows)
    content = bytearray(path.read_bytes())
    content[200 : len(content) // 3] = bytes(len(content) // 3 - 200)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} (is damaged after row|is not a Parquet file)"):
        load_dataset([path], tokenizer, 10)


def test_a_ground_truth_that_cannot_be_used_names_the_row(tmp_path, tokenizer):
    bad = make_row("world", reward_model={"ground_truth": '["4'})
    path = write(tmp_path / "rows.jsonl", [make_row(), bad])
    check = partial(check_ground_truth, BuiltinReward())
    with pytest.raises(
        ValueError, match=r"(?s)rows.jsonl.*row 2: `reward_model.ground_truth` begins"
    ):
        load_dataset([path], tokenizer, 10, check)
    own = partial(check_ground_truth, FunctionReward(path="mine.py"))
    assert len(load_dataset([path], tokenizer, 10, own).prompts) == 2


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
