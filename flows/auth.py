"""The password of the servers that refrain starts. Both need one: Prefect's flows run code, and
MLflow reads and writes files."""

import os
import secrets
from pathlib import Path

from refrain.engines.private import read_secret

ASKED, GIVEN = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
"""Environment variables with the password that the server requires, and that clients send."""
MLFLOW_ASKED = "REFRAIN_MLFLOW_AUTH_STRING"
"""Environment variable with the `user:password` of MLflow's server (`flows.mlflow_app`)."""
ORIGINS = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
"""Environment variable with the origins whose pages may read the server's responses (CORS)."""


def use_password(runs_dir: Path) -> None:
    """Give one password to the servers and clients that this process starts: the one in the
    environment if there is one, else the password of the runs."""
    password = os.environ.get(ASKED) or os.environ.get(GIVEN) or read_password(runs_dir)
    for name in (ASKED, GIVEN):
        os.environ[name] = os.environ.get(name) or password


def mlflow_password() -> str:
    """Return the `user:password` of MLflow's server: Prefect's password, unless the environment
    has another. Call `use_password` first."""
    prefects = os.environ[ASKED]
    return os.environ.get(MLFLOW_ASKED) or (prefects if ":" in prefects else f"refrain:{prefects}")


def mlflow_login() -> dict[str, str]:
    """Return the environment variables with which MLflow's clients send `mlflow_password`."""
    user, _, password = mlflow_password().partition(":")
    return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def read_password(runs_dir: Path) -> str:
    """Return the password of the runs, `user:password`. The first call makes it. Raise ValueError
    when the file has no usable password."""
    file = password_file(runs_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    password = read_secret(file, lambda: f"refrain:{secrets.token_urlsafe(32)}\n")
    # Prefect answers 500 to a password that is not printable ASCII.
    if not (password and password.isascii() and password.isprintable()):
        raise ValueError(
            f"{file} has no password, which is one line in ASCII, for example refrain:PASSWORD. "
            "Write one, or delete the file: then a new one is made"
        )
    return password


def password_file(runs_dir: Path) -> Path:
    return runs_dir / ".prefect" / "auth"


def password_place(runs_dir: Path) -> str:
    """Return the file or the environment variable that has the servers' password. Call
    `use_password` first."""
    file = password_file(runs_dir)
    is_file = file.exists() and file.read_text().strip() == os.environ[ASKED]
    return str(file) if is_file else ASKED


def refusal(url: object) -> ValueError:
    """Return the error for a server that wants another password."""
    return ValueError(
        f"Prefect's server refuses {url}: set {GIVEN} to the server's password, which "
        "`refrain ui` keeps in RUNS_DIR/.prefect/auth"
    )
