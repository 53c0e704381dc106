"""A run's config in its directory: for all, with asterisks for secrets, and the secrets apart.

    config.json     what may be shown, copied, sent along with a question
    secrets.json    mode 0600, where there are secrets: `refrain train --resume NAME` needs no more

A run is resumed by its name alone, days later, by a person or by what watches over it, and other
processes attach to it: a key that had to be given anew each time would stand in shell histories and
crontabs instead. Who must not have it on a disk leaves it in an environment variable.
"""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from engines.durable import write_durably
from engines.reading import read_json_object
from schemas.secret import fill_in, redacted_settings, secrets_of

CONFIG_FILE = "config.json"
SECRETS_FILE = "secrets.json"


def write_config(run_dir: Path, config: BaseModel) -> None:
    """Write both files. Raises OSError on a full disk; then each is as it was."""
    file = run_dir / SECRETS_FILE
    if secrets := secrets_of(config):
        write_durably(file, json.dumps(secrets, indent=2), mode=0o600)
    else:
        file.unlink(missing_ok=True)
    write_durably(run_dir / CONFIG_FILE, config.model_dump_json(indent=2))


def read_values(config_file: Path) -> dict[str, Any]:
    """Plain values of a config that was recorded, with the secrets that this user may read."""
    return with_secrets(config_file, read_json_object(config_file))


def with_secrets(config_file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Values that were read from this file, with the secrets beside it."""
    file = config_file.with_name(SECRETS_FILE)
    if config_file.name != CONFIG_FILE or not os.access(file, os.R_OK):
        return values
    return fill_in(values, read_json_object(file))


def refuse_redacted(config: BaseModel) -> None:
    """Raises ValueError for a config that has asterisks where a secret belongs."""
    secrets = fill_in(config.model_dump(mode="json"), secrets_of(config))
    if names := redacted_settings(secrets):
        raise ValueError(
            f"{', '.join(names)}: the value was redacted, as in every record of a run, and no "
            f"{SECRETS_FILE} that you may read has it: give it in the config file"
        )
