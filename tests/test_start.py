"""Modules that a process does not import at its start, since each start would wait for them."""

import subprocess
import sys

import pytest

LATE = {"torch", "transformers", "vllm", "mlflow", "numba", "sklearn"}
"""Packages that the driver imports later or not at all."""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("refrain.flows.cli", LATE | {"prefect", "ray", "numpy", "scipy", "matplotlib", "pyarrow"}),
        ("refrain.flows.launch", LATE | {"prefect", "ray", "scipy", "matplotlib"}),
        ("refrain.flows.train", LATE),
        ("refrain.engines.inference.engine.ray_engine", LATE),
    ],
)
def test_a_module_does_not_load(module, absent):
    code = f"import sys, {module}; print(*sys.modules.keys() & {absent!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240.0
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
