"""A run's config in its directory, with the secrets in a separate file.

    config.json     asterisks instead of secrets, so you can show and copy it
    secrets.json    the secrets, mode 0600; missing if there are none

With both files, `refrain train --resume NAME` needs nothing else. Users and scripts resume a run
days later, and other processes attach to it. If they had to give the keys each time, the keys would
end up in shell histories and crontabs. To keep a key off the disk, use an environment variable.
"""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from refrain.engines.durable import write_durably
from refrain.engines.user_files import read_json_object
from refrain.schemas.removed_settings import current_settings
from refrain.schemas.secret import fill_in, redacted_settings, secrets_of
from refrain.tasks.run.find import CONFIG_FILE

SECRETS_FILE = "secrets.json"


def write_config(run_dir: Path, config: BaseModel) -> None:
    """Write both files. Raise OSError on a full disk, and leave the file unchanged."""
    file = run_dir / SECRETS_FILE
    if secrets := secrets_of(config):
        write_durably(file, json.dumps(secrets, indent=2), mode=0o600)
    else:
        file.unlink(missing_ok=True)
    write_durably(run_dir / CONFIG_FILE, config.model_dump_json(indent=2))


def read_values(config_file: Path) -> dict[str, Any]:
    """Return the values of a recorded config under their current names, with the secrets if this
    user may read them."""
    return with_secrets(config_file, current_settings(read_json_object(config_file)))


def with_secrets(config_file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Add the secrets beside `config_file` to values that were read from it."""
    file = config_file.with_name(SECRETS_FILE)
    if config_file.name != CONFIG_FILE or not os.access(file, os.R_OK):
        return values
    return fill_in(values, read_json_object(file))


def refuse_redacted(config: BaseModel) -> None:
    """Raise ValueError for a config that has asterisks instead of a secret."""
    secrets = fill_in(config.model_dump(mode="json"), secrets_of(config))
    if names := redacted_settings(secrets):
        raise ValueError(
            f"{', '.join(names)}: the value is redacted, as in every record of a run, and you can "
            f"read no {SECRETS_FILE} that has it: give it in the config file"
        )
