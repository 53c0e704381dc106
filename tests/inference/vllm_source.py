"""Read classes and names from vLLM's source. Importing vLLM would take many seconds."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SPEC = find_spec("vllm")
assert SPEC
assert SPEC.origin
VLLM = Path(SPEC.origin).parent
RUNNER = "v1/worker/gpu_model_runner.py:GPUModelRunner"
BATCH = "v1/worker/gpu_input_batch.py:InputBatch"
MODEL = "model_executor/models/interfaces_base.py"
LLM = "v1/engine/async_llm.py:AsyncLLM"
TRANSFER = "distributed/weight_transfer/base.py"
IPC = "distributed/weight_transfer/ipc_engine.py"
RELOAD = "model_executor/model_loader/reload/__init__.py"
SCHEDULER = "v1/core/sched/scheduler.py:Scheduler"
CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py:KVConnectorBase_V1"


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((VLLM / file).read_text())


@dataclass(frozen=True)
class Source:
    """Source of one of vLLM's classes."""

    node: ast.ClassDef

    @classmethod
    def of(cls, place: str) -> "Source":
        file, _, name = place.partition(":")
        found = [n for n in tree(file).body if isinstance(n, ast.ClassDef) and n.name == name]
        assert found, f"no class {place}"
        return cls(found[0])

    @property
    def functions(self) -> dict[str, list[str]]:
        """Return the arguments of each method, by its name."""
        return {
            node.name: [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            + [a.arg for a in node.args.kwonlyargs]
            for node in self.node.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    @property
    def attributes(self) -> set[str]:
        """Return the attributes that are set on `self`, or declared."""
        assigned = {
            node.attr
            for node in ast.walk(self.node)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        declared = {
            node.target.id
            for node in self.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        return assigned | declared


def names_in(file: str) -> set[str]:
    """Return the names that a file's top level defines or imports, `try` blocks included."""
    return names_of(tree(file).body)


def names_of(statements: Sequence[ast.stmt]) -> set[str]:
    names = set()
    for node in statements:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.Try):
            names |= names_of(node.body)
    return names
