#!/usr/bin/env bash
# Builds the extension for this host's GPUs and runs every test that needs them: ci/test_gpu.sh [PYTHON] [pytest options]
# A small case then runs under compute-sanitizer: on one rank, on two that write to each other, and on two domains.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
shift || true
HYBRID_EP_BUILD_CUDA=on ci/build_inplace.sh "$python"
"$python" -m pytest tests/multi_gpu -p no:cacheprovider --durations 20 "$@"
if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not installed: memcheck and racecheck were not run" >&2
  exit 1
fi
# Two ranks may have one GPU, and take long for a call. Torch asks the driver for what it may refuse (fabric handles), so
# that errors of calls to the driver are counted on one rank only.
export HYBRID_EP_TIMEOUT_S=200 TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
runs=()
for tool in memcheck racecheck; do
  sanitize=(compute-sanitizer --tool "$tool" --error-exitcode 1)
  module=("$python" -m tests.multi_gpu.sanitize)
  "${sanitize[@]}" "${module[@]}" &>"$out/$tool-1.log" &
  runs+=($!)
  for size in 2 1; do  # ranks of a domain
    for rank in 0 1; do
      HYBRID_EP_NUM_RANKS_PER_DOMAIN=$size HYBRID_EP_TRANSPORT=loopback \
        "${sanitize[@]}" --report-api-errors no "${module[@]}" "$rank" 2 "$out/$tool-$size.store" \
        &>"$out/$tool-2-$size-$rank.log" &
      runs+=($!)
    done
  done
done
failed=0
for run in "${runs[@]}"; do wait "$run" || failed=1; done
tail -n +1 "$out"/*.log
exit "$failed"
