"""The kernel that gives a step its drafts: in Triton's interpreter, and compiled for GPUs."""

import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.inference.drafting.placing import _place
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.engine
TYPES = {
    "packed_ptr": "*i32",
    "num_columns": "i32",
    "text_ptr": "*i32",
    "text_stride": "i32",
    "num_tokens_ptr": "*i32",
    "placed_ptr": "*i64",
    "most": "i32",
}


def test_drafts_are_placed_where_the_text_agrees_with_them():
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.placing_cases"],
        cwd=REPOSITORY,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["placed", "400", "rejected", "other", "drafts"]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_gpus(capability: int):
    sizes = {"COLUMNS": 64, "MOST": 32}
    names = _place.arg_names
    source = ASTSource(
        fn=_place,
        signature={name: "constexpr" if name in sizes else TYPES[name] for name in names},
        constexprs={(names.index(name),): size for name, size in sizes.items()},
    )
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert ".entry _place" in code
