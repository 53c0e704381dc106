"""The page about the Python API (docs/api.md), from signatures and docstrings."""

import inspect
import re
from types import FunctionType
from typing import Any

from pydantic import BaseModel

import refrain
from refrain.flows.library import RunStore
from refrain.schemas.evaluation import EvaluationReport
from refrain.schemas.settings import declared_settings, described_default, described_values
from refrain.schemas.step import RunSummary

_HEADER = """# Python

<!-- not run: it trains for some minutes -->
```python
import refrain

config = refrain.load_config("infra/demo/train.yaml", ["num_epochs=2"])
summary = await refrain.train(config)  # in a script: asyncio.run(refrain.train(config))
store = refrain.open_run_store("demo")
store.sql("SELECT step, max(max_tokens) FROM lengths GROUP BY step ORDER BY step")
```

These names are public, and [stay what they are](stability.md). `refrain config --api` prints this
page. Code of your own that refrain calls imports nothing of it: a reward's
[`compute_score`](data.md#your-own-reward), [`compute_advantage` and
`compute_loss`](algorithms.md#your-own-advantage-or-loss), [tools and
environments](environments.md), and [agents](adapters.md).
"""
_MODULE = re.compile(r"(?:[a-z_]\w*\.)+(?=[A-Z])|Posix(?=Path)")
"""What is before the name of a class: the path of its module."""


def api_page() -> str:
    """Return the public Python API as Markdown."""
    parts = [
        _function(refrain.load_config),
        _fields(refrain.TrainConfig, "The settings are those of a [config](configuration.md)."),
        _function(refrain.train),
        _fields(RunSummary, _table(RunSummary)),
        _function(refrain.open_run_store),
        f"\n## RunStore\n\n{_doc(RunStore)}\n{_function(RunStore.sql, '###', 'RunStore')}",
        _fields(refrain.EvaluateConfig, _table(refrain.EvaluateConfig)),
        _function(refrain.evaluate),
        _fields(EvaluationReport, _table(EvaluationReport)),
    ]
    return _HEADER + "".join(parts)


def _function(function: FunctionType, level: str = "##", home: str = "refrain") -> str:
    name, kind = function.__name__, "async " if inspect.iscoroutinefunction(function) else ""
    signature = _MODULE.sub("", str(inspect.signature(function)))
    shown = f"{kind}{home}.{name}{signature}"
    return f"\n{level} {name}\n\n```text\n{shown}\n```\n\n{_doc(function)}\n"


def _fields(kind: type[BaseModel], about: str) -> str:
    return f"\n## {kind.__name__}\n\n{_doc(kind)}\n\n{about.rstrip()}\n"


def _table(kind: type[BaseModel]) -> str:
    rows = [
        (f"`{one.name}`", described_values(one.field), described_default(one.field), _text(one))
        for one in declared_settings(kind)
        if "." not in one.name
    ]
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"| field | values | default | |\n|---|---|---|---|\n{lines}"


def _text(setting: Any) -> str:
    return " ".join((setting.field.description or "").split())


def _doc(documented: Any) -> str:
    return inspect.getdoc(documented) or ""
