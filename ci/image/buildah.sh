#!/usr/bin/env bash
# buildah build, after the roots in GIVEN_BASES, if set, were made known to it; GIVEN_ARCH is the image's: ci/image/buildah.sh [options of buildah build]
set -euo pipefail
given=()
if [ -n "${GIVEN_BASES:-}" ]; then
  for tar in "$GIVEN_BASES"/{root,tools}-*.tar; do
    name=${tar##*/} name=localhost/hybrid-ep-${name%.tar} arch=${tar##*-} arch=${arch%.tar}
    list=${name%-*}
    buildah manifest exists "$list" || buildah manifest create "$list" >/dev/null
    [ -z "$(buildah images --quiet --filter "reference=$name")" ] || continue
    container=$(buildah from --arch "$arch" scratch)
    buildah add --quiet "$container" "$tar" / >/dev/null
    buildah config --os linux --arch "$arch" --cmd /bin/bash "$container"
    buildah commit --quiet --rm "$container" "$name" >/dev/null
    buildah manifest add --os linux --arch "$arch" "$list" "containers-storage:$name:latest" >/dev/null
  done
  given=(--build-arg "BASE_DIGEST=$(buildah images --format '{{.Digest}}' "localhost/hybrid-ep-root-$GIVEN_ARCH")")
fi
# HEALTHCHECK is in Docker's format only. The namespaces around are isolation enough, and chroot needs no more.
exec buildah build --format docker --layers --isolation chroot --network host "${given[@]}" "$@"
