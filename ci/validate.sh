#!/usr/bin/env bash
# Validates nodes by the playbooks: the doctor on each, test jobs on those that are fit, one report: ci/validate.sh BIN
#   HOSTS="a b c"     these nodes, by ssh, without root; PROFILE says what they are (default: cpu), RANKS how many each
#   INVENTORY=FILE    the nodes of an Ansible inventory (ansible/inventories holds examples)
#   SIMULATE=1        four simulated nodes on this machine, one of them broken; needs root
#   OUT=DIR           where results and report go (default: out/validate)
# Without any of them: this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "$1" && pwd)
mkdir -p "${OUT:=out/validate}"
out=$(cd "$OUT" && pwd)
export PATH="$bin:$PATH"

if [ "${SIMULATE:-}" = 1 ]; then
  echo "This starts four simulated GPU nodes on this machine, breaks one, and validates them; nothing of it stays."
  exec "$bin/python" -m tests.sim.fleet "$out"
elif [ -n "${INVENTORY:-}" ]; then
  inventory=$(realpath "$INVENTORY") nodes="the nodes of $INVENTORY"
elif [ -n "${HOSTS:-}" ]; then
  inventory=$out/hosts.yml nodes="$HOSTS (profile ${PROFILE:=cpu}, ${RANKS:=2} ranks each)"
  "$bin/python" - "$inventory" "$PROFILE" "$RANKS" $HOSTS <<'PY'
import json, sys
file, profile, ranks, *hosts = sys.argv[1:]
small = {"jobs_experts": 16, "jobs_bench_options": ["--device", "cpu"]} if profile == "cpu" else {}
settings = {"doctor_profile": profile, "jobs_ranks_per_node": int(ranks), **small}
group = {"hosts": {host: {} for host in hosts}, "vars": settings}
open(file, "w").write(json.dumps({"all": {"children": {profile.replace("-", "_"): group}}}))
PY
else
  inventory=$PWD/ansible/inventories/localhost.yml nodes="this machine"
fi
cat <<TEXT
This validates $nodes: it runs the doctor on each node, then dispatch and combine on each that is fit, on pairs of
them and on all together, and writes a report. It changes nothing on a node, installs nothing and needs no root.
TEXT
run() { (cd ansible && ansible-playbook -i "$inventory" "$1" -e "preflight_results=$out"); }
# A node that is not fit ends the first playbook with an error; the others are tested all the same.
status=0
run validate.yml || status=$?
[ -f "$out/inventory.json" ] || exit "$status"
run test_jobs.yml || status=$?
echo "The report: $out/report/report.html"
exit "$status"
