"""A head comes back as it was saved, and one that does not fit is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from refrain.engines.draft_head.files import SETTINGS, WEIGHTS, load, save
from refrain.engines.draft_head.model import DraftHead

SIZES = {"hidden_size": 8, "vocab_size": 36}


@pytest.fixture
def saved(tmp_path):
    head = DraftHead(8, torch.tensor([3, 5, 35]), 6)
    torch.nn.init.normal_(head.down.weight)
    save(head, tmp_path, vocab_size=36, window=4)
    return head, tmp_path


def test_a_head_comes_back(saved):
    head, directory = saved
    again = load(directory, **SIZES).state_dict()
    assert again.keys() == head.state_dict().keys()
    assert all(torch.equal(again[name], one) for name, one in head.state_dict().items())
    assert json.loads((directory / SETTINGS).read_text())["window"] == 4


def without_weights(directory):
    (directory / WEIGHTS).unlink()


def torn(directory):
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-9])


def of_another_version(directory):
    values = json.loads((directory / SETTINGS).read_text()) | {"version": 1}
    (directory / SETTINGS).write_text(json.dumps(values))


def of_another_size(directory):
    values = json.loads((directory / SETTINGS).read_text()) | {"inner_size": 7}
    (directory / SETTINGS).write_text(json.dumps(values))


def of_another_vocabulary(directory):
    tensors = load_file(directory / WEIGHTS)
    tensors["token_ids"][2] = 36
    save_file(tensors, directory / WEIGHTS)


def with_nan(directory):
    tensors = load_file(directory / WEIGHTS)
    tensors["scale"][3] = torch.nan
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_weights, r"has no head\.safetensors: name the directory of a draft head"),
        (torn, r"head\.safetensors cannot be read .*: make the head again with"),
        (of_another_version, r"head\.json is damaged or of another version of refrain \(version"),
        (of_another_size, r"head\.safetensors has .*, but head\.json needs .*: make the head"),
        (of_another_vocabulary, r"has a draft vocabulary with token ids outside 0 to 35: make the"),
        (with_nan, r"head\.safetensors has values in scale that are not finite: make the head"),
    ],
)
def test_what_is_no_head_is_refused(saved, damage, message):
    damage(saved[1])
    with pytest.raises(ValueError, match=message):
        load(saved[1], **SIZES)


@pytest.mark.parametrize("other", [{"hidden_size": 16}, {"vocab_size": 40}])
def test_a_head_of_another_model_is_refused(saved, other):
    with pytest.raises(ValueError, match=r"8 and 36 token ids, but this model has .*: make a head"):
        load(saved[1], **SIZES | other)
