"""Run the cells of a notebook in a directory, with further overrides of its config.

    python -m tests.examples.cells NOTEBOOK DIRECTORY OVERRIDE ...

`infra` in the directory links to the repository's.
"""

import ast
import asyncio
import inspect
import json
import os
import sys
from pathlib import Path

import matplotlib

import refrain
from tests.conftest import REPOSITORY


async def run_cells(notebook: Path, overrides: list[str]) -> None:
    load, scope = refrain.load_config, {}
    refrain.load_config = lambda path, own: load(path, [*own, *overrides])  # ty: ignore
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            source, flags = "".join(cell["source"]), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            awaited = eval(compile(source, str(notebook), "exec", flags), scope)
            if inspect.iscoroutine(awaited):
                await awaited
    seen = {name: scope[name].to_pylist() for name in ("steps", "lengths")}
    seen |= {"num_prompts": len(scope["medians"]), "samples": scope["samples"]}
    print("seen:", json.dumps(seen))


if __name__ == "__main__":
    matplotlib.use("Agg")
    file, directory, *overrides = sys.argv[1:]
    os.chdir(directory)
    Path("infra").symlink_to(REPOSITORY / "infra")
    asyncio.run(run_cells(Path(file), overrides))
