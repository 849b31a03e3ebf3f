#!/usr/bin/env bash
# Validates nodes by the playbooks: the doctor on each, test jobs on those that are fit, one report: ci/validate.sh BIN
#   HOSTS="a b c"     these nodes, by ssh, without root, of platform PROFILE (default: cpu); otherwise this machine
#   INVENTORY=FILE    the nodes of an Ansible inventory (ansible/inventories holds examples)
#   SIMULATE=1        four simulated nodes on this machine, one of them broken; needs root
#   OPTIONS="-e …"    further options of ansible-playbook, e.g. how hybrid-ep is called on the nodes
#   OUT=DIR           where results and report go (default: out/validate)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "$1" && pwd)
mkdir -p "${OUT:=out/validate}"
out=$(cd "$OUT" && pwd)
export PATH="$bin:$PATH"

if [ "${SIMULATE:-}" = 1 ]; then
  echo "This starts four simulated GPU nodes on this machine, breaks one, and validates them; nothing of it stays."
  exec "$bin/python" -m tests.sim.fleet "$out"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${INVENTORY:-}" ]; then
  inventory=$(realpath "$INVENTORY") nodes="the nodes of $INVENTORY"
else
  inventory=$work/hosts.yml nodes=${HOSTS:-this machine}
  # shellcheck disable=SC2086
  "$bin/python" - "$inventory" "${PROFILE:-}" ${HOSTS:-} <<'PY'
import json, pathlib, subprocess, sys
from hybrid_ep.doctor import load_profile
file, profile, *names = sys.argv[1:]
hosts = {name: {} for name in names}
if not names:
    hosts["localhost"] = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
if not names and not profile:
    done = subprocess.run(["hybrid-ep", "doctor", "--quick", "--json"], stdout=subprocess.PIPE, text=True)
    profile = json.loads(done.stdout)["profile"] if done.stdout else sys.exit("set PROFILE")
profile = profile or "cpu"
gpus = load_profile(profile)["gpu.count"]
small = {"jobs_ranks_per_node": 2, "jobs_experts": 16, "jobs_bench_options": ["--device", "cpu"]}
settings = {"doctor_profile": profile, **({"jobs_ranks_per_node": gpus} if gpus else small)}
pathlib.Path(file).write_text(json.dumps({"all": {"children": {"nodes": {"hosts": hosts, "vars": settings}}}}))
PY
fi
cat <<TEXT
This validates $nodes: the doctor on each node, then dispatch and combine on each that is fit, on pairs of them and on
all together, then a report. It changes nothing on a node, installs nothing and needs no root.
TEXT
# shellcheck disable=SC2086
run() { (cd ansible && ansible-playbook -i "$inventory" "$1" -e "preflight_results=$out" ${OPTIONS:-}); }
status=0
run validate.yml || status=$?
# A node that is not fit is an error, and the others are tested all the same; without new results there is nothing to test.
[ "$out/inventory.json" -nt "$work" ] || exit "$status"
run test_jobs.yml || status=$?
echo "The report: $out/report/report.html"
exit "$status"
