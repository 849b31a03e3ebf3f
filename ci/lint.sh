#!/usr/bin/env bash
# Style and layering: ci/lint.sh BIN
set -euo pipefail
bin=$1
"$bin/ruff" check .
"$bin/ruff" format --check --quiet . || { echo "run: make format"; "$bin/ruff" format --diff . | head -40; exit 1; }
find benchmarks csrc tests -regex '.*\.\(c\|cpp\|cu\|cuh\|h\)' -print0 | xargs -0 "$bin/clang-format" --dry-run --Werror
"$bin/python" ci/layers.py --check
"$bin/python" ci/devices.py
"$bin/yamllint" --strict ansible .ansible-lint
if [ -x "$bin/ansible-lint" ]; then
  # Its own Ansible, from the same folder; nothing is fetched.
  PATH="$(cd "$bin" && pwd):$PATH" "$bin/ansible-lint" --offline -q ansible
else
  echo "ansible-lint is not installed (it needs Python 3.11): the playbooks were not checked" >&2
  [ "${CI:-}" != true ]
fi
