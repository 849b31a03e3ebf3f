#!/usr/bin/env bash
# Lets this kernel run arm64 programs through qemu-user-static, in containers, too: ci/image/emulate.sh
# The registration is the one of Debian's package; where systemd runs, it has been made already. The kernel keeps it until it
# restarts. F: the interpreter is opened now, so that containers need none; C: with the program's own rights.
set -euo pipefail
registry=/proc/sys/fs/binfmt_misc
[ "$(uname -m)" != aarch64 ] || exit 0
[ -e $registry/register ] || mount -t binfmt_misc binfmt_misc $registry
[ ! -e $registry/qemu-aarch64 ] || exit 0
line=$(cat /usr/lib/binfmt.d/qemu-aarch64.conf) || { echo "qemu-user-static is missing: ci/system_packages.sh installs it" >&2; exit 2; }
printf '%s' "${line%:*}:POCF" >$registry/register
