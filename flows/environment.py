"""Settings of the services that come with a run. Import before Prefect, MLflow, Ray and vLLM."""

import os
from pathlib import Path

_QUIET = {
    # Nothing reports home, nothing asks the internet.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own 15 would let every bit of bookkeeping go before the engines where they share cores.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def quieten() -> None:
    """No telemetry, no network, no chatter; what is set already stays."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def use_embedded_services(runs_dir: Path) -> None:
    """Prefect's database beside the runs, unless PREFECT_API_URL names a server."""
    quieten()
    home = (runs_dir / ".prefect").absolute()
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home))
    # Result storage does not follow PREFECT_HOME.
    os.environ.setdefault("PREFECT_LOCAL_STORAGE_PATH", str(home / "storage"))
    os.environ.setdefault("PREFECT_MEMO_STORE_PATH", str(home / "memo_store.toml"))
    # On a busy machine the embedded server takes more than Prefect's own 20 s to come up.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "300")
