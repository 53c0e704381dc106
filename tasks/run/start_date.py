"""The date and the locale of a run's start. Chat templates and scorers use them, also when the run
is resumed on another day or machine."""

import os
from datetime import datetime
from pathlib import Path

from engines.reward.process import locale_of
from schemas.config import TrainConfig
from schemas.inputs import DataConfig
from tasks.run.config_record import CONFIG_FILE, read_values


def dated(config: TrainConfig, resume: bool) -> TrainConfig:
    """Return the config with a date and a locale: its own, else those of the resumed run, else the
    current ones. Raise ValueError when the recorded config of the run is damaged."""
    given = config.data.model_dump(include={"date", "locale"}, exclude_none=True)
    file = config.run_dir / CONFIG_FILE
    recorded = read_values(file)["data"] if resume and file.exists() else {}
    kept = {name: recorded[name] for name in ("date", "locale") if recorded.get(name) is not None}
    now = {"date": datetime.now().replace(microsecond=0), "locale": _locale()}
    data = DataConfig.model_validate(config.data.model_dump() | now | kept | given)
    return config.model_copy(update={"data": data})


def _locale() -> dict[str, str]:
    """Return this process's locale, with the name of the time zone if it has one."""
    _, _, zone = str(Path("/etc/localtime").resolve()).partition("zoneinfo/")
    return ({"TZ": zone} if zone else {}) | locale_of(os.environ)
