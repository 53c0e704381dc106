"""The sampling kernel without a GPU: run in Triton's interpreter, and compiled to PTX."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from refrain.engines.inference.sampling.gpu import BLOCK
from refrain.engines.inference.sampling.kernels import accept, draw
from tests.conftest import REPOSITORY

TYPES = {
    "logits_ptr": "*bf16",
    "drawn_from_ptr": "*bf16",
    "stride": "i32",
    "num_rows": "i32",
    "vocab_size": "i32",
    "input_rows_ptr": "*i32",
    "after": "i32",
    "positions_ptr": "*i64",
    "ends_ptr": "*i32",
    "num_requests": "i32",
    "num_halvings": "i32",
    "keys_ptr": "*i64",
    "temperatures_ptr": "*fp32",
    "parts_ptr": "*fp32",
    "tokens_ptr": "*i32",
    "size": "i32",
    "part_tokens_ptr": "*i32",
    "num_parts": "i32",
    "drafts_ptr": "*i32",
    "logprobs_ptr": "*fp32",
    "width": "i32",
}
DRAW = {"GREEDY": False, "TRUNCATED": False, "ROWS": 1, "BLOCK": BLOCK}


@pytest.mark.timeout(400)
def test_the_kernel_draws_what_the_definition_says():
    cases = REPOSITORY / "tests" / "inference" / "kernel_cases.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", cases],
        cwd=REPOSITORY,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=390.0,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def machine_code(
    capability: int, kernel: Any = draw, fusion: bool = False, **constants: object
) -> str:
    """Return the kernel's PTX for a compute capability. This needs no GPU."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else TYPES[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": fusion}).asm["ptx"]


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
@pytest.mark.parametrize("ragged", [False, True])
def test_no_operation_of_it_is_fused_or_approximate(capability, ragged):
    """Otherwise the kernel would draw some other tokens than on other GPUs."""
    code = machine_code(capability, RAGGED=ragged, **DRAW)
    assert len(re.findall(r"\bmul\.rn\.f32", code)) > 100
    assert not re.findall(r"\bfma|\.ftz|\bmul\.f32|\badd\.f32|\bsub\.f32|f64", code)
    # The division is 1 / T. The approximate exponentials go into the log-probabilities and bounds.
    assert re.findall(r"\bdiv\.\S+", code) == ["div.rn.f32"]
    assert set(re.findall(r"\b\w+\.approx\S*", code)) == {"ex2.approx.f32"}


def test_a_round_of_philox_multiplies_once():
    """A program has 16 tokens a thread, and computes the score of one more."""
    code = machine_code(90, RAGGED=False, **DRAW)
    assert code.count("mul.wide.u32") == 7 * (BLOCK // 128 + 1)
    assert "mul.hi.u32" not in code


def test_fused_it_would_be_another_kernel():
    """Negative control: with fusion allowed, the compiler emits fused operations."""
    assert re.search(r"\bfma\.rn\.f32", machine_code(90, fusion=True, RAGGED=True, **DRAW))


@pytest.mark.parametrize(("ragged", "width"), [(False, 1), (True, 32)])
def test_accept_kernel_compiles(ragged, width):
    """The `accept` kernel, which combines the parts of the vocabulary, compiles too."""
    assert machine_code(90, accept, RAGGED=ragged, REQUESTS=1, WIDTH=width, PARTS=128)
