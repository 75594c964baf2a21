#!/usr/bin/env bash
# Installs the servers that integration tests start themselves, where they are missing (Debian, as root); `make test` calls it.
set -euo pipefail

packages=(
  erofs-utils nginx-light # images on a web server (tests/integration/test_sandbox_lazy.py)
  docker.io podman runc # engines of containers (tests/integration/docker_engine.py)
  python3 mawk patch procps # with git and others, what the image of tests is made of (tests/integration/rootfs.py)
  etcd-server containerd runc containernetworking-plugins iproute2 nftables openssl # a Kubernetes node (tests/integration/kubernetes_cluster.py)
)

missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  printf 'test servers: installing %s\n' "${missing[*]}" >&2
  apt-get update -qq -o DPkg::Lock::Timeout=120
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "${missing[@]}" >/dev/null
else
  printf 'test servers: %s missing, so tests that need them are skipped (Debian, as root: apt-get install %s)\n' \
    "${missing[*]}" "${missing[*]}" >&2
fi
