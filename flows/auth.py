"""The password of the servers that refrain starts: Prefect's, whose flows run code, and MLflow's,
which reads and writes files."""

import os
import secrets
from pathlib import Path

from engines.private import read_secret

ASKED, GIVEN = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
"""Environment variables: what a server asks for, what clients give."""
MLFLOW_ASKED = "REFRAIN_MLFLOW_AUTH_STRING"
"""Environment variable: `user:password` that MLflow's server asks for (`flows.mlflow_app`)."""
ORIGINS = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
"""Environment variable: pages whose scripts may read a server's answers."""


def use_password(runs_dir: Path) -> None:
    """Let servers and clients that this process starts have one password: what one of their
    variables says already, else that of the runs."""
    password = os.environ.get(ASKED) or os.environ.get(GIVEN) or read_password(runs_dir)
    for name in (ASKED, GIVEN):
        os.environ[name] = os.environ.get(name) or password


def mlflow_password() -> str:
    """Return what MLflow's server asks for, `user:password`: Prefect's password, after
    `use_password`, unless the environment has another."""
    prefects = os.environ[ASKED]
    return os.environ.get(MLFLOW_ASKED) or (prefects if ":" in prefects else f"refrain:{prefects}")


def mlflow_login() -> dict[str, str]:
    """Return the environment in which MLflow's clients log in to a server of `mlflow_password`."""
    user, _, password = mlflow_password().partition(":")
    return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def read_password(runs_dir: Path) -> str:
    """Read the password of the runs, `user:password`; the first to ask makes it. Raises ValueError
    for a file that cannot be used."""
    file = password_file(runs_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    password = read_secret(file, lambda: f"refrain:{secrets.token_urlsafe(32)}\n")
    # Prefect answers 500 to whoever gives another.
    if not (password and password.isascii() and password.isprintable()):
        raise ValueError(
            f"{file} has no password of one line in ASCII, as in refrain:PASSWORD: write one, or "
            "delete the file to have it made"
        )
    return password


def password_file(runs_dir: Path) -> Path:
    return runs_dir / ".prefect" / "auth"


def password_place(runs_dir: Path) -> str:
    """File or variable with what servers ask for, after `use_password`."""
    file = password_file(runs_dir)
    is_file = file.exists() and file.read_text().strip() == os.environ[ASKED]
    return str(file) if is_file else ASKED


def refusal(url: object) -> ValueError:
    """Error of a server that wants another password."""
    return ValueError(
        f"Prefect's server refuses {url}: set {GIVEN} to the password that it asks for, which "
        "`refrain ui` keeps in RUNS_DIR/.prefect/auth"
    )
