#!/usr/bin/env bash
# Makes a CUDA 12 toolkit where there is no registry: ci/image/cuda12.sh DIR [all|compiler]
#   all       (default) nvcc, headers and the static runtime, of Debian 13's non-free packages: 190 MB, of 1 GB to download
#   compiler  nvcc of these; headers and the shared runtime of PyPI's wheels: enough to try the sources, 110 MB to download
# It is laid out below DIR/usr/local/cuda-12.4 as NVIDIA does it. x86-64 only. This nvcc knows sm_90 but not sm_100, which 12.8
# brings.
set -euo pipefail
dir=$1 parts=${2:-all}
case $parts in all | compiler) ;; *) sed -n 2p "$0" >&2; exit 2 ;; esac
[ ! -d "$dir" ] || exit 0
rm -rf "$dir.part"
toolkit=$dir.part/usr/local/cuda-12.4 from=$dir.part/debian
include=$toolkit/targets/x86_64-linux/include lib=$toolkit/targets/x86_64-linux/lib
mkdir -p "$toolkit"/{bin,nvvm/bin} "$include" "$lib"

# The packages, unpacked.
packages=(nvidia-cuda-toolkit libcu++-dev)
[ "$parts" = compiler ] || packages+=(nvidia-cuda-dev libcudart12)
ci/target_root.sh --suite trixie "$from" amd64 "${packages[@]}"

# One folder.
mv "$from"/usr/bin/{bin2c,cudafe++,cuobjdump,fatbinary,nvdisasm,nvlink,ptxas} "$toolkit/bin"
mv "$from"/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,crt} "$toolkit/bin"
mv "$from/usr/lib/nvidia-cuda-toolkit/bin/cicc" "$toolkit/nvvm/bin"
mv "$from/usr/lib/nvidia-cuda-toolkit/libdevice" "$toolkit/nvvm"
mv "$from"/usr/include/* "$include"
if [ "$parts" = all ]; then
  mv "$from"/usr/lib/x86_64-linux-gnu/lib{cudart,cudadevrt,culibos}* "$lib"
else
  "${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check install --target "$from/wheels" --no-deps \
    nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-runtime-cu12==12.4.127 nvidia-nvml-dev-cu12==12.4.127
  cp -r "$from"/wheels/nvidia/*/include/. "$include"
  cp "$from"/wheels/nvidia/cuda_runtime/lib/libcudart.so.12 "$lib"
  ln -s libcudart.so.12 "$lib/libcudart.so"
  # nvcc names both when it links, and CMake links a program to see whether the compiler works.
  echo "INPUT(libcudart.so.12)" >"$lib/libcudart_static.a"
  ar rc "$lib/libcudadevrt.a"
fi
ln -s targets/x86_64-linux/include "$toolkit/include"
ln -s targets/x86_64-linux/lib "$toolkit/lib64"
cat >"$toolkit/bin/nvcc.profile" <<'END'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/$(_TARGET_DIR_)/include" $(_SPACE_)
SYSTEM_INCLUDES += "-isystem" "$(TOP)/$(_TARGET_DIR_)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/$(_TARGET_DIR_)/lib"
END
rm -rf "$from"
mv "$dir.part" "$dir"
