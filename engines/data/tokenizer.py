"""Load the tokenizer of a model directory, without running code from it unless it is trusted."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.data.template import templates

SETTING = "model.trust_remote_code"
TOKENIZER_FILE = "tokenizer.json"


def open_tokenizer(path: Path, *, trust_remote_code: bool, try_first: bool = True) -> Any:
    """Return the tokenizer of a local Hugging Face directory. Raises ValueError when there is none,
    or when it needs code that is not trusted.

    `try_first`: first load it in a process with limits, unless the caller has done so before.
    """
    with naming_code(path):
        from transformers import AutoTokenizer

        try:
            if try_first and (path / TOKENIZER_FILE).is_file():
                templates.try_tokenizer(path / TOKENIZER_FILE)
            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # The tokenizers library raises plain exceptions.
            raise ValueError(f"{path} holds no tokenizer that can be read: {error}") from error


@contextmanager
def naming_code(path: Path) -> Generator[None]:
    """Replace errors of transformers that ask for `trust_remote_code` by refrain's setting."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{path} comes with Python code of its own, which must run to load it. Read that code. "
            f"If you trust it, set {SETTING}=true (refrain profile: --trust-remote-code)"
        ) from error
