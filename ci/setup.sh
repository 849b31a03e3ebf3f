#!/usr/bin/env bash
# Makes the virtual environment and builds the extension in place: ci/setup.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install 'pip>=25.1' # the first that reads dependency groups
# The tools come first, so that the build below needs no isolation and no other torch.
pip install --group dev
PATH="$venv/bin:$PATH" pip install --no-build-isolation --editable .
"$venv/bin/python" -c 'import hybrid_ep._C as c; print(f"built {c.built}; left out {c.left_out}")'
