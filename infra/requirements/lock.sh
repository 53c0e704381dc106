#!/usr/bin/env bash
# Write the fully pinned lists anew from pyproject.toml: bash infra/requirements/lock.sh
# Each is for every Python that pyproject.toml allows. What is pinned stays where it may: delete a
# list first to have the newest of everything.
set -euo pipefail
cd "$(dirname "$0")/../.."
everywhere="sys_platform == 'linux'|platform_machine == 'x86_64'"
everywhere+="|implementation_name == 'cpython'|platform_python_implementation == 'CPython'"
everywhere+="|python_full_version < '3.14'"
compile() {
  local list=infra/requirements/$1
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
    "${@:2}" -o "$list"
  # Of the markers, those stay that tell one Python from another.
  sed -E -i "s/($everywhere)( and )?//g; s/ and *\$//; s/ ; *\$//" "$list"
}
package=(--extra dev --extra docs pyproject.toml --override infra/requirements/overrides.txt)
# The CPU build of torch: from pip's own links where they hold it, else from PyTorch's CPU index.
torch=(--torch-backend cpu)
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  # A wheel for one Python says what those for the others need.
  links=$(mktemp -d)
  trap 'rm -r "$links"' EXIT
  for wheel in "$PIP_FIND_LINKS"/torch-*.whl; do
    ln -s "$wheel" "$links/$(basename "$wheel" | sed -E 's/-cp[0-9]+-cp[0-9]+-/-py3-none-/')"
  done
  torch=(--find-links "$links")
fi
compile cpu.txt --extra cpu "${package[@]}" "${torch[@]}" \
  --override infra/requirements/overrides-cpu.txt
compile gpu.txt --extra gpu "${package[@]}"
# What the servers of a cluster need besides, in versions that fit.
compile cluster.txt infra/requirements/cluster.in -c infra/requirements/cpu.txt
