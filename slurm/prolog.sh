#!/usr/bin/env bash
# Examples of Slurm's Prolog, Epilog and resume script in one file: the node doctor before and after a job. A node with a
# confirmed fault is drained, and a drained node that passes again is resumed.
#
#   slurm.conf:  Prolog=/etc/slurm/prolog.sh  Epilog=/etc/slurm/prolog.sh  PrologFlags=Alloc
#                HealthCheckProgram=/etc/slurm/prolog.sh  HealthCheckInterval=600  HealthCheckNodeState=CYCLE,ANY
#
# Slurm runs it as root on each node and says in SLURM_SCRIPT_CONTEXT what for; HealthCheckProgram has no such variable.
# Only a confirmed fault (exit status 1) drains the node: a doctor that is missing, takes too long or cannot read something
# lets the job start, and says so in the system log. Only nodes that this script has drained are resumed by it.
# The preflight with traffic is a step of the job, as Prolog knows one node alone: srun --ntasks-per-node=1 hybrid-ep preflight.
# The image `doctor` is enough: HYBRID_EP='podman run --rm --pull=never --network=host --device=nvidia.com/gpu=all
# hybrid-ep:0.1.0-doctor hybrid-ep'.
# /etc/default/hybrid-ep can set HYBRID_EP (how the doctor is called), DOCTOR_OPTIONS, DOCTOR_LIMIT_S, and PATH: Slurm sets
# no search path for a Prolog, and scontrol must be found.
set -u
# shellcheck source=/dev/null
[ ! -r /etc/default/hybrid-ep ] || . /etc/default/hybrid-ep
node=${SLURMD_NODENAME:-$(hostname -s)}
ours="hybrid-ep doctor:"
if [ -z "${SLURM_SCRIPT_CONTEXT:-}" ]; then # the resume script: for nodes that this script has drained
  scontrol show node "$node" 2>/dev/null | grep -q "Reason=$ours" || exit 0
fi
said=$(timeout "${DOCTOR_LIMIT_S:-60}" ${HYBRID_EP:-hybrid-ep} doctor --quick --json ${DOCTOR_OPTIONS:-} 2>&1)
code=$?
if [ "$code" -eq 0 ]; then
  [ -n "${SLURM_SCRIPT_CONTEXT:-}" ] || scontrol update NodeName="$node" State=RESUME
  exit 0
fi
# The ids of the checks that failed: of Slurm's reason one line is shown.
failed=$(awk -F'"' '$2 == "id" { id = $4 } $2 == "status" { status = $4 }
  $2 == "severity" && status == "fail" && $4 == "error" { printf "%s ", id }' <<<"$said")
if [ "$code" -eq 1 ]; then
  scontrol update NodeName="$node" State=DRAIN Reason="$ours ${failed:-a fault}"
  # A Prolog that fails has the job queued again; after the job, and between jobs, there is none.
  case ${SLURM_SCRIPT_CONTEXT:-} in prolog*) exit 1 ;; *) exit 0 ;; esac
fi
logger -t hybrid-ep "doctor ended with $code on $node: $(tail -1 <<<"$said")" 2>/dev/null || true
exit 0
