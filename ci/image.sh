#!/usr/bin/env bash
# Builds one image and says how large it is and how long it took: ci/image.sh [TARGET [PLATFORM]]
# TARGET is a stage of docker/Dockerfile (default cpu), PLATFORM linux/amd64 or linux/arm64 (default: this machine's).
#
#   ENGINE=docker|buildah|builder  default: the first that is there; builder makes its own (ci/image/builder.sh)
#   SOURCES=public|packages        public: a container registry, rdma-core's releases, pytorch's index. packages: only this
#                                  machine's apt mirror and pip's index, with pip's own settings; the default for builder
#   CUDA=cu13|cu12                 of runtime and build
#   TORCH_CPU_INDEX=ADDRESS        needed with public sources for cpu on amd64: pytorch's index of wheels for CPUs, or a mirror
#   SOURCE_URL=ADDRESS             for the label; default: git's remote, where that is on the web
#   BUILD_ARGS='A=1 B=2'           other ARGs of the Dockerfile
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-cpu}
targets=" $(sed -n 's/^FROM .* AS \([a-z-]*\)$/\1/p' docker/Dockerfile | tr '\n' ' ')"
[[ $targets == *" $target "* ]] || { echo "TARGET=$target is not allowed; it takes$targets" >&2; exit 2; }
case $(uname -m) in aarch64) machine=arm64 ;; *) machine=amd64 ;; esac
platform=${2:-linux/$machine}
arch=${platform#linux/}
case $arch in amd64 | arm64) ;; *) echo "PLATFORM=$platform is not allowed; it takes linux/amd64 or linux/arm64" >&2; exit 2 ;; esac
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hybrid_ep/_version.py)
: "${version:?hybrid_ep/_version.py has no version}"
CUDA=${CUDA:-cu13}

engine=${ENGINE:-}
if [ -z "$engine" ]; then
  if docker buildx version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then engine=docker
  elif command -v buildah >/dev/null && # 1.33 is the first that reads heredocs
    [ "$(buildah --version | sed 's/^buildah version \([0-9.]*\).*/1.33\n\1/' | sort -V | head -n 1)" = 1.33 ]; then engine=buildah
  else engine=builder; fi
fi
inside=()
case $engine in
  docker | buildah) sources=${SOURCES:-public} ;;
  builder) sources=${SOURCES:-packages} inside=(ci/image/builder.sh) ;;
  *) echo "ENGINE=$engine is not allowed; it takes docker, buildah or builder" >&2; exit 2 ;;
esac

name=hybrid-ep:$version
[ "$target" = runtime ] || name=$name-$target
[ "$CUDA" = cu13 ] || name=$name-$CUDA
[ "$arch" = "$machine" ] || name=$name-$arch
options=(--target "$target" --platform "$platform" --tag "$name" --file docker/Dockerfile --build-arg "VERSION=$version" --build-arg "CUDA=$CUDA")
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
# The commit's time, so that the same commit makes the same image.
created=$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null || date -u +%Y-%m-%dT%H:%M:%SZ)
# Without the name and password that git may keep in the address.
source_url=${SOURCE_URL:-$(git remote get-url origin 2>/dev/null | sed -nE 's#^(https?://)([^/@]*@)?#\1#p' || true)}
options+=(--build-arg "REVISION=$revision" --build-arg "CREATED=$created" --build-arg "SOURCE_URL=${source_url:-unknown}")

case $engine-$sources in
  *-public)
    case "$arch $target ${BUILD_ARGS:-} " in
      *" TORCH_CPU_INDEX="[!\ ]*) ;;
      "amd64 cpu "* | "amd64 torch-cpu "* | "amd64 test "*TEST_BASE=cpu\ *)
        [ -n "${TORCH_CPU_INDEX:-}" ] || {
          echo "TORCH_CPU_INDEX is empty; it takes the address of pytorch's index of wheels for CPUs, or of a mirror:" \
            "$target for amd64 needs it, because PyPI's torch for x86-64 brings CUDA along" >&2
          exit 2
        } ;;
    esac
    options+=(--build-arg "TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-}")
    ;;
  docker-packages) echo "SOURCES=packages is not allowed with ENGINE=docker; it takes ENGINE=buildah or builder" >&2; exit 2 ;;
  *-packages)
    given=$PWD/.work/image/given
    [ "$arch" = "$machine" ] || ci/image/emulate.sh
    ci/image/given.sh "$given" "$target" "$machine" "$arch"
    export GIVEN_BASES=$given
    export GIVEN_ARCH=$arch
    options+=(--pull=never --build-arg BASE_IMAGE=localhost/hybrid-ep-root --build-arg TOOLS_IMAGE=localhost/hybrid-ep-tools
      --build-arg BASE_NAME=hybrid-ep-root --build-arg TORCH_CPU_INDEX=
      --secret "id=pip,src=$given/pip.conf" --build-context "wheels=$given/wheels" --build-context "rdma-core-source=$given/rdma-core")
    if [ "$CUDA" = cu12 ]; then
      ci/image/cuda12.sh "$given/cuda12"
      options+=(--build-context "cuda=$given/cuda12" --build-arg TORCH_CUDA_ARCH_LIST=9.0)
    fi
    ;;
  *) echo "SOURCES=$sources is not allowed; it takes public or packages" >&2; exit 2 ;;
esac
for argument in ${BUILD_ARGS:-}; do options+=(--build-arg "$argument"); done

begun=$SECONDS
if [ "$engine" = docker ]; then
  docker buildx build --load "${options[@]}" .
  size=$(docker images --format '{{.Size}}' "$name")
else
  "${inside[@]}" ci/image/buildah.sh "${options[@]}" .
  size=$("${inside[@]}" buildah images --format '{{.Size}}' "localhost/$name")
fi
echo "$name ($platform): $size, built in $((SECONDS - begun)) s by $engine from $sources sources"
