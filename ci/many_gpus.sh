#!/usr/bin/env bash
# Everything to run on a host of several GPUs, in steps of at most 10 minutes each: OUT=FOLDER ci/many_gpus.sh [STEP...]
#
#   tests    every test on GPUs and the sanitizers: ci/test_gpu.sh
#   figures  the tables of benchmarks/results
#   domains  the host as 2 domains, and as domains of 2 GPUs, over loopback, tcp and nvshmem: cases, calls and the link
#   balance  a MoE layer at skew 0, 6 and 10 and with one hot expert, with and without balance; the weights of an expert
#   record   the node: doctor and its active checks, topology, recording
#
# Without a step all run. PYTHON is a Python with torch. Results and logs land in $OUT; the exit status is 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?folder for the results}"
python=${PYTHON:-python3}
mkdir -p "$OUT"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
bench() { "$python" -m hybrid_ep bench --ranks "$gpus" "$@"; }

tests() { ci/test_gpu.sh "$python"; }

figures() { "$python" benchmarks/figures.py --out "$OUT" && "$python" benchmarks/host_time.py --ranks "$gpus"; }

domains() {
  local size transport failed=0
  "$python" -m pytest tests/multi_gpu/test_between.py tests/multi_gpu/test_low_latency_between.py -q -p no:cacheprovider ||
    failed=1
  for size in $((gpus / 2)) 2; do
    for transport in loopback tcp nvshmem; do
      echo "== domains of $size GPUs, $transport"
      HYBRID_EP_NUM_RANKS_PER_DOMAIN=$size HYBRID_EP_TRANSPORT=$transport HYBRID_EP_TCP_ADDRESS=127.0.0.1 bench || failed=1
      HYBRID_EP_NUM_RANKS_PER_DOMAIN=$size HYBRID_EP_TRANSPORT=$transport HYBRID_EP_TCP_ADDRESS=127.0.0.1 \
        bench --mode low-latency || failed=1
    done
  done
  return "$failed"
}

balance() {
  local failed=0
  bench --mode balance --skew 0,6,10 || failed=1
  bench --mode balance --routing hot || failed=1
  "$python" benchmarks/weights.py --ranks "$gpus" || failed=1
  return "$failed"
}

record() { ACTIVE=10 OUT="$OUT/node" PYTHON="$python" ci/record_node.sh; }

HYBRID_EP_BUILD_CUDA=on ci/build_inplace.sh "$python" || exit 1
failed=0
for step in "${@:-tests figures domains balance record}"; do
  for one in $step; do
    case $one in tests | figures | domains | balance | record) ;; *) sed -n 2,10p "$0" >&2; exit 2 ;; esac
    echo "== $one on $gpus GPUs, $(git rev-parse --short HEAD 2>/dev/null)"
    begun=$SECONDS
    "$one" 2>&1 | tee "$OUT/$one.log"
    [ "${PIPESTATUS[0]}" = 0 ] || { failed=1; echo "== $one has failed"; }
    echo "== $one took $((SECONDS - begun)) s"
  done
done
exit "$failed"
