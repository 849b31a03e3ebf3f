#!/usr/bin/env bash
# Everything that this machine can test, fast things first: ci/test.sh BIN
# With CI=true a missing prerequisite is an error and not a skip (GPUs excepted).
set -euo pipefail
bin=$1
ci/lint.sh "$bin"
"$bin/mypy"
exec "$bin/pytest" --durations=15 tests
