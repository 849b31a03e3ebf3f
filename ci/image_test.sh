#!/usr/bin/env bash
# Builds `doctor`, `cpu` and `build` for both architectures and runs what came out, arm64 under emulation: ci/image_test.sh
# This takes long (docs/images.md has the times), so `make test` has a shorter one. The log is .work/image/image-test.log.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .work/image
exec > >(tee .work/image/image-test.log) 2>&1
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hybrid_ep/_version.py)
image=localhost/hybrid-ep:$version
other=arm64 slowness=20
[ "$(uname -m)" = x86_64 ] || { echo "this takes an x86-64 machine, which cross-compiles for arm64" >&2; exit 2; }
run() { echo "+ $*"; "$@"; }
check() { run ci/image/builder.sh --private-network python3 ci/image/check.py "$@"; }

export ENGINE=builder
for platform in amd64 "$other"; do
  run ci/image.sh doctor "linux/$platform"
  run ci/image.sh cpu "linux/$platform"
  run ci/image.sh build "linux/$platform"
done
of_doctor="architecture user labels health contents sbom doctor no_torch"
# shellcheck disable=SC2086
check "$image-doctor" $of_doctor
# shellcheck disable=SC2086
check "$image-doctor-$other" --slowness "$slowness" $of_doctor
check "$image-cpu"
# The demo of the first run, 8 ranks, takes an emulated processor too long; `commands` has a small one.
check "$image-cpu-$other" --slowness "$slowness" architecture user labels health contents sbom k8s modules doctor commands ssh compose
check "$image-build" wheel
check "$image-build-$other" wheel
echo "image-test: all passed in $SECONDS s"
