"""Settings that are secrets: whatever records a config has asterisks in their place."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Secret, SecretStr

REDACTED = "**********"
_CREDENTIALS = re.compile(r"(?<=://).*@")


class SecretUrl(Secret[str]):
    """An address whose credentials, `s3://KEY:SECRET@bucket`, are a secret."""

    def _display(self) -> str:
        return self.without_credentials(self.get_secret_value())

    def without_credentials(self, text: str) -> str:
        """A text that may show the address, fit to be shown."""
        url = self.get_secret_value()
        return text.replace(url, _CREDENTIALS.sub(f"{REDACTED}@", url))


def secrets_of(config: BaseModel) -> dict[str, Any]:
    """Secrets alone, in the clear, in the config's own nesting."""
    return _revealed(config.model_dump())


def fill_in(values: Mapping[str, Any], secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a config, with the secrets where they have been redacted."""
    return {name: _filled_in(value, secrets.get(name)) for name, value in values.items()}


def redacted_settings(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of settings whose values have asterisks instead of a secret."""
    names = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            names += redacted_settings(value, f"{prefix}{name}.")
        elif isinstance(value, str) and REDACTED in value:
            names.append(prefix + name)
    return names


def _revealed(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if isinstance(value, SecretStr | SecretUrl):
            text = value.get_secret_value()
            if REDACTED in str(value):
                found[name] = text
        elif isinstance(value, Mapping) and (inner := _revealed(value)):
            found[name] = inner
    return found


def _filled_in(value: Any, secret: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(secret, Mapping):
        return fill_in(value, secret)
    if isinstance(value, str) and REDACTED in value and secret is not None:
        return secret
    return value
