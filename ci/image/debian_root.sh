#!/usr/bin/env bash
# Makes a small Debian root from this machine's own apt mirror: ci/image/debian_root.sh SUITE ARCH TARGET [mmdebstrap options]
# TARGET is a folder or a .tar. It gets this machine's own certificates and apt's setting for old Release files, so that apt
# and pip work there as they do here. CERTIFICATES=off leaves the certificates out, for what is published.
set -euo pipefail
suite=$1 arch=$2 target=$3
shift 3
sources() { apt-get indextargets --format "$1" 'Created-By: Packages' 'Origin: Debian' | sort -u; }
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Label: Debian" | head -n 1)
[ -n "$mirror" ] || { echo "apt knows no mirror of Debian here; run apt-get update first" >&2; exit 2; }
lines=$(sources 'deb $(REPO_URI) $(RELEASE) main' | grep -E " $suite(-security|-updates)? " || true)
[ -n "$lines" ] || lines="deb $mirror $suite main"
options=()
while read -r line; do options+=(--aptopt="$line"); done < <(apt-config dump Acquire::Check-Valid-Until Acquire::Check-Date | grep . || true)
if [ -d /usr/local/share/ca-certificates ] && [ "${CERTIFICATES:-}" != off ]; then
  options+=(--include=ca-certificates
    --customize-hook='copy-in /usr/local/share/ca-certificates /usr/local/share' --customize-hook='chroot "$1" update-ca-certificates')
fi
mmdebstrap --quiet --variant=minbase --architectures="$arch" "${options[@]}" --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  "$@" "$suite" "$target" - <<<"$lines"
