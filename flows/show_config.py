"""A config as a run would have it, and what a config may say: for people and for editors."""

import json
from collections.abc import Sequence
from pathlib import Path

from engines.accounting.metric_names import SAME, SECTIONS, Metric
from flows.config_file import load_config
from schemas.config import TrainConfig
from schemas.resume import OnResume
from schemas.settings import (
    DeclaredSetting,
    declared_settings,
    described_default,
    described_values,
)

_HEADER = """# Configuration

Every setting of `refrain train`, as [the schemas](../schemas/config.py) declare it. `refrain config
--reference` prints this page, `refrain config --schema` the JSON schema for an editor. Names are
dotted, as in overrides. Where nothing is said on resuming, a run that is resumed keeps the setting:
it decides on tokens or on the order of data. *Free*: it may be another one then. *Rounding*: it
may, and weights differ by rounding from there on.
"""
_METRICS_HEADER = """# Metrics

What a run logs, in MLflow and in the view `step_metrics` of its store, as [the
code](../engines/accounting/metric_names.py) declares it; `refrain config --metrics` prints this
page. The last column has veRL's name of the same figure, *same* where it is this one. Names in
braces stand for what a run brings along. Where no unit is said there is none, or it is the
reward's. Means over tokens are over those trained on, and over a step's updates.
"""
_ON_RESUME = {OnResume.FREE: " *Free.*", OnResume.ROUNDING: " *Rounding.*"}


def launch_config(
    config_file: str | None,
    overrides: Sequence[str],
    *,
    schema: bool,
    reference: bool,
    metrics: bool,
) -> None:
    """Print the effective config as YAML, the schema of all configs as JSON, the page about them,
    or that about metrics. Raises ValueError."""
    if schema:
        print(json.dumps(TrainConfig.model_json_schema(), indent=2))
        return
    if reference:
        print(reference_page(), end="")
        return
    if metrics:
        print(metrics_page(), end="")
        return
    if config_file is None:
        raise ValueError("give a config file, --schema, --reference or --metrics")
    import yaml

    config = load_config(Path(config_file), overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")


def reference_page() -> str:
    """All settings as Markdown, a table for each section."""
    settings = list(declared_settings(TrainConfig))
    sections = [""] + [setting.name for setting in settings if setting.is_section]
    return _HEADER + "".join(_section(name, settings) for name in sections)


def metrics_page() -> str:
    """All metrics as Markdown, a table for each group."""
    return _METRICS_HEADER + "".join(_metrics(*section) for section in SECTIONS.items())


def _metrics(title: str, metrics: Sequence[Metric]) -> str:
    rows = "".join(f"| {' | '.join(_metric_cells(metric))} |\n" for metric in metrics)
    return f"\n## {title}\n\n| metric | unit | is | veRL |\n|---|---|---|---|\n{rows}"


def _metric_cells(metric: Metric) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in metric.names.split(", "))
    verl = f"`{metric.verl}`" if metric.verl and metric.verl != SAME else metric.verl
    return names, metric.unit, metric.meaning, verl


def _section(name: str, settings: Sequence[DeclaredSetting]) -> str:
    own = [one for one in settings if one.name.rpartition(".")[0] == name and not one.is_section]
    about = next((_text(one) for one in settings if one.name == name), "")
    title = name or "The run"
    rows = "".join(f"| {' | '.join(_cells(one))} |\n" for one in own)
    said = f"{about}\n\n" if about else ""
    return f"\n## {title}\n\n{said}| setting | values | default | |\n|---|---|---|---|\n{rows}"


def _cells(setting: DeclaredSetting) -> tuple[str, str, str, str]:
    last, default = setting.name.rpartition(".")[2], described_default(setting.field)
    return (
        f"`{last}`",
        described_values(setting.field),
        f"`{default}`" if default else "must be given",
        _text(setting) + _ON_RESUME.get(setting.on_resume or OnResume.KEPT, ""),
    )


def _text(setting: DeclaredSetting) -> str:
    return " ".join((setting.field.description or "").split()).replace("|", "\\|")
