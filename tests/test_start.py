"""Modules that a process does not import at its start, since each start would wait for them."""

import subprocess
import sys

LATE = {"torch", "transformers", "vllm", "mlflow", "numba", "sklearn"}
"""Packages that the driver imports later or not at all."""
LOADED_LATE = {
    "refrain.flows.cli": LATE | {"prefect", "ray", "numpy", "scipy", "matplotlib", "pyarrow"},
    "refrain.flows.launch": LATE | {"prefect", "ray", "scipy", "matplotlib"},
    "refrain.flows.train": LATE,
    "refrain.engines.inference.engine.ray_engine": LATE,
}
"""Modules, from the one that loads least to the one that loads most, and what they load late."""
LOAD = """
import importlib, sys
for module, absent in {}.items():
    importlib.import_module(module)
    print(module, *sys.modules.keys() & absent, sep=",")
"""


def test_modules_do_not_load_what_is_needed_later():
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(LOADED_LATE)],
        capture_output=True,
        text=True,
        timeout=240.0,
    )
    assert (done.returncode, done.stdout.split()) == (0, list(LOADED_LATE)), done.stderr
