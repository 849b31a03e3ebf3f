#!/usr/bin/env bash
# Builds the extension modules beside the Python files, for a host whose Python has torch: ci/build_inplace.sh PYTHON
# TORCH_CUDA_ARCH_LIST and HYBRID_EP_BUILD_CUDA are read as by setup.py.
set -euo pipefail
cd "$(dirname "$0")/.."
"${1:-python3}" setup.py --quiet build_ext --inplace --parallel "$(nproc)"
