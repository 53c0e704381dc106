"""Settings of the services that come with a run. Import before Prefect, MLflow, Ray and vLLM."""

import os
from pathlib import Path

from engines.machine.cuda import device_files, torch_build
from engines.private import tighten, use_private_kernels, use_private_umask
from flows.auth import ORIGINS, use_password

_QUIET = {
    # Nothing reports home, nothing asks the internet.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # A run's log is on its pages; the terminal shows it in its own way.
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own 15 would let every bit of bookkeeping go before the engines where they share cores.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
LOOPBACK = {
    # What keeps Ray on 127.0.0.1 on any system, for all its name: its servers take their address
    # from the node's, and an address of 127.0.0.1 that is given to it is replaced by the machine's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Else torch listens where the machine's name leads, and NCCL on a network card.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # Else every user reads what two of Ray's servers count: at a port that is none nobody listens.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    # As a cluster of one's own has it by default; a second process that joins it must be told.
    "RAY_AUTH_MODE": "token",
}
"""Environment of a run for which RAY_ADDRESS names no cluster."""

_RETRIES = "PREFECT_CLIENT_MAX_RETRIES"
_PATIENT = {
    # A flow waits for Prefect's server as long as 2 + 4 + ... + 256 s at the end of a step.
    _RETRIES: "8",
    # Records for MLflow wait in the run's directory: better to try again than to hang.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""A server that goes away in mid-run and comes back."""
_SELDOM = {
    # SQLite refuses to write what was read before another write; a flow that is made just then
    # waits 2 s before it tries again. By default each event of a task is such a write.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "1000",
}
"""How often a server of Prefect with an SQLite file writes down what tasks do."""


def quieten() -> None:
    """No telemetry, no network, no chatter, and patience; what is set already stays.

    Without a cluster (RAY_ADDRESS) nothing listens beyond this machine.
    """
    alone = os.environ.get("RAY_ADDRESS", "local") == "local"
    for name, value in (_QUIET | _PATIENT | (LOOPBACK if alone else {})).items():
        os.environ.setdefault(name, value)
    use_private_kernels(make=False)


def use_embedded_services(runs_dir: Path) -> None:
    """Prefect's database beside the runs, and a password, unless PREFECT_API_URL names a server.
    Makes the directory: call it when everything has been checked."""
    set_services(runs_dir)
    use_private_umask()
    own = runs_dir / ".prefect"
    own.mkdir(parents=True, exist_ok=True)
    # Prefect's database has what was typed into forms.
    tighten(own, umask=0o077)
    if not os.environ.get("PREFECT_API_URL"):
        use_password(runs_dir)


def set_services(runs_dir: Path) -> None:
    """The settings of `use_embedded_services` that change nothing on disk."""
    if not os.environ.get("PREFECT_API_URL"):
        # One of the run's own is there again within seconds, or not before a resume.
        os.environ.setdefault(_RETRIES, "5")
    quieten()
    if os.environ.get("RAY_ADDRESS", "local") == "local" and device_files() and not torch_build():
        # Else a Ray of one's own would set GPUs aside that the CPU build cannot use.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    home = (runs_dir / ".prefect").absolute()
    places = {
        "PREFECT_HOME": str(home),
        # Result storage does not follow PREFECT_HOME.
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        # On a busy machine the embedded server takes more than Prefect's own 20 s to come up.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        # It has no pages, and those of others have no business with it.
        ORIGINS: "",
    }
    for name, value in (places | _SELDOM).items():
        os.environ.setdefault(name, value)
