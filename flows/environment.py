"""Environment variables for a run's services. Import before Prefect, MLflow, Ray and vLLM."""

import os
from pathlib import Path

from refrain.engines.machine.cuda import cuda_build, device_files
from refrain.engines.private import tighten, use_private_kernels, use_private_umask
from refrain.flows.auth import ORIGINS, use_password

_QUIET = {
    # No telemetry, and no access to the internet.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # Prefect's pages have the log. The terminal shows progress in its own way.
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # With Ray's default 15, bookkeeping processes would run before the engines on shared cores.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
LOOPBACK = {
    # Despite its name, this keeps Ray on 127.0.0.1 on every system. Its servers use the node's
    # address, and Ray replaces an explicit 127.0.0.1 by the machine's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Otherwise torch listens on the address of the machine's name, and NCCL on a network card.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # Two of Ray's servers show metrics to every user of the machine. Port -1 turns them off.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    # A local cluster uses this mode by default, but a second process that joins it must set it.
    "RAY_AUTH_MODE": "token",
}
"""Environment of a run without a cluster (RAY_ADDRESS)."""

_RETRIES = "PREFECT_CLIENT_MAX_RETRIES"
_PATIENT = {
    # At the end of a step, a flow waits up to 2 + 4 + ... + 256 s for Prefect's server.
    _RETRIES: "8",
    # Records for MLflow wait in the run's directory, so give up early and try again later.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Settings for servers that go away in the middle of a run and come back."""
_SELDOM = {
    # SQLite refuses a write when another write came after its read. A new flow then waits 2 s
    # before it tries again. By default, each event of a task is such a write.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1000",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "1000",
}
"""Settings with which Prefect's server writes task events to SQLite in batches."""


def quieten() -> None:
    """Turn off telemetry, downloads and chatty logs, and set retries. Keep variables that are set.

    Without a cluster (RAY_ADDRESS), services listen on this machine only.
    """
    alone = os.environ.get("RAY_ADDRESS", "local") == "local"
    for name, value in (_QUIET | _PATIENT | (LOOPBACK if alone else {})).items():
        os.environ.setdefault(name, value)
    use_private_kernels(make=False)


def use_embedded_services(runs_dir: Path) -> None:
    """Put Prefect's database beside the runs. Set a password, unless PREFECT_API_URL is set.

    This makes a directory, so call it after all checks.
    """
    set_services(runs_dir)
    use_private_umask()
    own = runs_dir / ".prefect"
    own.mkdir(parents=True, exist_ok=True)
    # Prefect's database stores the values of forms, which may be secret.
    tighten(own, umask=0o077)
    if not os.environ.get("PREFECT_API_URL"):
        use_password(runs_dir)


def set_services(runs_dir: Path) -> None:
    """Apply the settings of `use_embedded_services` that change nothing on disk."""
    if not os.environ.get("PREFECT_API_URL"):
        # The run's own server is back within seconds, or not before a resume.
        os.environ.setdefault(_RETRIES, "5")
    quieten()
    if os.environ.get("RAY_ADDRESS", "local") == "local" and device_files() and not cuda_build():
        # Otherwise a local Ray would reserve GPUs that the CPU build cannot use.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    home = (runs_dir / ".prefect").absolute()
    places = {
        "PREFECT_HOME": str(home),
        # Result storage does not follow PREFECT_HOME.
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        # On a busy machine the embedded server needs more than Prefect's default of 20 s.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        # The embedded server has no pages, so no page may read its responses.
        ORIGINS: "",
    }
    for name, value in (places | _SELDOM).items():
        os.environ.setdefault(name, value)
