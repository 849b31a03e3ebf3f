#!/usr/bin/env bash
# Runs a command whose output goes to a log, and says what it does: ci/progress.sh NAME WHAT COMMAND…
# WHAT and how long it usually takes come first, then every ten seconds the last step that the log names, of pip or Ninja. If the
# command fails, the end of the log is shown. The log is build/log/NAME.log.
set -euo pipefail
name=$1 what=$2 log=build/log/$1.log begun=$SECONDS said=
shift 2
mkdir -p build/log
echo "$name: $what"
"$@" >"$log" 2>&1 &
command=$!
trap 'kill "$command" 2>/dev/null; exit 130' INT TERM
while kill -0 "$command" 2>/dev/null; do
  sleep 0.5
  (((SECONDS - begun) % 10 == 9)) || continue
  step=$(tr '\r' '\n' <"$log" | grep -oE '^ *(Downloading [^ ]+ \([^)]*\)|Collecting [^ ]+|Installing collected packages|Building [^ ]+ for [^ ]+|\[[0-9]+/[0-9]+\] [^ ]+ [^ ]+).*' |
    tail -n 1 | cut -c -90 || true)
  [ -z "$step" ] || [ "$step" = "$said" ] || echo "$name: ${step#"${step%%[! ]*}"}"
  said=$step
done
status=0
wait "$command" || status=$?
if [ "$status" != 0 ]; then
  tail -n 40 "$log" >&2
  echo "$name: failed with status $status; all of its output is in $log" >&2
else
  echo "$name: done in $((SECONDS - begun)) s"
fi
exit "$status"
