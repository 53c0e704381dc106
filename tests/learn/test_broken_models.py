"""`check_model` refuses a broken model before the run starts, and accepts every good one."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from refrain.engines.learn import finite
from refrain.engines.learn.loading import Loading, load_policy
from refrain.schemas.inputs import ModelConfig
from refrain.tasks.run.model_inputs import check_model
from tests.learn.test_attention import SHAPES, SMALL
from tests.learn.test_sample_isolation import HYBRIDS

OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "cohere2": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "glm4": {},
    "starcoder2": {"sliding_window": 24},
    "olmo2": {},
}
FAMILIES = SHAPES | HYBRIDS | OTHERS
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def check(path: Path) -> tuple[str, ...]:
    return check_model(ModelConfig(path=path))


def save(kind: str, path: Path, tied: bool = False, **how: Any) -> Path:
    torch.manual_seed(0)
    values = SMALL | FAMILIES[kind] | {"tie_word_embeddings": tied}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).save_pretrained(
        path, **how
    )
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("kind", FAMILIES)
def test_models_saved_by_transformers_are_accepted(kind: str, tmp_path: Path) -> None:
    """Tied in one file, and untied in shards. In the Hugging Face cache, the files of a snapshot
    are links to blobs beside it."""
    assert check(save(kind, tmp_path / "model", tied=True)) == ()
    blobs = save(kind, tmp_path / "blobs", max_shard_size="20KB")
    snapshot = tmp_path / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../..") / "blobs" / file.name)
    assert len(list(snapshot.glob("*.safetensors"))) > 1
    assert check(snapshot) == ()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model in one file, one in shards, and one with experts."""
    path = tmp_path_factory.mktemp("models")
    return {
        "one": save("qwen3", path / "one", tied=True),
        "shards": save("llama", path / "shards", max_shard_size="20KB"),
        "experts": save("qwen3_moe", path / "experts"),
    }


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return a function that damages a model by changing the tensors of its file."""

    def damage(path: Path) -> None:
        tensors = tensors_of(path)
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    return damage


def configured(**values: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def indexed(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        change(index["weight_map"])
        file.write_text(json.dumps(index))

    return damage


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return rewrite(change)


def malicious(path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (path / "executed",))

    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    (path / "model.safetensors").unlink()


def pickled_shards(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model-00001-of-00001.bin")
    places = {"weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(places))


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that damages a model by changing the header of its file."""

    def damage(path: Path) -> None:
        file = path / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return damage


def spread(path: Path) -> None:
    shutil.copyfile(path / "model.safetensors", path / "model-copy.safetensors")


def twice_in_shards(path: Path) -> None:
    first, second = sorted(path.glob("*.safetensors"))[:2]
    tensors = load_file(second) | load_file(first)
    save_file(tensors, second, {"format": "pt"})


def first_shard(path: Path) -> Path:
    return min(path.glob("*.safetensors"))


def outside(path: Path) -> None:
    first_shard(path).rename(path.parent / first_shard(path).name)


def directory(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()


def dangling(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("nowhere")


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
NAN, INFINITY = float("nan"), float("inf")
UNFIT = "does not belong to the weights beside it: "
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "renamed": ("one", renamed("q_proj", "query"), UNFIT + ".*lack .*q_proj.*no place for .*query"),
    "missing": ("one", rewrite(lambda all: all.pop(NORM)), f"the weights lack {NORM}"),
    "unexpected": (
        "one",
        rewrite(lambda all: all.update({"model.extra.weight": torch.ones(2)})),
        "no place for model.extra.weight",
    ),
    "a long name": (
        "one",
        rewrite(lambda all: all.update({"x" * 50_000: torch.ones(2)})),
        r"no place for x{150}\.\.\.",
    ),
    "a name for a terminal": (
        "one",
        rewrite(lambda all: all.update({"\x1b[31m": torch.ones(2)})),
        r"no place for \\x1b\[31m",
    ),
    "a thousand dimensions": (
        "one",
        header(lambda all: all[NORM].update(shape=[1] * 1000 + [64])),
        r"model.norm.weight \(\[1, 1, .*\.\.\.",
    ),
    "a bias that the config leaves out": (
        "one",
        rewrite(lambda all: all.update({QUERY.replace("weight", "bias"): torch.ones(64)})),
        "no place for .*q_proj.bias",
    ),
    "no output layer": ("shards", lambda _: None, ""),
    "one NaN": (
        "one",
        rewrite(lambda all: all[EMBEDDING][9, 9].fill_(NAN)),
        f"has NaN or infinity in {EMBEDDING}",
    ),
    "one infinity": (
        "one",
        rewrite(lambda all: all[QUERY][1, 2].fill_(-INFINITY)),
        f"has NaN or infinity in {QUERY}",
    ),
    "infinity in bfloat16": (
        "one",
        rewrite(lambda all: all[QUERY][1, 2].fill_(3.4028e38)),
        f"has NaN or infinity in {QUERY}",
    ),
    "NaN in float16": (
        "one",
        rewrite(lambda all: all.update({NORM: torch.full((64,), NAN, dtype=torch.float16)})),
        f"has NaN or infinity in {NORM}",
    ),
    "int32": (
        "one",
        rewrite(lambda all: all.update({k: v.to(torch.int32) for k, v in all.items()})),
        "weights of the data type I32, .* float32, bfloat16 or float16",
    ),
    "one of int8": (
        "one",
        rewrite(lambda all: all.update({QUERY: all[QUERY].to(torch.int8)})),
        f"weights of the data type I8, for example {QUERY}",
    ),
    "float8": (
        "one",
        rewrite(lambda all: all.update({QUERY: all[QUERY].to(torch.float8_e4m3fn)})),
        "data type F8_E4M3",
    ),
    "bool experts": (
        "experts",
        rewrite(
            lambda all: all.update(
                {name: one.bool() for name, one in all.items() if "experts.1.up" in name}
            )
        ),
        "data type BOOL",
    ),
    "a missing expert": (
        "experts",
        rewrite(lambda all: [all.pop(name) for name in list(all) if "experts.1." in name]),
        "experts",
    ),
    "an expert of another shape": (
        "experts",
        rewrite(
            lambda all: all.update(
                {name: one[:16].clone() for name, one in all.items() if "experts.1.up" in name}
            )
        ),
        "experts",
    ),
    "hidden_size of 10**9": ("one", configured(hidden_size=10**9), "hidden_size=1000000000,"),
    "a rotary factor": (
        "one",
        configured(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1e12}),
        "partial_rotary_factor=1",
    ),
    "head_dim of 10**9": ("one", configured(head_dim=10**9), "head_dim=1000000000,"),
    "an epsilon of NaN": ("one", configured(rms_norm_eps=NAN), "rms_norm_eps=nan"),
    "an angle of infinity": ("one", configured(rope_theta=INFINITY), "rope_theta=inf"),
    "an angle of 0": ("one", configured(rope_parameters={"rope_theta": 0}), "rope_theta=0"),
    "a text_config that is none": ("one", configured(text_config=5), "is not a PretrainedConfig"),
    "a decoder that is none": ("one", configured(decoder={"a": 1}), "is not a PretrainedConfig"),
    "vocabulary": ("one", configured(vocab_size=32), r"\[64, 64\], not \[32, 64\]"),
    "too few layers": ("one", configured(num_hidden_layers=1, layer_types=None), "no place for"),
    "too many layers": ("one", configured(num_hidden_layers=3, layer_types=None), "weights lack"),
    "10**9 layers": ("one", configured(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "10**12 experts": ("experts", configured(num_experts=10**12), "num_experts=1000000000000"),
    "tied": ("shards", configured(tie_word_embeddings=True), ""),
    "untied": ("one", configured(tie_word_embeddings=False), "weights lack lm_head.weight"),
    "another architecture": (
        "one",
        configured(architectures=["LlamaForCausalLM"]),
        r"\['LlamaForCausalLM'\], but its model_type qwen3 is a Qwen3ForCausalLM",
    ),
    "unknown model_type": ("one", configured(model_type="gpt9"), "gpt9"),
    "model_type of another kind": ("one", configured(model_type=[1]), "config.json"),
    "text for a number": ("one", configured(hidden_size="wide"), "config.json"),
    "a pickle that is code": (
        "one",
        malicious,
        "pytorch_model.bin: pickles, .* convert it: .*save_pretrained",
    ),
    "pickled shards": ("one", pickled_shards, "bin.index.json: pickles"),
    "other weights": (
        "one",
        configured(transformers_weights="other.safetensors"),
        "transformers_weights='other.safetensors'",
    ),
    "a generation_config cut short": (
        "one",
        lambda path: (path / "generation_config.json").write_text('{"eos_token_id": [1,'),
        "generation_config.json is not valid JSON",
    ),
    "a generation_config that is not loaded": (
        "one",
        lambda path: (path / "generation_config.json").write_text('{"max_new_tokens": -1}'),
        "generation_config.json is refused by transformers: .*max_new_tokens.* Copy it again",
    ),
    "a generation_config that is not saved": (
        "one",
        lambda path: (path / "generation_config.json").write_text(
            '{"do_sample": false, "temperature": 0.9}'
        ),
        "",
    ),
    "no directory": ("one", shutil.rmtree, "does not exist; give the local directory"),
    "a file": ("one", lambda path: (shutil.rmtree(path), path.touch()), "is a file"),
    "no config": (
        "one",
        lambda path: (path / "config.json").unlink(),
        "no config.json; give the directory",
    ),
    "a config cut short": (
        "one",
        lambda path: (path / "config.json").write_text("{"),
        "not valid JSON",
    ),
    "an adapter alone": (
        "one",
        lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        "adapter: merge it",
    ),
    "no language model": ("one", configured(architectures=["BertModel"]), "BertModel"),
    "no architectures": ("one", configured(architectures=None), "none of which is a causal"),
    "quantised": ("one", configured(quantization_config={}), "quantised"),
    "no weights": ("one", lambda path: (path / "model.safetensors").unlink(), "holds no weights"),
    "weights cut short": ("one", cut, "cut short"),
    "a Git LFS pointer": (
        "one",
        lambda path: (path / "model.safetensors").write_text("version https://git-lfs.github.com"),
        "Git LFS pointer",
    ),
    "no tokenizer": (
        "one",
        lambda path: (path / "tokenizer.json").unlink(),
        "holds no tokenizer",
    ),
    "an adapter beside it": (
        "one",
        lambda path: (path / "adapter_config.json").write_text("{}"),
        "adapter .* beside a model",
    ),
    "index to the parent": (
        "shards",
        indexed(lambda places: places.update({NORM: "../model.safetensors"})),
        "which is no file of this directory",
    ),
    "index to a number": (
        "shards",
        indexed(lambda places: places.update({NORM: 7})),
        "no file of this directory",
    ),
    "index to a pickle": (
        "shards",
        indexed(lambda places: places.update({NORM: "model.bin"})),
        "no safetensors file",
    ),
    "index to a missing file": ("shards", outside, "named in the index but missing"),
    "index of another file": (
        "shards",
        indexed(lambda places: places.update({NORM: places[EMBEDDING]})),
        f"has {NORM} in .* does not hold it",
    ),
    "index of a missing tensor": (
        "shards",
        indexed(lambda places: places.update({"more": places[EMBEDDING]})),
        "has more in .* does not hold it",
    ),
    "index without a tensor": (
        "shards",
        indexed(lambda places: places.pop(NORM)),
        f"does not list {NORM}",
    ),
    "empty index": ("shards", indexed(lambda places: places.clear()), "no weight_map"),
    "index that is a list": (
        "shards",
        lambda path: (path / "model.safetensors.index.json").write_text("[1]"),
        "does not contain a JSON object",
    ),
    "no index": (
        "shards",
        lambda path: (path / "model.safetensors.index.json").unlink(),
        "no model.safetensors.index.json",
    ),
    "whole and shards": (
        "shards",
        lambda path: save_file({"a": torch.ones(1)}, path / "model.safetensors"),
        "names other files",
    ),
    "tensors twice in shards": ("shards", twice_in_shards, "both hold"),
    "a copy of a shard": (
        "shards",
        lambda path: shutil.copyfile(first_shard(path), path / "x.safetensors"),
        "both hold",
    ),
    "a copy beside it": ("one", spread, "model-copy.safetensors beside model.safetensors"),
    "a directory": ("one", directory, "is not a file"),
    "a dangling link": ("one", dangling, "holds no weights|missing"),
    "a shape that lies": (
        "one",
        header(lambda all: all[NORM].update(shape=[2**40])),
        "not a complete safetensors file",
    ),
    "an empty header": (
        "one",
        lambda path: (path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}"),
        "its weights are 0 tensors",
    ),
    "a header of 2**63 bytes": (
        "one",
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64),
        "not a complete safetensors file",
    ),
}
GOOD = ("no output layer", "tied", "a generation_config that is not saved")
"""Cases that are no damage. For example, a tied model may have an output layer in its file."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_model_is_refused(damage: str, saved: dict[str, Path], tmp_path: Path) -> None:
    kind, break_it, message = DAMAGES[damage]
    path = Path(shutil.copytree(saved[kind], tmp_path / "model"))
    break_it(path)
    if damage in GOOD:
        assert check(path) == ()
        return
    with pytest.raises(ValueError, match=f"(?s)^model.path: .*{message}") as refused:
        check(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 800
    assert not (path / "executed").exists()


def test_a_big_model_is_searched_in_part(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "BLOCK", 64)
    monkeypatch.setattr(finite, "MAX_BYTES", 150_000)
    (said,) = check(saved["one"])
    assert "one block in 2 was searched for NaN and infinity; the trainer searches the rest" in said
    path = Path(shutil.copytree(saved["one"], tmp_path / "model"))
    rewrite(lambda all: all[EMBEDDING][0, 0].fill_(NAN))(path)
    with pytest.raises(ValueError, match=f"infinity in {EMBEDDING}"):
        check(path)
    rewrite(lambda all: [all[EMBEDDING][0, 0].fill_(0.0), all[EMBEDDING][1, 0].fill_(NAN)])(path)
    check(path)
    with pytest.raises(ValueError, match=f"infinity in {EMBEDDING}"):
        load_policy(path, Loading(torch.device("cpu")))
