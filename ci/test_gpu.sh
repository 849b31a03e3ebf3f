#!/usr/bin/env bash
# Builds the extension for this host's GPUs and runs every test that needs them: ci/test_gpu.sh [PYTHON] [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift || true
HYBRID_EP_BUILD_CUDA=on ci/build_inplace.sh "$python"
exec "$python" -m pytest tests/multi_gpu -p no:cacheprovider "$@"
