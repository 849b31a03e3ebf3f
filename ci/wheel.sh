#!/usr/bin/env bash
# Builds a manylinux wheel with all modules, _nvshmem only on request: ci/wheel.sh PYTHON ARCH OUT_DIR
# ARCH is x86_64 or aarch64; one that is not this machine's is cross-compiled with g++-aarch64-linux-gnu. The wheel is for
# PYTHON's version. Tools and, unless CUDA_HOME names a toolkit, CUDA come from PyPI with the pins in pyproject.toml.
# libibverbs is taken from RDMA_CORE_HOME, else from the system; for another ARCH it is taken from HYBRID_EP_TARGET_ROOT, else
# from this Debian's packages for it. Python's headers are PYTHON's own. See docs/building.md.
# Everything between lands in build/wheel, and is used again.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 3 ] || { sed -n 2p "$0" >&2; exit 2; }
python=$1 arch=$2 out=$3
case $arch in x86_64 | aarch64) ;; *) echo "ARCH=$arch is not allowed; it takes x86_64 or aarch64" >&2; exit 2 ;; esac
host=$(uname -m)
version=$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
work=$PWD/build/wheel/python$version
env=$work/env
target=$work/$arch
mkdir -p "$target"

# Tools and toolkit.
[ -x "$env/bin/python" ] || "$python" -m venv "$env"
pip() { "$env/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install 'pip>=25.1' # the first that reads dependency groups
pip install --group build
export PATH="$env/bin:$PATH"
if [ -z "${CUDA_HOME:-}" ] && [ "${HYBRID_EP_BUILD_CUDA:-on}" != off ]; then
  CUDA_HOME=$(ci/cuda_toolkit.sh "$env/bin/python" "$target/cuda" "$arch")
fi
if [ -n "${CUDA_HOME:-}" ]; then export CUDA_HOME CUDACXX=${CUDACXX:-$CUDA_HOME/bin/nvcc}; fi

# The target's libraries and their headers.
if [ "$arch" != "$host" ]; then
  [ "$arch" = aarch64 ] || { echo "cross-compiling goes from x86_64 to aarch64 only, not from $host to $arch" >&2; exit 2; }
  export CMAKE_TOOLCHAIN_FILE=$PWD/csrc/cmake/aarch64-linux.cmake
  if [ -z "${HYBRID_EP_TARGET_ROOT:-}" ]; then
    export HYBRID_EP_TARGET_ROOT=$target/root
    ci/target_root.sh "$HYBRID_EP_TARGET_ROOT" arm64 libfabric-dev libibverbs-dev libibverbs1
  fi
fi

# A wheel has everything, or is not built. Of an earlier build only compiled objects stay, and only where their commands are
# the same: no Python files, and nothing that CMake found under other variables.
export HYBRID_EP_BUILD_CUDA=${HYBRID_EP_BUILD_CUDA:-on} HYBRID_EP_BUILD_NVML=${HYBRID_EP_BUILD_NVML:-on}
export HYBRID_EP_MULTINODE=${HYBRID_EP_MULTINODE:-1}
export HYBRID_EP_BUILD_NVSHMEM=${HYBRID_EP_BUILD_NVSHMEM:-off} # its device library has another licence
rm -rf "$target"/build/lib* "$target"/build/bdist* "$target"/build/temp*/CMakeCache.txt "$target/dist"
printf '%s\n' '[build]' "build_base = $target/build" '[bdist_wheel]' "plat_name = linux_$arch" >"$target/distutils.cfg"
export DIST_EXTRA_CONFIG=$target/distutils.cfg CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_SKIP_RPATH=ON" # RDMA_CORE_HOME is here only
"$env/bin/python" -m pip wheel --no-build-isolation --no-deps --wheel-dir "$target/dist" .

# The platform tag is the oldest glibc that the modules run on. Drivers and RDMA libraries are the machine's own.
mkdir -p "$out"
auditwheel repair --wheel-dir "$out" --exclude libcuda.so.1 --exclude libnvidia-ml.so.1 --exclude libibverbs.so.1 \
  --exclude libnvshmem_host.so.3 \
  "$target"/dist/*.whl
