#!/usr/bin/env bash
# Makes the virtual environment and installs this folder in it: ci/setup.sh PYTHON VENV [demo|dev]
#   demo  what `make demo` needs: torch, the pictures' matplotlib, and the extension without kernels for GPUs
#   dev   also the developers' tools, and the kernels where nvcc is found
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 group=${3:-dev}
missing=() packages=()
want() { missing+=("$1") packages+=("$2"); }
"$python" -c 'import ensurepip, venv' 2>/dev/null || want "Python's venv" python3-venv
header='import os, sysconfig as s; raise SystemExit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))'
"$python" -c "$header" || want Python.h python3-dev
command -v "${CXX:-c++}" >/dev/null || want "a C++ compiler" g++
command -v "${CC:-cc}" >/dev/null || want "a C compiler" gcc
if [ ${#missing[@]} -gt 0 ]; then
  printf -v list '%s, ' "${missing[@]}"
  echo "missing: ${list%, }. On Debian and Ubuntu: apt-get install ${packages[*]}" >&2
  exit 1
fi
# The programs of an environment name the folder that it was made in, so one that was moved or copied is made again.
if [ -e "$venv/bin/activate" ] && ! grep -qF "$(realpath "$venv")" "$venv/bin/activate"; then
  echo "$venv was made in another folder, and is made again"
  rm -rf "$venv"
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
PATH="$(cd "$venv" && pwd)/bin:$PATH"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off
pip() { ci/progress.sh "$1" "$2" "$venv/bin/python" -m pip "${@:3}"; }
pip pip "the first pip that reads dependency groups" install 'pip>=25.1'
# The extension is built while the other packages are installed. They come before this one, which then needs no
# isolation and no other torch.
pip build-tools "cmake, ninja, pybind11 (usually 10 s)" install --group build
case $group in
  demo)
    export HYBRID_EP_BUILD_CUDA=off HYBRID_EP_BUILD_NVML=off
    usually="torch and matplotlib, some 200 MB (usually 1 to 2 minutes)"
    ;;
  dev) usually="torch and the developers' tools, some 600 MB (usually 2 to 4 minutes)" ;;
  *) sed -n 2p "$0" >&2; exit 2 ;;
esac
[ "${CI:-}" != true ] || [ "$group" = demo ] || ci/nvcc.sh "$venv"
ci/build_inplace.sh "$venv/bin/python" &
build=$!
pip packages "$usually" install --group "$group"
wait "$build"
pip hybrid_ep "this folder, editable (usually 15 s)" install --no-build-isolation --editable .
[ "$group" = demo ] || ci/helm.sh "$venv"
