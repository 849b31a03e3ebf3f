"""Runs an Indexed Job, or a group of a LeaderWorkerSet, on simulated hosts: all Pods at once, each told its index.

python -m tests.sim.indexed_job k8s/overlays/cpu-torchrun
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hybrid_ep.cluster.kubernetes.manifest import Manifest, load
from hybrid_ep.errors import ConfigError
from tests.sim.hosts import Cluster
from tests.sim.pods import NAMESPACE, Kubelet, Pod, checkout_image

_POLL_S = 0.1


def run_indexed_job(manifests: list[Manifest], cluster: Cluster) -> list[Pod]:
    """Runs the one Job among the manifests until its Pods have succeeded, one has failed, or its deadline has come.

    Returns:
        The Pods by index; those that had to be ended have the phase ``Deleted``.

    Raises:
        ConfigError: not one Indexed Job without retries.
    """
    jobs = [manifest.content for manifest in manifests if manifest.kind == "Job"]
    if len(jobs) != 1 or jobs[0]["spec"].get("completionMode") != "Indexed" or jobs[0]["spec"].get("backoffLimit"):
        raise ConfigError(f"there are {len(jobs)} Jobs; allowed here: 1, Indexed, with backoffLimit 0")
    name, spec = jobs[0]["metadata"]["name"], jobs[0]["spec"]
    kubelet = Kubelet(cluster, manifests, spec["template"]["spec"]["subdomain"])
    names = [f"{name}-{i}" for i in range(spec["completions"])]
    for pod_name in names:
        kubelet.reserve_name(pod_name)
    pods = []
    for i, pod_name in enumerate(names):
        pods.append(kubelet.start(pod_name, spec["template"], {"JOB_COMPLETION_INDEX": str(i)}))
    deadline = time.monotonic() + spec.get("activeDeadlineSeconds", float("inf"))
    while {pod.phase for pod in pods} in ({"Running"}, {"Running", "Succeeded"}) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for pod in pods:
            pod.poll()
    for pod in pods:
        if pod.phase == "Running":
            pod.delete()
    return pods


def start_group(manifests: list[Manifest], cluster: Cluster) -> list[Pod]:
    """Starts the Pods of one replica of the one LeaderWorkerSet among the manifests, the leader first.

    Raises:
        ConfigError: not one LeaderWorkerSet whose Pods start together.
    """
    sets = [manifest.content for manifest in manifests if manifest.kind == "LeaderWorkerSet"]
    if len(sets) != 1 or sets[0]["spec"].get("startupPolicy") != "LeaderCreated":
        raise ConfigError(f"there are {len(sets)} LeaderWorkerSets; allowed here: 1, with startupPolicy LeaderCreated")
    name, template = sets[0]["metadata"]["name"], sets[0]["spec"]["leaderWorkerTemplate"]
    kubelet = Kubelet(cluster, manifests, name)
    # As the controller names them: the leader by its replica, its workers by their place in the group.
    names = [f"{name}-0", *(f"{name}-0-{i}" for i in range(1, template["size"]))]
    for pod_name in names:
        kubelet.reserve_name(pod_name)
    given = {"LWS_LEADER_ADDRESS": f"{names[0]}.{name}.{NAMESPACE}", "LWS_GROUP_SIZE": str(len(names))}
    return [
        kubelet.start(pod_name, template["workerTemplate"], {**given, "LWS_WORKER_INDEX": str(i)})
        for i, pod_name in enumerate(names)
    ]


def main() -> int:
    """Runs the Job of an overlay or a file and prints what its Pods said."""
    with Cluster(checkout_image()) as cluster:
        pods = run_indexed_job(load(Path(sys.argv[1])), cluster)
    for pod in pods:
        print(f"{pod.name}: {pod.phase}\n{pod.log}")
    return 0 if all(pod.phase == "Succeeded" for pod in pods) else 1


if __name__ == "__main__":
    sys.exit(main())
