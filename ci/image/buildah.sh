#!/usr/bin/env bash
# buildah build, after the base images in GIVEN_BASES, if set, were made known to it: ci/image/buildah.sh [options of buildah build]
set -euo pipefail
base=localhost/hybrid-ep-base
if [ -n "${GIVEN_BASES:-}" ]; then
  buildah manifest exists $base || buildah manifest create $base >/dev/null
  for tar in "$GIVEN_BASES"/base-*.tar; do
    arch=${tar##*/base-} arch=${arch%.tar}
    [ -z "$(buildah images --quiet --filter "reference=$base-$arch")" ] || continue
    container=$(buildah from --arch "$arch" scratch)
    buildah add --quiet "$container" "$tar" / >/dev/null
    buildah config --os linux --arch "$arch" --cmd /bin/bash "$container"
    buildah commit --quiet --rm "$container" "$base-$arch" >/dev/null
    buildah manifest add --os linux --arch "$arch" $base "containers-storage:$base-$arch:latest" >/dev/null
  done
fi
# HEALTHCHECK is in Docker's format only. The namespaces around are isolation enough, and chroot needs no more.
exec buildah build --format docker --layers --isolation chroot --network host "$@"
