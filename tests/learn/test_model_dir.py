"""`check_model_dir` accepts a good model directory and says how to fix a bad one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.learn.model_dir import check_model_dir


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def edit_config(path: Path, **fields: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def only_adapter(path: Path) -> None:
    (path / "config.json").rename(path / "adapter_config.json")


def cut_weights(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def git_lfs_pointer(path: Path) -> None:
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")


def index_of_missing_shard(path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()


def no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def test_a_good_directory_passes(copy: Path) -> None:
    check_model_dir(copy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "does not exist; give the local directory"),
        (lambda path: (path / "config.json").unlink(), "no config.json; give the directory"),
        (only_adapter, "adapter: merge it"),
        (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
        (lambda path: edit_config(path, architectures=["BertModel"]), "BertModel"),
        (lambda path: edit_config(path, architectures=None), "none of which is a causal"),
        (lambda path: edit_config(path, quantization_config={}), "quantised"),
        (lambda path: (path / "model.safetensors").unlink(), "holds no weights"),
        (cut_weights, "cut short"),
        (git_lfs_pointer, "Git LFS pointer"),
        (index_of_missing_shard, "named in the index but missing"),
        (no_tokenizer, "holds no tokenizer"),
    ],
)
def test_bad_directory_is_named_with_its_fix(
    copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copy)
    with pytest.raises(ValueError, match=message) as caught:
        check_model_dir(copy)
    assert str(copy) in str(caught.value)


def test_a_file_is_no_directory(copy: Path) -> None:
    with pytest.raises(ValueError, match="is a file"):
        check_model_dir(copy / "config.json")
