#!/usr/bin/env bash
# Builds the extension for this host's GPUs and runs every test that needs them: ci/test_gpu.sh [PYTHON] [pytest options]
# A small case then runs under compute-sanitizer, where that is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift || true
HYBRID_EP_BUILD_CUDA=on ci/build_inplace.sh "$python"
"$python" -m pytest tests/multi_gpu -p no:cacheprovider "$@"
if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not installed: memcheck and racecheck were not run" >&2
  exit 0
fi
for tool in memcheck racecheck; do
  compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m tests.multi_gpu.sanitize
done
