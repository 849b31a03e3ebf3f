#!/usr/bin/env bash
# Style and types, then tests: ci/test.sh BIN [fast|cluster|all]
#   fast     the unit tests
#   (none)   every test that this machine can run, but for those marked cluster or slow
#   cluster  those marked cluster and not slow; neither style nor types
#   all      every test
# With CI=true a missing prerequisite is an error and not a skip (GPUs excepted).
set -euo pipefail
bin=$1 which=${2:-most} workers=4
case $which in
  fast) tests=(-m "not slow" tests/unit) ;;
  most) tests=(-m "not cluster and not slow" tests) ;;
  cluster) tests=(-m "cluster and not slow" tests) workers=3 ;;
  all) tests=(tests) ;;
  *) sed -n 2p "$0" >&2; exit 2 ;;
esac
# Once here, and not by every process of the tests, least of all by an emulated machine's.
"$bin/python" -m compileall -q hybrid_ep tests
if [ "$which" != cluster ]; then
  echo "types and style (usually 1 to 2 minutes)"
  "$bin/mypy" & types=$! status=0
  ci/lint.sh "$bin" || status=$?
  wait "$types" || status=$?
  [ "$status" = 0 ] || exit "$status"
fi
declare -A usually=([fast]="2 to 3 minutes" [most]="25 minutes" [cluster]="12 minutes" [all]="hours")
echo "tests (usually ${usually[$which]} on two cores)"
# Workers get groups in this order: the files that take longest (tests/conftest.py), then by name. On two cores there are
# four workers, because many tests wait: for a timeout, for a rank that does not come. Simulated hosts wait less.
exec "$bin/pytest" -n "$workers" --dist loadgroup --no-loadscope-reorder --durations=15 "${tests[@]}"
