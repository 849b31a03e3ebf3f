#!/usr/bin/env bash
# Released programs that import deep_ep, run on 2 CPU ranks: ci/test_consumers.sh BIN
# Downloads releases from PyPI into out/consumers. A package that cannot be had is named and left out;
# with CI=true that is an error.
set -euo pipefail
bin=$1
cd "$(dirname "$0")/.."
mkdir -p out/consumers
missing=()

fetch() {  # PACKAGE PATTERN…: unpacks the newest release for this Python, or the files of it that match
  local package=$1 archives=out/consumers/archives/$1 kind=(--only-binary :all:)
  shift
  [ -d "out/consumers/$package" ] && return 0
  [ "$package" != deepspeed ] || kind=(--no-binary deepspeed --no-build-isolation)  # which has no wheels
  if ! "$bin/python" -m pip download -q --no-deps "${kind[@]}" -d "$archives" "$package"; then
    missing+=("$package")
    return 0
  fi
  "$bin/python" - "$archives" "out/consumers/$package" "$@" <<'PY'
import fnmatch, pathlib, sys, tarfile, zipfile
archives, out, *patterns = sys.argv[1:]
file = max(pathlib.Path(archives).iterdir(), key=lambda path: path.stat().st_mtime)
is_wanted = lambda name: not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
if file.suffix == ".whl":
    with zipfile.ZipFile(file) as archive:
        found = [name for name in archive.namelist() if is_wanted(name)]
        archive.extractall(out, found)
else:
    with tarfile.open(file) as archive:
        found = [one.replace(name=one.name.partition("/")[2]) for one in archive]
        found = [one for one in found if one.name and is_wanted(one.name)]
        archive.extractall(out, found, filter="data")
print(f"{file.name}: {len(found)} files")
PY
}

fetch deepspeed 'deepspeed/module_inject/auto_ep_comm.py'
fetch lmdeploy 'lmdeploy/pytorch/*'
fetch megatron-core
fetch nemo-automodel 'nemo_automodel/components/moe/megatron/*'
fetch sglang 'sglang/srt/layers/moe/token_dispatcher/*'
fetch torchtitan 'torchtitan/distributed/deepep/*'
fetch vllm 'vllm/model_executor/layers/fused_moe/*' 'vllm/utils/math_utils.py'  # of a wheel of some 340 MB
# With what it imports, but for torch.
[ -d out/consumers/transformers ] ||
  "$bin/python" -m pip install -q --target out/consumers/transformers transformers || missing+=(transformers)
rm -rf out/consumers/archives
if [ ${#missing[@]} -gt 0 ]; then
  echo "not to be had from PyPI: ${missing[*]}" >&2
  [ "${CI:-}" != true ] || exit 1
fi
"$bin/pytest" -q -rs --timeout 300 tests/consumers
