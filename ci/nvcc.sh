#!/usr/bin/env bash
# Puts nvcc into a virtual environment, unless PATH has one: ci/nvcc.sh VENV
# That of CUDA_HOME or /usr/local/cuda, else the pinned one of PyPI. For CI, so that the kernels are built wherever it runs;
# elsewhere a machine without nvcc gets a package without kernels.
set -euo pipefail
venv=$(realpath -m "$1")
! PATH="$venv/bin:$PATH" command -v nvcc >/dev/null || exit 0
home=${CUDA_HOME:-/usr/local/cuda}
[ -x "$home/bin/nvcc" ] || home=$("$(dirname "$0")/cuda_toolkit.sh" "$venv/bin/python" "$venv/cuda")
printf '#!/bin/sh\nexec "%s/bin/nvcc" "$@"\n' "$home" >"$venv/bin/nvcc"
chmod +x "$venv/bin/nvcc"
