"""Settings that are secrets. Records of a config show asterisks in their place."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Secret, SecretStr

REDACTED = "**********"
_CREDENTIALS = re.compile(r"(?<=://).*@")


class SecretUrl(Secret[str]):
    """An address with secret credentials, `s3://KEY:SECRET@bucket`."""

    def _display(self) -> str:
        return self.without_credentials(self.get_secret_value())

    def without_credentials(self, text: str) -> str:
        """Return the text with the credentials replaced wherever it contains the address."""
        url = self.get_secret_value()
        return text.replace(url, _CREDENTIALS.sub(f"{REDACTED}@", url))


def secrets_of(config: BaseModel) -> dict[str, Any]:
    """Return only the secrets, in plain text, nested as in the config."""
    return _revealed(config.model_dump())


def fill_in(values: Mapping[str, Any], secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config with secrets in place of the asterisks."""
    return {name: _filled_in(value, secrets.get(name)) for name, value in values.items()}


def redacted_settings(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of settings with asterisks in place of a secret."""
    names = []
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = _numbered(value)
        if isinstance(value, Mapping):
            names += redacted_settings(value, f"{prefix}{name}.")
        elif isinstance(value, str) and REDACTED in value:
            names.append(prefix + name)
    return names


def _revealed(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = _numbered(value)
        if isinstance(value, SecretStr | SecretUrl):
            text = value.get_secret_value()
            if REDACTED in str(value):
                found[name] = text
        elif isinstance(value, Mapping) and (inner := _revealed(value)):
            found[name] = inner
    return found


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    """Return the members of a list by their place, which JSON can store as a name."""
    return {str(at): value for at, value in enumerate(values)}


def _filled_in(value: Any, secret: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(secret, Mapping):
        return fill_in(value, secret)
    if isinstance(value, list | tuple) and isinstance(secret, Mapping):
        return list(fill_in(_numbered(value), secret).values())
    if isinstance(value, str) and REDACTED in value and secret is not None:
        return secret
    return value
