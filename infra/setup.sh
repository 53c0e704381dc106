#!/usr/bin/env bash
# Make .venv with everything pinned: bash infra/setup.sh [cpu|gpu] [packages]
# `packages`: those of others alone, which an image keeps when the source changes.
# Does nothing when nothing changed. Uses pip's settings where they say where to find packages.
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${1:-cpu}
list=infra/requirements/$variant.txt
[ -f "$list" ] || { echo "setup: no variant '$variant': use cpu or gpu" >&2; exit 2; }

stamp=.venv/.refrain-setup
want="$variant $(cat "$list" pyproject.toml infra/setup.sh | sha256sum | cut -d' ' -f1) $PWD"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

# A name may be there whose version is not, and a Python without what makes environments.
runs() { "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
  >/dev/null 2>&1; }
make_environment() {
  local python
  for python in python3.11 python3.12 python3.13 python3; do
    if runs "$python"; then "$python" -m venv .venv; return; fi
  done
  echo "setup: no Python 3.11, 3.12 or 3.13 here: getting one through uv"
  local uv=uv
  if ! command -v uv >/dev/null; then
    uv=.venv/bootstrap/bin/uv
    python3 -m pip install --quiet --target .venv/bootstrap uv || {
      echo "setup: neither uv nor a pip to get it with: install Python 3.11, 3.12 or 3.13, or uv" >&2
      exit 2
    }
  fi
  "$uv" venv --quiet --seed --allow-existing --python 3.11 .venv
  rm -rf .venv/bootstrap
}
echo "setup: installing $(grep -c == "$list") pinned packages into .venv ($variant)"
[ -x .venv/bin/python ] || make_environment
.venv/bin/python -m pip install --quiet uv
uv() { UV_LINK_MODE=${UV_LINK_MODE:-hardlink} .venv/bin/uv "$@" --python .venv/bin/python; }

install=(pip install --quiet --no-deps -r "$list")
if [ "$variant" = gpu ]; then
  uv "${install[@]}"
else
  # Where pip's settings do not lead to torch's CPU build, PyTorch's own index does.
  uv "${install[@]}" ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} 2>.venv/setup.log ||
    uv "${install[@]}" --torch-backend cpu ||
    { cat .venv/setup.log >&2; exit 1; }
  rm -f .venv/setup.log
fi
# Else every process of the first run compiles the same thousands of modules, and of each run where
# bytecode is not kept. Templates among them are no Python.
compile_bytecode() { .venv/bin/python -W ignore -m compileall -qq -j 0 "$@" || true; }
compile_bytecode -x '/(tests?|rllib|transformers/models)/' .venv/lib/python3.*/site-packages
if [ "${2:-}" = packages ]; then exit 0; fi
uv pip uninstall --quiet refrain 2>/dev/null || true  # as it was called in 0.1
uv pip install --quiet --no-deps --editable .
compile_bytecode flows tasks engines schemas
.venv/bin/python -c 'from refrain.engines.histospec import drafting, siblings, suffixes; from refrain.engines.inference.sampling import cpu'
echo "$want" >"$stamp"
echo "setup: done"
