#!/usr/bin/env bash
# Build refrain:cpu and refrain:gpu: bash infra/cluster/images.sh [NAME], for example
# registry.example.org/refrain for images that you push. Without a builder: status 3.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=${1:-refrain}
file=infra/cluster/Dockerfile

# A client without its daemon builds nothing.
if timeout 30 docker info >/dev/null 2>&1; then
  # The older builder would send all of .venv.
  export DOCKER_BUILDKIT=1
  build=(docker build)
elif command -v podman >/dev/null; then
  build=(podman build --format docker --ignorefile "$file.dockerignore")
elif command -v buildah >/dev/null; then
  build=(buildah build --format docker --ignorefile "$file.dockerignore")
else
  echo "images: nothing here can build an image: no Docker daemon answers, and there is no podman" \
    "and no buildah. Start Docker, or install podman (apt-get install podman)." >&2
  exit 3
fi
for variant in cpu gpu; do
  echo "images: $name:$variant by ${build[0]}"
  "${build[@]}" --file "$file" --build-arg "VARIANT=$variant" --tag "$name:$variant" .
done
