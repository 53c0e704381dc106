"""Several sources become one data set, in which each prompt knows its source."""

from pathlib import Path

import pytest

from refrain.engines.data.dataset import Dataset
from refrain.engines.data.repeats import RowName
from refrain.engines.data.sources import load_sources, portions_of
from refrain.schemas.data import Prompt
from refrain.schemas.inputs import DataSource


def make_source(name: str, **changes) -> DataSource:
    return DataSource.model_validate({"name": name, "files": f"{name}.jsonl"} | changes)


def load_of(**keys: str):
    """Return a reader: by source, one prompt a letter. The ground truth of `A` is another than of
    `a`."""

    def load(source: DataSource) -> Dataset:
        letters = keys[source.name]
        prompts = tuple(
            Prompt(one.lower(), (ord(one.lower()),), "math", "2" if one.isupper() else "1")
            for one in letters
        )
        return Dataset(
            prompts, tuple(RowName(source.files[0], n + 1) for n in range(len(letters))), 1
        )

    return load


def test_prompts_keep_their_source_and_the_first_one_wins():
    sources = [make_source("one", weight=3), make_source("two", max_prompts=3)]
    dataset = load_sources(sources, load_of(one="abc", two="cdef"))
    found = [(prompt.key, prompt.source) for prompt in dataset.prompts]
    assert found == [("a", "one"), ("b", "one"), ("c", "one"), ("d", "two"), ("e", "two")]
    assert dataset.num_duplicates == 1 + 1 + 1
    assert str(dataset.rows[3]) == "two.jsonl row 2"
    portions = portions_of(sources, dataset)
    assert [(one.name, one.keys, one.weight) for one in portions] == [
        ("one", ("a", "b", "c"), 3.0),
        ("two", ("d", "e"), 1.0),
    ]


def test_sources_that_disagree_or_add_nothing_are_refused():
    sources = [make_source("one"), make_source("two")]
    with pytest.raises(ValueError, match=r"(?s)one.jsonl row 1 and two.jsonl row 2: ground_truth"):
        load_sources(sources, load_of(one="ab", two="cA"))
    same = load_sources(sources, load_of(one="ab", two="ba"))
    with pytest.raises(ValueError, match=r"source 'two' of data.train has no prompts that"):
        portions_of(sources, same)


def test_a_plain_list_of_files_is_one_source_without_a_name():
    sources = [DataSource(files=(Path("a"), Path("b")))]
    dataset = load_sources(sources, lambda _: load_of(one="ab")(make_source("one")))
    assert [prompt.source for prompt in dataset.prompts] == ["", ""]
