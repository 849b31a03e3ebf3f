#!/usr/bin/env bash
# Released programs that import deep_ep, run on 2 CPU ranks: ci/test_consumers.sh BIN
# Downloads wheels from PyPI into out/consumers. A package that cannot be had is named and left out;
# with CI=true that is an error.
set -euo pipefail
bin=$1
cd "$(dirname "$0")/.."
mkdir -p out/consumers
missing=()

fetch() {  # PACKAGE PATTERN…: unpacks the newest wheel for this Python, or the files of it that match
  local package=$1 wheels=out/consumers/wheels/$1
  shift
  [ -d "out/consumers/$package" ] && return 0
  if ! "$bin/python" -m pip download -q --no-deps --only-binary :all: -d "$wheels" "$package"; then
    missing+=("$package")
    return 0
  fi
  "$bin/python" - "$wheels" "out/consumers/$package" "$@" <<'PY'
import fnmatch, pathlib, sys, zipfile
wheels, out, *patterns = sys.argv[1:]
wheel = max(pathlib.Path(wheels).glob("*.whl"), key=lambda path: path.stat().st_mtime)
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if not patterns or any(fnmatch.fnmatch(n, p) for p in patterns)]
    archive.extractall(out, names)
print(f"{wheel.name}: {len(names)} files")
PY
}

fetch megatron-core
fetch nemo-automodel 'nemo_automodel/components/moe/megatron/*'
fetch sglang 'sglang/srt/layers/moe/token_dispatcher/*'
fetch torchtitan 'torchtitan/distributed/deepep/*'
fetch vllm 'vllm/model_executor/layers/fused_moe/*' 'vllm/utils/math_utils.py'  # of a wheel of some 340 MB
# With what it imports, but for torch.
[ -d out/consumers/transformers ] ||
  "$bin/python" -m pip install -q --target out/consumers/transformers transformers || missing+=(transformers)
rm -rf out/consumers/wheels
if [ ${#missing[@]} -gt 0 ]; then
  echo "not to be had from PyPI: ${missing[*]}" >&2
  [ "${CI:-}" != true ] || exit 1
fi
"$bin/pytest" -q -rs --timeout 300 tests/consumers
