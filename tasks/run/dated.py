"""The date and the locale that a run keeps: chat templates and scorers see those of its start, on
whatever day and machine it goes on."""

import os
from datetime import datetime
from pathlib import Path

from engines.reward.process import locale_of
from schemas.config import TrainConfig
from schemas.inputs import DataConfig
from tasks.run.config_record import CONFIG_FILE, read_values


def dated(config: TrainConfig, resume: bool) -> TrainConfig:
    """The same config with the date and the locale that it names, or those of the run that is
    resumed, or those of now and here. Raises ValueError for a damaged record of that run."""
    given = config.data.model_dump(include={"date", "locale"}, exclude_none=True)
    file = config.run_dir / CONFIG_FILE
    recorded = read_values(file)["data"] if resume and file.exists() else {}
    kept = {name: recorded[name] for name in ("date", "locale") if recorded.get(name) is not None}
    now = {"date": datetime.now().replace(microsecond=0), "locale": _locale()}
    data = DataConfig.model_validate(config.data.model_dump() | now | kept | given)
    return config.model_copy(update={"data": data})


def _locale() -> dict[str, str]:
    """This process's locale, with the time zone by its name, where it has one."""
    _, _, zone = str(Path("/etc/localtime").resolve()).partition("zoneinfo/")
    return ({"TZ": zone} if zone else {}) | locale_of(os.environ)
