#!/usr/bin/env bash
# Makes a CUDA toolkit of NVIDIA's wheels, laid out as nvcc and CMake look for it: ci/cuda_toolkit.sh PYTHON DIR [ARCH [newest]]
# Prints its CUDA_HOME, below DIR. The versions are those of the group `cuda` in pyproject.toml, or the newest that pip finds.
# nvcc runs here; with an ARCH that is not this machine's the runtime library is that ARCH's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 dir=$2 arch=${3:-$(uname -m)} versions=${4:-pinned}
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
mapfile -t wheels < <(sed -n '/^cuda = \[/,/^\]/s/.*"\(.*\)".*/\1/p; s/.*"\(nvidia-nvml-dev==.*\)".*/\1/p' pyproject.toml)
[ "$versions" != newest ] || wheels=("${wheels[@]%%==*}")
if [ "$versions" = newest ] || [ "$(cat "$dir/wheels" 2>/dev/null)" != "${wheels[*]} $arch" ]; then
  rm -rf "$dir"
  pip install --target "$dir" --no-deps "${wheels[@]}"
  libraries=../../lib
  if [ "$arch" != "$(uname -m)" ]; then
    for wheel in "${wheels[@]}"; do
      case $wheel in nvidia-cuda-runtime*) ;; *) continue ;; esac
      pip install --target "$dir/$arch" --no-deps --only-binary :all: --platform "manylinux2014_$arch" "$wheel"
    done
    libraries=$(echo "$dir/$arch"/nvidia/cu*/lib)
  fi
  # The wheels lack the names under which nvcc and CMake look for them.
  home=$(echo "$dir"/nvidia/cu*)
  [ "$arch" = aarch64 ] && folder=$home/targets/sbsa-linux || folder=$home/targets/x86_64-linux
  mkdir -p "$folder"
  ln -sfn ../../include "$folder/include"
  ln -sfn "$libraries" "$folder/lib"
  for library in "$folder"/lib/libcudart.so.*; do ln -sf "$(basename "$library")" "$folder/lib/libcudart.so"; done
  echo "${wheels[*]} $arch" >"$dir/wheels"
fi
echo "$dir"/nvidia/cu*
