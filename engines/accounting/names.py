"""Names and texts as MLflow takes them. Pure.

Names come from users: a `data_source`, what a scorer calls its numbers, files. MLflow allows
letters, digits, `_`, `-`, `.`, `:`, spaces and slashes in the name of a metric, a parameter or a
tag, and only names that are a plain relative path. For example:

    validation/openai/gsm8k/mean_at_4     as it is
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
"""The same, with room for the number of a successor."""
_LONGEST_FIGURE = 60
"""Characters of a name's last part that are kept behind the digest, at most."""
_REFUSED = re.compile(r"[^\w\-. :/]")
_DIGITS = 8


def tracked_name(name: str) -> str:
    """The name itself where MLflow takes it. Otherwise the nearest that it takes, with a digest of
    the whole, so that two names stay two. Applied twice it changes nothing."""
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
    """The text without what no database holds, cut where it is too long."""
    whole = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return whole if len(whole) <= max_characters else f"{whole[: max_characters - 3]}..."


def distinct_text(text: str, max_characters: int) -> str:
    """The same for a name that may hold anything: two that are cut stay two."""
    whole = tracked_text(text, len(text) * 10)
    if whole == text and len(whole) <= max_characters:
        return text
    return f"{whole[: max_characters - _DIGITS - 1]}-{digest(text)}"


def digest(text: str) -> str:
    """A few digits that tell this text from others."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _allowed_part(part: str) -> str:
    """A part of a path, which must not be empty nor lead anywhere else."""
    return "_" * max(1, len(part)) if part in ("", ".", "..") else _REFUSED.sub("_", part)
