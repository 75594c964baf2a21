#!/usr/bin/env bash
# Resolves requirements/laptop.lock anew from pyproject.toml (extras cpu, dev, docker and kubernetes),
# and requirements/harbor.lock, which is for Python 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/find_links.sh
.venv/bin/uv pip compile pyproject.toml --extra cpu --extra dev --extra docker --extra kubernetes --python-version 3.11 --override requirements/overrides.txt \
  "${links[@]}" --no-emit-find-links --no-header --no-annotate -q -o requirements/laptop.lock
# The CPU build and the public release of torch differ in the local part only.
sed -i 's/^torch==\([0-9.]*\)+cpu$/torch==\1/' requirements/laptop.lock
.venv/bin/uv pip compile pyproject.toml --extra harbor --python-version 3.12 \
  "${links[@]}" --no-emit-find-links --no-header --no-annotate -q -o requirements/harbor.lock
