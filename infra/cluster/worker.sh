#!/usr/bin/env bash
# Join the Ray cluster as a node that lends nothing, put up the deployments, run flows.
# Environment: RAY_HEAD (host:port), RAY_AUTH_TOKEN, PREFECT_API_URL, MLFLOW_TRACKING_URI, RUNS_DIR;
# OBJECT_STORE_BYTES, Ray's part of /dev/shm here; METRICS_PORT, where Prometheus asks this node.
set -euo pipefail
umask "${REFRAIN_UMASK:-077}"
: "${RAY_HEAD:?host:port of the head}" "${PREFECT_API_URL:?}" "${MLFLOW_TRACKING_URI:?}" "${RUNS_DIR:?}"
cd "$(dirname "$0")/../.."
export RAY_ADDRESS=$RAY_HEAD
ray start --address="$RAY_HEAD" --num-cpus=0 --num-gpus=0 \
  --object-store-memory="${OBJECT_STORE_BYTES:-1000000000}" \
  --metrics-export-port="${METRICS_PORT:-8080}"
refrain deploy --runs-dir "$RUNS_DIR"
# The pool's limit does not count a run that is being cancelled; the worker's does.
exec prefect worker start --pool refrain --name "$(hostname)" --limit 1
