#!/usr/bin/env bash
# Everything a fresh machine needs: system tools, a Python 3.11 environment from the lock, this package in it.
# Done once: stamps of the lock's and the project file's content are kept in .venv. Usage: scripts/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*" >&2; }

# Debian package that brings each tool.
declare -A package=([bwrap]=bubblewrap [unshare]=util-linux [git]=git [npm]=npm [ps]=procps)
missing=()
for tool in "${!package[@]}"; do command -v "$tool" >/dev/null || missing+=("${package[$tool]}"); done
if ((${#missing[@]})); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    say "please install: ${missing[*]} (Debian: sudo apt-get install ${missing[*]})"
    exit 1
  fi
fi

locked=$(cat requirements/laptop.lock packaging/vllm-meta/pyproject.toml | sha256sum | cut -c1-16)
project=$(sha256sum pyproject.toml | cut -c1-16)
have() { [[ -f .venv/$1 && $(cat ".venv/$1") == "$2" ]]; }

if ! have locked "$locked"; then
  python=$(command -v python3.11 || true)
  [[ -n $python ]] || { say "python3.11 is not on the PATH; install it (Debian 12: apt-get install python3.11 python3.11-venv)"; exit 1; }
  say "creating .venv with $($python --version)"
  rm -rf .venv
  "$python" -m venv .venv
  .venv/bin/pip install -q --disable-pip-version-check uv==0.9.1
  . scripts/find_links.sh
  say "installing the locked packages"
  .venv/bin/uv pip install -q --python .venv/bin/python "${links[@]}" --no-deps -r requirements/laptop.lock
  .venv/bin/uv pip install -q --python .venv/bin/python --no-deps ./packaging/vllm-meta
  echo "$locked" > .venv/locked
fi
if ! have project "$project"; then
  .venv/bin/uv pip install -q --python .venv/bin/python --no-deps -e .
  echo "$project" > .venv/project
  say "done"
fi
