"""Converts names and texts to forms that MLflow accepts. Pure.

Names come from users: a `data_source`, a scorer's numbers, files. In the name of a metric, a
parameter or a tag, MLflow allows letters, digits, `_`, `-`, `.`, `:`, spaces and slashes. The name
must be a plain relative path. For example:

    validation/openai/gsm8k/mean_at_4     unchanged
    validation/math (v2)/mean_at_4        validation/math _v2_-2b2d07ad/mean_at_4
"""

import re
from hashlib import sha256

MAX_NAME_CHARACTERS = 250
MAX_TAG_CHARACTERS = 8_000
MAX_PARAMETER_CHARACTERS = 6_000
MAX_DATASET_CHARACTERS = 500
"""MLflow's limits."""
MAX_EXPERIMENT_CHARACTERS = 490
"""MLflow's limit, with room for the number of a successor."""
_LONGEST_FIGURE = 60
"""Most characters of a name's last part to keep behind the digest."""
_REFUSED = re.compile(r"[^\w\-. :/]")
_DIGITS = 8


def tracked_name(name: str) -> str:
    """Return the name if MLflow accepts it, else the nearest accepted name with a digest.

    The digest keeps two different names apart. Applying the function twice changes nothing.
    """
    allowed = "/".join(map(_allowed_part, name.split("/")))
    if allowed.startswith(".."):
        allowed = f"__{allowed[2:]}"
    if allowed == name and len(name) <= MAX_NAME_CHARACTERS:
        return name
    (head, slash, last), raw = allowed.rpartition("/"), name.rpartition("/")
    if last != raw[-1] or len(last) > _LONGEST_FIGURE:
        (head, slash, last), raw = (allowed, "", ""), (name, "", "")
    room = MAX_NAME_CHARACTERS - len(slash + last) - _DIGITS - 1
    return f"{head[:room]}-{digest(raw[0])}{slash}{last}"


def tracked_text(text: str, max_characters: int) -> str:
    """Return the text without characters that no database holds, cut to the limit."""
    whole = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return whole if len(whole) <= max_characters else f"{whole[: max_characters - 3]}..."


def distinct_text(text: str, max_characters: int) -> str:
    """Return the text as `tracked_text`, but add a digest that keeps cut names different."""
    whole = tracked_text(text, len(text) * 10)
    if whole == text and len(whole) <= max_characters:
        return text
    return f"{whole[: max_characters - _DIGITS - 1]}-{digest(text)}"


def digest(text: str) -> str:
    """Return a few hexadecimal digits that identify this text."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _allowed_part(part: str) -> str:
    """Return an allowed part of a path: not empty, and not "." or ".."."""
    return "_" * max(1, len(part)) if part in ("", ".", "..") else _REFUSED.sub("_", part)
