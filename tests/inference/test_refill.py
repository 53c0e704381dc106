"""The kernels that draft on the device: in Triton's interpreter, and compiled for GPUs."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from refrain.engines.inference.drafting.refill_kernel import descend, search
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.engine
TYPES = {
    "arena_ptr": "*i32",
    "table_ptr": "*i64",
    "slots_ptr": "*i32",
    "requests_ptr": "*i64",
    "num_sampled_ptr": "*i32",
    "text_ptr": "*i32",
    "num_tokens_ptr": "*i32",
    "found_ptr": "*i32",
    "drafts_ptr": "*i64",
}
SIZES = {"MIN": 3, "MAX": 7, "ENDS": 16, "PROBES": 32, "INDEXES": 2, "WINDOW": 32, "FEW": 64}


def test_kernels_draft_what_the_definition_drafts():
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.refill_cases"],
        cwd=REPOSITORY,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=170.0,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["drafted", "for", "360", "rejected", "other", "drafts"]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", [search, descend], ids=["search", "descend"])
def test_they_compile_for_gpus(kernel, capability: int):
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={
            name: "constexpr" if name in SIZES else TYPES.get(name, "i32") for name in names
        },
        constexprs={(names.index(name),): size for name, size in SIZES.items() if name in names},
    )
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert f".entry {kernel.__name__}" in code
