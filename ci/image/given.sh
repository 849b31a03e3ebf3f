#!/usr/bin/env bash
# Makes what a build needs where there is no registry, from apt's mirror and pip's index: ci/image/given.sh DIR TARGET ARCH…
# DIR gets root-ARCH.tar (a Debian root for the images), tools-ARCH.tar (one for the tools, with this machine's certificates, for
# the first ARCH), pip.conf and wheels (pip's settings of this machine, and the files of its find-links),
# and rdma-core (PyPI's pyverbs carries the tree of rdma-core 59) for targets that are built from it. PYTHON is one with pip.
set -euo pipefail
dir=$1 target=$2
shift 2
mkdir -p "$dir/wheels" "$dir/rdma-core"
make_root() { # KIND ARCH
  [ ! -s "$dir/$1-$2.tar" ] || return 0
  ci/image/debian_root.sh bookworm "$2" "$dir/$1-$2.part.tar"
  mv "$dir/$1-$2.part.tar" "$dir/$1-$2.tar"
}
make_root tools "$1"
for arch; do CERTIFICATES=off make_root root "$arch"; done
pip() { "${PYTHON:-python3}" -m pip --disable-pip-version-check "$@"; }
{
  echo "[global]"
  pip config list | sed -nE "s/^[^=]*\.(index-url|trusted-host|timeout|default-timeout)='(.*)'$/\1 = \2/p"
} >"$dir/pip.conf"
for folder in $(pip config list | sed -nE "s/^[^=]*\.find-links='(.*)'$/\1/p"); do
  [ -d "$folder" ] && cp --update --dereference "$folder"/*.whl "$dir/wheels/"
done
case $target in
  rdma-core | build | runtime* | test)
    archive=pyverbs-59.0.tar.gz sha256=b30d56bb620b3d3b4301876f9a04c964be1c76cc6553a451e1465f1c6ac9f20e
    [ -s "$dir/rdma-core/$archive" ] || pip download --quiet --no-deps --no-binary pyverbs --dest "$dir/rdma-core" pyverbs==59.0
    echo "$sha256  $dir/rdma-core/$archive" | sha256sum --check --quiet
    ;;
esac
