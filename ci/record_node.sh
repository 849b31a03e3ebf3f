#!/usr/bin/env bash
# Records a real GPU node: OUT=FOLDER ci/record_node.sh; with ACTIVE=SECONDS also measures its GPUs, with a burn so long
#
# Builds the extension beside the sources (no CUDA kernels), runs the doctor and the topology command, and leaves in $OUT:
# doctor.{json,txt,xml}, topology.{json,txt,svg}, recording.json (everything that was read; replayable, below 1 MB) and
# build.log; with ACTIVE also active.{json,txt}, for which PYTHON has torch. Needs python3 with setuptools, pybind11,
# click, rich, pyyaml, jsonschema and nvidia-ml-py, plus cmake and ninja; where a package is missing, all wheels of
# $WHEELS (default .whl) are installed, without a network. The exit status says whether the record is complete, not
# whether the node is healthy.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?folder for the results}"
python=${PYTHON:-python3} wheels=${WHEELS:-.whl}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"
export PYTHONPATH=$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}
# A file of wheels cannot be imported where a wheel holds a compiled module, so they are installed into a folder.
"$python" -c "import click, jsonschema, pybind11, pynvml, rich, yaml" 2>/dev/null ||
  "$python" -m pip install --quiet --target "$work/site" --no-index --no-deps "$wheels"/*.whl

HYBRID_EP_BUILD_CUDA=off ci/build_inplace.sh "$python" >"$OUT/build.log" 2>&1 || { tail -n 20 "$OUT/build.log"; exit 1; }
grep '^hybrid_ep .*: built' "$OUT/build.log"

hybrid_ep() { "$python" -c 'from hybrid_ep.cli import main; main(prog_name="hybrid-ep")' "$@"; }
export COLUMNS=160
hybrid_ep topology --svg "$OUT/topology.svg" | tee "$OUT/topology.txt"
hybrid_ep topology --json >"$OUT/topology.json"
status=0
hybrid_ep doctor --json --junit "$OUT/doctor.xml" --record "$OUT/recording.json" >"$OUT/doctor.json" || status=$?
hybrid_ep doctor >"$OUT/doctor.txt" || true
cat "$OUT/doctor.txt"
if [ -n "${ACTIVE:-}" ]; then
  started=$SECONDS
  hybrid_ep doctor --group gpu --group nvlink --active --burn-seconds "$ACTIVE" --json >"$OUT/active.json" || true
  "$python" - "$OUT/active.json" <<'END' | tee "$OUT/active.txt"
import json, sys

for result in json.load(open(sys.argv[1]))["results"]:
    if result["group"] == "active" or result["status"] != "pass":
        print(f"{result['status']:8}{result['id']:24}{result['seen']}")
END
  echo "active checks: $((SECONDS - started)) s"
fi
echo "doctor's exit status: $status; recording: $(stat -c %s "$OUT/recording.json") bytes"
[ "$status" -le 2 ] && [ -s "$OUT/recording.json" ] && [ -s "$OUT/topology.svg" ]
