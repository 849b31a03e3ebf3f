#!/usr/bin/env bash
# Unpacks Debian packages of another architecture, headers and libraries to link against: ci/target_root.sh DIR ARCH PACKAGE...
# Dependencies are not followed and nothing of them runs. Uses this machine's apt sources with a state of its own below DIR,
# so it needs no root and changes nothing outside.
set -euo pipefail
root=$1 arch=$2
shift 2
mkdir -p "$root/apt/lists/partial" "$root/apt/archives/partial"
apt=(
  apt-get -qq -o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o APT::Sandbox::User=
  -o "Dir::State=$root/apt" -o Dir::State::status=/dev/null -o "Dir::Cache=$root/apt"
)
"${apt[@]}" update
(cd "$root/apt/archives" && rm -f ./*.deb && "${apt[@]}" download "$@")
for package in "$root"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
rm -rf "$root/apt"
