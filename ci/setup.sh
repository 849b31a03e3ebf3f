#!/usr/bin/env bash
# Makes the virtual environment with the developers' tools and installs this folder in it: ci/setup.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
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
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
ci=$(dirname "$0")
PATH="$(cd "$venv" && pwd)/bin:$PATH"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install 'pip>=25.1' # the first that reads dependency groups
# The extensions are built while the other tools are installed. The tools come before the package, which then needs no
# isolation and no other torch.
pip install --group build
[ "${CI:-}" != true ] || "$ci/nvcc.sh" "$venv"
"$ci/build_inplace.sh" "$venv/bin/python" &
build=$!
pip install --group dev
wait "$build"
pip install --no-build-isolation --editable .
"$ci/helm.sh" "$venv"
