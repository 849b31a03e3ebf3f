#!/usr/bin/env bash
# Builds the extension modules beside the Python files, for a host whose Python has torch: ci/build_inplace.sh PYTHON
# TORCH_CUDA_ARCH_LIST and HYBRID_EP_BUILD_CUDA are read as by setup.py.
set -euo pipefail
cd "$(dirname "$0")/.."
usually="the modules in C++ (usually a minute; with kernels for GPUs, 10 minutes of two cores)"
ci/progress.sh build "$usually" "${1:-python3}" setup.py build_ext --inplace --parallel "$(nproc)"
grep '^hybrid_ep ' build/log/build.log
