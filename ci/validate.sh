#!/usr/bin/env bash
# Validates nodes by the playbooks: the doctor on each, test jobs on those that are fit, one report: ci/validate.sh BIN
#   HOSTS="a b c"     these nodes, by ssh, without root; otherwise this machine
#   PROFILE=NAME      what HOSTS are, as the doctor calls it, or a YAML file; of this machine the doctor proposes one
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
from hybrid_ep.cluster.doctor.profile import is_profile_file, load_profile, shipped_profiles
from hybrid_ep.errors import ConfigError
file, profile, *names = sys.argv[1:]
allowed = f"set PROFILE; allowed: {', '.join(shipped_profiles())}, or a YAML file"
if names:
    hosts, report = {name: {} for name in names}, None
    profile or sys.exit(f"HOSTS without PROFILE do not say what they are: {allowed}")
else:
    hosts = {"localhost": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}}
    done = subprocess.run(["hybrid-ep", "doctor", "--quick", "--json"], stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout) if done.stdout else sys.exit(f"the doctor gave no report: {allowed}")
    profile = profile or report["profile"]
try:
    gpus = load_profile(profile)["gpu.count"]
except ConfigError as error:
    sys.exit(str(error))
if gpus == "any":
    gpus = len(report["facts"]["gpus"]) if report else sys.exit(
        f"profile {profile} leaves open how many GPUs a node has: set PROFILE to a YAML file that extends it by gpu.count")
profile = str(pathlib.Path(profile).resolve()) if is_profile_file(profile) else profile
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
