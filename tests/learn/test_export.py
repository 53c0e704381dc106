"""A directory comes out as it came in, but for what training changed."""

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
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.learn import export
from engines.learn.checkpoint import MODEL_DIR
from engines.learn.export import MANIFEST, find_start_files
from engines.learn.learner import Learner
from schemas.config import TrainConfig
from tests.learn.conftest import make_batch
from tests.learn.test_broken_models import check

MakeConfig = Callable[..., TrainConfig]
IDS = [3, 1, 4, 1, 5]


def files_of(directory: Path) -> dict[str, bytes]:
    """Content of all files but weights, by path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith("model")
    }


def assert_as_it_came_in(start: Path, exported: Path) -> None:
    """No file is lost, added or another one, and the manifest names them all."""
    before, after = files_of(start), files_of(exported)
    manifest = json.loads(after.pop(MANIFEST))
    assert after == before
    assert {"additional_chat_templates/tools.jinja", "generation_config.json"} <= after.keys()
    assert sorted(manifest["copied"]) == sorted(after)
    assert manifest["trained"] == ["model.safetensors"]
    assert manifest["changed"] == {}


def save(config: TrainConfig, path: Path | None = None) -> tuple[Learner, Path]:
    """A learner and its export after a step of training; `path`: of another model."""
    model = config.model.model_copy(update={"path": path or config.model.path})
    config = config.model_copy(update={"model": model})
    learner = Learner(config)
    learner.restore(None)
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


def test_a_mesh_of_one_keeps_them_too(
    make_config: MakeConfig, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU alone has such a mesh, and its model is made without the start's side files."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(Learner, "_mesh", lambda _: init_device_mesh("cpu", (1,)))
        assert_as_it_came_in(model_dir, save(make_config())[1])
    finally:
        dist.destroy_process_group()


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


def test_what_transformers_loads_is_what_was_trained(make_config: MakeConfig, start: Path) -> None:
    """Weights in float32 would be rounded where the config went on to say bfloat16."""
    file = start / "model.safetensors"
    rounded = {name: one.bfloat16() for name, one in load_file(file).items()}
    save_file(rounded, file, {"format": "pt"})
    edit_config(start, dtype="bfloat16")
    learner, exported = save(make_config(), start)
    logits = AutoModelForCausalLM.from_pretrained(exported)(input_ids=torch.tensor([IDS])).logits
    expected = logits.log_softmax(-1)[0, range(4), IDS[1:]].detach().numpy()
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
        "pytorch_model.bin": "weights",
        "original/consolidated.00.pth": "weights",
        "Q4_K_M.GGUF": "weights",
        "onnx/model.onnx_data": "weights",
        "optimizer.pt": "weights",
        ".git/config": "hidden or a cache",
        ".cache/huggingface/x.metadata": "hidden or a cache",
        "__pycache__/own.pyc": "hidden or a cache",
        "runs/one/config.json": "holds this run",
    }
    for name in left:
        write(start / name)
    with (start / "huge.parquet").open("wb") as huge:
        huge.truncate(export.MAX_OTHER_BYTES + 1)
    os.mkfifo(start / "pipe")
    Path(os.fsdecode(os.fsencode(start) + b"/\xff.txt")).write_text("x")
    files = find_start_files(start, start / "runs" / "one" / "checkpoints")
    assert set(files.copied) == kept
    assert files.num_bytes < 50_000
    expected = {
        (f"{name.split('/')[0]}/" if reason != "weights" else name): reason
        for name, reason in left.items()
    }
    odd = {"huge.parquet": "too large", "pipe": "cannot be read", "\\udcff.txt": "cannot be read"}
    weights = {"model.safetensors": "weights"}
    assert files.left_out == expected | odd | weights
    (warning,) = files.warnings
    assert "checkpoints leave out huge.parquet" in warning


def test_links_are_not_followed_blindly(start: Path, tmp_path: Path) -> None:
    """What loaders read is read through links by them, too."""
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
        "model.safetensors": "weights",
        "notes.txt": outside,
    }


def test_a_snapshot_of_the_hugging_face_cache_is_whole(
    make_config: MakeConfig, model_dir: Path, tmp_path: Path
) -> None:
    """Each of its files is a link to a blob beside it."""
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
