#!/usr/bin/env bash
# Runs `make demo` and `make test` in a Debian that has nothing but what README asks for: ci/bare_root_test.sh [short|full] [root|user]
#
# A small root is made once with mmdebstrap from this machine's own apt mirror. Each run unpacks it anew, clones the last
# commit in it, and has the settings of pip of this machine. CI is passed on.
#   short  `make setup`, `hybrid-ep info`, the system packages, `make setup` again, and every prerequisite of the tests; with CI=true
#          the kernels are built, too
#   full   `make demo`, then `make test`
# As root what tests need is installed; as user tests that need it are skipped. Logs are .work/bare/MODE-USER.log.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-short} user=${2:-root} work=$PWD/.work/bare
case $mode-$user in short-root | short-user | full-root | full-user) ;; *) sed -n 2p "$0" >&2; exit 2 ;; esac
[ "$(id -u)" -eq 0 ] || { echo "a root folder of its own needs root" >&2; exit 2; }
command -v mmdebstrap >/dev/null || { echo "mmdebstrap is missing: ci/system_packages.sh installs it" >&2; exit 2; }
mkdir -p "$work"
exec > >(tee "$work/$mode-$user.log") 2>&1

# What README asks for, and nothing else.
packages=$(grep -oE 'apt-get install [a-z0-9+ -]*make[a-z0-9+ -]*' README.md | head -n 1 | cut -d ' ' -f 3-)
base=$work/base-$(cksum <<<"$packages" | cut -d ' ' -f 1).tar
if [ ! -s "$base" ]; then
  ci/image/debian_root.sh bookworm "$(dpkg --print-architecture)" "$base.part.tar" --include="${packages// /,}"
  mv "$base.part.tar" "$base"
fi
root=$work/$mode-$user
rm -rf "$root"
trap 'rm -rf "$root"' EXIT
mkdir "$root"
tar --extract --file "$base" --directory "$root" --exclude './dev/*'

# What every installer and container runtime writes, and no package does.
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 %s\n' "$(uname -n)" >"$root/etc/hosts"
uname -n >"$root/etc/hostname"

# pip's settings, with the folders and files that they name; a file:// index may link to files beside it.
pip=$(python3 -m pip config list 2>/dev/null | sed -nE "s/^[^=]*\.([a-z-]+)='(.*)'$/\1 = \2/p" | sort -u)
printf '[global]\n%s\n' "$pip" | awk -F ' = ' '!seen[$1]++' >"$root/etc/pip.conf"
named=$(grep -oE '(file://)?/[^ ]+' <<<"$pip" | sed -E 's#^file://(.*)/[^/]*$#\1#' | sort -u)
folders=$(while read -r path; do if [ -d "$path" ]; then echo "$path"; fi; done <<<"$named" | paste -sd :)
while read -r path; do if [ -f "$path" ] && [ ! -e "$root$path" ]; then install -D -m 644 "$path" "$root$path"; fi; done <<<"$named"
commit=$(git rev-parse HEAD)
git bundle create --quiet "$root/tmp/source.bundle" HEAD
[ -z "$(git status --porcelain)" ] || echo "what is not committed is not tested"

cat >"$root/tmp/setup.sh" <<'END'
set -eux
timed() {
  local begun=$SECONDS
  "$@"
  echo "bare-root-test: $* took $((SECONDS - begun)) s"
}
cd ~
git clone --quiet -c advice.detachedHead=false /tmp/source.bundle hybrid_ep
cd hybrid_ep
END
cat >"$root/tmp/full.sh" <<'END'
. /tmp/setup.sh
timed make demo
timed make test
END
cat >"$root/tmp/short.sh" <<'END'
. /tmp/setup.sh
timed make setup
.venv/bin/hybrid-ep info
timed ci/system_packages.sh
timed make setup
.venv/bin/hybrid-ep info
.venv/bin/pytest --quiet --collect-only tests >/tmp/collected
tail -n 1 /tmp/collected
.venv/bin/pytest tests/unit/test_prerequisites.py
END
echo "$commit as $user in $(sed -n 's/^PRETTY_NAME=//p' "$root/etc/os-release") with $packages; CI=${CI:-}"
home=/root enter=(bash)
if [ "$user" = user ]; then
  chroot "$root" useradd --create-home --shell /bin/bash tester
  home=/home/tester enter=(runuser -u tester -- bash)
fi
clean=(env -i "HOME=$home" "USER=$user" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8)
[ -z "${CI:-}" ] || clean+=("CI=$CI")
begun=$SECONDS
unshare --mount --pid --ipc --uts --fork --kill-child=KILL --propagation private \
  ci/enter_root.sh "$root" "$folders" / "${clean[@]}" "${enter[@]}" "/tmp/$mode.sh"
echo "bare-root-test: $mode as $user passed in $((SECONDS - begun)) s"
