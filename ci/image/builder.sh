#!/usr/bin/env bash
# Runs a command where buildah and podman are: ci/image/builder.sh [--private-network] COMMAND…
#
# For machines without a container engine: a small Debian root in .work/image with buildah, podman and podman-compose,
# made once with mmdebstrap from this machine's own apt mirror, and entered by namespaces of mounts and processes, which
# take everything that runs in them along when the command ends. Images and containers stay in .work/image/storage.
# The checkout has the same path inside; so has each folder in BUILDER_FOLDERS (separated by colons).
# With --private-network the command has a network of its own, and containers can have theirs; needs root.
set -euo pipefail
cd "$(dirname "$0")/../.."
repo=$PWD work=$PWD/.work/image root=$PWD/.work/image/builder
# forky, because of its buildah 1.43: older ones lack heredocs and named build contexts.
suite=forky packages=aardvark-dns,buildah,ca-certificates,netavark,nftables,podman,podman-compose,runc,iproute2
namespaces=(--mount --pid --ipc --uts) purpose=build
if [ "${1:-}" = --private-network ]; then namespaces+=(--net) purpose=run; shift; fi
[ "$(id -u)" -eq 0 ] || { echo "building images without docker or buildah needs root" >&2; exit 2; }

mkdir -p "$work/storage"
exec 8>"$work/made.lock"
flock --timeout 600 8
if [ ! -e "$root/.made" ]; then
  command -v mmdebstrap >/dev/null || { echo "mmdebstrap is missing: ci/system_packages.sh installs it" >&2; exit 2; }
  rm -rf "$root"
  ci/image/debian_root.sh "$suite" "$(dpkg --print-architecture)" "$root" --include="$packages"
  cat >"$root/etc/containers/storage.conf" <<END
[storage]
driver = "overlay"
graphroot = "$work/storage"
runroot = "/run/containers"
END
  # runc and no limit of processes, because this kernel may have its controllers in the old hierarchy of cgroups.
  cat >"$root/etc/containers/containers.conf" <<END
[containers]
pids_limit = 0
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
END
  touch "$root/.made"
fi
exec 8>&-
# Until the command ends: podman takes the containers of another session for its own, and builds would do work twice.
exec 9>"$work/$purpose.lock"
flock --timeout 1800 9 || { echo "another $purpose has held $work/$purpose.lock for 1800 s" >&2; exit 1; }

up='ip link set lo up; exec "$@"'
exec unshare "${namespaces[@]}" --fork --kill-child=KILL --propagation private \
  ci/enter_root.sh "$root" "$repo:${BUILDER_FOLDERS:-}" "$repo" sh -ec "$up" builder "$@"
