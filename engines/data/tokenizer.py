"""The tokenizer of a model directory, and what it may not do: run code that comes with it."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.data.template import templates

SETTING = "model.trust_remote_code"
TOKENIZER_FILE = "tokenizer.json"


def open_tokenizer(path: Path, *, trust_remote_code: bool, try_first: bool = True) -> Any:
    """Return the tokenizer of a local Hugging Face directory. Raises ValueError when there is none,
    or it is made by code that is not trusted.

    `try_first`: in a process with limits, where nobody has yet.
    """
    with naming_code(path):
        from transformers import AutoTokenizer

        try:
            if try_first and (path / TOKENIZER_FILE).is_file():
                templates.try_tokenizer(path / TOKENIZER_FILE)
            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # The tokenizers' library has no class of its own for errors.
            raise ValueError(f"{path} holds no tokenizer that can be read: {error}") from error


@contextmanager
def naming_code(path: Path) -> Generator[None]:
    """Name refrain's own setting where transformers asks for one of its own."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{path} comes with Python code of its own, which must run to load it. Read that code; "
            f"where you trust it, set {SETTING}=true (refrain profile: --trust-remote-code)"
        ) from error
