#!/usr/bin/env bash
# Makes a CUDA 12 toolkit where there is no registry, from the non-free packages of Debian 13: ci/image/cuda12.sh DIR
# What nvcc needs is laid out below DIR/usr/local/cuda-12.4 as NVIDIA does it: 190 MB, of 1 GB to download. x86-64 only. This
# nvcc knows sm_90 but not sm_100, which 12.8 brings.
set -euo pipefail
dir=$1
[ ! -d "$dir" ] || exit 0
rm -rf "$dir.part"
toolkit=$dir.part/usr/local/cuda-12.4 from=$dir.part/debian
mkdir -p "$toolkit"/{bin,nvvm/bin,targets/x86_64-linux/lib}

# The packages, unpacked.
ci/target_root.sh --suite trixie "$from" amd64 nvidia-cuda-toolkit nvidia-cuda-dev libcudart12 libcu++-dev

# One folder.
mv "$from"/usr/bin/{bin2c,cudafe++,cuobjdump,fatbinary,nvdisasm,nvlink,ptxas} "$toolkit/bin"
mv "$from"/usr/lib/nvidia-cuda-toolkit/bin/{nvcc,crt} "$toolkit/bin"
mv "$from/usr/lib/nvidia-cuda-toolkit/bin/cicc" "$toolkit/nvvm/bin"
mv "$from/usr/lib/nvidia-cuda-toolkit/libdevice" "$toolkit/nvvm"
mv "$from/usr/include" "$toolkit/targets/x86_64-linux"
mv "$from"/usr/lib/x86_64-linux-gnu/lib{cudart,cudadevrt,culibos}* "$toolkit/targets/x86_64-linux/lib"
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
