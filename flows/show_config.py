"""`refrain config`: print a run's effective config, the reference pages or the JSON schema."""

import json
from collections.abc import Sequence
from pathlib import Path

from refrain.engines.accounting.metric_names import SAME, SECTIONS, Metric
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.resume import OnResume
from refrain.schemas.settings import (
    DeclaredSetting,
    declared_settings,
    described_default,
    described_values,
)

_HEADER = """# Configuration

All settings of `refrain train`. [The schemas](../schemas/config.py) declare them. `refrain config
--reference` prints this page. `refrain config --schema` prints a JSON schema for your editor. Names
are dotted, as in overrides, for example `trainer.learning_rate=2e-6`. You can change a *Free*
setting when you resume a run. You can also change a *Rounding* setting: then weights differ by
rounding errors from there on. You cannot change the others, because they decide on the tokens or
the order of the data.
"""
_METRICS_HEADER = """# Metrics

The metrics that a run logs in MLflow and in the view `step_metrics` of its store. [The
code](../engines/accounting/metric_names.py) declares them. `refrain config --metrics` prints this
page. The last column has veRL's name of the metric, or *same* when it has the same name there.
Names in braces are placeholders, for example for a data source. Metrics without a unit have none,
or the reward's. Means over tokens are over the tokens trained on, and over all updates of a step.
"""
_ON_RESUME = {OnResume.FREE: " *Free.*", OnResume.ROUNDING: " *Rounding.*"}


def launch_config(
    config_file: str | None,
    overrides: Sequence[str],
    *,
    schema: bool,
    reference: bool,
    metrics: bool,
    api: bool,
) -> None:
    """Print the effective config as YAML, the JSON schema, or the page about settings, metrics or
    the Python API. Raise ValueError for a bad config."""
    if schema:
        print(json.dumps(TrainConfig.model_json_schema(), indent=2))
        return
    if reference:
        print(reference_page(), end="")
        return
    if metrics:
        print(metrics_page(), end="")
        return
    if api:
        from refrain.flows.show_api import api_page

        print(api_page(), end="")
        return
    if config_file is None:
        raise ValueError("give a config file, --schema, --reference, --metrics or --api")
    import yaml

    config = load_config(Path(config_file), overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")


def reference_page() -> str:
    """Return all settings as Markdown, with a table for each section."""
    settings = list(declared_settings(TrainConfig))
    sections = [""] + [setting.name for setting in settings if setting.is_section]
    return _HEADER + "".join(_section(name, settings) for name in sections)


def metrics_page() -> str:
    """Return all metrics as Markdown, with a table for each group."""
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
