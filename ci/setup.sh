#!/usr/bin/env bash
# Makes the virtual environment and builds the extension in place: ci/setup.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
# The tools come first, from the list in pyproject.toml, so that the build below needs no isolation and no download.
"$venv/bin/python" - >"$venv/requirements.txt" <<'PY'
import pathlib, re
text = pathlib.Path("pyproject.toml").read_text()
for table in (r"^dependencies = \[(.*?)^\]", r"^dev = \[(.*?)^\]"):
    print("\n".join(re.findall(r'^    "([^"]+)"', re.search(table, text, re.S | re.M)[1], re.M)))
PY
pip install --requirement "$venv/requirements.txt"
PATH="$venv/bin:$PATH" pip install --no-build-isolation --no-deps --editable .
"$venv/bin/python" -c 'import hybrid_ep._C as c; print(f"built {c.built}; left out {c.left_out}")'
