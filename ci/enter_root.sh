#!/usr/bin/env bash
# Runs a command in another root folder: unshare --mount --pid … --fork ci/enter_root.sh ROOT FOLDERS DIRECTORY COMMAND…
# FOLDERS (separated by colons) of this machine have the same path inside. /proc, /sys, /dev and /run are there.
# Needs root and a mount and a process namespace of its own.
set -euo pipefail
root=$1 folders=$2 directory=$3
shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/run"
mount --rbind /dev "$root/dev"
cat /etc/resolv.conf >"$root/etc/resolv.conf"
IFS=:
for folder in $folders; do mkdir -p "$root$folder"; mount --rbind "$folder" "$root$folder"; done
unset IFS
mkdir -p "$root/.host"
cd "$root"
pivot_root . .host
cd "$directory"
umount -l /.host
exec "$@"
