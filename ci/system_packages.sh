#!/usr/bin/env bash
# Installs the Debian packages that the tests can use beyond Python: ci/system_packages.sh [cluster]
# Without `cluster`, only those of `make test`; with it, those of `make test-cluster` and of slow tests, too.
# As root it installs what is missing; otherwise, or where apt is not there, it only says so. With CI=true a package that
# cannot be installed is an error.
set -euo pipefail
packages=(
  openssl                          # certificates of a simulated cluster
  libibverbs-dev ibverbs-providers # the _verbs module
  libfabric-dev                    # the transport over libfabric
  g++-aarch64-linux-gnu            # wheels for aarch64
  binutils                         # what is in the wheels
)
[ "${1:-}" != cluster ] || packages+=(
  qemu-system-x86 busybox-static kmod iproute2 # the Soft-RoCE virtual machine
  ibverbs-utils perftest                       # RDMA in it
  openssh-server openssh-client openmpi-bin    # the MPIJob on simulated hosts
  slurmctld slurmd slurm-client                # the validation in an allocation
  qemu-user-static                             # an interpreter to import wheels for aarch64
  mmdebstrap arch-test                         # roots for container images, where there is no registry
  python3-pyverbs                              # the other reader of verbs attributes
  chromium chromium-driver                     # the validation report's page
)
missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  if apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then exit 0; fi
fi
echo "not installed, so some tests are skipped: apt-get install --no-install-recommends ${missing[*]}" >&2
[ "${CI:-}" != true ]
