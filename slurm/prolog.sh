#!/usr/bin/env bash
# An example of Slurm's Prolog: asks the node doctor before a job starts, and drains the node where a fault is confirmed.
#
#   slurm.conf:  Prolog=/etc/slurm/prolog.sh  PrologFlags=Alloc
#
# Slurm runs it as root on each node of a job. Only a confirmed fault (exit status 1) drains the node: a doctor that is
# missing, takes too long or cannot read something lets the job start, and says so in the system log.
# The image `doctor` is enough: HYBRID_EP='podman run --rm --pull=never --network=host --device=nvidia.com/gpu=all
# hybrid-ep:0.1.0-doctor hybrid-ep'.
# /etc/default/hybrid-ep can set HYBRID_EP (how the doctor is called), DOCTOR_OPTIONS, DOCTOR_LIMIT_S, and PATH: Slurm sets
# no search path for a Prolog, and scontrol must be found.
set -u
# shellcheck source=/dev/null
[ ! -r /etc/default/hybrid-ep ] || . /etc/default/hybrid-ep
said=$(timeout "${DOCTOR_LIMIT_S:-60}" ${HYBRID_EP:-hybrid-ep} doctor --quick --json ${DOCTOR_OPTIONS:-} 2>&1)
code=$?
[ "$code" -ne 0 ] || exit 0
# The ids of the checks that failed: of Slurm's reason one line is shown.
failed=$(awk -F'"' '$2 == "id" { id = $4 } $2 == "status" { status = $4 }
  $2 == "severity" && status == "fail" && $4 == "error" { printf "%s ", id }' <<<"$said")
if [ "$code" -eq 1 ]; then
  scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="hybrid-ep doctor: ${failed:-a fault}"
  exit 1
fi
logger -t hybrid-ep "doctor ended with $code on $SLURMD_NODENAME: $(tail -1 <<<"$said")" 2>/dev/null || true
exit 0
