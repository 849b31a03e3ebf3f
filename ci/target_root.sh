#!/usr/bin/env bash
# Unpacks Debian packages of another architecture or release: ci/target_root.sh [--suite SUITE] DIR ARCH PACKAGE...
# Dependencies are not followed and nothing of them runs. Uses this machine's apt sources, or their mirror for SUITE, with a
# state of its own below DIR, so it needs no root and changes nothing outside.
set -euo pipefail
suite=
if [ "$1" = --suite ]; then suite=$2; shift 2; fi
root=$1 arch=$2
shift 2
mkdir -p "$root/apt/lists/partial" "$root/apt/archives/partial"
apt=(
  apt-get -qq -o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o APT::Sandbox::User=
  -o "Dir::State=$root/apt" -o Dir::State::status=/dev/null -o "Dir::Cache=$root/apt"
)
if [ -n "$suite" ]; then
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Label: Debian" | head -n 1)
  [ -n "$mirror" ] || { echo "apt knows no mirror of Debian here; run apt-get update first" >&2; exit 2; }
  sources=$root/apt/sources.list
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main non-free" >"$sources"
  apt+=(-o "Dir::Etc::sourcelist=$sources" -o Dir::Etc::sourceparts=-)
fi
"${apt[@]}" update
(cd "$root/apt/archives" && rm -f ./*.deb && "${apt[@]}" download "$@")
for package in "$root"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
rm -rf "$root/apt"
# Newer releases have everything in usr; loaders and libraries are looked for outside it, too.
for folder in lib lib64; do
  if [ -d "$root/usr/$folder" ] && [ ! -e "$root/$folder" ]; then ln -s "usr/$folder" "$root/$folder"; fi
done
