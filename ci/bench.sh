#!/usr/bin/env bash
# Builds the extension for this host's GPUs and makes the figures that README and docs quote, beside the wire:
# ci/bench.sh [PYTHON] [options of benchmarks/figures.py]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift || true
HYBRID_EP_BUILD_CUDA=on ci/build_inplace.sh "$python"
PYTHONPATH=$PWD exec "$python" benchmarks/figures.py "$@"
