"""An export keeps every file of the start model as it was, except for what training changed."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from refrain.engines.learn import export
from refrain.engines.learn.checkpoint import MODEL_DIR
from refrain.engines.learn.export import MANIFEST, find_start_files, write_export
from refrain.engines.learn.learner import Learner
from refrain.engines.learn.loading import Loading, load_policy
from refrain.engines.learn.training_state import host_tensors
from refrain.engines.user_files import MAX_TEXT_BYTES
from refrain.schemas.config import TrainConfig
from tests.learn.conftest import make_batch, own_logprobs, started
from tests.learn.test_broken_models import check
from tests.learn.test_broken_models import save as save_family

MakeConfig = Callable[..., TrainConfig]
IDS = [3, 1, 4, 1, 5]


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the content of all files except weights, by path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith("model")
    }


def assert_as_it_came_in(start: Path, exported: Path) -> None:
    """Assert that no file was lost, added or changed, and that the manifest lists all files."""
    before, after = files_of(start), files_of(exported)
    manifest = json.loads(after.pop(MANIFEST))
    assert after == before
    assert {"additional_chat_templates/tools.jinja", "generation_config.json"} <= after.keys()
    assert sorted(manifest["copied"]) == sorted(after)
    assert manifest["trained"] == ["model.safetensors"]
    assert manifest["changed"] == {}


def save(config: TrainConfig, path: Path | None = None) -> tuple[Learner, Path]:
    """Return a learner and its export after one training step. `path`: train this model instead."""
    model = config.model.model_copy(update={"path": path or config.model.path})
    config = config.model_copy(update={"model": model})
    learner = started(config)
    learner.train_step(make_batch(num_groups=2, group_size=2))
    return learner, learner.save(1, {}) / MODEL_DIR


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
def test_every_file_beside_the_weights_is_kept(
    make_config: MakeConfig, model_dir: Path, lora: dict | None
) -> None:
    _, exported = save(make_config(lora=lora))
    assert_as_it_came_in(model_dir, exported)
    template = AutoTokenizer.from_pretrained(exported).chat_template
    assert template["tools"] == "tools: {{ messages }}"
    assert AutoModelForCausalLM.from_pretrained(exported).generation_config.eos_token_id == [1, 5]
    assert check(exported) == ()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt2", "gemma3_text"])
def test_weights_that_were_not_trained_come_out_as_they_came_in(
    kind: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Names and bits are the same. Files hold experts one by one, the model holds them stacked."""
    start = save_family(kind, tmp_path / "start")
    expected = load_file(start / "model.safetensors")
    for name, place in {"alone": None, "mesh": mesh}.items():
        policy = load_policy(start, Loading(torch.device("cpu"), place))
        tensors = host_tensors(policy, torch.float32, keep=True)
        write_export(policy.model, tensors, find_start_files(start), tmp_path / name)
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def start(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "start"))


def edit_config(start: Path, **values: Any) -> None:
    file = start / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_config_names_the_data_type_that_was_written(
    make_config: MakeConfig, start: Path, name: str
) -> None:
    config = json.loads((start / "config.json").read_text())
    del config["dtype"]
    config |= {name: "bfloat16", "vision_config": {name: "float16"}, "of_nobody": [1, None]}
    (start / "config.json").write_text(json.dumps(config))
    _, exported = save(make_config(), start)
    expected = config | {name: "float32", "vision_config": {name: "float32"}}
    assert list(json.loads((exported / "config.json").read_text()).items()) == list(
        expected.items()
    )
    manifest = json.loads((exported / MANIFEST).read_text())
    assert manifest["changed"] == {"config.json": {name: "float32"}}
    assert "config.json" not in manifest["copied"]


def test_transformers_loads_the_trained_weights(make_config: MakeConfig, start: Path) -> None:
    """transformers would round the float32 weights if the config still named bfloat16."""
    file = start / "model.safetensors"
    rounded = {name: one.bfloat16() for name, one in load_file(file).items()}
    save_file(rounded, file, {"format": "pt"})
    edit_config(start, dtype="bfloat16")
    learner, exported = save(make_config(), start)
    expected = own_logprobs(AutoModelForCausalLM.from_pretrained(exported), IDS)
    np.testing.assert_allclose(learner.logprobs([IDS])[0], expected, atol=1e-5)


def test_a_config_that_transformers_would_not_save_is_copied(
    make_config: MakeConfig, start: Path
) -> None:
    edit_config(start, temperature=0.7, do_sample=False, transformers_weights="model.safetensors")
    _, exported = save(make_config(), start)
    assert_as_it_came_in(start, exported)
    AutoModelForCausalLM.from_pretrained(exported)


def test_shards_are_named_as_they_are(
    make_config: MakeConfig, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(start, transformers_weights="model.safetensors")
    small = partial(split_torch_state_dict_into_shards, max_shard_size="30KB")
    monkeypatch.setattr(export, "split_torch_state_dict_into_shards", small)
    _, exported = save(make_config(), start)
    manifest = json.loads((exported / MANIFEST).read_text())
    index = "model.safetensors.index.json"
    assert manifest["changed"] == {"config.json": {"transformers_weights": index}}
    assert len(manifest["trained"]) > 2
    assert index in manifest["trained"]
    assert check(exported) == ()


def write(file: Path, content: str = "x") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def test_foreign_files_come_along_within_reason(start: Path) -> None:
    before = set(find_start_files(start).copied)
    for name in ("README.md", "LICENSE", "own.py", "assets/figure.txt", "original/params.json"):
        write(start / name)
    kept = before | {
        *("README.md", "LICENSE", "own.py", "assets/figure.txt", "original/params.json")
    }
    left = {
        "pytorch_model.bin": "weights or a pickle",
        "original/consolidated.00.pth": "weights or a pickle",
        "Q4_K_M.GGUF": "weights or a pickle",
        "onnx/model.onnx_data": "weights or a pickle",
        "optimizer.pt": "weights or a pickle",
        "tf_model.h5.index.json": "weights or a pickle",
        ".git/config": "hidden or a cache",
        ".cache/huggingface/x.metadata": "hidden or a cache",
        "__pycache__/own.pyc": "hidden or a cache",
        "runs/one/config.json": "holds this run",
    }
    for name in left:
        write(start / name)
    for name, limit in (("huge.parquet", export.MAX_OTHER_BYTES), ("x.model", MAX_TEXT_BYTES)):
        with (start / name).open("wb") as huge:
            huge.truncate(limit + 1)
    os.mkfifo(start / "pipe")
    Path(os.fsdecode(os.fsencode(start) + b"/\xff.txt")).write_text("x")
    files = find_start_files(start, start / "runs" / "one" / "checkpoints")
    assert set(files.copied) == kept
    assert files.num_bytes < 50_000
    expected = {
        (f"{name.split('/')[0]}/" if reason != "weights or a pickle" else name): reason
        for name, reason in left.items()
    }
    odd = {
        "huge.parquet": "too large",
        "x.model": "too large",
        "pipe": "cannot be read",
        "\\udcff.txt": "cannot be read",
    }
    weights = {"model.safetensors": "weights or a pickle"}
    assert files.left_out == expected | odd | weights
    (warning,) = files.warnings
    assert "checkpoints leave out huge.parquet" in warning


def test_links_are_not_followed_blindly(start: Path, tmp_path: Path) -> None:
    """Files that loaders need are copied even if they are links out of the directory."""
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "secret.txt")
    (start / "tokenizer.json").rename(elsewhere / "tokenizer.json")
    (start / "additional_chat_templates").rename(elsewhere / "templates")
    write(elsewhere / "templates" / "secret.txt")
    (start / "tokenizer.json").symlink_to(elsewhere / "tokenizer.json")
    (start / "additional_chat_templates").symlink_to(elsewhere / "templates")
    (start / "notes.txt").symlink_to(elsewhere / "secret.txt")
    (start / "folder").symlink_to(elsewhere)
    (start / "loop").symlink_to(start)
    (start / "circle").symlink_to(start / "circle")
    (start / "LICENSE").symlink_to("chat_template.jinja")
    files = find_start_files(start)
    assert {"tokenizer.json", "additional_chat_templates/tools.jinja", "LICENSE"} <= set(
        files.copied
    )
    outside = "a link out of the directory"
    assert files.left_out == {
        "additional_chat_templates/secret.txt": outside,
        "circle": "cannot be read",
        "folder/": outside,
        "loop/": outside,
        "model.safetensors": "weights or a pickle",
        "notes.txt": outside,
    }


def test_many_files_cost_no_template(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(start / "a.txt")
    write(start / "assets" / "figure.txt")
    monkeypatch.setattr(export, "MAX_FILES", 0)
    files = find_start_files(start)
    assert {"a.txt", "additional_chat_templates/tools.jinja"} <= set(files.copied)
    assert files.left_out["assets/"] == "too large"


def test_a_snapshot_of_the_hugging_face_cache_is_whole(
    make_config: MakeConfig, model_dir: Path, tmp_path: Path
) -> None:
    """Each file of a snapshot is a link to a blob beside it. The export holds the contents."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1234"
    write(blobs / "readme", "of the model")
    for number, name in enumerate(path.relative_to(model_dir) for path in model_dir.rglob("*.*")):
        shutil.copyfile(model_dir / name, blobs / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blobs / str(number))
    (snapshot / "README.md").symlink_to(blobs / "readme")
    _, exported = save(make_config(), snapshot)
    assert_as_it_came_in(snapshot, exported)
    assert not any(path.is_symlink() for path in exported.rglob("*"))
    assert (exported / "README.md").read_text() == "of the model"


def test_an_export_is_a_start(make_config: MakeConfig, start: Path) -> None:
    config = make_config()
    _, first = save(config, start)
    _, second = save(config.model_copy(update={"name": "second"}), first)
    assert files_of(second).keys() == files_of(first).keys()
    assert json.loads((second / MANIFEST).read_text())["start"] == str(first)
