"""Models with the shapes of Qwen3 and Llama and random weights. Nothing is downloaded."""

import gc
from pathlib import Path
from typing import Any

import torch

_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
_LLAMA = {"vocab_size": 128_256, "num_key_value_heads": 8, "rope_theta": 500_000.0}
_TINY = {"vocab_size": 512, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def _shape(family: dict, hidden: int, layers: int, heads: int, mlp: int, tied: bool) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
        **family,
    }


SHAPES = {
    "qwen3-8b": _shape(_QWEN3, 4096, 36, 32, 12_288, False),
    "qwen3-4b": _shape(_QWEN3, 2560, 36, 32, 9728, True),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 28, 16, 6144, True),
    "qwen3-0.6b": _shape(_QWEN3, 1024, 28, 16, 3072, True),
    "llama-8b": _shape(_LLAMA, 4096, 32, 32, 14_336, False),
    "llama-3b": _shape(_LLAMA, 3072, 28, 24, 8192, True),
    "llama-1b": _shape(_LLAMA, 2048, 16, 32, 8192, True),
    "qwen3-tiny": _shape(_TINY, 64, 2, 4, 128, False),
    "llama-tiny": _shape(_TINY, 64, 2, 4, 128, False),
}
"""Shapes by name, in each family the largest first."""
WEIGHT_STD = 0.64
"""Standard deviation of the weights times the square root of the width.

It is so large that the layers, not the embeddings, determine the logits.
"""
LOGIT_STD = 6.0
"""Standard deviation of the logits, about that of a trained model: an entropy of 1 to 2 nats.

With the usual random weights, all tokens would be about equally likely.
"""


def config_of(name: str) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    kind, shape = Qwen3Config if name.startswith("qwen3") else LlamaConfig, SHAPES[name]
    return kind(
        **shape,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=WEIGHT_STD / shape["hidden_size"] ** 0.5,
    )


def num_parameters(name: str) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name)).num_parameters()


def largest(family: str, device: str, bytes_each: int, spare_bytes: int) -> str:
    """Return the largest model of the family that leaves `spare_bytes` of free memory.

    Each parameter takes `bytes_each`. On a CPU, return the tiny model.
    """
    if device == "cpu":
        return f"{family}-tiny"
    free, _ = torch.cuda.mem_get_info()
    names = [name for name in SHAPES if name.startswith(family)]
    fitting = (n for n in names if num_parameters(n) * bytes_each + spare_bytes < free)
    return next(fitting, names[-2])


def give_back() -> None:
    """Return this process's unused GPU memory to the GPU, for the processes of engines."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def random_model(name: str, device: str, dtype: torch.dtype, *, echo: bool = False) -> Any:
    """Return a model with random weights, the same ones each time on one device.

    `echo`: its layers change nothing, so the next token depends on the last one only. If embedding
    and output layer are tied, it is the last one again.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype)
    torch.nn.init.constant_(model.model.norm.weight, LOGIT_STD / WEIGHT_STD)
    if echo:
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model.eval().requires_grad_(False)


def write_model(
    name: str, device: str, dtype: torch.dtype, directory: Path, *, echo: bool = False
) -> Path:
    """Write a Hugging Face directory for engines to start from. Its tokenizer is a dummy."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    random_model(name, device, dtype, echo=echo).save_pretrained(directory)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(directory)
    return directory
