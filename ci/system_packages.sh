#!/usr/bin/env bash
# Installs the Debian packages that the tests can use beyond Python: ci/system_packages.sh
# As root it installs what is missing; otherwise, or where apt is not there, it only says so. With CI=true a package that
# cannot be installed is an error.
set -euo pipefail
packages=(
  qemu-system-x86 busybox-static kmod iproute2           # the Soft-RoCE virtual machine
  openssh-server openssh-client openmpi-bin              # the MPIJob on simulated hosts
  slurmctld slurmd slurm-client                          # the validation in an allocation
  openssl                                                # certificates of a simulated cluster
  libibverbs-dev ibverbs-providers ibverbs-utils perftest # RDMA in it, and the _verbs module
  g++-aarch64-linux-gnu qemu-user-static                 # wheels for aarch64, and an interpreter to import them
  binutils                                               # what is in the wheels
  mmdebstrap arch-test                                   # roots for container images, where there is no registry
  python3-pyverbs                                        # the other reader of verbs attributes
  chromium chromium-driver                               # the validation report's page
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
