"""The version of refrain, and the warning about names that the next one refuses."""

VERSION = "0.2.0"
"""As in pyproject.toml."""


class OldNameWarning(FutureWarning):
    """A config has the old name of a setting, which the next minor version refuses."""
