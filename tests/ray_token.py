"""A token for clusters that tests start with `ray.cluster_utils`."""

import os
import secrets


def make_token() -> None:
    """Set a token, unless there is one. `ray.init` makes one for a local Ray, but nodes of
    `ray.cluster_utils` die without one."""
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
