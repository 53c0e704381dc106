"""The date of a run's start. Chat templates and scorers use it, also when the run is resumed on
another day."""

from datetime import datetime

from refrain.schemas.config import TrainConfig
from refrain.schemas.inputs import DataConfig
from refrain.tasks.run.config_record import CONFIG_FILE, read_values


def dated(config: TrainConfig, resume: bool) -> TrainConfig:
    """Return the config with a date: its own, else that of the resumed run, else the current one.
    Raise ValueError when the recorded config of the run is damaged."""
    file = config.run_dir / CONFIG_FILE
    recorded = read_values(file)["data"] if resume and file.exists() else {}
    date = config.data.date or recorded.get("date") or datetime.now().replace(microsecond=0)
    data = DataConfig.model_validate(config.data.model_dump() | {"date": date})
    return config.model_copy(update={"data": data})
