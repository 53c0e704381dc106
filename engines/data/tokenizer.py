"""Load the tokenizer of a model directory, without running code from it unless it is trusted."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

_KEPT_PIECES = 2**16
SETTING = "model.trust_remote_code"
TOKENIZER_FILE = "tokenizer.json"
_UNFINISHED = "\ufffd"
"""End of a text whose last character lacks bytes."""
_MAX_CHARACTER_TOKENS = 4
"""Most tokens of a character: it has at most four bytes in UTF-8."""


def open_tokenizer(path: Path, *, trust_remote_code: bool, try_first: bool = True) -> Any:
    """Return the tokenizer of a local Hugging Face directory. Raises ValueError when there is none,
    or when it needs code that is not trusted.

    `try_first`: first load it in a process with limits, unless the caller has done so before.
    """
    with naming_code(path):
        from transformers import AutoTokenizer

        from refrain.engines.data.template import templates

        try:
            if try_first and (path / TOKENIZER_FILE).is_file():
                templates.try_tokenizer(path / TOKENIZER_FILE)
            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # The tokenizers library raises plain exceptions.
            raise ValueError(f"{path} holds no tokenizer that can be read: {error}") from error


class TokenDecoder:
    """The text of a model's tokens, special ones included. It loads no transformers, which takes
    seconds."""

    def __init__(self, model: Path) -> None:
        """Raise ValueError when the directory has no tokenizer.json that can be read."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(model / TOKENIZER_FILE))
        except Exception as error:  # The tokenizers library raises plain exceptions.
            raise ValueError(f"{model / TOKENIZER_FILE} cannot be read: {error}") from error
        self._added = lru_cache(_KEPT_PIECES)(self._added_text)

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each list of token ids."""
        return self._tokenizer.decode_batch(list(responses), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text. Of tokens that share a character, the last one
        has it. The pieces are independent of the tokens after them."""
        pieces, before, start = [], 0, 0
        for end in range(1, len(ids) + 1):
            added = self._added(tuple(ids[before:start]), tuple(ids[start:end]))
            is_whole = not added.endswith(_UNFINISHED) or end - start >= _MAX_CHARACTER_TOKENS
            if is_whole or end == len(ids):
                before, start = start, end
                pieces.append(added)
            else:
                pieces.append("")
        return pieces

    def _added_text(self, before: tuple[int, ...], tokens: tuple[int, ...]) -> str:
        """Return what these tokens add to the text of the tokens before."""
        known, text = self.decode([before, before + tokens])
        return text[len(known) :]


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
