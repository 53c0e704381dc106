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

python=$(command -v python3.11 || true)
if [ -z "$python" ]; then
  echo "setup: Python 3.11 is needed and was not found: install it and run this again" >&2
  exit 2
fi
echo "setup: installing $(grep -c == "$list") pinned packages into .venv ($variant)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
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
if [ "${2:-}" = packages ]; then exit 0; fi
uv pip install --quiet --no-deps --editable .
# Else every process of the first run compiles the same thousands of modules, and of each run where
# bytecode is not kept. Templates among them are no Python.
.venv/bin/python -m compileall -qq -j 0 -x '/(tests?|rllib|transformers/models)/' \
  .venv/lib/python3.11/site-packages flows tasks engines schemas || true
.venv/bin/python -c 'from engines.histospec import drafting, siblings, suffixes; from engines.inference.sampling import cpu'
echo "$want" >"$stamp"
echo "setup: done"
