#!/usr/bin/env bash
# Write the fully pinned lists anew from pyproject.toml: bash infra/requirements/lock.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
compile() {
  .venv/bin/uv pip compile --quiet --python-version 3.11 --no-header --no-annotate \
    --extra dev pyproject.toml "$@"
}
# The CPU build of torch: from pip's own links where they hold it, else from PyTorch's CPU index.
if [ -n "${PIP_FIND_LINKS:-}" ]; then torch=(--find-links "$PIP_FIND_LINKS"); else torch=(--torch-backend cpu); fi
compile --extra cpu "${torch[@]}" --override infra/requirements/overrides.txt \
  -o infra/requirements/cpu.txt
compile --extra gpu -o infra/requirements/gpu.txt
# What the servers of a cluster need besides, in versions that fit.
.venv/bin/uv pip compile --quiet --python-version 3.11 --no-header --no-annotate \
  infra/requirements/cluster.in -c infra/requirements/cpu.txt -o infra/requirements/cluster.txt
